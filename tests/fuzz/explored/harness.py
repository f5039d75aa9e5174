"""What programs that call this library need besides `explore`: tasks that know who cancelled them,
and the laws of a cancel.

An operation runs in one of the `places` in which a user may call the library. While it runs, the
program is cancelled (by `explore`), the place cancels it in its own way, and so does each other
task that `watch` knows (both `may_happen`). The effect is known exactly: the library cancels no
task of its callers, so every cancel of one is from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from unittest import mock

from aiohooks.testing import always, choose, exploration, explore, may_happen
from aiohooks.testing._schedule_loop import NumberedTask
from aiohooks.testing.leaks import open_files
from tests.support.waiting import HANG_SECS

NOT_CANCELLED = "~"
"""Prefix of the labels and user's tasks on which others wait; they are not cancelled by
themselves.
"""
HARNESS = "wrapper"
"""Prefix of the names of the harness's own tasks."""
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

    root: CountingTask
    """The task of the program."""
    task: CountingTask | None = None
    """That of the operation."""
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
        return self.root.direct + self.events

    async def watch(self, label: str, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Await `fn(*args)`; its task may be cancelled meanwhile, if it is not the operation's."""
        task = current()
        labels = self._labels.setdefault(task, [])
        labels.append(label)
        try:
            if len(labels) > 1 or task is self.task:
                return await fn(*args)
            with self.may_cancel(task, lambda: labels[-1]):
                return await fn(*args)
        finally:
            labels.pop()

    @contextlib.contextmanager
    def may_cancel(
        self, task: CountingTask, label: Callable[[], str] | None = None
    ) -> Generator[None]:
        """Say that others may cancel a task, which is in the coroutine of this label, or is the
        operation's.
        """

        def cancel() -> None:
            one = "" if label is None else label()
            is_waited_for = one.startswith(NOT_CANCELLED) or task.get_name().startswith(
                USER + NOT_CANCELLED
            )
            if not self.running or is_waited_for or not task.cancel():
                return
            self.events += 1
            if label is not None:
                # A task of the user's own may be in the middle of anything; it is the one that was
                # cancelled.
                self.children.append(USER if task.get_name().startswith(USER) else one)

        with may_happen(cancel, f"cancel of {'the operation' if label is None else label()}"):
            yield

    async def foreign_code(self, label: str, fn: Callable[[], Awaitable[Any]]) -> Any:
        """Await `fn()`, code of others that may cancel its own task or swallow a cancel; the
        caller's task is another one.
        """
        if current() is self.task:
            self.found.append(f"caller's task: {label} is called in it")
        before: float = self.children.count(label)
        try:
            return await fn()
        except asyncio.CancelledError:
            before = math.inf
            raise
        finally:  # what it has swallowed is not reported
            while self.children.count(label) > before:
                self.children.remove(label)

    async def run(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Run the operation in the current task, record how it ended, and let its exception
        pass.
        """
        task = self.task = current()
        outside, cancelling = task.outside, task.cancelling()
        self.running = True
        try:
            with contextlib.nullcontext() if task is self.root else self.may_cancel(task):
                await operation()
        except BaseException as error:
            self.outcome = error
            if _is_circular(error):
                self.found.append(f"context: the contexts of {error!r} make a circle")
            raise
        finally:
            self.running = False
            self.outside = task.outside - outside
            self.kept = task.cancelling() - cancelling
            others = (
                set()
                if isinstance(self.outcome, GeneratorExit)
                else asyncio.all_tasks() - {task, self.root}
            )
            tasks = [one.get_name() for one in others]
            self.found += [
                f"leak: task {one!r} outlived the operation"
                for one in tasks
                if not one.startswith(HARNESS)
            ]

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
        if self.task is not None and self.task.library:
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


async def run_in_a_place(scenario: Scenario) -> None:
    """Run a scenario in a place, both chosen by the schedule, and check all laws."""
    from tests.fuzz.explored.places import PLACES

    root = current()
    probe = Probe(root)
    place = choose(*PLACES, name="place")(probe)
    run = scenario(probe, choose(*range(16), name="seed"))
    # `asyncio.timeout` counted stale cancels as its own before 3.11.3 (gh-102780).
    stale = (
        0 if place.in_child or sys.version_info < (3, 11, 3) else choose(0, 1, name="stale cancels")
    )
    for _ in range(
        stale
    ):  # the task has swallowed cancels before, as tasks do; they must make no difference
        asyncio.Task.cancel(root)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        if root.direct:
            raise asyncio.CancelledError
    with always(run.check):
        try:
            await place.wrap(run.operation)
        except GeneratorExit:  # it was thrown away
            raise
        except BaseException as error:
            place.ended = error
    place.cancelling = root.cancelling() - stale
    place.cancels, before = root.direct, root.direct
    place.stray = bool(
        getattr(root, "_must_cancel", False)
    )  # a cancel that comes now would hide it
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        place.stray = place.stray or root.direct == before
    found = probe.violations() + run.violations() + place.violations()
    probe.outcome = place.ended = None  # their tracebacks hold the frames that hold them
    assert not found, "; ".join(found)
    if root.direct:
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
        mock.patch("aiohooks.testing._schedule_loop.NumberedTask", tasks),
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


def in_a_place(scenario: Scenario) -> Program:
    """Return the program that runs a scenario in a place."""
    return Program(functools.partial(run_in_a_place, scenario))


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
