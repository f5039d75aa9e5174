"""TensorFlow's own tests of its monitored session (71-171 in the table): the end of the block and
of its background tasks.
"""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.checks import refused
from tests.support.sessions import counting, counting_graph
from tests.support.waiting import ticks
from tests.tensorflow.blocks import ONE_RUN, MakeSession, boom, both_kinds, run_block

pytestmark = pytest.mark.every_python

# -- background tasks at the end


@pytest.mark.parametrize("failed", [False, True], ids=["clean", "after a failed run"])
async def test_closing_stops_background_tasks(failed: bool) -> None:
    """At a clean end tasks see the stop, and are waited for, also after a failed run; then the
    session is closed.
    """
    ended: list[str] = []

    async def wait(coord: ah.Coordinator) -> None:
        await coord.wait_for_stop()
        await asyncio.sleep(0)
        ended.append("task")

    hook = FaultInjectionHook({("before_run", 1): OSError("once")} if failed else {})
    async with counting(hook) as session:
        coord = session.coord
        tasks = [coord.start_soon(wait, coord), session.start_soon(wait, coord)]
        if failed:
            with pytest.raises(OSError, match="once"):
                await session.run("train")
    assert coord.should_stop()
    assert ended == ["task", "task"]
    assert all(task.done() and not task.cancelled() for task in tasks)


# -- the end of the block


@both_kinds
async def test_a_body_that_ends_closes_the_session(make: MakeSession) -> None:
    """A block that ends normally closes hooks and session, and no run is possible then."""
    hook = RecordingHook()
    async with make(counting_graph(), [hook]) as session:
        assert await session.run("train") == 1
    assert hook.phases() == [*ONE_RUN, "end", "close"]
    with refused(ah.errors.SessionClosedError, "closed"):
        await session.run("train")


@both_kinds
@pytest.mark.parametrize("how", ["task", "coordinator"])
async def test_a_failed_background_task_comes_out_of_the_run(make: MakeSession, how: str) -> None:
    """A failure in the background is the error of the current or the next run; no run begins after
    it.
    """
    hook = RecordingHook()

    async def body(session: ah.AsyncMonitoredSession) -> None:
        if how == "task":
            session.start_soon(boom)
            await ticks()
        else:
            session.coord.request_stop(OSError("boom"))
        assert session.should_stop()
        with pytest.raises(OSError, match="boom") as raised:
            await session.run("train")
        raise raised.value

    with pytest.raises(OSError, match="boom") as caught:
        await run_block(make(counting_graph(), [hook]), body)
    assert "before_run" not in hook.phases()
    assert hook.closed_with == [caught.value]


@both_kinds
async def test_a_failed_background_task_comes_out_of_the_block(make: MakeSession) -> None:
    """If no run comes after it, the block raises it: there is no `end`."""
    hook = RecordingHook()

    async def body(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(boom)
        await ticks()
        assert session.should_stop()

    with pytest.raises(OSError, match="boom") as caught:
        await run_block(make(counting_graph(), [hook]), body)
    assert hook.phases() == ["begin", "after_create_session", "close"]
    assert hook.closed_with == [caught.value]


async def test_closing_inside_the_block_is_harmless() -> None:
    """`aclose` in the block and again at its end: each hook's `end` and `close` are called once,
    nothing is raised.
    """
    hook = RecordingHook()
    async with counting(hook) as session:
        await session.run("train")
        await session.aclose()
        assert session.should_stop()
        await session.aclose()
    await session.aclose()
    assert hook.phases() == [*ONE_RUN, "end", "close"]
