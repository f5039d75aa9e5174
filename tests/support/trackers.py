"""A tracker that fails and hangs where a test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

Metrics = dict[str, float]


class ScriptedTracker:
    """Keeps the metrics that it gets, by step, and every call.

    Like most trackers it removes nothing: `start` returns its last step.
    """

    def __init__(self, failures: Mapping[int, BaseException] | None = None) -> None:
        self.metrics: list[tuple[int, Metrics]] = []
        self.times: list[float] = []
        self.calls: list[str] = []
        self.closed: list[BaseException | None] = []
        self.failures: dict[int, BaseException] = dict(failures or {})
        """By step; -1 is that of `start`, 0 that of all of them, and of `close`."""
        self.hangs_at: int | None = None
        """The step; -1 is `start`, 0 is `close`."""
        self.is_hanging = threading.Event()
        self.released = threading.Event()
        self.threads: set[threading.Thread] = set()
        self._active = threading.Lock()

    @property
    def steps(self) -> list[int]:
        """The steps of the metrics, in the order in which they came."""
        return [step for step, _ in self.metrics]

    def start(self, step: int) -> int:
        with self._call("start", -1):
            self.calls.append(f"start {step}")
            return max([step, *self.steps])

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        with self._call("log_metrics", step):
            self.calls.append(f"log {step}")
            self.metrics.append((step, dict(metrics)))
            self.times.append(time)

    def close(self, error: BaseException | None) -> None:
        self.closed.append(error)
        with self._call("close", 0):
            self.calls.append("close")

    @contextmanager
    def _call(self, what: str, key: int) -> Iterator[None]:
        assert self._active.acquire(blocking=False), f"{what} while another call is active"
        try:
            self.threads.add(threading.current_thread())
            if self.hangs_at == key:
                self.is_hanging.set()
                self.released.wait()
            failure = self.failures.get(key) or (self.failures.get(0) if key > 0 else None)
            if failure is not None:
                raise failure
            yield
        finally:
            self._active.release()

    def release(self) -> None:
        """End the call that hangs, and wait for the threads."""
        self.hangs_at = None
        self.released.set()
        for thread in self.threads - {threading.current_thread()}:
            thread.join()

    def __repr__(self) -> str:
        return "ScriptedTracker()"
