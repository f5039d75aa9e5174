"""OpenTelemetryHook: spans and metrics of a session, read back from the SDK."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aiohooks as ah
from aiohooks.adapters.opentelemetry import OpenTelemetryHook
from tests.support.hooks import PhaseHook, Stubborn
from tests.support.sessions import doubling
from tests.support.waiting import parked, suspend, ticks

pytestmark = pytest.mark.every_python


class Telemetry:
    """An SDK in memory, and the hook that uses it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.hook = OpenTelemetryHook(tracer_provider=self.provider, meter_provider=meters)

    @property
    def spans(self) -> list[ReadableSpan]:
        """The spans that have ended, in that order."""
        return list(self._exporter.get_finished_spans())

    def tree(self) -> list[tuple[str, str | None]]:
        """The name of each span that has ended, and that of its parent."""
        names = {span.context.span_id: span.name for span in self.spans if span.context is not None}
        return [
            (span.name, None if span.parent is None else names.get(span.parent.span_id, "?"))
            for span in self.spans
        ]

    def counts(self) -> dict[tuple[object, ...], int]:
        """How often each duration was measured: of a `run` or a `wait`, with the values of the
        attributes.
        """
        data = self._reader.get_metrics_data()
        return {
            (
                metric.name.split(".")[1],
                *(value for _, value in sorted((point.attributes or {}).items())),
            ): point.count  # type: ignore[union-attr]
            for resource in (data.resource_metrics if data is not None else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


@pytest.fixture
def telemetry() -> Telemetry:
    """An SDK of its own for each test."""
    return Telemetry()


class Waits(ah.SessionRunHook):
    """Waits in `before_run` for an event."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await self.event.wait()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_run_is_a_span(telemetry: Telemetry, tmp_path: Path, shared: bool) -> None:
    """With session, step, attempt and the name of a run that processes share; inside the caller's;
    hooks have none.
    """
    hooks = [telemetry.hook, ah.NanHook("loss")]
    async with ah.open_step_store(
        f"local://{tmp_path}" if shared else "memory://", run="digits"
    ) as store:
        await store.advance(4)
        async with doubling(*hooks, global_step=store, name="t") as session:
            with telemetry.tracer.start_as_current_span("epoch") as outside:
                await session.run("loss")
                assert trace.get_current_span() is outside
                await session.run("loss")
    assert telemetry.tree() == [("run", "epoch"), ("run", "epoch"), ("epoch", None)]
    names = {"aiohooks.session": "t", **({"aiohooks.run": "digits"} if shared else {})}
    assert telemetry.spans[1].attributes == {**names, "aiohooks.step": 6, "aiohooks.attempt": 1}
    assert telemetry.counts() == {("run", *(["digits"] if shared else []), "t"): 2}


async def test_the_span_is_current_inside_the_run(telemetry: Telemetry) -> None:
    """Spans made in the step and in hooks, also in those that wait, are children of the run's; no
    span is current after it.
    """

    async def step() -> dict[str, int]:
        with telemetry.tracer.start_as_current_span("step"):
            await asyncio.sleep(0)
        return {"loss": 1}

    class Traced(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            await asyncio.sleep(0)
            telemetry.tracer.start_span("before").end()

        async def after_run(self, *_: object) -> None:
            telemetry.tracer.start_span("after").end()

    async with ah.AsyncMonitoredSession(step, [Traced(), Traced(), telemetry.hook]) as session:
        await session.run("loss")
        assert trace.get_current_span() is trace.INVALID_SPAN
    assert telemetry.tree() == [
        ("before", "run"),
        ("Traced.before_run", "run"),
        ("before", "run"),
        ("Traced#2.before_run", "run"),
        ("step", "run"),
        ("step", "run"),
        ("after", "run"),
        ("after", "run"),
        ("run", None),
    ]


async def test_what_waited_is_a_span(telemetry: Telemetry) -> None:
    """Hooks that wait are spans from there to their ends, also where they overlap, and their waits
    are measured.
    """
    hooks = [Waits(), Waits()]
    async with doubling(telemetry.hook, *hooks, name="t") as session:
        run = await parked(session.run("loss"))
        await ticks()
        hooks[1].event.set()
        await ticks()
        assert telemetry.tree() == [("Waits#2.before_run", "?")]
        hooks[0].event.set()
        await run
    assert telemetry.tree() == [
        ("Waits#2.before_run", "run"),
        ("Waits.before_run", "run"),
        ("run", None),
    ]
    begun = {span.name: span.start_time or 0 for span in telemetry.spans}
    assert begun["run"] <= begun["Waits.before_run"] <= begun["Waits#2.before_run"]
    waits = [("wait", "t", f"Waits{number}.before_run") for number in ("", "#2")]
    assert telemetry.counts() == dict.fromkeys([("run", "t"), *waits], 1)


async def test_a_cancelled_run_ends_all_its_spans(telemetry: Telemetry) -> None:
    """After a cancellation the spans of the run and of its waits have ended, with the cancellation
    as their error.
    """
    async with doubling(telemetry.hook, Waits(), Waits()) as session:
        run = await parked(session.run("loss"))
        await ticks()
        run.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await run
    assert sorted(telemetry.tree()) == [
        ("Waits#2.before_run", "run"),
        ("Waits.before_run", "run"),
        ("run", None),
    ]
    assert {span.status.status_code for span in telemetry.spans} == {trace.StatusCode.ERROR}


async def test_a_hook_that_is_left_running(telemetry: Telemetry) -> None:
    """The span of a hook that ignores its cancellation ends with the run; its own end is no further
    span.
    """
    stubborn = Stubborn()
    hooks: list[Any] = [
        telemetry.hook,
        PhaseHook("before_run", suspend),
        ah.configure(stubborn, timeout=0.01, on_error="log"),
    ]
    async with doubling(*hooks, stop_grace_period_secs=0.01) as session:
        await session.run("loss")
        spans = telemetry.tree()
        stubborn.released.set()
        await ticks()
    assert ("Stubborn.before_run", "run") in spans
    assert telemetry.tree() == spans
