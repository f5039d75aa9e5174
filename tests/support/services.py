"""A service whose session makes steps when a test gives it feeds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any

import uvicorn

from aiohooks import AsyncMonitoredSession, SessionRunHook
from aiohooks.adapters.asgi import SessionService
from aiohooks.dispatch import HookRegistration
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, Reply, ask
from tests.support.waiting import ticks, until_true


class FeedQueue:
    """The feeds of a session; each makes one step."""

    def __init__(self) -> None:
        self.feeds: asyncio.Queue[float | BaseException | None] = asyncio.Queue()

    def put(self, *values: float) -> None:
        """Make one step for each value, which is its loss."""
        for value in values:
            self.feeds.put_nowait(value)

    def fail(self, error: BaseException) -> None:
        """Make the loop raise `error`."""
        self.feeds.put_nowait(error)

    def end(self) -> None:
        """Make the loop return."""
        self.feeds.put_nowait(None)

    async def loop(self, session: AsyncMonitoredSession) -> None:
        """Run the loop of steps."""
        async for _ in session.steps("loss", feeds=self._values()):
            pass

    async def _values(self) -> AsyncIterator[float]:
        while (value := await self.feeds.get()) is not None:
            if isinstance(value, BaseException):
                raise value
            yield value


class SlowToOpen(SessionRunHook):
    """A hook that waits when the session is opened."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def begin(self) -> None:
        await self.released.wait()


async def step(value: float) -> dict[str, float]:
    """One step."""
    return {"loss": value}


def make_service(
    feeds: FeedQueue,
    hooks: Iterable[SessionRunHook | HookRegistration] = (),
    *,
    store: Any = None,
    **options: Any,
) -> SessionService:
    """Make a service that runs a session."""
    return SessionService(
        AsyncMonitoredSession(step, hooks, global_step=store, name="trainer"), feeds.loop, **options
    )


class Serving:
    """A service whose lifespan was entered, in the time of a test, and requests to it."""

    def __init__(
        self,
        service: SessionService,
        feeds: FeedQueue,
        clock: ManualClock,
        lifespan: contextlib.AsyncExitStack,
    ) -> None:
        self.service = service
        self.feeds = feeds
        self.clock = clock
        self.leaving: asyncio.Task[None] | None = None
        self._lifespan = lifespan

    async def begin(self, path: str, **options: Any) -> Exchange:
        """Send a request, and let it wait."""
        exchange = Exchange(self.service, path, **options)
        await ticks(20)
        return exchange

    async def ask(self, path: str, **options: Any) -> Reply:
        """Send a request and wait for the complete reply."""
        return await ask(self.service, path, **options)

    async def pass_time(self, secs: float) -> None:
        """Let time pass between what happens before and after."""
        await ticks(20)
        self.clock.advance(secs)
        await ticks(20)

    async def leave(self) -> asyncio.Task[None]:
        """Begin to leave the lifespan, and return the task that does."""
        self.leaving = asyncio.create_task(self._lifespan.pop_all().aclose())
        await ticks(20)
        return self.leaving

    async def waiting(self) -> int:
        """Return how many waits for a step there are."""
        return int((await self.ask("/progress")).json["store"]["waiting"])


@contextlib.asynccontextmanager
async def serving(
    hooks: Iterable[SessionRunHook | HookRegistration] = (),
    *,
    opened: bool = True,
    service: SessionService | None = None,
    **options: Any,
) -> AsyncIterator[Serving]:
    """Run a service for the block; its session is open, unless the test opens it."""
    feeds = FeedQueue()
    with ManualClock() as clock:
        served = make_service(feeds, hooks, **options) if service is None else service
        async with contextlib.AsyncExitStack() as lifespan:
            await lifespan.enter_async_context(served.lifespan())
            while opened and served.health().state == "starting":
                await ticks(1)
            one = Serving(served, feeds, clock, lifespan)
            yield one
            if one.leaving is not None:
                await one.leaving


@contextlib.asynccontextmanager
async def under_uvicorn(app: Any) -> AsyncIterator[str]:
    """Serve an application over HTTP for the block, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        await until_true(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
