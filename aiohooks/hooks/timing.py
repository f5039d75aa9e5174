"""Measuring how long hooks take, and who blocks the event loop."""

from __future__ import annotations

import functools
import logging
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohooks._aio.await_chain import user_location
from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import Clock, LoopClock, TimerHandle, current_clock
from aiohooks._validate import check_instance, check_secs
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import InvalidHookError
from aiohooks.hooks._blocked_loop import BlockedLoopWatch, Frames
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.hook import SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


_logger = logging.getLogger("aiohooks.hooks")
_PHASES = ("begin", "after_create_session", "before_run", "after_run", "end", "close")
_MOST_WARNINGS = 5
_MOST_BLOCKERS = 100
Method = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(slots=True)
class PhaseTime:
    """What the calls of one method of one hook took.

    Attributes:
        hook: the hook's name, or else its class; numbered where there are several of it.
        phase: the method.
        calls: how many calls have ended.
        blocking_secs: how long they kept the event loop to themselves.
        waiting_secs: how long they were suspended while others could run.
        longest_block_secs: the longest time in one piece that the loop was kept.
        longest_block_step: the step at which this was.
    """

    hook: str
    phase: str
    calls: int = 0
    blocking_secs: float = 0.0
    waiting_secs: float = 0.0
    longest_block_secs: float = 0.0
    longest_block_step: int = 0


class Blocker(NamedTuple):
    """Where an event loop stood when it had been blocked for `secs`: file, line and function; `step` was the step before."""

    where: str
    secs: float
    step: int


@dataclass(frozen=True, slots=True)
class HookTimes:
    """What `HookTimingHook.statistics` returns.

    Attributes:
        phases: the methods that were called, those that blocked longest in all first.
        beats: how often the loop's lag was measured.
        mean_lag_secs: how much too late the loop was on average.
        longest_lag_secs: the most that it was too late.
        blockers: where the event loop stood when it was found blocked, the latest last.
    """

    phases: tuple[PhaseTime, ...]
    beats: int
    mean_lag_secs: float
    longest_lag_secs: float
    blockers: tuple[Blocker, ...]


