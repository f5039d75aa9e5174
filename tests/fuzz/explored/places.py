"""The nine places in which an operation is run and cancelled, each with its own way of cancelling.

A place runs `probe.run(operation)`, and its own way may happen meanwhile. Its `violations` are what
the caller of the place must not see: a count that the library has changed, or a cancel that it has
replaced by another one, shows in `asyncio.timeout`, in anyio's scopes and so on. The checks of the
operation itself are those of the probe and do not depend on the place.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import anyio
from anyio import CancelScope

from aiohooks.testing import may_happen
from tests.fuzz.explored.harness import HARNESS, Probe

Operation = Callable[[], Awaitable[None]]

FAR_SECS = 1e6


class SiblingError(Exception):
    """The failure of a sibling task, upon which its group cancels the operation."""


class Place:
    """One place; a new object for every run. This one is the task of the program itself."""

    in_child: ClassVar[bool] = False
    """Whether the operation runs in a task of its own."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.ended: BaseException | None = None
        self.cancels = self.cancelling = 0
        """How often the caller was cancelled, and how much its count has grown."""
        self.stray = False
        """Whether the next await raised, without another cancel."""

    async def wrap(self, operation: Operation) -> None:
        """Run the operation in the place."""
        await self.probe.run(operation)

    def happens(self, event: Callable[[], bool]) -> Any:
        """Return a context in which the place's own way of cancelling may happen."""

        def counted() -> bool:
            happened = self.probe.running and event()
            self.probe.events += happened
            return happened

        return may_happen(counted, type(self).__name__)

    def violations(self) -> list[str]:
        """Return what the caller saw and must not see."""
        found: list[str] = []
        name, cancels, cancelled = (
            type(self).__name__,
            self.cancels,
            isinstance(self.ended, asyncio.CancelledError),
        )
        allowed = self.allowed()
        if self.cancelling != cancels and "miscounted" not in allowed:
            found.append(
                f"cancel count around {name}: cancelling() is {self.cancelling} after {cancels}"
                " cancel(s)"
            )
        if cancels and not cancelled and not self.stray and "swallowed" not in allowed:
            found.append(
                f"cancellation around {name}: the caller was cancelled, and {name} ended with"
                f" {self.ended!r}"
            )
        if not cancels and cancelled and "child's" not in allowed:
            found.append(
                f"cancellation around {name}: CancelledError, and the caller was not cancelled"
            )
        if not cancels and self.stray and "stray" not in allowed:
            found.append(
                f"cancellation around {name}: the next await raised a stray CancelledError"
            )
        return found

    def allowed(self) -> set[str]:
        """Return what this place itself, on this Python, may do to cancels.

        A cancel of the caller is swallowed, cancels are miscounted, a stray one is left behind, or
        the child's comes out here.
        """
        return set()

    def operation_was_cancelled(self) -> bool:
        return isinstance(self.probe.outcome, asyncio.CancelledError)


class Timeout(Place):
    depth: ClassVar[int] = 1

    async def wrap(self, operation: Operation) -> None:
        self.timeouts: list[asyncio.Timeout] = []
        await self.nested(self.depth, operation)

    async def nested(self, depth: int, operation: Operation) -> None:
        if depth == 0:
            await self.probe.run(operation)
            return
        async with asyncio.timeout(None) as timeout:
            self.timeouts.append(timeout)

            def expire() -> bool:
                could = not timeout.expired() and timeout.when() is None
                if could:
                    timeout.reschedule(asyncio.get_running_loop().time())
                return could

            with self.happens(expire):
                await self.nested(depth - 1, operation)

    def violations(self) -> list[str]:
        found, name = super().violations(), type(self).__name__
        expired = any(timeout.expired() for timeout in self.timeouts)
        if (
            expired
            and not self.cancels
            and self.operation_was_cancelled()
            and not isinstance(self.ended, TimeoutError)
        ):
            found.append(f"cancel count around {name}: it expired, and {self.ended!r} came out")
        if (
            not expired
            and type(self.ended) is TimeoutError
            and self.ended is not self.probe.outcome
        ):
            found.append(f"cancel count around {name}: {self.ended!r}, and it had not expired")
        return found

    def allowed(self) -> set[str]:
        # Before 3.13 `uncancel()` did not take back a cancel that was not delivered yet (PR
        # 117407), so an operation that ends normally in the very tick of the expiry leaves it
        # behind.
        return {"stray"} if sys.version_info < (3, 13) and self.probe.outcome is None else set()


class TimeoutTwice(Timeout):
    depth = 2


