"""Saving checkpoints, every so often and in the background."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from aiohooks._aio.cancel import wait_done
from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_instance, check_mapping
from aiohooks.checkpoint import Checkpoint, KeepNewest, KeepPolicy, Saver
from aiohooks.errors import HookCancelledError, InvalidArgumentError
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_logger = logging.getLogger("aiohooks.hooks")

_OPTIONS_OF_SAVER = (
    "keep and min_free_bytes belong to the saver: make Saver(checkpoint_dir, keep=...), "
    "and give that as checkpoint_dir to the hook or to ChiefSessionCreator"
)


class CheckpointSaverListener:
    """Told of the saves of a `CheckpointSaverHook`: override what you need, as coroutines."""

    async def begin(self) -> None:
        """Called when the hook begins."""

    async def before_save(self, session: Session, global_step: int) -> None:
        """Called inside the step that is saved, right before the state is taken."""

    async def after_save(self, session: Session, global_step: int) -> object:
        """Called when the checkpoint is durable; training may have gone on meanwhile.

        Returns:
            Something true to stop the session after the run of the moment; a str is the reason.
        """

    async def end(self, session: Session, global_step: int) -> None:
        """Called at a clean end, after the last save."""


class CheckpointSaverHook(SessionRunHook):
    """Saves the session's state at each crossing of `every`, and by default at the beginning and at a clean end.

    Saved are the graph's variables, the objects tracked by the scaffold, the hooks that have a state, and the global step.
    The state is taken inside the step, after the `after_run` of the other hooks (this one has order 100): values of variables
    as they are, without a copy, since a commit puts new ones; of everything else a copy. It is written in a background task
    while training goes on, one write at a time, so at most one older set of variables is held besides the current one.

    A session begins from a checkpoint if its creator has the directory: `ChiefSessionCreator(graph, checkpoint_dir=...)`.
    """

    order: ClassVar[int] = 100

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | Saver | None = None,
        *,
        every: Every = Every(secs=600),  # noqa: B008 - frozen
        listeners: Iterable[CheckpointSaverListener] = (),
        metrics: Mapping[str, Any] | None = None,
        keep: KeepPolicy | None = None,
        background: bool = True,
        on_busy: Literal["wait", "skip"] = "wait",
        save_on_begin: bool = True,
        save_on_end: bool = True,
        save_on_error: bool = False,
        on_save_error: Literal["raise", "log"] | int = "raise",
        min_free_bytes: int = 0,
    ) -> None:
        """Takes where, when and how to save.

        Args:
            checkpoint_dir: a directory, or the `Saver` of one; None for the one that the session's creator restores from.
            every: when.
            listeners: told of each save.
            metrics: fetches of numbers, by name; what they were in the run that is saved goes into the checkpoint, for
                `KeepBest`.
            keep: which checkpoints stay; `KeepNewest(5)`, if left out. Belongs to the saver where there is one already.
            background: whether training goes on during the write; if not, the step waits until the checkpoint is durable.
            on_busy: when a save is due while the one before is being written: "wait" for it inside the step, or "skip", which
                tries again after the next run.
            save_on_begin: whether to save before the first run, unless the session was restored at this very step.
            save_on_end: whether to save at a clean end, unless the last save was at this very step.
            save_on_error: whether to save when the session ends with an error or a cancellation; not when a recovery could not
                restore it, which may have left parts of two steps.
            on_save_error: "raise": a save that failed ends the session at the next step, or at its end. "log": it is logged and
                counted, and the next save tries again. A number: logged, and when so many failed in a row the session ends.
            min_free_bytes: a save that would leave less than this on the disk fails. Belongs to the saver, like `keep`.

        Raises:
            InvalidArgumentError: a value that cannot be meant.
        """
        check_instance(every, Every, "every")
        check_mapping(metrics, "metrics")
        if on_busy not in ("wait", "skip"):
            raise InvalidArgumentError(f'on_busy is {on_busy!r}; give "wait" or "skip"')
        if on_save_error not in ("raise", "log") and (
            isinstance(on_save_error, bool) or not isinstance(on_save_error, int) or on_save_error < 1
        ):
            raise InvalidArgumentError(f'on_save_error is {on_save_error!r}; give "raise", "log" or a number of at least 1')
        self._listeners = tuple(listeners)
        for listener in self._listeners:
            check_instance(listener, CheckpointSaverListener, "a listener")
        self._given: Saver | None = None
        self._has_options = keep is not None or min_free_bytes != 0
        if isinstance(checkpoint_dir, Saver) or checkpoint_dir is None:
            if self._has_options:
                raise InvalidArgumentError(_OPTIONS_OF_SAVER)
            self._given = checkpoint_dir
        else:
            self._given = Saver(checkpoint_dir, keep=KeepNewest(5) if keep is None else keep, min_free_bytes=min_free_bytes)
        self._own = self._given is not None and self._given is not checkpoint_dir
        self._every = every
        self._metrics = dict(metrics or {})
        self._background = background
        self._skips = on_busy == "skip"
        self._on_begin, self._on_end, self._on_error = save_on_begin, save_on_end, save_on_error
        self._tolerated: float = (
            {"raise": 0, "log": math.inf}[on_save_error] if isinstance(on_save_error, str) else on_save_error - 1
        )
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock = current_clock()
        self._timer: EveryTimer = self._every.timer()
        self._saver: Saver | None = None
        self._session: Session | None = None
        self._coord: Coordinator | None = None
        self._writing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._failures_in_a_row = 0
        self._values: dict[str, Any] = {}
        self._last_step: int | None = None
        self._epoch = 0
        self.latest: Checkpoint | None = None
        """The checkpoint that was written last."""
        self.saved: int = 0
        """How many were written."""
        self.failed: int = 0
        """How many could not be written."""
        self.skipped: int = 0
        """How often a save was put off because the one before was being written."""

    async def begin(self) -> None:
        """Starts anew for a new session."""
        self._reset()
        for listener in self._listeners:
            await listener.begin()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Finds the saver, counts from the step of the session, and saves if this is the beginning."""
        await self._written()  # what a session that was lost has begun
        first = self._session is None
        self._session, self._coord = session, coord
        self._saver = self._saver_for(session)
        session.stateful_hooks()  # two of one name are refused now, not in the middle of the training
        self._epoch, step = session.global_step.latest
        self._timer.start(step, self._clock.now())
        if session.restored is not None:
            self._last_step = session.restored.checkpoint.step
        elif first:
            await self._warn_of_others(step)
        if first and self._on_begin and self._last_step != step:
            await self._save(session)
            self._raise_failure()

    def _saver_for(self, session: Session) -> Saver:
        if not hasattr(session, "state_dict"):
            raise InvalidArgumentError(
                f"CheckpointSaverHook cannot save {session!r}, which has no state_dict(); use aiohooks.Session"
            )
        shared = session.saver
        given = self._given
        if given is not None and (shared is None or shared.checkpoint_dir != given.checkpoint_dir):
            return given
        if self._has_options:
            raise InvalidArgumentError(_OPTIONS_OF_SAVER)
        if shared is None:
            raise InvalidArgumentError(
                "CheckpointSaverHook has no directory: give it one, or give the session ChiefSessionCreator(checkpoint_dir=...)"
            )
        return shared

    async def _warn_of_others(self, step: int) -> None:
        assert self._saver is not None
        there = await self._saver.checkpoints()
        if there:
            _logger.warning(
                "%s has a checkpoint of step %d, and this session begins at step %d without it; "
                "to go on from it, make the session with ChiefSessionCreator(graph, checkpoint_dir=...)",
                Path(self._saver.checkpoint_dir),
                there[0].step,
                step,
            )

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Raises if a save has failed; asks for the metrics."""
        self._raise_failure()
        return SessionRunArgs(self._metrics) if self._metrics else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Saves if it is time."""
        self._raise_failure()
        self._values = run_values.results or {}
        step = run_context.global_step
        if step != self._last_step and self._timer.due(step, self._clock.now()):
            await self._save_unless_busy(run_context.session)
        if self._writing is not None:
            await asyncio.sleep(0)  # steps that never suspend would keep the write from going on
        self._raise_failure()

    async def _save_unless_busy(self, session: Session) -> None:
        if self._writing is not None:
            if self._skips:
                self.skipped += 1
                return
            await self._written()
            self._raise_failure()
        await self._save(session)

    async def end(self, session: Session) -> None:
        """Saves the last state, and waits until it is durable."""
        await self._written()
        # Also when the save before has failed: this one may succeed, and then the last state is not lost.
        if self._on_end and self._last_step != session.global_step.latest.step:
            await self._save(session)
            await self._written()
        self._raise_failure()
        for listener in self._listeners:
            await listener.end(session, session.global_step.latest.step)

    async def close(self, exc: BaseException | None) -> None:
        """Waits for the write that goes on; saves after an error, if asked to; a failure that nobody has seen comes out here."""
        try:
            await self._written()
            if exc is not None and self._on_error:
                await self._save_after_error()
        except Exception as error:
            self._failed(error)
        finally:
            if self._own and self._saver is self._given and self._saver is not None:
                await self._saver.aclose()
        self._raise_failure()

    async def _save_after_error(self) -> None:
        session = self._session
        if session is None or self._saver is None:
            return
        epoch, step = session.global_step.latest
        # In another epoch a recovery has put the step back and then failed, maybe with only a part of the rest put back.
        if epoch == self._epoch and step != self._last_step:
            await self._save(session)
            await self._written()

    async def _save(self, session: Session) -> None:
        """Takes the state and begins to write it, or writes it; nothing else may be being written."""
        for listener in self._listeners:
            await listener.before_save(session, session.global_step.latest.step)
        # State and step in one moment: sessions that share the variables go on while a listener is awaited.
        state = session.state_dict()
        self._epoch, step = session.global_step.latest
        metrics = {name: _number(name, value) for name, value in self._values.items()}
        self._timer.mark(step, self._clock.now())
        self._last_step = step
        self._writing = asyncio.get_running_loop().create_task(
            self._write(session, state, step, metrics), name=f"save of step {step}"
        )
        del state  # it belongs to the write now
        if not self._background:
            await self._written()

    async def _write(self, session: Session, state: dict[str, Any], step: int, metrics: dict[str, float]) -> None:
        assert self._saver is not None
        assert self._coord is not None
        try:
            self.latest = await self._saver.save(state, step, metrics=metrics)
        except Exception as error:
            self._save_failed(step, error)
            return
        except asyncio.CancelledError as error:
            self._save_failed(step, _cancelled(step, error))
            raise
        finally:
            del state  # it must not be held until the next save
        self.saved += 1
        self._failures_in_a_row = 0
        try:
            for listener in self._listeners:
                wish = await listener.after_save(session, step)
                if wish:
                    why = wish if isinstance(wish, str) else f"a listener asked for it at the save of step {step}"
                    self._coord.request_stop(why)
        except Exception as error:
            self._failed(error)
        except asyncio.CancelledError as error:
            self._failed(_cancelled(step, error))
            raise

    def _save_failed(self, step: int, error: Exception) -> None:
        self.failed += 1
        self._failures_in_a_row += 1
        if self._last_step == step:
            self._last_step = None
        if self._failures_in_a_row > self._tolerated:
            self._failed(error)
        else:
            _logger.error("saving step %d failed; going on, as on_save_error says", step, exc_info=error)

    def _failed(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        else:
            self._failure.add_note(f"and then: {error!r}")

    async def _written(self) -> None:
        """Waits until nothing is being written."""
        while self._writing is not None and not self._writing.done():
            await wait_done([self._writing], None)
        self._writing = None

    def _raise_failure(self) -> None:
        if self._writing is not None and self._writing.done():
            self._writing = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"metric {name!r} is {value!r}; fetch a number") from None


def _cancelled(step: int, error: asyncio.CancelledError) -> HookCancelledError:
    failure = HookCancelledError(f"the save of step {step} was cancelled, and not by its session")
    failure.__cause__ = error
    return failure
