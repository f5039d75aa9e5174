"""Code of others in hooks and steps cancels its task for reasons of its own: that is no cancel of
the caller, and hides none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from tests.support import tools_of_hooks
from tests.support.hooks import PhaseHook
from tests.support.sessions import do_nothing
from tests.support.tools_of_hooks import Tool

pytestmark = pytest.mark.every_python

Call = Callable[[], Coroutine[Any, Any, Any]]


# Those that call the act after their own cancel; random programs have the others, and what comes in
# between.
TOOLS = [tool for tool in tools_of_hooks.TOOLS if not tool.__name__.startswith("inside")]
tools = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)


async def in_a_task(call: Call) -> Any:
    """Await `call()` in a task of its own, whose cancel count may be left as it likes."""
    return await asyncio.create_task(call())


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
