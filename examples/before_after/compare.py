"""Inject the same fault into the old program and ours, and measure how soon each notices it.

Usage: python -m examples.before_after [--bound SECS] [--markdown]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence

from . import (
    condition_capacity,
    dead_producer,
    directory_poll,
    event_checked,
    heartbeat_poll,
    polled_step,
    restarted_lower,
    sentinel_cascade,
)
from .shape import Fault, Program, Shape

SHAPES: tuple[Shape, ...] = (
    directory_poll.SHAPE,
    event_checked.SHAPE,
    dead_producer.SHAPE,
    condition_capacity.SHAPE,
    sentinel_cascade.SHAPE,
    heartbeat_poll.SHAPE,
    polled_step.SHAPE,
    restarted_lower.SHAPE,
)


START_SECS = 60.0
"""A guard against hanging: how long a program may take until its fault; one of them starts a
process first.
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one program ended: `secs` after the fault, or still waiting at the bound."""

    hangs: bool
    secs: float
    error: str

    def __str__(self) -> str:
        if self.hangs:
            return f"still waits after {self.secs:.1f} s"
        end = f"raises {self.error}" if self.error else "continues"
        return f"{end} after {self.secs * 1000:.1f} ms"


async def _observe(program: Program, bound_secs: float) -> Outcome:
    # Tasks of the old programs die with an error that is never retrieved; the table needs no log
    # lines of them.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    fault = Fault()
    task = asyncio.ensure_future(program(fault))
    fault_injected = asyncio.ensure_future(fault.injected.wait())
    await asyncio.wait(
        [task, fault_injected], timeout=START_SECS, return_when=asyncio.FIRST_COMPLETED
    )
    if fault.at is None:
        fault_injected.cancel()
        if task.done():
            task.result()
        raise RuntimeError(f"the fault was not injected within {START_SECS} s")
    await asyncio.wait([task], timeout=fault.at + bound_secs - time.monotonic())
    ended = time.monotonic()
    if not task.done():
        return Outcome(True, ended - fault.at, "")
    error = task.exception()
    if error is None:
        return Outcome(False, ended - fault.at, "")
    notes = "; ".join(getattr(error, "__notes__", ()))
    return Outcome(
        False,
        ended - fault.at,
        f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else ""),
    )


def observe(program: Program, bound_secs: float) -> Outcome:
    """Run one program in a new event loop until it ends, or until `bound_secs` after the fault."""
    return asyncio.run(_observe(program, bound_secs))


def _table(rows: Sequence[Sequence[str]], markdown: bool) -> str:
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|" + "---|" * len(rows[0]))
        return "\n".join(lines)
    return "\n\n".join(
        "\n".join(f"{title + ':':10} {cell}" for title, cell in zip(rows[0], row, strict=True))
        for row in rows[1:]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pairs and print how they end."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.before_after",
        description=__doc__.split("\n")[0] if __doc__ else "",
    )
    parser.add_argument(
        "--bound",
        type=float,
        default=2.0,
        metavar="SECS",
        help="how long a program may run after the fault",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/guides/replace-polling.md"
    )
    options = parser.parse_args(arguments)
    if not 0 < options.bound < 3600:
        parser.error(f"--bound is {options.bound}: give seconds, above 0")
    # Neither warnings about dead publishers nor errors of programs that are cut off at the bound
    # are needed beside the table.
    logging.getLogger("aiohooks").setLevel(logging.CRITICAL)
    rows: list[Sequence[str]] = [("shape", "fault", "old code", "old", "our code", "ours")]
    for shape in SHAPES:
        old, ours = observe(shape.old, options.bound), observe(shape.ours, options.bound)
        code = [f"`{one}`" if options.markdown else one for one in (shape.old_code, shape.our_code)]
        rows.append((shape.name, shape.fault, code[0], str(old), code[1], str(ours)))
    print(_table(rows, options.markdown))
    return 0
