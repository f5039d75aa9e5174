"""Telling the cancels that reach a coroutine apart: those from outside, those of this library, those of code inside it.

CancelWatch    the cancels that are delivered to a coroutine
drive          awaits a coroutine under a watch
current_task   the running task
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from aiohooks._aio.await_chain import PACKAGE
from aiohooks.errors import contexts, set_context

T = TypeVar("T")


task_of: Callable[[asyncio.AbstractEventLoop | None], asyncio.Task[Any] | None]
if sys.version_info >= (3, 12):
    task_of = asyncio.current_task
else:  # `asyncio.current_task` is written in Python there, and slower than all else that a run does for itself
    task_of = cast("Any", asyncio.tasks)._current_tasks.get


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop, if there is one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def current_task() -> asyncio.Task[Any]:
    """Return the running task."""
    task = task_of(asyncio.get_running_loop())
    assert task is not None, "coroutines of this library run inside a task"
    return task


def cancel_count(task: asyncio.Task[Any]) -> int:
    """Return the number of cancels delivered to the task; one that it called on itself and that is pending is not counted."""
    return task.cancelling() - cancel_is_pending(task)


def cancel_is_pending(task: asyncio.Task[Any]) -> bool:
    """Return whether the task was cancelled while it ran, which takes effect at its next await."""
    return bool(getattr(task, "_must_cancel", False))


class ScopeReason(str):
    """The message of a cancel that a `CancelScope` has made."""

    __slots__ = ()


class Delivery(NamedTuple):
    """A `CancelledError` that was thrown into a coroutine."""

    number: int
    error: asyncio.CancelledError
    cancels: int
    """How many cancels it stands for; none if the awaited future was cancelled, and not the task."""
    total: int
    """The task's cancel count after it."""
    before: int
    """The count when the coroutine had suspended: with a cancel that it called on itself, as task groups repeat one."""


class Interrupt(Protocol):
    """What ends a coroutine as a whole: a `CancelScope`."""

    @property
    def own_cancels(self) -> Sequence[int]:
        """The deliveries of its cancels that have not been taken back."""
        ...


