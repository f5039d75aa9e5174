"""Periodic checkpoints, written in the background.

save      takes the state of a step, then writes it as a checkpoint; also what is known of that
write     the second part of a save: a task, of which there is one at a time
interim   a checkpoint where the run has stopped although no save was due: the next one replaces it
extra     an evaluation that only the end of the session has caused
epoch     counts how often the global step was set back
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from aiohooks._core.activity import active, begin_run, wait_log
from aiohooks._core.validate import check_instance
from aiohooks._core.waits import new_task, to_thread
from aiohooks.checkpoint import Checkpoint, Saver
from aiohooks.checkpoint.policies import INTERIM
from aiohooks.checkpoint.saver import check_state, is_same
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
from aiohooks.graph.graph import values_of
from aiohooks.graph.session import Session
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


class _Save(NamedTuple):
    """The last save of a session, from the moment its state is taken, or the restored checkpoint.

    Attributes:
        step: the global step of the state.
        variables_version: the version of the variables in it, which grows with each change.
        metrics: the numbers that belong to the step, as far as they are known.
        is_interim: whether the step is saved only because the session ends there.
    """

    step: int
    variables_version: int
    metrics: Mapping[str, float]
    is_interim: bool


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

    # There are many options because they are independent: each decides one occasion of a save.
    # Which checkpoints are kept is an option of the saver.
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
        # The saver that this hook has made for a directory. The hook closes it, and no other saver.
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
        # `after_create_session` sets these three.
        self._session: Session
        self._coord: Coordinator
        self._saver: Saver
        self._timer: EveryTimer = self._every.timer()
        # The task of the write in progress, and the failure that the next run or the end of the
        # session raises.
        self._write_task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        # The last step whose `after_run` has reached this hook, so that all hooks have seen it, or
        # None before the session was created; and the epoch of that step.
        self._seen_step: int | None = None
        self._epoch = 0
        # The last save, or None if it failed; and the steps that this session has saved or
        # restored.
        self._last: _Save | None = None
        self._saved_steps: set[int] = set()
        # The numbers of the last evaluation, by its step. Only one step is kept, because each later
        # save is of this step or of a later one.
        self._evaluated: dict[int, dict[str, float]] = {}
        # How many calls of `request_save` the last save has served. Later calls want another save.
        self._served_requests = 0
        self.latest: Checkpoint | None = None
        """The checkpoint that was written last, or None."""
        self.saved: int = 0
        """How many checkpoints were written."""
        self.failed: int = 0
        """How many saves failed."""

    # -- the life of a session

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
        # A recovery replaces a raw session that was lost, whose write may still be in progress.
        await self._wait_for_write()
        is_first = self._seen_step is None
        self._session = session
        self._coord = coord
        self._saver = self._saver_for(session)
        # Without this flag the session warns that nothing is saved.
        session.saved = True
        # The calls of `stateful_hooks` and `check_state` are for their errors: equal names of
        # hooks, and tracked objects that cannot be saved, are errors now, and not after hours of
        # training.
        session.stateful_hooks()
        if is_first:
            tracked = {name: session.state_of(value) for name, value in session.tracked.items()}
            check_state({"tracked": tracked})
        self._epoch, step = session.global_step.latest
        self._seen_step = step
        self._timer.resume(step)
        if session.restored is not None:
            restored = session.restored.checkpoint
            self._last = _Save(
                restored.step,
                self._variables_version(),
                restored.metrics,
                restored.interim,
            )
            self._saved_steps.add(restored.step)
        if is_first:
            await self._save_beginning()

    def _saver_for(self, session: Session) -> Saver:
        """Return the saver of a session: the given one, or the one that restores the session.

        If both have the same directory, it must be the session's own saver, which has locked the
        directory.
        """
        if not hasattr(session, "state_dict"):
            raise InvalidArgumentError(
                f"CheckpointSaverHook cannot save {session!r}, which has no state_dict(); use"
                " aiohooks.Session"
            )
        given = self._given_saver
        own = session.saver
        if given is not None and (own is None or given.checkpoint_dir != own.checkpoint_dir):
            return given
        if own is None:
            raise InvalidArgumentError(
                "CheckpointSaverHook has no directory: give it one, or give the session"
                " ChiefSessionCreator(checkpoint_dir=...)"
            )
        return own

    async def _save_beginning(self) -> None:
        """Save the state before the first run, with `save_on_begin`, unless it was restored.

        Warn if the directory has a checkpoint that the session did not restore.
        """
        step = self._session.global_step.latest.step
        unused: list[Checkpoint] = []
        if self._session.restored is None:
            unused = await self._saver.checkpoints()
        if unused:
            logger.warning(
                "%s has a checkpoint of step %d, and this session begins at step %d without it;"
                " to continue from it, use ChiefSessionCreator(graph, checkpoint_dir=...)",
                self._saver.checkpoint_dir,
                unused[0].step,
                step,
            )
        # An evaluation at the beginning may have ended before this hook had a saver, so its numbers
        # are not in the restored checkpoint yet.
        await self._add_metrics(step, self._evaluated.get(step, {}))
        if self._save_on_begin and not self._is_saved():
            await self._save()
            self._raise_failure()

    @only_if("_note_run")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Save if it is due. Raise the error of a failed save."""
        # Also here, for a subclass that overrides `after_run`: `only_if` does not apply to it.
        if not self._note_run(run_context, run_values):
            return
        # There is one write at a time, so wait for the previous one. A long wait is logged.
        if self._write_task is not None:
            write = f"the {self._write_task.get_name()}"
            with wait_log(lambda: write):
                await self._wait_for_write()
        self._raise_failure()
        await self._save()
        self._raise_failure()

    def _note_run(
        self,
        run_context: SessionRunContext,
        run_values: SessionRunValues,
    ) -> bool:
        """Note the step of this run, and return whether to save after it: only then the session
        calls `after_run`, which needs a task. Raise the error of a failed save.
        """
        self._raise_failure()
        self._seen_step = run_context.global_step
        # A hook requests a save because of a change of its own, which step and variables need not
        # show. So a request is served even if they are saved.
        if self._is_requested():
            return True
        return self._timer.due(self._seen_step) and not self._is_saved()

    def _is_requested(self) -> bool:
        """Return whether a hook has called `request_save` since the last save."""
        return self._coord.events.save_requests > self._served_requests

    async def end(self, session: Session) -> None:
        """Save the last state and wait until it is durable."""
        await self._wait_for_write()
        # The error of an earlier save is raised only afterwards, because this save may succeed.
        if self._is_requested() or (self._save_on_end and not await self._is_unchanged()):
            await self._save_last()
        # That save may have changed the state of a hook, such as the effects that it has delivered
        # since. Such a hook requests another save.
        if self._is_requested():
            await self._save_last()
        self._raise_failure()
        for listener in self._listeners:
            await listener.end(session, session.global_step.latest.step)

    async def close(self, exc: BaseException | None) -> None:
        """Wait for the write in progress, save after an error if `save_on_error`, and close the
        saver if the hook has made it.

        Raise the error of a failed save, if it was not raised before.
        """
        try:
            try:
                await self._wait_for_write()
                if exc is not None and self._save_on_error and self._seen_step is not None:
                    await self._save_after_error()
            finally:
                # At the end of the grace period, a listener may still be waiting.
                if self._write_task is not None:
                    self._write_task.cancel()
                if self._own_saver is not None:
                    await self._own_saver.aclose()
        except Exception as error:
            self._record_failure(error)
        self._raise_failure()

    async def _save_after_error(self) -> None:
        """Save the step at which the session has failed, unless it is saved."""
        epoch, step = self._session.global_step.latest
        # If the epoch has changed, a recovery has set the step back, and then failed. Perhaps only
        # a part of the state was restored, so it must not be saved.
        if epoch != self._epoch:
            return
        if await self._is_unchanged():
            return
        if step != self._seen_step:
            # The run of this step was committed, and another hook has failed in its `after_run`, so
            # that the `after_run` of this hook was not called.
            logger.warning(
                "step %d is saved, and after_run of this step has not ended for all hooks: their"
                " data for this step, such as records, may be missing when the run is resumed",
                step,
            )
        await self._save_last()

    # -- whether to save

    def _last_of(self, step: int) -> _Save | None:
        """Return the last save if it is of this step."""
        if self._last is None or self._last.step != step:
            return None
        return self._last

    def _is_saved(self) -> bool:
        """Return whether the last save has the session's step, and variables of its version."""
        last = self._last_of(self._session.global_step.latest.step)
        return last is not None and last.variables_version == self._variables_version()

    def _variables_version(self) -> int:
        """Return the version of the session's variables, which grows with each change."""
        return values_of(self._session.variables).version

    async def _is_unchanged(self) -> bool:
        """Return whether the last checkpoint has all of the session's state.

        Tracked objects and hooks may change without a step or a version. So their states are
        compared with the states in the checkpoint, which is read for that.
        """
        session = self._session
        if not self._is_saved():
            return False
        states = _comparable_states(session, session.state_dict())
        if not states:
            return True
        # If the checkpoint cannot be read, it does not have the state, and is saved again.
        try:
            restored = await self._saver.restore(session.global_step.latest.step)
        except CheckpointError:
            return False
        if restored is None:
            return False
        return await to_thread(is_same, states, _comparable_states(session, restored.state))

    # -- saving

    async def _save_last(self) -> None:
        """Save at the end of the session. Wait for the write."""
        await self._save(at_end=True)
        await self._wait_for_write()

    async def _save(
        self,
        *,
        at_end: bool = False,
    ) -> None:
        """Take the state and start to write it. In the foreground, wait for the write.

        No other write may be in progress.
        """
        await self._announce()
        # From here until the state is taken, there must be no await: another session could change
        # shared variables meanwhile, and step, state and version would not belong together.
        save = self._next_save(at_end)
        state = self._session.state_dict()
        self._last = save
        self._saved_steps.add(save.step)
        self._served_requests = self._coord.events.save_requests
        write = self._write(state, save)
        self._write_task = new_task(write, f"save of step {save.step}")
        # Only the write refers to the state now, and frees it as soon as it is written.
        del state
        if self._background:
            # Let the write begin. If its task was cancelled before, `_write` would not run, and
            # could not count the failure.
            await asyncio.sleep(0)
        else:
            await self._wait_for_write()

    async def _announce(self) -> None:
        """Call the listeners and subscribers that want to know of a save before it."""
        session = self._session
        step = session.global_step.latest.step
        for listener in self._listeners:
            await listener.before_save(session, step)
        # Calls in the background may still change the states of hooks, so the save waits for them.
        await session.drain_hooks()
        await self._coord.events.saving.emit(step, self._saver.checkpoint_dir)

    def _next_save(self, at_end: bool) -> _Save:
        """Return the save of the current step. Mark the timer, whose state is part of it."""
        self._epoch, step = self._session.global_step.latest
        metrics = dict(self._evaluated.get(step, {}))
        is_interim = at_end and not self._timer.due(step)
        previous = self._last_of(step)
        if previous is not None:
            metrics = {**previous.metrics, **metrics}
            # The new checkpoint replaces the previous one of this step. If that was due, the new
            # one is no interim one either, because an uninterrupted run has a checkpoint here.
            is_interim = is_interim and previous.is_interim
        # The resumed run must be due when an uninterrupted run would be, which makes no interim
        # save.
        if not is_interim:
            self._timer.mark(step)
        return _Save(
            step,
            self._variables_version(),
            metrics,
            is_interim,
        )

    async def _write(
        self,
        state: dict[str, Any],
        save: _Save,
    ) -> None:
        """Write a state, and call the listeners. `_end_write` takes the error of this task."""
        # As in a hook, the session rejects `run` and `aclose` in a listener: they would wait for
        # this task.
        begin_run(self._coord.owner, None)
        metrics = dict(save.metrics)
        if save.is_interim:
            metrics[INTERIM] = 1.0
        try:
            with active("save", f"save of step {save.step}", observers=self._coord.observers):
                self.latest = await self._saver.save(state, save.step, metrics=metrics)
        except BaseException:
            self._note_failed_save(save.step)
            raise
        finally:
            # The frame of this method lasts until the listeners return, and must not keep the
            # state.
            del state
        self.saved += 1
        await self._coord.events.saved.emit(save.step, self.latest.path)
        for listener in self._listeners:
            await self._call_after_save(listener, save.step)

    async def _call_after_save(
        self,
        listener: CheckpointSaverListener,
        step: int,
    ) -> None:
        """Call `after_save` of a listener, and request the stop that its result asks for."""
        try:
            answer = await listener.after_save(self._session, step)
        except Exception as error:
            if not is_clean_end(error):
                raise
            # The error means the end of a listener's input. Raised as it is, it would end the
            # training as if that had reached its end.
            raise RuntimeError(f"after_save of a listener raised {safe_repr(error)}") from error
        if answer:
            reason = f"a listener requested it after saving step {step}"
            self._coord.request_stop(answer if isinstance(answer, str) else reason)

    async def _wait_for_write(self) -> None:
        """Wait until no write is in progress. Keep its failure for `_raise_failure`."""
        while self._write_task is not None and not self._write_task.done():
            await asyncio.wait([self._write_task])
        self._end_write()

    def _end_write(self) -> None:
        """Forget the write if it has ended, and keep its failure."""
        task = self._write_task
        if task is None or not task.done():
            return
        self._write_task = None
        try:
            error = task.exception()
        except asyncio.CancelledError as cancelled:
            # The write was cancelled, not the caller of this method.
            error = hook_cancelled_error(f"the {task.get_name()}", cancelled)
        if error is not None:
            self._record_failure(error)

    # -- metrics

    async def _note_evaluation(
        self,
        step: int,
        metrics: dict[str, float],
        is_extra: bool,
    ) -> None:
        """Add the numbers of an evaluation to the checkpoint of its step, now or when it is saved.

        An extra evaluation was not due: only the end of the session has caused it.
        """
        last = self._last_of(step)
        if is_extra and last is not None and not last.is_interim:
            # An uninterrupted run has this checkpoint, too, but makes no extra evaluation. Its
            # checkpoint has no such numbers, so this one must not get them.
            return
        self._evaluated = {step: {**self._evaluated.get(step, {}), **metrics}}
        await self._add_metrics(step, metrics)

    async def _add_metrics(
        self,
        step: int,
        metrics: dict[str, float],
    ) -> None:
        """Add numbers to the checkpoint of a step, if this session has saved or restored it.

        An error is raised in the next run.
        """
        if not metrics or step not in self._saved_steps:
            return
        if self._write_task is not None:
            # The checkpoint must be complete before numbers can be added to it. `asyncio.wait` does
            # not raise the error of the write, which `_end_write` takes.
            await asyncio.wait([self._write_task])
        try:
            await self._saver.add_metrics(step, metrics)
        except Exception as error:
            self._note_failed_save(step)
            self._record_failure(error)

    # -- failures

    def _note_failed_save(self, step: int) -> None:
        """Count a failed save. Forget it if it is the last one, so that the step is saved again."""
        self.failed += 1
        if self._last_of(step) is not None:
            self._last = None

    def _record_failure(self, error: BaseException) -> None:
        """Keep an error for the next run. If another error is kept already, add this one as a note
        to it, because a run raises one error.
        """
        if self._failure is None:
            self._failure = error
        else:
            add_note(self._failure, f"and then: {safe_repr(error)}")

    def _raise_failure(self) -> None:
        """Raise the error of a failed save or listener, once."""
        self._end_write()
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure


def _comparable_states(session: Session, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of tracked objects and hooks by name, to compare two states of a session.

    Hooks whose state is only a time (numbered ones) are left out: it differs in any two states.
    """
    states = {f"tracked {name}": value for name, value in state["tracked"].items()}
    for name, hook in session.stateful_hooks().items():
        if not is_numbered(hook):
            states[f"hook {name}"] = state["hooks"].get(name)
    return states
