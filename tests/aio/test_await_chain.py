"""The chain of awaits of a task: where it is suspended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiohooks._aio.await_chain import format_tasks, task_wait
from aiohooks._aio.cancel import wait_done
from aiohooks.stores import MemoryStepStore
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


class Waiting:
    """Waits in all the ways in which one object can await another."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def pass_through(self) -> None:
        await self.opened.wait()

    def __await__(self) -> Any:
        return self.pass_through().__await__()

    async def items(self) -> AsyncIterator[int]:
        await self
        yield 1


async def test_a_chain_is_followed_through_everything() -> None:
    """Async generators, objects with `__await__` and coroutines are links like any other; the innermost is found."""
    waiting = Waiting()

    async def outer() -> None:
        async for _ in waiting.items():
            pass

    task = asyncio.create_task(outer(), name="outer")
    await ticks()
    functions = [frame.f_code.co_name for frame in task_wait(task).frames]
    assert functions == ["outer", "items", "pass_through", "wait"]
    text = format_tasks([task])
    assert text.startswith("task 'outer'\n  ")
    assert text.index("items") < text.index("pass_through") < text.index("Event.wait")
    waiting.opened.set()
    await task
    assert task_wait(task).where is None


class OwnWait:
    """Has a method of the name of a step store's."""

    async def wait_for(self, step: int) -> None:
        await asyncio.get_running_loop().create_future()


async def test_what_is_awaited_is_named() -> None:
    """A wait on a step store by its step, one for a task by the name of that; any other has no name."""
    own, stored = asyncio.create_task(OwnWait().wait_for(5), name="own"), asyncio.create_task(MemoryStepStore().wait_for(5))

    async def waits_for_own() -> None:
        await own

    outer = asyncio.create_task(waits_for_own())
    await ticks()
    assert [task_wait(task).awaits for task in (own, stored, outer)] == [None, "step 5 of default", "task 'own'"]
    own.cancel()
    stored.cancel()
    await asyncio.wait([own, stored, outer])


async def test_a_task_that_is_watched_is_a_link() -> None:
    """Where a function waits for a task without awaiting it, the chain continues in the task, as long as that runs."""
    waiting = Waiting()

    async def watches() -> None:
        watched_task = asyncio.create_task(waiting.pass_through())
        await wait_done([watched_task], None)
        await waiting.opened.wait()

    task = asyncio.create_task(watches())
    await ticks()
    functions = [frame.f_code.co_name for frame in task_wait(task).frames]
    assert functions[0] == "watches"
    assert functions[-2:] == ["pass_through", "wait"]
    waiting.opened.set()
    await ticks()
    waiting.opened.clear()
    await task


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks come with Python 3.12")
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_task_that_has_ended_waits_nowhere() -> None:
    """The wait of a task that has ended can be asked for, also if it ended while it was started eagerly."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(vars(asyncio)["eager_task_factory"])
    try:
        task = loop.create_task(asyncio.sleep(0, "result"))
        ended = loop.create_task(ticks(0))
    finally:
        loop.set_task_factory(None)
    assert ended.done()
    assert task_wait(ended).where is None
    await task
    assert task_wait(task).where is None
