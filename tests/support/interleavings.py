"""Every order in which the tasks of a small scenario can run.

Whenever more than one task could run next, a schedule chooses one. `explore` runs a scenario under one schedule after the other,
depth first, until there are no more: a condition that held in all of them holds in every order, also in those that a real loop
would never produce; `aiohooks.testing.explore` tries some of them, and much else.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohooks.testing._schedule_loop import ScheduleLoop


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


class ControlledLoop(ScheduleLoop):
    """A loop whose schedule chooses the next task, and whose time stands still: a run ends when nothing is runnable."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda tasks: self.schedule.choose(len(tasks)) if len(tasks) > 1 else 0)
        self.schedule = Schedule()
        self.errors: list[str] = []
        self.set_exception_handler(lambda _, context: self.errors.append(repr(context)))

    def run_to_rest(self) -> None:
        """Run until nothing is runnable."""
        self.run_forever()
        assert self.secs == 0, "there is no time here: use ManualClock"


def run_once(loop: ControlledLoop, make: Callable[[], Scenario], schedule: Schedule) -> None:
    """Run one scenario under one schedule; raise `Violation` if a condition does not hold."""
    loop.schedule = schedule
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
