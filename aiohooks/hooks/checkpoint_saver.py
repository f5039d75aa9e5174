"""Periodic checkpoints, written in the background."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from aiohooks._core.activity import active
from aiohooks._core.cancel import new_task, to_thread
from aiohooks._core.clock import quick_now
from aiohooks._core.validate import check_choice, check_instance, check_mapping, checked_int
from aiohooks.checkpoint import Checkpoint, Saver
from aiohooks.checkpoint.policies import INTERIM
from aiohooks.checkpoint.saver import check_tracked, is_same
from aiohooks.checkpoint.stateful import is_numbered
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import (
    CheckpointError,
    FetchError,
    InvalidArgumentError,
    add_note,
    hook_cancelled_error,
    is_clean_end,
    safe_repr,
)
from aiohooks.graph.session import Session
from aiohooks.graph.variables import values_of
from aiohooks.hooks._numbers import checked_numbers, scalar
from aiohooks.hooks._observing import logger
from aiohooks.hooks.effects import EffectsHook
from aiohooks.hooks.evaluator import EvaluatorHook
from aiohooks.hooks.every import Every, EveryTimer, ScheduledHook
from aiohooks.hooks.stopping import EarlyStoppingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunValues


class CheckpointSaverListener:
    """Coroutines that a `CheckpointSaverHook` awaits around its saves; override those you need."""

    async def begin(self) -> None:
        """Called when the hook begins."""

    async def before_save(self, session: Session, global_step: int) -> None:
        """Called inside the step that is saved, right before the state is taken."""

    async def after_save(self, session: Session, global_step: int) -> object:
        """Called when the checkpoint is durable; training may have continued meanwhile.

        Returns:
            A true value to stop the session after the current run; a str is the reason.
        """

    async def end(self, session: Session, global_step: int) -> None:
        """Called at a clean end, after the last save."""


class CheckpointSaverHook(ScheduledHook):
    """Saves the session's state whenever `every` is due, and by default at the beginning and at a
    clean end.

    The state consists of the graph's variables, the objects tracked by the scaffold, the hooks that
    are `Stateful`, and the global step. It is taken inside the step, after the `after_run` of the
    other hooks (this one has order 100). Values of variables are not copied, because a commit
    replaces them; everything else is. It is written in a background task while training continues,
    one write at a time, so at most one older value of each variable is kept besides the current
    one. Where steps never wait, the task continues in the turns that the session gives the event
    loop (`yield_secs`).

    What an `EvaluatorHook` returns for a step that is saved are metrics of its checkpoint, also if
    it comes later: `KeepBest` needs no fetch for it. What is saved at an end at which no save is
    due is an interim checkpoint, which the first one of the resumed run replaces, so that in the
    end the checkpoints are those of an uninterrupted run.

    A session starts from a checkpoint if its creator has the directory: `ChiefSessionCreator(graph,
    checkpoint_dir=...)`.
    """

    order: ClassVar[int] = 100
    ends_last: ClassVar[bool] = True

    # Which checkpoints are kept is the saver's; when one is saved, and what a failure does, has
    # these independent choices.
    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | Saver | None = None,
        *,
        every: Every = Every(secs=600),
        listeners: Iterable[CheckpointSaverListener] = (),
        metrics: Mapping[str, Any] | None = None,
        background: bool = True,
        on_busy: Literal["wait", "skip"] = "wait",
        save_on_begin: bool = True,
        save_on_end: bool = True,
        save_on_error: bool = False,
        on_save_error: Literal["raise", "log"] | int = "raise",
    ) -> None:
        """Check the arguments; no file is touched yet.

        Args:
            checkpoint_dir: a directory, or the `Saver` of one, which says which checkpoints are
                kept; None for the one that the session's creator restores from.
            every: when to save.
            listeners: awaited around each save.
            metrics: fetches of numbers, by name. Their values in the run that is saved are stored
                in the checkpoint, for `KeepBest`, as are the numbers of an `EvaluatorHook`.
            background: whether training continues during a write; if not, the step waits until the
                checkpoint is durable.
            on_busy: what to do when a save is due during a write: "wait" for the write inside the
                step, or "skip", which tries again after the next run.
            save_on_begin: whether to save before the first run, unless the session was restored at
                that step.
            save_on_end: whether to save at a clean end, after `end` of the other hooks, unless
                nothing was changed since the last save: no variable, tracked object or hook.
            save_on_error: whether to save when the session ends with an error or a cancellation.
                Nothing is saved after a recovery that failed to restore the session, because its
                parts may belong to two steps.
            on_save_error: "raise": a failed save ends the session at the next step, or at its end.
                "log": it is logged and counted, and the next save tries again. A number n: it is
                logged, and the n-th failure in a row ends the session.
        """
        check_instance(every, Every, "every")
        check_mapping(metrics, "metrics")
        check_choice(on_busy, "on_busy", "wait", "skip")
        if on_save_error not in ("raise", "log"):
            on_save_error = checked_int(
                on_save_error,
                "on_save_error",
                1,
                expected='"raise", "log" or a number of at least 1',
            )
        self._listeners = tuple(listeners)
        for listener in self._listeners:
            check_instance(listener, CheckpointSaverListener, "a listener")
        self._given: Saver | None
        self._closes_saver = False
        if isinstance(checkpoint_dir, Saver) or checkpoint_dir is None:
            self._given = checkpoint_dir
        else:
            self._given, self._closes_saver = Saver(checkpoint_dir), True
        self._every = every
        self._metrics = dict(metrics or {})
        self._background = background
        self._skips = on_busy == "skip"
        self._save_on_begin, self._save_on_end, self._save_on_error = (
            save_on_begin,
            save_on_end,
            save_on_error,
        )
        self._tolerated_failures: float = (
            {"raise": 0, "log": math.inf}[on_save_error]
            if isinstance(on_save_error, str)
            else on_save_error - 1
        )
        self._reset()

    def _reset(self) -> None:
        self._now: Callable[[], float]  # known from after_create_session on
        self._timer: EveryTimer = self._every.timer()
        self._saver: Saver | None = None
        self._session: Session | None = None
        self._coord: Coordinator | None = None
        self._write_task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._consecutive_failures = 0
        self._results: dict[str, Any] = {}
        self._seen_step: int | None = None  # by all hooks
        self._evaluated: tuple[int, dict[str, float]] = -1, {}
        self._last: Checkpoint | None = None  # also while it is written
        self._saved_version = -1  # of the variables
        self._steps: set[int] = set()  # of the checkpoints of this session
        self._evaluators: list[EvaluatorHook] = []
        self._effects: list[EffectsHook] = []
        self._epoch = 0
        self.latest: Checkpoint | None = None
        """The checkpoint that was written last, or None."""
        self._latest_at = 0.0
        self.saved: int = 0
        """How many checkpoints were written."""
        self.failed: int = 0
        """How many saves failed."""
        self.skipped: int = 0
        """How many saves were due during a write and skipped."""

    async def begin(self) -> None:
        """Reset for a new session."""
        self._reset()
        for listener in self._listeners:
            await listener.begin()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Choose the saver, start the timer, and save if this is the beginning."""
        await self._wait_for_write()  # started by a session that was lost
        first = self._session is None
        self._session, self._coord = session, coord
        self._saver = self._saver_for(session)
        session.stateful_hooks()  # refuses equal names now, and not during training
        if first:
            check_tracked(session.tracked, session.state_of)  # likewise what no checkpoint can hold
        self._epoch, step = session.global_step.latest
        self._now = quick_now()
        self._seen_step = step
        if not first or self._timer.last_step is None:  # else it continues from a checkpoint
            self._timer.start(step, self._now())
        session.saved = True
        if self.saves_for(session):
            self._effects = [
                one for one in session.stateful_hooks().values() if isinstance(one, EffectsHook)
            ]
        if session.restored is not None:
            self._last = session.restored.checkpoint
            self._saved_version = values_of(session.variables).version
            self._steps.add(self._last.step)
        elif first and (checkpoints := await self._saver.checkpoints()):
            logger.warning(
                "%s has a checkpoint of step %d, and this session begins at step %d without it; "
                "to continue from it, use ChiefSessionCreator(graph, checkpoint_dir=...)",
                *(Path(self._saver.checkpoint_dir), checkpoints[0].step, step),
            )
        if first:
            self._evaluators = [
                one for one in session.stateful_hooks().values() if isinstance(one, EvaluatorHook)
            ]
            for one in self._evaluators:
                for evaluated, result in one.results.items():  # before this call, as `at_begin`
                    await self._judge(evaluated, result, True)
                one.observers.append(self._judge)
        if first and self._save_on_begin and not self._is_saved(session):
            await self._save(session)
            self._raise_failure()

    def _saver_for(self, session: Session) -> Saver:
        if not hasattr(session, "state_dict"):
            raise InvalidArgumentError(
                f"CheckpointSaverHook cannot save {session!r}, which has no state_dict(); use"
                " aiohooks.Session"
            )
        shared, given = session.saver, self._given
        if given is not None and (shared is None or shared.checkpoint_dir != given.checkpoint_dir):
            return given
        if shared is None:
            raise InvalidArgumentError(
                "CheckpointSaverHook has no directory: give it one, or give the session"
                " ChiefSessionCreator(checkpoint_dir=...)"
            )
        return shared

    def saves_for(self, session: Session) -> bool:
        """Return whether the session is restored from the directory that this hook writes: an
        `EffectsHook` relies on that.
        """
        shared, given = getattr(session, "saver", None), self._given
        return shared is not None and (
            given is None or given.checkpoint_dir == shared.checkpoint_dir
        )

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetch the metrics. Raise the error of a failed save."""
        self._raise_failure()
        return SessionRunArgs(self._metrics) if self._metrics else None

    @only_if("_has_to_save")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Save if it is due. Raise the error of a failed save."""
        if self._has_to_save(run_context, run_values):
            await self._wait_for_write()
            self._raise_failure()
            await self._save(run_context.session)
            self._raise_failure()

    def _has_to_save(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        """Return whether a save is due and not skipped; keep the metrics. Raise the error of a
        failed save.
        """
        self._raise_failure()
        self._results = run_values.results or {}
        step = self._seen_step = run_context.global_step
        session = run_context.session
        is_due = self._timer.due(step, self._now()) and not self._is_saved(session)
        if self._effects and not is_due:
            is_due = any(one.wants_save for one in self._effects) and not self._is_saved(session)
        skips = is_due and self._skips and self._write_task is not None
        self.skipped += skips
        return is_due and not skips

    async def end(self, session: Session) -> None:
        """Save the last state and wait until it is durable."""
        await self._wait_for_write()
        step = session.global_step.latest.step
        await self._finish_evaluations(step)
        ends = [
            one.end_run()
            for one in session.stateful_hooks().values()
            if isinstance(one, EarlyStoppingHook)
        ]
        # Also after a failed save: this one may succeed. Also once more, to hold that the run has
        # ended.
        if self._save_on_end and (
            any(ends)
            or any(one.unsaved for one in self._effects)
            or not await self._is_unchanged(session)
        ):
            await self._save(session, at_end=True)
            await self._wait_for_write()
        self._raise_failure()
        # They deliver what is durable now; the last checkpoint is to be without it.
        delivered = [await one.drain() for one in self._effects]
        if self._save_on_end and any(delivered):
            await self._save(session, at_end=True)
            await self._wait_for_write()
            self._raise_failure()
        for listener in self._listeners:
            await listener.end(session, session.global_step.latest.step)

    async def close(self, exc: BaseException | None) -> None:
        """Wait for the write; save after an error if `save_on_error`. Raise the error of a failed
        save not raised before.
        """
        if isinstance(exc, FetchError) and exc.name in self._metrics.values():
            add_note(
                exc,
                "KeepBest sees the numbers of an EvaluatorHook without metrics= of"
                " CheckpointSaverHook",
            )
        try:
            await self._wait_for_write()
            if exc is not None and self._save_on_error:
                await self._save_after_error()
        except Exception as error:
            self._record_failure(error)
        finally:
            if self._closes_saver and self._saver is self._given and self._saver is not None:
                await self._saver.aclose()
        self._raise_failure()

    @property
    def latest_age_secs(self) -> float | None:
        """How long ago `latest` was written; None before the first."""
        return None if self.latest is None else self._now() - self._latest_at

    async def _save_after_error(self) -> None:
        session = self._session
        if session is None or self._saver is None:
            return
        epoch, step = session.global_step.latest
        # In another epoch, a recovery reset the step and then failed, perhaps with only a part of
        # the state restored.
        if epoch == self._epoch and not self._is_saved(session):
            if step != self._seen_step:
                logger.warning(
                    "step %d is saved, and after_run of this step has not ended for all hooks: what"
                    " they keep of it, such as records, may be missing when the run is resumed",
                    step,
                )
            await self._save(session, at_end=True)
            await self._wait_for_write()

    def _is_saved(self, session: Session) -> bool:
        """Return whether the last checkpoint has the session's step and variables."""
        if self._last_at(session.global_step.latest.step) is None:
            return False
        return self._saved_version == values_of(session.variables).version

    async def _is_unchanged(self, session: Session) -> bool:
        """Return whether the last checkpoint has all of the session's state.

        Tracked objects and hooks change without a step or a version, so their states are compared
        with those in the checkpoint.
        """
        if not self._is_saved(session):
            return False
        states = _untimed_states(session, session.state_dict())
        if not any(states.values()):
            return True
        assert self._saver is not None
        try:
            restored = await self._saver.restore(session.global_step.latest.step)
        except CheckpointError:
            return False
        return restored is not None and await to_thread(
            is_same, states, _untimed_states(session, restored.state)
        )

    def _last_at(self, step: int) -> Checkpoint | None:
        """Return the last checkpoint if it is of this step."""
        return self._last if self._last is not None and self._last.step == step else None

    async def _finish_evaluations(self, step: int) -> None:
        """Wait for the evaluations of earlier steps, whose values a checkpoint of this one does not
        have.
        """
        for one in self._evaluators:
            await one.finish_before(step)

    async def _judge(self, step: int, result: Any, is_due: bool) -> None:
        """Keep the numbers of an evaluation for the checkpoint of its step; add them to it if it is
        there.
        """
        if not isinstance(result, Mapping) or self._saver is None:
            return
        last = self._last_at(step)
        if not is_due and last is not None and not last.interim:
            return  # the checkpoint of an uninterrupted run, which makes no evaluation here
        values: Mapping[Any, Any] = result  # pyright: ignore[reportUnknownVariableType]
        numbers = {
            str(tag): float(number)
            for tag, value in values.items()
            if (number := scalar(value)) is not None
        }
        self._evaluated = step, {**self._evaluated_at(step), **numbers}
        if step in self._steps and numbers:
            if self._write_task is not None:
                await asyncio.wait([self._write_task])
            try:
                await self._saver.add_metrics(step, numbers)
            except CheckpointError as error:
                self._record_failed_save(step, error)

    def _evaluated_at(self, step: int) -> dict[str, float]:
        return self._evaluated[1] if self._evaluated[0] == step else {}

    async def _save(self, session: Session, *, at_end: bool = False) -> None:
        """Take the state and start to write it, or write it in the foreground. There must be no
        other write.
        """
        for listener in self._listeners:
            await listener.before_save(session, session.global_step.latest.step)
        await session.drain_hooks()
        await self._finish_evaluations(session.global_step.latest.step)
        # State and step without an await between: other sessions may change shared variables while
        # a listener is awaited.
        self._epoch, step = session.global_step.latest
        again = self._last_at(step)
        interim = (
            at_end and (again is None or again.interim) and not self._timer.due(step, self._now())
        )
        if not interim:
            self._timer.mark(step, self._now())
        state, marks = session.state_dict(), [one.mark() for one in self._effects]
        self._saved_version = values_of(session.variables).version
        metrics = {
            **({} if again is None else again.metrics),
            **checked_numbers(self._results),
            **self._evaluated_at(step),
        }
        self._last = Checkpoint(step, 0, metrics, interim=interim)
        self._steps.add(step)
        if interim:
            metrics = {**metrics, INTERIM: 1.0}
        self._write_task = new_task(
            self._write(session, state, step, metrics, marks), f"save of step {step}"
        )
        del state  # so that only the write refers to it
        if self._background:
            # The write begins: a task that is cancelled before that records no failure.
            await asyncio.sleep(0)
        else:
            await self._wait_for_write()

    async def _write(
        self,
        session: Session,
        state: dict[str, Any],
        step: int,
        metrics: dict[str, float],
        marks: list[int],
    ) -> None:
        assert self._saver is not None
        assert self._coord is not None
        try:
            with active("save", f"save of step {step}", observers=self._coord.observers):
                self.latest = await self._saver.save(state, step, metrics=metrics)
        except Exception as error:
            self._record_failed_save(step, error)
            return
        except asyncio.CancelledError as error:
            self._record_failed_save(step, hook_cancelled_error(f"the save of step {step}", error))
            raise
        finally:
            del state  # else it would be kept until the listeners return
        self._latest_at = self._now()
        self.saved += 1
        self._consecutive_failures = 0
        for one, mark in zip(self._effects, marks, strict=True):
            one.release(mark)
        try:
            for listener in self._listeners:
                stop = await listener.after_save(session, step)
                if stop:
                    self._coord.request_stop(
                        stop
                        if isinstance(stop, str)
                        else f"a listener requested it after saving step {step}"
                    )
        except Exception as error:
            if is_clean_end(error):
                # The input of a listener may end: that is no end of the training.
                failure = RuntimeError(f"after_save of a listener raised {safe_repr(error)}")
                failure.__cause__ = error
                self._record_failure(failure)
            else:
                self._record_failure(error)
        except asyncio.CancelledError as error:
            self._record_failure(hook_cancelled_error(f"the save of step {step}", error))
            raise

    def _record_failed_save(self, step: int, error: Exception) -> None:
        self.failed += 1
        self._consecutive_failures += 1
        if self._last_at(step) is not None:
            self._last = None
        if self._consecutive_failures > self._tolerated_failures:
            self._record_failure(error)
        else:
            logger.error(
                "saving step %d failed; continuing, because of on_save_error", step, exc_info=error
            )

    def _record_failure(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        else:
            add_note(self._failure, f"and then: {safe_repr(error)}")

    async def _wait_for_write(self) -> None:
        """Wait until there is no write."""
        while self._write_task is not None and not self._write_task.done():
            await asyncio.wait([self._write_task])
        self._write_task = None

    def _raise_failure(self) -> None:
        if self._write_task is not None and self._write_task.done():
            self._write_task = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _untimed_states(session: Session, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the tracked objects and hooks, but not of hooks that only keep time."""
    hooks = session.stateful_hooks()
    timed = {name for name, hook in hooks.items() if is_numbered(hook)}
    return {
        "tracked": state["tracked"],
        "hooks": {name: value for name, value in state["hooks"].items() if name not in timed},
    }
