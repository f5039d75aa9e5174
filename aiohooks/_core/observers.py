"""Observers, which are notified at the start and the end of activities that take time.

An activity checks whether there are observers before it begins. The observers of a run are in its
scope (`RunScope.observers`), and those of other activities of a session in `Coordinator.observers`.

    observed_call   observes a call that is awaited; for a block, `active` has observers
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Literal, Protocol

from aiohooks._core.coroutines import as_coroutine

Kind = Literal["hook", "operation", "background", "feed", "prefetch", "save", "wait", "recovery"]
"""The kind of an activity.

It is a hook's method, an operation, a hook's background call, the wait for the next feed, the
prefetching of a feed, the write of a checkpoint, a wait that a stop ends, or a recovery.
"""


class Observation(Protocol):
    """One activity, as one observer sees it. Its methods must not raise.

    An observation that has a method `resumed()`, too, is notified of each suspension of a call and
    of the end of each suspension, and not only of the first suspension.
    """

    def suspended(self) -> None:
        """Note that a hook's method or an operation suspends for the first time."""

    def ended(self, error: BaseException | None) -> object:
        """Note the end of the activity, and its error."""


class Observer(Protocol):
    """Notified of activities. Its methods must not raise."""

    def started(self, kind: Kind, what: str) -> Observation:
        """Note the start of an activity."""
        ...


class RunObserver(Observer, Protocol):
    """Notified of the activities in one attempt of a run."""

    def attempt_ended(self, error: BaseException | None) -> None:
        """Note the end of the attempt. Called once, in the caller's context."""


@types.coroutine
def observed_call(
    call: Callable[..., Awaitable[Any]],
    kind: Kind,
    what: str,
    observers: Sequence[Observer],
    /,
    *args: Any,
    **keywords: Any,
) -> Generator[Any, Any, Any]:
    """Await `call(*args, **keywords)`, and notify `observers` of it."""
    observations = [observer.started(kind, what) for observer in observers]
    error: BaseException | None = None
    try:
        coro: Any = call(*args, **keywords)
        kind_of_coro: Any = type(coro)  # pyright: ignore[reportUnknownVariableType]
        if kind_of_coro is not types.CoroutineType:
            coro = as_coroutine(coro)
        return (yield from _resumed_by_hand(coro, observations))
    except BaseException as raised:
        error = raised
        raise
    finally:
        for observation in observations:
            observation.ended(error)
        # The traceback of the error refers to this frame.
        del error


def _resumed_by_hand(coro: Any, observations: list[Observation]) -> Generator[Any, Any, Any]:
    """Await a coroutine step by step, and notify `observations` when it suspends."""
    notified: list[Any] = observations
    error: BaseException | None = None
    while True:
        try:
            awaited = coro.send(None) if error is None else coro.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            # The traceback of the error refers to this frame.
            error = None
        for observation in notified:
            observation.suspended()
        try:
            yield awaited
        except GeneratorExit:
            coro.close()
            raise
        except BaseException as thrown:
            error = thrown
        # The others are notified of the first suspension alone.
        notified = [observation for observation in notified if hasattr(observation, "resumed")]
        for observation in notified:
            observation.resumed()
