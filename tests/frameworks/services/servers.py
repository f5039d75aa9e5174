"""Web servers and clients, bots, crawlers, message queues and terminals."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, cast

import aio_pika
import aiohttp
import discord
import hikari
import httpx
import prefect
import quart
import sanic
import scrapy
import scrapy.crawler
import telegram
from aiohttp import web
from aiohttp.test_utils import TestServer
from discord.ext import commands
from prefect.client.schemas.objects import FlowRun
from prefect.flow_engine import AsyncFlowRunEngine
from prefect.states import Completed
from telegram.ext import Application, TypeHandler
from telegram.request import BaseRequest
from textual.app import App
from yarl import URL

import aiohooks as ah
from tests.frameworks.runners import function, runner


@runner(function, "rain")
async def quart_server(hooks: Sequence[Any]) -> object:
    app = quart.Quart("forecaster")

    @app.get("/")
    async def weather() -> str:
        return "rain"

    # composed
    app.before_request(ah.compose_functions(hooks, results="together"))
    async with app.test_request_context("/"):
        response = await app.full_dispatch_request()
    return await response.get_data(as_text=True)


@runner(function, "rain")
async def sanic_server(hooks: Sequence[Any]) -> object:
    sanic.Sanic.test_mode = True  # several applications
    app = sanic.Sanic("forecaster", configure_logging=False)

    @app.get("/")
    async def weather(request: Any) -> Any:
        return sanic.text("rain")

    # composed
    app.register_middleware(ah.compose_functions(hooks, results="together"), "request")
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        assert message["type"].endswith("complete")

    try:
        await app({"type": "lifespan"}, receive, send)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(cast("Any", app)), base_url="http://test"
        ) as client:
            return (await client.get("/")).text
    finally:
        sanic.Sanic.unregister_app(app)


@runner(function, "rain")
async def aiohttp_client(hooks: Sequence[Any]) -> object:
    async def weather(request: web.Request) -> web.Response:
        return web.Response(text="rain")

    app = web.Application()
    app.router.add_get("/", weather)
    trace = aiohttp.TraceConfig()
    # composed
    trace.on_request_start.append(ah.compose_functions(hooks))
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(trace_configs=[trace]) as client,
        client.get(server.make_url("/")) as response,
    ):
        return await response.text()


@runner(function, ["Bergen"])
async def discord_bot(hooks: Sequence[Any]) -> object:
    bot = commands.Bot("!", intents=discord.Intents.none())
    asked = []

    @bot.command()
    async def weather(context: Any, city: str) -> None:
        asked.append(city)

    # composed
    bot.before_invoke(ah.compose_functions(hooks))
    state = bot._connection
    author = {"id": "2", "username": "ada", "discriminator": "0", "avatar": None}
    user = discord.ClientUser(state=state, data={**author, "id": "4"})
    state.user = user
    channel = discord.DMChannel(me=user, state=state, data={"id": "1", "recipients": []})
    data: dict[str, Any] = {
        "id": "3",
        "channel_id": "1",
        "author": author,
        "content": "!weather Bergen",
        "attachments": [],
        "embeds": [],
        "edited_timestamp": None,
        "type": 0,
        "pinned": False,
        "mention_everyone": False,
        "tts": False,
        "mentions": [],
        "mention_roles": [],
    }
    message = discord.Message(state=state, channel=channel, data=cast("Any", data))
    context = await bot.get_context(message)
    await context.command.invoke(context)
    return asked


@runner(function, [None])
async def hikari_bot(hooks: Sequence[Any]) -> object:
    bot = hikari.GatewayBot("MTIz.x.y", banner=None, logs=None)
    # composed
    bot.event_manager.subscribe(hikari.StartingEvent, ah.compose_functions(hooks))
    return await bot.event_manager.dispatch(hikari.StartingEvent(app=bot), return_tasks=True)


class Offline(BaseRequest):
    """Telegram's answers, without a network."""

    @property
    def read_timeout(self) -> float:
        return 1.0

    async def initialize(self) -> None:
        """Open nothing."""

    async def shutdown(self) -> None:
        """Close nothing."""

    async def do_request(self, url: str, method: str, *args: Any, **options: Any) -> Any:
        bot = (
            b'{"ok": true, "result": {"id": 1, "is_bot": true, "first_name": "f", "username": "f"}}'
        )
        return 200, bot


@runner(function, ["Bergen"])
async def telegram_bot(hooks: Sequence[Any]) -> object:
    asked = []
    errors = []

    async def weather(update: Any, context: Any) -> None:
        asked.append(update.message.text)

    async def on_error(update: Any, context: Any) -> None:
        errors.append(context.error)

    request = Offline()
    app = (
        Application.builder().token("1:test").request(request).get_updates_request(request).build()
    )
    app.add_handler(TypeHandler(telegram.Update, weather))
    app.add_error_handler(on_error)
    # composed
    app.add_handler(TypeHandler(telegram.Update, ah.compose_functions(hooks)), group=-1)
    data = {
        "update_id": 1,
        "message": {
            "message_id": 1,
            "date": 1,
            "chat": {"id": 1, "type": "private"},
            "text": "Bergen",
        },
    }
    async with app:
        await app.process_update(telegram.Update.de_json(data, app.bot))
    for error in errors:
        raise error
    return asked


@runner(function, ["rain"])
async def scrapy_spider(hooks: Sequence[Any]) -> object:
    found = []

    class Forecasts(scrapy.Spider):
        name = "forecasts"
        start_urls = ("data:,rain",)

        def parse(self, response: Any) -> Any:
            found.append(response.text)

    runner = scrapy.crawler.AsyncCrawlerRunner(
        {"TWISTED_REACTOR_ENABLED": False, "LOGSTATS_INTERVAL": 0}
    )
    crawler = runner.create_crawler(Forecasts)
    # composed
    opened = ah.compose_functions(hooks)
    crawler.signals.connect(opened, scrapy.signals.spider_opened)
    await runner.crawl(crawler)
    return found


@runner(function, "rain")
async def textual_app(hooks: Sequence[Any]) -> object:
    # composed
    on_ready = ah.compose_functions(hooks)

    class Forecaster(App[str]):
        async def on_mount(self) -> None:
            await on_ready()
            self.exit("rain")

    app = Forecaster()
    answer = await app.run_async(headless=True)
    if app._exception is not None:  # it has been printed
        raise app._exception
    return answer


@runner(function, [None])
async def aio_pika_connection(hooks: Sequence[Any]) -> object:
    async with aio_pika.Connection(URL("amqp://localhost")) as connection:
        # composed
        connection.close_callbacks.add(ah.compose_functions(hooks))
        results = await connection.close_callbacks(None)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@runner(function, None)
async def prefect_flow(hooks: Sequence[Any]) -> object:
    # composed
    @prefect.flow(on_completion=[ah.compose_functions(hooks)])
    async def weather(city: str) -> str:
        return f"rain in {city}"

    engine = AsyncFlowRunEngine(flow=weather, flow_run=FlowRun(flow_id=uuid.uuid4()))
    await engine.call_hooks(Completed())
    return None
