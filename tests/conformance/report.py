"""Replay many records in one loop, and summarise the differences."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import json
import logging
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.conformance.replay import Outcome, differences, replay_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.conformance.records import Mode, Record

LOOPS = ("asyncio", "uvloop")


@dataclass
class Report:
    """The replays of one mode on one loop; `stray` are complaints of the loop or of Python apart
    from any scenario.
    """

    mode: Mode
    loop: str
    replayed: int = 0
    secs: float = 0.0
    disagreements: list[tuple[Record, Outcome, list[str]]] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all replays agreed."""
        return not self.disagreements and not self.stray

    def __str__(self) -> str:
        agreed = self.replayed - len(self.disagreements)
        stray = f", {len(self.stray)} complaints" if self.stray else ""
        return (
            f"{self.loop:8} {self.mode:15} {agreed:6,} of {self.replayed:6,} agree{stray} "
            f" ({self.secs:.1f} s)"
        )

    def details(self) -> str:
        """Format the first disagreements."""
        blocks = [describe(*found) for found in self.disagreements[:5]]
        blocks += [f"complaint: {text}" for text in self.stray[:5]]
        return "\n\n".join([str(self), *blocks])


def describe(record: Record, outcome: Outcome, found: list[str]) -> str:
    """Format one disagreement: the scenario, then each difference."""
    lines = [line for text in found for line in text.splitlines()]
    reached = f"outcome: raised {outcome.raised} by {outcome.raised_by}, runs {outcome.runs}"
    return "\n".join([f"--- {record['id']}: {json.dumps(record['scenario'])}", *lines, reached])


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the function that makes a loop of this name."""
    if name == "uvloop":
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(
            "uvloop"
        ).new_event_loop
        return factory
    return asyncio.new_event_loop


def installed_loops() -> list[str]:
    """Return the names of the loops that are installed."""
    return [
        name for name in LOOPS if name == "asyncio" or importlib.util.find_spec(name) is not None
    ]


def replay_all(records: Iterable[Record], mode: Mode, loop: str) -> Report:
    """Replay all records in one loop; warnings and calls of the loop's exception handler count,
    too.
    """
    report = Report(mode, loop)

    async def main() -> None:
        def complain(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            report.stray.append(f"{context.get('message')}: {context.get('exception')!r}")

        asyncio.get_running_loop().set_exception_handler(complain)
        for record in records:
            outcome = await replay_record(record, mode)
            report.replayed += 1
            if found := differences(record, mode, outcome):
                report.disagreements.append((record, outcome, found))
        gc.collect()

    logger = logging.getLogger("aiohooks")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # thousands of recoveries
    start = time.perf_counter()
    with (
        warnings.catch_warnings(record=True) as caught,
        asyncio.Runner(loop_factory=loop_factory(loop)) as runner,
    ):
        warnings.simplefilter("always")
        runner.run(main())
    logger.setLevel(level)
    report.stray += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    report.secs = time.perf_counter() - start
    return report
