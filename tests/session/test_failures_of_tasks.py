"""The failure of a background task leaves the session, unless code outside of the session's own
tasks has got it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, doubling, outcome, recovery_policy, same
from tests.support.waiting import fail, forever, raises_after, ticks

pytestmark = pytest.mark.every_python


@pytest.fixture
def failure() -> OSError:
    """The failure of a background task."""
    return OSError("the upload failed")


# -- who else waits when a task fails, and gets the failure


async def waits_in_session(session: ah.AsyncMonitoredSession) -> None:
    await session.until(forever())


async def waits_in_coordinator(session: ah.AsyncMonitoredSession) -> None:
    await session.coord.until(forever())


async def gives_up(session: ah.AsyncMonitoredSession) -> None:
    """Handles the failure of the other task, which is not its business."""
    with pytest.raises(OSError, match="upload"):
        await session.until(forever())


async def looks_for_failures(session: ah.AsyncMonitoredSession) -> None:
    """Asks for the failure as soon as there is one."""
    await session.coord.wait_for_stop()
    session.coord.raise_requested_exception()


async def runs(session: ah.AsyncMonitoredSession) -> None:
    while True:
        await session.run("loss")
        await ticks()


async def gives_up_in_its_own_task(session: ah.AsyncMonitoredSession) -> None:
    """What a background task starts is part of it."""
    await asyncio.gather(session.until(forever()), return_exceptions=True)


OTHERS = [
    waits_in_session,
    waits_in_coordinator,
    gives_up,
    gives_up_in_its_own_task,
    looks_for_failures,
    runs,
]


# -- what the block does meanwhile


async def works(session: ah.AsyncMonitoredSession) -> None:
    """The block waits for something of its own."""
    await ticks(30)


async def gives_up_recoverable(session: ah.AsyncMonitoredSession) -> None:
    """Handles the first of two failures."""
    with pytest.raises(ah.AbortedError):
        await session.until(forever())
    await ticks(10)


async def runs_once(session: ah.AsyncMonitoredSession) -> None:
    """Runs when both have happened."""
    await ticks(10)
    await session.run("loss")


async def stops(session: ah.AsyncMonitoredSession) -> None:
    await ticks(30)
    session.request_stop("enough")


async def leaves(session: ah.AsyncMonitoredSession) -> None:
    """`end` of the hook takes longer than the task."""


async def closes(session: ah.AsyncMonitoredSession) -> None:
    await session.aclose()


@pytest.mark.parametrize("body", [works, stops, leaves, closes])
@pytest.mark.parametrize("other", [None, *OTHERS])
@pytest.mark.parametrize("owner", ["session", "coord"])
async def test_a_failure_that_only_tasks_of_the_session_have_got_leaves_it(
    body: Callable[[Any], Awaitable[None]],
    other: Callable[[Any], Awaitable[None]] | None,
    owner: str,
    failure: OSError,
) -> None:
    """Whatever the other background tasks do with it, and wherever the block is."""

    async def use(session: ah.AsyncMonitoredSession) -> None:
        starts: Any = session if owner == "session" else session.coord
        starts.start_soon(raises_after(10, failure), name="upload")
        if other is not None:
            starts.start_soon(other, session)
        await body(session)

    async def end(session: object) -> None:
        await ticks(30)

    assert await outcome(doubling(PhaseHook("end", end)), use) is failure


@pytest.mark.parametrize("phase", ["before_run", "end"])
async def test_a_failure_that_a_hook_has_handled_leaves_the_session(
    phase: str, failure: OSError
) -> None:
    """A hook is part of the session: it does not decide for the program."""

    async def handle(argument: Any) -> None:
        with pytest.raises(OSError, match="upload"):
            await session.until(forever())

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(raises_after(3, failure))
        if phase == "before_run":
            await session.run("loss")

    session = doubling(PhaseHook(phase, handle))
    assert await outcome(session, use) is failure


@pytest.mark.parametrize("owner", ["session", "coord"])
@pytest.mark.parametrize("how", ["in the background", "in a task of its own"])
async def test_a_failure_that_a_hook_has_handled_after_its_run_leaves_the_session(
    how: str, owner: str, failure: OSError
) -> None:
    """Nor does it decide in a call that is made alongside later steps, or in a task that it has
    started.
    """
    started = list[asyncio.Task[None]]()

    async def handle() -> None:
        with pytest.raises(OSError, match="upload"):
            await session.until(forever())

    async def after_run(*_: object) -> None:
        if how == "in the background":
            await handle()
        else:
            started.append(asyncio.create_task(handle()))

    async def use(session: ah.AsyncMonitoredSession) -> None:
        await session.run("loss")
        starts = session if owner == "session" else session.coord
        starts.start_soon(raises_after(3, failure))
        await ticks(10)
        await asyncio.gather(*started)

    hook = PhaseHook("after_run", after_run)
    session = doubling(ah.configure(hook, background=how == "in the background"))
    assert await outcome(session, use) is failure


async def test_a_failure_that_a_hook_has_asked_for_leaves_the_session(failure: OSError) -> None:
    """A hook that asks its coordinator for failures does not decide for the program, either."""

    async def handle(argument: Any) -> None:
        await ticks(10)
        with pytest.raises(OSError, match="upload"):
            session.coord.raise_requested_exception()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.coord.start_soon(raises_after(5, failure))

    session = doubling(PhaseHook("end", handle))
    assert await outcome(session, use) is failure


async def test_a_failure_that_the_block_has_handled_is_not_raised_by_a_slower_task(
    failure: OSError,
) -> None:
    """A task of the raw session that passes on the failure of another one has not failed itself."""

    async def cleans_up(session: ah.AsyncMonitoredSession) -> None:
        try:
            await session.coord.until(forever())
        finally:
            await ticks(10)

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.coord.start_soon(cleans_up, session)
        session.start_soon(raises_after(3, failure))
        with pytest.raises(OSError, match="upload"):
            await session.until(forever())
        await ticks(30)

    assert await outcome(doubling(), use) is None


async def test_a_failure_that_a_run_has_raised_is_not_raised_again(failure: OSError) -> None:
    """Whoever caught it has dealt with it: the end of the session is clean."""
    hook = RecordingHook()
    async with doubling(PhaseHook("before_run", forever), hook) as session:
        session.start_soon(fail, failure)
        with pytest.raises(OSError, match="upload") as raised:
            await session.run("loss")
        assert raised.value is failure
    assert hook.phases()[-2:] == ["end", "close"]


async def test_a_failure_that_ended_a_recovery_is_not_raised_again(failure: OSError) -> None:
    """A task of the whole session fails while its raw session is replaced."""
    losses = [ah.AbortedError("lost")]

    async def lose(context: object) -> None:
        if losses:
            raise losses.pop()

    async def create(*_: object) -> None:
        if not losses:
            await forever()

    hooks = [PhaseHook("before_run", lose), PhaseHook("after_create_session", create)]
    async with doubling(*hooks, recovery=NO_BACKOFF) as session:
        session.start_soon(raises_after(20, failure))
        with pytest.raises(OSError, match="upload"):
            await session.run("loss")


async def test_a_raw_session_whose_task_fails_as_it_is_closed_is_replaced() -> None:
    """The failure is of the session that the recovery leaves: it does not end the recovery."""
    creations = 0

    class Worker(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            nonlocal creations
            creations += 1
            if creations == 1:
                coord.start_soon(raises_after(20, ah.AbortedError("of the worker")))

        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            if creations == 1 and run_context.global_step == 2:
                raise ah.AbortedError("lost")

    class Slow(ah.SessionRunHook):
        """Its calls in the background are finished before the tasks are cancelled."""

        async def after_run(self, run_context: Any, run_values: Any) -> None:
            await ticks(40)

    hooks = [Worker(), ah.configure(Slow(), background=True)]
    async with doubling(*hooks, recovery=recovery_policy(max_attempts=1)) as session:
        await session.run("loss")
        await session.run("loss")
        assert (creations, session.status().recoveries) == (2, 1)


@pytest.mark.parametrize("count", [3, 4, 6])
async def test_a_failure_beside_one_that_is_recovered_from_leaves_the_session(
    count: int, failure: OSError
) -> None:
    """Also if it comes while the run, or the raw session, is about to end because of that."""

    class Worker(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.start_soon(raises_after(3, ah.AbortedError("lost")))
            coord.start_soon(raises_after(count, failure))

        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            try:
                await forever()
            finally:
                await ticks(5)

    async def use(session: ah.AsyncMonitoredSession) -> None:
        await session.run("loss")

    assert await outcome(doubling(Worker(), recovery=NO_BACKOFF), use) is failure


@pytest.mark.parametrize("first", ["session", "coord"])
async def test_the_earliest_of_two_failures_is_raised(first: str, failure: OSError) -> None:
    """Whichever of the two coordinators of a session owns its task."""
    later = ValueError("later")

    async def use(session: ah.AsyncMonitoredSession) -> None:
        owners: list[Any] = [session, session.coord]
        if first == "coord":
            owners.reverse()
        owners[0].start_soon(raises_after(3, failure))
        owners[1].start_soon(raises_after(6, later))
        await ticks(20)

    assert await outcome(doubling(), use) is failure


@pytest.mark.parametrize("body", [works, gives_up_recoverable, runs_once])
async def test_a_failure_that_can_be_recovered_from_hides_no_other(
    body: Callable[[Any], Awaitable[None]], failure: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    """The session ends with the failure from which no recovery could help; both are logged."""
    lost = ah.AbortedError("lost")

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.coord.start_soon(raises_after(3, lost))
        session.coord.start_soon(raises_after(4, failure))
        await body(session)

    assert await outcome(doubling(), use) is failure
    assert "after another failure" in caplog.text


async def test_a_loop_that_is_cancelled_in_the_queue_keeps_its_element() -> None:
    """The commit of another task's run does not count as its own."""
    loops = list[asyncio.Task[Any]]()

    async def after_run(*_: object) -> None:
        if loops:
            loops[0].cancel()
        await ticks(10)

    queue = asyncio.Queue[str]()
    queue.put_nowait("mine")
    async with ah.AsyncMonitoredSession(same, [PhaseHook("after_run", after_run)]) as session:
        steps = session.steps("batch", feeds=queue)
        others = [
            asyncio.create_task(session.run("batch", {"batch": name}))
            for name in ("first", "second")
        ]
        await ticks(2)
        loops.append(asyncio.create_task(anext(aiter(steps))))
        await asyncio.wait([*others, *loops])
        assert loops[0].cancelled()
        assert steps.unused == ["mine"]


async def test_a_coordinator_starts_tasks_again_after_join() -> None:
    """`join` has cancelled the tasks of before; those that come are not cancelled with them."""
    coord = ah.Coordinator()
    coord.start_soon(forever)
    coord.request_stop("enough")
    await coord.join(0.0)
    task = coord.start_soon(ticks)
    await task
    assert not task.cancelled()


@pytest.mark.parametrize("end_takes", [0, 40])
async def test_a_session_that_is_closed_while_a_loop_waits_for_its_feed(end_takes: int) -> None:
    """`aclose` of another task ends the loop as a stop does, however long the end takes."""
    came, used = asyncio.Event(), list[Any]()

    async def feeds() -> Any:
        yield 1
        await came.wait()
        yield 2

    async def end(session: object) -> None:
        came.set()
        await ticks(end_takes)

    async def loop() -> None:
        async for values in session.steps("batch", feeds=feeds()):
            used.append(values)

    async with ah.AsyncMonitoredSession(same, [PhaseHook("end", end)]) as session:
        task = asyncio.create_task(loop())
        await ticks(10)
        await session.aclose()
        came.set()
        await task
    assert used == [1]
