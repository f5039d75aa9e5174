"""Run plans one after the other inside one event loop, and check each.

A point is one run of a scenario in a wrapper with one or two cancels that were accepted. Most is checked after every point.
Files, threads, and what only the garbage collector finds (exceptions never retrieved, coroutines never awaited) are checked
after every batch; if that fails, the batch's points run again one by one to find the point.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol, Self

from tests.conformance.report import loop_factory
from tests.fuzz._harness import close_loop, collecting_finalizer_errors, described, log_disabled
from tests.fuzz.cancel_sweep.probe import HARNESS, Cancel, CountingTask, Probe, counting_factory
from tests.fuzz.cancel_sweep.wrappers import Wrapper

BATCH = 250
PIECE_SECS = 0.02
YOUNG = 25
"""After so many points the youngest garbage is collected: keeps `all_tasks()` short, and findings near their cause."""


class Run(Protocol):
    """One run of a scenario: the operation, and its checks."""

    async def operation(self) -> None:
        """Do what is cancelled."""

    def check(self) -> None:
        """Check what must hold at every suspension; raise or record a violation."""

    def violations(self) -> list[str]:
        """Return what is wrong afterwards."""


class Scenario(Protocol):
    """Makes runs that are the same for the same seed."""

    @property
    def name(self) -> str:
        """Its name in tables and plans."""

    @property
    def hang_secs(self) -> float:
        """After how long a point counts as hanging."""

    def __call__(self, probe: Probe, rng: random.Random) -> Run: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is needed to run a point again."""

    scenario: Scenario
    seed: int
    wrapper: type[Wrapper]
    cancels: tuple[Cancel, ...]

    def __str__(self) -> str:
        cancels = " then ".join(f"{one.how} {one.target} {one.timing} at {one.at}" for one in self.cancels) or "no cancel"
        return f"{self.scenario.name!r} seed {self.seed} in {self.wrapper.name!r}: {cancels}"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one plan."""

    plan: Plan
    delivered: int
    suspensions: int
    in_children: frozenset[int]
    """The suspensions that happened in other tasks than the operation's."""
    violations: tuple[str, ...]


