"""Background calls: calls that the caller does not wait for.

The calls of one hook are made one after another, from a queue that is bounded and drained at the
end.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from aiohooks._core.activity import Observer, leave_run, logger
from aiohooks._core.queue import Queue
from aiohooks._core.waits import new_task, wait_done
from aiohooks.dispatch.calls import (
    HookCall,
    OrderGroup,
    RegisteredHook,
    call_groups,
    hook_call,
)
from aiohooks.dispatch.ways import Args, Keywords
from aiohooks.errors import HookGroupClosedError


@dataclass
class BackgroundCalls:
    """The queues of all background hooks of one group or session."""

    grace_secs: float
    """How long cancelled calls may take to end."""
    enter: Callable[[], object] = lambda: None
    """Called in the context of each call when it is queued. A session makes its graph current."""
    observers: Sequence[Observer] = ()
    """Notified of each call."""
    step_of: Callable[..., int | None] = lambda *_, **__: None
    """Returns the step for the notes of errors. It gets the arguments of the call."""
    # In order. The queue of a removed hook is among them as long as something refers to the hook: a
    # call, or a failure that no call has raised yet.
    _queues: WeakKeyDictionary[CallQueue, None] = field(
        default_factory=WeakKeyDictionary["CallQueue", None]
    )

    def make_call(self, registered: RegisteredHook, method: str) -> HookCall:
        """Return the call of a hook's method, which queues it if it is a background hook.

        That call waits for a place in the queue. Its condition queues the call itself if there is a
        place, so that most calls need no task. The time limit and `disable_after` of the hook apply
        when the queue makes the call.
        """
        if not registered.registration.background:
            return hook_call(registered, method)
        queue = registered.queue
        if queue is None:
            queue = registered.queue = CallQueue(registered, self)
            self._queues[queue] = None
        group = OrderGroup(method, [registered], self.grace_secs, kind="background")
        return HookCall(
            group.calls[0].name,
            functools.partial(queue.call, group),
            condition=functools.partial(queue.has_to_wait, group),
            queue=queue,
        )

    async def drain(self, hooks: Iterable[RegisteredHook]) -> None:
        """Wait until the queues of hooks are empty. Their failures are raised by the next call.

        The queue of the call of which this is a part is left out.
        """
        for registered in hooks:
            queue = registered.queue
            if queue is not None and queue is not _current_queue.get():
                await queue.drain()

    async def finish(self, secs: float) -> None:
        """Wait until all queues are empty, at most `secs`, and drop the calls that are left."""
        queues = [*self._queues]
        try:
            await wait_done([queue.when_empty() for queue in queues], secs)
        finally:  # also if this is cancelled
            for queue in queues:
                queue.drop()
        # The active calls are cancelled now, and have the grace period to end.
        await wait_done([queue.when_empty() for queue in queues], None)

    async def end(self, secs: float) -> list[BaseException]:
        """Close all queues, finish them, and return the failures that no call has raised."""
        queues = [*self._queues]
        for queue in queues:
            queue.is_closed = True
        await self.finish(secs)
        return [error for queue in queues for error in queue.take_failures()]


class CallQueue(Queue["QueuedCall"]):
    """The queued calls of one hook.

    Each runs in a task of its own, in a copy of its caller's context, when the previous call has
    ended.
    """

    def __init__(self, registered: RegisteredHook, shared: BackgroundCalls) -> None:
        # Not the hook itself: it would keep its queue, and so itself.
        name = f"background calls of {registered.name}"
        super().__init__(name, registered.registration.max_pending)
        self.shared: BackgroundCalls = shared
        self.is_closed: bool = False
        """Whether calls are refused, because nothing would wait for them any more."""

    @property
    def is_full(self) -> bool:
        # Code of a background call gets a place: its own queue would wait for itself, and others
        # may wait for that.
        return super().is_full and _current_queue.get() is None

    def has_to_wait(
        self,
        group: OrderGroup,
        /,
        *args: Any,
        **keywords: Any,
    ) -> bool:
        """Queue the call if there is a place. Return whether the caller has to wait for one.

        Raises:
            HookGroupClosedError: as for `call`.
        """
        return not self.put_nowait(QueuedCall(self, group, args, keywords))

    async def call(
        self,
        group: OrderGroup,
        /,
        *args: Any,
        **keywords: Any,
    ) -> None:
        """Queue a call; wait while the queue is full, but not beyond a stop of the session.

        Raises:
            HookGroupClosedError: the group was left after the call of which this is a part had
                begun.
        """
        await self.put(QueuedCall(self, group, args, keywords))

    def add(self, item: QueuedCall) -> None:
        if self.is_closed:
            item.group.hooks[0].dropped += 1
            raise HookGroupClosedError(
                f"the {self.name} are not queued any more: the group has been left"
            )
        super().add(item)

    def drop(self) -> None:
        """Drop the queued calls and cancel the active one."""
        if not self.items:
            return
        logger.warning("%s %s are left, and are dropped", len(self.items), self.name)
        while len(self.items) > 1:
            queued = self.items.pop()
            queued.group.hooks[0].dropped += 1
        active = self.items[0].task
        assert active is not None, "the first call of a queue has a task"
        active.cancel()

    def begin(self, item: QueuedCall) -> None:
        # Otherwise, it starts when the calls before it have ended.
        if not self.items:
            self._start(item)

    def _start(self, call: QueuedCall) -> None:
        # It begins later, also if tasks are eager: a call is not made inside of another one.
        name = call.group.calls[0].name
        call.task = new_task(call.make(), name, call.context)
        call.task.add_done_callback(self._call_ended)

    def _call_ended(self, task: asyncio.Task[None]) -> None:
        active = self.items[0]
        error: BaseException | None = None
        if task.cancelled():
            # By `drop`.
            active.group.hooks[0].dropped += 1
        else:
            error = task.exception()
        self.ended([active], error)
        if self.items:
            self._start(self.items[0])


@dataclass(eq=False)
class QueuedCall:
    """A call in a queue, with the context in which it is made."""

    queue: CallQueue
    group: OrderGroup
    args: Args
    keywords: Keywords
    context: Context = field(default_factory=copy_context)
    task: asyncio.Task[None] | None = None
    """The task that makes the call, or None before."""

    def __post_init__(self) -> None:
        self.context.run(self.queue.shared.enter)

    async def make(self) -> None:
        """Make the call."""
        # It is not part of the run that has queued it.
        leave_run()
        _current_queue.set(self.queue)
        shared = self.queue.shared
        step = shared.step_of(*self.args, **self.keywords)
        await call_groups(
            (self.group,),
            self.args,
            self.keywords,
            step=step,
            observers=shared.observers,
        )


_current_queue: ContextVar[CallQueue | None] = ContextVar("aiohooks_current_queue", default=None)
"""The queue of the background call that the code is part of.

A task that a call starts keeps it, also when the call has ended.
"""
