"""The writes of one process: each has a number, so that an engine knows a repeated one; and what their answers mean."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from aiohooks._errors import StaleReignError
from aiohooks.stores._mark import MAX_STEP, Mark, checked_step
from aiohooks.stores._view import Answer, Write

T = TypeVar("T")
Kind = Literal["advance", "raise", "reset"]


class Writes:
    """Numbers the writes of a process to a run."""

    __slots__ = ("_process", "_run", "_seq")

    def __init__(self, run: str, process: str) -> None:
        """Nothing was written yet."""
        self._run = run
        self._process = process
        self._seq = 0

    def next(self, kind: Kind, amount: int, floor: Mark, reign: int) -> Write:
        """A write that nobody has made before."""
        self._seq += 1
        return Write(kind, amount, floor, reign, self._process, self._seq)

    def mark_of(self, write: Write, answer: Answer) -> Mark:
        """What a write has led to.

        Raises:
            StaleReignError: a younger reign has begun.
            InvalidArgumentError: it would pass the highest step.
        """
        if answer.verdict == "stale":
            raise StaleReignError(
                f"the reign {write.reign} of this process over {self._run} has ended, {answer.reign} has begun at step "
                f"{answer.mark.step}: its lease had run out, and another chief took over; stop, or start again",
                reign=write.reign,
                newest=answer.reign,
            )
        if answer.verdict == "full":
            checked_step(MAX_STEP + 1, f"{write.kind} by {write.amount} would lead to step")
        return answer.mark


async def settle(answer: concurrent.futures.Future[T], work: Callable[[], Awaitable[T]]) -> None:
    """Hands what comes of `work` to another thread; where it is cancelled, also before it began, see `unsettled`."""
    try:
        result = await work()
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def unsettled(answer: concurrent.futures.Future[T], error: Exception) -> None:
    """Ends the other thread's wait, if `settle` was kept from it."""
    if not answer.done():
        answer.set_exception(error)
