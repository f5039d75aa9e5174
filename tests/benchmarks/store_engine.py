"""The interface of an engine for the rows about stores of several processes: a server, and a bare
client.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from typing import Protocol

from aiohooks import open_step_store
from tests.support.needs import MissingError


class Counter(Protocol):
    """A counter to measure: a step store, or a bare client in its place."""

    async def advance(self) -> int:
        """Advance by one step; return the new step."""
        ...

    async def wait_for(self, step: int) -> object:
        """Return when the step has been reached."""
        ...


class Waits:
    """What waits in this process, by hand: a future for each, with its step."""

    def __init__(self) -> None:
        self.steps: dict[asyncio.Future[None], int] = {}

    async def park(self, step: int) -> None:
        """Wait until the step is seen."""
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.steps[wait] = step
        await wait

    def wake(self, seen: int) -> None:
        """Wake those whose step is seen."""
        for wait in [wait for wait, step in self.steps.items() if step <= seen]:
            del self.steps[wait]
            wait.set_result(None)


Opened = Callable[[str], AbstractAsyncContextManager[Counter]]
"""Opens a counter at a URL."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, by hand and in words. A module `store_NAME` has it as `ENGINE`."""

    title: str
    serve: Callable[[], AbstractContextManager[str]]
    """Has a server for the time of the block, and gives its URL. Blocks for seconds."""
    bare: Opened
    """The least that can work, by hand."""
    by_hand: str
    one_call: str
    joined: Callable[[], AbstractContextManager[object]] = nullcontext
    """What each process enters before it opens a counter."""
    settled_secs: float = 0.0
    """After this a wait that has begun is known to the server; it is not measured."""
    wake_bar: float | None = 1.5
    crowd_bar: float | None = None
    together_bar: float | None = 1 / 3
    alone_bar: float | None = None


def engine_of(name: str) -> Engine:
    """Return the engine of this name, if its packages are installed."""
    try:
        engine: Engine = importlib.import_module(f"tests.benchmarks.store_{name}").ENGINE
    except ImportError as error:
        raise MissingError(f"{error.name} is not installed") from error
    return engine


@asynccontextmanager
async def opened(engine: Engine, kind: str, url: str) -> AsyncIterator[Counter]:
    """Our store ("ours"), or by hand ("bare").

    Those of one kind count together, in whatever process they are.
    """
    with engine.joined():
        if kind == "bare":
            async with engine.bare(url) as counter:
                yield counter
        else:
            async with open_step_store(url, run=kind) as store:
                yield store
