"""Background calls: calls that the caller does not wait for.

The calls of one hook are made one after another, from a queue that is bounded and drained at the
end.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from aiohooks._core.cancel import wait_done
from aiohooks._core.clock import wake
from aiohooks._core.observers import Observer, observed_call
from aiohooks._core.reports import logger
from aiohooks._core.scope import leave_run
from aiohooks.dispatch.calls import (
    CONDITION,
    HookCalls,
    HookStatus,
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
)
from aiohooks.errors import HookGroupClosedError, flattened


class BackgroundCalls:
    """The queues of all background hooks of one group or session."""

    def __init__(
        self,
        grace_secs: float,
        enter: Callable[[], object] = lambda: None,
        observers: Sequence[Observer] = (),
        step_of: Callable[..., int | None] = lambda *_, **__: None,
    ) -> None:
        """Make no queues yet.

        Args:
            grace_secs: how long cancelled calls may take to end.
            enter: called first in the context of each call.
            observers: notified of each call.
            step_of: returns the step for the notes of errors; it gets the arguments of the call.
        """
        self._grace_secs = grace_secs
        self.enter: Callable[[], object] = enter
        self.observers: Sequence[Observer] = observers
        self.step_of: Callable[..., int | None] = step_of
        # A removed hook has a queue as long as something refers to the hook: a call, or a failure
        # that no call has raised yet.
        self._queues: WeakKeyDictionary[RegisteredHook, CallQueue] = WeakKeyDictionary()

    def bind(self, registered: RegisteredHook, method: str) -> Method:
        """Return the function that calls `method` of the hook, or queues the call if it is a
        background hook.
        """
        if not registered.registration.background:
            return bound_method(registered, method)
        queue = self._queues.get(registered)
        if queue is None:
            queue = self._queues[registered] = CallQueue(registered, self)
        group = OrderGroup(method, [registered], self._grace_secs)
        call = functools.partial(queue.put, group)

        def has_to_wait(*args: Any, **keywords: Any) -> bool:
            return not queue.put_nowait(group, *args, **keywords)

        setattr(call, CONDITION, has_to_wait)
        return call

    def pending(self, registered: RegisteredHook) -> int:
        """Return how many calls of a hook are queued or active."""
        queue = self._queues.get(registered)
        return 0 if queue is None else len(queue.calls)

    def status(self, hooks: Iterable[RegisteredHook]) -> list[HookStatus]:
        """Return the status of hooks."""
        return [registered.status(self.pending(registered)) for registered in hooks]

    async def drain(self, hooks: Iterable[RegisteredHook]) -> None:
        """Wait until the queues of hooks are empty; their failures are raised by the next call.

        The queue of the call of which this is a part is left out.
        """
        for queue in [self._queues.get(registered) for registered in hooks]:
            while queue is not None and queue.calls and not queue.waits_for_caller():
                await wait_done([queue.calls[-1].done], None)

    async def finish(self, secs: float) -> None:
        """Wait until all queues are empty, at most `secs`, and drop the calls that are left."""
        queues = [*self._queues.values()]
        try:
            await wait_done(_unfinished(queues), secs)
        finally:  # also if this is cancelled
            for queue in queues:
                queue.drop()
        # The active calls, which are cancelled now, have the grace period to end.
        await wait_done(_unfinished(queues), self._grace_secs)

    async def end(self, secs: float) -> list[BaseException]:
        """Close all queues, finish them, and return the failures that no call has raised."""
        queues = [*self._queues.values()]
        for queue in queues:
            queue.close()
        await self.finish(secs)
        return [error for queue in queues for error in queue.take_errors()]


def _unfinished(queues: Iterable[CallQueue]) -> list[asyncio.Future[None]]:
    return [call.done for queue in queues for call in queue.calls]


class _QueuedCall(HookCalls):
    """A call in a queue, with the context in which it is made."""

    __slots__ = ("_args", "_keywords", "context", "done", "queue")

    def __init__(
        self,
        queue: CallQueue,
        group: OrderGroup,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> None:
        super().__init__(group, queue.shared.step_of(*args, **keywords))
        self._args = args
        self._keywords = keywords
        self.queue: CallQueue = queue
        self.context: contextvars.Context = contextvars.copy_context()
        self.done: asyncio.Future[None] = self._loop.create_future()
        """Done when the call has ended, or was dropped, and its failure is known."""
        self.call_when_ended(queue.ended)

    def begin(self) -> None:
        """Start the call; `CallQueue.ended` is called when it has ended."""
        if not self.cancelling:
            call, method = self._group.calls[0], self._group.methods[0]
            if observers := tuple(self.queue.shared.observers):
                method = functools.partial(
                    observed_call, method, "background", call.name, observers
                )
            try:
                if (
                    not call.may_wait
                    or call.condition is None
                    or call.condition(*self._args, **self._keywords)
                ):
                    if self._keywords:
                        method = functools.partial(method, **self._keywords)
                    context = contextvars.copy_context()
                    self.start(0, method, self._args, call.name, call.secs, context)
            except BaseException as error:
                self.failed(0, error)
        self.notify_if_ended()

    def drop(self) -> None:
        """Cancel the active call."""
        if not self.done.done():
            self.cancel(CancelledError())

    @property
    def registered(self) -> RegisteredHook:
        return self._group.hooks[0]

    def finish(self) -> None:
        """Raise the failure of the call, which has ended."""
        try:
            super().finish()
        finally:
            # It refers to the call, in `_current_call`.
            del self.context


_current_call: ContextVar[_QueuedCall | None] = ContextVar("aiohooks_background_call", default=None)
"""The background call of the current context. It may have ended: a task keeps the context that it
was started in.
"""


class CallQueue:
    """The queued calls of one hook.

    Each runs in a task of its own, in a copy of its caller's context, when the one before it has
    ended.
    """

    def __init__(self, registered: RegisteredHook, shared: BackgroundCalls) -> None:
        self._name = registered.name
        self._drops = registered.registration.on_full == "drop"
        self._max_pending = registered.registration.max_pending
        self.shared: BackgroundCalls = shared
        self.calls: deque[_QueuedCall] = deque()
        """The calls that have not ended; the first is being made."""
        # Callers that wait for a place; those that have been woken are the first.
        self._waiters: list[asyncio.Future[None]] = []
        # The queues in which the active call of this one waits for a place.
        self._waits_for: list[CallQueue] = []
        # The failures that no call has raised, with their calls, which refer to the hook.
        self._errors: list[tuple[_QueuedCall, BaseException]] = []
        # Whether calls are refused, because nothing would wait for them any more.
        self._closed = False

    def put_nowait(
        self,
        group: OrderGroup,
        /,
        *args: Any,
        **keywords: Any,
    ) -> bool:
        """Queue a call, or drop it; return False if its caller has to wait for a place.

        Raises:
            BaseException: the failures of earlier calls, as for `put`.
            HookGroupClosedError: as for `put`.
        """
        self._check()
        # No call overtakes those whose callers wait for a place.
        is_full = self._waiters or len(self.calls) >= self._max_pending
        # A hook that calls its own group gets a place: the queue would wait for itself.
        if not is_full or self.waits_for_caller():
            self._append(group, args, keywords)
            return True
        if self._drops:
            group.hooks[0].overflowed(group.calls[0].name)
            return True
        return False

    async def put(
        self,
        group: OrderGroup,
        /,
        *args: Any,
        **keywords: Any,
    ) -> None:
        """Queue a call; wait while the queue is full. Waiting callers get places in their order.

        Raises:
            BaseException: the failures of earlier calls, several as one group.
            HookGroupClosedError: the group was left after the call of which this is a part had
                begun.
        """
        if self.put_nowait(group, *args, **keywords):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        waits_for = [] if (call := _active_call()) is None else call.queue._waits_for
        waits_for.append(self)
        try:
            await waiter
            self._check()
            self._append(group, args, keywords)
        finally:
            waits_for.remove(self)
            self._waiters.remove(waiter)
            self._give_places()

    def _check(self) -> None:
        raise_failures(self.take_errors(), "background calls failed")
        if self._closed:
            raise HookGroupClosedError(
                f"{self._name} takes no more background calls: its group has been left"
            )

    def _append(
        self,
        group: OrderGroup,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> None:
        group.hooks[0].calls += 1
        call = _QueuedCall(self, group, args, keywords)
        call.context.run(leave_run)  # it is not part of the run that queues it
        call.context.run(_current_call.set, call)
        call.context.run(self.shared.enter)
        self.calls.append(call)
        if len(self.calls) == 1:
            self._start_next()

    def _give_places(self) -> None:
        places = max(self._max_pending - len(self.calls), 0)
        if self._closed:
            places = len(self._waiters)  # they get an error
        for waiter in self._waiters[:places]:
            wake(waiter)

    def waits_for_caller(self) -> bool:
        """Return whether the active call of this queue waits for the code that runs now.

        That is so if the code is part of this call, or part of the active call of a queue in which
        this call waits for a place.
        """
        call = _active_call()
        if call is None:
            return False
        if call.queue is self:
            return True
        # There is no cycle of waits: a call that would close one gets a place.
        return any(queue.waits_for_caller() for queue in self._waits_for)

    def close(self) -> None:
        """Refuse further calls, also those of callers that wait for a place."""
        self._closed = True
        self._give_places()

    def drop(self) -> None:
        """Drop the queued calls and cancel the active one."""
        if not self.calls:
            return
        logger.warning(
            "%s has %s background calls left, which are dropped", self._name, len(self.calls)
        )
        active = self.calls[0]
        # The active call is cancelled, and the hook has got it.
        active.registered.dropped += len(self.calls) - 1
        while self.calls[-1] is not active:
            wake(self.calls.pop().done)
        active.drop()

    def take_errors(self) -> list[BaseException]:
        """Return the failures that no call has raised, and forget them."""
        errors, self._errors = self._errors, []
        return [error for _, error in errors]

    def _start_next(self) -> None:
        self._waits_for = []
        call = self.calls[0]
        # By a callback: an eager task would make the call inside of the call that queues it.
        asyncio.get_running_loop().call_soon(call.begin, context=call.context)

    def ended(self, _: object) -> None:
        """Keep the failure of the active call, which has ended, and start the next call."""
        call = self.calls.popleft()
        try:
            call.finish()
        except CancelledError:
            pass  # dropped
        except BaseException as error:
            self._errors.append((call, error))
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise  # through the loop, as from a task
        finally:
            wake(call.done)
            if self.calls:
                self._start_next()
            self._give_places()


def raise_failures(errors: list[BaseException], what: str) -> None:
    """Raise the failures of several calls, if there are any, and clear the list.

    A single failure is raised as it is, several as one flat group.
    """
    try:
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise BaseExceptionGroup(f"{len(errors)} {what}", flattened(errors))
    finally:
        # The traceback of what is raised has this frame, so that it would refer to itself.
        errors.clear()


def _active_call() -> _QueuedCall | None:
    call = _current_call.get()
    return None if call is None or call.done.done() else call
