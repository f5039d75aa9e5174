"""Bugs that the cancel sweep found in this library while it was written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.hooks import BeforeRunHook
from tests.support.sessions import double
from tests.support.waiting import HANG_SECS, forever, ticks


def me() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@pytest.mark.parametrize("after", range(8))
async def test_leaving_a_busy_session_may_be_cancelled(after: int) -> None:
    """The block is left during another task's run, and its task is cancelled meanwhile: all is closed, nothing hangs."""
    hook = RecordingHook(suspend=True)
    store = ah.MemoryStepStore()
    session = ah.AsyncMonitoredSession(double, [hook, BeforeRunHook(ticks)], global_step=store)
    opened, running = asyncio.Event(), asyncio.Event()

    async def leave() -> None:
        async with session:
            opened.set()
            await running.wait()

    async def run() -> None:
        await opened.wait()
        asyncio.get_running_loop().call_soon(running.set)
        with contextlib.suppress(ah.errors.SessionClosedError):
            await session.run("double")

    leaver, runner = asyncio.create_task(leave()), asyncio.create_task(run())
    await running.wait()
    await ticks(after)
    cancelled = leaver.cancel()
    done, pending = await asyncio.wait([leaver, runner], timeout=HANG_SECS)
    assert not pending
    assert leaver in done
    assert leaver.cancelled() == cancelled
    assert hook.phases()[-1] == "close"
    assert hook.phases().count("close") == 1
    assert not session.graph.finalized
    assert store.statistics().publishers == ()


async def test_both_the_leaving_task_and_the_run_may_be_cancelled() -> None:
    """The other run ends in the tick in which the leaving task begins to wait for it: the wait ends."""
    for after in range(1, 12):
        session = ah.AsyncMonitoredSession(double, [BeforeRunHook(ticks)])
        opened = asyncio.Event()

        async def leave(session: ah.AsyncMonitoredSession = session, opened: asyncio.Event = opened) -> None:
            async with session:
                opened.set()
                await forever()

        async def run(session: ah.AsyncMonitoredSession = session, opened: asyncio.Event = opened) -> None:
            await opened.wait()
            await session.run("double")

        tasks = [asyncio.create_task(leave()), asyncio.create_task(run())]
        await ticks(after)
        for task in tasks:
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=HANG_SECS)
        assert not pending, f"cancelled after {after} ticks"


async def test_a_cancel_of_the_closing_task_is_not_the_callers() -> None:
    """Cancelling the task in which hooks are closed cancels a hook: the error says so, and is not a CancelledError."""
    closed: list[str] = []

    class Closing(ah.SessionRunHook):
        def __init__(self, name: str, act: Callable[[], Awaitable[Any]]) -> None:
            self.name, self.act = name, act

        async def close(self, exc: BaseException | None) -> None:
            closed.append(self.name)
            await self.act()

    async def struck() -> None:
        me().cancel()
        await asyncio.sleep(0)

    hooks = [Closing("first", ticks), Closing("struck", struck), Closing("last", ticks)]
    with pytest.raises(ah.errors.HookCancelledError):
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            await session.run("double")
    assert closed == ["last", "struck", "first"]
    assert me().cancelling() == 0


async def test_a_cancel_ends_the_grace_period_of_background_tasks() -> None:
    """A clean end waits for background tasks; a cancel then ends them immediately, and the hooks are still closed."""
    hook = RecordingHook()
    with ManualClock():

        async def body() -> None:
            async with ah.AsyncMonitoredSession(double, [hook], stop_grace_period_secs=50) as session:
                session.start_soon(forever)

        task = asyncio.create_task(body())
        await ticks(10)
        assert not task.done()
        task.cancel()
        await ticks(20)
        assert task.cancelled()
    assert hook.phases()[-2:] == ["end", "close"]


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "beside others"])
async def test_a_cancel_swallowed_earlier_is_not_counted_again(overlap: bool) -> None:
    """A task may have swallowed a cancel earlier; a later cancel of a hook is still told apart from one of the session."""
    task = me()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(lambda: loop.call_soon(future.cancel))
    hooks = [BeforeRunHook(lambda: future), *([BeforeRunHook(forever)] if overlap else [])]
    with pytest.raises(ah.errors.HookCancelledError):
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            await session.run("double")
    assert task.cancelling() == 1
    task.uncancel()


async def test_a_stop_inside_until_leaves_no_cancel_behind() -> None:
    """The coroutine under `until` requests the stop itself and returns without waiting: no stray cancel at the next await."""
    async with ah.AsyncMonitoredSession(double) as session:

        async def quick() -> int:
            session.request_stop("enough")
            return 1

        with contextlib.suppress(ah.StopRequestedError):
            assert await session.until(quick()) == 1
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert me().cancelling() == 0


async def test_an_error_reported_by_a_hook_that_does_not_wait_comes_out() -> None:
    """A hook reports a failure to the coordinator, and nothing suspends after it: the error comes out, and no cancel."""
    error = ValueError("reported")

    class Reports(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            self.coord = coord

        async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            self.coord.request_stop(error)

    with pytest.raises(ValueError, match="reported") as failure:
        async with ah.AsyncMonitoredSession(double, [Reports()]) as session:
            await session.run("double")
    assert failure.value is error
    await asyncio.sleep(0)
    assert me().cancelling() == 0


@pytest.mark.parametrize("fails", ["begin", "after_create_session"])
async def test_workers_learn_of_a_chief_that_fails_before_it_is_open(fails: str) -> None:
    """A chief fails between initialising the variables and being open: workers that wait for its steps get its error."""
    graph = ah.Graph()
    graph.variable("w", 0)

    @graph.train_op(adds_to="w")
    def train() -> int:
        return 1

    store, variables = ah.MemoryStepStore(), ah.Variables()

    class Fails(ah.SessionRunHook):
        async def begin(self) -> None:
            await ticks(2)
            if fails == "begin":
                raise ValueError("chief")

        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            await ticks(5)
            if fails == "after_create_session":
                raise ValueError("chief")

    async def chief() -> None:
        async with ah.AsyncMonitoredSession(graph, [Fails()], global_step=store, variables=variables, name="chief"):
            pass

    async def worker() -> None:
        creator = ah.WorkerSessionCreator(graph, global_step=store, variables=variables)
        async with ah.AsyncMonitoredSession(creator, [ah.GlobalStepWaiterHook(2)], name="worker") as session:
            await session.run("train")

    tasks = [asyncio.create_task(chief()), asyncio.create_task(worker())]
    _, pending = await asyncio.wait(tasks, timeout=HANG_SECS)
    for task in pending:
        task.cancel()
        await asyncio.wait([task])
    assert not pending
    assert isinstance(tasks[0].exception(), ValueError)
    assert isinstance(tasks[1].exception(), ah.PublisherFailedError)
