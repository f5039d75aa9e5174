"""A session in OpenTelemetry: a span for each run, and for each hook and operation that waited.

    session = AsyncMonitoredSession(step, [OpenTelemetryHook(), ...], name="trainer")

The span of the run is the current one in the hooks and in the step, so spans and log records made
there belong to it. It has links to spans of the other publishers of its step store, also of those
in other processes. docs/guides/telemetry.md lists the attributes and metrics.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from aiohooks._aio.contexts import current_run
from aiohooks._aio.observers import Kind
from aiohooks.errors import is_clean_end, missing_extra
from aiohooks.graph.session import Session
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook
from aiohooks.stores.base import publishers_of
from aiohooks.stores.publishers import Publishers, current_publisher

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.opentelemetry", "opentelemetry") from _missing

__all__ = ["OpenTelemetryHook"]

_W3C = TraceContextTextMapPropagator()


class OpenTelemetryHook(SessionRunHook):
    """Makes spans and metrics of the runs of a session.

    Each attempt of a run is a span "run", a child of the span that is current where `run` was
    called. It begins in the hook's `before_run`, before that of hooks with a higher order, and ends
    with the run. A hook's method and an operation that suspend are children of it, from their first
    suspension on. The span of an attempt that fails has the error, unless that is a clean end.

    If the span is sampled, the session announces it to the sessions that share its step store,
    whose runs link to it: the first span immediately, later spans to other processes when it begins
    or ends a wait.
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
            tracer_provider: makes the spans; by default the provider of the process.
            meter_provider: makes the metrics; by default the provider of the process.
        """
        meter = metrics.get_meter("aiohooks", meter_provider=meter_provider)
        self._instruments = _Instruments(
            tracer=trace.get_tracer("aiohooks", tracer_provider=tracer_provider),
            run_secs=meter.create_histogram(
                "aiohooks.run.duration", "s", "Duration of the attempts of runs."
            ),
            wait_secs=meter.create_histogram(
                "aiohooks.wait.duration", "s", "How long hooks and operations waited."
            ),
        )
        self._session: dict[str, str] = {}
        self._publishers: Publishers | None = None

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Take the names of the session and, if processes share its step store, of the run."""
        status = coord.status()
        steps = session.global_step
        self._publishers = publishers_of(steps)
        self._session = {}
        if status is not None and status.name is not None:
            self._session["aiohooks.session"] = status.name
        if not steps.inline:
            self._session["aiohooks.run"] = steps.run

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Begin the span of the run, and make it the current span."""
        scope = current_run()
        if scope is None:
            return None
        publisher = current_publisher()
        links: list[trace.Link] = []
        if self._publishers is not None:
            traces = self._publishers.traces(without=publisher)
            links = [_link(traceparent, name) for traceparent, name in traces.items()]
        span = _RunSpan(
            self._instruments,
            self._session,
            run_context,
            links,
        )
        scope.observers += (span,)
        # Others could not follow a link to a span that is not sampled.
        if publisher is not None and (traceparent := span.traceparent):
            publisher.set_trace(traceparent)
        return None


class _Instruments(NamedTuple):
    """The tracer, and the histograms of runs and waits."""

    tracer: trace.Tracer
    run_secs: metrics.Histogram
    wait_secs: metrics.Histogram


class _RunSpan:
    """The span of an attempt of a run, with the spans of its waits."""

    def __init__(
        self,
        instruments: _Instruments,
        session: Mapping[str, str],
        run_context: SessionRunContext,
        links: Sequence[trace.Link],
    ) -> None:
        self._instruments = instruments
        self._session = session
        self._began = time.perf_counter()
        self._span = instruments.tracer.start_span(
            "run",
            attributes={
                **session,
                "aiohooks.step": run_context.global_step,
                "aiohooks.attempt": run_context.attempt,
            },
            links=links,
        )
        self._outside = context.get_current()
        self._inside = trace.set_span_in_context(self._span, self._outside)
        self._waiting: dict[trace.Span, None] = {}
        context.attach(self._inside)

    @property
    def traceparent(self) -> str:
        """The header with which others link to the span; empty if the span is not collected."""
        carrier: dict[str, str] = {}
        if self._span.get_span_context().trace_flags.sampled:
            _W3C.inject(carrier, self._inside)
        return carrier.get("traceparent", "")

    def started(self, kind: Kind, what: str) -> _Wait:
        return _Wait(self, what)

    def wait_started(self, what: str) -> trace.Span:
        span = self._instruments.tracer.start_span(what, context=self._inside)
        self._waiting[span] = None
        return span

    def wait_ended(
        self,
        span: trace.Span,
        what: str,
        secs: float,
        error: BaseException | None,
    ) -> None:
        # A wait that is still running when the run ends has no span any more.
        if span not in self._waiting:
            return
        del self._waiting[span]
        self._instruments.wait_secs.record(secs, {**self._session, "aiohooks.wait": what})
        _end(span, error)

    def attempt_ended(self, error: BaseException | None) -> None:
        for span in self._waiting:
            span.end()
        self._waiting.clear()
        # Not `detach`, whose token belongs to one context: a hook may be called in a copy of the
        # caller's.
        context.attach(self._outside)
        attributes = dict(self._session)
        if error is not None and not is_clean_end(error):
            attributes["error.type"] = type(error).__qualname__
        self._instruments.run_secs.record(time.perf_counter() - self._began, attributes)
        _end(self._span, error)


class _Wait:
    """A hook's method or an operation, which has a span once it has suspended."""

    __slots__ = ("_began", "_run", "_span", "_what")

    def __init__(self, run: _RunSpan, what: str) -> None:
        self._run = run
        self._what = what
        self._span: trace.Span | None = None
        self._began: float

    def suspended(self) -> None:
        self._span = self._run.wait_started(self._what)
        self._began = time.perf_counter()

    def ended(self, error: BaseException | None) -> None:
        if self._span is not None:
            self._run.wait_ended(
                self._span,
                self._what,
                time.perf_counter() - self._began,
                error,
            )


# Cached, because each run links to the same spans until their publishers announce others.
@functools.lru_cache(maxsize=1024)
def _link(traceparent: str, publisher: str) -> trace.Link:
    """Return a link to the span of a publisher."""
    span = trace.get_current_span(_W3C.extract({"traceparent": traceparent}))
    return trace.Link(span.get_span_context(), {"aiohooks.publisher": publisher})


def _end(span: trace.Span, error: BaseException | None) -> None:
    if error is not None and not is_clean_end(error) and span.is_recording():
        name = type(error).__qualname__
        span.record_exception(error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, f"{name}: {error}"))
        span.set_attribute("error.type", name)
    span.end()
