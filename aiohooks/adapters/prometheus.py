"""A session in Prometheus: each scrape reads the state of the session.

    hooks = [PrometheusHook(), saver, MyHook()]

docs/guides/telemetry.md lists the metrics.

registry    the metrics of a process, which a server shows to Prometheus
scrape      one read of all metrics of a registry, in any thread
collector   an object in a registry that returns metrics at each scrape
sample      one value of a metric, for one combination of its labels
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from aiohooks._core.clock import current_clock, now_function
from aiohooks._core.validate import check_instance
from aiohooks.errors import InvalidArgumentError, missing_extra
from aiohooks.graph.session import Session
from aiohooks.hooks.timing import BUCKET_SECS
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from aiohooks.session.status import session_events

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise missing_extra("aiohooks.adapters.prometheus", "prometheus") from _missing

__all__ = ["PrometheusHook"]

_SCRAPE_TIMEOUT_SECS = 5.0
_STATES = ("opening", "open", "closing", "failed")

_Buckets = tuple[list[tuple[str, float]], float]
"""A histogram: the bound of each bucket with its count, and the sum of all values."""
_Sample = tuple[str, Sequence[str], float | _Buckets | None]
"""A metric's name, the values of its labels, and its value: a number, a histogram, or None."""


class PrometheusHook(SessionRunHook):
    """Shows a session in a registry of `prometheus_client`, from its creation to its end.

    The state "failed" stays after a session that an error has ended, until a session of the same
    name is created. Failures are counted by session and error for as long as the registry is used.

    Each scrape of the registry reads the values from the session, in the session's event loop. A
    run only reads the clock twice. A scrape in another thread waits for the event loop. If the loop
    is blocked for longer than five seconds, that scrape does not contain the session. Several
    sessions may share a registry: the label `session` has the name of the session.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """Create the hook.

        Args:
            registry: the registry of the metrics, by default the registry of the process.
        """
        check_instance(registry, CollectorRegistry, "registry")
        self._registry = registry
        # The collector of the registry while that shows the session, otherwise None.
        self._collector: _SessionCollector | None = None

    async def begin(self) -> None:
        """Begin the metrics of a new session, and subscribe to its saves."""
        self._now = now_function()  # a function that returns the time
        # The event loop of the session and its thread: scrapes may come from another one.
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        # When the current run began, or None if its `before_run` was not called.
        self._run_began_at: float | None = None
        # How many runs belong to each bucket of durations, and the sum of all durations. The last
        # bucket has the runs that took longer than all limits.
        self._step_counts = [0] * (len(BUCKET_SECS) + 1)
        self._step_secs = 0.0
        self._saves = 0
        self._saved_step: int | None = None
        self._saved_at = 0.0  # the time of the latest save
        session_events().saved.subscribe(self._note_save)

    def _note_save(self, step: int, path: Path) -> None:
        """Count a checkpoint. Called at the event `saved`."""
        self._saves += 1
        self._saved_step = step
        self._saved_at = current_clock().now()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Show the session in the registry.

        Raises:
            InvalidArgumentError: the registry shows another session of this name.
        """
        self._coord = coord
        # After a recovery: `after_run` of the failed run was not called.
        self._run_began_at = None
        # After a recovery, the registry shows the session already.
        if self._collector is not None:
            return
        # A coordinator without a session has no status.
        self._name = getattr(coord.status(), "name", None) or ""
        collector = _collector_of(self._registry)
        collector.add(self._name, self._collect_samples)
        self._collector = collector

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Record the start of the run."""
        self._run_began_at = self._now()
        return None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Count the run, and add its duration to the histogram."""
        if self._run_began_at is not None:
            secs = self._now() - self._run_began_at
            self._step_secs += secs
            bucket = bisect_left(BUCKET_SECS, secs)
            self._step_counts[bucket] += 1

    async def close(self, exc: BaseException | None) -> None:
        """Remove the session from the registry, except for its failure."""
        # Without a collector, the session could not be created, and the registry does not show it.
        if self._collector is None:
            return
        self._collector.remove(self._name)
        # A cancellation or an exit of the program is no failure of the session.
        if isinstance(exc, Exception):
            self._collector.add_failure(self._name, exc)
        self._collector = None

    def _collect_samples(self) -> list[_Sample]:
        """Return the current values, in any thread. Return none if the event loop is blocked."""
        # In the thread of the event loop, read directly: a wait would block the loop that must
        # read.
        if threading.get_ident() == self._thread:
            return list(self._read_samples())
        # An event loop that was closed before the session cannot read anything.
        if self._loop.is_closed():
            return []
        # Read in the event loop. The session changes only there, so no value can change during the
        # read.
        reading = asyncio.run_coroutine_threadsafe(self._read_in_loop(), self._loop)
        try:
            return reading.result(_SCRAPE_TIMEOUT_SECS)
        except TimeoutError:
            reading.cancel()
            return []

    async def _read_in_loop(self) -> list[_Sample]:
        return list(self._read_samples())

    def _read_samples(self) -> Iterator[_Sample]:
        """Yield the current values of the session and its hooks. Call this in its event loop."""
        status = self._coord.status()
        # The registry shows the session only from `after_create_session` to `close`.
        assert status is not None, "the coordinator is that of a session"
        assert status.steps is not None, "the session has been created"
        steps = status.steps
        session = (self._name,)
        yield from _state_samples(self._name, status.state)
        yield "runs", session, status.runs
        yield "recoveries", session, status.recoveries
        yield "global_step", session, steps.latest.step
        yield "step_waiters", session, steps.waiting
        yield "step_seconds", session, _histogram(self._step_counts, self._step_secs)
        yield "checkpoints_saved", session, self._saves
        if self._saved_step is not None:
            yield "checkpoint_step", session, self._saved_step
            yield "checkpoint_age_seconds", session, current_clock().now() - self._saved_at
        for hook in status.hooks:
            labels = (self._name, hook.name)
            yield "hook_failures", labels, hook.failures
            yield "hook_dropped", labels, hook.dropped
            yield "hook_pending", labels, hook.pending
            yield "hook_disabled", labels, hook.disabled


