"""Rows about telemetry: the spans of a hook against spans made by hand, and steps with a timeline
against steps without one.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

import aiohooks as ah
from aiohooks.adapters.opentelemetry import OpenTelemetryHook
from tests.benchmarks.measure import Counts, Figure, Lane, Setup, compared, repeated
from tests.benchmarks.rows_hooks import NoOpHook

BAR = 1.5
WAITING = 2
TIMELINE_BAR = 1.05
STEP_SECS = 0.001


class Waiting(ah.SessionRunHook):
    """Suspends once before each run; given a tracer, inside a span of its own."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer = tracer

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        if self.tracer is None:
            await asyncio.sleep(0)
        else:
            with self.tracer.start_as_current_span("Waiting.before_run"):
                await asyncio.sleep(0)


async def train(batch: float) -> dict[str, float]:
    """One step."""
    return {"loss": batch}


@asynccontextmanager
async def opentelemetry_spans(counts: Counts) -> AsyncIterator[Setup]:
    """A run with `OpenTelemetryHook` against one with the same spans around it and in its hooks,
    made by hand.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("by hand")

    def lane(run: Callable[[], Awaitable[object]]) -> Lane:
        work = repeated(run)

        async def clearing(times: int) -> float:
            secs = await work(times)
            exporter.clear()
            return secs

        return clearing

    async with AsyncExitStack() as stack:

        async def ours(waiting: int) -> Lane:
            hooks = [
                OpenTelemetryHook(tracer_provider=provider),
                *(Waiting() for _ in range(waiting)),
            ]
            session = await stack.enter_async_context(
                ah.AsyncMonitoredSession(train, hooks, name="trainer")
            )
            return lane(lambda: session.run("loss", {"batch": 1.0}))

        async def by_hand(waiting: int) -> Lane:
            hooks = [Waiting(tracer) for _ in range(waiting)]
            session = await stack.enter_async_context(ah.AsyncMonitoredSession(train, hooks))

            async def run() -> None:
                step = session.global_step.latest.step + 1
                attributes: dict[str, str | int] = {
                    "aiohooks.session": "trainer",
                    "aiohooks.step": step,
                    "aiohooks.attempt": 1,
                }
                with tracer.start_as_current_span("run", attributes=attributes):
                    await session.run("loss", {"batch": 1.0})

            return lane(run)

        yield Setup(
            {
                "quick": await ours(0),
                "quick by hand": await by_hand(0),
                "waits": await ours(WAITING),
                "waits by hand": await by_hand(WAITING),
            },
            [
                Figure(
                    "a run with OpenTelemetryHook / a span around it by hand",
                    BAR,
                    "quick",
                    "quick by hand",
                ),
                Figure(
                    "the same, 2 hooks wait / a span in each by hand", BAR, "waits", "waits by hand"
                ),
            ],
        )


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

        yield compared(
            "CPU of a step of 1 ms and 3 hooks recorded / not recorded",
            TIMELINE_BAR,
            await steps(profiler),
            await steps(),
        )
