"""Background calls: the calls of one hook in order, beside whatever follows; bounded, and drained at the end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from asyncio import CancelledError
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from aiohooks._aio.cancel import wait_done
from aiohooks._aio.clock import wake
from aiohooks._aio.observers import Observer, observing
from aiohooks._aio.run_scope import leave_run
from aiohooks.dispatch.calls import CONDITION, HookCalls, Method, OrderGroup, RegisteredHook, bound_method
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
        # The queue of a hook that was removed goes with its last call and failure: only these refer to the registered hook.
        self._queues: WeakKeyDictionary[RegisteredHook, CallQueue] = WeakKeyDictionary()

    def bind(self, registered: RegisteredHook, method: str) -> Method:
        """Return what calls `method` of the hook: into its queue, if it is a background hook."""
        if not registered.registration.background:
            return bound_method(registered, method)
        queue = self._queues.get(registered)
        if queue is None:
            queue = self._queues[registered] = CallQueue(registered, self._enter, self._observers)
        group = OrderGroup(method, [registered], self._grace_secs)

        def is_full(*args: Any, **keywords: Any) -> bool:
            return not queue.put_nowait(group, args, keywords)

        async def call(*args: Any, **keywords: Any) -> None:
            await queue.put(group, args, keywords)

        setattr(call, CONDITION, is_full)
        return call

    def pending(self, registered: RegisteredHook) -> int:
        """Return how many calls of a hook are queued or active."""
        queue = self._queues.get(registered)
        return 0 if queue is None else queue.size

    async def drain(self, hooks: Iterable[RegisteredHook]) -> None:
        """Wait until the queues of `hooks` are empty, except that of the running call; leave their failures to the next call."""
        queues = [queue for one in hooks if (queue := self._queues.get(one)) is not None and not queue.waits_for_caller()]
        await wait_done([queue.until_idle() for queue in queues], None)

    async def finish(self, secs: float) -> None:
        """Give the queues `secs` to become empty, then drop what is left."""
        queues = [*self._queues.values()]
        try:
            await wait_done([queue.until_idle() for queue in queues], secs)
        finally:
            for queue in queues:
                queue.drop()
        await wait_done([call.done for queue in queues if (call := queue.active) is not None], self._grace_secs)

    async def end(self, secs: float) -> list[BaseException]:
        """Finish the queues, which take no more calls, and return the failures that no call has raised."""
        queues = [*self._queues.values()]
        for queue in queues:
            queue.close()
        await self.finish(secs)
        return [error for queue in queues for error in queue.take_errors()]


class _QueuedCall(HookCalls):
    """A call in a queue; its context says that code is part of it."""

    __slots__ = ("_args", "_keywords", "_observation", "context", "done", "ended", "queue", "registered")

    def __init__(self, queue: CallQueue, group: OrderGroup, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        super().__init__(group, [None], None, None)
        self._args = args
        self._keywords = keywords
        self._observation: AbstractContextManager[None] = contextlib.nullcontext()
        self.queue: CallQueue = queue
        self.registered: RegisteredHook = group.hooks[0]
        self.context: contextvars.Context = contextvars.copy_context()
        self.ended: bool = False
        self._idle = self.done = self._loop.create_future()

    def begin(self) -> None:
        """Start the call; `done` is set when it has ended."""
        self.done.add_done_callback(self.queue.ended)
        if not self.failing:
            method, may_wait, condition, name, secs = self._group.calls[0]
            self._observation = observing(self.queue.observers, "background", name)
            try:
                if not may_wait or condition is None or condition(*self._args, **self._keywords):
                    self.start(0, method, self._args, self._keywords, name, secs, context=contextvars.copy_context())
            except BaseException as error:
                self.failed(0, error)
        if not self.left:
            wake(self.done)

    def drop(self) -> None:
        """Cancel the call, which ends with a `CancelledError`."""
        if not self.done.done():
            self._outer = CancelledError()
            self._cancel_calls()

    def finish(self) -> None:
        """Raise the failure of the call, when it is done."""
        self.ended = True
        try:
            with self._observation:
                super().finish()
        finally:
            self._tasks.clear()
            del self.context  # like that of the task, it refers to the call


_current_call: ContextVar[_QueuedCall | None] = ContextVar("aiohooks_background_call", default=None)
"""The background call of the current context. It may have ended: a task keeps the context that it was started in."""


class CallQueue:
    """The queued calls of one hook. Each runs in a task of its own, in a copy of its caller's context, when the one before it
    has ended.
    """  # noqa: D205

    def __init__(self, registered: RegisteredHook, enter: Callable[[], object], observers: Sequence[Observer]) -> None:
        self._name = registered.name
        self._max_pending = registered.registration.max_pending
        self._enter = enter
        self.observers: Sequence[Observer] = observers
        self._calls: deque[_QueuedCall] = deque()
        self._waiters: OrderedDict[asyncio.Future[None], None] = OrderedDict()  # callers, until each has been given a place
        self._given = 0  # places of callers that have not taken them yet
        self._waits_for: list[CallQueue] = []  # those in which the active call waits for a place
        self._idle: asyncio.Future[None] | None = None
        self._errors: list[tuple[RegisteredHook, BaseException]] = []
        self._closed = False  # calls are refused: no task would wait for them
        self.active: _QueuedCall | None = None
        """The call that is being made."""

    @property
    def size(self) -> int:
        """How many calls are queued or active."""
        return len(self._calls) + (self.active is not None)

    def put_nowait(self, group: OrderGroup, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
        """Queue a call if there is a place for it; return whether there is.

        There is always one for a call that the queue would wait for: that of a hook which calls its own group.

        Raises:
            BaseException: like `put`.
        """
        self._check()
        if (self._waiters or self.size + self._given >= self._max_pending) and not self.waits_for_caller():
            return False
        self._append(group, args, keywords)
        return True

    async def put(self, group: OrderGroup, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Queue a call; wait while the queue is full. Callers get places in the order in which they came.

        Raises:
            BaseException: the failures of earlier calls, several as one group.
            HookGroupClosedError: the group was left after the call of which this is a part had begun.
        """
        if self.put_nowait(group, args, keywords):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        waits_for = [] if (call := _active_call()) is None else call.queue._waits_for
        waits_for.append(self)
        try:
            await waiter
            self._check()
            self._append(group, args, keywords)
        finally:
            waits_for.remove(self)
            self._waiters.pop(waiter, None)
            if waiter.done() and not waiter.cancelled():
                self._given -= 1
                self._give_places()

    def _check(self) -> None:
        errors = self.take_errors()
        try:
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} background calls failed", flattened(errors))
        finally:
            del errors
        if self._closed:
            raise HookGroupClosedError(f"{self._name} takes no more background calls: its group has been left")

    def _append(self, group: OrderGroup, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        call = _QueuedCall(self, group, args, keywords)
        call.context.run(leave_run)  # it is not part of the run that queues it
        call.context.run(_current_call.set, call)
        call.context.run(self._enter)
        self._calls.append(call)
        if self.active is None:
            self._start_next()

    def _give_places(self) -> None:
        while self._waiters and (self._closed or self.size + self._given < self._max_pending):
            waiter, _ = self._waiters.popitem(last=False)
            if not waiter.done():  # otherwise its caller was cancelled
                self._given += 1
                waiter.set_result(None)

    def waits_for_caller(self) -> bool:
        """Return whether the active call cannot end before this code has: that is part of it, or of a call that it waits for."""
        call = _active_call()
        return call is not None and (call.queue is self or any(one.waits_for_caller() for one in self._waits_for))

    def until_idle(self) -> asyncio.Future[None]:
        """Return a future that is done when no call is queued or active."""
        if self._idle is None or self._idle.done():
            self._idle = asyncio.get_running_loop().create_future()
        if not self.size:
            wake(self._idle)
        return self._idle

    def close(self) -> None:
        """Refuse further calls, also those of callers that wait for a place."""
        self._closed = True
        self._give_places()

    def drop(self) -> None:
        """Drop the queued calls and cancel the active one."""
        if not self.size:
            return
        _logger.warning("%s has %s background calls left, which are dropped", self._name, self.size)
        self._calls.clear()
        if self.active is not None:
            self.active.drop()

    def take_errors(self) -> list[BaseException]:
        """Return the failures that no call has raised, and forget them."""
        errors, self._errors = self._errors, []
        return [error for _, error in errors]

    def _start_next(self) -> None:
        self._waits_for = []
        self.active = call = self._calls.popleft()
        # By a callback: a task that starts immediately would make the call inside of the one that queues it.
        asyncio.get_running_loop().call_soon(call.begin, context=call.context)

    def ended(self, _: object) -> None:
        """Take the failure of the active call, and make the next one."""
        call, self.active = self.active, None
        assert call is not None
        try:
            call.finish()
        except CancelledError:
            pass  # dropped
        except BaseException as error:
            self._errors.append((call.registered, error))
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise  # through the loop, as from a task
        finally:
            if self._calls:
                self._start_next()
            elif self._idle is not None:
                wake(self._idle)
            self._give_places()


def _active_call() -> _QueuedCall | None:
    call = _current_call.get()
    return None if call is None or call.ended else call
