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
import dataclasses
import os
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast

from aiohooks._core.activity import Awaited, active
from aiohooks._core.calls import Wait, limited
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, new_task, wait_done
from aiohooks._core.clock import current_clock, sleep
from aiohooks._core.reports import is_logged
from aiohooks._core.scope import leave_run
from aiohooks._core.validate import (
    call_error,
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks._core.waiters import Waiters
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
from aiohooks.session.events import session_events
from aiohooks.session.hook import SessionRunContext, SessionRunValues
from aiohooks.session.status import EffectStatus

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
# A checkpoint has at most 64 levels. Some of them are the state around the payload.
_MAX_DEPTH = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
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


@dataclasses.dataclass(eq=False)
class _KindQueue:
    """The queue of one kind: its effects that are ready for the handler, and their delivery."""

    handler: Handler
    ready: deque[Effect] = dataclasses.field(default_factory=deque[Effect])
    # The task that delivers the effects; None while there are none.
    task: asyncio.Task[None] | None = None
    delivered: int = 0
    # How many deliveries have failed in all.
    failures: int = 0
    # How many deliveries of the first effect have failed.
    failures_of_first: int = 0
    last_error: str | None = None


class EffectsHook(ResettingHook):
    """Delivers the effects of steps and hooks when they can no longer be undone.

    With `when="checkpoint"`, an effect is delivered when a durable checkpoint contains its step: a
    step that a recovery or a kill undoes has no effect. With "commit" it is delivered as soon as
    its run is committed; a step that is repeated then has its effect again, under the same key.

    A task for each kind delivers the effects in order, at least once, alongside the training. It
    repeats failed deliveries. The checkpoints contain the effects that are not delivered yet, and
    the next process delivers them. While `max_pending` effects wait for their handlers, runs that
    record effects wait at their end. When `max_pending` effects wait for a checkpoint, this hook
    requests one.

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
            max_pending: how many effects may wait for their handlers, and for a checkpoint.
            backoff: the pauses before a delivery is repeated.
            drain_secs: how long the end of the session waits for deliveries. None sets no limit.

        Raises:
            InvalidArgumentError: an argument is invalid.
            InvalidHookError: a handler is not a coroutine function of one argument.
        """
        check_mapping(handlers, "handlers", optional=False)
        for kind, handler in handlers.items():
            _check_handler(kind, handler)
        if not handlers:
            raise InvalidArgumentError("handlers is empty; give {kind: coroutine function}")
        check_choice(when, "when", "checkpoint", "commit")
        if run is not None and (not isinstance(run, str) or not run):
            raise InvalidArgumentError(f"run is {run!r}; give a non-empty str, or leave it out")
        check_instance(backoff, Backoff, "backoff")
        check_secs(drain_secs, "drain_secs", optional=True)
        self._handlers = dict(handlers)
        self._when = when
        self._is_at_commit = when == "commit"
        self._given_run = run
        self._max_pending: int = checked_int(max_pending, "max_pending", 1)
        self._backoff = backoff
        self._drain_secs = drain_secs
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        """Set the attributes of a new session, with an empty outbox."""
        self._run = self._given_run or os.urandom(6).hex()
        # The step of the latest effects in the outbox.
        self._step = 0
        # The number of effects at that step, by recorder.
        self._numbers: Counter[str] = Counter()
        # How often the step fell without the restore of a checkpoint.
        self._resets = 0
        # The attempts whose recorded effects are neither in the outbox nor dropped. These are the
        # current attempt, and attempts that failed before `after_run` of this hook.
        self._attempts: list[SessionRunContext] = []
        # How many effects were moved to the outbox, which is also the number of the last one.
        self._effect_count = 0
        # The effects that wait for a checkpoint, by number.
        self._unsaved: dict[int, Effect] = {}
        self._queues = {kind: _KindQueue(handler) for kind, handler in self._handlers.items()}
        # The directory of the checkpoints that the session is restored from, if a hook saves the
        # outbox there.
        self._checkpoint_dir: Path | None = None
        # The step of the save in progress, the number of the last effect in it, and whether it
        # still has effects that were delivered since.
        self._saving_step = 0
        self._saving_count = 0
        self._delivered_since_saving = False
        # Whether a checkpoint with effects was loaded for the raw session that is created.
        self._was_loaded = False
        # Whether the session ends, and the time until which the end waits for deliveries.
        self._is_ending = False
        self._drains_until: float | None = None
        self._coord: Coordinator | None = None
        self._grace_secs = DEFAULT_GRACE_SECS
        self._context = Context()
        self._progress = Waiters()

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
                "the session has two EffectsHooks; give one of them the handlers of all kinds"
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
                ' deliver when="commit"'
            )
        is_recovery = self._coord is not None
        restored = getattr(session, "restored", None)
        if is_recovery and restored is not None and not self._was_loaded:
            # The checkpoint is older than this hook, so the recovery undoes all effects.
            self.load_state_dict({"pending": ()})
        self._was_loaded = False
        self._coord = coord
        self._grace_secs = owner.grace_secs
        owner.effects = self
        self._context = copy_context()
        self._context.run(leave_run)
        self._deliver()

    @only_if("_lacks_room")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Wait until fewer than `max_pending` effects wait for their handlers, or until a stop.

        `_lacks_room` has moved the effects of the run to the outbox. A drain does not end the wait,
        because its runs need room as well.
        """
        assert self._coord is not None
        with contextlib.suppress(StopRequestedError):
            await self._coord.until(self._wait_until(self._has_room))

    def _lacks_room(self, run_context: SessionRunContext, run_values: object) -> bool:
        """Move the effects of the run to the outbox; return whether `after_run` must wait for room.

        The session calls this after each run. It needs no task, unlike `after_run`.
        """
        run_context.accepts_effects = False
        if not self._attempts:
            return False
        self._move_to_outbox()
        return not self._has_room()

    async def end(self, session: Session) -> None:
        """Deliver the remaining effects, except those that wait for the last checkpoint."""
        self._is_ending = True
        if self._drain_secs is not None:
            self._drains_until = current_clock().now() + self._drain_secs
        await self._drain_at_end()

    async def close(self, exc: BaseException | None) -> None:
        """Cancel the deliveries, and log how many effects remain.

        After an error, effects that no checkpoint contains are delivered first, for at most a third
        of the grace period. The deliveries that are cancelled then may take the rest.
        """
        self._move_to_outbox()
        if self._checkpoint_dir is None and exc is not None:
            secs = self._grace_secs / 3
            if self._drain_secs is not None:
                secs = min(secs, self._drain_secs)
            await self._drain(secs)
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        for task in tasks:
            task.cancel()
        # No time limit here, because `_call_handler` sets one for each delivery.
        await wait_done(tasks, None)
        self._coord = None
        remaining = self._pending()
        if remaining:
            outcome = "they are lost, as no checkpoint has them"
            if self._checkpoint_dir is not None:
                outcome = (
                    "the next process delivers the effects in its checkpoint, and repeats the steps"
                    " of the others"
                )
            logger.warning(
                "effects that were not delivered: %s; %s", _counts_by_kind(remaining), outcome
            )

    # -- the outbox

    def record(
        self, attempt: SessionRunContext, kind: str, payload: Any, recorder: str | None
    ) -> None:
        """Record an effect of an attempt. Any thread may call this. See `aiohooks.effect`."""
        if not isinstance(kind, str) or kind not in self._queues:
            raise InvalidArgumentError(
                f"kind of an effect is {kind!r}; give the kind of a handler of the EffectsHook:"
                f" {did_you_mean(str(kind), self._queues)}"
            )
        copied = _copy_payload(payload, f"the payload of effect {kind!r}")
        with self._lock:
            if not attempt.accepts_effects:
                raise EffectError(
                    f"effect({kind!r}) was called after the effects of its run were taken or"
                    " dropped. Record it before the run ends. In after_run, only a hook with an"
                    f" order below {self.order} can record it"
                )
            if attempt not in self._attempts:
                self._attempts.append(attempt)
            attempt.effects.append((kind, copied, recorder or kind))

    def _move_to_outbox(self) -> None:
        """Move the effects of committed attempts to the outbox, and drop those of failed attempts.

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
            self._release(self._effect_count)
        elif self._coord is not None and len(self._unsaved) >= self._max_pending:
            self._coord.events.request_save()

    def _add_to_outbox(self, step: int, recorded: list[tuple[str, Any, str]]) -> None:
        if step < self._step:
            # No checkpoint was restored, so this step is not a repetition and needs new keys.
            self._resets += 1
        if step != self._step:
            self._numbers.clear()
        self._step = step
        run = self._run
        if self._resets:
            run = f"{run}+{self._resets}"
        for kind, payload, recorder in recorded:
            self._numbers[recorder] += 1
            key = f"{run}/{step}/{recorder}/{self._numbers[recorder]}"
            self._effect_count += 1
            self._unsaved[self._effect_count] = Effect(kind, payload, key, step)

    # -- saves

    def _note_saving(self, step: int, checkpoint_dir: Path) -> None:
        """Note which effects the checkpoint will contain."""
        if checkpoint_dir == self._checkpoint_dir:
            self._move_to_outbox()
            self._saving_step = step
            self._saving_count = self._effect_count
            self._delivered_since_saving = False

    async def _note_saved(self, step: int, path: Path) -> None:
        """Release the effects that the checkpoint contains; at the end, wait for their delivery."""
        # Another hook has saved a checkpoint in another directory, or of an earlier step: that
        # lacks some of the effects.
        if path.parent != self._checkpoint_dir or step < self._saving_step:
            return
        self._release(self._saving_count)
        if self._is_ending:
            await self._drain_at_end()

    def _release(self, mark: int) -> None:
        """Deliver the effects up to the number `mark`."""
        released = [number for number in self._unsaved if number <= mark]
        for number in released:
            effect = self._unsaved.pop(number)
            self._queues[effect.kind].ready.append(effect)
        self._deliver()

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
            "resets": self._resets,
            "counts": dict(self._numbers),
            "pending": [
                [effect.kind, effect.key, effect.step, effect.payload] for effect in self._pending()
            ],
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
        saved: dict[str, Effect] = {}
        for kind, key, step, payload in state["pending"]:
            saved[key] = Effect(kind, payload, key, step)
        unknown = sorted({effect.kind for effect in saved.values()} - self._queues.keys())
        if unknown:
            raise InvalidArgumentError(
                f"the checkpoint has effects of the kinds {unknown} that were not delivered, and"
                " EffectsHook has no handlers for them. Add a handler for each kind; a handler"
                " that does nothing drops its effects"
            )
        if self._coord is None:
            # This is a new process, which has delivered nothing yet.
            for effect in saved.values():
                self._queues[effect.kind].ready.append(effect)
        else:
            self._drop_undone(saved)
        # The name that the program gives now takes precedence over the name in the checkpoint.
        self._run = self._given_run or state.get("run", self._run)
        self._step = state.get("step", 0)
        self._resets = state.get("resets", 0)
        self._numbers = Counter(state.get("counts", {}))
        self._was_loaded = True

    def _drop_undone(self, saved: Mapping[str, Effect]) -> None:
        """Drop the effects that are not in the restored checkpoint: their steps are undone."""
        undone = [effect for effect in self._pending() if effect.key not in saved]
        self._unsaved = {
            number: effect for number, effect in self._unsaved.items() if effect.key in saved
        }
        for queue in self._queues.values():
            queue.ready = deque(effect for effect in queue.ready if effect.key in saved)
        if undone:
            logger.warning(
                "effects of steps that are undone are dropped: %s", _counts_by_kind(undone)
            )

    def _pending(self) -> list[Effect]:
        """Return the undelivered effects. Effects of one kind keep their order."""
        ready = [effect for queue in self._queues.values() for effect in queue.ready]
        return [*ready, *self._unsaved.values()]

    def status(self) -> tuple[EffectStatus, ...]:
        """Return the counts of each kind, as in `session.status().effects`."""
        unsaved = Counter(effect.kind for effect in self._unsaved.values())
        return tuple(
            EffectStatus(
                kind,
                pending=len(queue.ready) + unsaved[kind],
                unsaved=unsaved[kind],
                delivered=queue.delivered,
                failures=queue.failures,
                last_error=queue.last_error,
            )
            for kind, queue in self._queues.items()
        )

    # -- delivering

    def _has_room(self) -> bool:
        """Return whether fewer than `max_pending` effects wait for their handlers."""
        return sum(len(queue.ready) for queue in self._queues.values()) < self._max_pending

    def _deliver(self) -> None:
        """Start a delivery task for each kind that has effects and no such task."""
        if self._coord is None:
            return
        for kind, queue in self._queues.items():
            if queue.ready and queue.task is None:
                delivery = self._deliver_kind(kind, queue)
                queue.task = new_task(delivery, f"delivery of {kind}", self._context.copy())

    async def _deliver_kind(self, kind: str, queue: _KindQueue) -> None:
        """Deliver the effects of a kind, one after another."""
        try:
            while queue.ready:
                effect = queue.ready[0]
                try:
                    await self._call_handler(queue.handler, effect)
                except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    # Errors such as a panic of Rust code derive from BaseException. They must not
                    # end the task, because the later effects would stay undelivered.
                    self._note_failure(kind, queue, effect, error)
                    await sleep(self._backoff.pause_secs(queue.failures_of_first))
                else:
                    self._note_delivery(queue, effect)
        finally:
            queue.task = None
            self._progress.wake()

    async def _call_handler(self, handler: Handler, effect: Effect) -> None:
        """Call a handler with a copy of the effect.

        A handler that changes the payload then changes neither a repetition nor a checkpoint.
        """
        copied = dataclasses.replace(effect, payload=_copy_payload(effect.payload, "payload"))
        # A cancelled handler gets half of the grace period, because `close` waits for it and must
        # itself end within the whole period.
        wait = Wait[object](f"delivery of {effect.key}", self._grace_secs / 2)
        await wait.result_of(handler(copied))

    def _note_delivery(self, queue: _KindQueue, effect: Effect) -> None:
        """Count a delivery, and remove the effect from the queue."""
        queue.failures_of_first = 0
        queue.delivered += 1
        self._delivered_since_saving = True
        # A recovery during the delivery may have removed the effect already.
        if queue.ready and queue.ready[0] is effect:
            queue.ready.popleft()
        self._progress.wake()

    def _note_failure(
        self, kind: str, queue: _KindQueue, effect: Effect, error: BaseException
    ) -> None:
        """Count a failed delivery. Log the first, the tenth, the hundredth, ... of its kind."""
        queue.failures_of_first += 1
        queue.failures += 1
        queue.last_error = printable(safe_repr(error))
        if is_logged(queue.failures):
            logger.warning(
                "delivery of %s failed, in attempt %d; %d of %r wait behind it: %s",
                effect.key,
                queue.failures_of_first,
                len(queue.ready) - 1,
                kind,
                queue.last_error,
                exc_info=error if queue.failures == 1 else None,
            )

    async def _drain_at_end(self) -> None:
        """Wait for the deliveries for the rest of `drain_secs`; request a save if it is needed."""
        secs = None
        if self._drains_until is not None:
            secs = max(0.0, self._drains_until - current_clock().now())
        await self._drain(secs)
        if self._coord is not None and (self._unsaved or self._delivered_since_saving):
            self._coord.events.request_save()

    async def _drain(self, secs: float | None) -> None:
        """Wait at most so many seconds until all ready effects are delivered."""
        self._move_to_outbox()
        self._deliver()
        if secs != 0:
            queues = self._queues.values()
            waiting = self._wait_until(lambda: all(queue.task is None for queue in queues))
            with contextlib.suppress(TimeoutError):
                await limited(waiting, secs, "the delivery of effects")

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        with active("wait", "the deliveries of effects", self._awaited):
            while not condition():
                await self._progress.wait()

    def _awaited(self) -> Awaited:
        deliveries = [
            Awaited(
                "deliveries", f"the deliveries of {kind!r}, {len(queue.ready)} left", key=queue.task
            )
            for kind, queue in self._queues.items()
            if queue.task is not None
        ]
        return Awaited("calls", "", by=lambda: deliveries, needs="any")

    def __repr__(self) -> str:
        return f"EffectsHook({list(self._handlers)}, when={self._when!r})"


