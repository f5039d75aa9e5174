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
from tests.support.waiting import fail, forever

pytestmark = pytest.mark.every_python
user: contextvars.ContextVar[str] = contextvars.ContextVar("user")


@tool
async def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city} for {user.get('no one')}"


async def run(handler: AsyncCallbackHandler) -> list[str]:
    """Let a model ask for two tool calls at the same time, and return their answers."""
    calls = [{"name": "weather", "args": {"city": city}, "id": city, "type": "tool_call"} for city in ("Bergen", "Rome")]
    model = GenericFakeChatModel(messages=iter([AIMessage("", tool_calls=calls)]))
    answer = await model.ainvoke("the weather?", {"callbacks": [handler]})
    messages = await weather.abatch(list(answer.tool_calls), {"callbacks": [handler]})
    return [message.content for message in messages]


class Handler(AsyncCallbackHandler):
    """What all handlers here have: errors come out, and calls are awaited in the task of the tool."""

    raise_error = True
    run_inline = True


async def test_handlers_overlap_in_parallel_tool_calls() -> None:
    """Two handlers and two tool calls: all four calls of `on_tool_start` are in the group at the same time."""

    class Meet(Handler):
        async def on_tool_start(self, *_: Any, **__: Any) -> None:
            await barrier.wait()

    class MeetToo:
        async def on_tool_start(self, serialized: dict[str, Any], input_str: str, **kwargs: Any) -> None:
            await barrier.wait()

    barrier = asyncio.Barrier(4)
    assert await run(ah.compose(AsyncCallbackHandler, [Meet(), MeetToo()])) == [
        "rain in Bergen for no one", "rain in Rome for no one"
    ]  # fmt: skip


async def test_an_error_comes_out_as_itself() -> None:
    """With `raise_error` a handler's error comes out as the same object with a note, when its sibling has been cancelled."""
    error = ValueError("not this tool")
    ended: list[str] = []

    class Slow(Handler):
        async def on_tool_start(self, *_: Any, **__: Any) -> None:
            try:
                await forever()
            finally:
                await asyncio.sleep(0)
                ended.append("cleaned up")

    class Failing(Handler):
        async def on_tool_start(self, *_: Any, **__: Any) -> None:
            await fail(error)  # when the other has begun

    with pytest.raises(ValueError, match="not this tool") as caught:
        await weather.ainvoke({"city": "Bergen"}, {"callbacks": [ah.compose(AsyncCallbackHandler, [Slow(), Failing()])]})
    assert caught.value is error
    assert caught.value.__notes__ == ["raised by Failing.on_tool_start"]
    assert ended == ["cleaned up"]


async def test_the_tool_sees_a_handlers_variables() -> None:
    """A context variable that a handler sets is seen by the tool, if `run_inline` is true; the handlers overlap all the same."""

    class Identify(Handler):
        async def on_tool_start(self, *_: Any, **__: Any) -> None:
            await barrier.wait()
            user.set("ada")

    class Audit(Handler):
        async def on_tool_start(self, *_: Any, **__: Any) -> None:
            await barrier.wait()

    barrier = asyncio.Barrier(2)
    config: Any = {"callbacks": [ah.compose(AsyncCallbackHandler, [Audit(), Identify()])]}
    assert await weather.ainvoke({"city": "Bergen"}, config) == "rain in Bergen for ada"


def test_attributes_of_the_handlers_are_kept() -> None:
    """What the handlers say of themselves, the composite says."""

    class Quiet(Handler):
        ignore_llm = True

        async def on_text(self, text: str, **keywords: Any) -> None: ...

    handler = ah.compose(AsyncCallbackHandler, [Quiet(), Quiet()])
    assert (handler.raise_error, handler.run_inline, handler.ignore_llm, handler.ignore_agent) == (True, True, True, False)


def test_handlers_that_contradict_each_other_are_refused() -> None:
    """Of handlers with and without `raise_error` a composite could have only one; both are named."""

    class Guard(Handler):
        async def on_tool_start(self, *_: Any, **__: Any) -> None: ...

    class Metrics(AsyncCallbackHandler):
        async def on_tool_start(self, *_: Any, **__: Any) -> None: ...

    with pytest.raises(InvalidHookError, match=r"Guard\.raise_error is True.*Metrics\.raise_error is False"):
        ah.compose(AsyncCallbackHandler, [Guard(), Metrics()])


def test_a_handler_that_cannot_take_the_keywords_is_refused() -> None:
    """Langchain passes many keyword arguments; a handler without `**kwargs` is refused by name."""

    class Narrow(AsyncCallbackHandler):
        async def on_tool_start(self, serialized: Any, input_str: str) -> None: ...  # type: ignore[override]

    with pytest.raises(InvalidHookError, match=r"Narrow\.on_tool_start"):
        ah.compose(AsyncCallbackHandler, [Narrow()])
