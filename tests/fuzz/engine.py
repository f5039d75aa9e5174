"""Fires plans one after the other inside one event loop, and judges each.

A point is one run of a scenario in a wrapper with one or two shots that were accepted. Everything that can be checked at
once is checked after every point; what only the garbage collector brings to light (exceptions never retrieved, coroutines
never awaited), files and threads are checked after every batch, and if something is found the batch's points are fired again
one by one to say which it was.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from tests.fuzz.driver import HARNESS, CountingTask, Probe, Shot, counting_factory
from tests.fuzz.wrappers import Wrapper

BATCH = 250
PIECE_SECS = 0.02
YOUNG = 25
"""After so many points the youngest garbage is collected: keeps `all_tasks()` short, and complaints near their cause."""


class Run(Protocol):
    """One run of a scenario: what to do, and what must hold."""

    async def operation(self) -> None:
        """What is cancelled."""

    def look(self) -> None:
        """Called at every suspension; raises or notes if something does not hold at that moment."""

    def status(self) -> list[str]:
        """What is wrong afterwards."""


class Scenario(Protocol):
    """Makes runs that are the same for the same seed."""

    @property
    def name(self) -> str:
        """What it is called in tables and plans."""

    @property
    def hang_secs(self) -> float:
        """After how long it counts as hanging."""

    def __call__(self, probe: Probe, rng: random.Random) -> Run: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is needed to fire a point again."""

    scenario: Scenario
    seed: int
    wrapper: type[Wrapper]
    shots: tuple[Shot, ...]

    def __str__(self) -> str:
        shots = " then ".join(f"{shot.how} {shot.flavour} {shot.victim} at {shot.at}" for shot in self.shots) or "no cancel"
        return f"{self.scenario.name!r} seed {self.seed} in {self.wrapper.name!r}: {shots}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one plan."""

    plan: Plan
    fired: int
    suspensions: int
    in_children: frozenset[int]
    """The suspensions that happened in other tasks than the operation's."""
    violations: tuple[str, ...]


