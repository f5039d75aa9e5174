"""Waits for tasks, others, events and numbers; cleanup that must finish; tasks and pauses.

    shielded           runs cleanup to its end, in spite of cancels of the caller
    to_thread          calls a function in a thread, and waits for it
    wait_done          waits for tasks, and cancels none of them
    leave_behind       keeps tasks that ignore their cancellation, for which nothing waits any more
    new_task           makes a task that begins later
    current_task       the running task
    wait_for_others    a wait for another session or for an engine; a stop ends it while a session
                       opens
    until_stop         a wait in a run, which a stop of its session ends
    Event              something that happens, and the callbacks that are notified
    Waiters            waits that end with the next call of `wake`
    ThresholdWaiters   waits for a number that grows: each ends when its threshold is reached
    Backoff            the pauses between attempts

`asyncio.TaskGroup`, `wait_for` and `Condition` lose cancels or wake-ups on supported Python
versions, so nothing here uses them.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import contextvars
import inspect
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from aiohooks._core.activity import RunScope, assigned, logger
from aiohooks._core.clock import Clock, current_clock, wait_until_woken, wake
from aiohooks._core.validate import check_secs

T = TypeVar("T")
P = ParamSpec("P")

make_task: Callable[..., asyncio.Task[Any]] | None = None
"""Makes all tasks of the library, by default `asyncio.Task`.

`aiohooks.testing` replaces it: to run tasks in other orders, and to note where tasks are started.
If it is None, `asyncio.Task` is looked up for each task, as other packages replace that class after
this import (nest_asyncio).
"""
DEFAULT_GRACE_SECS = 10.0
"""How long background tasks and cleanup may take at the end of a session, by default."""
LEFT_BEHIND_MESSAGE = "%s still runs %s s after its cancellation; continuing without it"
_THREAD_GRACE_SECS = 120.0
"""How long a cancelled caller waits for its thread by default. It is long, as the thread may write
files, and is to be left behind only if it hangs.
"""


def current_task() -> asyncio.Task[Any]:
    """Return the running task."""
    task = asyncio.current_task()
    assert task is not None, "coroutines of this library run inside a task"
    return task


def new_task(
    coro: Coroutine[Any, Any, T],
    name: str | None,
    context: contextvars.Context | None = None,
) -> asyncio.Task[T]:
    """Make a task that begins later, also if the loop has an eager task factory."""
    make: Any = make_task or asyncio.Task
    task: asyncio.Task[T] = make(
        coro,
        loop=asyncio.get_running_loop(),
        name=name,
        context=context,
    )
    return task


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop, if there is one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def shielded(
    coro: Coroutine[Any, Any, T],
    *,
    grace_secs: float | None,
    what: str,
    on_cancel: Callable[[], object] | None = None,
) -> T:
    """Run `coro` to its end in a task of its own, in a copy of the caller's context.

    If the caller is cancelled meanwhile, the cancel is raised when `coro` has ended. The first
    cancel calls `on_cancel`, and `coro` then has `grace_secs` to end. After this time `coro` is
    cancelled, and after the same time again it is left running, with a warning.

    Args:
        coro: the coroutine.
        grace_secs: how long a cancelled caller waits for `coro`, before and after its cancellation.
            None if `coro` limits its own time.
        what: the name of `coro` in messages.
        on_cancel: called at the first cancel of the caller.
    """
    task = await shielded_task(
        coro,
        grace_secs=grace_secs,
        what=what,
        on_cancel=on_cancel,
    )
    return task.result()


async def shielded_task(
    coro: Coroutine[Any, Any, T],
    *,
    grace_secs: float | None,
    what: str,
    on_cancel: Callable[[], object] | None = None,
) -> asyncio.Task[T]:
    """Run `coro` as `shielded` does, with the same arguments, and return its task, which has ended.

    A cancel of the caller is raised, so if the returned task was cancelled, it was by other code.

    Raises:
        CancelledError: the caller was cancelled.
    """
    task = asyncio.get_running_loop().create_task(coro, name=what)
    try:
        # Unlike `await task`, this does not pass a cancel of the caller on to the task.
        await asyncio.wait([task])
    except asyncio.CancelledError as cancelled:
        if on_cancel is not None:
            on_cancel()
        # A cancelled scope of anyio cancels its task again at each iteration of the event loop,
        # unless it is shielded.
        with anyio.CancelScope(shield=True):
            await _end_within(task, grace_secs, what)
        if not task.done():
            # It was left behind. Without this, asyncio would log an error of it as never retrieved.
            task.add_done_callback(retrieve_exception)
        elif not task.cancelled():
            error = task.exception()
            if error is not None:
                # The cancel is raised in place of this error, and keeps it as its context.
                cancelled.__context__ = error
        raise
    return task


async def _end_within(
    task: asyncio.Task[Any],
    grace_secs: float | None,
    what: str,
) -> None:
    """Give a task `grace_secs` to end. Then cancel it, and give it the same time again.

    A task that still runs after this is left behind, with a warning.
    """
    await _wait_uncancelled(task, grace_secs)
    if task.done():
        return
    task.cancel()
    await _wait_uncancelled(task, grace_secs)
    if task.done():
        return
    logger.warning(LEFT_BEHIND_MESSAGE, what, grace_secs)
    leave_behind([task])


async def _wait_uncancelled(task: asyncio.Task[Any], secs: float | None) -> None:
    """Wait until a task is done, at most `secs`, and ignore cancels of this wait.

    The caller has been cancelled before, and raises that cancel afterwards.
    """
    clock = current_clock()
    # The time is counted from this call, which may be much later than the cancel if the event loop
    # was blocked: the task still gets all of its time.
    began = clock.now()
    remaining_secs = secs
    while not task.done() and (remaining_secs is None or remaining_secs > 0):
        with contextlib.suppress(asyncio.CancelledError):
            await wait_done([task], remaining_secs)
        if secs is not None:
            remaining_secs = began + secs - clock.now()


LEFT_BEHIND: set[asyncio.Task[Any]] = set()
"""The tasks that were left behind, until they end. The event loop itself has only weak references
to tasks, and a task that nothing else refers to could be freed while it runs.
"""


def leave_behind(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Keep tasks that still run after their grace period; `aiohooks.run` ends without them."""
    for task in tasks:
        LEFT_BEHIND.add(task)
        task.add_done_callback(LEFT_BEHIND.discard)


