"""The run lock: one run at a time, while the session is open, in its own loop; and how a run is ended from outside."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from aiohooks._aio.cancel import current_task, running_loop, shielded
from aiohooks._aio.clock import current_clock
from aiohooks._aio.observers import observing
from aiohooks._aio.overlap import RunWaits, Wait, limited
from aiohooks._aio.run_scope import RunScope, begin_run, current_run, current_scope
from aiohooks.errors import NestedRunError, RecoveryExhaustedError, SessionClosedError, StopRequestedError, WrongLoopError
from aiohooks.graph.graph import Graph
from aiohooks.stores.publishers import Publisher

if TYPE_CHECKING:
    from aiohooks.session.recovery import SessionSupervisor

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")

DEFAULT_YIELD_SECS = 0.005
"""After how long without a turn the event loop gets one before the next run, where the user does not say."""
_TURN_PASSES = 3
"""The passes of the loop that make one turn: it finds an event, calls the callback, and the task that waited continues."""


class FifoLock:
    """A lock that waiters get in the order in which they came.

    Unlike with `asyncio.Lock`, taking it without waiting costs two attribute accesses (`taken`), and the number of waiters
    is known.
    """

    __slots__ = ("_waiters", "taken")

    def __init__(self) -> None:
        self.taken: bool = False
        """Whether the lock is held; set it to take a free lock."""
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for the lock, and hold it then."""
        if not self.taken:
            self.taken = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the lock came together with the cancellation: pass it on
            elif waiter in self._waiters:  # or passed over already
                self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """Pass the lock on to the next waiter, or free it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiters)


class RunLock:
    """The lock that every run of one monitored session holds, and the session's state, on which taking it depends."""

    def __init__(self, supervisor: SessionSupervisor, yield_secs: float | None = None) -> None:
        self._supervisor = supervisor
        self.graph: Graph = supervisor.creator.graph
        """The default graph of what is part of a run."""
        self._yield_secs = yield_secs or math.inf
        self.now: Callable[[], float] = time.monotonic
        """The time, for `turn_due`."""
        self.turn_due: float = math.inf
        """From when on `give_turn` is to be called before a run."""
        self._loop_turned = True
        self.state: str = "new"
        """"new", "opening", "open", "closing" or "closed"."""
        self.since: float | None = None
        """When the state was set."""
        self.owner: asyncio.Task[Any] | None = None
        """The task that entered the session."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: int = 0
        """The loop's thread: cheaper to compare than the running loop."""
        self.turns: FifoLock = FifoLock()
        self.waits: RunWaits = RunWaits()
        """What the run in progress awaits."""
        self.publisher: Publisher | None = None
        """The session's registration as a publisher of steps."""
        self.runs: int = 0
        """The number of runs begun."""
        self.runner: asyncio.Task[Any] | None = None
        """The task of the run in progress."""

    def set_state(self, state: str) -> None:
        """Set the state, and the time of the change."""
        self.state = state
        self.since = current_clock().now()
        if state == "opening":
            self.owner = current_task()
        elif state == "closed":
            self.owner = None

    def watch_loop(self) -> None:
        """Notice whether the loop has a turn from now on; while the session is paused, a turn is due before every run."""
        if self._supervisor.root.pause_reason is not None:
            self.turn_due = -math.inf
        elif self._yield_secs < math.inf:
            self._loop_turned = False
            self.turn_due = self.now() + self._yield_secs
            asyncio.get_running_loop().call_soon(self._note_turn)
        else:
            self.turn_due = math.inf

    def _note_turn(self) -> None:
        self._loop_turned = True

    async def give_turn(self) -> None:
        """Wait for the end of a pause, and let the loop have a turn if it had none since `watch_loop`.

        Call it before a run begins: at its end a cancellation that arrives here would lose the result of a committed run.

        Raises:
            StopRequestedError: a stop was requested during a pause, or the session was closed meanwhile.
            BaseException: the error of a background task that failed during a pause.
        """
        if self.state != "open" or get_ident() != self.thread or asyncio.get_running_loop() is not self.loop:
            return  # `acquire` says what is wrong
        if not self._loop_turned:
            for _ in range(_TURN_PASSES):
                await asyncio.sleep(0)
        await self._wait_for_resume()
        if self.state != "open":
            raise StopRequestedError("the session has ended")
        self.watch_loop()

    async def _wait_for_resume(self) -> None:
        supervisor = self._supervisor
        while supervisor.root.pause_reason is not None:
            try:
                await supervisor.root.wait_for_resume()
            except Exception as error:
                if not supervisor.recovers(error):  # the next run does
                    raise

    async def wait(self) -> RunScope:
        """Wait behind the runs of other tasks, and acquire the lock; call only while it is taken."""
        self.check_caller("run")
        self._check_usable()
        with observing(self._supervisor.root.observers, "wait", "turn to run"):
            await self.turns.wait()
        try:
            await self._wait_for_resume()
            if self.state == "closing":
                raise StopRequestedError("the session has ended")
            return self.acquire()
        except BaseException:
            self.turns.release()
            raise

    async def wait_between_runs(self, wait: Coroutine[Any, Any, T]) -> T:
        """Await a wait in which the session makes no steps: whoever waits for these may have to do without."""
        publisher, run = self.publisher, current_run()
        is_own = current_task() is self.owner or (run is not None and run.session is self)
        if publisher is None or not is_own:
            return await wait
        publisher.hold_up()
        try:
            return await wait
        finally:
            publisher.held_up -= 1

    def acquire(self) -> RunScope:
        """Begin a run: the lock is free, or has been waited for.

        Raises:
            StopRequestedError: a stop was requested.
            SessionClosedError: the session is not open.
            RecoveryExhaustedError: recovery gave up before.
            WrongLoopError: this is not the session's loop.
        """
        supervisor = self._supervisor
        if self.state != "open" or get_ident() != self.thread or supervisor.recovery_error or supervisor.root.stopped:
            self._check_usable()
        task = asyncio.current_task(self.loop)
        if task is None:  # another loop of the same thread
            self.check_entered()
            task = current_task()
        self.turns.taken = True
        self.runner = task
        self.waits.began = None
        self.runs += 1
        scope = self.waits.scope = begin_run(self, self.publisher)
        scope.runner = id(task)
        return scope

    def release(self, scope: RunScope) -> None:
        """End the run; the next waiter begins."""
        self.runner = None
        if self.waits.cause is not None or self.waits.own_contexts:
            self.waits.reset()
        scope.active = False
        current_scope.set(scope.outer)
        self.turns.release()
        if scope.observers:
            scope.end_attempt()

    def interrupt(self, cause: BaseException) -> None:
        """End the run in progress with `cause`."""
        if self.runner is not None:
            self.waits.end(cause)

    def background_failed(self, error: BaseException) -> None:
        """End the run in progress with the failure of a task, unless it recovers from that already: it has no session then."""
        supervisor = self._supervisor
        if error is not supervisor.recovering_from and (supervisor.session is not None or supervisor.root.errors):
            self.interrupt(error)

    def until(self, awaitable: Awaitable[T]) -> Awaitable[T]:
        """Return a wait of code in a run for something, which a stop of the session ends too; at its end it is the last one."""
        if self.state != "open":
            return awaitable
        return self._supervisor.coord.until_in(Wait[T]("a wait in a run"), awaitable)

    async def close(self, immediately: bool, grace_secs: float) -> None:
        """Wait for the run of another task; it may finish within the grace period, or is interrupted `immediately`."""
        if not self.turns.taken:
            return

        def interrupt() -> None:
            self.interrupt(SessionClosedError("the session was closed during this run"))

        label = self._supervisor.root.label

        async def wait() -> None:
            for last_time in (False, True):
                if not self.turns.taken:  # it ended before this began
                    return
                try:
                    await limited(self.turns.wait(), grace_secs, "the last run")
                    return
                except TimeoutError:
                    if last_time:
                        _logger.warning("%s: run still active %s s after its cancellation; closing anyway", label, grace_secs)
                    interrupt()

        if immediately:
            interrupt()
        await shielded(wait(), grace_secs=grace_secs, what=f"the wait for the last run of {label}", on_cancel=interrupt)

    def check_entered(self) -> None:
        """Raise if the session was never entered, or belongs to another loop."""
        if self.loop is None:
            raise SessionClosedError("this session was not entered; use `async with`")
        if running_loop() is not self.loop:
            raise WrongLoopError("this session belongs to another event loop; use it where it was entered")

    def check_closer(self) -> None:
        """Raise if the end of the session would wait for the caller."""
        self.check_caller("aclose")
        task = current_task()
        if self._supervisor.root.owns(task) or self._supervisor.coord.owns(task):
            raise NestedRunError(
                f"aclose was called from the background task {task.get_name()!r} of the same session, which would deadlock; "
                "use request_stop to end the session"
            )

    def check_caller(self, what: str) -> None:
        """Raise if the caller is itself part of a run in progress of this session, or of its end."""
        scope = current_run()
        while scope is not None:
            if scope.session is self and scope.active:
                raise NestedRunError(
                    f"{what} was called from inside {'the end' if self.state == 'closing' else 'a run'} of the same session, "
                    "which would deadlock; "
                    "in a hook use run_context.session, and request_stop to end"
                )
            scope = scope.outer

    def _check_usable(self) -> None:
        """Raise if no run can begin now."""
        self.check_entered()
        supervisor = self._supervisor
        task = current_task()
        if self.state == "closing" and (supervisor.root.owns(task) or supervisor.coord.owns(task)):
            raise StopRequestedError("the session has ended")
        if self.state in ("opening", "closing"):
            raise SessionClosedError(f"this session is {self.state}; a hook runs the raw session that it was given")
        if self.state != "open":
            raise SessionClosedError(f"this session is {self.state}; make a new one")
        if supervisor.recovery_error is not None:
            raise RecoveryExhaustedError(
                f"recovery has given up on {supervisor.recovery_error!r}; leave the session's block"
            ) from supervisor.recovery_error
        supervisor.root.raise_requested_exception()
        if supervisor.root.should_stop():
            raise StopRequestedError(supervisor.root.stop_reason)
