"""Agents: each asks a model that answers from a list, and calls a tool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import agent_framework
from agent_framework import Agent as FrameworkAgent
from agent_framework import (
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    Content,
    FunctionInvocationLayer,
    Message,
)
from agents import RunHooks
from fastmcp.server.middleware import Middleware
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.models import BaseLlm, LlmResponse
from google.adk.plugins import BasePlugin
from google.adk.runners import InMemoryRunner
from google.genai import types
from haystack import component
from haystack.components.agents import Agent as HaystackAgent
from haystack.dataclasses import ChatMessage, ToolCall
from haystack.hooks.protocol import Hook
from haystack.tools import tool as haystack_tool
from langchain_core.callbacks import AsyncCallbackHandler
from pydantic_ai.capabilities import AbstractCapability

import aiohooks as ah
from tests.frameworks import test_fastmcp, test_langchain, test_openai_agents, test_pydantic_ai
from tests.frameworks.runners import function, hook_overriding, runner


@runner(hook_overriding("on_tool_start"), "done")
async def openai_agents(hooks: Sequence[Any]) -> object:
    # composed
    run_hooks = ah.compose(RunHooks, hooks)
    return await test_openai_agents.run(run_hooks)


@runner(
    hook_overriding("on_tool_start", test_langchain.Handler),
    ["rain in Bergen for no one", "rain in Rome for no one"],
)
async def langchain_core(hooks: Sequence[Any]) -> object:
    # composed
    handler = ah.compose(AsyncCallbackHandler, hooks)
    return await test_langchain.run(handler)


@runner(hook_overriding("before_run"), "rain in Bergen for no one, rain in Rome for no one")
async def pydantic_ai(hooks: Sequence[Any]) -> object:
    # composed
    capability = ah.compose(AbstractCapability[Any], hooks)
    return await test_pydantic_ai.run(capability)


@runner(hook_overriding("check_resource_access"), "Bergen")
async def fastmcp(hooks: Sequence[Any]) -> object:
    # composed
    middleware = ah.compose(Middleware, hooks)
    async with test_fastmcp.client(middleware) as client:
        return (await client.read_resource("data://stations"))[0].text


class AdkModel(BaseLlm):
    """Asks for the tool, then repeats what that has returned."""

    model: str = "script"

    async def generate_content_async(
        self, llm_request: Any, stream: bool = False
    ) -> AsyncIterator[LlmResponse]:
        last = llm_request.contents[-1].parts[0]
        call = types.FunctionCall(name="weather", args={"city": "Bergen"})
        part = (
            types.Part(text=str(last.function_response.response))
            if last.function_response
            else types.Part(function_call=call)
        )
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


@runner(hook_overriding("before_tool_callback"), "{'Bergen': 'rain'}")
async def google_adk(hooks: Sequence[Any]) -> object:
    async def weather(city: str) -> dict[str, str]:
        """Return the weather of a city."""
        return {city: "rain"}

    # composed
    plugin = ah.compose(BasePlugin, hooks, init={"name": "hooks"}, results="together")
    agent = LlmAgent(name="forecaster", model=AdkModel(), tools=[weather])
    run = InMemoryRunner(app=App(name="app", root_agent=agent, plugins=[plugin]))
    session = await run.session_service.create_session(app_name="app", user_id="ada")
    message = types.UserContent(parts=[types.Part(text="the weather?")])
    events = [
        event
        async for event in run.run_async(user_id="ada", session_id=session.id, new_message=message)
    ]
    return events[-1].content.parts[0].text


class FrameworkModel(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """Asks for the tool, then repeats what that has returned."""

    def _inner_get_response(self, *, messages: Any, **_: Any) -> Any:
        async def answer() -> ChatResponse:
            (content, *_) = messages[-1].contents
            call = Content.from_function_call("1", "weather", arguments={"city": "Bergen"})
            return ChatResponse(
                messages=[
                    Message(
                        "assistant", [content.result if content.type == "function_result" else call]
                    )
                ]
            )

        return answer()


async def run_agent(middleware: Any, ran: list[str]) -> object:
    """Run an agent of agent-framework with the middleware; the tool notes that it ran."""

    @agent_framework.tool(approval_mode="never_require")
    async def weather(city: str) -> str:
        """Return the weather of a city."""
        ran.append("tool")
        return f"rain in {city}"

    agent = FrameworkAgent(client=FrameworkModel(), tools=[weather], middleware=[middleware])
    return (await agent.run("the weather?")).text


@runner(function, "rain in Bergen")
async def agent_framework_core(hooks: Sequence[Any]) -> object:
    # composed
    checks = ah.compose_functions(hooks)

    @agent_framework.agent_middleware
    async def middleware(context: Any, call_next: Any) -> Any:
        return await checks(context) or await call_next()

    return await run_agent(middleware, [])


@component
class HaystackModel:
    """Asks for the tool, then repeats what that has returned."""

    @component.output_types(replies=list[ChatMessage])
    def run(self, messages: list[ChatMessage], tools: Any = None) -> dict[str, Any]:
        if result := messages[-1].tool_call_result:
            return {"replies": [ChatMessage.from_assistant(str(result.result))]}
        return {
            "replies": [
                ChatMessage.from_assistant(tool_calls=[ToolCall("weather", {"city": "Bergen"})])
            ]
        }

    @component.output_types(replies=list[ChatMessage])
    async def run_async(self, messages: list[ChatMessage], tools: Any = None) -> dict[str, Any]:
        return self.run(messages)  # type: ignore[no-any-return]


class AwaitedHook(Hook):
    """The class leaves out the method that is awaited."""

    async def run_async(self, state: Any) -> None: ...


@runner(hook_overriding("run_async"), "rain in Bergen")
async def haystack_ai(hooks: Sequence[Any]) -> object:
    @haystack_tool
    async def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"rain in {city}"

    # composed
    hook = ah.compose(AwaitedHook, hooks)
    agent = HaystackAgent(
        chat_generator=HaystackModel(), tools=[weather], hooks={"before_tool": [hook]}
    )
    return (await agent.run_async([ChatMessage.from_user("the weather?")]))["last_message"].text
