"""Background calls: calls that the caller does not wait for.

Each hook that is registered with `background=True` has a bounded queue. Its calls are made one
after another, alongside the code that follows, and the queue is emptied when the group or session
ends.

    BackgroundCalls   the queues of all background hooks of one group or session
    CallQueue         the queue of one hook
    QueuedCall        a call in a queue
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

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
from aiohooks.dispatch.points import Args, Keywords
from aiohooks.errors import HookGroupClosedError


@dataclass
class BackgroundCalls:
    """The queues of all background hooks of one group or session."""

    grace_secs: float
    """How long cancelled calls may take to end."""
    enter: Callable[[], object] = lambda: None
    """Prepares the context of a call: it is called in this context when the call is queued. A
    session makes its graph current there.
    """
    observers: Sequence[Observer] = ()
    """The observers that are notified of each call."""
    step_of: Callable[..., int | None] = lambda *_, **__: None
    """Returns the step for the notes of errors. It gets the arguments of the call."""
    is_closed: bool = False
    """Whether calls are rejected: the group was left, and nothing would wait for them."""
    unfinished: dict[CallQueue, None] = field(default_factory=dict["CallQueue", None])
    """The queues with calls that have not ended, or with failures that no call has raised. A queue
    may be the last trace of a hook that was removed.
    """

    def make_call(self, registered: RegisteredHook, method: str) -> HookCall:
        """Return the call of a hook's method. For a background hook, this is a call that queues
        the hook's call.

        Usually there is a place in the queue, and the caller needs no task. Only if the queue is
        full, the caller's call gets a task, and waits for a place. The time limit and
        `disable_after` of the hook apply when the queue makes the call of the hook.
        """
        if not registered.registration.background:
            return hook_call(registered, method)
        if registered.queue is None:
            registered.queue = CallQueue(registered, self)
        queue: CallQueue = registered.queue
        # The job: the call of the hook, which the queue makes later.
        job = hook_call(registered, method)
        group = OrderGroup([job], self.grace_secs, kind="background")
        # The call that the caller makes. First its condition tries to queue the job. If there is no
        # place, the condition is true, and its function waits for one.
        return HookCall(
            registered,
            job.name,
            function=functools.partial(queue.queue, group),
            condition=functools.partial(queue.is_left_unqueued, group),
            queue=queue,
        )

    async def drain(self, hooks: Iterable[RegisteredHook]) -> None:
        """Wait until the queues of hooks are empty. Their failures are raised by the next call.

        If this is called in a background call, the queue of that call is left out: it cannot become
        empty before the call ends.
        """
        for registered in hooks:
            queue = registered.queue
            if queue is not None and queue is not _current_queue.get():
                await queue.drain()

    async def finish(self, secs: float) -> None:
        """Wait until all queues are empty, at most `secs`, and drop the calls that are left."""
        queues = [*self.unfinished]
        try:
            await wait_done([queue.when_empty() for queue in queues], secs)
        finally:
            # Calls are dropped also if this wait is cancelled.
            for queue in queues:
                queue.drop()
        # `drop` has cancelled the active calls. This wait needs no limit: after the grace period,
        # `call_groups` leaves a call that ignores its cancellation behind.
        await wait_done([queue.when_empty() for queue in queues], None)

    async def end(self, secs: float) -> list[BaseException]:
        """Close all queues, finish them, and return the failures that no call has raised."""
        self.is_closed = True
        await self.finish(secs)
        failures: list[BaseException] = []
        for queue in [*self.unfinished]:
            failures += queue.take_failures()
        return failures


class CallQueue(Queue["QueuedCall"]):
    """The queued calls of one hook.

    Each runs in a task of its own, in a copy of its caller's context, when the previous call has
    ended.
    """

    def __init__(self, registered: RegisteredHook, shared: BackgroundCalls) -> None:
        # Only the name and the limit: a queue that referred to the hook would refer to itself, as
        # the hook refers to its queue.
        name = f"background calls of {registered.name}"
        super().__init__(name, registered.registration.max_pending)
        self.shared: BackgroundCalls = shared

    @property
    def is_full(self) -> bool:
        # Code that is part of a background call never waits for a place. In its own queue, it would
        # wait for itself. In another queue, it might wait for a call that waits for its own queue.
        return super().is_full and _current_queue.get() is None

    def is_left_unqueued(
        self,
        group: OrderGroup,
        /,
        *args: Any,
        **keywords: Any,
    ) -> bool:
        """Queue a job if there is a place. Return whether it could not be queued.

        This is the `HookCall.condition` of a background hook, and `queue` below is its
        `HookCall.function`. So a caller awaits `queue` only if this returns true.

        Raises:
            HookGroupClosedError: the group was left, as for `queue`.
        """
        return not self.put_nowait(QueuedCall(self, group, args, keywords))

    async def queue(
        self,
        group: OrderGroup,
        /,
        *args: Any,
        **keywords: Any,
    ) -> None:
        """Queue a job. Wait while the queue is full, but not beyond a stop of the session.

        Raises:
            HookGroupClosedError: the group was left while the call of a method that this is part of
                was still running.
        """
        await self.put(QueuedCall(self, group, args, keywords))

    def add(self, item: QueuedCall) -> None:
        if self.shared.is_closed:
            item.group.hooks[0].dropped += 1
            raise HookGroupClosedError(
                f"the {self.name} are not queued any more: the group has been left"
            )
        super().add(item)
        self.shared.unfinished[self] = None

    def take_failures(self, count: int = sys.maxsize) -> list[BaseException]:
        failures = super().take_failures(count)
        self._release()
        return failures

    def _release(self) -> None:
        """Let the group or session forget this queue, if nothing is left of its calls."""
        if not self.items and not self.failures:
            self.shared.unfinished.pop(self, None)

    def drop(self) -> None:
        """Drop the queued calls and cancel the active one."""
        if not self.items:
            return
        logger.warning("%s %s are left, and are dropped", len(self.items), self.name)
        # The first call is active. It stays in the queue until its task has ended.
        while len(self.items) > 1:
            queued = self.items.pop()
            queued.group.hooks[0].dropped += 1
        active = self.items[0].task
        assert active is not None, "the first call of a queue has a task"
        active.cancel()

    def begin(self, item: QueuedCall) -> None:
        # This is called before the item is added. If there are calls before it, `_call_ended`
        # starts it when they have ended.
        if not self.items:
            self._start(item)

    def _start(self, call: QueuedCall) -> None:
        # `new_task` makes a task that begins later, even if the loop makes eager tasks: the call
        # must not begin inside the code that queues it.
        name = call.group.calls[0].name
        call.task = new_task(call.make(), name, call.context)
        call.task.add_done_callback(self._call_ended)

    def _call_ended(self, task: asyncio.Task[None]) -> None:
        active = self.items[0]
        error: BaseException | None = None
        if task.cancelled():
            # `drop` has cancelled the call.
            active.group.hooks[0].dropped += 1
        else:
            error = task.exception()
        self.ended([active], error)
        if self.items:
            self._start(self.items[0])
        self._release()


@dataclass(eq=False)
class QueuedCall:
    """A call in a queue, with the context in which it is made: a copy of its caller's."""

    queue: CallQueue
    group: OrderGroup
    """The group of the only hook that is called."""
    args: Args
    keywords: Keywords
    context: Context = field(default_factory=copy_context)
    task: asyncio.Task[None] | None = None
    """The task that makes the call, or None before."""

    def __post_init__(self) -> None:
        self.context.run(self.queue.shared.enter)

    async def make(self) -> None:
        """Call the hook with the queued arguments. This runs in the context of the queued call."""
        # That is a copy of the context of a run, which may have ended.
        leave_run()
        # If the hook queues calls itself, they must not wait for a place: see `is_full`.
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
"""The queue of the background call that the current code is part of, or None.

A task that a background call starts keeps this value in its context, even when the call has ended.
"""
