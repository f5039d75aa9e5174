"""The producers of a wait: tasks without which it would never end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeAlias, cast

from aiohooks._aio.overlap import Overlap, Wait
from aiohooks._diagnostics import is_task
from aiohooks.errors import InvalidArgumentError, ProducerFinishedError, flattened, is_clean_end, safe_repr

Producer: TypeAlias = asyncio.Task[Any] | Iterable[asyncio.Task[Any]]
"""The task that a wait depends on, or several."""
Producers: TypeAlias = tuple[asyncio.Task[Any], ...]

_MOST_PASSES = 5  # of the loop: a notified waiter may have to wake another one, or to take a lock


class EndOfProducers:
    """Ends a wait when all the tasks that it depends on have ended, and it has had the time to take what they left."""

    def __init__(self, producers: Producers, wait: Wait[Any]) -> None:
        self._producers = producers
        self._wait: Wait[Any] | None = wait
        """None when it has ended."""
        self._left = {one for one in producers if not one.done()}
        for one in self._left:
            one.add_done_callback(self._ended)
        if not self._left:
            self._let_pass(_MOST_PASSES)

    def _ended(self, producer: asyncio.Task[Any]) -> None:
        self._left.discard(producer)
        if not self._left:
            self._let_pass(_MOST_PASSES)

    def _let_pass(self, passes: int) -> None:
        if self._wait is None:  # this call, or the callback of a producer, was due when the wait ended
            return
        if passes:
            asyncio.get_running_loop().call_soon(self._let_pass, passes - 1)
        else:
            Overlap.end(self._wait, self._error())  # also during a recovery

    def _error(self) -> BaseException:
        ends: list[str] = []
        for one in self._producers:
            error = None if one.cancelled() else one.exception()
            if error is not None and not is_clean_end(error):
                return error
            if one.cancelled():
                how = "was cancelled"
            elif error is None or is_end_of_producers(error):
                how = "has finished"
            else:
                how = f"has ended: {safe_repr(error)}"
            ends.append(f"producer {one.get_name()!r} {how}")
        return ProducerFinishedError(", ".join(ends))

    def stop_watching(self) -> None:
        """The wait has ended."""
        self._wait = None
        for one in self._left:
            one.remove_done_callback(self._ended)


def is_end_of_producers(error: BaseException) -> bool:
    """Return whether a task that ended with this has finished: all that it waited for was produced and used."""
    return all(isinstance(one, ProducerFinishedError) for one in flattened([error]))


def checked_producers(producer: Producer | None) -> Producers | None:
    """Return the tasks; raise `InvalidArgumentError` if there is none, or something else."""
    if producer is None:
        return None
    given: object = producer
    producers = tuple(producer) if isinstance(given, Iterable) and not asyncio.isfuture(given) else (producer,)
    if not producers or not all(is_task(one) for one in producers):
        raise InvalidArgumentError(f"producer is {producer!r}; give a task, or several in a list: what start_soon returns")
    return cast("Producers", producers)
