"""What the laws of a step store are written with."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from aiohooks._errors import StoreClosedError
from aiohooks.stores import Mark, SharedStepStore, StepStore

MakeStore = Callable[[str], StepStore]
"""Makes a store of the run that it is given the name of, as another process would; in one process, the same again."""


class Run:
    """The stores of one run."""

    def __init__(self, make: MakeStore, name: str) -> None:
        """Opens none yet."""
        self._make = make
        self.name = name
        self.stores: list[StepStore] = []

    async def open(self) -> StepStore:
        """One more store, opened."""
        store = self._make(self.name)
        if not any(store is other for other in self.stores):
            self.stores.append(store)
        return await store.__aenter__()

    async def pair(self) -> tuple[StepStore, StepStore]:
        """Two of them; in one process these are one."""
        return await self.open(), await self.open()


@contextlib.asynccontextmanager
async def opened(make: MakeStore) -> AsyncGenerator[Run]:
    """A run that nobody has used before, closed and forgotten afterwards."""
    run = Run(make, f"law-{secrets.token_hex(4)}")
    try:
        yield run
    finally:
        for store in run.stores:
            if isinstance(store, SharedStepStore) and store is run.stores[-1]:
                with contextlib.suppress(StoreClosedError):
                    await store.forget()
            await store.aclose()


async def parked(store: StepStore, wait: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that waits in the store's room; a store that waits for something else first would make this wait for ever."""
    before = store.statistics()
    task = asyncio.ensure_future(wait)
    await until(lambda: store.statistics().waits > before.waits or task.done())
    return task


async def until(true: Callable[[], bool]) -> None:
    """Lets others run until it is true."""
    while not true():  # noqa: ASYNC110 - a store has no event for what is asked here
        await asyncio.sleep(0)


async def sees(store: StepStore, mark: Mark) -> None:
    """Waits until news of a mark has arrived."""
    async for seen in store.changes():
        if seen >= mark:
            return


async def raises(kind: type[BaseException], awaitable: Awaitable[Any]) -> BaseException:
    """The error of this kind that comes out; nothing else may."""
    try:
        result = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was to be raised, and {result!r} came")
