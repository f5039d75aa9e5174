"""Effects: what a run is to cause outside of it, recorded with the run and delivered by others.

effect        record one, in the current run or call of a group
Effect        what is delivered
Recording     the effects of one attempt of a run, or of one call of a group

A recording knows who records: a hook or an operation, by which its effects are numbered, so that
the order of concurrent ones changes no number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast

from aiohooks._aio.contexts import begin_run, current_run, current_scope
from aiohooks.errors import EffectError, InvalidArgumentError, did_you_mean, safe_repr

T = TypeVar("T")

_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MAX_DEPTH = 32  # a checkpoint holds 64, with what is around it

LATE = 100
"""The order of hooks that save: what records in `after_run` has a lower one."""

Recorder: TypeAlias = tuple[str, int]
"""A hook or an operation, by its name, and the order of the hook."""

_recorder: ContextVar[tuple[Recorder, Any, object] | None] = ContextVar(
    "aiohooks_recorder", default=None
)
"""The hook or operation that the current task calls, for which recording, and in which attempt of a
run: a thread may outlive it.

Those that are called in turn are found by `Recording.turn`.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """An effect that a committed run has recorded: what a handler of an `EffectsHook` gets.

    Attributes:
        kind: what it is, as the recorder has named it.
        payload: its data.
        key: unique, and the same whenever the same step is made again, in this process or another:
            the receiver's idempotency key.
        step: the step of the run; 0 in a call of a `HookGroup`.
    """

    kind: str
    payload: Any
    key: str
    step: int


class EffectStatus(NamedTuple):
    """The effects of one `kind`: how many are `pending`, of which some are `unsaved`: not yet in a
    durable checkpoint.

    `delivered` and `failures` count calls of its handler since the session began, and `last_error`
    is that of the last failure.
    """

    kind: str
    pending: int
    unsaved: int
    delivered: int
    failures: int
    last_error: str | None


class EffectKey(str):
    """The `key` of an effect. `await` of it returns it: it may be awaited, and nothing is lost
    where it is not.
    """

    __slots__ = ()

    def __new__(cls, key: str) -> Self:
        return super().__new__(cls, key)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self
        yield


def effect(kind: str, payload: Any = None) -> EffectKey:
    """Record an effect of the current run: in a step, an operation, a hook, or a call of a
    `HookGroup` with `effects=`.

    Nothing is delivered yet: a run that fails before its commit leaves nothing, one that is
    committed leaves all of it. It never waits, so it can be called in code that does not, and in
    threads of `asyncio.to_thread`; `await effect(...)` is the same.

    Args:
        kind: what it is: the handlers of the session's `EffectsHook` are given by this name.
        payload: None, bool, int, float, str, bytes, and lists, tuples and dicts of these. It is
            copied.

    Returns:
        The key under which it will be delivered.

    Raises:
        EffectError: no run or call that records effects is in progress here, or it takes no more.
        InvalidArgumentError: there is no handler for the kind, or the payload cannot be kept in a
            checkpoint.
    """
    return record(kind, payload)


def record(kind: str, payload: Any, context: object = None) -> EffectKey:
    """Do what `effect` does; with the `context` of a run, only if that is the current one."""
    scope = current_run()
    while (
        context is not None
        and scope is not None
        and getattr(scope.recording, "context", None) is not context
    ):
        scope = scope.outer  # a group that records for itself is called in the run
    if scope is not None and scope.active and scope.recording is not None:
        return EffectKey(scope.recording.add(kind, payload))
    advice = (
        "outside of a run; record it in a step, in before_run or after_run of a hook without"
        " background=True, or in a call of a HookGroup with effects=; a thread needs the run's"
        " context, which asyncio.to_thread gives it"
    )
    if context is not None:
        advice = (
            "outside of the run that this run_context is of, or in a session that delivers none:"
            " give the session EffectsHook({kind: handler}), and record it in before_run or"
            " after_run, not in the background; a thread needs the run's context, which"
            " asyncio.to_thread gives it"
        )
    elif scope is not None and scope.session is not None:
        advice = (
            "in a session that delivers none, or in what is no part of a run, such as an"
            " evaluation; add EffectsHook({kind: handler}) to its hooks, and record it in a step,"
            " in before_run or in after_run"
        )
    raise EffectError(f"effect({kind!r}) was called {advice}")


