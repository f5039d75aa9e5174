"""Measuring how long hooks take, and what blocks the event loop."""

from __future__ import annotations

import functools
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohooks._core.cancel import to_thread
from aiohooks._core.clock import NO_TIMER, Clock, LoopClock, current_clock
from aiohooks._core.observers import observed_call
from aiohooks._core.validate import check_instance, check_secs
from aiohooks._why.blocked_loop import BlockedLoopWatch
from aiohooks._why.tasks import Frames, user_location
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import InvalidHookError
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.hook import HOOK_METHODS, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_MAX_WARNINGS = 5
_MAX_BLOCKERS = 100
BUCKET_SECS: tuple[float, ...] = (
    0.0001,
    0.0005,
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
    10.0,
    60.0,
)
"""The upper bounds of the classes in which `PhaseTime.histogram` counts calls; the last class has
none.
"""
Method = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(slots=True)
class PhaseTime:
    """How long the calls of one method of one hook took.

    Attributes:
        hook: the hook's name, or else its class; numbered if there are several of it.
        phase: the method.
        calls: how many calls have ended.
        blocking_secs: how long they held the event loop.
        waiting_secs: how long they were suspended, so that others could run.
        longest_block_secs: the longest time that they held the loop without a suspension.
        longest_block_step: the step at which that was.
        histogram: how many calls took up to each of `BUCKET_SECS`, and longer than the bound
            before; last, those above all.
    """

    hook: str
    phase: str
    calls: int = 0
    blocking_secs: float = 0.0
    waiting_secs: float = 0.0
    longest_block_secs: float = 0.0
    longest_block_step: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_SECS) + 1))


class Blocker(NamedTuple):
    """The code that an event loop was running, at the time of `step`, when it had been blocked for
    `secs`.

    `where` is its file, line and function.
    """

    where: str
    secs: float
    step: int


@dataclass(frozen=True, slots=True)
class HookTimes:
    """The result of `HookTimingHook.statistics`.

    Attributes:
        phases: the methods that were called, those with the largest blocking time first.
        lag_samples: how often the loop's lag was measured.
        mean_lag_secs: the average lag: how much too late the loop called a timer.
        longest_lag_secs: the largest lag.
        blockers: the code that blocked the event loop, the latest last.
    """

    phases: tuple[PhaseTime, ...]
    lag_samples: int
    mean_lag_secs: float
    longest_lag_secs: float
    blockers: tuple[Blocker, ...]