async def wait_done(
    tasks: Iterable[asyncio.Future[Any]],
    secs: float | None,
) -> bool:
    """Wait until all tasks are done, or `secs` have passed, and return whether they are done.

    No task is cancelled, neither after `secs` nor if this wait is cancelled. If `secs` is None,
    there is no time limit.
    """
    pending = {task for task in tasks if not task.done()}
    if not pending:
        return True
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(task: asyncio.Future[Any]) -> None:
        pending.discard(task)
        if not pending:
            wake(waiter)

    watched = tuple(pending)
    for task in watched:
        task.add_done_callback(ended)
    try:
        await wait_until_woken(waiter, secs)
    finally:
        for task in watched:
            task.remove_done_callback(ended)
    # Not `pending`: the callback of a task that has just ended may not have been called yet.
    return all(task.done() for task in watched)


async def to_thread(
    fn: Callable[..., T],
    *args: Any,
    grace_secs: float = _THREAD_GRACE_SECS,
    on_cancel: Callable[[], object] | None = None,
    what: str | None = None,
) -> T:
    """Call a blocking function in a worker thread.

    A thread cannot be stopped. If the caller is cancelled, `on_cancel` is called, which may make
    the function end, and this waits as `shielded` does. A thread that still runs after this is left
    behind, with a warning. Python waits for it at the end of the process.

    Args:
        fn: the function.
        args: its arguments.
        grace_secs: how long a cancelled caller waits for the thread.
        on_cancel: called at the first cancel of the caller.
        what: the name of the thread in messages.
    """
    is_running = False

    def call() -> T:
        nonlocal is_running
        is_running = True
        try:
            return fn(*args)
        finally:
            is_running = False

    what = what or f"thread of {fn!r}"
    try:
        return await shielded(
            anyio.to_thread.run_sync(call), grace_secs=grace_secs, what=what, on_cancel=on_cancel
        )
    except asyncio.CancelledError:
        # The thread may still run. A call that has not begun is cancelled, and never runs.
        if is_running:
            logger.warning(LEFT_BEHIND_MESSAGE, what, grace_secs)
        raise


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task or future without a waiter, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


