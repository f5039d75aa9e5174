"""Virtual time: one queue of events, and an event loop for each simulated process, which can be
paused, killed, and jump.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

from aiohooks.testing._schedule_run import NumberedFuture, NumberedTask

_MOST_TURNS = 20_000  # of one moment: more is a livelock
_MOST_ROUNDS = 100  # of one turn


class Livelock(AssertionError):
    """A process does not come to rest."""


class World:
    """The time, everything that is going to happen, the random choices, and the trace of a
    simulation.
    """

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.processes: list[Process] = []
        self.lines: list[str] | None = [] if tracing else None
        """The trace, if it is kept; its digest always is."""
        self.events = 0
        self._digest = hashlib.sha256()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        """Of events, and of the futures and tasks of all processes."""

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(time, self.now), next(self.numbers), call))

    def after(self, secs: float, call: Callable[[], None]) -> None:
        self.at(self.now + secs, call)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let things happen up to a time, or until something is `done`; return whether it is."""
        turns, moment = 0, -1.0
        while not done():
            if not self._queue or self._queue[0][0] > until:
                self.now = until
                return False
            time, _, call = heapq.heappop(self._queue)
            turns, moment = (turns + 1, moment) if time == moment else (0, time)
            if turns > _MOST_TURNS:
                raise Livelock(f"at {time:.6f} s nothing comes to rest: {call}")
            self.now = time
            call()
        return True

    def trace(self, *words: object, content: object = None) -> None:
        """Add an event to the trace; its content is shown, and is not part of the digest."""
        line = f"{self.now:.6f} {' '.join(map(str, words))}"
        self.events += 1
        self._digest.update(line.encode())
        if self.lines is not None:
            self.lines.append(line if content is None else f"{line} {content!r}")

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class Process(asyncio.BaseEventLoop):
    """A simulated process: its event loop, whose time and turns come from the world."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.alive = True
        self.errors: list[str] = []
        """What was reported to the loop's exception handler."""
        self._skew = world.chance.uniform(0, 1_000)
        self._paused_until = 0.0
        self._turn_at = math.inf
        self.numbers = world.numbers
        self._ready: Any  # of BaseEventLoop
        self._scheduled: Any
        self.set_exception_handler(self._on_error)
        world.processes.append(self)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    # What a loop needs.

    def time(self) -> float:
        return self.world.now + self._skew

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return NumberedTask(coro, loop=self, **options)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # What the world does with it.

    def start(self, program: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.create_task(program, context=contextvars.Context())
        self.wake()
        return task

    def deliver(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback(*args)` in the process as soon as it runs."""
        if self.alive:
            self.call_soon(callback, *args)
            self.wake()

    def wake(self) -> None:
        """Have a turn when there is something to do."""
        time = self._next_time()
        if time < self._turn_at:
            self._turn_at = time
            self.world.at(time, lambda: self._turn(time))

    def pause(self, secs: float) -> None:
        """Stop for so long, as by SIGSTOP; what arrives meanwhile is handled then."""
        self._paused_until = max(self._paused_until, self.world.now + secs)

    @property
    def paused(self) -> bool:
        return self.world.now < self._paused_until

    def jump(self, secs: float) -> None:
        """Move the clock of the process forward, as the suspension of a machine does."""
        self._skew += secs
        self.wake()

    def kill(self) -> None:
        """End the process: nothing of it reaches another one any more. What its tasks do to end is
        not part of the world.
        """
        self.alive = False
        chances = self.world.chance.getstate()
        for _ in range(1_000):
            tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self._run_ready()
            if self._scheduled:
                self._skew = max(self._skew, self._scheduled[0].when() - self.world.now + 1e-9)
        self.world.chance.setstate(chances)  # they end in any order, with pauses of any length
        self.close()

    def _next_time(self) -> float:
        # A little later than the timer: the difference of two floats may be a little less.
        time = (
            self.world.now
            if self._ready
            else self._scheduled[0].when() - self._skew + 1e-9
            if self._scheduled
            else math.inf
        )
        return max(time, self._paused_until)

    def _turn(self, time: float) -> None:
        if time != self._turn_at or not self.alive:
            return
        self._turn_at = math.inf
        if self.world.now >= self._paused_until:
            self._run_ready()
        self.wake()

    def _run_ready(self) -> None:
        """Run what is ready, and what that makes ready; like `_run_once`, without a selector."""
        ready, scheduled = self._ready, self._scheduled
        asyncio._set_running_loop(self)
        try:
            for _ in range(_MOST_ROUNDS):
                now = self.time() + 1e-9
                while scheduled and (scheduled[0]._cancelled or scheduled[0]._when < now):
                    timer = heapq.heappop(scheduled)
                    timer._scheduled = False
                    ready.append(timer)
                if not ready:
                    break
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle._cancelled:
                        handle._run()
        finally:
            asyncio._set_running_loop(None)

    def __repr__(self) -> str:
        return self.name
