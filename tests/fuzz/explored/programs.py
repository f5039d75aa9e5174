"""All programs by name, and the bugs that must be found in them."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

from aiohooks.testing.exploration import Disturbance
from tests.fuzz.explored import signals
from tests.fuzz.explored.harness import Program, Result, explored, program_of
from tests.fuzz.explored.injected_bugs import FAULTY
from tests.fuzz.explored.scenarios import SCENARIOS
from tests.fuzz.random_programs import injected_bugs, model
from tests.fuzz.random_programs.programs import draw_with_group
from tests.fuzz.random_programs.records import TrackedTask


class Bug(NamedTuple):
    """A program with a bug, and what must be found in it."""

    program: Program
    finding: str


_SIGNALS: tuple[Disturbance, ...] = ("order", "choice", "event")
_RANDOM: tuple[Disturbance, ...] = ("order", "slow", "choice", "event")

PROGRAMS: dict[str, Program] = {one.name: program_of(one) for one in SCENARIOS}
PROGRAMS |= {
    f"signals: {one.__name__}": Program(partial(signals.run, one), _SIGNALS)
    for one in signals.SCENARIOS
}
PROGRAMS["random sessions"] = Program(model.run, _RANDOM, TrackedTask, times=100)
PROGRAMS["random groups"] = Program(
    partial(model.run, draw_with_group), _RANDOM, TrackedTask, times=50
)
BUGS: dict[str, Bug] = {
    name: Bug(program_of(one), finding) for name, (one, finding) in FAULTY.items()
}
for _name, _bug in signals.BUGS.items():
    _, _finding = _bug.found_by
    BUGS[_name] = Bug(Program(partial(signals.run_with_bug, _bug), _SIGNALS), _finding)
for _name, _bug in injected_bugs.BUGS.items():
    _program = Program(partial(injected_bugs.run_with, _bug), _RANDOM, TrackedTask, times=50)
    BUGS[f"random: {_name}"] = Bug(_program, _bug.found_by)


async def explored_program(
    name: str, program: Program, seeds: int, first: int = 0, exhaust: int | None = None
) -> Result:
    """Explore a program; each has seeds of its own, as many disturbances begin in the same way
    otherwise.
    """
    start = first + zlib.crc32(name.encode())
    return await explored(
        name, program, seeds=range(start, start + seeds * program.times), exhaust=exhaust
    )


def results(
    names: Iterable[str], seeds: int, first: int = 0, exhaust: int | None = None, jobs: int = 1
) -> Iterator[Result]:
    """Explore the programs of these names, in several processes."""
    explore = partial(_result, seeds=seeds, first=first, exhaust=exhaust)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(explore, names)


def _result(name: str, **options: Any) -> Result:
    return asyncio.run(explored_program(name, PROGRAMS[name], **options))
