"""A service whose session makes steps when a test gives it feeds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohooks import AsyncMonitoredSession, SessionRunHook
from aiohooks.adapters.asgi import SessionService
from aiohooks.dispatch import HookRegistration


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
    feeds: FeedQueue, hooks: Iterable[SessionRunHook | HookRegistration] = (), *, store: Any = None, **options: Any
) -> SessionService:
    """Make a service that runs a session."""
    return SessionService(AsyncMonitoredSession(step, hooks, global_step=store, name="trainer"), feeds.loop, **options)


@contextlib.asynccontextmanager
async def running_service(
    feeds: FeedQueue, hooks: Iterable[SessionRunHook | HookRegistration] = (), **options: Any
) -> AsyncIterator[SessionService]:
    """Run a service for the block, with its session open."""
    service = make_service(feeds, hooks, **options)
    async with service.lifespan():
        assert service._runner is not None
        await service._runner.opened.wait()
        yield service