class HookTimingHook(SessionRunHook):
    """Measures the other hooks: how long each one's methods block the event loop, and how long they
    wait.

    It also measures the lag of the loop, and finds the code that blocks it for longer than
    `warn_secs`, in a hook or not. Register the result of `watch`:

        timing = HookTimingHook()
        hooks = timing.watch([MyHook(), OtherHook()])
        async with AsyncMonitoredSession(step, hooks) as session: ...

    Hooks that are not watched cost no more than without it.
    """

    def __init__(
        self,
        *,
        every: Every | None = None,
        warn_secs: float = 0.1,
        lag_interval_secs: float = 0.05,
        logger: logging.Logger | None = None,
    ) -> None:
        """Create the hook.

        Args:
            every: when to log the report at level info, besides the end.
            warn_secs: warn when a hook blocks the loop for longer than this, at most five times for
                each method.
            lag_interval_secs: how often the loop's lag is measured.
            logger: where to log; by default the logger "aiohooks.hooks".
        """
        check_instance(every, Every, "every", optional=True)
        check_secs(warn_secs, "warn_secs", positive=True)
        check_secs(lag_interval_secs, "lag_interval_secs", positive=True)
        self._every = every
        self._warn_secs = warn_secs
        self._lag_interval_secs = lag_interval_secs
        self._logger = logger or logging.getLogger("aiohooks.hooks")
        self._times: list[PhaseTime] = []
        self._watched: list[SessionRunHook] = []
        self._replaced: list[tuple[SessionRunHook, str, Any]] = []
        self._blockers: deque[Blocker] = deque(maxlen=_MAX_BLOCKERS)
        self._lag_timer = NO_TIMER
        self._loop_watch: BlockedLoopWatch | None = None
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock = current_clock()
        # A loop's clock may not advance while the loop is blocked, as uvloop's does not.
        self._now = time.perf_counter if isinstance(self._clock, LoopClock) else self._clock.now
        self._timer: EveryTimer | None = None
        self._step = 0
        self._warnings: dict[str, int] = {}
        self._lag_samples, self._lag_secs, self._longest_lag_secs = 0, 0.0, 0.0
        self._lag_due = 0.0
        self._blockers.clear()
        for times in self._times:
            times.calls, times.blocking_secs, times.waiting_secs, times.longest_block_secs = (
                0,
                0.0,
                0.0,
                0.0,
            )
            times.histogram[:] = [0] * len(times.histogram)

    def watch(
        self, hooks: Iterable[SessionRunHook | HookRegistration]
    ) -> list[SessionRunHook | HookRegistration]:
        """Measure these hooks in the next session, and return the list to register: this hook, then
        the given ones.

        The hooks stay the same objects; after the session they are as before.

        Raises:
            InvalidHookError: not a hook, or one that is watched already.
        """
        registered = (
            [hooks] if isinstance(hooks, (SessionRunHook, HookRegistration)) else list(hooks)
        )
        targets: list[SessionRunHook] = []
        for one in registered:
            hook: object = one.hook if isinstance(one, HookRegistration) else one
            if not isinstance(hook, SessionRunHook) or isinstance(hook, HookTimingHook):
                raise InvalidHookError(
                    f"watch got {hook!r}; give objects of SessionRunHook classes other than"
                    " this one"
                )
            if "_timed_by" in vars(hook) or any(hook is other for other in targets):
                raise InvalidHookError(
                    f"{hook!r} is watched already; watch it once, and for one session at a time"
                )
            targets.append(hook)
        if not self._watched:
            self._times = []
        names = [
            getattr(hook, "name", None) or type(hook).__name__
            for hook in (*self._watched, *targets)
        ]
        for number, hook in enumerate(targets, len(self._watched)):
            name = names[number]
            if names.count(name) > 1:
                name += f"#{names[: number + 1].count(name)}"
            self._instrument(hook, name)
        self._watched += targets
        return [self, *registered]

    def unwatch(self) -> None:
        """Restore the hooks' own methods; the end of the session does this too."""
        for hook, phase, original in self._replaced:
            del vars(hook)[phase]
            if original is not None:
                vars(hook)[phase] = original
        for hook in self._watched:
            vars(hook).pop("_timed_by", None)
        self._replaced, self._watched = [], []

    def _instrument(self, hook: SessionRunHook, name: str) -> None:
        """Wrap the methods that the hook overrides; the others still cost nothing."""
        vars(hook)["_timed_by"] = self
        for phase in HOOK_METHODS:
            method: Method = getattr(hook, phase)
            if getattr(method, "__func__", method) is not getattr(SessionRunHook, phase):
                times = PhaseTime(name, phase)
                self._times.append(times)
                self._replaced.append((hook, phase, vars(hook).get(phase)))
                vars(hook)[phase] = self._timed(method, times)

    def _timed(self, method: Method, times: PhaseTime) -> Method:
        @functools.wraps(method)
        async def call(*args: Any) -> Any:
            return await observed_call(
                method,
                "hook",
                times.hook,
                (_TimedCall(times, self._now, self._record_block),),
                *args,
            )

        return call

    def _record_block(self, times: PhaseTime, secs: float) -> None:
        times.blocking_secs += secs
        if secs > times.longest_block_secs:
            times.longest_block_secs, times.longest_block_step = secs, self._step
        if secs > self._warn_secs:
            name = f"{times.hook}.{times.phase}"
            count = self._warnings[name] = self._warnings.get(name, 0) + 1
            if count <= _MAX_WARNINGS:
                self._logger.warning(
                    "%s blocked the event loop for %.3f s at step %d", name, secs, self._step
                )

    def statistics(self) -> HookTimes:
        """Return the measurements of this session."""
        called = [times for times in self._times if times.calls]
        return HookTimes(
            tuple(sorted(called, key=lambda times: -times.blocking_secs)),
            self._lag_samples,
            self._lag_secs / self._lag_samples if self._lag_samples else 0.0,
            self._longest_lag_secs,
            tuple(self._blockers),
        )

    def report(self) -> str:
        """Return the measurements as a table."""
        measured = self.statistics()
        width = max([len("hook"), *(len(f"{one.hook}.{one.phase}") for one in measured.phases)])
        lines = [f"{'hook':{width}}    calls  blocking  waiting  longest block"]
        lines += [
            f"{f'{one.hook}.{one.phase}':{width}} {one.calls:8} {one.blocking_secs:8.3f}s"
            f" {one.waiting_secs:7.3f}s  {one.longest_block_secs:.6f}s at step"
            f" {one.longest_block_step}"
            for one in measured.phases
        ]
        lines.append(
            f"event loop: {measured.mean_lag_secs:.6f} s late on average,"
            f" {measured.longest_lag_secs:.6f} s at most"
        )
        lines += [
            f"blocked for {one.secs:.3f} s or more at step {one.step} by {one.where}"
            for one in measured.blockers
        ]
        return "\n".join(lines)

    async def begin(self) -> None:
        """Reset the measurements, and start to measure the event loop."""
        self._reset()
        self._loop_watch = BlockedLoopWatch(self._warn_secs, self._record_blocker)
        self._loop_watch.start()
        self._schedule_lag_sample()

    def _schedule_lag_sample(self) -> None:
        self._lag_due = self._now() + self._lag_interval_secs
        self._lag_timer = self._clock.call_later(self._lag_interval_secs, self._sample_lag)

    def _sample_lag(self) -> None:
        lag = max(0.0, self._now() - self._lag_due)
        self._lag_samples += 1
        self._lag_secs += lag
        self._longest_lag_secs = max(self._longest_lag_secs, lag)
        self._schedule_lag_sample()

    def _record_blocker(self, frames: Frames, secs: float) -> None:
        """Called in the watching thread."""
        self._blockers.append(Blocker(user_location(frames) or "", secs, self._step))

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Count from the step at which the session starts."""
        self._step = session.global_step.latest.step
        if self._every is not None and self._timer is None:
            self._timer = self._every.timer()
            self._timer.start(self._step, self._clock.now())

    async def before_run(self, run_context: SessionRunContext) -> None:
        """Note the step for the measurements of this run."""
        self._step = run_context.global_step

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Log the report if it is due."""
        self._step = run_context.global_step
        now = self._clock.now()
        if self._timer is not None and self._timer.due(self._step, now):
            self._timer.mark(self._step, now)
            self._logger.info("hook times at step %d:\n%s", self._step, self.report())

    async def close(self, exc: BaseException | None) -> None:
        """Log the last report, and restore the hooks' own methods."""
        self._lag_timer.cancel()
        if self._loop_watch is not None:
            await to_thread(self._loop_watch.stop, grace_secs=10.0)
        self._logger.info("hook times at the end, step %d:\n%s", self._step, self.report())
        self.unwatch()

    def __repr__(self) -> str:
        return f"<HookTimingHook watching {len(self._watched)} hooks>"


class _TimedCall:
    """One call: how long it held the loop from each resumption to the next suspension, and how long
    it was suspended.
    """

    def __init__(
        self,
        times: PhaseTime,
        now: Callable[[], float],
        record_block: Callable[[PhaseTime, float], None],
    ) -> None:
        self._times = times
        self._now = now
        self._record_block = record_block

    def started(self, kind: str, what: str) -> _TimedCall:
        self._began = self._changed = self._now()
        return self

    def _since_change(self) -> float:
        changed, self._changed = self._changed, self._now()
        return self._changed - changed

    def suspended(self) -> None:
        self._record_block(self._times, self._since_change())

    def resumed(self) -> None:
        self._times.waiting_secs += self._since_change()

    def ended(self, error: BaseException | None) -> None:
        self.suspended()
        self._times.calls += 1
        self._times.histogram[bisect_left(BUCKET_SECS, self._changed - self._began)] += 1
