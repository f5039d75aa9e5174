"""The row about imports: the CPU time of a new process that imports the library, against one that
imports what it depends on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.benchmarks.measure import Counts, Figure, Lane, Setup

BAR = 1.2


def cpu_secs(program: str) -> float:
    """Run a program in a new process; return its CPU time, with that of starting Python."""
    # Without the compiled files, which this variable forbids, each process would compile everything
    # again.
    environ = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    process = os.posix_spawn(sys.executable, [sys.executable, "-c", program], environ)
    _, status, usage = os.wait4(process, 0)
    assert status == 0, program
    return usage.ru_utime + usage.ru_stime


def in_new_processes(program: str) -> Lane:
    """Make a lane that runs a program."""

    async def lane(times: int) -> float:
        return sum(cpu_secs(program) for _ in range(times))

    return lane


@asynccontextmanager
async def imports(counts: Counts) -> AsyncIterator[Setup]:
    """`import aiohooks`, and what a session needs of it, against `import anyio` with its asyncio
    backend.
    """
    yield Setup(
        {
            "anyio": in_new_processes("import anyio, anyio._backends._asyncio"),
            "front door": in_new_processes("import aiohooks"),
            "session": in_new_processes("from aiohooks import AsyncMonitoredSession"),
        },
        [
            Figure(
                "CPU of `import aiohooks` / `import anyio` with asyncio", BAR, "front door", "anyio"
            ),
            Figure(
                "`from aiohooks import AsyncMonitoredSession` / `import anyio` with asyncio",
                BAR,
                "session",
                "anyio",
            ),
        ],
        most_times=1,
        most_rounds=31,
    )
