"""Observers, which are notified at the start and the end of activities that take time.

An activity checks whether there are observers before it begins. The observers of a run are in its
scope (`RunScope.observers`), and those of other activities of a session in `Coordinator.observers`.

    started         notifies observers of the start; a block does so with `active(observers=...)`
    observed_call   observes a call that is awaited
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


class _Observations:
    """One activity, as several observers see it."""

    __slots__ = ("_observations",)

    def __init__(self, observations: Sequence[Observation]) -> None:
        self._observations = observations

    def suspended(self) -> None:
        for observation in self._observations:
            observation.suspended()

    def ended(self, error: BaseException | None) -> None:
        for observation in self._observations:
            observation.ended(error)


def started(observers: Sequence[Observer], kind: Kind, what: str) -> Observation:
    """Notify `observers` of the start of an activity, and return their observation of it."""
    if len(observers) == 1:
        return observers[0].started(kind, what)
    return _Observations([observer.started(kind, what) for observer in observers])


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
    observation = started(observers, kind, what)
    try:
        coro: Any = call(*args, **keywords)
        made: Any = type(coro)  # pyright: ignore[reportUnknownVariableType]
        if made is not types.CoroutineType:
            coro = as_coroutine(coro)
        result = yield from _resumed_by_hand(coro, observation)
    except BaseException as failure:
        observation.ended(failure)
        raise
    observation.ended(None)
    return result


def _resumed_by_hand(coro: Any, observation: Observation) -> Generator[Any, Any, Any]:
    """Await a coroutine step by step, and notify `observation` when it suspends."""
    resumed: Callable[[], object] | None = getattr(observation, "resumed", None)
    has_suspended = False
    error: BaseException | None = None
    while True:
        try:
            awaited = coro.send(None) if error is None else coro.throw(error)
        except StopIteration as stop:
            return stop.value
        finally:
            # The traceback of the error refers to this frame.
            error = None
        if not has_suspended or resumed is not None:
            has_suspended = True
            observation.suspended()
        try:
            yield awaited
        except GeneratorExit:
            coro.close()
            raise
        except BaseException as thrown:
            error = thrown
        if resumed is not None:
            resumed()
