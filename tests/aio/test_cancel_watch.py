"""Which cancel comes from outside, and coroutines that are thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import inspect

import pytest

import aiohooks as ah
from aiohooks._aio.cancel import CancelScope
from aiohooks._aio.cancel_watch import CancelWatch, ScopeReason, drive
from tests.support.checks import refused
from tests.support.hooks import RequestingHook
from tests.support.sessions import double

pytestmark = pytest.mark.every_python


class CancelsItself(ah.SessionRunHook):
    """Suspends in each phase of a run, and raises a cancel of its own in one of them."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    async def _act(self, phase: str) -> None:
        await asyncio.sleep(0)
        if phase == self.phase:
            raise asyncio.CancelledError("not from outside")

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await self._act("before_run")

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await self._act("after_run")


@pytest.mark.parametrize("phase", ["before_run", "after_run"])
async def test_a_cancel_of_a_later_phase_is_judged_by_itself(phase: str) -> None:
    """What was awaited before has settled its cancels; a hook's own CancelledError is never taken for one from outside."""
    with refused(ah.errors.HookCancelledError, f"CancelsItself.{phase}"):
        async with ah.AsyncMonitoredSession(double, [CancelsItself(phase), RequestingHook(None)]) as session:
            await session.run("loss")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_nothing_comes_from_outside_while_nothing_suspends() -> None:
    """A coroutine that has never suspended got no cancel, whatever it raises."""
    watch = CancelWatch()

    async def raises() -> None:
        raise asyncio.CancelledError("its own")

    with pytest.raises(asyncio.CancelledError, match="its own") as raised:
        await drive(raises(), watch)
    assert watch.outside_cancel(raised.value) is None
    assert watch.outside_cancel(None) is None
    assert watch.counted([0, 0]) == 2


@pytest.mark.parametrize(("reason", "is_outside"), [("of a block", True), (ScopeReason("of an overlap"), False)])
async def test_a_new_error_for_a_cancel_that_was_swallowed(reason: str, is_outside: bool) -> None:
    """Blocks may raise a new error for a cancel from outside; an overlap whose run was interrupted raises one of its own.

    Code inside may have swallowed the interrupt and left the cancel count too high, as task groups did before 3.13.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = CancelWatch()

    async def swallows_and_raises_another() -> None:
        asyncio.get_running_loop().call_soon(task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        raise asyncio.CancelledError(reason) from None

    with pytest.raises(asyncio.CancelledError) as raised:
        await drive(swallows_and_raises_another(), watch)
    assert raised.value.__context__ is None
    assert watch.outside_cancel(raised.value) is (raised.value if is_outside else None)
    assert task.uncancel() == 0


class Settling:
    """A block that absorbs a cancel while it is being left."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()


async def test_the_cancel_from_outside_is_found_behind_those_of_the_scope() -> None:
    """The scope has cancelled twice, and then a third party has; blocks that were being left have kept the first cancel."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    watch = CancelWatch()
    scope = CancelScope(task, watch)

    async def cancelled_three_times() -> None:
        loop.call_soon(scope.cancel, "first")
        try:
            await loop.create_future()
        except asyncio.CancelledError as error:
            first = error
        loop.call_soon(scope.cancel_again, "second")
        async with Settling():
            pass
        loop.call_soon(task.cancel, "from outside")
        async with Settling():
            pass
        raise first

    with pytest.raises(asyncio.CancelledError, match="first") as raised:
        await drive(cancelled_three_times(), watch)
    outside = scope.uncancel(raised.value)
    assert outside is not None
    assert outside.args == ("from outside",)
    assert task.uncancel() == 0


async def test_a_driven_coroutine_is_closed_with_its_caller() -> None:
    """A caller that is thrown away closes what it awaits, and nothing is awaited any more."""
    events: list[str] = []

    async def inner() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            events.append("closed")

    driven = inner()  # which something else may refer to as well

    async def outer() -> None:
        watch = CancelWatch()
        await drive(driven, watch)

    coro = outer()
    coro.send(None)
    coro.close()
    assert events == ["closed"]
    assert inspect.getcoroutinestate(driven) == inspect.CORO_CLOSED
