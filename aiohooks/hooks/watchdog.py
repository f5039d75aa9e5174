"""Noticing that a session stalls: which phase, who is waited for, and where every task stands."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import traceback
import types
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from aiohooks._aio.await_chain import format_tasks, task_wait, user_location
from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import Clock, TimerHandle, current_clock
from aiohooks._validate import check_secs
from aiohooks.errors import InvalidArgumentError, SessionStalledError
from aiohooks.hooks._blocked_loop import BlockedLoopWatch, Frames
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook
from aiohooks.hooks.evaluator import EvaluatorHook
from aiohooks.session.hook import HOOK_METHODS, SessionRunContext, SessionRunHook
from aiohooks.session.status import Activity, SessionStatus

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks.hooks")
_MOST_STALLS = 100
_MOST_OTHERS = 20

OnStall = Literal["report", "stop", "raise"]
"""What a stall leads to: a report in the log; besides that a stop; besides that `SessionStalledError`."""


class Stall(NamedTuple):
    """What a `WatchdogHook` has found.

    Attributes:
        phase: "first step", "step", "save", "evaluation", "wait" or "blocked loop".
        what: who went on for too long: a hook's method, an operation, the session's block.
        secs: for how long.
        step: the step that was run last, or goes on.
        report: the session's status and where its tasks wait, as it was logged.
    """

    phase: str
    what: str
    secs: float
    step: int
    report: str


class WatchdogHook(SessionRunHook):
    """Tells when something in a session goes on for longer than its phase may take, and where everybody waits then.

    Each call of a hook, and the operations of a run, have the limit of their phase. What waits for a step of a store is a
    "wait", and so is the session's block between two runs; a `CheckpointSaverHook` is a "save" and an `EvaluatorHook` an
    "evaluation", whatever they wait for; all else is the "first step", from `begin` to the end of the first run of each
    created session, or a "step". One report comes of each stall: the status of the session, which names the hook and what
    it waits for, and all awaits of all tasks of the loop, the session's own first.

    A hook that blocks the event loop keeps this one from looking, too: `blocked_secs` starts a thread that notices it.
    """

    order: ClassVar[int] = -1_000_000

    def __init__(
        self,
        step_secs: float,
        *,
        first_step_secs: float | None = None,
        save_secs: float | None = None,
        evaluation_secs: float | None = None,
        wait_secs: float | None = None,
        blocked_secs: float | None = None,
        on_stall: OnStall = "report",
        logger: logging.Logger | None = None,
    ) -> None:
        """Takes the limits.

        Args:
            step_secs: how long one call of a hook, or the operations of a run, may take.
            first_step_secs: the same until the first run has ended; `step_secs`, if left out. This one, like the next two, may
                be `math.inf`.
            save_secs: how long a step may be held up by a `CheckpointSaverHook`; `step_secs`, if left out.
            evaluation_secs: how long a step may be held up by an `EvaluatorHook`; `step_secs`, if left out.
            wait_secs: how long a wait for a step, or the session's block between two runs, may take; None for no limit.
            blocked_secs: how long the event loop may be blocked, in real time; None for no such watch, and no thread.
            on_stall: "report" logs it as an error. "stop" asks for a stop besides: waits for a step, and through `until`,
                end with it, and the run may finish. "raise" breaks the run off, or the wait, with `SessionStalledError`; what
                does neither, an await of the block's own or the creation of a session, ends by itself only.
            logger: where to; by default the logger "aiohooks.hooks".

        Raises:
            InvalidArgumentError: a value that cannot be meant.
        """
        check_secs(step_secs, "step_secs", positive=True)
        own = {"first step": first_step_secs, "save": save_secs, "evaluation": evaluation_secs}
        for phase, secs in own.items():
            if secs != float("inf"):
                check_secs(secs, f"{phase.replace(' ', '_')}_secs", optional=True, positive=True)
        check_secs(wait_secs, "wait_secs", optional=True, positive=True)
        check_secs(blocked_secs, "blocked_secs", optional=True, positive=True)
        if on_stall not in ("report", "stop", "raise"):
            raise InvalidArgumentError(f'on_stall is {on_stall!r}; give "report", "stop" or "raise"')
        self._limits: dict[str, float] = {
            **{phase: step_secs if secs is None else secs for phase, secs in own.items()},
            "step": step_secs,
            "wait": float("inf") if wait_secs is None else wait_secs,
        }
        self._blocked_secs = blocked_secs
        self._on_stall = on_stall
        self._logger = logger or _logger
        self.stalls: deque[Stall] = deque(maxlen=_MOST_STALLS)
        """What was found in this session, the latest last."""
        self._reset()

    def _reset(self) -> None:
        self.stalls.clear()
        self._clock: Clock = current_clock()
        self._coord: Coordinator | None = None
        self._step = 0
        self._runs = 0  # of the session of the moment
        self._timer: TimerHandle | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._seen: dict[object, float] = {}
        self._told: set[object] = set()
        self._watch: BlockedLoopWatch | None = None

    # -- the life of the hook

    async def begin(self) -> None:
        """Starts to watch."""
        self._reset()
        self._owner = asyncio.current_task()
        self._look_again(min(self._limits.values()))
        if self._blocked_secs is not None:
            self._watch = BlockedLoopWatch(self._blocked_secs, self._loop_blocked)
            self._watch.start()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """From here on the status of the session is known; the next run is a first one."""
        self._coord = coord
        self._step = session.global_step.latest.step
        self._runs = 0

    async def before_run(self, run_context: SessionRunContext) -> None:
        """Notes the step; the second run of a session ends its first step."""
        self._step = run_context.global_step
        self._runs += 1

    async def close(self, exc: BaseException | None) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        watch, self._watch = self._watch, None
        if watch is not None:
            await to_thread(watch.stop, grace_secs=10.0)
        self._coord = self._owner = None
        self._seen, self._told = {}, set()

    # -- looking

    def _look_again(self, secs: float) -> None:
        self._timer = self._clock.call_later(secs, self._look) if secs < float("inf") else None

    def _look(self) -> None:
        """Compares what goes on with the limits, and sleeps until the next of them could be passed."""
        status = None if self._coord is None else self._coord.status()
        now = self._clock.now()
        left = [min(self._limits.values())]
        going_on: dict[object, float] = {}
        for one in self._doing(status):
            key = (one.what, one.task, 0 if status is None else status.runs)
            since = now - one.secs if one.secs is not None else self._seen.get(key, now)
            going_on[key] = since
            phase = self._phase(one)
            remaining = self._limits[phase] - (now - since)
            if remaining > 0:
                left.append(remaining)
            elif key not in self._told:
                self._told.add(key)
                self._stalled(phase, one.what, now - since, status, one)
        self._seen = going_on
        self._told &= going_on.keys()
        self._look_again(min(left))

    def _doing(self, status: SessionStatus | None) -> Iterable[Activity]:
        if status is not None:
            return status.doing
        if self._owner is None:
            return ()
        wait = task_wait(self._owner)
        return (Activity("creating the session", None, wait.awaits, wait.where, None, self._owner),)

    def _phase(self, one: Activity) -> str:
        if isinstance(one.hook, CheckpointSaverHook):
            return "save"
        if isinstance(one.hook, EvaluatorHook):
            return "evaluation"
        if (one.awaits or "").startswith("step ") or one.what == "the session's block":
            return "wait"
        return "first step" if self._runs <= 1 else "step"

    # -- telling

    def _stalled(self, phase: str, what: str, secs: float, status: SessionStatus | None, one: Activity) -> None:
        if one.secs is None:
            one = dataclasses.replace(one, secs=secs)
        head = f"{phase}: {one} - the limit is {self._limits[phase]:g} s"
        about = str(one) if status is None else str(status)
        self._tell(Stall(phase, what, secs, self._step, f"{head}\n{about}\n{self._tasks(status)}"), head)

    def _tasks(self, status: SessionStatus | None) -> str:
        """Where all tasks of the loop wait: those of the session, then the others."""
        known: list[asyncio.Task[Any] | None] = [self._owner]
        if status is not None:
            known += [one.task for one in (*status.doing, *status.background)]
        own = dict.fromkeys(task for task in known if task is not None and not task.done())
        others = [task for task in asyncio.all_tasks() if task not in own]
        text = format_tasks(own)
        if others:
            text += f"\nother tasks of the event loop: {len(others)}\n{format_tasks(others[:_MOST_OTHERS])}"
        return text

    def _loop_blocked(self, frames: Frames, secs: float) -> None:
        """Called in the watching thread, while the loop stands still."""
        what = _hook_in(frames) or user_location(frames) or "something"
        head = f"blocked loop: {what} has kept the event loop for {secs:.3g} s, at {user_location(frames)}"
        stack = "".join(traceback.format_list([_summary(frame) for frame in frames]))
        self._tell(Stall("blocked loop", what, secs, self._step, f"{head}\n{stack}"), head)

    def _tell(self, stall: Stall, head: str) -> None:
        self.stalls.append(stall)
        self._logger.error("the session stalls: %s", stall.report)
        if self._coord is None or self._on_stall == "report":
            return
        why = f"the session stalls: {head}"
        self._coord.request_stop(why if self._on_stall == "stop" else SessionStalledError(why))

    def __repr__(self) -> str:
        return f"WatchdogHook({self._limits['step']:g}, on_stall={self._on_stall!r}, stalls: {len(self.stalls)})"


def _hook_in(frames: Frames) -> str | None:
    """The method of a hook that these frames are inside of."""
    for frame in frames:
        hook = frame.f_locals.get("self")
        if isinstance(hook, SessionRunHook) and frame.f_code.co_name in HOOK_METHODS:
            return f"{type(hook).__name__}.{frame.f_code.co_name}"
    return None


def _summary(frame: types.FrameType) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
