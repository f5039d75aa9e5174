"""A row about steps with a timeline, against steps without one."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohooks as ah
from tests.benchmarks.measure import Counts, Figure, Lane, Setup
from tests.benchmarks.rows_hooks import NoOpHook

TIMELINE_BAR = 1.05
STEP_SECS = 0.001


class Waiting(ah.SessionRunHook):
    """Suspends once before each run."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)


async def train(batch: float) -> dict[str, float]:
    """One step."""
    return {"loss": batch}


def additions_in(secs: float) -> int:
    """Return how many additions take so much time of a processor that nothing disturbs."""
    count = 10_000

    def secs_of_them() -> float:
        began = time.thread_time()
        add(count)
        return time.thread_time() - began

    return int(count * secs / min(secs_of_them() for _ in range(20)))


def add(count: int) -> float:
    """Compute."""
    total = 0.0
    for number in range(count):
        total += number
    return total


@asynccontextmanager
async def timeline(counts: Counts) -> AsyncIterator[Setup]:
    """A step of 1 ms with three hooks, one of which waits, recorded by `ProfilerHook`, against the
    same without it; in CPU time.

    Nothing waits for anything but the loop, so CPU time is what the run takes, without what other
    processes do meanwhile.
    """
    additions = additions_in(STEP_SECS)

    async def compute(batch: float) -> dict[str, float]:
        return {"loss": batch + add(additions)}

    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        profiler = ah.hooks.ProfilerHook(folder, every=ah.Every(steps=1), window_steps=1_000_000)

        async def steps(*more: ah.SessionRunHook) -> Lane:
            hooks = [*more, Waiting(), NoOpHook(), NoOpHook()]
            session = await stack.enter_async_context(ah.AsyncMonitoredSession(compute, hooks))

            async def lane(times: int) -> float:
                began = time.thread_time()
                for _ in range(times):
                    await session.run("loss", {"batch": 1.0})
                return time.thread_time() - began

            return lane

        yield Setup(
            {"on": await steps(profiler), "off": await steps()},
            [
                Figure(
                    "CPU of a step of 1 ms and 3 hooks recorded / not recorded",
                    TIMELINE_BAR,
                    "on",
                    "off",
                )
            ],
        )