class TaskGroup(Place):
    in_child = True
    depth: ClassVar[int] = 1

    async def wrap(self, operation: Operation) -> None:
        self.siblings: list[asyncio.Future[None]] = []
        await self.nested(self.depth, operation)

    async def nested(self, depth: int, operation: Operation) -> None:
        if depth == 0:
            try:
                await self.probe.run(operation)
            finally:
                for sibling in self.siblings:
                    if not sibling.done():
                        sibling.set_result(None)
            return
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.siblings.append(end)

        def fail() -> bool:
            could = not end.done()
            if could:
                end.set_exception(SiblingError())
                end.exception()  # the sibling may be cancelled before it gets it
            return could

        with self.happens(fail):
            async with asyncio.TaskGroup() as group:
                group.create_task(_await(end), name=f"{HARNESS} sibling")
                if depth > 1:
                    await self.nested(depth - 1, operation)
                else:
                    group.create_task(self.nested(0, operation), name=f"{HARNESS} operation")

    def allowed(self) -> set[str]:
        # gh-116720: a group that fails while its parent is cancelled loses the cancel; fixed in
        # 3.13. A group whose child fails cancels its own parent, and before 3.13 took that back
        # only if the parent was still inside the block. Of two cancels around a group in a group
        # that fails, 3.13 loses the second one, too.
        loses = sys.version_info < (3, 13) or (self.depth > 1 and self.cancels > 1)
        failed = loses and isinstance(self.ended, BaseExceptionGroup)
        return {"swallowed", "miscounted", "stray"} if failed else set()


class TaskGroupTwice(TaskGroup):
    depth = 2


class Shield(Place):
    in_child = True

    async def wrap(self, operation: Operation) -> None:
        inner = asyncio.get_running_loop().create_task(
            self.probe.run(operation), name=f"{HARNESS} operation"
        )
        try:
            await self.wait(inner)
        finally:
            await _end_of(inner)

    async def wait(self, inner: asyncio.Task[None]) -> None:
        await asyncio.shield(inner)

    def allowed(self) -> set[str]:
        # The first cancel ends the wait for the shield; `_end_of` above keeps a second one.
        swallowed = {"swallowed"} if self.cancels > 1 else set[str]()
        return swallowed | ({"child's"} if self.operation_was_cancelled() else set())


class WaitFor(Shield):
    in_child = sys.version_info < (3, 12)

    async def wrap(self, operation: Operation) -> None:
        if sys.version_info < (3, 12):
            # The operation has a task of its own, which a second cancel of the caller leaves
            # running alone.
            await super().wrap(operation)
        else:
            await asyncio.wait_for(self.probe.run(operation), FAR_SECS)

    async def wait(self, inner: asyncio.Task[None]) -> None:
        await asyncio.wait_for(inner, FAR_SECS)

    def allowed(self) -> set[str]:
        # gh-86296: a result and a cancel in one tick, and the cancel is gone; fixed by the new one
        # of 3.12. An exception in the place of the result goes the same way.
        return {"swallowed", *super().allowed()} if sys.version_info < (3, 12) else set()


class AnyioGroup(Place):
    in_child = True
    scope_cancels = 0

    async def wrap(self, operation: Operation) -> None:
        def cancel_scope() -> bool:
            self.scope_cancels += 1
            group.cancel_scope.cancel()
            return True

        with self.happens(cancel_scope):
            async with anyio.create_task_group() as group:
                group.start_soon(self.probe.run, operation, name=f"{HARNESS} operation")

    def allowed(self) -> set[str]:
        # anyio 4 lets the errors of the group's tasks win over a native cancel of the task that
        # holds the group; of a native cancel that meets a second cancel, of either kind, it may
        # make its scope's own. It answers a native cancel by cancelling the scope, and at the end
        # takes back one cancel too many if a child was still busy. Children in `move_on_after(0)`
        # show all that without any code of ours. The operation has a task of its own here, so the
        # count of this one is none of the library's doing.
        lost = isinstance(self.ended, BaseExceptionGroup) or self.scope_cancels + self.cancels > 1
        return {"miscounted", *(["swallowed"] if lost else [])}


class AnyioMoveOn(Place):
    async def wrap(self, operation: Operation) -> None:
        with anyio.move_on_after(FAR_SECS) as scope:
            self.scope: CancelScope = scope
            with self.happens(lambda: scope.cancel() is None):
                await self.probe.run(operation)

    def violations(self) -> list[str]:
        found = super().violations()
        if (
            self.scope.cancel_called
            and not self.cancels
            and self.operation_was_cancelled()
            and not self.scope.cancelled_caught
        ):
            found.append(
                f"cancellation: the scope did not know its own cancel again, {self.ended!r}"
                " came out"
            )
        return found


PLACES: tuple[type[Place], ...] = (
    Place,
    Timeout,
    TimeoutTwice,
    TaskGroup,
    TaskGroupTwice,
    WaitFor,
    Shield,
    AnyioGroup,
    AnyioMoveOn,
)


async def _await(future: asyncio.Future[Any]) -> None:
    await future


async def _end_of(task: asyncio.Task[Any]) -> None:
    """Wait for a task that the place has abandoned, and retrieve its exception."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
    if not task.cancelled():
        task.exception()
