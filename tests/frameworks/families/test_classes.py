"""Classes of frameworks whose hooks a group once called too often, or without what the framework
gives them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from agent_framework import FunctionMiddleware
from aiogram import BaseMiddleware
from litestar.middleware import ASGIMiddleware
from taskiq import InMemoryBroker, SimpleRetryMiddleware, TaskiqMiddleware

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from tests.frameworks.families.agents import run_agent
from tests.frameworks.families.others import get_message, get_page


class Around:
    """A hook that calls the next one."""

    def __init__(self, ran: list[str]) -> None:
        self.ran = ran

    async def around(self, rest: Awaitable[Any]) -> Any:
        self.ran.append("in")
        result = await rest
        self.ran.append("out")
        return result


class AroundTool(Around):
    async def process(self, context: Any, call_next: Any) -> None:
        await self.around(call_next())


class AroundPage(Around):
    async def handle(self, scope: Any, receive: Any, send: Any, next_app: Any) -> None:
        await self.around(next_app(scope, receive, send))


class AroundMessage(Around):
    async def __call__(self, handler: Any, event: Any, data: Any) -> Any:
        return await self.around(handler(event, data))


Run = Callable[[Any, list[str]], Coroutine[Any, Any, object]]


@pytest.mark.parametrize(
    ("kind", "hook", "run"),
    [
        pytest.param(FunctionMiddleware, AroundTool, run_agent, id="agent-framework"),
        pytest.param(
            ASGIMiddleware,
            AroundPage,
            lambda each, ran: get_page(ran, middleware=[each]),
            id="litestar",
        ),
        pytest.param(BaseMiddleware, AroundMessage, get_message, id="aiogram"),
    ],
)
async def test_a_wrapper_calls_the_next_once(kind: type[Any], hook: type[Around], run: Run) -> None:
    """Two middlewares are nested around one call. They are refused until `"wrap"` says so, where an
    annotation shows which argument calls the next one: litestar's exists for type checkers only.
    """
    ran: list[str] = []
    hooks = [hook(ran), hook(ran)]
    wrap: Any = {"handle": ah.wrap(argument="next_app")}
    if kind is not ASGIMiddleware:
        wrap = "wrap"
        with pytest.raises(InvalidHookError, match="wrap"):
            ah.compose(kind, hooks)
    await run(ah.compose(kind, hooks, results=wrap), ran)
    (innermost,) = {*ran}.difference(("in", "out"))
    assert ran == ["in", "in", innermost, "out", "out"]


async def test_retries_of_taskiq_reach_the_broker() -> None:
    """What taskiq sets on the composite, its broker, is set on the hooks that are middlewares: a
    task is tried again.
    """

    class Count(TaskiqMiddleware):
        async def on_error(self, message: Any, result: Any, exception: BaseException) -> None:
            failures.append(exception)

    failures: list[BaseException] = []
    middleware = ah.compose(TaskiqMiddleware, [SimpleRetryMiddleware(), Count()], results="chain")
    broker = InMemoryBroker(await_inplace=True).with_middlewares(middleware)

    @broker.task(retry_on_error=True, max_retries=3)
    async def weather() -> str:
        if len(failures) < 2:
            raise OSError("no connection")
        return "rain"

    result = await (await weather.kiq()).get_result()
    assert (result.return_value, len(failures)) == ("rain", 2)
