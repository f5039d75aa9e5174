"""Plays the trials of a fault programme one after the other, and says what came of them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from tests.support.store_workers import LIMIT_SECS, StuckError


class Stage(Protocol):
    """Where trials are played."""

    late_secs: float
    """How long after the fault the last wait of the trial went on."""
    bound_secs: float
    """Within which it should."""

    async def end(self) -> str:
        """After a trial; says what is wrong with the count, or what is left in the engine."""
        ...

    async def abandon(self) -> None:
        """After a trial that went wrong: the next one begins anew."""
        ...


S = TypeVar("S", bound=Stage)


async def play(
    stage: S, count: int, faults: Sequence[tuple[str, Callable[[S], Awaitable[str]]]]
) -> tuple[Counter[str], list[str]]:
    """Plays so many trials, fault after fault; the verdicts, and what went wrong."""
    verdicts: Counter[str] = Counter()
    problems: list[str] = []
    for number, (name, trial) in zip(range(count), itertools.cycle(faults), strict=False):
        began = time.monotonic()
        try:
            status = await trial(stage)
            wrong = await stage.end()
            if not wrong and stage.late_secs > stage.bound_secs:
                wrong = f"went on after {stage.late_secs:.1f} s, more than {stage.bound_secs:g} s"
            if wrong:
                problems.append(f"trial {number}, {name}: {wrong}")
                status = "wrong"
        except AssertionError as error:
            problems.append(f"trial {number}, {name}: {error}")
            status = "stuck" if isinstance(error, StuckError) else "wrong"
            await stage.abandon()
        verdicts[f"{name}: {status}"] += 1
        print(f"{number:4} {name:38} {status:12} {stage.late_secs:6.2f} of {time.monotonic() - began:6.2f} s", flush=True)
    return verdicts, problems


def report(verdicts: Counter[str], problems: Sequence[str]) -> int:
    """Prints it; the exit code."""
    for name, times in sorted(verdicts.items()):
        print(f"{times:5} {name}")
    stuck = sum(times for name, times in verdicts.items() if name.endswith(": stuck"))
    print(f"{verdicts.total()} faults, {stuck} stuck (limit {LIMIT_SECS:g} s), {len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems else 0
