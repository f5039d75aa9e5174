"""Agents, filters, pipelines and workflows; a model answers from a list."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import strands
from autogen_agentchat.conditions import FunctionalTermination, MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function
from strands.hooks import BeforeToolCallEvent
from temporalio.client import Client, Interceptor, OutboundInterceptor, SignalWorkflowInput

import aiohooks as ah
from tests.frameworks.runners import function, runner


class StrandsModel(strands.models.Model):
    """Asks for the tool, then repeats what that has returned."""

    def update_config(self, **config: Any) -> None:
        """Change nothing."""

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        result = messages[-1]["content"][0].get("toolResult")
        yield {"messageStart": {"role": "assistant"}}
        if result is None:
            use = {"toolUseId": "1", "name": "weather"}
            yield {"contentBlockStart": {"start": {"toolUse": use}}}
            delta: dict[str, Any] = {"toolUse": {"input": '{"city": "Bergen"}'}}
        else:
            delta = {"text": result["content"][0]["text"]}
        yield {"contentBlockDelta": {"delta": delta}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if result is None else "end_turn"}}


@runner(function, "rain in Bergen\n")
async def strands_agents(hooks: Sequence[Any]) -> object:
    @strands.tool
    async def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"rain in {city}"

    agent = strands.Agent(StrandsModel(), tools=[weather], callback_handler=None)
    # composed
    agent.add_hook(ah.compose_functions(hooks), BeforeToolCallEvent)
    return str(await agent.invoke_async("the weather?"))


async def invoke_function(function_filter: Any, ran: list[str]) -> object:
    """Invoke a function of a kernel with a filter; the function notes that it ran."""

    @kernel_function(name="weather")
    async def weather(city: str) -> str:
        ran.append("function")
        return f"rain in {city}"

    kernel = Kernel()
    kernel.add_function("forecasts", weather)
    kernel.add_filter("function_invocation", function_filter)
    result = await kernel.invoke(plugin_name="forecasts", function_name="weather", city="Bergen")
    return result.value if result else None


@runner(function, "rain in Bergen")
async def semantic_kernel(hooks: Sequence[Any]) -> object:
    # composed
    checks = ah.compose_functions(hooks)

    async def function_filter(context: Any, next: Any) -> None:
        await checks(context)
        await next(context)

    return await invoke_function(function_filter, [])


@runner(function, "Maximum number of messages 1 reached, current message count: 1")
async def autogen_agentchat(hooks: Sequence[Any]) -> object:
    # composed
    condition = FunctionalTermination(ah.compose_functions(hooks, results="together"))
    stop = await (condition | MaxMessageTermination(1))([TextMessage(content="rain", source="ada")])
    return stop.content if stop else None


@runner(function, ["stop"])
async def temporalio(hooks: Sequence[Any]) -> object:
    sent: list[str] = []

    class Server(OutboundInterceptor):
        """The innermost, in the server's place."""

        async def signal_workflow(self, input: SignalWorkflowInput) -> None:
            sent.append(input.signal)

    # composed
    checks = ah.compose_functions(hooks)

    class Checks(OutboundInterceptor):
        async def signal_workflow(self, input: SignalWorkflowInput) -> None:
            await checks(input)
            await super().signal_workflow(input)

    class Interceptors(Interceptor):
        def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
            return Checks(Server(next))

    client = await Client.connect("localhost:1", lazy=True, interceptors=[Interceptors()])
    await client.get_workflow_handle("forecast").signal("stop")
    return sent
