"""Who may run now: one task at a time, while the session is open, in its own loop; and how that run is ended from outside."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from threading import get_ident
from typing import Any

from aiohooks._aio.cancel import CancelScope, TimeLimit, cancel_count, current_task, shielded, task_of
from aiohooks._aio.clock import current_clock
from aiohooks._aio.run_scope import RunScope, begin_run, current_run
from aiohooks.errors import (
    NestedRunError,
    RecoveryExhaustedError,
    SessionClosedError,
    StopRequestedError,
    WrongLoopError,
)
from aiohooks.session.recovery import Recoverable
from aiohooks.stores.publishers import Publisher


class Turns:
    """Taking turns. Unlike `asyncio.Lock` the way without waiting is two attribute reads, and `taken` says who waits."""

    __slots__ = ("_waiting", "taken")

    def __init__(self) -> None:
        """Starts free."""
        self.taken: bool = False
        """Whether somebody has the turn now."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Waits for the turn, and has it then; only to be called while it is taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()  # it came together with the cancellation: the next one must not wait for ever
            elif turn in self._waiting:  # or passed over already
                self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        """Ends the own turn; the next one in line has it from now on."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.taken = False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)


_logger = logging.getLogger("aiohooks")


class RunGate:
    """The gate through which every run of one monitored session goes."""

    def __init__(self, life: Recoverable) -> None:
        """Starts closed: the session is new."""
        self._life = life
        self.state: str = "new"
        """"new", "opening", "open", "closing" or "closed"."""
        self.since: float | None = None
        """When it became that."""
        self.owner: asyncio.Task[Any] | None = None
        """The task that entered the session."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: int = 0
        """The loop's thread: asking for it is cheaper than asking for the running loop."""
        self.turns: Turns = Turns()
        self.publisher: Publisher | None = None
        self.runs: int = 0
        """How many runs have begun."""
        self.base: int = 0
        """How many cancels the running task had been through when its run began."""
        self._runner: asyncio.Task[Any] | None = None
        self._interrupt: CancelScope | None = None

    def become(self, state: str) -> None:
        """Changes the state."""
        self.state = state
        self.since = current_clock().now()
        if state == "opening":
            self.owner = current_task()
        elif state == "closed":
            self.owner = None

    @property
    def runner(self) -> asyncio.Task[Any] | None:
        """The task of the run that goes on."""
        return self._runner

    @property
    def running(self) -> bool:
        """Whether a run goes on."""
        return self._runner is not None

    async def wait(self) -> RunScope:
        """Begins a run behind those of other tasks; to be called while one of these goes on."""
        self.check_caller("run")
        self._check_usable()
        await self.turns.wait()
        try:
            if self.state == "closing":
                raise StopRequestedError("the session has ended")
            return self.begin()
        except BaseException:
            self.turns.give_back()
            raise

    def begin(self) -> RunScope:
        """Begins a run; while none goes on, and when it is one's turn."""
        life = self._life
        if self.state != "open" or get_ident() != self.thread or life.given_up or life.root.should_stop():
            self._check_usable()
        task = task_of(self.loop)
        if task is None:  # another loop of the same thread
            self.check_entered()
            task = current_task()
        self.turns.taken = True
        self._runner = task
        self.base = cancel_count(task)
        self.runs += 1
        return begin_run(self, self.publisher)

    def end(self, running: RunScope) -> None:
        """Ends it; the next one in line begins."""
        self.take_interrupt()
        self._runner = None
        running.active = False
        self.turns.give_back()

    def interrupt(self, why: str, cause: BaseException | None) -> None:
        """Ends the run that goes on, from outside; with `cause`, or with what it finds when it looks for a reason."""
        if self._runner is not None and self._interrupt is None:
            self._interrupt = CancelScope(self._runner, self.base)
            self._interrupt.fire(why, cause)

    def take_interrupt(self) -> tuple[bool, BaseException | None]:
        """Takes back what `interrupt` did: whether that was all that was done to the task, and the cause given."""
        interrupt = self._interrupt
        if interrupt is None:
            return False, None
        self._interrupt = None
        return not interrupt.settle(), interrupt.cause

    async def close(self, at_once: bool, grace_secs: float) -> None:
        """Waits for the run of another task, which may finish within the grace period, or is ended `at_once`."""
        if not self.turns.taken:
            return

        def interrupt() -> None:
            self.interrupt("the session is closed", SessionClosedError("the session was closed during this run"))

        async def wait() -> None:
            for last_time in (False, True):
                if not self.turns.taken:  # it ended before this began
                    return
                limit = TimeLimit(grace_secs, "the last run")
                try:
                    with limit:
                        await self.turns.wait()
                    return
                except TimeoutError:
                    if last_time:
                        _logger.warning("a run goes on %s s after it was cancelled; closing without it", grace_secs)
                    interrupt()

        if at_once:
            interrupt()
        await shielded(wait(), grace_secs=grace_secs, what="the wait for the last run", on_cancel=interrupt)

    # -- who may

    def check_entered(self) -> None:
        """Raises if the session was never entered, or belongs to another loop."""
        if self.loop is None:
            raise SessionClosedError("this session was not entered; use `async with`")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self.loop:
            raise WrongLoopError("this session belongs to another event loop; use it where it was entered")

    def check_caller(self, what: str) -> None:
        """Raises if the caller is itself part of a run of this session that goes on."""
        running = current_run()
        while running is not None:
            if running.session is self and running.active:
                raise NestedRunError(
                    f"{what} was called from inside a run of the same session, which it would wait for for ever; "
                    "in a hook use run_context.session, and request_stop to end"
                )
            running = running.outer

    def _check_usable(self) -> None:
        """Says why there can be no run now, if so."""
        self.check_entered()
        life = self._life
        if self.state == "closing" and (life.root.owns(current_task()) or life.coord.owns(current_task())):
            raise StopRequestedError("the session has ended")
        if self.state in ("opening", "closing"):
            raise SessionClosedError(f"this session is {self.state}; a hook runs the raw session that it was given")
        if self.state != "open":
            raise SessionClosedError(f"this session is {self.state}; make a new one")
        if life.given_up is not None:
            raise RecoveryExhaustedError(
                f"recovery has given up on {life.given_up!r}; leave the session's block"
            ) from life.given_up
        life.root.raise_requested_exception()
        if life.root.should_stop():
            raise StopRequestedError(life.root.stop_reason)
