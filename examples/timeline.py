"""What runs concurrently in a session: feeds taken ahead, hooks that wait, a hook in the background, and checkpoints.

In turn, all of this would take more than twice as long. The session records the timeline of its last steps, which
https://ui.perfetto.dev and chrome://tracing open.

Usage: python examples/timeline.py [FILE]
"""

import argparse
import asyncio
import os
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


def main() -> None:
    """Parse the command line, train, and write the timeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="FILE", nargs="?", default="trace.json", help="the file to write (trace.json)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ah.run(train, os.path.join(directory, "checkpoints"), options.trace)


if __name__ == "__main__":
    main()
