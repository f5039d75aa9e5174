"""A session in Prometheus: its state is read when Prometheus asks for it, so a run does no work for it.

    timing = HookTimingHook()
    hooks = [PrometheusHook(timing=timing), *timing.watch([saver, MyHook()])]

docs/guides/telemetry.md lists the metrics.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from aiohooks._aio.clock import current_clock, quick_now
from aiohooks._validate import check_instance
from aiohooks.adapters._step_rate import StepRate
from aiohooks.errors import InvalidArgumentError, missing_extra
from aiohooks.hooks import CheckpointSaverHook, HookTimingHook, VersionGateHook
from aiohooks.hooks.timing import BUCKET_SECS
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.prometheus", "prometheus") from _missing

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

__all__ = ["PrometheusHook"]

_SCRAPE_TIMEOUT_SECS = 5.0


class PrometheusHook(SessionRunHook):
    """Shows a session in a registry of `prometheus_client`, from its creation to its end.

    Values are read when the registry is scraped, in the session's event loop, from what the session and the given hooks know of
    themselves; a run costs two readings of the clock. A scrape in another thread waits for the event loop; if the loop is blocked
    for longer than five seconds, that scrape goes without the session. Several sessions may share a registry: the label `session`
    has the name of each.
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
            registry: where the metrics are shown; by default that of the process.
            timing: the hook whose measurements of the other hooks are shown.
            saver: the hook whose checkpoints are shown.
            gates: the hooks whose lag behind the versions is shown.
        """
        check_instance(registry, CollectorRegistry, "registry")
        check_instance(timing, HookTimingHook, "timing", optional=True)
        check_instance(saver, CheckpointSaverHook, "saver", optional=True)
        self._registry = registry
        self._timing = timing
        self._saver = saver
        self._gates = tuple(gates)
        for gate in self._gates:
            check_instance(gate, VersionGateHook, "a gate")
        self._sessions: _Sessions | None = None

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics of the registry as text, and its content type, for a request with the header `Accept: accept`."""
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
        self._began = None  # of a run that has failed
        if self._sessions is None:
            status = coord.status()
            self._name = "" if status is None or status.name is None else status.name
            sessions = _sessions_of(self._registry)
            sessions.add(self._name, self)
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
        if self._sessions is not None:
            self._sessions.remove(self._name)
            self._sessions = None

    def add_samples(self, families: _Families) -> None:
        """Internal: add the current values, from any thread; none if the event loop does not answer."""
        if threading.get_ident() == self._thread:
            self._add_samples(families)
            return
        done: Future[None] = Future()

        def add() -> None:
            # Not after the scrape has given up on this session.
            if done.set_running_or_notify_cancel():
                try:
                    self._add_samples(families)
                    done.set_result(None)
                except BaseException as error:
                    done.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(add)
            done.result(_SCRAPE_TIMEOUT_SECS)
        except TimeoutError:
            if not done.cancel():
                done.result()
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _add_samples(self, families: _Families) -> None:
        status = self._coord.status()
        if status is None or status.steps is None:
            return
        labels, steps, saver = [self._name], status.steps, self._saver
        families.add("runs", labels, status.runs)
        families.add("recoveries", labels, status.recoveries)
        families.add("global_step", labels, steps.latest.step)
        families.add("step_waiters", labels, steps.waiting)
        for hook in status.hooks:
            for what in ("calls", "failures", "dropped", "pending", "disabled"):
                families.add(f"hook_{what}", [*labels, hook.name], getattr(hook, what))
        families.add_histogram("step_seconds", labels, self._step_counts, self._step_secs)
        families.add("steps_per_second", labels, self._rate.update(current_clock().now(), steps.latest))
        if self._timing is not None:
            for phase in self._timing.statistics().phases:
                of_method = [*labels, phase.hook, phase.phase]
                families.add_histogram("hook_seconds", of_method, phase.histogram, phase.blocking_secs + phase.waiting_secs)
                families.add("hook_blocking_seconds", of_method, phase.blocking_secs)
        if saver is not None:
            families.add("checkpoints_saved", labels, saver.saved)
            families.add("checkpoints_failed", labels, saver.failed)
            latest, age = saver.latest, saver.latest_age_secs
            if latest is not None and age is not None:
                families.add("checkpoint_age_seconds", labels, age)
                families.add("checkpoint_size_bytes", labels, latest.size)
                families.add("checkpoint_step", labels, latest.step)
        for gate in self._gates:
            families.add("version_lag", [*labels, gate.versions.run], gate.lag)
            families.add("versions_ahead", [*labels, gate.versions.run], gate.ahead)

    def __repr__(self) -> str:
        return f"<PrometheusHook {'showing ' + repr(self._name) if self._sessions is not None else 'without a session'}>"