@dataclass(slots=True)
class Runner:
    """Runs plans in a loop of asyncio or uvloop, which is replaced when an operation hangs in it.

    A context manager: inside it finalisers' errors are collected, and garbage is collected only between batches.
    """

    kind: str = "asyncio"
    most_hangs: int = 5
    """Each costs seconds: after so many the rest is not run."""
    finalizer_errors: list[str] = field(default_factory=list)
    hung: bool = False
    points: int = 0
    hangs: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self._stack.enter_context(log_disabled())  # every point logs failures
        self._stack.enter_context(collecting_finalizer_errors(self.finalizer_errors))
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._stack.close()

    @property
    def has_given_up(self) -> bool:
        """Whether too many have hung."""
        return self.hangs >= self.most_hangs

    def run(self, plans: Iterable[Plan]) -> Iterator[Result]:
        """Run the plans; yield each result when its batch has been checked."""
        batch: list[Plan] = []
        for plan in plans:
            batch.append(plan)
            if self.has_given_up:
                return
            if len(batch) == BATCH:
                yield from self._run_batch(batch)
                batch = []
        yield from self._run_batch(batch)

    def _run_batch(self, batch: list[Plan]) -> Iterator[Result]:
        results: list[Result] = []
        unassigned = self._run_and_collect(batch, results)
        if unassigned and len(batch) > 1:
            results = []
            for plan in batch:
                one: list[Result] = []
                found = self._run_and_collect([plan], one)
                results += [_with(result, found) for result in one]
                unassigned = [line for line in unassigned if not found]
        if unassigned and results:
            results[-1] = _with(results[-1], [f"leak, somewhere in the last {len(batch)} points: {one}" for one in unassigned])
        yield from results

    def _run_and_collect(self, batch: list[Plan], results: list[Result]) -> list[str]:
        """Run a batch, and return what was found only after collecting garbage."""
        if not batch:
            return []
        loop = self._loop or self._new_loop()
        files, threads = _files(), set(threading.enumerate())
        left = list(batch)
        while left and not self.has_given_up:
            master = CountingTask(self._run_some(left, results), loop=loop, name=f"{HARNESS} master")
            loop.run_until_complete(master)
            if self.hung:
                loop, files = self._new_loop(), _files()
        self.finalizer_errors.clear()
        gc.collect()
        loop.run_until_complete(asyncio.sleep(0))
        gc.collect()
        found = [f"leak: {line}" for line in self.finalizer_errors]
        if len(_files()) > len(files):
            found.append(f"leak: {len(_files()) - len(files)} more file descriptors")
        started = [one for one in set(threading.enumerate()) - threads if not one.name.startswith("AnyIO worker")]
        for thread in started:
            thread.join(1)  # the watch of a loop ends a moment after the last session
        found += [f"leak: thread {thread.name!r}" for thread in started if thread.is_alive()]
        self.finalizer_errors.clear()
        return found

    async def _run_some(self, left: list[Plan], results: list[Result]) -> None:
        while left and not self.hung:
            results.append(await self.run_one(left.pop(0)))

    async def run_one(self, plan: Plan) -> Result:
        """Run one plan in the running loop."""
        probe = Probe(plan.cancels)
        run = plan.scenario(probe, random.Random(plan.seed))
        probe.check = run.check
        wrapper = plan.wrapper(probe, run.operation, stale=(plan.seed + sum(cancel.at for cancel in plan.cancels)) % 2)
        loop = asyncio.get_running_loop()
        # A context of its own, so that context variables of one run do not reach the next.
        root = CountingTask(wrapper.root_main(), loop=loop, name=f"{HARNESS} root", context=contextvars.copy_context())
        # In small pieces, between which the loop runs: on a busy machine time alone says nothing.
        for _ in range(round(plan.scenario.hang_secs / PIECE_SECS)):
            if (await asyncio.wait([root], timeout=PIECE_SECS))[0]:
                break
        violations: list[str]
        if not root.done():
            violations = [f"hang: {_positions_of_tasks()}"]
            self.hung = True
            self.hangs += 1
        else:
            violations = probe.violations() + run.violations() + wrapper.violations()
            self.hung = bool(probe.leftovers)  # they would disturb the points to come
        probe.outcome = wrapper.ended = None  # their tracebacks hold the frames that hold them
        self.points += 1
        if self.points % YOUNG == 0:
            gc.collect(0)
        violations += [f"leak: {line}" for line in self.finalizer_errors]
        self.finalizer_errors.clear()
        return Result(plan, probe.delivered, probe.suspensions, frozenset(probe.in_children), tuple(violations))

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        self.close()
        self._loop = loop_factory(self.kind)()
        self._loop.set_task_factory(counting_factory)
        self._loop.set_exception_handler(lambda _, context: self.finalizer_errors.append(described(context)))
        self.hung = False
        return self._loop

    def close(self) -> None:
        """Close the loop, if there is one."""
        loop, self._loop = self._loop, None
        if loop is not None:
            close_loop(loop, 0.05)


def _with(result: Result, more: list[str]) -> Result:
    return Result(result.plan, result.delivered, result.suspensions, result.in_children, (*result.violations, *more))


def _files() -> list[str]:
    try:
        return os.listdir("/proc/self/fd")
    except OSError:
        return []


def _positions_of_tasks() -> str:
    """Describe where every task is suspended, in one line."""
    places: list[str] = []
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=1)
        place = f"{frames[-1].f_code.co_name}:{frames[-1].f_lineno}" if frames else "nowhere"
        places.append(f"{task.get_name()} in {place}")
    return ", ".join(sorted(places))
