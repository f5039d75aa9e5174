"""What programs that call this library need besides `explore`: tasks that know who cancelled them,
and the laws of a cancel.

While an operation runs, the program is cancelled (by `explore`), and so is each other task that
`watch` knows (by `may_happen`). The effect is known exactly: the library cancels no task of its
callers, so every cancel of one is from outside. What may be around a call, such as time limits,
groups and scopes, is for the random programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from unittest import mock

from aiohooks.testing import always, choose, exploration, explore, may_happen
from aiohooks.testing._schedule_run import NumberedTask
from aiohooks.testing.leaks import open_files
from tests.support.waiting import HANG_SECS

NOT_CANCELLED = "~"
"""Prefix of the labels and user's tasks on which others wait; they are not cancelled by
themselves.
"""
USER = "runner"
"""Prefix of the names of the user's own tasks."""
DISTURB: tuple[exploration.Disturbance, ...] = ("order", "choice", "cancel", "event")
MAX_STEPS = 5_000


class CountingTask(NumberedTask):
    """A task that counts the cancels of others, for comparison with `cancelling()`, and what the
    library does to it.
    """

    direct = 0
    """Those that the explorer or this harness has made, and that were accepted."""
    outside = 0
    """All but the library's, less those taken back."""
    library = 0
    """How often the library has cancelled it or taken a cancel back: never, if it is a caller's."""

    def cancel(self, msg: Any = None) -> bool:
        accepted = super().cancel(msg)
        if accepted and _caller().startswith("aiohooks"):
            self.library += 1
        elif accepted:
            self.outside += 1
            self.direct += _caller() in ("explorer", __name__)
        return accepted

    def uncancel(self) -> int:
        if _caller().startswith("aiohooks"):
            self.library += 1
        else:
            self.outside -= 1
        return super().uncancel()


def _caller() -> str:
    """Return the module that has called a method of a task."""
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return "explorer" if name.startswith("aiohooks.testing") else name


def current() -> CountingTask:
    """Return the current task."""
    task = asyncio.current_task()
    assert isinstance(task, CountingTask)
    return task


class Run(Protocol):
    """One run of a scenario: the operation, and its checks."""

    async def operation(self) -> None:
        """Do what is cancelled."""

    def check(self) -> None:
        """Check what must hold at every wait; raise or record a violation."""

    def violations(self) -> list[str]:
        """Return what is wrong afterwards."""


