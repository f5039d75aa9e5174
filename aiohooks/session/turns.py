"""One run at a time, in order of arrival; and a turn for the event loop between runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aiohooks._core.calls import RunWaits
from aiohooks._core.scope import RunScope, begin_run, current_scope

DEFAULT_YIELD_SECS = 0.005
"""After how long without a turn the event loop gets one before the next run, by default."""
_TURN_PASSES = 3
"""The passes of the loop that make one turn: it finds an event, calls the callback, and the task
that waited continues.
"""


class Turns:
    """The turns of the runs of one session, which come in the order in which they were asked for;
    whose turn it is, and what that run awaits.

    Unlike with `asyncio.Lock`, taking a turn without waiting costs two attribute accesses
    (`taken`), and the number of waiters is known.
    """

    def __init__(self, yield_secs: float | None) -> None:
        self.taken: bool = False
        """Whether a task has the turn; set it to take a turn that is free."""
        self.runs: int = 0
        """The number of runs begun."""
        self.runner: asyncio.Task[Any] | None = None
        """The task of the run in progress."""
        self.waits: RunWaits = RunWaits()
        """The waits of the run in progress; to end them ends the run."""
        self.now: Callable[[], float] = time.monotonic
        """The clock of `loop_turn_due`."""
        self.loop_turn_due: float = math.inf
        """The time from which the event loop has to have a turn before the next run."""
        self._waiters: deque[asyncio.Future[None]] = deque()
        # With None or 0 the loop gets no turns between runs.
        self._yield_secs = yield_secs or math.inf
        # Whether the loop has had a turn since `watch_loop`.
        self._loop_turned = True

    async def wait(self) -> None:
        """Wait for the turn, and have it then."""
        if not self.taken:
            self.taken = True
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the turn came together with the cancellation: pass it on
            elif waiter in self._waiters:  # or passed over already
                self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """Pass the turn on to the next waiter, or free it."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.taken = False

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def begin_attempt(self, failed: RunScope) -> RunScope:
        """Begin the next attempt of a run; code that outlives the failed one is no part of it."""
        failed.active = False
        current_scope.set(failed.outer)
        scope = self.waits.scope = begin_run(failed.session, failed.publisher)
        scope.runner = failed.runner
        scope.committed = failed.committed
        return scope

    def end_run(self, scope: RunScope) -> None:
        """End the run, and let the next run begin."""
        waits = self.waits
        self.runner = None
        # Most runs have neither: a reset would cost more than this check.
        if waits.cause is not None or waits.own_contexts:
            waits.reset()
        scope.active = False
        # Tasks that were started in the run have its scope, and must not keep its feeds alive.
        scope.attempt = None
        current_scope.set(scope.outer)
        if self._waiters:
            self.release()
        else:
            self.taken = False  # a call fewer in each run
        # Last: observers get a scope that has ended.
        if scope.observers:
            scope.end_attempt()

    # -- the turns of the event loop

    def watch_loop(self) -> None:
        """Notice whether the loop has a turn from now on."""
        self.loop_turn_due = math.inf
        if self._yield_secs < math.inf:
            self._loop_turned = False
            self.loop_turn_due = self.now() + self._yield_secs
            asyncio.get_running_loop().call_soon(self._note_loop_turn)

    def _note_loop_turn(self) -> None:
        self._loop_turned = True

    async def let_loop_turn(self) -> None:
        """Let the loop have a turn, if it had none since `watch_loop`."""
        if not self._loop_turned:
            for _ in range(_TURN_PASSES):
                await asyncio.sleep(0)
