"""langchain-core: one callback handler that stands for several."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

import aiohooks as ah
from aiohooks.errors import InvalidHookError

pytestmark = pytest.mark.every_python
user: contextvars.ContextVar[str] = contextvars.ContextVar("user")


@tool
async def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city} for {user.get('no one')}"


async def run(handler: AsyncCallbackHandler) -> list[str]:
    """Let a model ask for two tool calls at the same time, and return their answers."""
    calls = [
        {"name": "weather", "args": {"city": city}, "id": city, "type": "tool_call"}
        for city in ("Bergen", "Rome")
    ]
    model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=calls)]))
    answer = await model.ainvoke("the weather?", {"callbacks": [handler]})
    messages = await weather.abatch(list(answer.tool_calls), {"callbacks": [handler]})
    return [message.content for message in messages]


class Handler(AsyncCallbackHandler):
    """What all handlers here have: errors come out, and calls are awaited in the task of the
    tool.
    """

    raise_error = True
    run_inline = True


async def test_handlers_overlap_in_parallel_tool_calls() -> None:
    """Two handlers and two tool calls: four calls are active at the same time; a tool sees the
    variables that handlers set.
    """

    class Meet(Handler):
        async def on_tool_start(self, serialized: Any, input_str: str, **_: Any) -> None:
            await barrier.wait()
            user.set("ada" if "Bergen" in input_str else "bob")

    class MeetToo:
        async def on_tool_start(
            self, serialized: dict[str, Any], input_str: str, **kwargs: Any
        ) -> None:
            await barrier.wait()

    barrier = asyncio.Barrier(4)
    assert await run(ah.compose(AsyncCallbackHandler, [Meet(), MeetToo()])) == [
        "rain in Bergen for ada",
        "rain in Rome for bob",
    ]


def test_a_handler_that_cannot_take_the_keywords_is_refused() -> None:
    """Langchain passes many keyword arguments; a handler without `**kwargs` is refused by name."""

    class Narrow(AsyncCallbackHandler):
        async def on_tool_start(  # type: ignore[override]
            self,
            serialized: Any,
            input_str: str,
        ) -> None: ...

    with pytest.raises(InvalidHookError, match=r"Narrow\.on_tool_start"):
        ah.compose(AsyncCallbackHandler, [Narrow()])