class HookTimingHook(SessionRunHook):
    """Measures the other hooks: how long each one's methods block the event loop, and how long they wait.

    Besides that it measures how late the loop is, and looks what code stands in the way when it is blocked for longer than
    `warn_secs`, whoever's it is. Register what `watch` returns:

        timing = HookTimingHook()
        async with AsyncMonitoredSession(step, hooks=timing.watch([MyHook(), OtherHook()])) as session: ...

    Hooks that are not watched cost nothing more than before.
    """

    def __init__(
        self,
        *,
        every: Every | None = None,
        warn_secs: float = 0.1,
        beat_secs: float = 0.05,
        logger: logging.Logger | None = None,
    ) -> None:
        """Takes when to report.

        Args:
            every: when to log the report at level info, besides the end.
            warn_secs: a hook that keeps the loop longer than this in one piece is warned about, at most five times each.
            beat_secs: how often the loop's lag is measured.
            logger: where to; by default the logger "aiohooks.hooks".

        Raises:
            InvalidArgumentError: one of the arguments cannot be meant.
        """
        check_instance(every, Every, "every", optional=True)
        check_secs(warn_secs, "warn_secs", positive=True)
        check_secs(beat_secs, "beat_secs", positive=True)
        self._every = every
        self._warn_secs = warn_secs
        self._beat_secs = beat_secs
        self._logger = logger or _logger
        self._clock: Clock = current_clock()
        self._now: Callable[[], float] = time.perf_counter
        self._timer: EveryTimer | None = None
        self._times: list[PhaseTime] = []
        self._watched: list[SessionRunHook] = []
        self._replaced: list[tuple[SessionRunHook, str, Any]] = []
        self._warnings: dict[str, int] = {}
        self._beats, self._lag_secs, self._longest_lag_secs = 0, 0.0, 0.0
        self._due = 0.0
        self._beat: TimerHandle | None = None
        self._watch: BlockedLoopWatch | None = None
        self._blockers: deque[Blocker] = deque(maxlen=_MOST_BLOCKERS)
        self._step = 0

    def watch(self, hooks: Iterable[SessionRunHook | HookRegistration]) -> list[SessionRunHook | HookRegistration]:
        """Makes these hooks measured in the next session, and returns the list to register: this hook, then they.

        They stay the same objects; at the end of the session they are as before.

        Raises:
            InvalidHookError: something is not a hook, or is watched already.
        """
        registered = [hooks] if isinstance(hooks, (SessionRunHook, HookRegistration)) else list(hooks)
        targets: list[SessionRunHook] = []
        for one in registered:
            hook: object = one.hook if isinstance(one, HookRegistration) else one
            if not isinstance(hook, SessionRunHook) or isinstance(hook, HookTimingHook):
                raise InvalidHookError(f"watch got {hook!r}; give objects of SessionRunHook classes other than this one")
            if "_timed_by" in vars(hook) or any(hook is other for other in targets):
                raise InvalidHookError(f"{hook!r} is watched already; watch it once, and for one session at a time")
            targets.append(hook)
        if not self._watched:
            self._times = []
        names = [getattr(hook, "name", None) or type(hook).__name__ for hook in (*self._watched, *targets)]
        for number, hook in enumerate(targets, len(self._watched)):
            name = names[number]
            if names.count(name) > 1:
                name += f"#{names[: number + 1].count(name)}"
            self._instrument(hook, name)
        self._watched += targets
        return [self, *registered]

    def unwatch(self) -> None:
        """Gives the hooks their own methods back; the end of the session does it, too."""
        for hook, phase, original in self._replaced:
            del vars(hook)[phase]
            if original is not None:
                vars(hook)[phase] = original
        for hook in self._watched:
            vars(hook).pop("_timed_by", None)
        self._replaced, self._watched = [], []

    def _instrument(self, hook: SessionRunHook, name: str) -> None:
        """Puts timed methods in front of the class's own; only those that it overrides, the others stay free."""
        vars(hook)["_timed_by"] = self
        for phase in _PHASES:
            method: Method = getattr(hook, phase)
            if getattr(method, "__func__", method) is not getattr(SessionRunHook, phase):
                times = PhaseTime(name, phase)
                self._times.append(times)
                self._replaced.append((hook, phase, vars(hook).get(phase)))
                vars(hook)[phase] = self._timed(method, times)

    def _timed(self, method: Method, times: PhaseTime) -> Method:
        @functools.wraps(method)
        async def call(*args: Any) -> Any:
            return await self._measured(method(*args), times)

        return call

    @types.coroutine
    def _measured(self, coro: Coroutine[Any, Any, Any], times: PhaseTime) -> Generator[Any, Any, Any]:
        """Awaits `coro`, and adds up what lies between its being resumed and its suspending again."""
        now = self._now
        error: BaseException | None = None
        resumed = now()
        try:
            while True:
                try:
                    waiting = coro.send(None) if error is None else coro.throw(error)
                except StopIteration as stop:
                    return stop.value
                finally:
                    suspended = now()
                    self._blocked(times, suspended - resumed)
                try:
                    yield waiting
                    error = None
                except GeneratorExit:
                    coro.close()
                    raise
                except BaseException as thrown:
                    error = thrown
                resumed = now()
                times.waiting_secs += resumed - suspended
        finally:
            times.calls += 1

    def _blocked(self, times: PhaseTime, secs: float) -> None:
        times.blocking_secs += secs
        if secs > times.longest_block_secs:
            times.longest_block_secs, times.longest_block_step = secs, self._step
        if secs > self._warn_secs:
            who = f"{times.hook}.{times.phase}"
            told = self._warnings[who] = self._warnings.get(who, 0) + 1
            if told <= _MOST_WARNINGS:
                self._logger.warning("%s blocked the event loop for %.3f s at step %d", who, secs, self._step)

    def statistics(self) -> HookTimes:
        """What has been measured in this session."""
        called = [times for times in self._times if times.calls]
        return HookTimes(
            tuple(sorted(called, key=lambda times: -times.blocking_secs)),
            self._beats,
            self._lag_secs / self._beats if self._beats else 0.0,
            self._longest_lag_secs,
            tuple(self._blockers),
        )

    def report(self) -> str:
        """What has been measured, as a table."""
        found = self.statistics()
        width = max([len("hook"), *(len(f"{one.hook}.{one.phase}") for one in found.phases)])
        lines = [f"{'hook':{width}}    calls  blocking  waiting  longest block"]
        lines += [
            f"{f'{one.hook}.{one.phase}':{width}} {one.calls:8} {one.blocking_secs:8.3f}s {one.waiting_secs:7.3f}s"
            f"  {one.longest_block_secs:.6f}s at step {one.longest_block_step}"
            for one in found.phases
        ]
        lines.append(f"event loop: {found.mean_lag_secs:.6f} s late on average, {found.longest_lag_secs:.6f} s at most")
        lines += [f"blocked for {one.secs:.3f} s or more at step {one.step} by {one.where}" for one in found.blockers]
        return "\n".join(lines)

    async def begin(self) -> None:
        """Starts anew for a new session."""
        self._clock = current_clock()
        # A loop's clock may stand still while the loop is blocked, as uvloop's does.
        self._now = time.perf_counter if isinstance(self._clock, LoopClock) else self._clock.now
        self._timer = None
        self._step = 0
        self._warnings = {}
        self._beats, self._lag_secs, self._longest_lag_secs = 0, 0.0, 0.0
        for times in self._times:
            times.calls, times.blocking_secs, times.waiting_secs, times.longest_block_secs = 0, 0.0, 0.0, 0.0
        self._blockers.clear()
        self._watch = BlockedLoopWatch(self._warn_secs, self._loop_blocked)
        self._watch.start()
        self._schedule()

    def _schedule(self) -> None:
        self._due = self._now() + self._beat_secs
        self._beat = self._clock.call_later(self._beat_secs, self._on_beat)

    def _on_beat(self) -> None:
        lag = max(0.0, self._now() - self._due)
        self._beats += 1
        self._lag_secs += lag
        self._longest_lag_secs = max(self._longest_lag_secs, lag)
        self._schedule()

    def _loop_blocked(self, frames: Frames, secs: float) -> None:
        """Called in the watching thread."""
        self._blockers.append(Blocker(user_location(frames) or "", secs, self._step))

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Counts from the step at which the session starts."""
        self._step = session.global_step.latest.step
        if self._every is not None and self._timer is None:
            self._timer = self._every.timer()
            self._timer.start(self._step, self._clock.now())

    async def before_run(self, run_context: SessionRunContext) -> None:
        """Notes the step for what is measured in it."""
        self._step = run_context.global_step

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the report when it is time."""
        self._step = run_context.global_step
        now = self._clock.now()
        if self._timer is not None and self._timer.due(self._step, now):
            self._timer.mark(self._step, now)
            self._logger.info("hook times at step %d:\n%s", self._step, self.report())

    async def close(self, exc: BaseException | None) -> None:
        """Logs the last report, and gives the hooks their own methods back."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if self._watch is not None:
            await to_thread(self._watch.stop, grace_secs=10.0)
        self._logger.info("hook times at the end, step %d:\n%s", self._step, self.report())
        self.unwatch()

    def __repr__(self) -> str:
        return f"<HookTimingHook watching {len(self._watched)} hooks>"
