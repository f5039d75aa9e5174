"""Periodic checkpoints, written in the background."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from aiohooks._core.activity import active
from aiohooks._core.cancel import new_task, to_thread
from aiohooks._core.clock import quick_now
from aiohooks._core.reports import wait_log
from aiohooks._core.validate import check_instance
from aiohooks.checkpoint import Checkpoint, Saver
from aiohooks.checkpoint.policies import INTERIM
from aiohooks.checkpoint.saver import check_tracked, is_same
from aiohooks.checkpoint.stateful import is_numbered
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import (
    CheckpointError,
    InvalidArgumentError,
    add_note,
    hook_cancelled_error,
    is_clean_end,
    safe_repr,
)
from aiohooks.graph.session import Session
from aiohooks.graph.variables import values_of
from aiohooks.hooks._observing import logger
from aiohooks.hooks.every import Every, EveryTimer, ScheduledHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunContext, SessionRunValues
from aiohooks.session.status import session_events


class CheckpointSaverListener:
    """Coroutines that a `CheckpointSaverHook` awaits around its saves. Override the methods you
    need.
    """

    async def begin(self) -> None:
        """Called when the hook begins."""

    async def before_save(self, session: Session, global_step: int) -> None:
        """Called inside the step that is saved, right before the state is taken."""

    async def after_save(self, session: Session, global_step: int) -> object:
        """Called when the checkpoint is durable. Training may have continued meanwhile.

        Returns:
            A true value to stop the session after the current run. A str is the reason.
        """

    async def end(self, session: Session, global_step: int) -> None:
        """Called at a clean end, after the last save."""


class CheckpointSaverHook(ScheduledHook):
    """Saves the session's state whenever `every` is due, and by default at the beginning and at a
    clean end.

    A failed save ends the session at the next step, or at its end. With `configure(hook,
    on_error="log")` it is logged and counted, and the next save tries again.

    The state consists of the graph's variables, the objects tracked by the scaffold, the hooks that
    are `Stateful`, and the global step. It is taken inside the step, after the `after_run` of the
    other hooks (this one has order 100). Values of variables are not copied, because a commit
    replaces them; everything else is. It is written in a background task while training continues,
    one write at a time, so at most one older value of each variable is kept besides the current
    one. Where steps never wait, the task continues in the turns that the session gives the event
    loop (`yield_secs`).

    The numbers that an evaluation of a saved step returns (the event `evaluated`) become metrics of
    its checkpoint, for `KeepBest`, even if they come later. A checkpoint that is saved at an end
    when no save is due is an interim one. The first checkpoint of the resumed run replaces it, so
    that you end up with the checkpoints of an uninterrupted run.

    Other hooks ask for a save with `request_save`, and subscribe to the events `saving` and
    `saved`: see `aiohooks.session.SessionEvents`.

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
        background: bool = True,
        save_on_begin: bool = True,
        save_on_end: bool = True,
        save_on_error: bool = False,
    ) -> None:
        """Check the arguments. No file is touched yet.

        Args:
            checkpoint_dir: a directory, or the `Saver` of one, which says which checkpoints are
                kept, or None for the directory that the session's creator restores from.
            every: when to save.
            listeners: awaited around each save.
            background: whether training continues during a write. If not, the step waits until the
                checkpoint is durable.
            save_on_begin: whether to save before the first run, unless the session was restored at
                that step.
            save_on_end: whether to save at a clean end, after `end` of the other hooks, unless
                nothing was changed since the last save: no variable, tracked object or hook.
            save_on_error: whether to save when the session ends with an error or a cancellation.
                Nothing is saved after a recovery that failed to restore the session, because its
                parts may belong to two steps.
        """
        check_instance(every, Every, "every")
        self._listeners = tuple(listeners)
        for listener in self._listeners:
            check_instance(listener, CheckpointSaverListener, "a listener")
        # The saver that this hook made, and closes.
        self._own_saver: Saver | None = None
        if checkpoint_dir is not None and not isinstance(checkpoint_dir, Saver):
            checkpoint_dir = self._own_saver = Saver(checkpoint_dir)
        self._given_saver: Saver | None = checkpoint_dir
        self._every = every
        self._background = background
        self._save_on_begin = save_on_begin
        self._save_on_end = save_on_end
        self._save_on_error = save_on_error
        self._reset()

    def _reset(self) -> None:
        # The saver and the coordinator are set in `after_create_session`.
        self._saver: Saver | None = None
        self._session: Session | None = None
        self._coord: Coordinator
        self._now: Callable[[], float]
        self._timer: EveryTimer = self._every.timer()
        self._write_task: asyncio.Task[None] | None = None
        # The failure that is raised next.
        self._failure: BaseException | None = None
        # The last step that all hooks have seen.
        self._seen_step: int | None = None
        # The numbers of the last evaluation, by its step.
        self._evaluated: dict[int, dict[str, float]] = {}
        # The last checkpoint, also while it is written; its epoch and its version of the variables.
        self._last: Checkpoint | None = None
        self._epoch = 0
        self._saved_version = -1
        # The steps of the checkpoints of this session.
        self._steps: set[int] = set()
        # How many of the requests for a save are served.
        self._served_requests = 0
        self.latest: Checkpoint | None = None
        """The checkpoint that was written last, or None."""
        self.saved: int = 0
        """How many checkpoints were written."""
        self.failed: int = 0
        """How many saves failed."""

    async def begin(self) -> None:
        """Reset for a new session."""
        self._reset()
        events = session_events()
        events.evaluated.subscribe(self._note_evaluation)
        given = self._given_saver
        events.checkpoint_dirs.append(None if given is None else given.checkpoint_dir)
        for listener in self._listeners:
            await listener.begin()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Choose the saver, start the timer, and save if this is the beginning."""
        await self._wait_for_write()  # started by a session that was lost
        is_first = self._session is None
        self._session = session
        self._coord = coord
        self._saver = self._saver_for(session)
        session.stateful_hooks()  # rejects equal names now, and not during training
        if is_first:
            check_tracked(session.tracked, session.state_of)  # likewise
        self._epoch, step = session.global_step.latest
        self._now = quick_now()
        self._seen_step = step
        is_resumed = is_first and self._timer.last_step is not None
        if not is_resumed:
            self._timer.start(step, self._now())
        session.saved = True
        if session.restored is not None:
            self._last = session.restored.checkpoint
            self._saved_version = values_of(session.variables).version
            self._steps.add(self._last.step)
        if is_first:
            await self._begin_saving(session)

    async def _begin_saving(self, session: Session) -> None:
        """Add the metrics evaluated at this step to its checkpoint. With `save_on_begin`, save it.

        Warn if the directory has a checkpoint that the session did not restore. Raise the error of
        a failed save.
        """
        assert self._saver is not None
        step = session.global_step.latest.step
        unused = () if session.restored is not None else await self._saver.checkpoints()
        if unused:
            logger.warning(
                "%s has a checkpoint of step %d, and this session begins at step %d without it;"
                " to continue from it, use ChiefSessionCreator(graph, checkpoint_dir=...)",
                self._saver.checkpoint_dir,
                unused[0].step,
                step,
            )
        await self._add_metrics(step, self._evaluated.get(step, {}))
        if self._save_on_begin and not self._is_saved(session):
            await self._save(session)
            self._raise_failure()

    def _saver_for(self, session: Session) -> Saver:
        if not hasattr(session, "state_dict"):
            raise InvalidArgumentError(
                f"CheckpointSaverHook cannot save {session!r}, which has no state_dict(); use"
                " aiohooks.Session",
            )
        given = self._given_saver
        shared = session.saver
        if given is not None and (shared is None or given.checkpoint_dir != shared.checkpoint_dir):
            return given
        if shared is None:
            raise InvalidArgumentError(
                "CheckpointSaverHook has no directory: give it one, or give the session"
                " ChiefSessionCreator(checkpoint_dir=...)",
            )
        return shared

    @only_if("_has_to_save")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Save if it is due. Raise the error of a failed save."""
        if self._has_to_save(run_context, run_values):
            with wait_log(self._describe_write):
                await self._wait_for_write()
            self._raise_failure()
            await self._save(run_context.session)
            self._raise_failure()

    def _has_to_save(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        """Keep the step of this run, and return whether to save after it.

        Raise the error of a failed save.
        """
        self._raise_failure()
        self._seen_step = run_context.global_step
        is_due = self._timer.due(self._seen_step, self._now())
        # A request is for a change that the step and the variables need not show.
        return self._is_requested() or (is_due and not self._is_saved(run_context.session))

    def _is_requested(self) -> bool:
        return self._coord.events.save_requests > self._served_requests

    async def end(self, session: Session) -> None:
        """Save the last state and wait until it is durable."""
        await self._wait_for_write()
        if self._save_on_end:
            # Also after a failed save: this one may succeed.
            if self._is_requested() or not await self._is_unchanged(session):
                await self._save_last(session)
            # A hook whose state has changed because of that save requests another one.
            if self._is_requested():
                await self._save_last(session)
        self._raise_failure()
        for listener in self._listeners:
            await listener.end(session, session.global_step.latest.step)

    async def close(self, exc: BaseException | None) -> None:
        """Wait for the write in progress, save after an error if `save_on_error`, and close the
        saver if the hook has made it.

        Raise the error of a failed save, if it was not raised before.
        """
        try:
            await self._wait_for_write()
            if exc is not None and self._save_on_error:
                await self._save_after_error()
        except Exception as error:
            self._record_failure(error)  # it is raised when the saver is closed
        finally:
            if self._own_saver is not None and self._saver is self._own_saver:
                await self._own_saver.aclose()
        self._raise_failure()

    # -- whether to save

    def _is_saved(self, session: Session) -> bool:
        """Return whether the last checkpoint has the session's step and variables."""
        if self._last_at(session.global_step.latest.step) is None:
            return False
        return self._saved_version == values_of(session.variables).version

    async def _is_unchanged(self, session: Session) -> bool:
        """Return whether the last checkpoint has all of the session's state.

        Tracked objects and hooks change without a step or a version, so their states are compared
        with the states in the checkpoint.
        """
        if not self._is_saved(session):
            return False
        states = _untimed_states(session, session.state_dict())
        if not states:
            return True
        assert self._saver is not None
        try:
            restored = await self._saver.restore(session.global_step.latest.step)
        except CheckpointError:
            return False
        if restored is None:
            return False
        return await to_thread(is_same, states, _untimed_states(session, restored.state))

    def _last_at(self, step: int) -> Checkpoint | None:
        """Return the last checkpoint if it is of this step."""
        last = self._last
        if last is None or last.step != step:
            return None
        return last

    # -- metrics

    async def _note_evaluation(
        self,
        step: int,
        metrics: dict[str, float],
        is_extra: bool,
    ) -> None:
        """Add the numbers of an evaluation to the checkpoint of its step, now or when it is saved.

        `is_extra` is whether it is an evaluation that only the end of the session has caused.
        """
        if not metrics:
            return
        last = self._last_at(step)
        if is_extra and last is not None and not last.interim:
            # An uninterrupted run has this checkpoint, too, but makes no evaluation here. So the
            # numbers of both must stay the same.
            return
        numbers = {**self._evaluated.get(step, {}), **metrics}
        self._evaluated = {step: numbers}  # no later save is of an earlier step
        await self._add_metrics(step, metrics)

    async def _add_metrics(
        self,
        step: int,
        metrics: dict[str, float],
    ) -> None:
        """Add numbers to the checkpoint of a step, if this session has saved or restored it.

        An error is only recorded.
        """
        if not metrics:
            return
        if self._saver is None or step not in self._steps:
            return
        if self._write_task is not None:
            # The checkpoint must be complete. An error of the write is handled where it was begun.
            await asyncio.wait([self._write_task])
        try:
            await self._saver.add_metrics(step, metrics)
        except Exception as error:
            self._record_failed_save(step, error)

    # -- saving

    async def _save_last(self, session: Session) -> None:
        """Save at the end of the session. Wait for the write."""
        await self._save(session, at_end=True)
        await self._wait_for_write()

    async def _save_after_error(self) -> None:
        session = self._session
        if session is None or self._saver is None:
            return
        epoch, step = session.global_step.latest
        # In another epoch, a recovery reset the step and then failed, perhaps with only a part of
        # the state restored.
        if epoch != self._epoch or self._is_saved(session):
            return
        if step != self._seen_step:
            logger.warning(
                "step %d is saved, and after_run of this step has not ended for all hooks: their"
                " data for this step, such as records, may be missing when the run is resumed",
                step,
            )
        await self._save_last(session)

    async def _save(
        self,
        session: Session,
        *,
        at_end: bool = False,
    ) -> None:
        """Take the state and start to write it, or write it in the foreground. There must be no
        other write.
        """
        assert self._saver is not None
        for listener in self._listeners:
            await listener.before_save(session, session.global_step.latest.step)
        await session.drain_hooks()
        events = self._coord.events
        await events.saving.emit(session.global_step.latest.step, self._saver.checkpoint_dir)
        # State and step without an await between: other sessions may change shared variables while
        # a callback is awaited.
        self._epoch, step = session.global_step.latest
        previous = self._last_at(step)
        is_interim = at_end and not self._timer.due(step, self._now())
        if previous is not None and not previous.interim:
            is_interim = False
        if not is_interim:
            self._timer.mark(step, self._now())
        state = session.state_dict()
        self._served_requests = events.save_requests
        self._saved_version = values_of(session.variables).version
        metrics: dict[str, float] = {}
        if previous is not None:
            metrics.update(previous.metrics)
        metrics.update(self._evaluated.get(step, {}))
        self._last = Checkpoint(step, 0, metrics, interim=is_interim)
        self._steps.add(step)
        if is_interim:
            metrics = {**metrics, INTERIM: 1.0}
        self._write_task = new_task(
            self._write(session, state, step, metrics),
            f"save of step {step}",
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
    ) -> None:
        assert self._saver is not None
        try:
            with active("save", f"save of step {step}", observers=self._coord.observers):
                checkpoint = await self._saver.save(state, step, metrics=metrics)
        except Exception as error:
            self._record_failed_save(step, error)
            return
        except asyncio.CancelledError as error:
            self._record_failed_save(step, hook_cancelled_error(f"the save of step {step}", error))
            raise
        finally:
            del state  # else it would be kept until the listeners return
        self.latest = checkpoint
        self.saved += 1
        try:
            await self._coord.events.saved.emit(step, checkpoint.path)
            for listener in self._listeners:
                answer = await listener.after_save(session, step)
                if isinstance(answer, str) and answer:
                    self._coord.request_stop(answer)
                elif answer:
                    self._coord.request_stop(f"a listener requested it after saving step {step}")
        except Exception as error:
            self._record_failure(_listener_failure(error))
        except asyncio.CancelledError as error:
            self._record_failure(hook_cancelled_error(f"the save of step {step}", error))
            raise

    def _describe_write(self) -> str:
        return "a save" if self._write_task is None else f"the {self._write_task.get_name()}"

    async def _wait_for_write(self) -> None:
        """Wait until there is no write."""
        while self._write_task is not None and not self._write_task.done():
            await asyncio.wait([self._write_task])
        self._write_task = None

    # -- failures

    def _record_failed_save(self, step: int, error: Exception) -> None:
        self.failed += 1
        if self._last_at(step) is not None:
            self._last = None
        self._record_failure(error)

    def _record_failure(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        else:
            add_note(self._failure, f"and then: {safe_repr(error)}")

    def _raise_failure(self) -> None:
        if self._write_task is not None and self._write_task.done():
            self._write_task = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure


def _listener_failure(error: Exception) -> Exception:
    """Return the failure of a listener. The end of its input is no end of the training."""
    if not is_clean_end(error):
        return error
    failure = RuntimeError(f"after_save of a listener raised {safe_repr(error)}")
    failure.__cause__ = error
    return failure


def _untimed_states(session: Session, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the tracked objects and hooks, but not of hooks that only keep time."""
    states = {f"tracked {name}": value for name, value in state["tracked"].items()}
    for name, hook in session.stateful_hooks().items():
        if not is_numbered(hook):
            states[f"hook {name}"] = state["hooks"].get(name)
    return states
