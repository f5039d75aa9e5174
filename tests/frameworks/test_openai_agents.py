"""openai-agents: one object for a run's hooks, or an agent's, that stands for several."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agents import (
    Agent,
    Model,
    ModelResponse,
    RunConfig,
    RunHooks,
    Runner,
    Usage,
    function_tool,
)
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

import aiohooks as ah

pytestmark = pytest.mark.every_python


def tool_call(name: str, **arguments: str) -> ResponseFunctionToolCall:
    """Make a model's request to call a tool."""
    return ResponseFunctionToolCall(
        type="function_call",
        name=name,
        call_id=f"{name} {arguments}",
        arguments=json.dumps(arguments),
    )


def sentence(text: str) -> ResponseOutputMessage:
    """Make a model's last answer."""
    content = ResponseOutputText(type="output_text", text=text, annotations=[])
    return ResponseOutputMessage(
        id="1", type="message", role="assistant", status="completed", content=[content]
    )


class ScriptedModel(Model):
    """A model that gives these answers, one for each request."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = [*answers]

    async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
        return ModelResponse(output=self.answers.pop(0), usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@function_tool
async def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


async def run(run_hooks: RunHooks[Any]) -> str:
    """Run an agent that makes two tool calls at the same time, and return its answer."""
    model = ScriptedModel(
        [tool_call("weather", city="Bergen"), tool_call("weather", city="Rome")], [sentence("done")]
    )
    agent = Agent[Any](name="forecaster", model=model, tools=[weather])
    done = await Runner.run(
        agent, "the weather?", hooks=run_hooks, run_config=RunConfig(tracing_disabled=True)
    )
    return str(done.final_output)


async def test_a_handoff_is_passed_by_keyword() -> None:
    """The runner calls `on_handoff` with keyword arguments; a hook may use other names for them."""
    seen: list[str] = []

    class Handoffs(RunHooks[Any]):
        async def on_handoff(self, _: Any, source: Agent[Any], target: Agent[Any]) -> None:
            seen.append(f"{source.name} to {target.name}")

    model = ScriptedModel([tool_call("transfer_to_expert")], [sentence("done")])
    first = Agent[Any](name="first", model=model, handoffs=[Agent[Any](name="expert", model=model)])
    hooks = ah.compose(RunHooks, [Handoffs(), Handoffs()])
    await Runner.run(first, "help", hooks=hooks, run_config=RunConfig(tracing_disabled=True))
    assert seen == ["first to expert"] * 2
