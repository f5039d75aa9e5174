"""A session in Prometheus: its state is read when Prometheus asks for it, not in each run.

    timing = HookTimingHook()
    hooks = [PrometheusHook(timing=timing), *timing.watch([saver, MyHook()])]

docs/guides/telemetry.md lists the metrics.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

from aiohooks._aio.clock import current_clock, quick_now
from aiohooks._validate import check_instance
from aiohooks.errors import InvalidArgumentError, missing_extra
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import StepRate
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook
from aiohooks.hooks.timing import BUCKET_SECS, HookTimingHook
from aiohooks.hooks.version_gate import VersionGateHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.prometheus", "prometheus") from _missing

__all__ = ["PrometheusHook"]

_SCRAPE_TIMEOUT_SECS = 5.0


class PrometheusHook(SessionRunHook):
    """Shows a session in a registry of `prometheus_client`, from its creation to its end.

    Values are read when the registry is scraped, in the session's event loop, from the session and
    the given hooks; a run costs two readings of the clock. A scrape in another thread waits for the
    event loop; if the loop is blocked for longer than five seconds, that scrape goes without the
    session. Several sessions may share a registry: the label `session` has the name of the session.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry = REGISTRY,
        timing: HookTimingHook | None = None,
        saver: CheckpointSaverHook | None = None,
        gates: Iterable[VersionGateHook] = (),
    ) -> None:
        """Create the hook; the given hooks are registered in the same session.

        Args:
            registry: where the metrics are shown; by default the registry of the process.
            timing: the hook whose measurements of the other hooks are shown.
            saver: the hook whose checkpoints are shown.
            gates: the hooks whose lag behind the versions is shown.
        """
        check_instance(registry, CollectorRegistry, "registry")
        check_instance(
            timing,
            HookTimingHook,
            "timing",
            optional=True,
        )
        check_instance(
            saver,
            CheckpointSaverHook,
            "saver",
            optional=True,
        )
        self._registry = registry
        self._timing = timing
        self._saver = saver
        self._gates = tuple(gates)
        for gate in self._gates:
            check_instance(gate, VersionGateHook, "a gate")
        self._sessions: _Sessions | None = None

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics of the registry as text, and its content type.

        `accept` is the header `Accept` of the request.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    async def begin(self) -> None:
        """Forget an earlier session."""
        self._now = quick_now()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._rate = StepRate()
        self._began: float | None = None
        self._step_counts = [0] * (len(BUCKET_SECS) + 1)
        self._step_secs = 0.0

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Show the session.

        Raises:
            InvalidArgumentError: the registry shows another session of this name.
        """
        self._coord = coord
        # A run that failed has left its start, and has no `after_run`.
        self._began = None
        if self._sessions is not None:
            return
        status = coord.status()
        self._name = ""
        if status is not None and status.name is not None:
            self._name = status.name
        sessions = _sessions_of(self._registry)
        sessions.add(self._name, self._samples)
        self._sessions = sessions
        self._rate.update(current_clock().now(), session.global_step.latest)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Note when the run begins."""
        self._began = self._now()
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Count the run."""
        if self._began is not None:
            secs = self._now() - self._began
            self._step_secs += secs
            self._step_counts[bisect_left(BUCKET_SECS, secs)] += 1

    async def close(self, exc: BaseException | None) -> None:
        """Show the session no longer."""
        # Nothing is shown if the session failed before its creation.
        if self._sessions is not None:
            del self._sessions.by_name[self._name]
            self._sessions = None

    def _samples(self) -> list[_Sample]:
        """Return the current values, in any thread; none if the event loop does not answer."""
        # An endpoint in the session's own loop must not wait for itself.
        if threading.get_ident() == self._thread:
            return list(self._read_samples())
        answer: Future[list[_Sample]] = Future()

        def read() -> None:
            try:
                answer.set_result(list(self._read_samples()))
            except BaseException as error:
                answer.set_exception(error)

        # The session changes only in its event loop, so the values are read there.
        try:
            self._loop.call_soon_threadsafe(read)
            return answer.result(_SCRAPE_TIMEOUT_SECS)
        except TimeoutError:
            return []
        except RuntimeError:
            # The session was left open when its loop ended.
            if not self._loop.is_closed():
                raise
            return []

    def _read_samples(self) -> Iterator[_Sample]:
        status = self._coord.status()
        assert status is not None, "the coordinator is that of a session"
        assert status.steps is not None, "the session has been created"
        steps = status.steps
        session = (self._name,)
        yield "runs", session, status.runs
        yield "recoveries", session, status.recoveries
        yield "global_step", session, steps.latest.step
        yield "step_waiters", session, steps.waiting
        yield "step_seconds", session, _histogram(self._step_counts, self._step_secs)
        rate = self._rate.update(current_clock().now(), steps.latest)
        yield "steps_per_second", session, rate
        for hook in status.hooks:
            labels = (self._name, hook.name)
            yield "hook_calls", labels, hook.calls
            yield "hook_failures", labels, hook.failures
            yield "hook_dropped", labels, hook.dropped
            yield "hook_pending", labels, hook.pending
            yield "hook_disabled", labels, hook.disabled
        if self._timing is not None:
            yield from self._timing_samples(self._timing)
        if self._saver is not None:
            yield from self._checkpoint_samples(self._saver)
        for gate in self._gates:
            labels = (self._name, gate.versions.run)
            yield "version_lag", labels, gate.lag
            yield "versions_ahead", labels, gate.ahead

    def _timing_samples(self, timing: HookTimingHook) -> Iterator[_Sample]:
        for phase in timing.statistics().phases:
            labels = (self._name, phase.hook, phase.phase)
            secs = phase.blocking_secs + phase.waiting_secs
            yield "hook_seconds", labels, _histogram(phase.histogram, secs)
            yield "hook_blocking_seconds", labels, phase.blocking_secs

    def _checkpoint_samples(self, saver: CheckpointSaverHook) -> Iterator[_Sample]:
        session = (self._name,)
        yield "checkpoints_saved", session, saver.saved
        yield "checkpoints_failed", session, saver.failed
        if saver.latest is not None:
            yield "checkpoint_age_seconds", session, saver.latest_age_secs
            yield "checkpoint_size_bytes", session, saver.latest.size
            yield "checkpoint_step", session, saver.latest.step

    def __repr__(self) -> str:
        shown = "without a session" if self._sessions is None else f"showing {self._name!r}"
        return f"<PrometheusHook {shown}>"


_OF_SESSION = ["session"]
_OF_HOOK = ["session", "hook"]
_OF_METHOD = ["session", "hook", "method"]
_OF_GATE = ["session", "versions"]
_METRICS: list[tuple[type[Metric], str, str, list[str]]] = [
    (CounterMetricFamily, "runs", "Runs begun.", _OF_SESSION),
    (CounterMetricFamily, "recoveries", "Raw sessions replaced.", _OF_SESSION),
    (GaugeMetricFamily, "global_step", "Latest step known here.", _OF_SESSION),
    (GaugeMetricFamily, "steps_per_second", "Steps over the last 10 s.", _OF_SESSION),
    (HistogramMetricFamily, "step_seconds", "Successful runs.", _OF_SESSION),
    (HistogramMetricFamily, "hook_seconds", "Calls of hooks.", _OF_METHOD),
    (CounterMetricFamily, "hook_blocking_seconds", "Event loop blocked by hooks.", _OF_METHOD),
    (CounterMetricFamily, "hook_calls", "Calls of a hook.", _OF_HOOK),
    (CounterMetricFamily, "hook_failures", "Calls that failed.", _OF_HOOK),
    (CounterMetricFamily, "hook_dropped", "Calls that the hook did not get.", _OF_HOOK),
    (GaugeMetricFamily, "hook_pending", "Background calls of the hook.", _OF_HOOK),
    (GaugeMetricFamily, "hook_disabled", "1 while the hook is disabled.", _OF_HOOK),
    (GaugeMetricFamily, "step_waiters", "Waits for a step.", _OF_SESSION),
    (CounterMetricFamily, "checkpoints_saved", "Checkpoints written.", _OF_SESSION),
    (CounterMetricFamily, "checkpoints_failed", "Saves that failed.", _OF_SESSION),
    (GaugeMetricFamily, "checkpoint_age_seconds", "Age of the last checkpoint.", _OF_SESSION),
    (GaugeMetricFamily, "checkpoint_size_bytes", "Size of the last checkpoint.", _OF_SESSION),
    (GaugeMetricFamily, "checkpoint_step", "Step of the last checkpoint.", _OF_SESSION),
    (GaugeMetricFamily, "version_lag", "Versions published during the last run.", _OF_GATE),
    (GaugeMetricFamily, "versions_ahead", "Versions ahead when the last run began.", _OF_GATE),
]
"""The type, the name, the description and the labels of each metric."""

_Buckets = tuple[list[tuple[str, float]], float]
_Sample = tuple[str, Sequence[str], float | _Buckets | None]
"""A metric's name, the values of its labels, and its value: a number, a histogram, or None."""