class Recording:
    """The effects of the latest attempt that has any, of the runs of a session; or those of a call
    of a group.

    An attempt is known by its `SessionRunContext`. So what every run has to do is to set some
    attributes; the rest is done when the first effect of an attempt is recorded.
    """

    def __init__(
        self,
        run: str,
        kinds: Collection[str] | None = None,
        take: Callable[[Sequence[Effect]], Callable[[], Awaitable[None]] | None] | None = None,
        status: Callable[[], tuple[EffectStatus, ...]] = tuple,
    ) -> None:
        """Record effects of these kinds (None: of any), under keys that begin with `run`.

        `take` takes those of a committed attempt, and returns a wait for room if there are too
        many; `status` counts them.
        """
        self.run: str = run
        self.kinds: Collection[str] | None = kinds
        self._take = take
        self.status: Callable[[], tuple[EffectStatus, ...]] = status
        self.last: tuple[int, int, dict[str, int]] = 0, 0, {}
        """The step whose effects were taken last, the resets to an earlier step until then, and how
        many each recorder has.
        """
        self.context: object = None
        """The current attempt, or the latest."""
        self.step: int = 0
        """The step of its run."""
        self.committed: object = self
        """The latest attempt that was committed."""
        self.closed: object = self
        """The latest attempt that takes no more effects."""
        self.turn: tuple[Any, ...] = tuple, ("step", 0)
        """A function that returns the recorder of what is called in turn now, and its arguments."""
        self.lock: threading.Lock = threading.Lock()  # worker threads record, too
        self.begin(None)

    def begin(self, context: object) -> None:
        """Begin to record for an attempt; one of the same step as the last continues its
        numbers.
        """
        step, resets, counts = self.last
        self._resets = resets + (self.step < step)
        self._counts = dict(counts) if self.step == step else dict[str, int]()
        self.effects: list[Effect] = []
        self.recorded: object = context
        """The attempt that `effects` are of."""

    def add(self, kind: str, payload: Any) -> str:
        """Record an effect, and return its key."""
        if not isinstance(kind, str) or (self.kinds is not None and kind not in self.kinds):  # pyright: ignore[reportUnnecessaryIsInstance]
            known = (
                "a str"
                if self.kinds is None
                else (
                    "the kind of a handler of the EffectsHook;"
                    f" {did_you_mean(str(kind), self.kinds)}"
                )
            )
            raise InvalidArgumentError(f"kind of an effect is {kind!r}; give {known}")
        copied = payload_copy(payload, f"the payload of effect {kind!r}")
        with self.lock:
            return self._add(kind, copied)

    def _add(self, kind: str, copied: Any) -> str:
        called, context = (
            _recorder.get(),
            self.context,
        )  # in a thread, the next attempt may begin meanwhile
        if called is not None and called[1] is self and called[2] is not context:
            raise EffectError(
                f"effect({kind!r}) was called by {called[0][0]} after its attempt of step"
                f" {self.step} had ended; the next one records it again"
            )
        if self.closed is context:
            raise EffectError(
                f"effect({kind!r}) was called after the effects of step {self.step} were taken or"
                " dropped; call it in the run, before the step is saved"
            )
        recorder, order = self.recorder()
        if order >= LATE and self.committed is context:
            raise EffectError(
                f"effect({kind!r}) was called in after_run of {recorder}, whose order is {order},"
                f" when its step may have been saved; give the hook an order below {LATE}, that of"
                " CheckpointSaverHook"
            )
        if self.recorded is not context:
            self.begin(context)
        recorder = recorder.replace("/", "|")  # which ends it in the key
        number = self._counts[recorder] = self._counts.get(recorder, 0) + 1
        run = f"{self.run}+{self._resets}" if self._resets else self.run
        run = f"{run}/{self.step}" if self.step else run
        made = Effect(kind, copied, f"{run}/{recorder}/{number}", self.step)
        self.effects.append(made)
        return made.key

    def recorder(self) -> Recorder:
        """Return the hook or operation that is called."""
        called = _recorder.get()
        if called is not None and called[1] is self:
            return called[0]
        find, *args = self.turn
        recorder: Recorder = find(*args)
        return recorder

    def mark(self) -> int:
        """Return how many effects the attempt has, for `rewind`."""
        return len(self.effects) if self.recorded is self.context else 0

    def rewind(self, mark: int) -> None:
        """Drop what was recorded since `mark`."""
        with self.lock:
            if self.recorded is self.context:
                for one in self.effects[mark:]:
                    self._counts[one.key.split("/")[-2]] -= 1
                del self.effects[mark:]

    def end(self) -> Callable[[], Awaitable[None]] | None:
        """End the latest attempt: have its effects taken if it is committed; return a wait for room
        if there are too many.
        """
        with self.lock:
            self.closed = self.context
            effects, self.effects = self.effects if self.recorded is self.committed else [], []
            if effects:
                self.last = effects[0].step, self._resets, self._counts
        assert self._take is not None
        return self._take(effects)