_OF_SESSION, _OF_HOOK = ["session"], ["session", "hook"]
_OF_METHOD, _OF_GATE = ["session", "hook", "method"], ["session", "versions"]
_METRICS: list[tuple[type[Metric], str, str, list[str]]] = [
    (CounterMetricFamily, "runs", "Runs begun.", _OF_SESSION),
    (CounterMetricFamily, "recoveries", "Raw sessions replaced.", _OF_SESSION),
    (GaugeMetricFamily, "global_step", "Latest step known here.", _OF_SESSION),
    (GaugeMetricFamily, "steps_per_second", "Steps over the last 10 s.", _OF_SESSION),
    (HistogramMetricFamily, "step_seconds", "Successful runs.", _OF_SESSION),
    (HistogramMetricFamily, "hook_seconds", "Calls of hooks.", _OF_METHOD),
    (CounterMetricFamily, "hook_blocking_seconds", "How long hooks held the event loop.", _OF_METHOD),
    (CounterMetricFamily, "hook_calls", "Calls of a hook.", _OF_HOOK),
    (CounterMetricFamily, "hook_failures", "Those that failed.", _OF_HOOK),
    (CounterMetricFamily, "hook_dropped", "Those it did not get.", _OF_HOOK),
    (GaugeMetricFamily, "hook_pending", "Its background calls.", _OF_HOOK),
    (GaugeMetricFamily, "hook_disabled", "1 while it is disabled.", _OF_HOOK),
    (GaugeMetricFamily, "step_waiters", "Waits for a step.", _OF_SESSION),
    (CounterMetricFamily, "checkpoints_saved", "Checkpoints written.", _OF_SESSION),
    (CounterMetricFamily, "checkpoints_failed", "Saves that failed.", _OF_SESSION),
    (GaugeMetricFamily, "checkpoint_age_seconds", "Time since the last checkpoint was written.", _OF_SESSION),
    (GaugeMetricFamily, "checkpoint_size_bytes", "Size of the last checkpoint.", _OF_SESSION),
    (GaugeMetricFamily, "checkpoint_step", "Step of that checkpoint.", _OF_SESSION),
    (GaugeMetricFamily, "version_lag", "Versions published during the last run.", _OF_GATE),
    (GaugeMetricFamily, "versions_ahead", "Versions ahead when the last run began.", _OF_GATE),
]


class _Families:
    """The metrics, each with the samples of all sessions."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        for kind, name, text, labels in _METRICS:
            self._families[name] = kind(f"aiohooks_{name}", text, labels=labels)  # type: ignore[call-arg]

    @property
    def all(self) -> list[Metric]:
        return [*self._families.values()]

    def add(self, name: str, labels: Sequence[str], value: float | None) -> None:
        """Add a sample, unless it has no value."""
        if value is not None:
            self._families[name].add_metric(labels, value)

    def add_histogram(self, name: str, labels: Sequence[str], counts: Sequence[int], total_secs: float) -> None:
        bounds = [*map(str, BUCKET_SECS), "+Inf"]
        self._families[name].add_metric(labels, list(zip(bounds, map(float, accumulate(counts)), strict=True)), total_secs)


class _Sessions(Collector):
    """The sessions that one registry shows."""

    def __init__(self) -> None:
        self._hooks: dict[str, PrometheusHook] = {}

    def add(self, name: str, hook: PrometheusHook) -> None:
        if self._hooks.setdefault(name, hook) is not hook:
            raise InvalidArgumentError(
                f"the registry shows a session named {name!r} already; give each session a `name`, or a registry of its own"
            )

    def remove(self, name: str) -> None:
        del self._hooks[name]

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples: the registry refuses other metrics of these names."""
        return _Families().all

    def collect(self) -> Iterable[Metric]:
        families = _Families()
        for hook in tuple(self._hooks.values()):
            hook.add_samples(families)
        return families.all


_known: weakref.WeakKeyDictionary[CollectorRegistry, _Sessions] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()  # sessions of several threads may share a registry


def _sessions_of(registry: CollectorRegistry) -> _Sessions:
    with _known_lock:
        sessions = _known.get(registry)
        if sessions is None:
            sessions = _known[registry] = _Sessions()
            registry.register(sessions)
        return sessions
