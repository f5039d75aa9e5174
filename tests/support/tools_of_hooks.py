"""Tools that hooks use around what they do: they cancel the task for themselves, or leave its
cancel count too high.

Each awaits `act` once, after its own cancel or inside its block, and what `act` raises comes out as
it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable

import anyio

import aiohooks as ah
from tests.support.waiting import forever

Act = Callable[[], Awaitable[None]]
Tool = Callable[[Act], Awaitable[None]]


class ToolError(Exception):
    """A failure inside of a tool, which the tool's user handles."""


async def fail() -> None:
    raise ToolError


async def no_tool(act: Act) -> None:
    await act()


async def failed_group(act: Act) -> None:
    """A child fails while the group is being left: before Python 3.13 the cancel count stays one
    too high.
    """
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
    await act()


async def interrupted_group(act: Act) -> None:
    """A child fails while the block waits."""
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await forever()
    await act()


async def inside_group(act: Act) -> None:
    """What the block raises is taken out of the group's error; its context is kept."""
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            await act()
    except ExceptionGroup as error:
        (failure,) = error.exceptions
    if failure is not None:
        raise failure


async def expired_timeout(act: Act) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await forever()
    await act()


async def inside_timeout(act: Act) -> None:
    async with asyncio.timeout(3600):
        await act()


async def left_cancel(act: Act) -> None:
    """What async_timeout 4 does: it cancels the task, and never takes that back."""
    task = asyncio.current_task()
    assert task is not None
    cancelled: list[bool] = []
    timer = asyncio.get_running_loop().call_soon(lambda: cancelled.append(task.cancel()))
    try:
        await forever()
    except asyncio.CancelledError:
        if not cancelled:
            raise
    finally:
        timer.cancel()
    await act()


async def cancelled_scope(act: Act) -> None:
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        await forever()
    await act()


async def inside_scope(act: Act) -> None:
    with anyio.CancelScope(), anyio.move_on_after(3600):
        await act()


async def failed_anyio_group(act: Act) -> None:
    with contextlib.suppress(ExceptionGroup):
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            await forever()
    await act()


class Calls:
    """The lifecycle of an own hook group."""

    @ah.point("together")  # the argument does not call the next hook
    async def on(self, act: Act) -> None: ...


class Failing:
    async def on(self, act: Act) -> None:
        await asyncio.sleep(0)
        await fail()


class Waiting:
    async def on(self, act: Act) -> None:
        await forever()


class Suspending:
    async def on(self, act: Act) -> None:
        await asyncio.sleep(0)


class Acting:
    async def on(self, act: Act) -> None:
        await act()


FAILING_CALLS = ah.compose(Calls, [Waiting(), Failing()])
ACTING_CALLS = ah.compose(Calls, [Suspending(), Acting(), Suspending()])


async def failed_hook_group(act: Act) -> None:
    with contextlib.suppress(ToolError):
        await FAILING_CALLS.on(act)
    await act()


async def inside_hook_group(act: Act) -> None:
    await ACTING_CALLS.on(act)


class FailingHook(ah.SessionRunHook):
    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)
        await fail()


class WaitingHook(ah.SessionRunHook):
    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await forever()


async def failed_session(act: Act) -> None:
    async def step() -> None: ...

    with contextlib.suppress(ToolError):
        async with ah.AsyncMonitoredSession(step, [WaitingHook(), FailingHook()]) as session:
            await session.run("step")
    await act()


TOOLS: tuple[Tool, ...] = (
    failed_group,
    interrupted_group,
    inside_group,
    expired_timeout,
    inside_timeout,
    left_cancel,
    cancelled_scope,
    inside_scope,
    failed_anyio_group,
    failed_hook_group,
    inside_hook_group,
    failed_session,
)


def leaves_cancels(tool: Tool) -> bool:
    """Return whether the cancel count may be too high after the tool."""
    groups: tuple[Tool, ...] = (failed_group, interrupted_group, inside_group)
    return tool is left_cancel or (tool in groups and sys.version_info < (3, 13))