def _histogram(counts: Iterable[int], total_secs: float) -> _Buckets:
    bounds = [*map(str, BUCKET_SECS), "+Inf"]
    return list(zip(bounds, map(float, accumulate(counts)), strict=True)), total_secs


class _Sessions(Collector):
    """The sessions that a registry shows: functions that read their values, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Callable[[], list[_Sample]]] = {}

    def add(self, name: str, read: Callable[[], list[_Sample]]) -> None:
        if name in self.by_name:
            raise InvalidArgumentError(
                f"the registry shows a session named {name!r} already; give each session a `name`,"
                " or a registry of its own"
            )
        self.by_name[name] = read

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples: the registry rejects other metrics of these names."""
        return self._families().values()

    def collect(self) -> Iterable[Metric]:
        families = self._families()
        # A copy, because sessions begin and end in other threads meanwhile.
        for read in tuple(self.by_name.values()):
            for name, labels, value in read():
                if isinstance(value, tuple):
                    families[name].add_metric(labels, *value)
                elif value is not None:
                    families[name].add_metric(labels, value)
        return families.values()

    def _families(self) -> dict[str, Any]:
        return {
            name: kind(f"aiohooks_{name}", text, labels=labels)  # type: ignore[call-arg]
            for kind, name, text, labels in _METRICS
        }


_sessions_by_registry: weakref.WeakKeyDictionary[CollectorRegistry, _Sessions] = (
    weakref.WeakKeyDictionary()
)
# Sessions of several threads may share a registry.
_registry_lock = threading.Lock()


def _sessions_of(registry: CollectorRegistry) -> _Sessions:
    with _registry_lock:
        sessions = _sessions_by_registry.get(registry)
        if sessions is None:
            sessions = _sessions_by_registry[registry] = _Sessions()
            registry.register(sessions)
        return sessions
