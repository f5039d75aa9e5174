"""Delivering effects: what the steps of a session are to cause outside of it, from an outbox that
is kept in its checkpoints.

effect(kind, payload)      recorded with the run         a failed run leaves nothing
the run has ended well     taken into the outbox         part of the checkpoint of the same step
the checkpoint is durable  released to the handlers      when="commit": released immediately
handler(effect) returns    removed from the outbox until then it is repeated, also by the next
                           process
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, Literal, TypeAlias

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, new_task, wait_done
from aiohooks._aio.clock import Waiters, current_clock, sleep
from aiohooks._aio.contexts import leave_run
from aiohooks._aio.overlap import Wait, limited
from aiohooks._aio.waits import Backoff, WaitLog
from aiohooks._diagnostics import Awaited, Waiting, secs_text
from aiohooks._validate import (
    call_error,
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks.dispatch.calls import is_logged
from aiohooks.dispatch.effects import Effect, EffectStatus, Recording, payload_copy
from aiohooks.errors import (
    InvalidArgumentError,
    InvalidHookError,
    StopRequestedError,
    add_note,
    printable,
    safe_repr,
)
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import logger
from aiohooks.hooks.every import ResettingHook
from aiohooks.session.coordinator import Coordinator, owner_of

Handler = Callable[[Effect], Awaitable[object]]
"""A coroutine function that delivers an effect; it returns when that is done, and raises if it is
to be repeated.
"""
_Pending: TypeAlias = OrderedDict[int, Effect]
"""Effects that are not delivered, by their places in the order of all kinds."""


class EffectsHook(ResettingHook, Waiting):
    """Delivers what steps and hooks record with `aiohooks.effect`, when it can no longer be undone.

    With "checkpoint", an effect is delivered when the checkpoint that has its step is durable: a
    step that a recovery or a kill undoes has no effect. With "commit" it is delivered when its run
    is committed, so that a step which is made again has it again, under the same key. Each kind is
    delivered beside the training by a task of its own, in order, at least once, and repeated with
    growing pauses. What is not delivered yet is in the checkpoints, and delivered by the next
    process.

    While `max_pending` effects can be delivered and are not, runs that record some wait at their
    end, as the receivers are too slow; when as many wait for a checkpoint, one is saved.

    At a clean end, the last checkpoint is saved, its effects are delivered for at most
    `drain_secs`, and a checkpoint without them is saved. Whatever is left is counted in a warning.
    """

    # Each says something of its own about the delivery, and most programs give the handlers only.
    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        when: Literal["checkpoint", "commit"] = "checkpoint",
        run: str | None = None,
        max_pending: int = 1000,
        backoff: Backoff = Backoff(),
        max_attempts: int | None = None,
        drain_secs: float | None = 10.0,
    ) -> None:
        """Check the arguments.

        Args:
            handlers: a coroutine function for each kind, which gets an `Effect`. It returns when
                that is delivered; an error of it is logged, and the delivery repeated.
            when: when an effect is delivered.
            run: the name of the training in the keys, unique among those of the receiver, also
                among the workers of one training. By default a random one, which is kept in the
                checkpoints; give one for "commit", where a kill before the first checkpoint would
                make another.
            max_pending: how many effects may wait for their handlers, and for a checkpoint.
            backoff: the pauses before a delivery is repeated.
            max_attempts: how often a delivery may fail until its error ends the session; None: it
                is repeated indefinitely.
            drain_secs: how long the end of the session waits for deliveries; None for as long as
                they need.

        Raises:
            InvalidArgumentError: an argument is invalid.
            InvalidHookError: a handler is not a coroutine function of one argument.
        """
        check_mapping(handlers, "handlers", optional=False)
        for kind, handler in handlers.items():
            if not isinstance(kind, str) or not kind:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgumentError(f"handlers has the kind {kind!r}; give a non-empty str")
            if not is_coroutine_function(handler):
                raise InvalidHookError(
                    f"the handler of {kind!r} is {handler!r}; give a coroutine function (`async"
                    " def`), and let it call what blocks with `await asyncio.to_thread(...)`"
                )
            if (error := call_error(handler, None)) is not None:
                raise InvalidHookError(
                    f"the handler of {kind!r} cannot be called with one argument, the Effect:"
                    f" {error}; write it as `async def handler(effect):`"
                )
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
        self._max_attempts = (
            None if max_attempts is None else checked_int(max_attempts, "max_attempts", 1)
        )
        self._drain_secs = drain_secs
        self._reset()

    def _reset(self) -> None:
        self._kinds = {kind: _Kind(handler) for kind, handler in self._handlers.items()}
        self._unsaved: _Pending = OrderedDict()
        """The effects that wait for a checkpoint; the others are in `ready` of their kinds."""
        self._last = 0
        """The number of the effect that was taken last."""
        self._marked = 0
        """The number of the last effect that the latest state may have, of those from which the
        session is restored.
        """
        self._changed = False
        """Whether an effect that this state has was delivered since."""
        self.recording: Recording = Recording(
            self._given_run or os.urandom(6).hex(), self._handlers, self.take, self.status
        )
        """Where the runs of the session record."""
        self._loaded = False
        """Whether a state was loaded for the next session."""
        self._coord: Coordinator | None = None
        self._is_saved = False
        """Whether a hook saves the session where it is restored from, and releases what is
        durable.
        """
        self._grace_secs = DEFAULT_GRACE_SECS
        self._context = Context()
        self._progress = Waiters()
        self._log = WaitLog(logger, current_clock(), self._describe_deliveries)

    # -- the life of a session

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Record the effects of the session's runs from now on; begin to deliver what the last
        process has left.

        Raises:
            InvalidArgumentError: with `when="checkpoint"`, nothing saves the session where it is
                restored from.
            InvalidHookError: the session has another `EffectsHook`.
        """
        state = owner_of(coord).state
        if state.waits.recording not in (None, self.recording):
            raise InvalidHookError(
                "the session has two EffectsHooks; give one of them the handlers of all kinds"
            )
        hooks: Mapping[str, Any] = getattr(session, "stateful_hooks", dict)()
        self._is_saved = any(
            one.saves_for(session) for one in hooks.values() if hasattr(one, "saves_for")
        )
        if not self._is_saved and not self._at_commit:
            raise InvalidArgumentError(
                'EffectsHook(when="checkpoint") delivers what is in a durable checkpoint, and no'
                " hook saves this session where it is restored from: give it"
                " ChiefSessionCreator(..., checkpoint_dir=...) and CheckpointSaverHook(), or"
                ' deliver when="commit"'
            )
        if (
            self._coord is not None
            and not self._loaded
            and getattr(session, "restored", None) is not None
        ):
            self.load_state_dict({"pending": ()})  # the checkpoint is from before this hook
        self._loaded = False
        self._coord, self._grace_secs = coord, state.grace_secs
        state.waits.recording = self.recording
        self._context = copy_context()
        self._context.run(leave_run)
        for kind in self._kinds.values():
            kind.attempts, kind.given_up = 0, False
        self._deliver()

    async def end(self, session: Session) -> None:
        """Deliver what is left; where there is a saver, that has it done after the last
        checkpoint.
        """
        self.recording.end()
        if not self._is_saved:
            await self.drain()

    async def close(self, exc: BaseException | None) -> None:
        """End the deliveries, and log how many effects are left; what no checkpoint has gets a
        third of the grace period.
        """
        self.recording.end()
        if not self._is_saved and exc is not None:
            await self.drain(
                min(
                    self._grace_secs / 3, math.inf if self._drain_secs is None else self._drain_secs
                )
            )
        tasks = [kind.task for kind in self._kinds.values() if kind.task is not None]
        for task in tasks:
            task.cancel()
        await wait_done(tasks, None)  # each has a limit of its own
        self._coord = None
        if left := self._pending():
            what = (
                "the next process delivers those that its checkpoint has, and makes the steps of"
                " the others again"
            )
            if not self._is_saved:
                what = "they are lost, as no checkpoint has them"
            logger.warning("effects that were not delivered: %s; %s", _counted(left.values()), what)

    # -- the outbox

    def take(self, effects: Sequence[Effect]) -> Callable[[], Awaitable[None]] | None:
        """Take the effects of a committed attempt; if too many can be delivered and are not, return
        a wait for that.
        """
        for one in effects:
            self._last += 1
            self._unsaved[self._last] = one
        if self._at_commit:
            self.release(self._last)
        return None if self._has_room() else self.wait_for_room

    async def wait_for_room(self) -> None:
        """Wait while too many can be delivered and are not; a stop ends the wait, a drain does not:
        its runs need room, too.
        """
        assert self._coord is not None
        with contextlib.suppress(StopRequestedError):
            await self._coord.until(self._wait_until(self._has_room))

    def _has_room(self) -> bool:
        return sum(len(kind.ready) for kind in self._kinds.values()) < self._max_pending

    @property
    def unsaved(self) -> int:
        """How many effects wait for a checkpoint, with those of the current run."""
        return len(self._unsaved) + len(self.recording.effects)

    @property
    def wants_save(self) -> bool:
        """Whether too many effects wait for a checkpoint."""
        return self.unsaved >= self._max_pending

    def mark(self) -> int:
        """Return what `release` wants when the state that was taken last is durable."""
        self._marked, self._changed = self._last, False
        return self._last

    def release(self, mark: int) -> None:
        """Deliver what was taken up to `mark`."""
        while self._unsaved and next(iter(self._unsaved)) <= mark:
            number, one = self._unsaved.popitem(last=False)
            self._kinds[one.kind].ready[number] = one
        self._deliver()

    def state_dict(self) -> dict[str, Any]:
        """Return the effects that are not delivered, and what the keys of the next ones depend
        on.
        """
        if self.recording.committed is self.recording.context:
            self.recording.end()
        effects = [[one.kind, one.key, one.step, one.payload] for one in self._pending().values()]
        step, resets, counts = self.recording.last
        return {
            "run": self.recording.run,
            "step": step,
            "resets": resets,
            "counts": counts,
            "pending": effects,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this state. In a recovery, drop what was recorded since, and do not repeat
        what was delivered since.

        Raises:
            InvalidArgumentError: an effect in it has no handler.
        """
        check_mapping(state, "state", optional=False)
        self.recording.end()
        effects = [
            Effect(kind, payload, key, step) for kind, key, step, payload in state["pending"]
        ]
        if unknown := sorted({one.kind for one in effects} - self._kinds.keys()):
            raise InvalidArgumentError(
                f"the checkpoint has effects of the kinds {unknown} that were not delivered, and"
                " EffectsHook has no handlers for them: add these; one that does nothing drops"
                " them"
            )
        before, keys = self._pending(), {one.key for one in effects}
        if self._coord is None:
            kept = dict(enumerate(effects, 1))
            self._last = self._marked = len(kept)
        else:
            kept = {number: one for number, one in before.items() if one.key in keys}
        unsaved, self._unsaved = self._unsaved, OrderedDict()
        for kind in self._kinds.values():
            kind.ready = OrderedDict()
        for number, one in kept.items():
            (self._unsaved if number in unsaved else self._kinds[one.kind].ready)[number] = one
        if undone := [one for one in before.values() if one.key not in keys]:
            logger.warning("effects of steps that are undone are dropped: %s", _counted(undone))
        self.recording.run = self._given_run or state.get("run", self.recording.run)
        self.recording.last = (
            state.get("step", 0),
            state.get("resets", 0),
            dict(state.get("counts", {})),
        )
        self._loaded = True

    def _pending(self) -> dict[int, Effect]:
        """Return what is not delivered, in order."""
        waiting = (self._unsaved, *(kind.ready for kind in self._kinds.values()))
        return dict(sorted(itertools.chain.from_iterable(one.items() for one in waiting)))

    def status(self) -> tuple[EffectStatus, ...]:
        """Return the counts of each kind, as `session.status().effects` does."""
        unsaved = Counter(one.kind for one in self._unsaved.values())
        return tuple(
            EffectStatus(
                name,
                len(kind.ready) + unsaved[name],
                unsaved[name],
                kind.delivered,
                kind.failures,
                kind.last_error,
            )
            for name, kind in self._kinds.items()
        )

    # -- delivering

    def _deliver(self) -> None:
        """Start to deliver each kind that can be and is not."""
        if self._coord is not None:
            for name, kind in self._kinds.items():
                if kind.ready and kind.task is None and not kind.given_up:
                    kind.task = new_task(
                        self._deliver_kind(name, kind), f"delivery of {name}", self._context.copy()
                    )

    async def _deliver_kind(self, name: str, kind: _Kind) -> None:
        """Deliver what is ready of a kind, one effect after the other."""
        try:
            while kind.ready and not kind.given_up:
                number, one = next(iter(kind.ready.items()))
                self._log.begin(kind)
                # A copy: what a handler does to it is neither repeated nor in a checkpoint.
                given = dataclasses.replace(one, payload=payload_copy(one.payload, "payload"))
                wait = Wait[object](
                    f"delivery of {given.key}", self._grace_secs / 2
                )  # `close` has the grace period in all
                try:
                    await wait.result_of(kind.handler(given))
                except BaseException as error:
                    if isinstance(
                        error,
                        (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit),
                    ):
                        raise
                    self._note_failure(name, kind, one, error)
                    if not kind.given_up:
                        await sleep(self._backoff.pause_secs(kind.attempts))
                    continue
                finally:
                    self._log.end(kind)
                kind.attempts = 0
                kind.delivered += 1
                self._changed = self._changed or number <= self._marked
                kind.ready.pop(number, None)  # there is none if its step was undone meanwhile
                self._progress.wake()
        finally:
            kind.task = None
            self._progress.wake()

    def _note_failure(self, name: str, kind: _Kind, one: Effect, error: BaseException) -> None:
        kind.attempts += 1
        kind.failures += 1
        kind.last_error = printable(safe_repr(error))
        now = current_clock().now()
        if kind.attempts == 1:
            kind.failing_since = now
        tried = (
            f"delivery of {one.key} failed, in attempt {kind.attempts} and after"
            f" {secs_text(now - kind.failing_since)}"
        )
        if is_logged(kind.failures) or (kind.attempts > 1 and is_logged(kind.attempts)):
            behind = f"{len(kind.ready) - 1} of {name!r} wait behind it"
            logger.warning(
                "%s; %s: %s",
                tried,
                behind,
                kind.last_error,
                exc_info=error if kind.failures == 1 else None,
            )
        if kind.attempts == self._max_attempts and self._coord is not None:
            kind.given_up = True
            add_note(error, f"{tried}; max_attempts={self._max_attempts}")
            self._coord.request_stop(error)

    async def drain(self, secs: float | None = None) -> bool:
        """Deliver what can be, for at most `drain_secs`; return whether the latest marked state has
        what is delivered now.
        """
        self._deliver()
        secs = self._drain_secs if secs is None else secs
        if secs != 0:
            done = self._wait_until(lambda: all(kind.task is None for kind in self._kinds.values()))
            with contextlib.suppress(TimeoutError):
                await limited(done, secs, "the delivery of effects")
        return self._changed

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
        return (
            Awaited("calls", "", by=lambda: calls, needs="any")
            if calls and method == "_wait_until"
            else None
        )

    def _describe_deliveries(self) -> str:
        active = [
            next(iter(kind.ready.values())).key
            for kind in self._kinds.values()
            if kind.task is not None and kind.ready
        ]
        return f"delivering {', '.join(active)}" if active else ""

    def __repr__(self) -> str:
        return (
            f"EffectsHook({list(self._handlers)},"
            f" when={'commit' if self._at_commit else 'checkpoint'!r})"
        )


@dataclasses.dataclass(eq=False)
class _Kind:
    """The effects of one kind that can be delivered, and how that goes."""

    handler: Handler
    ready: _Pending = dataclasses.field(default_factory=OrderedDict[int, Effect])
    task: asyncio.Task[None] | None = None
    delivered: int = 0
    failures: int = 0
    last_error: str | None = None
    # Of the effect that is delivered now.
    attempts: int = 0
    failing_since: float = 0.0
    given_up: bool = False


def _counted(effects: Iterable[Effect]) -> str:
    """Return how many effects there are of each kind."""
    return ", ".join(
        f"{count} of {kind!r}" for kind, count in Counter(one.kind for one in effects).items()
    )
