"""Measuring how long hooks take, and what blocks the event loop.

suspended   a call is suspended while it awaits something, so that the event loop can run others
blocking    a call blocks, or holds, the event loop from its start or resumption to its suspension
phase       a method of a hook, such as `after_run`
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from aiohooks._core.activity import Kind, Observer, current_run
from aiohooks._core.clock import LoopClock, current_clock
from aiohooks._core.validate import check_secs
from aiohooks._core.waits import to_thread
from aiohooks._why.tasks import BlockedLoopWatch, Frames, user_location
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunContext, SessionRunHook

_MAX_WARNINGS = 5
_MAX_BLOCKERS = 100
BUCKET_SECS: tuple[float, ...] = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05),
    *(0.1, 0.5, 1.0, 5.0, 10.0, 60.0),
)
"""The upper bounds of the buckets in which `PhaseTime.histogram` counts calls. One more bucket has
the calls that took longer than the last bound.
"""


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
        histogram: how many calls belong to each bucket: they took longer than the bound before in
            `BUCKET_SECS`, and at most the bucket's own. The last bucket has no bound.
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
        phases: the methods that were called, the largest blocking time first.
        blockers: the code that blocked the event loop, the latest last.
    """

    phases: tuple[PhaseTime, ...]
    blockers: tuple[Blocker, ...]


class HookTimingHook(SessionRunHook):
    """Measures the other hooks: how long the methods of each block the event loop, and how long
    they wait.

    It also finds the code that blocks the loop for longer than `warn_secs`, in a hook or not. Put
    it first in the list of hooks: `begin`, and hooks with a lower `order`, are not measured.
    """

    order: ClassVar[int] = -1000

    def __init__(
        self,
        *,
        warn_secs: float = 0.1,
    ) -> None:
        """Create the hook.

        Args:
            warn_secs: warn when code blocks the loop for longer than this, in a hook or not, at
                most five times for each line. A block twice as long is always found.
        """
        check_secs(warn_secs, "warn_secs", positive=True)
        self._warn_secs = warn_secs
        self._observers: list[Observer] = []
        self._reset()

    def _reset(self) -> None:
        clock = current_clock()
        # The clock of some event loops, such as uvloop's, does not advance while the loop is
        # blocked. Only a clock that a test has set is kept.
        self.now: Callable[[], float] = clock.now
        if isinstance(clock, LoopClock):
            self.now = time.perf_counter
        # The step in the records: that of the current run.
        self._step = 0
        # The times of each method, by the name of its calls, such as "NanHook.after_run".
        self._times: dict[str, PhaseTime] = {}
        self._loop_watch: BlockedLoopWatch | None = None
        self._blockers: deque[Blocker] = deque(maxlen=_MAX_BLOCKERS)
        # How many warnings each place in the code has had.
        self._warnings: Counter[str] = Counter()

    # -- the measurements

    def started(self, kind: Kind, what: str) -> _TimedCall | _NotTimed:
        """Called at the start of an activity of the session or of a run, an `Observer`."""
        # The hook does not measure its own methods.
        if kind not in ("hook", "background") or what.startswith(type(self).__name__):
            return _NOT_TIMED
        times = self._times.get(what)
        if times is None:
            hook, _, phase = what.rpartition(".")
            times = self._times[what] = PhaseTime(hook, phase)
        return _TimedCall(self, times)

    def attempt_ended(self, error: BaseException | None) -> None:
        """Called at the end of an attempt of a run, a `RunObserver`. There is nothing to do."""

    def record_block(self, times: PhaseTime, secs: float) -> None:
        """Note that a call has held the event loop for some time."""
        times.blocking_secs += secs
        if secs > times.longest_block_secs:
            times.longest_block_secs = secs
            times.longest_block_step = self._step

    def statistics(self) -> HookTimes:
        """Return the measurements of this session."""
        called = [times for times in self._times.values() if times.calls]
        return HookTimes(
            tuple(sorted(called, key=lambda times: -times.blocking_secs)),
            tuple(self._blockers),
        )

    def report(self) -> str:
        """Return the measurements as a table."""
        measured = self.statistics()
        names = {f"{times.hook}.{times.phase}": times for times in measured.phases}
        width = max(map(len, ["hook", *names]))
        lines = [f"{'hook':{width}}    calls  blocking  waiting  longest block"]
        for name, times in names.items():
            lines.append(
                f"{name:{width}} {times.calls:8} {times.blocking_secs:8.3f}s"
                f" {times.waiting_secs:7.3f}s  {times.longest_block_secs:.6f}s at step"
                f" {times.longest_block_step}"
            )
        lines += [
            f"blocked for {blocker.secs:.3f} s or more at step {blocker.step} by {blocker.where}"
            for blocker in measured.blockers
        ]
        return "\n".join(lines)

    # -- the life of a session

    async def begin(self) -> None:
        """Reset the measurements, and start to measure the event loop."""
        self._reset()
        self._loop_watch = BlockedLoopWatch(self._warn_secs, self._record_blocker)
        self._loop_watch.start()

    def _record_blocker(self, frames: Frames, secs: float) -> None:
        """Note the code that blocks the loop. Called in the watching thread meanwhile."""
        blocker = Blocker(user_location(frames) or "", secs, self._step)
        self._blockers.append(blocker)
        self._warnings[blocker.where] += 1
        if self._warnings[blocker.where] <= _MAX_WARNINGS:
            logger.warning("the event loop has been blocked for %.3f s, at %s", secs, blocker.where)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Observe the session."""
        self._step = session.global_step.latest.step
        if not self._observers:
            self._observers = coord.observers
            self._observers.append(self)

    async def before_run(self, run_context: SessionRunContext) -> None:
        """Observe the hooks in this run."""
        self._step = run_context.global_step
        run = current_run()
        if run is not None:
            run.observers += (self,)

    async def close(self, exc: BaseException | None) -> None:
        """Log the last report."""
        if self._loop_watch is not None:
            await to_thread(self._loop_watch.stop, grace_secs=10.0)
        logger.info("hook times at the end, step %d:\n%s", self._step, self.report())
        if self._observers:
            self._observers.remove(self)
            self._observers = []

    def __repr__(self) -> str:
        return f"<HookTimingHook of {len(self._times)} methods>"


class _TimedCall:
    """One call: how long it held the loop from each resumption to the next suspension, and how long
    it was suspended.
    """

    def __init__(self, timing: HookTimingHook, times: PhaseTime) -> None:
        self._timing = timing
        self._times = times
        self._began = timing.now()
        # When the call was last started, resumed or suspended.
        self._changed = self._began

    def _since_change(self) -> float:
        """Return the seconds since the last change between running and suspended, and note that
        there is a change now.
        """
        before = self._changed
        self._changed = self._timing.now()
        return self._changed - before

    def suspended(self) -> None:
        self._timing.record_block(self._times, self._since_change())

    def resumed(self) -> None:
        self._times.waiting_secs += self._since_change()

    def ended(self, error: BaseException | None) -> None:
        # The end of a call ends a block of the event loop, as a suspension does.
        self.suspended()
        self._times.calls += 1
        self._times.histogram[bisect_left(BUCKET_SECS, self._changed - self._began)] += 1


class _NotTimed:
    """An activity that is not a call of a measured hook.

    It has no `resumed`: the library observes resumptions, which costs time, only for objects that
    have this method.
    """

    def suspended(self) -> None:
        pass

    def ended(self, error: BaseException | None) -> None:
        pass


_NOT_TIMED = _NotTimed()
