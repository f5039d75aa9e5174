"""What runs concurrently in a session: feeds taken ahead, hooks that wait, a hook in the background, and checkpoints.

In turn, all of this would take more than twice as long. The session records its timeline, and this program prints that of its
last steps; with --picture it draws the picture of the README.

Usage: python examples/timeline.py [--picture FILE]
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator

import aiohooks as ah

STEPS = 9
SHOWN = 3


class Upload(ah.SessionRunHook):
    """Fetches something before the step, and sends something behind it."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0.006)

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await asyncio.sleep(0.010)


class Audit(ah.SessionRunHook):
    """Writes a record before the step and behind it."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0.009)

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await asyncio.sleep(0.007)


class Metrics(ah.SessionRunHook):
    """Sends metrics, which may take longer than the rest of the step."""

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await asyncio.sleep(0.024)


async def batches() -> AsyncIterator[int]:
    """Yield a batch every 18 ms."""
    for batch in range(1, STEPS + 1):
        await asyncio.sleep(0.018)
        yield batch


async def train_step(batch: int) -> dict[str, float]:
    """Make a step."""
    await asyncio.sleep(0.012)
    return {"loss": 1 / batch}


async def train(directory: str, trace: str) -> None:
    """Train, and record what overlaps."""
    async with ah.AsyncMonitoredSession(
        train_step,
        [
            ah.TimelineHook(trace, window_steps=SHOWN),
            Upload(),
            Audit(),
            ah.configure(Metrics(), background=True),
            ah.CheckpointSaverHook(directory, every=ah.Every(steps=2), save_on_begin=False, save_on_end=False),
        ],
        name="trainer",
    ) as session:
        async for _ in session.steps("loss", feeds=batches(), prefetch=1):
            pass


def main() -> int:
    """Parse the command line, train, and draw the timeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", metavar="FILE", help="draw the timeline, as PNG or SVG, and print nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trace = os.path.join(directory, "trace.json")
        ah.run(train, os.path.join(directory, "checkpoints"), trace)
        how = ["--terminal"] if options.picture is None else ["-o", options.picture]
        return subprocess.call([sys.executable, "-m", "aiohooks", "plot", trace, *how])


if __name__ == "__main__":
    sys.exit(main())