class CancelWatch:
    """The cancels delivered to a coroutine that is awaited with `drive(coro, watch)`.

    They tell a cancel from outside apart from others. `task.cancelling()` alone cannot: before Python 3.13 a task group whose
    child fails leaves that count one too high, and other libraries do so on every version. What counts is what
    passes: a coroutine that ends without a `CancelledError` has settled the cancels that were delivered to it, as under any
    plain `await`.
    """

    __slots__ = ("_before", "_count", "_deliveries", "_number", "base", "interrupt", "overlap", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        """The task that awaits the coroutine, once that has suspended."""
        self.base: int = 0
        """The task's cancel count when the coroutine suspended first, or when the last one under it had ended."""
        self.overlap: Any = None
        """What overlaps with the coroutine, if it is a `LazyGather`."""
        self._count = self._before = 0
        self._number = 0
        self.interrupt: Interrupt | None = None
        """The scope that ends the coroutine as a whole, once it has cancelled it."""
        self._deliveries: list[Delivery] | None = None

    def reset(self) -> None:
        """Forget everything: another coroutine begins, or no one will ask again."""
        self.task = self._deliveries = self.interrupt = None

    def settle(self) -> None:
        """Start anew: a coroutine has ended and has settled its cancels. That of the interrupt is still to be taken back."""
        assert self.task is not None
        interrupts = 0 if self.interrupt is None else self.counted(self.interrupt.own_cancels)
        self._count = self._before = self.task.cancelling()
        self.base = self._count - interrupts
        self._deliveries = None

    def suspended(self) -> None:
        """Note the cancel count while the coroutine is suspended, as far as it can have changed."""
        if self.task is None:
            self.task = task = current_task()
            self.base = self._count = self._before = cancel_count(task)
        elif self._deliveries is not None:
            self._count = cancel_count(self.task)
            self._before = self.task.cancelling()

    def delivered(self, error: asyncio.CancelledError) -> None:
        """Note that `error` is thrown into the coroutine."""
        assert self.task is not None
        count = self.task.cancelling()
        if self._deliveries is None:
            self._deliveries = []
        elif len(self._deliveries) == _MOST_DELIVERIES:  # an anyio scope repeats its cancel at every tick
            del self._deliveries[1]
        self._deliveries.append(Delivery(self._number, error, count - self._count, count, self._before))
        self._number += 1

    def taken_back(self) -> None:
        """Note that a scope has taken its cancels back."""
        if self.task is not None:
            count = self.task.cancelling()
            self.base, self._count, self._before = min(self.base, count), min(self._count, count), min(self._before, count)

    @property
    def deliveries(self) -> int:
        """The number of deliveries so far."""
        return self._number

    def counted(self, own: Sequence[int]) -> int:
        """Return how many of the cancels of a scope, given as for `outside_cancel`, the task's count still has.

        The coroutine may have taken some back, as code that absorbs a cancel should: the count fell below them then.
        """
        if not own or self.task is None:
            return len(own)
        counts = [(one.number, one.before) for one in self._deliveries or ()]
        counts.append((self._number, self.task.cancelling()))
        counted = len(own)
        for number, count in counts:
            later = sum(one >= number for one in own)
            counted = min(counted, later + max(count - self.base, 0))
        return counted

    def outside_cancel(self, error: BaseException | None, own: Sequence[int] = ()) -> asyncio.CancelledError | None:
        """Return the cancel from outside behind `error`, which came out of the coroutine, or None.

        Args:
            error: a `CancelledError`, or what a cancelled coroutine raised instead of it.
            own: the deliveries of the cancels of a scope: these do not come from outside.
        """
        if self.task is None or error is None:
            return None
        if self.task.cancelling() - self.counted(own) <= self.base:
            if own:  # one that came in the same tick was that of a block inside, which has taken it back
                return None
            # Some task groups of anyio take back a cancel too many; the error itself is the one that was delivered.
            return next((one.error for one in self._deliveries or () if one.error is error and one.cancels), None)
        known: Delivery | None = None
        for link in contexts(error):
            for one in self._deliveries or ():
                if one.error is link:
                    if one.cancels > own.count(one.number) and (link is error or self._is_outstanding(one, own)):
                        return self._with_message_of_outside(one.error) if one.number in own else one.error
                    known = one if known is None or known.number < one.number else known
        if not isinstance(error, asyncio.CancelledError):
            return None
        if known is None:  # some blocks raise a new error; so does an `Overlap` for the cancel of a scope
            return None if _is_of_scope(error) else error
        # Others raise the first cancel, whatever came after it.
        later = [one for one in self._deliveries or () if one.number > known.number and one.cancels > own.count(one.number)]
        hidden = next((one.error for one in later if _is_hidden(one.error)), None)
        return hidden if known.total < self._count_without_later(known.number, own) else None

    def _count_without_later(self, number: int, own: Sequence[int]) -> int:
        """Return the task's cancel count without those of a scope's own cancels that came after a delivery."""
        assert self.task is not None
        return self.task.cancelling() - sum(one > number for one in own)

    def _is_outstanding(self, delivery: Delivery, own: Sequence[int]) -> bool:
        """Return whether the coroutine has not taken back all the cancels from outside that the delivery stands for."""
        return delivery.total - delivery.cancels + own.count(delivery.number) < self._count_without_later(delivery.number, own)

    def _with_message_of_outside(self, error: asyncio.CancelledError) -> asyncio.CancelledError:
        """Return `error`, which stands for a cancel from outside and the scope's own, or one with the message of the former.

        It has the message of the one that came first. Scopes of anyio know their cancel by its message.
        """
        if not _is_of_scope(error):
            return error
        message = getattr(self.task, "_cancel_message", None)
        made = asyncio.CancelledError() if message is None else asyncio.CancelledError(message)
        set_context(made, error)  # by which a watch further out knows it again
        return made


def _is_of_scope(error: asyncio.CancelledError) -> bool:
    return bool(error.args) and isinstance(error.args[0], ScopeReason)


def _is_hidden(error: asyncio.CancelledError) -> bool:
    """Return whether a block that was being left, or this library, has caught a cancel in favour of an earlier one.

    Other code that catches a cancel settles it: it is its own, or is swallowed. So does a task group that has cancelled its
    task, but before Python 3.13 the cancel count does not show it.
    """
    if error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame  # of the function that caught it
    if frame.f_code.co_filename.startswith(PACKAGE):
        return True
    is_exit = frame.f_code.co_name in ("__aexit__", "_aexit")
    return is_exit and not getattr(frame.f_locals.get("self"), "_parent_cancel_requested", False)


_MOST_DELIVERIES = 32


@types.coroutine
def drive(coro: Coroutine[Any, Any, T], watch: CancelWatch) -> Generator[Any, Any, T]:
    """Await `coro`; `watch` notes the cancels that are delivered to it. Costs one frame while it does not suspend."""
    try:
        waiting = coro.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    return (yield from drive_on(coro, waiting, watch))


def drive_on(coro: Coroutine[Any, Any, T], waiting: Any, watch: CancelWatch) -> Generator[Any, Any, T]:
    """Like `drive`, for a coroutine that has suspended: `waiting` is what it has yielded."""
    error: BaseException | None = None
    while True:
        if watch.overlap is None or watch._deliveries is not None:  # pyright: ignore[reportPrivateUsage]
            watch.suspended()
        try:
            yield waiting
        except GeneratorExit:  # the caller itself is thrown away: nothing may be awaited any more
            if watch.overlap is not None:
                watch.overlap.abandon()
            coro.close()
            raise
        except BaseException as thrown:
            if isinstance(thrown, asyncio.CancelledError):
                watch.delivered(thrown)
            error = thrown
        try:
            waiting = coro.send(None) if error is None else coro.throw(error)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            error = None  # its traceback has this frame
