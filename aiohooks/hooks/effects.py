"""Effects: messages, charges and other actions of steps, kept in the checkpoint until delivered.

effect(kind, payload)      recorded in the attempt     a failed run leaves nothing
the run is committed       moved to the outbox         part of the checkpoint of its step
the checkpoint is durable  released to the handlers    with when="commit": immediately
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
from typing import Any, ClassVar, Literal, TypeAlias, cast

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, new_task, wait_done
from aiohooks._aio.clock import Waiters, sleep
from aiohooks._aio.contexts import leave_run
from aiohooks._aio.overlap import Wait, limited
from aiohooks._aio.waits import Backoff
from aiohooks._diagnostics import Awaited, Waiting
from aiohooks._validate import (
    call_error,
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks.dispatch.calls import is_logged, only_if
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
from aiohooks.session.coordinator import Coordinator, owner_of
from aiohooks.session.hook import SessionRunContext, SessionRunValues
from aiohooks.session.status import EffectStatus

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MAX_DEPTH = 32
"""A checkpoint holds 64 levels, some of which are around the payload."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """An effect of a committed run, as a handler of an `EffectsHook` gets it.

    Attributes:
        kind: the name of its handler.
        payload: its data.
        key: unique, and the same whenever the step is repeated, in this process or another: the
            receiver's idempotency key.
        step: the global step of the run.
    """

    kind: str
    payload: Any
    key: str
    step: int


Handler: TypeAlias = Callable[[Effect], Awaitable[object]]
"""A coroutine function that delivers an effect. It returns when the effect is delivered, and raises
to have the delivery repeated.
"""


@dataclasses.dataclass(eq=False)
class _Kind:
    """The effects of one kind that may be delivered, and their delivery."""

    handler: Handler
    ready: deque[Effect] = dataclasses.field(default_factory=deque[Effect])
    task: asyncio.Task[None] | None = None
    delivered: int = 0
    failures: int = 0
    attempts: int = 0
    """Failed deliveries of the first effect."""
    last_error: str | None = None


class EffectsHook(ResettingHook, Waiting):
    """Delivers the effects of steps and hooks when they can no longer be undone.

    With `when="checkpoint"`, an effect is delivered when a durable checkpoint contains its step: a
    step that a recovery or a kill undoes has no effect. With "commit" it is delivered as soon as
    its run is committed; a step that is repeated then has its effect again, under the same key.

    Each kind is delivered in order, at least once, by a task alongside the training. Failed
    deliveries are repeated. Effects that are not delivered yet are part of the checkpoints, and the
    next process delivers them. While `max_pending` effects wait for their handlers, runs that
    record effects wait at their end; when `max_pending` wait for a checkpoint, one is saved.

    At a clean end the last checkpoint is saved, its effects are delivered for at most `drain_secs`,
    and a checkpoint without them is saved. Effects that remain are counted in a warning.
    """

    # After the hooks that record, before the hook that saves.
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
            run: the name of the training in the keys, unique among those of the receiver, also
                among the workers of one training. By default a random name, which is kept in the
                checkpoints. Name the run if effects are delivered at the commit: a process that is
                killed before the first checkpoint would choose another name.
            max_pending: how many effects may wait for their handlers, and for a checkpoint.
            backoff: the pauses before a delivery is repeated.
            drain_secs: how long the end of the session waits for deliveries; None: until all are
                done.

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
        if run is not None and (not isinstance(run, str) or not run):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"run is {run!r}; give a non-empty str, or leave it out")
        check_instance(backoff, Backoff, "backoff")
        check_secs(drain_secs, "drain_secs", optional=True)
        self._handlers = dict(handlers)
        self._at_commit = when == "commit"
        self._given_run = run
        self._max_pending: int = checked_int(max_pending, "max_pending", 1)
        self._backoff = backoff
        self._drain_secs = drain_secs
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._run = self._given_run or os.urandom(6).hex()
        self._step = 0
        """The step of the last effects, with the next numbers at that step by recorder."""
        self._numbers = Counter[str]()
        self._resets = 0
        """How often the step fell without a restored checkpoint."""
        self._attempt: SessionRunContext | None = None
        """The attempt that has recorded effects last, until they are taken or dropped."""
        self._effect_count = 0
        """How many effects were taken: the number of the last one."""
        self._unsaved: dict[int, Effect] = {}
        """The effects that wait for a checkpoint, by number."""
        self._kinds = {kind: _Kind(handler) for kind, handler in self._handlers.items()}
        self._delivered_since_state = False
        self._was_loaded = False
        self._is_saved = False
        self._coord: Coordinator | None = None
        self._grace_secs = DEFAULT_GRACE_SECS
        self._context = Context()
        self._progress = Waiters()

    # -- the life of a session

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Accept the effects of the session's runs, and deliver those of the last process.

        Raises:
            InvalidArgumentError: with `when="checkpoint"`, nothing saves the session where it is
                restored from.
            InvalidHookError: the session has another `EffectsHook`.
        """
        state = owner_of(coord).state
        if state.effects not in (None, self):
            raise InvalidHookError(
                "the session has two EffectsHooks; give one of them the handlers of all kinds"
            )
        stateful: Mapping[str, Any] = getattr(session, "stateful_hooks", dict[str, Any])()
        self._is_saved = any(
            hook.saves_for(session) for hook in stateful.values() if hasattr(hook, "saves_for")
        )
        if not self._is_saved and not self._at_commit:
            raise InvalidArgumentError(
                'EffectsHook(when="checkpoint") delivers the effects of durable checkpoints, and no'
                " hook saves this session where it is restored from: give it"
                " ChiefSessionCreator(..., checkpoint_dir=...) and CheckpointSaverHook(), or"
                ' deliver when="commit"'
            )
        is_recovery = self._coord is not None
        if is_recovery and not self._was_loaded and getattr(session, "restored", None) is not None:
            # The checkpoint is older than this hook.
            self.load_state_dict({"pending": ()})
        self._was_loaded = False
        self._coord = coord
        self._grace_secs = state.grace_secs
        state.effects = self
        self._context = copy_context()
        self._context.run(leave_run)
        self._deliver()

    @only_if("_lacks_room")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Take the effects of the run. Wait while too many can be delivered; a stop ends the wait.

        A drain does not end it: its runs need room as well.
        """
        assert self._coord is not None
        with contextlib.suppress(StopRequestedError):
            await self._coord.until(self._wait_until(self._has_room))

    def _lacks_room(self, run_context: SessionRunContext, run_values: object) -> bool:
        run_context.accepts_effects = False
        if self._attempt is not run_context:
            return False
        self._move_to_outbox()
        return not self._has_room()

    async def end(self, session: Session) -> None:
        """Deliver the rest, unless a saver does that after the last checkpoint."""
        if not self._is_saved:
            await self.drain()

    async def close(self, exc: BaseException | None) -> None:
        """End the deliveries, and log how many effects remain.

        Effects that no checkpoint has are delivered for a third of the grace period.
        """
        self._move_to_outbox()
        if not self._is_saved and exc is not None:
            secs = self._grace_secs / 3
            await self.drain(secs if self._drain_secs is None else min(secs, self._drain_secs))
        tasks = [kind.task for kind in self._kinds.values() if kind.task is not None]
        for task in tasks:
            task.cancel()
        # Without a limit here: a delivery has its own.
        await wait_done(tasks, None)
        self._coord = None
        if remaining := self._pending():
            outcome = (
                "the next process delivers those that its checkpoint has, and makes the steps of"
                " the others again"
            )
            if not self._is_saved:
                outcome = "they are lost, as no checkpoint has them"
            logger.warning(
                "effects that were not delivered: %s; %s", _counts_by_kind(remaining), outcome
            )

    # -- the outbox

    def record(
        self,
        attempt: SessionRunContext,
        kind: str,
        payload: Any,
        recorder: str | None,
    ) -> None:
        """Record an effect of an attempt; threads may call this. See `aiohooks.effect`."""
        if not isinstance(kind, str) or kind not in self._kinds:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"kind of an effect is {kind!r}; give the kind of a handler of the EffectsHook;"
                f" {did_you_mean(str(kind), self._kinds)}"
            )
        copied = _copy_payload(payload, f"the payload of effect {kind!r}")
        with self._lock:
            if not attempt.accepts_effects:
                raise EffectError(
                    f"effect({kind!r}) was called after the effects of its run were taken or"
                    " dropped; record it before the run ends, and in after_run by a hook with an"
                    f" order below {self.order}"
                )
            # The attempt before ended without `after_run`: it failed, perhaps after its commit.
            if self._attempt is not attempt:
                self._move_recorded()
                self._attempt = attempt
            attempt.effects.append((kind, copied, recorder or kind))

    def _move_to_outbox(self) -> None:
        with self._lock:
            self._move_recorded()
        if self._at_commit:
            self.release(self._effect_count)

    def _move_recorded(self) -> None:
        """Move the latest recorded effects to the outbox, or drop them if their run failed."""
        attempt = self._attempt
        self._attempt = None
        if attempt is None:
            return
        attempt.accepts_effects = False
        if not attempt.committed:
            return
        step = attempt.global_step
        if step < self._step:
            # These steps are no repetitions, so their keys must be new.
            self._resets += 1
        if step != self._step:
            self._numbers.clear()
        self._step = step
        run = f"{self._run}+{self._resets}" if self._resets else self._run
        for kind, payload, recorder in attempt.effects:
            self._numbers[recorder] += 1
            key = f"{run}/{step}/{recorder}/{self._numbers[recorder]}"
            self._effect_count += 1
            self._unsaved[self._effect_count] = Effect(kind, payload, key, step)

    @property
    def unsaved(self) -> int:
        """How many effects wait for a checkpoint."""
        return len(self._unsaved)

    @property
    def wants_save(self) -> bool:
        """Whether too many effects wait for a checkpoint."""
        return self.unsaved >= self._max_pending

    def mark(self) -> int:
        """Return the argument for `release` when the state that was just taken is durable."""
        self._delivered_since_state = False
        return self._effect_count

    def release(self, mark: int) -> None:
        """Deliver the effects that were taken up to `mark`."""
        for number in [number for number in self._unsaved if number <= mark]:
            effect = self._unsaved.pop(number)
            self._kinds[effect.kind].ready.append(effect)
        self._deliver()

    def state_dict(self) -> dict[str, Any]:
        """Return the undelivered effects, and the counters from which the next keys are made."""
        # A hook that fails after the commit prevents `after_run` of this one. The effects of the
        # run still belong to the state.
        if self._attempt is not None and self._attempt.committed:
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

        In a recovery, effects recorded after the checkpoint are dropped, and effects delivered
        after it are not delivered again.

        Raises:
            InvalidArgumentError: an effect in the checkpoint has no handler.
        """
        check_mapping(state, "state", optional=False)
        self._move_to_outbox()
        saved: dict[str, Effect] = {}
        for kind, key, step, payload in state["pending"]:
            saved[key] = Effect(kind, payload, key, step)
        if unknown := sorted({effect.kind for effect in saved.values()} - self._kinds.keys()):
            raise InvalidArgumentError(
                f"the checkpoint has effects of the kinds {unknown} that were not delivered, and"
                " EffectsHook has no handlers for them. Add a handler for each kind; a handler"
                " that does nothing drops its effects"
            )
        if self._coord is None:
            # A new process, which has delivered nothing yet.
            for effect in saved.values():
                self._kinds[effect.kind].ready.append(effect)
        else:
            self._drop_undone(saved)
        # A name that the program gives now replaces the name in the checkpoint.
        self._run = self._given_run or state.get("run", self._run)
        self._step = state.get("step", 0)
        self._resets = state.get("resets", 0)
        self._numbers = Counter(state.get("counts", {}))
        self._was_loaded = True

    def _drop_undone(self, saved: Mapping[str, Effect]) -> None:
        undone = [effect for effect in self._pending() if effect.key not in saved]
        self._unsaved = {
            number: effect for number, effect in self._unsaved.items() if effect.key in saved
        }
        for kind in self._kinds.values():
            kind.ready = deque(effect for effect in kind.ready if effect.key in saved)
        if undone:
            logger.warning(
                "effects of steps that are undone are dropped: %s", _counts_by_kind(undone)
            )

    def _pending(self) -> list[Effect]:
        """Return the effects that are not delivered; those of one kind are in order."""
        ready = [effect for kind in self._kinds.values() for effect in kind.ready]
        return [*ready, *self._unsaved.values()]

    def status(self) -> tuple[EffectStatus, ...]:
        """Return the counts of each kind, as in `session.status().effects`."""
        unsaved = Counter(effect.kind for effect in self._unsaved.values())
        return tuple(
            EffectStatus(
                name,
                pending=len(kind.ready) + unsaved[name],
                unsaved=unsaved[name],
                delivered=kind.delivered,
                failures=kind.failures,
                last_error=kind.last_error,
            )
            for name, kind in self._kinds.items()
        )

    # -- delivering

    def _has_room(self) -> bool:
        return sum(len(kind.ready) for kind in self._kinds.values()) < self._max_pending

    def _deliver(self) -> None:
        """Start the deliveries of each kind that has effects ready."""
        if self._coord is None:
            return
        for name, kind in self._kinds.items():
            if kind.ready and kind.task is None:
                coro = self._deliver_kind(name, kind)
                kind.task = new_task(coro, f"delivery of {name}", self._context.copy())

    async def _deliver_kind(self, name: str, kind: _Kind) -> None:
        """Deliver the effects of a kind, one after another."""
        try:
            while kind.ready:
                effect = kind.ready[0]
                try:
                    await self._call_handler(kind.handler, effect)
                except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    self._note_failure(name, kind, effect, error)
                    await sleep(self._backoff.pause_secs(kind.attempts))
                else:
                    self._note_delivery(kind, effect)
        finally:
            kind.task = None
            self._progress.wake()

    async def _call_handler(self, handler: Handler, effect: Effect) -> None:
        # A copy: a handler that changes its payload changes neither a repetition nor a checkpoint.
        copied = dataclasses.replace(effect, payload=_copy_payload(effect.payload, "payload"))
        # `close` has the whole grace period.
        wait = Wait[object](f"delivery of {effect.key}", self._grace_secs / 2)
        await wait.result_of(handler(copied))

    def _note_delivery(self, kind: _Kind, effect: Effect) -> None:
        kind.attempts = 0
        kind.delivered += 1
        self._delivered_since_state = True
        # A recovery may have undone its step meanwhile.
        if kind.ready and kind.ready[0] is effect:
            kind.ready.popleft()
        self._progress.wake()

    def _note_failure(
        self,
        name: str,
        kind: _Kind,
        effect: Effect,
        error: BaseException,
    ) -> None:
        kind.attempts += 1
        kind.failures += 1
        kind.last_error = printable(safe_repr(error))
        if is_logged(kind.failures) or (kind.attempts > 1 and is_logged(kind.attempts)):
            logger.warning(
                "delivery of %s failed, in attempt %d; %d of %r wait behind it: %s",
                effect.key,
                kind.attempts,
                len(kind.ready) - 1,
                name,
                kind.last_error,
                exc_info=error if kind.failures == 1 else None,
            )

    async def drain(self, secs: float | None = None) -> bool:
        """Deliver the effects that may be delivered, for `secs`, by default `drain_secs`.

        Returns:
            Whether effects of the latest state were delivered since it was taken.
        """
        self._move_to_outbox()
        self._deliver()
        secs = self._drain_secs if secs is None else secs
        if secs != 0:
            done = self._wait_until(lambda: all(kind.task is None for kind in self._kinds.values()))
            with contextlib.suppress(TimeoutError):
                await limited(done, secs, "the delivery of effects")
        return self._delivered_since_state

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._progress.wait()

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> Awaited | None:
        """Return the deliveries, for which the end and runs without room wait."""
        calls = [
            Awaited(
                "deliveries", f"the deliveries of {name!r}, {len(kind.ready)} left", key=kind.task
            )
            for name, kind in self._kinds.items()
            if kind.task is not None
        ]
        if not calls or method != "_wait_until":
            return None
        return Awaited("calls", "", by=lambda: calls, needs="any")

    def __repr__(self) -> str:
        when = "commit" if self._at_commit else "checkpoint"
        return f"EffectsHook({list(self._handlers)}, when={when!r})"


