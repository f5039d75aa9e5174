"""Known bugs of asyncio and of code that uses it, each tried on the library's own operations.

The library does not use `asyncio.wait_for`, `Condition` and `TaskGroup`
(tests/project/test_architecture.py): tests of their bugs are of the waits, locks and overlaps in
their place. `tests/fuzz/random_programs` runs under eager tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.graph.graph import values_of
from aiohooks.testing import no_leaks
from tests.support.hooks import BeforeRunHook
from tests.support.sessions import doubling, run_in_before_run
from tests.support.waiting import ticks

Release = Callable[[], object]


# -- a result and a cancel in one tick


def wait_for_step() -> tuple[Awaitable[Any], Release]:
    store = ah.MemoryStepStore()
    return store.wait_for(1), lambda: store.advance().send(None)


def wait_for_variables() -> tuple[Awaitable[Any], Release]:
    variables = ah.Variables()
    return variables.wait_ready(), values_of(variables).mark_ready


def wait_for_stop() -> tuple[Awaitable[Any], Release]:
    coord = ah.Coordinator()
    return coord.wait_for_stop(), coord.request_stop


def wait_until_future() -> tuple[Awaitable[Any], Release]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    return ah.Coordinator().until(future), lambda: future.set_result(1)


def wait_until_event() -> tuple[Awaitable[Any], Release]:
    event = asyncio.Event()
    return ah.Coordinator().until(event.wait()), event.set


def join() -> tuple[Awaitable[Any], Release]:
    coord = ah.Coordinator()
    event = asyncio.Event()
    coord.start_soon(event.wait)
    return coord.join(), event.set


def hooked_run() -> tuple[Awaitable[Any], Release]:
    event = asyncio.Event()
    return run_in_before_run(event.wait), event.set


def overlapping_run() -> tuple[Awaitable[Any], Release]:
    event = asyncio.Event()
    return run_in_before_run(event.wait, event.wait), event.set


WAITS = [
    wait_for_step,
    wait_for_variables,
    wait_for_stop,
    wait_until_future,
    wait_until_event,
    join,
    hooked_run,
    overlapping_run,
]


@pytest.mark.parametrize("make", WAITS)
async def test_a_cancel_that_meets_the_result_is_not_lost(
    make: Callable[[], tuple[Awaitable[Any], Release]],
) -> None:
    """A cancel in the tick in which the result is set and the wake-up queued still cancels
    (gh-86296).
    """
    waiting, release = make()
    task = asyncio.ensure_future(waiting)
    await ticks()
    with contextlib.suppress(StopIteration):  # a coroutine that never suspends, driven by hand
        release()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


# -- task factories


async def test_a_task_factory_gets_only_documented_options() -> None:
    """A task factory is called with what Python itself documents: a context, and no more."""
    loop = asyncio.get_running_loop()
    options: set[str] = set()

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        options.update(kwargs)
        kwargs.pop("eager_start", None)
        return asyncio.Task(coro, loop=loop, **kwargs)

    loop.set_task_factory(factory)
    try:
        await run_in_before_run(ticks, ticks)
        coord = ah.Coordinator()
        coord.start_soon(ticks)
        await coord.join()
    finally:
        loop.set_task_factory(None)
    # uvloop adds of its own accord what Python's own loop adds only from 3.13.3 on.
    assert options <= {
        "context",
        "name",
        *(() if isinstance(loop, asyncio.SelectorEventLoop) else ("eager_start",)),
    }


# -- references to tasks and threads


async def test_tasks_referenced_only_by_the_library_survive() -> None:
    """The collector runs while hooks, operations and background tasks wait, and none of them is
    lost.
    """
    done: list[str] = []

    async def collects(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            gc.collect()
        done.append(name)

    async with doubling(
        BeforeRunHook(lambda: collects("a")), BeforeRunHook(lambda: collects("b"))
    ) as session:
        session.start_soon(collects, "background")
        await session.run("double")
    assert sorted(done) == ["a", "b", "background"]


async def test_iterations_left_by_break_leave_nothing() -> None:
    """`steps` and `changes` are not async generators, so that nothing is finalised in another
    task.
    """
    store = ah.MemoryStepStore()
    async with no_leaks():
        async with doubling(global_step=store) as session:
            steps = session.steps("double")
            async for _ in steps:
                break
        changes = store.changes()
        async for _ in changes:
            break
    assert not inspect.isasyncgen(steps)
    assert not inspect.isasyncgen(changes)


# -- interrupts and other awaitables


async def test_awaitables_other_than_coroutines_are_awaited() -> None:
    """`until` takes objects with `__await__` and generators marked as coroutines, which tasks
    refuse from 3.12 on.
    """

    class Patient:
        def __await__(self) -> Generator[Any, Any, int]:
            yield from asyncio.sleep(0).__await__()
            return 1

    @types.coroutine
    def old_style() -> Generator[Any, Any, int]:
        yield
        return 2

    coord = ah.Coordinator()
    assert await coord.until(Patient()) == 1
    assert await coord.until(old_style()) == 2
