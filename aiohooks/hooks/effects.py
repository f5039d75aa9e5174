"""Effects: messages, charges and other actions of steps, kept in the checkpoint until delivered.

effect(kind, payload)      recorded in the attempt     a failed run leaves nothing
the run is committed       moved to the outbox         part of the checkpoint of its step
the checkpoint is durable  released to the handlers    at the event `saved`; with when="commit":
                                                       immediately
handler(effect) returns    removed from the outbox     until then the delivery is repeated,
                                                       also by the next process

attempt    one try of a run, which fails or is committed; a recovery makes another one
outbox     the effects of committed attempts that are not delivered yet
unsaved    the effects in the outbox that wait for a checkpoint
ready      the effects in the outbox that wait for their handler
recorder   what the program names as the origin of an effect, by default the effect's kind: the
           effects of a step are numbered for each recorder, so that a repeated step has equal keys
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from aiohooks._core.activity import active, awaited_tasks, begin_run, current_run, wait_log
from aiohooks._core.calls import Wait, limited
from aiohooks._core.clock import current_clock, sleep
from aiohooks._core.validate import check_choice, check_instance, check_mapping, checked_int
from aiohooks._core.waits import Backoff, Waiters, new_task, until_stop, wait_done
from aiohooks.checkpoint.saver import check_state
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import (
    EffectError,
    InvalidArgumentError,
    InvalidHookError,
    StopRequestedError,
    did_you_mean,
    safe_repr,
)
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import check_coroutine_function, logger
from aiohooks.session.coordinator import Coordinator, TasksOwner
from aiohooks.session.hook import SessionRunContext, SessionRunHook, SessionRunValues
from aiohooks.session.status import EffectStatus, session_events


class Effect(NamedTuple):
    """An effect of a committed run, which a handler of an `EffectsHook` receives.

    Attributes:
        kind: the name of the handler.
        payload: the data of the effect.
        key: a unique name that stays the same when the step is repeated, also by another process.
            The receiver uses it as the idempotency key.
        step: the global step of the run.
    """

    kind: str
    payload: Any
    key: str
    step: int


Handler = Callable[[Effect], Awaitable[object]]
"""A coroutine function that delivers an effect. If it raises, the delivery is repeated."""


class EffectsHook(SessionRunHook):
    """Delivers the effects of steps and hooks when they can no longer be undone.

    With `when="checkpoint"`, an effect is delivered when a durable checkpoint contains its step: a
    step that a recovery or a kill undoes has no effect. With "commit" it is delivered as soon as
    its run is committed. A step that is repeated then has its effect again, under the same key.

    A task for each kind delivers the effects in order, at least once, alongside the training. It
    repeats failed deliveries. The checkpoints contain the effects that are not delivered yet, and
    the next process delivers them. If `max_pending` effects wait for their handlers, runs that
    record effects wait until there are fewer. If so many wait for a checkpoint, one is requested.

    When the session ends normally, the last checkpoint is saved, this hook delivers its effects for
    at most the grace period of the session, and a checkpoint without them is saved. A warning
    counts the remaining effects.
    """

    # This hook must follow the hooks that record effects.
    order: ClassVar[int] = 99

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        run: str,
        when: Literal["checkpoint", "commit"] = "checkpoint",
        max_pending: int = 1000,
        backoff: Backoff = Backoff(),
    ) -> None:
        """Check the arguments.

        Args:
            handlers: a coroutine function for each kind.
            run: the name of the training in the keys, the same in each process. The receiver must
                get each name from one training only, and from one worker of it.
            when: when an effect is delivered.
            max_pending: how many effects may wait for their handlers, and for a checkpoint.
            backoff: the pauses before a delivery is repeated.

        Raises:
            InvalidArgumentError: an argument is invalid.
            InvalidHookError: a handler is not a coroutine function.
        """
        check_mapping(handlers, "handlers", optional=False)
        if not handlers:
            raise InvalidArgumentError("handlers is empty; give {kind: coroutine function}")
        for kind, handler in handlers.items():
            check_instance(kind, str, "a kind of handlers")
            check_coroutine_function(handler, f"the handler of {kind!r}")
        check_instance(run, str, "run")
        check_choice(when, "when", "checkpoint", "commit")
        check_instance(backoff, Backoff, "backoff")
        self._handlers = dict(handlers)
        self._run = run
        self._is_at_commit = when == "commit"
        self._max_pending: int = checked_int(max_pending, "max_pending", 1)
        self._backoff = backoff
        self._reset()

    def _reset(self) -> None:
        # The attempts whose effects are neither in the outbox nor dropped yet: the current attempt,
        # and attempts that failed before `after_run` of this hook. The lock guards them, because
        # other threads may record effects.
        self._attempts: list[SessionRunContext] = []
        self._lock = threading.Lock()
        # The two parts of the outbox, by key, in the order in which the effects were recorded.
        self._unsaved: dict[str, Effect] = {}
        self._ready: dict[str, Effect] = {}
        # The step of the latest save, and the keys of the effects that its checkpoint contains.
        self._saving_step = 0
        self._saving: set[str] = set()
        # The counters for the next keys: the latest step with effects, and how many effects each
        # recorder has recorded in that step.
        self._step = 0
        self._numbers: Counter[str] = Counter()
        # The tasks that deliver effects, by kind. `_progress` wakes the runs that wait for room in
        # the outbox, after each delivery.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._progress = Waiters()
        # The directory of the checkpoints that the session is restored from. None if no hook saves
        # there: then no checkpoint has the effects.
        self._checkpoint_dir: Path | None = None
        # Whether the restored checkpoint has a state of this hook.
        self._was_loaded = False
        # The clock's time until which the end of the session waits for deliveries, or None before
        # the end.
        self._drains_until: float | None = None
        # The coordinator of the session, or None before the first raw session and after `close`:
        # then nothing is delivered.
        self._coord: Coordinator | None = None

    # -- the life of a session

    async def begin(self) -> None:
        """Begin with an empty outbox, and subscribe to the events of saves."""
        self._reset()
        events = session_events()
        events.saving.subscribe(self._note_saving)
        events.saved.subscribe(self._note_saved)

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Accept the effects of the session's runs, and deliver effects of the last process.

        Raises:
            InvalidArgumentError: with `when="checkpoint"`, no hook saves the session where it is
                restored from.
            InvalidHookError: the session has another `EffectsHook`.
        """
        if coord.owner.effects not in (None, self):
            raise InvalidHookError("the session has two EffectsHooks; give one all the handlers")
        saver = session.saver
        # Hooks that save have listed their directories. None in the list means the directory of the
        # session's own saver.
        saving_dirs = coord.events.checkpoint_dirs
        if saver is not None and (None in saving_dirs or saver.checkpoint_dir in saving_dirs):
            self._checkpoint_dir = saver.checkpoint_dir
        if self._checkpoint_dir is None and not self._is_at_commit:
            raise InvalidArgumentError(
                "no hook saves the session where it is restored from. Give it"
                " ChiefSessionCreator(..., checkpoint_dir=...) and CheckpointSaverHook(), or"
                ' EffectsHook(..., when="commit")'
            )
        self._coord = coord
        coord.owner.effects = self
        if session.restored is not None and not self._was_loaded:
            # The checkpoint was saved without this hook, and `load_state_dict` was not called. The
            # restore undoes all steps with effects, so the outbox must be emptied all the same.
            self.load_state_dict({"step": 0, "counts": {}, "pending": []})
        self._was_loaded = False
        # No more effects are saved, so the set is empty. The call starts the deliveries of effects
        # that were restored.
        self._release(set())

    @only_if("_take_effects_of_run")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Wait until fewer than `max_pending` effects wait for their handlers, or until a stop.

        `_take_effects_of_run` has moved the effects of the run to the outbox, and found it full. A
        drain does not end the wait, because its runs need room as well.
        """
        with wait_log(lambda: "the handlers of effects"), contextlib.suppress(StopRequestedError):
            await until_stop(self._wait_for_deliveries(self._max_pending), current_run())

    def _take_effects_of_run(
        self,
        run_context: SessionRunContext,
        run_values: object,
    ) -> bool:
        """Move the effects of the run to the outbox, and return whether that is full.

        The session calls this after each run. If it returns true, the session calls `after_run` in
        a task, which waits for room.
        """
        run_context.accepts_effects = False
        if not self._attempts:
            return False
        self._move_to_outbox()
        return len(self._ready) >= self._max_pending

    async def end(self, session: Session) -> None:
        """Deliver the remaining effects, unless they wait for the last checkpoint."""
        await self._drain(session.grace_secs)

    async def close(self, exc: BaseException | None) -> None:
        """Cancel the deliveries, and log how many effects remain.

        After an error, effects that no checkpoint contains are delivered first, for at most a third
        of the grace period. The deliveries that are cancelled then may take the rest.
        """
        self._move_to_outbox()
        if self._checkpoint_dir is None and self._coord is not None and exc is not None:
            await self._drain(self._coord.owner.grace_secs / 3)
        self._coord = None
        for task in self._tasks.values():
            task.cancel()
        # No time limit here (None), because each delivery limits its own cancellation.
        await wait_done(self._tasks.values(), None)
        counts = {status.kind: status.pending for status in self.status() if status.pending}
        if counts:
            outcome = "they are lost, as no checkpoint has them"
            if self._checkpoint_dir is not None:
                outcome = "the next process delivers them, or repeats their steps"
            logger.warning("effects that were not delivered: %s; %s", counts, outcome)

    # -- the outbox

    def record(
        self,
        attempt: SessionRunContext,
        kind: str,
        payload: Any,
        recorder: str | None,
    ) -> None:
        """Record an effect of an attempt. Any thread may call this. See `aiohooks.effect`."""
        if not isinstance(kind, str) or kind not in self._handlers:
            raise InvalidArgumentError(
                f"kind of an effect is {kind!r}; give the kind of a handler of the EffectsHook:"
                f" {did_you_mean(str(kind), self._handlers)}"
            )
        # Reject a payload that a checkpoint cannot hold. Without the extra for checkpoints the
        # check cannot be imported, and is not needed, because nothing is saved.
        with contextlib.suppress(ImportError):
            check_state({f"payload of effect {kind!r}": payload})
        # The copy may take long, so it is made without the lock, for which the event loop may wait.
        copied = copy.deepcopy(payload)
        with self._lock:
            if not attempt.accepts_effects:
                raise EffectError(
                    f"effect({kind!r}) was called after the effects of its run were taken or"
                    f" dropped. In after_run, only a hook with an order below {self.order} can"
                    " record it"
                )
            if attempt not in self._attempts:
                self._attempts.append(attempt)
            attempt.effects.append((kind, copied, recorder or kind))

    def _move_to_outbox(self) -> None:
        """Move the effects of committed attempts to the outbox, and drop the effects of failed
        attempts.

        With `when="commit"`, release the effects to their handlers. Otherwise request a save if
        many effects wait for one.
        """
        with self._lock:
            for attempt in self._attempts:
                if attempt.committed:
                    self._add(attempt.global_step, attempt.take_effects())
            # An attempt that may still record effects stays, so that the next call moves those.
            self._attempts = [attempt for attempt in self._attempts if attempt.accepts_effects]
        if self._is_at_commit:
            self._release(self._unsaved.keys())
        elif len(self._unsaved) >= self._max_pending and self._coord is not None:
            self._coord.events.request_save()

    def _add(self, step: int, recorded: list[tuple[str, Any, str]]) -> None:
        """Add the effects of a step to the outbox, with their keys."""
        # The numbers in the keys count the effects of one step, and begin again with each step.
        if step != self._step:
            self._numbers.clear()
        self._step = step
        for kind, payload, recorder in recorded:
            self._numbers[recorder] += 1
            key = f"{self._run}/{step}/{recorder}/{self._numbers[recorder]}"
            self._unsaved[key] = Effect(kind, payload, key, step)

    def _note_saving(self, step: int, checkpoint_dir: Path) -> None:
        """Note which effects the checkpoint of a save will contain. Called at the event `saving`.
        Saves in another directory are ignored: the session is not restored from there.
        """
        if checkpoint_dir == self._checkpoint_dir:
            self._move_to_outbox()
            self._saving_step = step
            self._saving = {*self._ready, *self._unsaved}

    async def _note_saved(self, step: int, path: Path) -> None:
        """Release the effects that the checkpoint contains. Called at the event `saved`.

        When the session ends, also wait for their delivery.
        """
        # A checkpoint in another directory is not restored. A checkpoint of an earlier step than
        # the latest save lacks some of the effects in `_saving`.
        if path.parent != self._checkpoint_dir or step < self._saving_step:
            return
        self._release(self._saving)
        # The session ends: `end` was called before this save.
        if self._drains_until is not None and self._coord is not None:
            # `end` has set the time limit, so 0 adds nothing to it.
            await self._drain(0)
            # The checkpoint contains effects that are delivered by now. Request a save without
            # them, so that the next process does not deliver them again.
            if self._saving - self._ready.keys():
                self._coord.events.request_save()

    def state_dict(self) -> dict[str, Any]:
        """Return the undelivered effects, and the counters for the next keys.

        Move the effects of the last run to the outbox first, if `after_run` has not.
        """
        # If another hook has failed after the commit, `after_run` of this hook was not called. The
        # effects of the committed run belong to the state all the same.
        self._move_to_outbox()
        return {
            "step": self._step,
            "counts": dict(self._numbers),
            "pending": [list(effect) for effect in (self._ready | self._unsaved).values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the outbox from a checkpoint.

        A recovery drops effects that were recorded after the checkpoint. It does not repeat
        deliveries that were made after it.

        Raises:
            InvalidArgumentError: an effect in the checkpoint has no handler.
        """
        check_mapping(state, "state", optional=False)
        self._move_to_outbox()
        effects = [Effect(*fields) for fields in state["pending"]]
        unknown = sorted({effect.kind for effect in effects} - self._handlers.keys())
        if unknown:
            raise InvalidArgumentError(
                f"the checkpoint has effects of the kinds {unknown} that were not delivered; give a"
                " handler for each kind, or one that does nothing to drop them"
            )
        saved = {effect.key: effect for effect in effects}
        if self._coord is not None:
            # This is a recovery in the same process. Effects of the checkpoint that are no longer
            # in the outbox were delivered since, so they are not restored.
            outbox = self._ready | self._unsaved
            saved = {key: outbox[key] for key in saved if key in outbox}
        self._ready = saved
        self._unsaved = {}
        self._saving = set()
        self._step = state["step"]
        self._numbers = Counter(state["counts"])
        self._was_loaded = True

    # -- deliveries

    def _first_ready(self, kind: str) -> Effect | None:
        """Return the oldest effect of a kind that waits for its handler."""
        return next((effect for effect in self._ready.values() if effect.kind == kind), None)

    def _release(self, saved_keys: Collection[str]) -> None:
        """Make unsaved effects with these keys ready, and start a task for each kind of them."""
        for key in [*self._unsaved]:
            if key in saved_keys:
                self._ready[key] = self._unsaved.pop(key)
        # A write may end after `close`. Its effects are left to the next process.
        if self._coord is None:
            return
        for kind in self._handlers:
            if kind not in self._tasks and self._first_ready(kind) is not None:
                delivering = self._deliver(kind, self._coord.owner)
                self._tasks[kind] = new_task(delivering, f"delivery of {kind}")

    async def _deliver(self, kind: str, owner: TasksOwner) -> None:
        """Deliver the effects of a kind one after another, until there are no more.

        `owner` is the session.
        """
        # The task was started in a run, and lasts longer, so it must not count as a part of that
        # run. As in a hook, the session rejects `run` and `aclose` in a handler.
        begin_run(owner, None)
        # `begin` of another session replaces `self._tasks`. The task must remove itself from the
        # tasks of its own session.
        tasks = self._tasks
        failures = 0
        try:
            while (effect := self._first_ready(kind)) is not None:
                # A handler may change its copy of the payload, without a change of the effect that
                # a repetition delivers or a checkpoint contains.
                copied = effect._replace(payload=copy.deepcopy(effect.payload))
                # A cancelled handler gets half of the grace period, because `close` waits for it
                # and must itself end within the whole period.
                wait = Wait[object](f"delivery of {effect.key}", owner.grace_secs / 2)
                try:
                    await wait.result_of(self._handlers[kind](copied))
                except Exception as error:
                    failures += 1
                    message = "delivery of %s failed, in attempt %d; it is repeated: %s"
                    logger.warning(message, effect.key, failures, safe_repr(error))
                    await sleep(self._backoff.pause_secs(failures))
                    continue
                failures = 0
                # A recovery during the delivery may have dropped the effect, and restored another
                # object in its place. The repeated step then records the effect under the same key.
                if self._ready.get(effect.key) is effect:
                    del self._ready[effect.key]
                    self._progress.wake()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Nothing awaits this task, so let the session fail with the error.
            owner.coordinator.request_stop(error)
        finally:
            del tasks[kind]

    async def _wait_for_deliveries(self, count: int) -> None:
        """Wait until fewer effects than `count` wait for their handlers."""
        with active(
            "wait",
            "the deliveries of effects",
            lambda: awaited_tasks(*self._tasks.values()),
        ):
            while len(self._ready) >= count:
                await self._progress.wait()

    async def _drain(self, secs: float) -> None:
        """Wait until all ready effects are delivered, at most until `secs` after the first call.
        Only that call sets the time limit, which all waits at the end of the session share.
        """
        self._move_to_outbox()
        now = current_clock().now()
        if self._drains_until is None:
            self._drains_until = now + secs
        with contextlib.suppress(TimeoutError):
            await limited(self._wait_for_deliveries(1), self._drains_until - now, "deliveries")

    def status(self) -> tuple[EffectStatus, ...]:
        """Return the counts of each kind, as in `session.status().effects`."""
        unsaved = Counter(effect.kind for effect in self._unsaved.values())
        pending = unsaved + Counter(effect.kind for effect in self._ready.values())
        return tuple(EffectStatus(kind, pending[kind], unsaved[kind]) for kind in self._handlers)

    def __repr__(self) -> str:
        return f"EffectsHook({list(self._handlers)}, run={self._run!r})"
