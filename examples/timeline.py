"""What runs concurrently in a session: prefetched feeds, hooks that wait, a background hook, and
checkpoints.

One after another, all of this would take more than twice as long. ProfilerHook records three steps
in a file that Perfetto (https://ui.perfetto.dev) and chrome://tracing open. This program prints how
long each of its tracks was busy.

Usage: python examples/timeline.py [FOLDER]
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohooks as ah

STEPS = 9
FIRST_RECORDED = 7


class Upload(ah.SessionRunHook):
    """Fetches something before the step, and sends something after it."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0.006)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await asyncio.sleep(0.010)


class Audit(ah.SessionRunHook):
    """Writes a record before the step and after it."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0.009)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await asyncio.sleep(0.007)


class Metrics(ah.SessionRunHook):
    """Sends metrics, which may take longer than the rest of the step."""

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
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


async def train(folder: Path) -> str:
    """Train, and return the path of the file."""
    profiler = ah.hooks.ProfilerHook(
        folder, every=ah.Every(at=(FIRST_RECORDED,)), window_steps=STEPS - FIRST_RECORDED + 1
    )
    saver = ah.CheckpointSaverHook(
        folder / "checkpoints", every=ah.Every(steps=2), save_on_begin=False, save_on_end=False
    )
    metrics = ah.configure(Metrics(), background=True)
    async with ah.AsyncMonitoredSession(
        train_step, [profiler, Upload(), Audit(), metrics, saver], name="trainer"
    ) as session:
        async for _ in session.steps("loss", feeds=batches(), prefetch=1):
            pass
    return profiler.captures[0]


def busy_milliseconds(path: str) -> dict[str, float]:
    """Return how long the tracks of a trace were busy, by their names."""
    events: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    busy = dict.fromkeys(names.values(), 0.0)
    for event in events:
        if event["ph"] == "X":
            busy[names[event["tid"]]] += event["dur"] / 1000
    return busy


def main() -> None:
    """Parse the command line, train, and print the tracks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        default=Path("timeline"),
        help="default: timeline",
    )
    options = parser.parse_args()
    path = ah.run(train, options.folder)
    print(f"wrote {path}")
    for name, milliseconds in busy_milliseconds(path).items():
        print(f"{name:26} {milliseconds:6.1f} ms")


if __name__ == "__main__":
    main()