def _check_handler(kind: object, handler: Any) -> None:
    """Raise if a kind is no name, or if its handler cannot be called with an effect."""
    if not isinstance(kind, str) or not kind:
        raise InvalidArgumentError(f"handlers has the kind {kind!r}; a kind is a non-empty str")
    if not is_coroutine_function(handler):
        raise InvalidHookError(
            f"the handler of {kind!r} is {handler!r}; give a coroutine function (`async def`), and"
            " call blocking functions with `await asyncio.to_thread(...)`"
        )
    error = call_error(handler, None)  # None stands for the effect
    if error is not None:
        raise InvalidHookError(
            f"the handler of {kind!r} cannot be called with one argument, the Effect: {error}."
            " Write it as `async def handler(effect):`"
        )


def _counts_by_kind(effects: Iterable[Effect]) -> str:
    """Return the number of effects of each kind, such as "2 of 'charge', 1 of 'mail'"."""
    counts = Counter(effect.kind for effect in effects)
    return ", ".join(f"{count} of {kind!r}" for kind, count in counts.items())


def _copy_payload(value: Any, place: str, depth: int = 0) -> Any:
    """Return a copy of a payload, or raise if a checkpoint could not hold it exactly.

    Args:
        value: the payload, or a part of it.
        place: the description of the value in messages.
        depth: how many lists, tuples and dicts contain the value.
    """
    # The exact type counts: a checkpoint would restore an instance of a subclass as its base class.
    value_type: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if value_type is str:
        _check_text(value, place)
    if value_type in _ATOMS:
        return value
    if depth > _MAX_DEPTH:
        raise InvalidArgumentError(f"{place} is nested deeper than {_MAX_DEPTH} levels; flatten it")
    if value_type is list or value_type is tuple:
        items = [
            _copy_payload(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)
        ]
        return value_type(items)  # pyright: ignore[reportUnknownVariableType]
    if value_type is not dict:
        raise InvalidArgumentError(
            f"{place} is {safe_repr(value)}, a {value_type.__name__}; give None, bool, int, float,"
            " str, bytes, or lists, tuples and dicts of these. Convert an array with .tolist() or"
            " .tobytes(). Instead of large data, give the name under which the receiver finds it"
        )
    copied: dict[Any, Any] = {}
    for key, item in cast("dict[Any, Any]", value).items():
        if type(key) is not str and type(key) is not int:
            raise InvalidArgumentError(
                f"{place} has the key {key!r}, a {type(key).__name__}; give a str or an int"
            )
        if isinstance(key, str):
            _check_text(key, place)
        copied[key] = _copy_payload(item, f"{place}[{key!r}]", depth + 1)
    return copied


def _check_text(text: str, place: str) -> None:
    """Raise if a text has a lone surrogate, which a checkpoint cannot contain."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{place} has {text!r}, which cannot be encoded as UTF-8: {error}"
        ) from None
