"""The run lock: one run at a time, while the session is open, in its own loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from threading import get_ident
from typing import Any, TypeVar

from aiohooks._core.calls import limited
from aiohooks._core.cancel import current_task, running_loop, shielded
from aiohooks._core.observers import observing
from aiohooks._core.reports import Awaited, Waiting, logger
from aiohooks._core.scope import RunScope, begin_run, current_run, current_scope
from aiohooks.errors import (
    NestedRunError,
    RecoveryExhaustedError,
    SessionClosedError,
    StopRequestedError,
    WrongLoopError,
)
from aiohooks.session._state import SessionState

T = TypeVar("T")

DEFAULT_YIELD_SECS = 0.005
"""After how long without a turn the event loop gets one before the next run, where the user does
not say.
"""
_TURN_PASSES = 3
"""The passes of the loop that make one turn: it finds an event, calls the callback, and the task
that waited continues.
"""


class FifoLock:
    """A lock that waiters get in the order in which they came.

    Unlike with `asyncio.Lock`, taking it without waiting costs two attribute accesses (`taken`),
    and the number of waiters is known.
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


class RunLock(Waiting):
    """The lock that every run of one monitored session holds; taking it depends on the session's
    state.
    """

    def __init__(self, state: SessionState, yield_secs: float | None) -> None:
        self._state = state
        self._yield_secs = yield_secs or math.inf
        self.now: Callable[[], float] = time.monotonic
        """The time, for `turn_due`."""
        self.turn_due: float = math.inf
        """From when on the loop is to have a turn before a run."""
        self._loop_turned = True
        self.thread: int = 0
        """The loop's thread: cheaper to compare than the running loop."""
        self.turns: FifoLock = FifoLock()
        state.on_pause, state.run_began = self.watch_loop, self._run_began

    def watch_loop(self) -> None:
        """Notice whether the loop has a turn from now on; while the session is paused, a turn is
        due before every run.

        A pause calls this from any thread, and then again in the loop.
        """
        self.turn_due = math.inf
        if self._state.pause_reason is not None:
            self.turn_due = -math.inf
        elif self._yield_secs < math.inf and get_ident() == self.thread:
            self._loop_turned = False
            self.turn_due = self.now() + self._yield_secs
            asyncio.get_running_loop().call_soon(self._note_turn)

    def _run_began(self) -> float | None:
        # Every run begins before `turn_due`, and sets it anew if that is later: it began within the
        # `yield_secs` before it.
        return (
            self.turn_due - self._yield_secs
            if self._state.runs and math.isfinite(self.turn_due)
            else None
        )

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> Awaited | None:
        if method == "_wait_for_resume":
            return Awaited("pause", "the end of the pause", self._state.pause_reason or "")
        if method == "wait" and self._state.pause_reason is None and self.turns.taken:
            return Awaited("turn", "its turn to run", by=lambda: [self._state.awaited()])
        return None

    def _note_turn(self) -> None:
        self._loop_turned = True

    async def give_turn(self) -> None:
        """Wait for the end of a pause, and let the loop have a turn if it had none since
        `watch_loop`.

        Call it before a run begins: at its end a cancellation that arrives here would lose the
        result of a committed run. It raises a stop that was requested meanwhile, and the error of a
        background task that failed during a pause.
        """
        state = self._state
        if (
            state.phase != "open"
            or get_ident() != self.thread
            or asyncio.get_running_loop() is not state.loop
        ):
            return  # `acquire` says what is wrong
        if not self._loop_turned:
            for _ in range(_TURN_PASSES):
                await asyncio.sleep(0)
        await self._wait_for_resume()
        if state.phase != "open":
            raise StopRequestedError("the session has ended")
        self.watch_loop()

    async def _wait_for_resume(self) -> None:
        while self._state.pause_reason is not None:
            try:
                await self._state.whole.wait_for_resume()
            except Exception as error:
                if not self._state.recovers(error):  # the next run does
                    raise

    async def wait(self) -> RunScope:
        """Begin a run that cannot begin now: let the loop have its turn, wait behind the runs of
        other tasks, and acquire.
        """
        if self.now() > self.turn_due:
            await self.give_turn()
        if not self.turns.taken:
            return self.acquire()
        self.check_caller("run")
        self._check_usable()
        with observing(self._state.observers, "wait", "turn to run"):
            await self.turns.wait()
        try:
            await self._wait_for_resume()
            if self._state.phase == "closing":
                raise StopRequestedError("the session has ended")
            return self.acquire()
        except BaseException:
            self.turns.release()
            raise

    def acquire(self) -> RunScope:
        """Begin a run: the lock is free, or has been waited for. Raises like `_check_usable`."""
        state = self._state
        if (
            state.phase != "open"
            or get_ident() != self.thread
            or state.recovery_error
            or state.stopped
        ):
            self._check_usable()
        task = asyncio.current_task(state.loop)
        if task is None:  # another loop of the same thread
            self.check_entered()
            task = current_task()
        self.turns.taken = True
        state.runner = task
        state.runs += 1
        waits = state.waits
        waits.began = None
        scope = waits.scope = begin_run(state, state.publisher)
        scope.runner = id(task)
        return scope

    def next_attempt(self, failed: RunScope) -> RunScope:
        """Begin the next attempt of a run; code that outlives the failed one is no part of it."""
        state = self._state
        failed.active = False
        current_scope.set(failed.outer)
        scope = state.waits.scope = begin_run(state, state.publisher)
        scope.runner = failed.runner
        scope.committed = failed.committed
        return scope

    def release(self, scope: RunScope) -> None:
        """End the run; the next waiter begins."""
        state = self._state
        waits = state.waits
        state.runner = None
        if waits.cause is not None or waits.own_contexts:
            waits.reset()
        scope.active = False
        # Tasks that were started in the run have its scope, and must not keep its feeds alive.
        scope.attempt = None
        current_scope.set(scope.outer)
        self.turns.release()
        if scope.observers:
            scope.end_attempt()

    async def wait_between_runs(self, wait: Coroutine[Any, Any, T]) -> T:
        """Await a wait in which the session makes no steps: whoever waits for these may have to do
        without.
        """
        state, run = self._state, current_run()
        publisher = state.publisher
        if publisher is None or not (
            current_task() is state.entered_by or (run is not None and run.session is state)
        ):
            return await wait
        publisher.hold_up()
        try:
            return await wait
        finally:
            publisher.let_go()

    async def close(self, immediately: bool) -> None:
        """Wait for the run of another task; it may finish within the grace period, or is
        interrupted `immediately`.
        """
        if not self.turns.taken:
            return
        state, grace_secs = self._state, self._state.grace_secs

        def interrupt() -> None:
            state.end_run(SessionClosedError("the session was closed during this run"))

        async def wait() -> None:
            for _ in range(2):
                if not self.turns.taken:  # it ended before this began
                    return
                with contextlib.suppress(TimeoutError):
                    await limited(self.turns.wait(), grace_secs, "the last run")
                    return
                interrupt()
            logger.warning(
                "%s: run still active %s s after its cancellation; closing anyway",
                state.label,
                grace_secs,
            )

        if immediately:
            interrupt()
        await shielded(
            wait(),
            grace_secs=grace_secs,
            what=f"the wait for the last run of {state.label}",
            on_cancel=interrupt,
        )

    def check_entered(self) -> None:
        """Raise if the session was never entered, or belongs to another loop."""
        if self._state.phase == "new":
            raise SessionClosedError("this session was not entered; use `async with`")
        if running_loop() is not self._state.loop:
            raise WrongLoopError(
                "this session belongs to another event loop; use it where it was entered"
            )

    def check_closer(self) -> None:
        """Raise if the end of the session would wait for the caller."""
        self.check_caller("aclose")
        task = current_task()
        if self._state.owns(task):
            raise NestedRunError(
                f"aclose was called from the background task {task.get_name()!r} of the same"
                " session, which would deadlock; use request_stop to end the session"
            )

    def check_caller(self, what: str) -> None:
        """Raise if the caller is itself part of a run in progress of this session, or of its
        end.
        """
        if not self._state.is_part_of_call():
            return
        where = "the end" if self._state.phase == "closing" else "a run"
        raise NestedRunError(
            f"{what} was called from inside {where} of the same session, which would deadlock; in a"
            " hook use run_context.session, and request_stop to end"
        )

    def _check_usable(self) -> None:
        """Raise if no run can begin now: the session is not open, or was stopped, has failed, or
        belongs to another loop.
        """
        self.check_entered()
        state = self._state
        is_hook = state.is_part_of_call()
        if state.phase == "closing" and not is_hook:
            raise StopRequestedError("the session has ended")
        if state.phase != "open":
            how = "a hook runs the raw session that it was given" if is_hook else "make a new one"
            raise SessionClosedError(f"this session is {state.phase}; {how}")
        if state.recovery_error is not None:
            raise RecoveryExhaustedError(
                f"recovery has given up on {state.recovery_error!r}; leave the session's block"
            ) from state.recovery_error
        state.whole.raise_failure()
        if state.stopped:
            raise StopRequestedError(state.stop_reason)
