"""A session in OpenTelemetry: a span for each run, and for each hook and operation that waited.

    session = AsyncMonitoredSession(step, [OpenTelemetryHook(), ...], name="trainer")

The span of the run is the current span in the hooks and in the step, so their spans and log records
belong to it. docs/guides/telemetry.md lists the attributes and metrics.

attempt   one try of a run: a recovery makes another one
wait      a hook's method or an operation that has suspended, so that others could run
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from aiohooks._core.activity import Kind, current_run
from aiohooks.errors import is_clean_end, missing_extra
from aiohooks.graph.session import Session
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook

try:
    from opentelemetry import context, metrics, trace
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.opentelemetry", "opentelemetry") from _missing

__all__ = ["OpenTelemetryHook"]


class OpenTelemetryHook(SessionRunHook):
    """Creates spans and metrics for the runs of a session.

    Each attempt of a run has a span "run". Its parent is the current span of the caller of `run`.
    The span begins in the hook's `before_run`, before the `before_run` of hooks with a higher
    order, and ends with the attempt. A hook's method or an operation that suspends has a child span
    from its first suspension to its end. The span of an attempt that fails records the error,
    unless the error is a clean end.
    """

    order: ClassVar[int] = -1000

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        """Create the hook.

        Args:
            tracer_provider: makes the spans, by default the provider of the process.
            meter_provider: makes the metrics, by default the provider of the process.
        """
        meter = metrics.get_meter("aiohooks", meter_provider=meter_provider)
        self._instruments = _Instruments(
            tracer=trace.get_tracer("aiohooks", tracer_provider=tracer_provider),
            run_secs=meter.create_histogram(
                "aiohooks.run.duration",
                "s",
                "Duration of the attempts of runs.",
            ),
            wait_secs=meter.create_histogram(
                "aiohooks.wait.duration",
                "s",
                "How long hooks and operations waited.",
            ),
            attributes={},
        )

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Label the metrics with the names of the session and of the run.

        The run has a name only if processes share the step store.
        """
        status = coord.status()
        steps = session.global_step
        attributes: dict[str, str] = {}
        if status is not None and status.name is not None:
            attributes["aiohooks.session"] = status.name
        if not steps.inline:  # processes share the store
            attributes["aiohooks.run"] = steps.run
        self._instruments = self._instruments._replace(attributes=attributes)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Begin the span of the run, and make it the current span."""
        scope = current_run()
        # There is no current run if a test calls this method itself.
        if scope is None:
            return None
        scope.observers += (_RunSpan(self._instruments, run_context),)
        return None


class _Instruments(NamedTuple):
    """The tracer, the histograms of runs and waits, and the attributes of the session."""

    tracer: trace.Tracer
    run_secs: metrics.Histogram
    wait_secs: metrics.Histogram
    attributes: Mapping[str, str]


class _RunSpan:
    """The span of an attempt of a run, with the spans of its waits."""

    def __init__(
        self,
        instruments: _Instruments,
        run_context: SessionRunContext,
    ) -> None:
        self.instruments = instruments
        self._start_secs = time.perf_counter()
        self._span = instruments.tracer.start_span(
            "run",
            attributes={
                **instruments.attributes,
                "aiohooks.step": run_context.global_step,
                "aiohooks.attempt": run_context.attempt,
            },
        )
        # The context of the caller, which becomes the current one again, and the context in which
        # the span of the run is the current span.
        self._outer_context = context.get_current()
        self.inner_context = trace.set_span_in_context(self._span, self._outer_context)
        self.waits: dict[trace.Span, None] = {}
        """The spans of the current waits. The dict is an ordered set: its values mean nothing."""
        context.attach(self.inner_context)

    def started(self, kind: Kind, what: str) -> _Wait:
        """Observe a call, which gets a span only if it suspends."""
        return _Wait(self, what)

    def attempt_ended(self, error: BaseException | None) -> None:
        """End the spans of the run and of its waits, and record the duration."""
        for span in self.waits:
            span.end()
        self.waits.clear()
        # Not `context.detach`: its token belongs to one context, and the hook may have been called
        # in a copy of the caller's context.
        context.attach(self._outer_context)
        attributes = dict(self.instruments.attributes)
        if error is not None and not is_clean_end(error):
            attributes["error.type"] = type(error).__qualname__
        self.instruments.run_secs.record(time.perf_counter() - self._start_secs, attributes)
        _end_span(self._span, error)


class _Wait:
    """A call of a hook's method or an operation, which has a span once it has suspended."""

    def __init__(self, run: _RunSpan, what: str) -> None:
        self._run = run
        self._what = what
        # The span, or None while the call has not suspended.
        self._span: trace.Span | None = None

    def suspended(self) -> None:
        """Begin the span at the first suspension of the call, as a child of that of the run."""
        run = self._run
        span = run.instruments.tracer.start_span(self._what, context=run.inner_context)
        run.waits[span] = None
        self._span = span
        self._start_secs = time.perf_counter()

    def ended(self, error: BaseException | None) -> None:
        run = self._run
        span = self._span
        # If the run has ended before the wait, it has ended the span as well.
        if span is None or span not in run.waits:
            return
        del run.waits[span]
        secs = time.perf_counter() - self._start_secs
        run.instruments.wait_secs.record(
            secs,
            {**run.instruments.attributes, "aiohooks.wait": self._what},
        )
        _end_span(span, error)


def _end_span(span: trace.Span, error: BaseException | None) -> None:
    """End a span, and record the error of its call unless the error is a clean end."""
    if error is not None and not is_clean_end(error) and span.is_recording():
        name = type(error).__qualname__
        span.record_exception(error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, f"{name}: {error}"))
        span.set_attribute("error.type", name)
    span.end()
