"""Effects: messages, charges and other actions of steps, kept in the checkpoint until delivered.

effect(kind, payload)      recorded in the attempt     a failed run leaves nothing
the run is committed       moved to the outbox         part of the checkpoint of its step
the checkpoint is durable  released to the handlers    at the event `saved`; with when="commit":
                                                       immediately
handler(effect) returns    removed from the outbox     until then the delivery is repeated,
                                                       also by the next process
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import copy_context
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from aiohooks._core.activity import active, awaited_tasks
from aiohooks._core.calls import Wait, limited
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, new_task, wait_done
from aiohooks._core.clock import current_clock, sleep
from aiohooks._core.queue import Queue
from aiohooks._core.reports import is_logged
from aiohooks._core.scope import leave_run
from aiohooks._core.validate import (
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks._core.waits import Backoff
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import (
    EffectError,
    InvalidArgumentError,
    InvalidHookError,
    StopRequestedError,
    did_you_mean,
    printable,
    safe_repr,
)
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.hooks.every import ResettingHook
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import SessionRunContext, SessionRunValues
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


Handler: TypeAlias = Callable[[Effect], Awaitable[object]]
"""A coroutine function that delivers an effect. If it raises, the delivery is repeated."""


class EffectsHook(ResettingHook):
    """Delivers the effects of steps and hooks when they can no longer be undone.

    With `when="checkpoint"`, an effect is delivered when a durable checkpoint contains its step: a
    step that a recovery or a kill undoes has no effect. With "commit" it is delivered as soon as
    its run is committed. A step that is repeated then has its effect again, under the same key.

    A task for each kind delivers the effects in order, at least once, alongside the training. It
    repeats failed deliveries. The checkpoints contain the effects that are not delivered yet, and
    the next process delivers them. If `max_pending` effects wait for a handler, runs that record
    effects wait until they are delivered. If so many wait for a checkpoint, one is requested.

    When the session ends normally, the last checkpoint is saved, this hook delivers its effects for
    at most `drain_secs`, and a checkpoint without them is saved. A warning counts the remaining
    effects.
    """

    # This hook must follow the hooks that record effects.
    order: ClassVar[int] = 99

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        when: Literal["checkpoint", "commit"] = "checkpoint",
        run: str | None = None,
        max_pending: int = 1000,
        backoff: Backoff = Backoff(),
        drain_secs: float | None = 10.0,
    ) -> None:
        """Check the arguments.

        Args:
            handlers: a coroutine function for each kind.
            when: when an effect is delivered.
            run: the name of the training in the keys. The receiver must get each name from one
                training only, and from one worker of it. By default the name is random and kept in
                the checkpoints. Name the run if effects are delivered at the commit, because the
                next process chooses another random name if no checkpoint was saved.
            max_pending: how many effects may wait for a handler, and for a checkpoint.
            backoff: the pauses before a delivery is repeated.
            drain_secs: how long the end of the session waits for deliveries. None sets no limit.

        Raises:
            InvalidArgumentError: an argument is invalid.
            InvalidHookError: a handler is not a coroutine function.
        """
        check_mapping(handlers, "handlers", optional=False)
        for kind, handler in handlers.items():
            check_instance(kind, str, "a kind of handlers")
            if not is_coroutine_function(handler):
                raise InvalidHookError(
                    f"the handler of {kind!r} is {handler!r}; give a coroutine function (`async"
                    " def`), and call blocking functions with `await asyncio.to_thread(...)`",
                )
        if not handlers:
            raise InvalidArgumentError("handlers is empty; give {kind: coroutine function}")
        check_choice(when, "when", "checkpoint", "commit")
        if run is not None and (not isinstance(run, str) or not run):
            raise InvalidArgumentError(f"run is {run!r}; give a non-empty str, or leave it out")
        check_instance(backoff, Backoff, "backoff")
        check_secs(drain_secs, "drain_secs", optional=True)
        self._handlers = dict(handlers)
        self._is_at_commit = when == "commit"
        self._given_run = run
        self._max_pending = checked_int(max_pending, "max_pending", 1)
        self._backoff = backoff
        self._drain_secs = math.inf if drain_secs is None else drain_secs
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        """Set the attributes of a new session, with an empty outbox."""
        self._run: str = self._given_run or os.urandom(6).hex()
        # The step of the latest effects in the outbox, and their number by recorder.
        self._step = 0
        self._numbers: Counter[str] = Counter()
        # The attempts whose recorded effects are neither in the outbox nor dropped. These are the
        # current attempt, and attempts that failed before `after_run` of this hook.
        self._attempts: list[SessionRunContext] = []
        # The outbox: the effects that wait for a checkpoint, and those of each kind that are ready.
        self._unsaved: deque[Effect] = deque()
        self._deliveries = {
            kind: _Delivery(kind, handler, self._backoff, self._max_pending)
            for kind, handler in self._handlers.items()
        }
        # The directory of the checkpoints that the session is restored from, if a hook saves the
        # outbox there.
        self._checkpoint_dir: Path | None = None
        # The step of the latest save, and how many unsaved and undelivered effects are in it.
        self._saving_step = 0
        self._saving_unsaved = 0
        self._saving_pending = 0
        # Whether the checkpoint of the raw session that is created has an outbox.
        self._was_loaded = False
        # The time until which the end of the session waits for deliveries; None before the end.
        self._drains_until: float | None = None
        self._coord: Coordinator | None = None

    # -- the life of a session

    async def begin(self) -> None:
        """Begin with an empty outbox, and subscribe to the events of saves."""
        await super().begin()
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
        owner = coord.owner
        if owner.effects not in (None, self):
            raise InvalidHookError(
                "the session has two EffectsHooks; give one of them the handlers of all kinds",
            )
        saver = getattr(session, "saver", None)
        # None is the directory of the creator, in which the session's own saver saves.
        if saver is not None and {None, saver.checkpoint_dir} & {*coord.events.checkpoint_dirs}:
            self._checkpoint_dir = saver.checkpoint_dir
        if self._checkpoint_dir is None and not self._is_at_commit:
            raise InvalidArgumentError(
                'EffectsHook(when="checkpoint") delivers the effects of durable checkpoints, and no'
                " hook saves this session where it is restored from. Give the session"
                " ChiefSessionCreator(..., checkpoint_dir=...) and CheckpointSaverHook(), or"
                ' deliver when="commit"',
            )
        self._coord = coord
        owner.effects = self
        for delivery in self._deliveries.values():
            delivery.grace_secs = owner.grace_secs
        if getattr(session, "restored", None) is not None:
            if not self._was_loaded:
                # The checkpoint is older than this hook, so the recovery undoes all effects.
                self.load_state_dict({"pending": ()})
            self._was_loaded = False
            # The restored checkpoint has all of them.
            self._release(len(self._unsaved))

    @only_if("_lacks_room")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Wait until all effects of full kinds are delivered, or until a stop.

        `_lacks_room` has moved the effects of the run to the outbox. A drain does not end the wait,
        because its runs need room as well.
        """
        assert self._coord is not None
        full = [delivery for delivery in self._deliveries.values() if delivery.is_full]
        with contextlib.suppress(StopRequestedError):
            await self._coord.until(_delivered(full))

    def _lacks_room(self, run_context: SessionRunContext, run_values: object) -> bool:
        """Move the effects of the run to the outbox. Return whether `after_run` must wait for room.

        The session calls this after each run. It needs no task, unlike `after_run`.
        """
        run_context.accepts_effects = False
        if not self._attempts:
            return False
        self._move_to_outbox()
        return any(delivery.is_full for delivery in self._deliveries.values())

    async def end(self, session: Session) -> None:
        """Deliver the remaining effects, unless they wait for the last checkpoint."""
        self._drains_until = current_clock().now() + self._drain_secs
        await self._drain()

    async def close(self, exc: BaseException | None) -> None:
        """Cancel the deliveries, and log how many effects remain.

        After an error, effects that no checkpoint contains are delivered first, for at most a third
        of the grace period. The deliveries that are cancelled then may take the rest.
        """
        self._move_to_outbox()
        if self._checkpoint_dir is None and self._coord is not None and exc is not None:
            self._drains_until = current_clock().now() + self._coord.owner.grace_secs / 3
            await self._drain()
        tasks = [delivery.task for delivery in self._deliveries.values() if delivery.task]
        for task in tasks:
            task.cancel()
        # No time limit here, because each delivery has one.
        await wait_done(tasks, None)
        self._coord = None
        if remaining := self._pending():
            outcome = "they are lost, as no checkpoint has them"
            if self._checkpoint_dir is not None:
                outcome = "the next process delivers them, or repeats their steps"
            counts = _counts_by_kind(remaining)
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
                f" {did_you_mean(str(kind), self._handlers)}",
            )
        # A session without the extra saves no checkpoints.
        with contextlib.suppress(ImportError):
            from aiohooks.checkpoint._encoding import encode

            encode({f"payload of effect {kind!r}": payload})
        copied = copy.deepcopy(payload)
        with self._lock:
            if not attempt.accepts_effects:
                raise EffectError(
                    f"effect({kind!r}) was called after the effects of its run were taken or"
                    " dropped. Record it before the run ends. In after_run, only a hook with an"
                    f" order below {self.order} can record it",
                )
            if attempt not in self._attempts:
                self._attempts.append(attempt)
            attempt.effects.append((kind, copied, recorder or kind))

    def _move_to_outbox(self) -> None:
        """Move the effects of committed attempts to the outbox, and drop the effects of failed
        attempts.

        With `when="commit"`, the effects are delivered. Otherwise a save is requested if many wait.
        """
        # Threads only record. The outbox itself belongs to the event loop, and needs no lock.
        with self._lock:
            attempts = self._attempts
            self._attempts = [attempt for attempt in attempts if attempt.accepts_effects]
            recorded = [
                (attempt.global_step, attempt.take_effects())
                for attempt in attempts
                if attempt.committed
            ]
        for step, effects in recorded:
            self._add_to_outbox(step, effects)
        if self._is_at_commit:
            self._release(len(self._unsaved))
        elif self._coord is not None and len(self._unsaved) >= self._max_pending:
            self._coord.events.request_save()

    def _add_to_outbox(
        self,
        step: int,
        recorded: list[tuple[str, Any, str]],
    ) -> None:
        if step < self._step:
            # No checkpoint was restored, so this step is not a repetition and needs new keys.
            self._run += "+"
        if step != self._step:
            self._numbers.clear()
        self._step = step
        for kind, payload, recorder in recorded:
            self._numbers[recorder] += 1
            key = f"{self._run}/{step}/{recorder}/{self._numbers[recorder]}"
            self._unsaved.append(Effect(kind, payload, key, step))

    def _pending(self) -> list[Effect]:
        """Return the undelivered effects. Effects of one kind keep their order."""
        pending: list[Effect] = []
        for delivery in self._deliveries.values():
            pending += delivery.items
        return [*pending, *self._unsaved]

    def status(self) -> tuple[EffectStatus, ...]:
        """Return the counts of each kind, as in `session.status().effects`."""
        unsaved = Counter(effect.kind for effect in self._unsaved)
        return tuple(delivery.status(unsaved[kind]) for kind, delivery in self._deliveries.items())

    # -- saves

    def _note_saving(self, step: int, checkpoint_dir: Path) -> None:
        """Note which effects the checkpoint will contain."""
        if checkpoint_dir == self._checkpoint_dir:
            self._move_to_outbox()
            self._saving_step = step
            self._saving_unsaved = len(self._unsaved)
            self._saving_pending = len(self._pending())

    async def _note_saved(self, step: int, path: Path) -> None:
        """Release the effects that the checkpoint contains. At the end, wait for their delivery."""
        # Another hook has saved a checkpoint in another directory, or of an earlier step: that
        # lacks some of the effects.
        if path.parent != self._checkpoint_dir or step < self._saving_step:
            return
        self._release(self._saving_unsaved)
        if self._drains_until is not None and self._coord is not None:
            await self._drain()
            if len(self._pending()) < self._saving_pending:
                self._coord.events.request_save()

    def _release(self, count: int) -> None:
        """Deliver the first effects that wait for a checkpoint."""
        self._saving_unsaved = 0
        for _ in range(count):
            effect = self._unsaved.popleft()
            self._deliveries[effect.kind].add(effect)

    def state_dict(self) -> dict[str, Any]:
        """Return the undelivered effects, and the counters for the next keys.

        Move the effects of the last run to the outbox first, if `after_run` has not.
        """
        # It is not called if another hook has failed after the commit; the effects of the run
        # belong to the state all the same.
        self._move_to_outbox()
        return {
            "run": self._run,
            "step": self._step,
            "counts": dict(self._numbers),
            "pending": [list(effect) for effect in self._pending()],
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
        saved = {effect.key: effect for effect in effects}
        unknown = sorted({effect.kind for effect in saved.values()} - self._handlers.keys())
        if unknown:
            raise InvalidArgumentError(
                f"the checkpoint has effects of the kinds {unknown} that were not delivered, and"
                " EffectsHook has no handlers for them. Add a handler for each kind; a handler"
                " that does nothing drops its effects",
            )
        if self._coord is None:
            # This is a new process, which has delivered nothing yet.
            self._unsaved = deque(saved.values())
        else:
            self._drop_undone(saved)
        # The name that the program gives now takes precedence over the name in the checkpoint,
        # which may have a sign for each reset of the step.
        run: str = state.get("run", self._run)
        if self._given_run in (None, run.rstrip("+")):
            self._run = run
        self._step = state.get("step", 0)
        self._numbers = Counter(state.get("counts", {}))
        self._was_loaded = True

    def _drop_undone(self, saved: Mapping[str, Effect]) -> None:
        """Drop the effects that are not in the restored checkpoint: their steps are undone."""
        undone = [effect for effect in self._pending() if effect.key not in saved]
        self._unsaved = deque(effect for effect in self._unsaved if effect.key in saved)
        for delivery in self._deliveries.values():
            delivery.items = deque(effect for effect in delivery.items if effect.key in saved)
        if undone:
            counts = _counts_by_kind(undone)
            logger.warning("effects of steps that are undone are dropped: %s", counts)

    # -- waiting for deliveries

    async def _drain(self) -> None:
        """Wait until all ready effects are delivered, but no longer than `_drains_until`."""
        assert self._drains_until is not None
        self._move_to_outbox()
        secs: float | None = max(0.0, self._drains_until - current_clock().now())
        if secs == math.inf:
            secs = None
        if secs != 0:
            with contextlib.suppress(TimeoutError):
                delivered = _delivered(self._deliveries.values())
                await limited(delivered, secs, "the delivery of effects")

    def __repr__(self) -> str:
        when = "commit" if self._is_at_commit else "checkpoint"
        return f"EffectsHook({list(self._handlers)}, when={when!r})"


class _Delivery(Queue[Effect]):
    """The effects of one kind that are ready for their handler, and the task that delivers them."""

    def __init__(
        self,
        kind: str,
        handler: Handler,
        backoff: Backoff,
        max_pending: int,
    ) -> None:
        super().__init__(max_pending)
        self.kind = kind
        self.task: asyncio.Task[None] | None = None
        """Delivers the effects, or None while there are none."""
        self.grace_secs = DEFAULT_GRACE_SECS
        self._handler = handler
        self._backoff = backoff
        # Handlers are part of no run, and see the context variables of the session alone.
        self._context = copy_context()
        self._context.run(leave_run)
        self._delivered_count = 0
        self._failure_count = 0
        self._last_error: str | None = None
        # How many deliveries of the first effect have failed.
        self._attempts = 0

    def status(self, unsaved: int) -> EffectStatus:
        """Return the counts. `unsaved` more effects wait for a checkpoint."""
        return EffectStatus(
            self.kind,
            pending=len(self.items) + unsaved,
            unsaved=unsaved,
            delivered=self._delivered_count,
            failures=self._failure_count,
            last_error=self._last_error,
        )

    def begin(self, item: Effect) -> None:
        """Start the task, if there is none."""
        if self.task is None:
            name = f"delivery of {self.kind}"
            self.task = new_task(self._deliver_all(), name, self._context.copy())

    async def _deliver_all(self) -> None:
        """Deliver the effects one after another, until there are no more."""
        try:
            while self.items:
                await self._deliver(self.items[0])
        finally:
            self.task = None

    async def _deliver(self, effect: Effect) -> None:
        """Call the handler. Remove the effect, or pause after a failure."""
        # A handler that changes the payload changes neither a repetition nor a checkpoint.
        copied = effect._replace(payload=copy.deepcopy(effect.payload))
        # A cancelled handler gets half of the grace period, because `close` waits for it and must
        # itself end within the whole period.
        wait = Wait[object](f"delivery of {effect.key}", self.grace_secs / 2)
        try:
            await wait.result_of(self._handler(copied))
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # Errors such as a panic of Rust code derive from BaseException. They must not end the
            # task, because the later effects would stay undelivered.
            self._note_failure(effect, error)
            await sleep(self._backoff.pause_secs(self._attempts))
            return
        self._attempts = 0
        self._delivered_count += 1
        # A recovery during the delivery may have removed the effect already.
        if self.items and self.items[0] is effect:
            self.ended([effect], None)

    def _note_failure(self, effect: Effect, error: BaseException) -> None:
        """Count a failed delivery. Log the first, the tenth, the hundredth, ... of its kind."""
        self._attempts += 1
        self._failure_count += 1
        self._last_error = printable(safe_repr(error))
        if is_logged(self._failure_count):
            logger.warning(
                "delivery of %s failed, in attempt %d; %d of %r wait behind it: %s",
                effect.key,
                self._attempts,
                len(self.items) - 1,
                self.kind,
                self._last_error,
                exc_info=error if self._failure_count == 1 else None,
            )


async def _delivered(deliveries: Iterable[_Delivery]) -> None:
    """Wait until all ready effects of some kinds are delivered."""
    tasks = [delivery.task for delivery in deliveries if delivery.task is not None]
    with active("wait", "the deliveries of effects", lambda: awaited_tasks(*tasks)):
        await wait_done(tasks, None)


def _counts_by_kind(effects: Iterable[Effect]) -> str:
    """Return the number of effects of each kind, such as "2 of 'charge', 1 of 'mail'"."""
    counts = Counter(effect.kind for effect in effects)
    return ", ".join(f"{count} of {kind!r}" for kind, count in counts.items())