def _state_samples(session: str, current: str) -> Iterator[_Sample]:
    """Yield a sample for each state: 1 for the current state of the session, 0 for the others."""
    for state in _STATES:
        yield "session_state", (session, state), float(state == current)


def _histogram(counts: Iterable[int], total_secs: float) -> _Buckets:
    """Return the histogram of `counts` by bucket, in the form of `HistogramMetricFamily`."""
    bounds = [*map(str, BUCKET_SECS), "+Inf"]
    # Each bucket of Prometheus also counts the values of all smaller buckets.
    totals = map(float, accumulate(counts))
    return list(zip(bounds, totals, strict=True)), total_secs


_Kind = type[Metric]
_COUNTER: _Kind = CounterMetricFamily
_GAUGE: _Kind = GaugeMetricFamily
_HISTOGRAM: _Kind = HistogramMetricFamily
_METRICS: dict[str, tuple[_Kind, str, str]] = {
    "session_state": (_GAUGE, "session state", "1 for the state of the session, else 0."),
    "session_failures": (_COUNTER, "session error", "Sessions that an error has ended."),
    "runs": (_COUNTER, "session", "Runs begun."),
    "recoveries": (_COUNTER, "session", "Raw sessions replaced."),
    "global_step": (_GAUGE, "session", "Latest step known here."),
    "step_seconds": (_HISTOGRAM, "session", "Successful runs."),
    "step_waiters": (_GAUGE, "session", "Waits for a step."),
    "checkpoints_saved": (_COUNTER, "session", "Checkpoints written."),
    "checkpoint_age_seconds": (_GAUGE, "session", "Age of the last checkpoint."),
    "checkpoint_step": (_GAUGE, "session", "Step of the last checkpoint."),
    "hook_failures": (_COUNTER, "session hook", "Calls that failed."),
    "hook_dropped": (_COUNTER, "session hook", "Calls that the hook did not get."),
    "hook_pending": (_GAUGE, "session hook", "Background calls of the hook."),
    "hook_disabled": (_GAUGE, "session hook", "1 while the hook is disabled."),
}
"""The type, the labels and the description of each metric, by its name without `aiohooks_`."""


def _families() -> dict[str, Any]:
    """Return all metrics by name, without samples."""
    families: dict[str, Any] = {}
    for name, (kind, labels, text) in _METRICS.items():
        families[name] = kind(  # type: ignore[call-arg]
            f"aiohooks_{name}",
            text,
            labels=labels.split(),  # pyright: ignore[reportCallIssue]
        )
    return families


class _SessionCollector(Collector):
    """The sessions that a registry shows, and the failures of ended sessions."""

    def __init__(self) -> None:
        # For each session that is shown, by its name: the function that reads its values.
        self._readers: dict[str, Callable[[], list[_Sample]]] = {}
        # The names of ended sessions that are shown as failed.
        self._failed: set[str] = set()
        # How many failures there were, by the session's name and the error's class.
        self._failures: Counter[tuple[str, str]] = Counter()

    def add(
        self,
        name: str,
        read: Callable[[], list[_Sample]],
    ) -> None:
        """Show a session. `read` returns its values at each scrape."""
        if name in self._readers:
            raise InvalidArgumentError(
                f"the registry shows a session named {name!r} already; give each session a `name`,"
                " or a registry of its own"
            )
        self._failed.discard(name)
        self._readers[name] = read

    def remove(self, name: str) -> None:
        del self._readers[name]

    def add_failure(self, name: str, error: Exception) -> None:
        """Count a failure, and show the session as failed until a session of its name is added."""
        self._failures[name, type(error).__name__] += 1
        self._failed.add(name)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, so that the registry rejects equal names."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with the current samples."""
        families = _families()
        for name, labels, value in self._samples():
            # A histogram is a tuple of two arguments. A value of None is left out.
            if isinstance(value, tuple):
                families[name].add_metric(labels, *value)
            elif value is not None:
                families[name].add_metric(labels, value)
        return families.values()

    def _samples(self) -> Iterator[_Sample]:
        # Iterate over copies, because other threads may add and remove sessions meanwhile.
        for read in tuple(self._readers.values()):
            yield from read()
        for name in tuple(self._failed):
            yield from _state_samples(name, "failed")
        for labels, count in self._failures.copy().items():
            yield "session_failures", labels, count


_collectors: weakref.WeakKeyDictionary[CollectorRegistry, _SessionCollector] = (
    weakref.WeakKeyDictionary()
)
# The lock is needed because sessions of several threads may share a registry.
_registry_lock = threading.Lock()


def _collector_of(registry: CollectorRegistry) -> _SessionCollector:
    """Return the collector of a registry, and register it at the first call."""
    with _registry_lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _SessionCollector()
            _collectors[registry] = collector
            registry.register(collector)
        return collector
