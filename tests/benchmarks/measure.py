"""Measuring lanes side by side on a machine that others use too.

A row runs its lanes in many short rounds: each round runs every lane once, in an order that is
turned round each time. The lanes of one round are a few milliseconds apart and so see the same
machine; a figure is the median, over all rounds, of the ratio within a round. A slice during which
another process took the core away is run again: the operating system counts that (`ru_nivcsw`). The
garbage collector is off while a lane runs and is called between the rounds.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO

from tests.support.needs import MissingError

Lane = Callable[[int], Awaitable[float]]
"""Does its work so many times; returns the seconds that took."""

Times = Mapping[str, float]
"""Seconds for doing the work once, by lane, in one round."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is measured. The defaults are for figures; a test that only checks that a row works
    uses `TINY`.
    """

    rounds: int = 300
    slice_secs: float = 0.001
    """How long one lane runs in one round, at least."""
    parked: int = 100_000
    woken: int = 10_000
    checkpoint_bytes: int = 200_000_000


TINY = Counts(rounds=1, slice_secs=0.0, parked=20, woken=20, checkpoint_bytes=4_000_000)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: `ours` in relation to `theirs`, each a lane or made of several;
    without a bar for information.
    """

    work: str
    bar: float | None
    ours: str | Callable[[Times], float]
    theirs: str | Callable[[Times], float]
    unit: str = "us"
    """What the times are printed in; a row about memory has bytes in place of seconds, and prints
    "MB".
    """


@dataclass(frozen=True, slots=True)
class Setup:
    """What a row has ready: its lanes by name, and the figures made of them.

    `most_times` bounds how often a lane does its work in one round, `most_rounds` the rounds, where
    once takes long.
    """

    lanes: Mapping[str, Lane]
    figures: Sequence[Figure]
    most_times: int = 1_000_000
    most_rounds: int = 1_000_000


def compared(
    work: str,
    bar: float | None,
    ours: Lane,
    theirs: Lane,
    **limits: int,
) -> Setup:
    """Return the setup of a row with one figure; `limits` are those of `Setup`."""
    lanes = {"ours": ours, "theirs": theirs}
    return Setup(lanes, [Figure(work, bar, "ours", "theirs")], **limits)


MOST_TRIES = 20
"""How often a disturbed slice is run again, at most."""
MOST_SECS = 0.05
"""How long one lane keeps trying in one round; longer work is hardly ever undisturbed."""

Row = Callable[[Counts], AbstractAsyncContextManager[Setup]]
"""Opens what a row needs, and closes it afterwards."""


def imported(package: str, module: str) -> ModuleType:
    """Return a module of a package that need not be installed.

    Raises:
        MissingError: it is not.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise MissingError(f"{package} is not installed")
    return importlib.import_module(module)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table, measured; or, with `missing`, why it was not. Seconds are for doing
    the work once.
    """

    row: str
    work: str
    bar: float | None = None
    figure: float | None = None
    low: float | None = None
    """A quarter of the rounds are lower, and a quarter higher than `high`."""
    high: float | None = None
    ours_secs: float | None = None
    theirs_secs: float | None = None
    rounds: int = 0
    unit: str = "us"
    """"MB" where these are bytes, and not seconds."""
    missing: str | None = field(default=None)

    @property
    def verdict(self) -> str:
        """`ok` or `MISSED`; `-` where there is no bar, or no figure."""
        if self.figure is None or self.bar is None:
            return "-"
        return "ok" if self.figure <= self.bar else "MISSED"


def repeated(once: Callable[[], Awaitable[object]]) -> Lane:
    """Make a lane that awaits `once()` again and again."""

    async def lane(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            await once()
        return time.perf_counter() - began

    return lane


async def measure(name: str, row: Row, counts: Counts) -> list[Result]:
    """Measure all figures of a row."""
    try:
        async with row(counts) as setup:
            with _quiet_collector():
                times = {
                    lane: await _calibrated(work, setup, counts)
                    for lane, work in setup.lanes.items()
                }
                rounds = await _rounds(setup, times, min(counts.rounds, setup.most_rounds))
    except MissingError as error:
        return [Result(name, f"against {error}", missing=str(error))]
    return [_result(name, figure, rounds) for figure in setup.figures]


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep the garbage collector from running; existing objects are frozen meanwhile."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def _calibrated(lane: Lane, setup: Setup, counts: Counts) -> int:
    """Return how often a lane does its work in one round: as often as fills its slice."""
    times = 1
    while True:
        secs = await _undisturbed(lane, times)
        if secs >= counts.slice_secs or times >= setup.most_times:
            return times
        times = min(2 * times, setup.most_times)


def disturbances() -> int:
    """Return how often this thread has lost its core."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


async def _undisturbed(lane: Lane, times: int) -> float:
    """Return the seconds of the first slice that ran undisturbed, or of the quickest if there is
    none.
    """
    tried: list[float] = []
    until = time.perf_counter() + MOST_SECS
    while True:
        before = disturbances()
        secs = await lane(times)
        tried.append(secs)
        if disturbances() == before:
            return secs
        if len(tried) > MOST_TRIES or time.perf_counter() > until:
            return min(tried)


async def _rounds(setup: Setup, times: Mapping[str, int], rounds: int) -> list[Times]:
    measured: list[Times] = []
    order = list(setup.lanes)
    for _ in range(rounds):
        measured.append(
            {
                name: await _undisturbed(setup.lanes[name], times[name]) / times[name]
                for name in order
            }
        )
        order.reverse()
        gc.collect()
    return measured


def _result(row: str, figure: Figure, rounds: Sequence[Times]) -> Result:
    ours, theirs = (
        [times[one] if isinstance(one, str) else one(times) for times in rounds]
        for one in (figure.ours, figure.theirs)
    )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = (
        statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return Result(
        row,
        figure.work,
        figure.bar,
        figure=middle,
        low=low,
        high=high,
        ours_secs=statistics.median(ours),
        theirs_secs=statistics.median(theirs),
        rounds=len(rounds),
        unit=figure.unit,
    )


def blocking_writes(directory: Path, write: Callable[[IO[bytes]], object]) -> Lane:
    """Return a lane that calls `write` with a new file, and syncs it, while nothing else runs."""

    async def lane(times: int) -> float:
        secs = 0.0
        for _ in range(times):
            path, began = directory / "state", time.perf_counter()
            with path.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            secs += time.perf_counter() - began
            path.unlink()
        return secs

    return lane
