"""Every order in which the tasks of a small scenario can run.

The event loop here has no clock and no I/O: whenever more than one task could run next, a schedule chooses one.
`explore` runs a scenario under one schedule after the other, depth first, until there are no more: a condition that held in all
of them holds in every order, also in those that a real loop would never produce. Plain callbacks run in order, before any
task; a scope of anyio schedules one after the other, so what a callback schedules waits for a task's turn.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Scenario(Protocol):
    """A small scenario; a new one is made for each schedule, inside the loop."""

    def actors(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, Any]]]:
        """Return the coroutine functions of the tasks, by name."""
        ...

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        """Check the conditions when no task can run any more; raise AssertionError."""
        ...

    async def finish(self) -> None:
        """End the remaining waits."""
        ...

    def finished(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        """Check the conditions after `finish`, when every task is done."""
        ...


class Violation(AssertionError):
    """A schedule under which a condition did not hold; `schedule` repeats it."""

    def __init__(self, message: str, schedule: Sequence[int]) -> None:
        super().__init__(f"{message}, in schedule {list(schedule)}")
        self.schedule = list(schedule)


@dataclass(frozen=True)
class Explored:
    """The result of an exploration."""

    schedules: int
    exhausted: bool


class Schedule:
    """Chooses the next of the runnable tasks, at each point where there are several."""

    def __init__(self, choices: Sequence[int] = ()) -> None:
        """Follow `choices`, then always take the first task."""
        self._given = list(choices)
        self.taken: list[int] = []
        self.options: list[int] = []

    def choose(self, options: int) -> int:
        depth = len(self.taken)
        choice = self._given[depth] if depth < len(self._given) else 0
        self.taken.append(choice)
        self.options.append(options)
        return choice

    def following(self) -> Schedule | None:
        """Return the next schedule, depth first; None after the last."""
        for depth in reversed(range(len(self.taken))):
            if self.taken[depth] + 1 < self.options[depth]:
                return Schedule([*self.taken[:depth], self.taken[depth] + 1])
        return None


class ReadyQueue(deque[asyncio.Handle]):
    """The loop's ready queue, in the order of a schedule."""

    schedule = Schedule()
    callbacks: int | None = None
    """How many of the callbacks that a task has scheduled are left; those that they schedule run after another task."""

    def popleft(self) -> asyncio.Handle:
        first: dict[asyncio.Task[Any], int] = {}
        plain: list[int] = []
        for index, handle in enumerate(self):
            if handle.cancelled():
                continue
            task = task_of(handle)
            if task is None:
                plain.append(index)
            else:
                first.setdefault(task, index)
        if self.callbacks is None or not first:
            self.callbacks = len(plain)
        if self.callbacks:
            self.callbacks -= 1
            return self._take(plain[0])
        if not first:
            return super().popleft()
        self.callbacks = None
        indices = list(first.values())
        return self._take(indices[self.schedule.choose(len(indices)) if len(indices) > 1 else 0])

    def _take(self, index: int) -> asyncio.Handle:
        handle = self[index]
        del self[index]
        return handle


def task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    """Return the task that this handle runs; None for a plain callback."""
    owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner if isinstance(owner, asyncio.Task) else None


class ControlledLoop(asyncio.BaseEventLoop):
    """A loop without time and I/O; a run ends when nothing is runnable."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = self.ready = ReadyQueue()
        self._selector = self
        self.errors: list[str] = []
        self.set_exception_handler(lambda _, context: self.errors.append(repr(context)))

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self.stop()
        elif timeout > 0:
            raise RuntimeError("there is no time here: use ManualClock")
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        raise RuntimeError("there are no threads here")

    def run_to_rest(self) -> None:
        """Run until nothing is runnable."""
        self.run_forever()
        assert not self.ready


def run_once(loop: ControlledLoop, make: Callable[[], Scenario], schedule: Schedule) -> None:
    """Run one scenario under one schedule; raise `Violation` if a condition does not hold."""
    loop.ready.schedule = schedule
    tasks: dict[str, asyncio.Task[Any]] = {}

    def begin() -> None:
        scenario = scenarios[0]
        for name, actor in scenario.actors().items():
            tasks[name] = loop.create_task(actor(), name=name, context=contextvars.copy_context())

    def finish() -> None:
        tasks["finish"] = loop.create_task(scenarios[0].finish(), name="finish")

    scenarios: list[Scenario] = [make()]
    try:
        loop.call_soon(begin)
        loop.run_to_rest()
        scenarios[0].at_rest(tasks)
        loop.call_soon(finish)
        loop.run_to_rest()
        for name, task in tasks.items():
            assert task.done(), f"{name} is left over"
            if not task.cancelled():
                task.exception()
        tasks["finish"].result()
        scenarios[0].finished(tasks)
        assert not loop.errors, f"the loop's exception handler got {loop.errors}"
        assert all(task in tasks.values() for task in asyncio.all_tasks(loop)), "a task is left over"
    except Exception as error:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_to_rest()
        message = str(error) if isinstance(error, AssertionError) else repr(error)
        raise Violation(message, schedule.taken) from error


def explore(make: Callable[[], Scenario], *, limit: int | None = None) -> Explored:
    """Run the scenario under all schedules, or the first `limit`; raise `Violation` at the first that fails."""
    loop = ControlledLoop()
    schedule: Schedule | None = Schedule()
    count = 0
    try:
        while schedule is not None and (limit is None or count < limit):
            run_once(loop, make, schedule)
            count += 1
            schedule = schedule.following()
    finally:
        loop.close()
    return Explored(count, schedule is None)


def replay(make: Callable[[], Scenario], choices: Sequence[int]) -> None:
    """Run the scenario under the schedule of a `Violation`."""
    loop = ControlledLoop()
    try:
        run_once(loop, make, Schedule(choices))
    finally:
        loop.close()
