"""The chain of awaits of a task: where it is suspended."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core.activity import observed_call
from aiohooks._core.clock import secs_text
from aiohooks._why.tasks import describe_awaitable, task_wait
from aiohooks.stores import MemoryStepStore
from tests.support.waiting import parked, ticks

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
    """Async generators, objects with `__await__` and coroutines are links like any other; the
    innermost is found.
    """
    waiting = Waiting()

    async def outer() -> None:
        async for _ in waiting.items():
            pass

    task = await parked(outer(), 5, name="outer")
    functions = [frame.f_code.co_name for frame in task_wait(task).frames]
    assert functions == ["outer", "items", "pass_through", "wait"]
    waiting.opened.set()
    await task
    assert task_wait(task).where is None


class OwnWait:
    """Has a method of the name of a step store's."""

    async def wait_for(self, step: int) -> None:
        await asyncio.get_running_loop().create_future()


async def test_what_is_awaited_is_named() -> None:
    """A wait on a step store by its step, one for a task by the name of that; any other has no
    name.
    """
    own, stored = (
        asyncio.create_task(OwnWait().wait_for(5), name="own"),
        asyncio.create_task(MemoryStepStore().wait_for(5)),
    )

    async def waits_for_own() -> None:
        await own

    outer = await parked(waits_for_own(), 5)
    assert [task_wait(task).awaits for task in (own, stored, outer)] == [
        None,
        "step 5 of default",
        "task 'own'",
    ]
    own.cancel()
    stored.cancel()
    await asyncio.wait([own, stored, outer])


async def test_what_will_be_awaited_is_named() -> None:
    """A wait that has not begun is named by its task, its function or its class."""
    stored, own, ended = (
        MemoryStepStore().wait_for(5),
        OwnWait().wait_for(5),
        asyncio.create_task(ticks(0), name="ended"),
    )
    names = [describe_awaitable(one) for one in (stored, own, ended, Waiting())]
    assert names == ["StepStore.wait_for", "OwnWait.wait_for", "task 'ended'", "Waiting"]
    stored.close()
    own.close()
    await ended


async def test_a_call_in_a_task_of_its_own_is_a_link() -> None:
    """Where the library waits for a call that has a task of its own, the chain continues in that
    task.
    """
    waiting, steps = Waiting(), MemoryStepStore()

    class Notified:
        async def changed(self) -> None: ...

    class Waits(Notified):
        async def changed(self) -> None:
            await waiting

    async def calls() -> None:
        await ah.compose(Notified, [Waits()]).changed()

    async def waits() -> None:
        await ah.Coordinator().until(steps.wait_for(1))

    in_hook, in_until = asyncio.create_task(calls()), asyncio.create_task(waits())
    await ticks()
    functions = [frame.f_code.co_name for frame in task_wait(in_hook).frames]
    assert functions[0] == "calls"
    assert functions[-3:] == ["changed", "pass_through", "wait"]
    assert task_wait(in_until).awaits == "step 1 of default"
    waiting.opened.set()
    await steps.advance()
    await asyncio.wait([in_hook, in_until])


async def test_a_call_that_is_observed_is_a_link() -> None:
    """A generator that resumes a coroutine itself is a link like any other."""

    class Observer:
        def started(self, kind: str, what: str) -> Observer:
            return self

        def suspended(self) -> None: ...

        def ended(self, error: BaseException | None) -> None: ...

    waiting = Waiting()

    async def outer() -> None:
        await observed_call(waiting.pass_through, "hook", "a call", (Observer(),))

    task = await parked(outer(), 5)
    assert [frame.f_code.co_name for frame in task_wait(task).frames] == [
        "outer",
        "observed_call",
        "_resumed_by_hand",
        "pass_through",
        "wait",
    ]
    waiting.opened.set()
    await task


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks come with Python 3.12")
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_task_that_has_ended_waits_nowhere() -> None:
    """The wait of a task that has ended can be asked for, also if it ended while it was started
    eagerly.
    """
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


@pytest.mark.parametrize(
    ("secs", "text"), [(0.25, "0.25 s"), (12.345, "12.3 s"), (999.7, "1000 s"), (4130.2, "4130 s")]
)
def test_seconds(secs: float, text: str) -> None:
    """Those of a long wait are written out."""
    assert secs_text(secs) == text
