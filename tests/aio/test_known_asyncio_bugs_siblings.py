"""Known bug shapes E-11 to E-19: siblings that fail or vanish, interrupts, awaitables of other kinds; see test_bug_shapes.py."""

from __future__ import annotations

import asyncio
import gc
import inspect
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import no_leaks
from tests.support.hooks import BeforeRunHook
from tests.support.sessions import double, run_in_before_run
from tests.support.waiting import fails_after, forever, ticks

# -- E-11 to E-17: siblings


@pytest.mark.parametrize("victim", [0, 1], ids=["in the caller's task", "in its own"])
async def test_e11_e14_a_hook_cancelled_by_others_is_reported(victim: int) -> None:
    """E-11, E-14: what a hook awaits is cancelled by a third party: nobody hangs, and the run does not end as if all was well."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acts: list[Callable[[], Awaitable[Any]]] = [forever, forever]
    acts[victim] = lambda: future
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, future.cancel)  # type: ignore[arg-type]
    with pytest.raises(ah.errors.HookCancelledError):
        await run_in_before_run(*acts)


async def test_e12_an_error_does_not_hide_a_pending_cancel() -> None:
    """E-12: a hook fails in the tick of the outer cancel; a caller who catches the error could swallow the cancel."""

    async def body() -> None:
        try:
            await run_in_before_run(forever, fails_after(2, ValueError()))
        except ValueError:
            await forever()

    for after in range(1, 8):
        task = asyncio.create_task(body())
        await ticks(after)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done, f"cancelled after {after} ticks"
        assert task.cancelled()


async def test_e13_iterations_left_by_break_leave_nothing() -> None:
    """E-13: `steps` and `changes` are no async generators, so that nothing is finalised in a task of somebody else's."""
    store = ah.MemoryStepStore()
    async with no_leaks(stores=[store]):
        async with ah.AsyncMonitoredSession(double, global_step=store) as session:
            steps = session.steps("double")
            async for _ in steps:
                break
        changes = store.changes()
        async for _ in changes:
            break
    assert not inspect.isasyncgen(steps)
    assert not inspect.isasyncgen(changes)


@pytest.mark.parametrize("fails", [0, 1, 2])
async def test_e15_one_failure_is_raised_as_it_is(fails: int) -> None:
    """E-15: the same object, in no group, wherever its hook runs."""
    error = ValueError("own")
    acts: list[Callable[[], Awaitable[Any]]] = [forever, forever, forever]
    acts[fails] = fails_after(2, error)
    with pytest.raises(ValueError, match="own") as failure:
        await run_in_before_run(*acts)
    assert failure.value is error


@pytest.mark.parametrize("deaf", [0, 1], ids=["in the caller's task", "in its own"])
async def test_e16_a_hook_that_swallows_a_cancel_does_not_disarm_a_timeout(deaf: int) -> None:
    """E-16: one hook ignores its cancellation and returns; the timeout around the run still fires."""

    async def swallows() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            return

    acts: list[Callable[[], Awaitable[Any]]] = [forever, forever]
    acts[deaf] = swallows
    with pytest.raises(TimeoutError):  # noqa: PT012 - what stands behind the run must not be reached
        async with asyncio.timeout(0):
            await run_in_before_run(*acts)
            await forever()


async def test_e17_siblings_of_a_failed_hook_are_over_when_it_is_raised() -> None:
    """E-17: unlike with `gather` they are cancelled, and have ended."""
    hooks = [BeforeRunHook(forever), BeforeRunHook(fails_after(2, ValueError("own"))), BeforeRunHook(forever)]
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        with pytest.raises(ValueError, match="own"):
            await session.run("double")
        assert all(hook.ended for hook in hooks)
        hooks[0].call = hooks[1].call = hooks[2].call = ticks
        await session.run("double")


# -- E-18, E-19


@pytest.mark.parametrize("strikes", [0, 1], ids=["in the caller's task", "in its own"])
def test_e18_keyboard_interrupt_closes_the_hooks(strikes: int) -> None:
    """E-18: it tears the loop down, and on the way out every hook is closed once."""
    acts: list[Callable[[], Awaitable[Any]]] = [forever, forever]
    acts[strikes] = fails_after(2, KeyboardInterrupt())
    hooks = [BeforeRunHook(act) for act in acts]

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            await session.run("double")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    gc.collect()
    assert [hook.closed for hook in hooks] == [1, 1]


async def test_e19_awaitables_that_are_no_coroutines_are_awaited() -> None:
    """E-19: `until` takes objects with `__await__` and generators marked as coroutines, which tasks refuse from 3.12 on."""

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