async def call_as(
    recorder: Recorder, call: Callable[..., Awaitable[T]], *args: Any, **keywords: Any
) -> T:
    """Make a call, in a task of its own, whose effects are those of `recorder`."""
    before, scope = _recorder.get(), current_run()
    recording = None if scope is None else scope.recording
    # A call within a call, such as one of a group, is part of the same attempt.
    attempt = (
        before[2]
        if before is not None and before[1] is recording
        else getattr(recording, "context", None)
    )
    token = _recorder.set((recorder, recording, attempt))
    try:
        return await call(*args, **keywords)
    finally:
        with contextlib.suppress(ValueError):  # the coroutine is thrown away in another context
            _recorder.reset(token)


@contextlib.contextmanager
def recorded_call(name: str, hand_over: Callable[[tuple[Effect, ...]], object]) -> Generator[None]:
    """Record the effects of the block, a call of the group `name`, and hand them over at its end,
    unless it fails.
    """
    outer, before = current_run(), current_scope.get()
    scope = begin_run(
        None if outer is None else outer.session, None if outer is None else outer.publisher
    )
    recording = scope.recording = Recording(f"{name}/{os.urandom(16).hex()}")
    if outer is not None:
        scope.observers = outer.observers
    try:
        yield
    finally:
        scope.active = False
        with recording.lock:
            recording.closed = recording.context
        current_scope.set(before)
    if recording.effects:
        hand_over(tuple(recording.effects))


def payload_copy(value: Any, place: str, depth: int = 0) -> Any:
    """Return a copy of a payload; raise if a checkpoint could not hold it exactly."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is EffectKey:
        return str(value)
    if kind in _ATOMS:
        try:
            if kind is str:
                value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"{place} is {value!r}, which is no valid text: {error}"
            ) from None
        return value
    if depth > _MAX_DEPTH:
        raise InvalidArgumentError(f"{place} is nested deeper than {_MAX_DEPTH} levels; flatten it")
    if kind is list or kind is tuple:
        items = (
            payload_copy(one, f"{place}[{number}]", depth + 1) for number, one in enumerate(value)
        )
        return [*items] if kind is list else (*items,)
    if kind is dict:
        for key in cast("dict[Any, Any]", value):
            if type(key) not in (str, int, EffectKey):
                raise InvalidArgumentError(
                    f"{place} has the key {key!r}, a {type(key).__name__}; give a str or an int"
                )
        return {
            payload_copy(key, place, depth): payload_copy(one, f"{place}[{key!r}]", depth + 1)
            for key, one in value.items()
        }
    raise InvalidArgumentError(
        f"{place} is {safe_repr(value)}, a {kind.__name__}; give None, bool, int, float, str,"
        " bytes, or lists, tuples and dicts of these: of an array .tolist() or .tobytes(), of what"
        " is large the name under which the receiver finds it"
    )