def _check_handler(kind: object, handler: Any) -> None:
    if not isinstance(kind, str) or not kind:
        raise InvalidArgumentError(f"handlers has the kind {kind!r}; a kind is a non-empty str")
    if not is_coroutine_function(handler):
        raise InvalidHookError(
            f"the handler of {kind!r} is {handler!r}; give a coroutine function (`async def`), and"
            " call blocking functions with `await asyncio.to_thread(...)`"
        )
    # None stands for the effect.
    if (error := call_error(handler, None)) is not None:
        raise InvalidHookError(
            f"the handler of {kind!r} cannot be called with one argument, the Effect: {error};"
            " write it as `async def handler(effect):`"
        )


def _counts_by_kind(effects: Iterable[Effect]) -> str:
    counts = Counter(effect.kind for effect in effects)
    return ", ".join(f"{count} of {kind!r}" for kind, count in counts.items())


def _copy_payload(value: Any, place: str, depth: int = 0) -> Any:
    """Return a copy of a payload, or raise if a checkpoint could not hold it exactly."""
    # Exact types: a checkpoint would return an instance of a subclass as its base.
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is str:
        _check_text(value, place)
    if kind in _ATOMS:
        return value
    if depth > _MAX_DEPTH:
        raise InvalidArgumentError(f"{place} is nested deeper than {_MAX_DEPTH} levels; flatten it")
    if kind is list or kind is tuple:
        items = [
            _copy_payload(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)
        ]
        return kind(items)
    if kind is not dict:
        raise InvalidArgumentError(
            f"{place} is {safe_repr(value)}, a {kind.__name__}; give None, bool, int, float, str,"
            " bytes, or lists, tuples and dicts of these. Convert an array with .tolist() or"
            " .tobytes(); instead of large data, give the name under which the receiver finds it"
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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{place} has {text!r}, which cannot be encoded as UTF-8: {error}"
        raise InvalidArgumentError(message) from None