@dataclass(slots=True)
class Range:
    """A loop to fire in, of asyncio or uvloop; replaced by a new one when an operation hangs in it.

    Used as a context manager, for it hears what finalisers complain of and collects garbage only between batches.
    """

    kind: str = "asyncio"
    most_hangs: int = 5
    """Each costs seconds: after so many the rest is not fired."""
    heard: list[str] = field(default_factory=list)
    hung: bool = False
    fired: int = 0
    hangs: int = 0
    _loop: asyncio.AbstractEventLoop | None = None
    _listening: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        self._listening.enter_context(_listening(self.heard))
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self._listening.close()

    @property
    def gave_up(self) -> bool:
        """Whether too many have hung."""
        return self.hangs >= self.most_hangs

    def fire(self, plans: Iterable[Plan]) -> Iterator[Verdict]:
        """Fires the plans; gives each status when its batch has been checked."""
        batch: list[Plan] = []
        for plan in plans:
            batch.append(plan)
            if self.gave_up:
                return
            if len(batch) == BATCH:
                yield from self._fire_batch(batch)
                batch = []
        yield from self._fire_batch(batch)

    def _fire_batch(self, batch: list[Plan]) -> Iterator[Verdict]:
        verdicts: list[Verdict] = []
        unheard = self._checked(batch, verdicts)
        if unheard and len(batch) > 1:
            verdicts = []
            for plan in batch:
                one: list[Verdict] = []
                found = self._checked([plan], one)
                verdicts += [_with(status, found) for status in one]
                unheard = [line for line in unheard if not found]
        if unheard and verdicts:
            verdicts[-1] = _with(verdicts[-1], [f"I9, somewhere in the last {len(batch)} points: {one}" for one in unheard])
        yield from verdicts

    def _checked(self, batch: list[Plan], verdicts: list[Verdict]) -> list[str]:
        """Fires a batch and says what was found only after collecting garbage."""
        if not batch:
            return []
        loop = self._loop or self._new_loop()
        files, threads = _files(), set(threading.enumerate())
        left = list(batch)
        while left and not self.gave_up:
            master = CountingTask(self._fire_some(left, verdicts), loop=loop, name=f"{HARNESS} master")
            loop.run_until_complete(master)
            if self.hung:
                loop, files = self._new_loop(), _files()
        self.heard.clear()
        gc.collect()
        loop.run_until_complete(asyncio.sleep(0))
        gc.collect()
        found = [f"I9: {line}" for line in self.heard]
        if len(_files()) > len(files):
            found.append(f"I9: {len(_files()) - len(files)} more file descriptors")
        found += [
            f"I9: thread {thread.name!r}"
            for thread in set(threading.enumerate()) - threads
            if not thread.name.startswith("AnyIO worker")
        ]
        self.heard.clear()
        return found

    async def _fire_some(self, left: list[Plan], verdicts: list[Verdict]) -> None:
        while left and not self.hung:
            verdicts.append(await self.shoot(left.pop(0)))

    async def shoot(self, plan: Plan) -> Verdict:
        """Fires one plan in the running loop."""
        probe = Probe(plan.shots)
        run = plan.scenario(probe, random.Random(plan.seed))
        probe.look = run.look
        wrapper = plan.wrapper(probe, run.operation, stale=(plan.seed + sum(shot.at for shot in plan.shots)) % 2)
        loop = asyncio.get_running_loop()
        # A context of its own: what one run leaves in context variables is not the next one's.
        root = CountingTask(wrapper.root_main(), loop=loop, name=f"{HARNESS} root", context=contextvars.copy_context())
        # In small pieces, each of which lets the loop go on: on a busy machine time alone says nothing.
        for _ in range(round(plan.scenario.hang_secs / PIECE_SECS)):
            if (await asyncio.wait([root], timeout=PIECE_SECS))[0]:
                break
        violations: list[str]
        if not root.done():
            violations = [f"I36: hangs: {_whereabouts()}"]
            self.hung = True
            self.hangs += 1
        else:
            violations = probe.status() + wrapper.amiss() + run.status()
            self.hung = bool(probe.leftovers)  # they would disturb the points to come
        probe.outcome = wrapper.ended = None  # their tracebacks hold the frames that hold them
        self.fired += 1
        if self.fired % YOUNG == 0:
            gc.collect(0)
        violations += [f"I9: {line}" for line in self.heard]
        self.heard.clear()
        return Verdict(plan, probe.fired, probe.suspensions, frozenset(probe.in_children), tuple(violations))

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        self.close()
        if self.kind == "uvloop":
            import uvloop

            self._loop = uvloop.new_event_loop()
        else:
            self._loop = asyncio.SelectorEventLoop()
        self._loop.set_task_factory(counting_factory)
        self._loop.set_exception_handler(lambda _, context: self.heard.append(_told(context)))
        self.hung = False
        return self._loop

    def close(self) -> None:
        """Closes the loop; what hangs in it is cancelled as `asyncio.run` would, for a while."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        tasks = asyncio.all_tasks(loop)
        for _ in range(5):
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=0.05))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _with(status: Verdict, more: list[str]) -> Verdict:
    return Verdict(status.plan, status.fired, status.suspensions, status.in_children, (*status.violations, *more))


@contextmanager
def _listening(heard: list[str]) -> Iterator[None]:
    """Hears what finalisers complain of, and keeps the collector from running in the middle of a point."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: heard.append(f"{unraisable.exc_value!r} in {unraisable.object!r}")
    disabled = logging.root.manager.disable
    logging.disable()  # failures are the business of every point here
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()  # what was there before need not be looked through again after every batch
        try:
            yield
        finally:
            gc.unfreeze()
            if enabled:
                gc.enable()
            sys.unraisablehook = hook
            logging.disable(disabled)


def _told(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r} {context.get('task') or context.get('future') or ''}"


def _files() -> list[str]:
    try:
        return os.listdir("/proc/self/fd")
    except OSError:
        return []


def _whereabouts() -> str:
    """Where every task stands, in a line."""
    places: list[str] = []
    for task in asyncio.all_tasks():
        frames = task.get_stack(limit=1)
        place = f"{frames[-1].f_code.co_name}:{frames[-1].f_lineno}" if frames else "nowhere"
        places.append(f"{task.get_name()} in {place}")
    return ", ".join(sorted(places))
