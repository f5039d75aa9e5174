"""The nine places in which an operation is run and cancelled, each with its own way of cancelling.

A wrapper runs `probe.run(operation)` and sets `probe.own`. Its `violations` are what the caller of the wrapper must not see: a
count that the library has changed, or a cancel that it has replaced by another one, shows in `asyncio.timeout`, in anyio's
scopes and so on. The checks of the operation itself are those of the probe and do not depend on the wrapper.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup as AnyioTaskGroup

from tests.fuzz.cancel_sweep.probe import HARNESS, CountingTask, Probe

Operation = Callable[[], Awaitable[None]]

FAR_SECS = 3600.0


class SiblingError(Exception):
    """The failure of a sibling task, upon which its group cancels the operation."""


class Wrapper:
    """One place; a new object for every run."""

    name: ClassVar[str]

    in_child: ClassVar[bool] = False
    """Whether the operation runs in a task of its own."""

    def __init__(self, probe: Probe, operation: Operation, stale: int = 0) -> None:
        self.probe = probe
        self.operation = operation
        self.stale = 0 if self.in_child else stale
        """Cancels that the task has swallowed before, as tasks do; they must make no difference."""
        self.root: CountingTask
        self.ended: BaseException | None = None
        self.cancelling = 0
        self.next_await_raised = False

    async def wrap(self) -> None:
        """Run the operation inside the wrapper."""
        raise NotImplementedError

    async def root_main(self) -> None:
        """Run the operation in the root task, and record what its caller sees."""
        root = asyncio.current_task()
        assert isinstance(root, CountingTask)
        self.root = root
        for _ in range(self.stale):
            root.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        try:
            await self.wrap()
        except BaseException as error:
            self.ended = error
        self.cancelling = root.cancelling() - self.stale
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.next_await_raised = True

    def cancel_root(self) -> None:
        """Cancel the task that waits for the operation's."""
        if self.root.cancel():
            self.probe.direct[self.root] = self.probe.direct.get(self.root, 0) + 1

    def violations(self) -> list[str]:
        """Return what the caller saw and must not see."""
        found: list[str] = []
        cancels = self.probe.direct.get(self.root, 0)
        cancelled = isinstance(self.ended, asyncio.CancelledError)
        if self.cancelling != cancels and not self.may_miscount():
            found.append(f"cancel count around {self.name}: cancelling() is {self.cancelling} after {cancels} cancel(s)")
        if cancels and not cancelled and not self.next_await_raised and not self.may_swallow():
            found.append(f"cancellation around {self.name}: the caller was cancelled, and {self.name} ended with {self.ended!r}")
        if not cancels and cancelled and not self.passes_childs_cancel():
            found.append(f"cancellation around {self.name}: CancelledError, and the caller was not cancelled")
        if not cancels and self.next_await_raised and not self.may_leave_a_stray_cancel():
            found.append(f"cancellation around {self.name}: the next await raised a stray CancelledError")
        return found

    def may_swallow(self) -> bool:
        """Whether this wrapper itself, on this Python, may lose a cancel of the caller."""
        return False

    def may_miscount(self) -> bool:
        """Whether this wrapper itself, on this Python, may leave `cancelling()` too high."""
        return False

    def may_leave_a_stray_cancel(self) -> bool:
        """Whether this wrapper itself, on this Python, may leave a stray cancel behind."""
        return False

    def passes_childs_cancel(self) -> bool:
        """Whether a cancel of the operation's own task legitimately comes out here."""
        return False

    def operation_was_cancelled(self) -> bool:
        return isinstance(self.probe.outcome, asyncio.CancelledError)


class Bare(Wrapper):
    name = "bare"

    async def wrap(self) -> None:
        await self.probe.run(self.operation)


class Timeout(Wrapper):
    name = "timeout"
    depth: ClassVar[int] = 1

    async def wrap(self) -> None:
        self.timeouts: list[asyncio.Timeout] = []
        self.probe.own = self.expire
        await self.nested(self.depth)

    async def nested(self, depth: int) -> None:
        if depth == 0:
            await self.probe.run(self.operation)
            return
        async with asyncio.timeout(None) as timeout:
            self.timeouts.append(timeout)
            await self.nested(depth - 1)

    def expire(self, number: int) -> None:
        """Let one or both expire at the next tick, in turns."""
        now = asyncio.get_running_loop().time()
        for index, timeout in enumerate(self.timeouts):
            if not timeout.expired() and (self.depth == 1 or number % 3 in (index, 2)):
                timeout.reschedule(now)

    def violations(self) -> list[str]:
        found = super().violations()
        expired = any(timeout.expired() for timeout in self.timeouts)
        cancels = self.probe.direct.get(self.root, 0)
        if expired and not cancels and self.operation_was_cancelled() and not isinstance(self.ended, TimeoutError):
            found.append(f"cancel count around {self.name}: it expired, and {self.ended!r} came out")
        if not expired and type(self.ended) is TimeoutError and self.ended is not self.probe.outcome:
            found.append(f"cancel count around {self.name}: {self.ended!r}, and it had not expired")
        return found

    def may_leave_a_stray_cancel(self) -> bool:
        # Before 3.13 `uncancel()` did not take back a cancel that was not delivered yet (PR 117407), so an operation that
        # ends normally in the very tick of the expiry leaves it behind.
        return sys.version_info < (3, 13) and self.probe.outcome is None


class TimeoutTwice(Timeout):
    name = "timeout x2"
    depth = 2


