"""A trainer in another process writes weights into directories, and a program waits for the next
one. The trainer is killed.

The polling period is a tenth of a common one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohooks as ah

from .shape import Fault, Shape

POLL_SECS, WANTED = 0.1, 3
ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def trainer(how: str) -> AsyncIterator[tuple[Path, Callable[[], None]]]:
    """Start a trainer that publishes version 2; yield its directory and a function that kills
    it.
    """
    with tempfile.TemporaryDirectory() as directory:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "examples.before_after.trainer_process",
            directory,
            how,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
        )
        once = (
            contextlib.ExitStack()
        )  # a second kill would poll the process, and asyncio would miss its exit
        once.callback(process.kill)
        try:
            assert process.stdout is not None
            await process.stdout.readline()
            yield Path(directory), once.close
        finally:
            with contextlib.suppress(ProcessLookupError):
                once.close()
            await process.wait()


async def old(fault: Fault) -> None:
    """The directory does not know its writer, so its death does not end the polling."""
    async with trainer("files") as (directory, kill):
        fault.record()
        kill()
        # The polling that is replaced.
        while not (directory / f"step_{WANTED}" / "STABLE").exists():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECS)


async def ours(fault: Fault) -> None:
    """The store is notified of the death of the process that registered as publisher."""
    async with (
        trainer("store") as (directory, kill),
        ah.open_step_store(f"local://{directory}", run="training") as versions,
    ):
        waiting = asyncio.ensure_future(versions.wait_for(WANTED))
        await asyncio.sleep(0)
        fault.record()
        kill()
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
