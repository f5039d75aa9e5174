"""Weights come as directories that another process writes: a watcher looks for the next one. The trainer is killed.

The period here is a tenth of what is common.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohooks as ah

from .shape import Fault, Shape

POLL_SECS, WANTED = 0.1, 3
ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def trainer(how: str) -> AsyncIterator[tuple[Path, asyncio.subprocess.Process]]:
    """A trainer in another process that has published version 2; its directory is removed afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "examples.before_after.trainer_process", directory, how,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            yield Path(directory), process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def old(fault: Fault) -> None:
    """A directory does not know who was going to fill it."""
    async with trainer("files") as (directory, process):
        fault.strikes()
        process.kill()
        while not (directory / f"step_{WANTED}" / "STABLE").exists():  # noqa: ASYNC110 - this is the old shape
            await asyncio.sleep(POLL_SECS)


async def ours(fault: Fault) -> None:
    """The system tells, as an event, that the process is dead that had registered as the publisher."""
    async with trainer("store") as (directory, process), ah.open_step_store(f"local://{directory}", run="training") as versions:
        waiting = asyncio.ensure_future(versions.wait_for(WANTED))
        await asyncio.sleep(0)
        fault.strikes()
        process.kill()
        await waiting


SHAPE = Shape(
    name="poll of a directory",
    fault="the trainer's process is killed",
    old_code="while not (path / 'STABLE').exists(): await sleep(1.0)",
    our_code="await versions.wait_for(n)",
    names="trainer",
    old=old,
    ours=ours,
)