ANY_CHANGE = 0
"""A threshold that every number reaches: waits with it end with the next number, whatever it is."""

Until: TypeAlias = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Returns a wait for an awaitable that may end earlier, with an error: `Coordinator.until`."""
_until: ContextVar[Until | None] = ContextVar("aiohooks_opening", default=None)
"""The `until` of the session that is being opened in this context, or None."""


def opening_until(until: Until) -> assigned[Until | None]:
    """Let `wait_for_others` await with `until` in this block, so that a stop ends the wait."""
    return assigned(_until, until)


def wait_for_others(waiter: Awaitable[T]) -> Awaitable[T]:
    """Return a wait for something that only another process can bring about.

    Examples are the answer of an engine, and a new chief. If a session is being opened in this
    context, a stop of the session ends the wait with `StopRequestedError`.
    """
    until = _until.get()
    return waiter if until is None else until(waiter)


def until_stop(
    waiter: Awaitable[T],
    run: RunScope | None,
) -> Awaitable[T]:
    """Return an awaitable for the result of `waiter`, which a stop of the run's session ends.

    It then raises `StopRequestedError`. If there is no run, or it belongs to no session, this is
    `waiter` itself.
    """
    if run is None or run.session is None:
        return waiter
    return run.session.until(waiter)


class Event(Generic[P]):
    """Something that happens, and the callbacks that are notified of it."""

    def __init__(self, name: str) -> None:
        """Start without callbacks. `name` is for messages."""
        self._name = name
        self._callbacks: list[Callable[P, object]] = []

    def subscribe(self, callback: Callable[P, object]) -> None:
        """Call a plain function or a coroutine function at each event.

        Callbacks are called in the order of their subscriptions. An error of a callback is logged,
        and affects neither the other callbacks nor the session.
        """
        self._callbacks.append(callback)

    async def emit(self, *args: P.args, **keywords: P.kwargs) -> None:
        """Call the callbacks one after another, and await those that are asynchronous.

        An error of a callback is logged, and the others are still called.
        """
        for callback in self._callbacks:
            try:
                answer = callback(*args, **keywords)
                if inspect.isawaitable(answer):
                    await answer
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                # A cancel of the caller is raised. A CancelledError that a callback has raised by
                # itself is logged like other errors.
                is_cancellation = isinstance(error, asyncio.CancelledError)
                if is_cancellation and current_task().cancelling():
                    raise
                logger.error("%r failed, a callback of %r", callback, self._name, exc_info=error)

    def __repr__(self) -> str:
        return f"<Event {self._name}: {len(self._callbacks)} callbacks>"


class Waiters:
    """The waiters for an event. The object is true while there are any."""

    def __init__(self) -> None:
        # A dict in the place of a set, for its order.
        self._futures: dict[asyncio.Future[None], None] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    async def wait(
        self,
        secs: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Wait until `wake`, or for `secs` on `clock`, by default the current one."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[waiter] = None
        try:
            await wait_until_woken(waiter, secs, clock)
        finally:
            del self._futures[waiter]

    def wake(self) -> None:
        """Wake all waiters."""
        for waiter in self._futures:
            wake(waiter)


Waiter: TypeAlias = "asyncio.Future[int | T]"
"""A future that gets a number, or another result."""


class ThresholdWaiters(Generic[T]):
    """Futures that wait for a number to grow, each until the number reaches its threshold.

    To park a future is to add it under its threshold. Parking, discarding and waking compare
    O(log n) thresholds, and none for a further future under the same threshold. Reading the lowest
    threshold costs nothing.
    """

    def __init__(self, none: int) -> None:
        """Make an empty collection.

        `none` is a number above all thresholds. It stands for no threshold, as the lowest threshold
        of an empty collection.
        """
        self._futures: dict[int, dict[Waiter[T], None]] = {}
        """The futures of each threshold. Their dict takes the place of a set, for its order."""
        self._thresholds: list[int] = [none]
        """The thresholds with a future, sorted, and `none` at the end: the list is never empty."""
        self.count: int = 0
        """The number of parked futures."""
        self.lowest: int = none
        """The lowest threshold with a future."""

    def count_above(self, threshold: int) -> int:
        """Return the number of futures above `threshold`: the lowest threshold, or a lower one."""
        return self.count - len(self._futures.get(threshold, ()))

    def lowest_above(self, threshold: int) -> int | None:
        """Return the lowest threshold above this one, or None if there is none."""
        place = bisect.bisect_right(self._thresholds, threshold)
        lowest = self._thresholds[place]
        return lowest if lowest in self._futures else None

    def park(self, threshold: int, future: Waiter[T]) -> None:
        """Add a future under its threshold."""
        self.count += 1
        futures = self._futures.get(threshold)
        if futures is not None:
            futures[future] = None
            return
        self._futures[threshold] = {future: None}
        bisect.insort(self._thresholds, threshold)
        self.lowest = self._thresholds[0]

    def discard(self, threshold: int, future: Waiter[T]) -> bool:
        """Remove a future. Return whether it was still parked at its threshold."""
        parked = self._futures.get(threshold)
        if parked is None or future not in parked:
            return False
        self.count -= 1
        del parked[future]
        if not parked:
            del self._futures[threshold]
            index = bisect.bisect_left(self._thresholds, threshold)
            del self._thresholds[index]
            self.lowest = self._thresholds[0]
        return True

    def wake(self, number: int) -> None:
        """End the waits for `number` and below with the result `number`."""
        if self.lowest > number:
            return
        reached = bisect.bisect_right(self._thresholds, number)
        for threshold in self._thresholds[:reached]:
            futures = self._futures.pop(threshold)
            self.count -= len(futures)
            for future in futures:
                # Hot path: this is `clock.wake(future, number)`. Many futures may wait, and the
                # call would cost a third more.
                if not future.done():
                    future.set_result(number)
        del self._thresholds[:reached]
        self.lowest = self._thresholds[0]

    def pop_all(self) -> list[tuple[int, Waiter[T]]]:
        """Remove all futures, and return them as `(threshold, future)`, the lowest first."""
        # The last threshold stands for none, and has no futures.
        popped = [
            (threshold, future)
            for threshold in self._thresholds[:-1]
            for future in self._futures[threshold]
        ]
        self._futures.clear()
        del self._thresholds[:-1]
        self.count = 0
        # The last threshold is left.
        self.lowest = self._thresholds[0]
        return popped


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: pauses that double from `initial_secs` up to `max_secs`.

    With `jitter`, each pause is a random part of this time, so that processes that have failed
    together do not try again together. A pause of 0 is valid.
    """

    initial_secs: float = 0.1
    max_secs: float = 30.0
    jitter: bool = True

    def __post_init__(self) -> None:
        check_secs(self.initial_secs, "initial_secs")
        check_secs(self.max_secs, "max_secs")

    def pause_secs(self, attempt: int) -> float:
        """Return the seconds to wait before attempt number `attempt`, counted from 1."""
        # The exponent has a limit: the power of a long series of attempts would overflow a float.
        longest = min(self.max_secs, self.initial_secs * 2.0 ** min(attempt - 1, 1000))
        return random.uniform(0, longest) if self.jitter else longest
