"""A session in a service, whose steps a test makes by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from aiohooks import AsyncMonitoredSession, SessionRunHook
from aiohooks.adapters.asgi import SessionService
from aiohooks.dispatch import HookRegistration


class Work:
    """Feeds that a test gives out one by one; each makes one step."""

    def __init__(self) -> None:
        """Nothing to do yet."""
        self.feeds: asyncio.Queue[float | BaseException | None] = asyncio.Queue()

    def give(self, *values: float) -> None:
        """Makes that many steps, with these losses."""
        for value in values:
            self.feeds.put_nowait(value)

    def fail(self, error: BaseException) -> None:
        """Makes the loop raise this."""
        self.feeds.put_nowait(error)

    def end(self) -> None:
        """Makes the loop return."""
        self.feeds.put_nowait(None)

    async def loop(self, session: AsyncMonitoredSession) -> None:
        """The loop of steps."""
        async for _ in session.steps("loss", feeds=self._batches()):
            pass

    async def _batches(self) -> AsyncIterator[float]:
        while (value := await self.feeds.get()) is not None:
            if isinstance(value, BaseException):
                raise value
            yield value


async def step(value: float) -> dict[str, float]:
    """What is trained."""
    return {"loss": value}


def make(
    work: Work, hooks: Iterable[SessionRunHook | HookRegistration] = (), *, store: Any = None, **options: Any
) -> SessionService:
    """A service that owns a session."""
    return SessionService(AsyncMonitoredSession(step, hooks, global_step=store, name="trainer"), work.loop, **options)


@contextlib.asynccontextmanager
async def served(
    work: Work, hooks: Iterable[SessionRunHook | HookRegistration] = (), **options: Any
) -> AsyncIterator[SessionService]:
    """A service whose server lives for the block; its session is open."""
    service = make(work, hooks, **options)
    async with service.lifespan():
        assert service._runner is not None
        await service._runner.opened.wait()
        yield service
