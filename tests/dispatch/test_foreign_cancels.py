"""Code of others in hooks and steps cancels its task for reasons of its own: that is no cancel of
the caller, and hides none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support import tools_of_hooks
from tests.support.checks import refused
from tests.support.hooks import BeforeRunHook, PhaseHook
from tests.support.sessions import do_nothing, doubling
from tests.support.tools_of_hooks import Tool
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python

Call = Callable[[], Coroutine[Any, Any, Any]]


# Those that call the act after their own cancel; `tests/fuzz/explored/tools.py` has the others, and
# what comes in between.
TOOLS = [tool for tool in tools_of_hooks.TOOLS if not tool.__name__.startswith("inside")]
tools = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
places = pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])


async def in_a_task(call: Call) -> Any:
    """Await `call()` in a task of its own, whose cancel count may be left as it likes."""
    return await asyncio.create_task(call())


def run_with(
    place: int, call: Callable[[], Awaitable[Any]], other: Call = ticks, **options: Any
) -> Call:
    """A run with two hooks: one calls `call` in before_run, the other `other`."""
    hooks: list[Any] = [BeforeRunHook(other), BeforeRunHook(other)]
    hooks[place] = ah.configure(BeforeRunHook(call), **options)

    async def run() -> Any:
        async with doubling(*hooks) as session:
            return await session.run("double")

    return run


@tools
async def test_a_step_goes_through(tool: Tool) -> None:
    """A tool that has settled its own cancels ends no step function, operation beside another, or
    hook that is called alone.
    """

    async def step() -> int:
        await tool(do_nothing)
        return 1

    graph = ah.Graph()
    graph.operation(name="one")(step)
    graph.operation(name="two")(step)

    async def main() -> None:
        async with ah.AsyncMonitoredSession(
            step, [PhaseHook("begin", step), PhaseHook("end", lambda _: step())]
        ) as session:
            assert await session.run("step") == 1

            async def both(step_context: ah.session.StepContext) -> None:
                await step()
                assert await step_context.run_with_hooks("step") == 1

            await session.run_step_fn(both)
        async with ah.AsyncMonitoredSession(graph) as session:
            assert await session.run(["one", "two"]) == [1, 1]

    await in_a_task(main)


@places
@tools
async def test_a_time_limit_is_a_time_limit(tool: Tool, place: int) -> None:
    """The hook exceeds its time limit after it used the tool: HookTimeoutError, and no cancel."""
    waiting = asyncio.Event()

    async def late() -> None:
        waiting.set()
        await forever()

    with ManualClock() as clock:
        task = asyncio.create_task(run_with(place, lambda: tool(late), timeout=5)())
        await waiting.wait()
        await ticks()
        clock.advance(5)
        with refused(ah.errors.HookTimeoutError, "before_run", "5 s"):
            await task
