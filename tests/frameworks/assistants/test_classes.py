"""Frameworks for which not all laws can hold, as they drop errors, call plain methods or end what
they run by means of their own; and filters that are nested.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import (
    FunctionalTermination,
    MaxMessageTermination,
)
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from dspy.utils.callback import BaseCallback
from pipecat.frames.frames import EndFrame, TextFrame
from pipecat.observers.base_observer import BaseObserver
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.filters.identity_filter import IdentityFilter
from pipecat.workers.runner import WorkerRunner

import aiohooks as ah
from tests.frameworks.assistants.agents import invoke_function


async def test_observers_of_pipecat_overlap() -> None:
    """Observers that wait for one another see a frame of a pipeline; the error of another one is
    logged, if that is asked for.
    """

    class Observer:
        async def on_push_frame(self, data: Any) -> None:
            if isinstance(data.frame, TextFrame) and data.first_push:
                await both.wait()
                seen.append(data.frame.text)

    class Failing:
        async def on_push_frame(self, data: Any) -> None:
            raise LookupError("no such frame")

    seen: list[str] = []
    both = asyncio.Barrier(2)
    failing = ah.configure(Failing(), on_error="log")
    observer = ah.compose(BaseObserver, [Observer(), failing, Observer()])
    worker = PipelineWorker(Pipeline([IdentityFilter()]), observers=[observer])
    await worker.queue_frames([TextFrame("rain"), EndFrame()])
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()
    assert seen == ["rain", "rain"]


async def test_callbacks_of_dspy_are_called_in_order() -> None:
    """Callbacks have plain methods: a module calls those of all hooks, one after another."""

    class Callback:
        def __init__(self, name: str) -> None:
            self.name = name

        def on_module_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
            called.append(f"{self.name} starts")

        def on_module_end(self, call_id: str, outputs: Any, exception: Any = None) -> None:
            called.append(f"{self.name} ends with {outputs}")

    class Weather(dspy.Module):
        async def aforward(self, city: str) -> str:
            return f"rain in {city}"

    called: list[str] = []
    callback = ah.compose(BaseCallback, [Callback("audit"), Callback("metrics")])
    assert await Weather(callbacks=[callback]).acall(city="Bergen") == "rain in Bergen"
    ends = ["audit ends with rain in Bergen", "metrics ends with rain in Bergen"]
    assert called == ["audit starts", "metrics starts", *ends]


async def test_filters_of_semantic_kernel_are_nested() -> None:
    """Filters that call the next one are nested around one call of the function."""

    async def around(context: Any, next: Any) -> None:
        ran.append("in")
        await next(context)
        ran.append("out")

    async def inner(context: Any, next: Any) -> None:
        await around(context, next)

    ran: list[str] = []
    function_filter = ah.compose_functions([around, inner], results=ah.wrap(argument="next"))
    assert await invoke_function(function_filter, ran) == "rain in Bergen"
    assert ran == ["in", "in", "function", "out", "out"]


class Forecaster(BaseChatAgent):
    """An agent that always says the same."""

    @property
    def produced_message_types(self) -> Any:
        return (TextMessage,)

    async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
        return Response(chat_message=TextMessage(content="rain", source=self.name))

    async def on_reset(self, cancellation_token: Any) -> None:
        """Keep nothing."""


async def test_conditions_of_autogen_end_a_team() -> None:
    """Conditions keep a state each, and are joined with `|`; functions of one condition overlap,
    and the first one that returns True ends the team.
    """

    async def is_rain(messages: Any) -> bool | None:
        await both.wait()
        return messages[-1].content == "rain" or None

    async def is_snow(messages: Any) -> bool | None:
        await both.wait()
        return messages[-1].content == "snow" or None

    both = asyncio.Barrier(2)
    functions = ah.compose_functions([is_snow, is_rain], results="together")
    team = RoundRobinGroupChat(
        [Forecaster("forecaster", "says the weather")],
        termination_condition=FunctionalTermination(functions) | MaxMessageTermination(9),
    )
    result = await team.run(task="the weather?")
    assert [message.to_text() for message in result.messages] == ["the weather?", "rain"]
    assert result.stop_reason == "Functional termination condition met"