class Scenario(Protocol):
    """Makes runs that are the same for the same seed."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    def __call__(self, probe: Probe, seed: int) -> Run: ...


@dataclass(slots=True)
class Probe:
    """Watches one operation, and records how it ended."""

    task: CountingTask
    """That of the program, which runs the operation."""
    children: list[str] = field(default_factory=list)
    """Labels of the coroutines whose own task was cancelled, other than the operation's."""
    events: int = 0
    """How often something happened besides the cancels of the explorer."""
    outcome: BaseException | None = None
    outside: int = 0
    """Number of cancels of the operation's task that the operation had to pass on."""
    kept: int = 0
    """By how much `cancelling()` has grown over the operation."""
    running: bool = False
    found: list[str] = field(default_factory=list)
    _labels: dict[CountingTask, list[str]] = field(default_factory=dict)

    @property
    def delivered(self) -> int:
        """How often something was cancelled."""
        return self.task.direct + self.events

    async def watch(self, label: str, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Await `fn(*args)`; its task may be cancelled meanwhile, if it is not the operation's."""
        task = current()
        labels = self._labels.setdefault(task, [])
        labels.append(label)

        def cancel() -> None:
            innermost = labels[-1]
            name = task.get_name()
            is_waited_for = innermost.startswith(NOT_CANCELLED) or name.startswith(
                USER + NOT_CANCELLED
            )
            if not self.running or is_waited_for or not task.cancel():
                return
            self.events += 1
            # A task of the user's own may be in the middle of anything; it is the one that was
            # cancelled.
            self.children.append(USER if name.startswith(USER) else innermost)

        try:
            if len(labels) > 1 or task is self.task:
                return await fn(*args)
            with may_happen(cancel, f"cancel of {label}"):
                return await fn(*args)
        finally:
            labels.pop()

    async def run(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Run the operation in the current task, and record how it ended."""
        task = self.task
        outside, cancelling = task.outside, task.cancelling()
        self.running = True
        try:
            await operation()
        except GeneratorExit:  # it was thrown away
            raise
        except BaseException as error:
            self.outcome = error
            if _is_circular(error):
                self.found.append(f"context: the contexts of {error!r} make a circle")
        finally:
            self.running = False
        self.outside = task.outside - outside
        self.kept = task.cancelling() - cancelling
        names = [left.get_name() for left in asyncio.all_tasks() - {task}]
        self.found += [f"leak: task {name!r} outlived the operation" for name in names]
        await self._find_stray_cancel()

    async def _find_stray_cancel(self) -> None:
        """Find out whether the operation has left a cancel that is thrown in at the next wait."""
        task = self.task
        cancels = task.direct
        is_stray = bool(getattr(task, "_must_cancel", False))
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            is_stray = is_stray or task.direct == cancels  # not by a cancel that comes now
        if is_stray and not cancels:
            self.found.append("cancellation: the next wait raised a stray CancelledError")

    def violations(self) -> list[str]:
        """Return what the operation did wrong with respect to cancellation."""
        found = list(self.found)
        cancelled = isinstance(self.outcome, asyncio.CancelledError)
        if self.outside and not cancelled:
            found.append(
                f"cancellation: cancelled {self.outside} time(s), ended with {self.outcome!r}"
            )
        if not self.outside and cancelled:
            found.append(f"cancellation: raised {self.outcome!r}, and was not cancelled")
        if self.kept != self.outside:
            found.append(
                f"cancel count: cancelling() grew by {self.kept} over {self.outside} cancels"
            )
        if self.task.library:
            found.append(
                "caller's task: the library has cancelled it, or taken a cancel back,"
                f" {self.task.library} time(s)"
            )
        return found


def _is_circular(error: BaseException) -> bool:
    known: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        if any(link is one for one in known):
            return True
        known.append(link)
        link = link.__context__
    return False


async def run_scenario(scenario: Scenario) -> None:
    """Run a scenario with a seed that the schedule chooses, and check all laws."""
    task = current()
    probe = Probe(task)
    run = scenario(probe, choose(*range(16), name="seed"))
    with always(run.check):
        await probe.run(run.operation)
    found = probe.violations() + run.violations()
    probe.outcome = None  # its traceback holds the frames that hold it
    assert not found, "; ".join(found)
    if task.direct:
        raise asyncio.CancelledError


class Result(NamedTuple):
    """What the exploration of a scenario did, and found."""

    name: str
    schedules: int
    cancels: int
    events: int
    problem: str


@contextlib.contextmanager
def making(tasks: type[NumberedTask]) -> Generator[None]:
    """Let the explorer make tasks of this kind."""
    with (
        mock.patch.object(exploration, "NumberedTask", tasks),
        mock.patch("aiohooks.testing._schedule_run.NumberedTask", tasks),
        mock.patch("aiohooks.testing._schedule_run._MOST_STEPS", MAX_STEPS),
    ):
        yield


class Program(NamedTuple):
    """A program, what disturbs it, and of which kind its tasks are."""

    run: Callable[[], Awaitable[Any]]
    disturb: tuple[exploration.Disturbance, ...] = DISTURB
    tasks: type[NumberedTask] = CountingTask
    times: int = 1
    """How many more schedules than another program it gets."""


def program_of(scenario: Scenario) -> Program:
    """Return the program that runs a scenario."""
    return Program(functools.partial(run_scenario, scenario))


async def finding(program: Program, what: str, seeds: int) -> str:
    """Return what was found last: with a cancel at each wait, and then by seeds, so many or until
    it was to be found.
    """
    events = [kind for kind in program.disturb if kind not in ("order", "choice", "slow")]
    with mock.patch.object(exploration, "_MOST_SHRINKING", 0):
        found = (await explored("", program, disturb=events, exhaust=1)).problem
        seed, seeds = 0, seeds * program.times
        while what not in found and seed < seeds:
            last = (await explored("", program, seeds=range(seed, seeds))).problem
            number = re.search(r"\(seed (\d+), ", last)
            seed, found = int(number[1]) + 1 if number else seeds, last or found
    return found


async def explored(name: str, program: Program, **options: Any) -> Result:
    """Explore a program; return what it did, and the problem that was found."""
    files, threads = open_files(), set(threading.enumerate())
    try:
        with making(program.tasks):
            done = await explore(program.run, **{"disturb": program.disturb, **options})
    except exploration.ExplorationError as error:
        return Result(name, 0, 0, 0, f"{name}: {error}")
    more = len(open_files()) - len(files)
    problem = f"{more} more file descriptors" if more > 0 else ""
    for one in set(threading.enumerate()) - threads:
        one.join(HANG_SECS)  # the watch of a loop ends a moment after the last session
        problem = f"thread {one.name!r} is left" if one.is_alive() else problem
    happened = done.disturbances
    events = sum(count for kind, count in happened.items() if kind.startswith("event"))
    return Result(
        name,
        done.schedules,
        happened.get("cancel", 0),
        events,
        problem and f"{name}: {problem}",
    )
