"""Background calls: the calls of one hook in order, beside whatever follows; bounded, and drained at the end."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiohooks._aio.cancel import wait_done
from aiohooks._aio.cancel_watch import current_task
from aiohooks._aio.clock import wake
from aiohooks._aio.observers import Observer, observing
from aiohooks._aio.run_scope import leave_run
from aiohooks.dispatch.calls import Method, OrderGroup, RegisteredHook, bound_method, call_groups, hook_cancelled_error
from aiohooks.errors import HookGroupClosedError, flattened

_logger = logging.getLogger("aiohooks")


class BackgroundCalls:
    """The queues of all background hooks of one group or session."""

    def __init__(self, grace_secs: float, enter: Callable[[], object] = lambda: None, observers: Sequence[Observer] = ()) -> None:
        """Take what all queues share.

        Args:
            grace_secs: how long cancelled calls may take to end.
            enter: called first in the context of each call.
            observers: notified of each call.
        """
        self._grace_secs = grace_secs
        self._enter = enter
        self._observers = observers
        self._queues: dict[RegisteredHook, CallQueue] = {}

    def bind(self, registered: RegisteredHook, method: str) -> Method:
        """Return what calls `method` of the hook: into its queue, if it is a background hook."""
        if not registered.registration.background:
            return bound_method(registered, method)
        queue = self._queues.get(registered)
        if queue is None:
            queue = self._queues[registered] = CallQueue(registered, self._enter, self._observers)
        group = OrderGroup(method, [registered], self._grace_secs)

        async def call(*args: Any, **keywords: Any) -> None:
            await queue.put(group, args, keywords)

        return call

    def pending(self, registered: RegisteredHook) -> int:
        """Return how many calls of a hook are queued or active."""
        queue = self._queues.get(registered)
        return 0 if queue is None else queue.size

    async def drain(self, hooks: Iterable[RegisteredHook]) -> None:
        """Wait until the queues of `hooks` are empty, except that of the running call; leave their failures to the next call."""
        for registered in hooks:
            queue = self._queues.get(registered)
            if queue is not None and queue.task is not current_task():
                await queue.wait_until(0)

    async def finish(self, secs: float) -> None:
        """Give the queues `secs` to become empty, then drop what is left."""
        tasks = [asyncio.ensure_future(queue.wait_until(0)) for queue in self._queues.values() if queue.size]
        try:
            await wait_done(tasks, secs)
        finally:
            for task in tasks:
                task.cancel()
            for queue in self._queues.values():
                queue.drop()
        await wait_done([queue.task for queue in self._queues.values() if queue.task is not None], self._grace_secs)

    async def end(self, secs: float) -> list[BaseException]:
        """Finish the queues, which take no more calls, and return the failures that no call has raised."""
        for queue in self._queues.values():
            queue.closed = True
        await self.finish(secs)
        return [error for queue in self._queues.values() for error in queue.take_errors()]


class CallQueue:
    """The queued calls of one hook. Each runs in a task of its own, in a copy of its caller's context, when the one before it
    has ended.
    """  # noqa: D205

    def __init__(self, registered: RegisteredHook, enter: Callable[[], object], observers: Sequence[Observer]) -> None:
        self._registered = registered
        self._enter = enter
        self._observers = observers
        self._calls: deque[tuple[contextvars.Context, OrderGroup, tuple[Any, ...], dict[str, Any]]] = deque()
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._errors: list[BaseException] = []
        self._dropped = False
        self.closed: bool = False
        """Whether calls are refused: no task would wait for them."""
        self.task: asyncio.Task[Any] | None = None
        """The active call."""

    @property
    def size(self) -> int:
        """How many calls are queued or active."""
        return len(self._calls) + (self.task is not None)

    async def put(self, group: OrderGroup, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Queue a call; wait while the queue is full.

        Raises:
            BaseException: the failures of earlier calls, several as one group.
            HookGroupClosedError: the group was left after the call of which this is a part had begun.
        """
        self._raise_errors()
        self._check_open()
        if self.size >= self._registered.registration.max_pending:
            await self.wait_until(self._registered.registration.max_pending - 1)
            self._raise_errors()
            self._check_open()
        context = contextvars.copy_context()
        context.run(leave_run)  # it is not part of the run that queues it
        context.run(self._enter)
        self._calls.append((context, group, args, keywords))
        if self.task is None:
            self._start_next()

    def _check_open(self) -> None:
        if self.closed:
            raise HookGroupClosedError(f"{self._registered.name} takes no more background calls: its group has been left")

    async def wait_until(self, size: int) -> None:
        """Wait until at most `size` calls are left."""
        while self.size > size:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = size
            try:
                await waiter
            finally:
                del self._waiters[waiter]

    def drop(self) -> None:
        """Drop the queued calls and cancel the active one."""
        if not self.size:
            return
        _logger.warning("%s has %s background calls left, which are dropped", self._registered.name, self.size)
        self._dropped = True
        self._calls.clear()
        if self.task is not None:
            self.task.cancel()

    def take_errors(self) -> list[BaseException]:
        """Return the failures that no call has raised, and forget them."""
        errors, self._errors = self._errors, []
        return errors

    def _raise_errors(self) -> None:
        errors = self.take_errors()
        try:
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} background calls failed", flattened(errors))
        finally:
            del errors

    def _start_next(self) -> None:
        context, group, args, keywords = self._calls.popleft()
        task = self.task = asyncio.get_running_loop().create_task(
            _call(group, args, keywords, self._observers), name=group.names[0], context=context
        )
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.task = None
        if task.cancelled():
            if not self._dropped:
                self._errors.append(hook_cancelled_error(task.get_name(), asyncio.CancelledError()))
        elif (error := task.exception()) is not None:
            self._errors.append(error)
        if self._calls:
            self._start_next()
        for waiter, size in self._waiters.items():
            if self.size <= size:
                wake(waiter)


async def _call(group: OrderGroup, args: tuple[Any, ...], keywords: dict[str, Any], observers: Sequence[Observer]) -> None:
    with observing(observers, "background", group.names[0]):
        await call_groups((group,), args, keywords)
