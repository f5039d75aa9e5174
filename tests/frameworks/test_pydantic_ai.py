"""pydantic-ai: one capability whose hooks are those of several."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import aiohooks as ah
from aiohooks.errors import InvalidHookError

pytestmark = pytest.mark.every_python
user: contextvars.ContextVar[str] = contextvars.ContextVar("user")
Capability = AbstractCapability[Any]


async def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
    """Ask for two tool calls at the same time, then say what they returned."""
    if len(messages) == 1:
        return ModelResponse(
            parts=[ToolCallPart("weather", {"city": city}) for city in ("Bergen", "Rome")]
        )
    results = [str(part.content) for part in messages[-1].parts if part.part_kind == "tool-return"]
    return ModelResponse(parts=[TextPart(", ".join(results))])


async def run(capability: Capability) -> str:
    """Run an agent with two tool calls, and return its answer."""
    agent = Agent(FunctionModel(answer), capabilities=[capability])

    @agent.tool_plain
    async def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"rain in {city} for {user.get('no one')}"

    return (await agent.run("the weather?")).output


async def test_wrapped_tool_calls_run_beside_each_other() -> None:
    """With `"wrap"` the hooks are nested, the first one outside; both tool calls are inside at the
    same time.
    """

    class Brackets(Capability):
        def __init__(self, text: str) -> None:
            self.text = text

        async def wrap_tool_execute(
            self, ctx: Any, *, call: Any, tool_def: Any, args: dict[str, Any], handler: Any
        ) -> Any:
            await barrier.wait()
            return self.text[0] + await handler(args) + self.text[1]

    barrier = asyncio.Barrier(2)
    capability = ah.compose(
        Capability, [Brackets("()"), Brackets("[]")], results={"wrap_tool_execute": "wrap"}
    )
    assert await run(capability) == "([rain in Bergen for no one]), ([rain in Rome for no one])"


async def test_a_value_is_passed_from_hook_to_hook() -> None:
    """With `"chain"` each hook gets the arguments of the tool as the one before it left them."""

    class Rename(Capability):
        def __init__(self, old: str, new: str) -> None:
            self.names = {old: new}

        async def before_tool_execute(
            self, ctx: Any, *, call: Any, tool_def: Any, args: dict[str, Any]
        ) -> dict[str, Any]:
            return {"city": self.names.get(args["city"], args["city"])}

    hooks = [Rename("Rome", "Oslo"), Rename("Oslo", "Lima")]
    assert "Lima" in await run(
        ah.compose(Capability, hooks, results={"before_tool_execute": "chain"})
    )


def test_a_hook_that_would_take_the_groups_place_is_refused() -> None:
    """`for_run` answers with the capability of the run: that of one hook would replace all of
    them.
    """

    class Fresh(Capability):
        async def for_run(self, ctx: Any) -> Capability:
            return Fresh()

    with pytest.raises(InvalidHookError, match=r"Fresh\.for_run"):
        ah.compose(Capability, [Fresh(), Fresh()])
