"""Detecting a session that stalls, and reporting the phase and what every task waits for.

activity   a call of a hook, the operations of a run, a wait, or the session's block between runs
phase      the class of an activity, which has a time limit: "first step", "step" or "wait"
stall      an activity that takes longer than the limit of its phase
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, NamedTuple

from aiohooks._core.clock import NO_TIMER, Clock, current_clock
from aiohooks._core.validate import check_choice, check_secs
from aiohooks.errors import SessionStalledError, add_note
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunContext, SessionRunHook
from aiohooks.session.status import Activity, SessionStatus, activity_of

_MAX_STALLS = 100

OnStall = Literal["report", "stop", "raise"]
"""What a stall causes: a report in the log; also a stop request; also `SessionStalledError`."""


class Stall(NamedTuple):
    """A stall that a `WatchdogHook` has found.

    Attributes:
        phase: "first step", "step" or "wait".
        what: the activity that took too long: a hook's method, an operation, the session's block.
        secs: for how long.
        step: the current step, or the last one.
        report: the session's status, and the waits of the tasks of its loop, as logged.
    """

    phase: str
    what: str
    secs: float
    step: int
    report: str


class WatchdogHook(SessionRunHook):
    """Reports any activity of a session that takes longer than its phase allows, and what all tasks
    wait for at that time.

    Each call of a hook, and the operations of a run, have the limit of their phase. A wait for a
    step of a store is a "wait", and so is the session's block between two runs. All else is a
    "first step", from `begin` to the end of the first run of each created session, or a "step": a
    save or an evaluation for which the run waits, too. Each stall is reported once: the status of
    the session, which names the hook and what it waits for, and what all tasks of the loop wait
    for, as `session.why()` shows it.

    A hook that blocks the event loop blocks this one too. `HookTimingHook` reports that, from a
    thread.
    """

    order: ClassVar[int] = -1_000_000

    def __init__(
        self,
        step_secs: float,
        *,
        first_step_secs: float | None = None,
        wait_secs: float | None = None,
        on_stall: OnStall = "report",
    ) -> None:
        """Create the hook with its limits.

        Args:
            step_secs: how long one call of a hook, or the operations of a run, may take.
            first_step_secs: the same until the first run has ended; by default `step_secs`. It may
                be `math.inf`.
            wait_secs: how long a wait for a step, or the session's block between two runs, may
                take, or None for no limit.
            on_stall: "report" logs the stall as an error. "stop" also requests a stop, which ends
                waits for a step and through `until`. The run may finish. "raise" also interrupts
                the run, or the wait, with `SessionStalledError`. Neither can interrupt an await of
                the block itself or the creation of a session.
        """
        check_secs(step_secs, "step_secs", positive=True)
        check_secs(wait_secs, "wait_secs", optional=True, positive=True)
        check_choice(on_stall, "on_stall", "report", "stop", "raise")
        if first_step_secs != math.inf:
            check_secs(first_step_secs, "first_step_secs", optional=True, positive=True)
        self._limits: dict[str, float] = {
            "step": step_secs,
            "first step": first_step_secs or step_secs,
            # Without a limit, no wait is too long.
            "wait": wait_secs or math.inf,
        }
        self._on_stall = on_stall
        self.stalls: deque[Stall] = deque(maxlen=_MAX_STALLS)
        """The stalls of this session, the latest last."""
        self._reset()

    def _reset(self) -> None:
        self.stalls.clear()
        self._clock: Clock = current_clock()
        self._coord: Coordinator | None = None
        self._step = 0
        # How many runs the current raw session has begun.
        self._runs = 0
        self._timer = NO_TIMER
        # The task that opens the session. It is observed until the session has a status.
        self._owner: asyncio.Task[Any] | None = None
        # When each current activity began, or was first seen if that is unknown; and the activities
        # that were reported already. The keys are made in `_check_limits`.
        self._since: dict[object, float] = {}
        self._reported: set[object] = set()

    async def begin(self) -> None:
        """Start to watch."""
        self._reset()
        self._owner = asyncio.current_task()
        # No activity can exceed its limit before the shortest limit has passed.
        self._schedule_check(min(self._limits.values()))

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Use the session's status from here on. The next run is a first one."""
        self._coord = coord
        self._step = session.global_step.latest.step
        self._runs = 0

    async def before_run(self, run_context: SessionRunContext) -> None:
        """Note the step, and count the run. The first run is over when the second one begins."""
        self._step = run_context.global_step
        self._runs += 1

    async def close(self, exc: BaseException | None) -> None:
        """Stop watching."""
        self._timer.cancel()
        self._coord = None
        self._owner = None
        self._since.clear()
        self._reported.clear()

    def _schedule_check(self, secs: float) -> None:
        """Check the limits in `secs`, or never if that is infinite."""
        self._timer = NO_TIMER
        if secs < math.inf:
            self._timer = self._clock.call_later(secs, self._check_limits)

    def _check_limits(self) -> None:
        """Compare the current activities with the limits, and schedule the next check when one
        could be exceeded.
        """
        status = None
        runs = 0
        if self._coord is not None:
            status = self._coord.status()
        if status is not None:
            runs = status.runs
        now = self._clock.now()
        next_check_secs = min(self._limits.values())
        current: dict[object, float] = {}
        for activity in self._activities(status):
            # The number of the run is in the key, because the same activity of another run is new.
            key = (activity.what, activity.task, runs)
            since = self._since.get(key, now)
            if activity.secs is not None:
                since = now - activity.secs
            current[key] = since
            phase = self._phase(activity)
            remaining = self._limits[phase] - (now - since)
            if remaining > 0:
                next_check_secs = min(next_check_secs, remaining)
            elif key not in self._reported:
                self._reported.add(key)
                self._report_activity(phase, activity, now - since, status)
        # Activities that have ended are forgotten.
        self._since = current
        self._reported &= current.keys()
        self._schedule_check(next_check_secs)

    def _activities(self, status: SessionStatus | None) -> Iterable[Activity]:
        """Return the current activities. Before there is a status, the only one is the opening of
        the session. A paused session has none: it is to wait.
        """
        if status is not None:
            is_paused = status.pause_reason is not None and not status.running
            return () if is_paused else status.doing
        if self._owner is None:
            return ()
        return (activity_of("creating the session", self._owner),)

    def _phase(self, activity: Activity) -> str:
        """Return the phase whose limit an activity has."""
        if activity.kind in ("step", "block"):
            return "wait"
        return "first step" if self._runs <= 1 else "step"

    def _report_activity(
        self,
        phase: str,
        activity: Activity,
        secs: float,
        status: SessionStatus | None,
    ) -> None:
        """Report that an activity has taken `secs`, which is longer than the limit of its phase."""
        if activity.secs is None:
            activity = dataclasses.replace(activity, secs=secs)
        summary = f"{phase}: {activity} - the limit is {self._limits[phase]:g} s"
        try:
            # Stalls are rare, and the import takes long.
            from aiohooks._why.builder import wait_graph

            loops = {asyncio.get_running_loop(): threading.get_ident()}
            graph = str(wait_graph(loops)).replace("\n", "\n  ")
        except Exception as error:
            # The graph only adds to the report, which must not be lost by an error in it.
            graph = f"could not be found out: {error!r}"
        report = f"{summary}\n{status or activity}\nwhy:\n  {graph}"
        stall = Stall(phase, activity.what, secs, self._step, report)
        self.stalls.append(stall)
        logger.error("the session stalls: %s", stall.report)
        if self._coord is None or self._on_stall == "report":
            return
        reason = f"the session stalls: {summary}"
        if self._on_stall == "stop":
            self._coord.request_stop(reason)
            return
        # A stop requested with an error ends the run, or the wait, with that error.
        stalled = SessionStalledError(reason)
        add_note(stalled, graph)
        self._coord.request_stop(stalled)

    def __repr__(self) -> str:
        return (
            f"WatchdogHook({self._limits['step']:g}, on_stall={self._on_stall!r}, stalls:"
            f" {len(self.stalls)})"
        )