class TaskGroup(Wrapper):
    name = "TaskGroup"
    in_child = True
    depth: ClassVar[int] = 1

    async def wrap(self) -> None:
        self.siblings: list[asyncio.Future[None]] = []
        self.probe.own = self.fail_sibling
        await self.nested(self.depth)

    async def nested(self, depth: int) -> None:
        if depth == 0:
            try:
                await self.probe.run(self.operation)
            finally:
                for sibling in self.siblings:
                    if not sibling.done():
                        sibling.set_result(None)
            return
        async with asyncio.TaskGroup() as group:
            end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.siblings.append(end)
            group.create_task(_await(end), name=f"{HARNESS} sibling")
            if depth > 1:
                await self.nested(depth - 1)
            else:
                group.create_task(self.nested(0), name=f"{HARNESS} operation")

    def fail_sibling(self, number: int) -> None:
        """Let a sibling fail, or cancel the task that owns the groups, in turns."""
        which = number % (self.depth + 1)
        if which == self.depth:
            self.cancel_root()
        elif not self.siblings[which].done():
            self.siblings[which].set_exception(SiblingError())

    def may_swallow(self) -> bool:
        # gh-116720: a group that fails while its parent is cancelled loses the cancel; fixed in 3.13.
        return sys.version_info < (3, 13) and isinstance(self.ended, BaseExceptionGroup)

    def may_miscount(self) -> bool:
        # The same: a group whose child fails cancels its own parent, and before 3.13 took that back only if the parent was
        # still inside the block.
        return self.may_swallow()

    def may_leave_a_stray_cancel(self) -> bool:
        return self.may_swallow()


class TaskGroupTwice(TaskGroup):
    name = "nested TaskGroup"
    depth = 2


class WaitFor(Wrapper):
    name = "wait_for"
    in_child = sys.version_info < (3, 12)

    async def wrap(self) -> None:
        self.probe.own = lambda _: self.cancel_root()
        if sys.version_info >= (3, 12):
            await asyncio.wait_for(self.probe.run(self.operation), FAR_SECS)
            return
        # In 3.11 the operation has a task of its own, which a second cancel of the caller leaves running alone.
        inner = asyncio.get_running_loop().create_task(self.probe.run(self.operation), name=f"{HARNESS} operation")
        try:
            await asyncio.wait_for(inner, FAR_SECS)
        finally:
            await _end_of(inner)

    def may_swallow(self) -> bool:
        # gh-86296: a result and a cancel in one tick, and the cancel is gone; fixed by the new one of 3.12. An
        # exception in the place of the result goes the same way.
        return sys.version_info < (3, 12)

    def passes_childs_cancel(self) -> bool:
        # In 3.11 again: a waiter of a cancelled task gets its CancelledError.
        return sys.version_info < (3, 12) and self.operation_was_cancelled()


class Shield(Wrapper):
    name = "shield"
    in_child = True

    async def wrap(self) -> None:
        self.probe.own = lambda _: self.cancel_root()
        inner = asyncio.get_running_loop().create_task(self.probe.run(self.operation), name=f"{HARNESS} operation")
        try:
            await asyncio.shield(inner)
        finally:
            await _end_of(inner)

    def passes_childs_cancel(self) -> bool:
        return self.operation_was_cancelled()

    def may_swallow(self) -> bool:
        # The first cancel ends the wait for the shield; `_end_of` above keeps a second one.
        return self.probe.direct.get(self.root, 0) > 1


class AnyioGroup(Wrapper):
    name = "anyio task group"
    in_child = True
    scope_cancels = 0

    async def wrap(self) -> None:
        async with anyio.create_task_group() as group:
            self.group: AnyioTaskGroup = group
            self.probe.own = self.cancel_scope
            group.start_soon(self.probe.run, self.operation, name=f"{HARNESS} operation")

    def cancel_scope(self, number: int) -> None:
        """Cancel the group's scope, or the task that owns the group, in turns."""
        if number % 2:
            self.scope_cancels += 1
            self.group.cancel_scope.cancel()
        else:
            self.cancel_root()

    def may_swallow(self) -> bool:
        # anyio 4 lets the errors of the group's tasks win over a native cancel of the task that holds the group; and of a
        # native cancel that meets a second cancel, of either kind, it may make its scope's own. Children in
        # `move_on_after(0)` show both without any code of ours.
        cancels = self.scope_cancels + self.probe.direct.get(self.root, 0)
        return isinstance(self.ended, BaseExceptionGroup) or cancels > 1

    def may_miscount(self) -> bool:
        # anyio 4 answers a native cancel of that task by cancelling the group's scope, and at the end takes back one cancel too
        # many if a child was still busy; without any code of ours: a child in `move_on_after(0)` shows it. The operation has
        # a task of its own here, so the count of this one is none of the library's doing.
        return True


class AnyioMoveOn(Wrapper):
    name = "anyio move_on_after"

    async def wrap(self) -> None:
        with anyio.move_on_after(FAR_SECS) as scope:
            self.scope: CancelScope = scope
            self.probe.own = lambda _: scope.cancel()
            await self.probe.run(self.operation)

    def violations(self) -> list[str]:
        found = super().violations()
        called, cancels = self.scope.cancel_called, self.probe.direct.get(self.root, 0)
        if called and not cancels and self.operation_was_cancelled() and not self.scope.cancelled_caught:
            found.append(f"cancellation around {self.name}: the scope did not know its own cancel again, {self.ended!r} came out")
        return found


WRAPPERS: tuple[type[Wrapper], ...] = (
    Bare, Timeout, TimeoutTwice, TaskGroup, TaskGroupTwice, WaitFor, Shield, AnyioGroup, AnyioMoveOn,
)  # fmt: skip


async def _await(future: asyncio.Future[Any]) -> None:
    await future


async def _end_of(task: asyncio.Task[Any]) -> None:
    """Wait for a task that the wrapper has abandoned, and retrieve its exception."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
    if not task.cancelled():
        task.exception()
