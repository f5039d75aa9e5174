"""Observers of a session: notified of what takes time in it, at its start and at its end.

Whatever takes time looks whether there are observers before it begins, and does nothing else
without them. Those of a run are in its scope (`RunScope.observers`); those of a session, with what
happens outside its runs, in `Coordinator.observers`.

    observing       a block
    observed_call   a call that is awaited
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
Kind = Literal["hook", "operation", "background", "feed", "prefetch", "save", "wait", "recovery"]
"""What an activity is: a hook's method, an operation, a hook's background call, the wait for the
next feed, the taking of one ahead, the write of a checkpoint, a wait that a stop ends, or a
recovery.
"""


class Observation(Protocol):
    """One activity, as one observer sees it; must not raise.

    One that also has a method `resumed(error)` is notified of each suspension of a call, and after
    it of what is raised there. What its `suspended` raises is raised there, too; the suspension is
    longer by as many turns of the loop as it returns.
    """

    def suspended(self) -> Any:
        """Called when a hook's method or an operation suspends for the first time."""

    def ended(self, error: BaseException | None) -> object:
        """Called at its end, with its error."""


class Observer(Protocol):
    """Notified of activities; must not raise."""

    def started(self, kind: Kind, what: str) -> Observation:
        """Called at the start of an activity."""
        ...


class RunObserver(Observer, Protocol):
    """Notified of the activities in one attempt of a run."""

    def attempt_ended(self, error: BaseException | None) -> None:
        """Called once at the end of the attempt, in the caller's context."""


class _Observations:
    """One activity, as several observers see it."""

    __slots__ = ("_observations",)

    def __init__(self, observations: Sequence[Observation]) -> None:
        self._observations = observations

    def suspended(self) -> None:
        for one in self._observations:
            one.suspended()

    def ended(self, error: BaseException | None) -> None:
        for one in self._observations:
            one.ended(error)


def _started(observers: Sequence[Observer], kind: Kind, what: str) -> Observation:
    if len(observers) == 1:
        return observers[0].started(kind, what)
    return _Observations([one.started(kind, what) for one in observers])


@contextlib.contextmanager
def _observing(observers: Sequence[Observer], kind: Kind, what: str) -> Generator[None]:
    observation = _started(observers, kind, what)
    try:
        yield
    except BaseException as error:
        observation.ended(error)
        raise
    observation.ended(None)


_UNOBSERVED = contextlib.nullcontext()


def observing(observers: Sequence[Observer], kind: Kind, what: str) -> AbstractContextManager[None]:
    """Return a context manager that notifies `observers` of its block."""
    return _observing(observers, kind, what) if observers else _UNOBSERVED


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
    """Await `call(*args, **keywords)`, and notify `observers` of it: the one place that resumes a
    coroutine by hand.
    """
    observation = _started(observers, kind, what)
    error: BaseException | None = None
    has_waited, turns, resumed = False, None, None
    try:
        coro: Any = call(*args, **keywords)
        made: Any = type(coro)  # pyright: ignore[reportUnknownVariableType]
        if made is not types.CoroutineType:
            coro = as_coroutine(coro)
        while True:
            try:
                waiting = coro.send(None) if error is None else coro.throw(error)
            except StopIteration as stop:
                result = stop.value
                break
            finally:
                error = None  # its traceback has this frame
            try:
                if not has_waited or resumed is not None:
                    turns = observation.suspended()
                if not has_waited:
                    has_waited, resumed = True, getattr(observation, "resumed", None)
                yield waiting
                if resumed is not None:
                    for _ in range(turns or 0):
                        yield
            except GeneratorExit:
                coro.close()
                raise
            except BaseException as thrown:
                error = thrown
            if resumed is not None:
                resumed(error)
    except BaseException as failure:
        observation.ended(failure)
        raise
    observation.ended(None)
    return result


async def as_coroutine(awaitable: Awaitable[T]) -> T:
    """Await something, where only a coroutine will do."""
    return await awaitable
