"""Task queues, web servers and clients, GraphQL, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

import aiogram
import httpx
import procrastinate
import strawberry
from aiogram.types import Chat, Message, Update
from aiohttp import web
from litestar import Litestar
from litestar import get as litestar_get
from procrastinate.testing import InMemoryConnector
from strawberry.extensions import SchemaExtension
from taskiq import InMemoryBroker, TaskiqMiddleware

import aiohooks as ah
from tests.frameworks import test_starlette
from tests.frameworks.runners import function, hook_overriding, runner


@runner(hook_overriding("post_execute"), "rain in Bergen")
async def taskiq(hooks: Sequence[Any]) -> object:
    # composed
    middleware = ah.compose(TaskiqMiddleware, hooks, results="chain")
    broker = InMemoryBroker(await_inplace=True).with_middlewares(middleware)

    @broker.task
    async def weather(city: str) -> str:
        return f"rain in {city}"

    return (await (await weather.kiq("Bergen")).get_result()).return_value


@runner(function, ["Bergen"])
async def procrastinate_worker(hooks: Sequence[Any]) -> object:
    app = procrastinate.App(connector=InMemoryConnector())
    done: list[str] = []

    # composed
    checks = ah.compose_functions(hooks)

    async def middleware(call_next: Any, context: Any, worker: Any) -> Any:
        return await checks(context) or await call_next()

    @app.task
    async def weather(city: str) -> None:
        done.append(city)

    await weather.defer_async(city="Bergen")
    options: Any = {"wait": False, "install_signal_handlers": False, "shutdown_graceful_timeout": 0}
    await app.run_worker_async(**options, worker_middleware=[middleware])
    return done


async def get_page(ran: list[str], **options: Any) -> object:
    """Get the page of a litestar application; it notes that it was made."""

    @litestar_get("/")
    async def weather() -> str:
        ran.append("page")
        return "rain"

    errors: list[Exception] = []
    app = Litestar(
        [weather],
        after_exception=[lambda error, _: errors.append(error)],
        logging_config=None,
        **options,
    )
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(cast("Any", app)), base_url="http://test"
    ) as client:
        response = await client.get("/")
    for error in errors:
        raise error
    return response.text


@runner(hook_overriding("on_request"), "/x for no one")
async def starlette(hooks: Sequence[Any]) -> object:
    # composed
    http_hooks = ah.compose(test_starlette.HTTPHooks, hooks)
    return (await test_starlette.get(http_hooks, "/x"))[0].text


@runner(function, "rain")
async def litestar(hooks: Sequence[Any]) -> object:
    # composed
    checks = ah.compose_functions(hooks, results="together")
    return await get_page([], before_request=checks)


@runner(function, "rain")
async def httpx_client(hooks: Sequence[Any]) -> object:
    # composed
    checks = ah.compose_functions(hooks)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="rain"))
    async with httpx.AsyncClient(transport=transport, event_hooks={"request": [checks]}) as client:
        return (await client.get("http://test")).text


@runner(function, None)
async def aiohttp_server(hooks: Sequence[Any]) -> object:
    app = web.Application()
    # composed
    app.on_startup.append(ah.compose_functions(hooks))
    server = web.AppRunner(app)
    try:
        return await server.setup()  # as `run_app` does
    finally:
        await server.cleanup()


@strawberry.type
class Query:
    """A schema with one field."""

    @strawberry.field
    async def weather(self) -> str:
        return "rain"


@runner(hook_overriding("get_results"), {"weather": "rain"})
async def strawberry_graphql(hooks: Sequence[Any]) -> object:
    # composed
    extension = ah.compose(SchemaExtension, hooks, results={"get_results": "merge"})
    result = await strawberry.Schema(Query, extensions=[lambda **_: extension]).execute(
        "{ weather }"
    )
    return result.data


async def get_message(middleware: Any, ran: list[str]) -> object:
    """Give a message to a bot of aiogram; its handler notes that it was called."""
    dispatcher = aiogram.Dispatcher()
    dispatcher.message.outer_middleware(middleware)

    @dispatcher.message()
    async def weather(message: Message) -> str:
        ran.append("handler")
        return f"rain in {message.text}"

    sent = Message(
        message_id=1, date=datetime.now(), chat=Chat(id=1, type="private"), text="Bergen"
    )
    return await dispatcher.feed_update(aiogram.Bot("1:test"), Update(update_id=1, message=sent))


@runner(function, "rain in Bergen")
async def aiogram_bot(hooks: Sequence[Any]) -> object:
    # composed
    checks = ah.compose_functions(hooks)

    async def middleware(handler: Any, event: Any, data: dict[str, Any]) -> Any:
        return await checks(event) or await handler(event, data)

    return await get_message(middleware, [])
