"""Background tasks that fail together, or during a recovery: one recovery, and no cancellation
comes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, doubling, outcome, recovery_policy, use_up
from tests.support.waiting import cancels_left, forever, ticks

pytestmark = pytest.mark.every_python


class Workers(ah.SessionRunHook):
    """Starts workers in every session; those of the first sessions call the test's function."""

    def __init__(
        self, work: Callable[[int], Awaitable[None]], count: int = 1, sessions: int = 1
    ) -> None:
        self.work = work
        self.count = count
        self.failing = sessions
        self.sessions = 0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.sessions += 1
        for number in range(self.count):
            coord.start_soon(self.run_worker, self.sessions, coord, number)
        await ticks(3)

    async def run_worker(self, session: int, coord: ah.Coordinator, number: int) -> None:
        if session <= self.failing:
            await self.work(number)
        await coord.until(forever())

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await ticks(15)


def crash_after(*passes: int) -> Callable[[int], Awaitable[None]]:
    """Return work of which worker `n` crashes after so many passes of the loop; a worker without a
    number waits.
    """

    async def crash(number: int) -> None:
        if number < len(passes):
            await ticks(passes[number])
            raise ah.AbortedError(f"crash {number}")

    return crash


@pytest.mark.parametrize("apart", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [2, 6])
async def test_workers_that_crash_one_after_the_other(count: int, apart: int) -> None:
    """Several crashes within a few ticks are one recovery; a crash during the recovery does not
    cancel it.
    """
    workers = Workers(crash_after(*(8 + apart * number for number in range(count))), count)
    session = doubling(workers, ah.StopAtStepHook(last_step=3), recovery=NO_BACKOFF)
    assert await outcome(session, lambda session: use_up(session.steps("loss"))) is None
    assert (session.global_step.latest.step, workers.sessions) == (3, 2)
    assert session.stop_reason == "step 3 reached the last step, 3"


@pytest.mark.parametrize("when", range(0, 40, 3))
async def test_a_task_of_the_whole_session_fails_meanwhile(when: int) -> None:
    """A task that no recovery brings back fails before, in or after the recovery of another: its
    error always comes out.
    """
    error = ah.AbortedError("for good")  # of a type that the policy has

    async def fail() -> None:
        await ticks(when)
        raise error

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(fail)
        await use_up(session.steps("loss"))

    assert await outcome(doubling(Workers(crash_after(8)), recovery=NO_BACKOFF), use) is error
    assert cancels_left() == 0


# -- while a loop of steps waits for its next feed


class Lost:
    """Work that fails when the test says so."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.fail = asyncio.Event()

    async def __call__(self, number: int) -> None:
        await self.fail.wait()
        raise self.error


@pytest.mark.parametrize(("kind", "failures"), [("generator", 1), ("generator", 3), ("queue", 1)])
async def test_a_loss_during_the_wait_for_a_feed_is_recovered_meanwhile(
    kind: str, failures: int
) -> None:
    """The session recovers while the wait continues, also if the feed comes from what the recovery
    starts again.
    """
    queue = asyncio.Queue[int]()
    closed = list[bool]()
    losses = list[int]()
    lost = Lost(ah.UnavailableError("away"))

    class Producing(Workers):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            await super().after_create_session(session, coord)
            if self.sessions == failures + 1:
                queue.put_nowait(2)
                queue.put_nowait(3)

    async def generated() -> AsyncIterator[int]:
        try:
            while True:
                yield await queue.get()
        finally:
            closed.append(True)

    queue.put_nowait(1)
    hook = Producing(lost, sessions=failures)
    hooks = [hook, ah.StopAtStepHook(last_step=3)]
    feeds: Any = generated() if kind == "generator" else queue
    async with doubling(*hooks, recovery=recovery_policy(max_attempts=9)) as session:
        async for loss in session.steps("loss", feeds=feeds):
            losses.append(loss)
            lost.fail.set()
    assert (losses, hook.sessions, closed) == (
        [2, 4, 6],
        failures + 1,
        [True] * (kind == "generator"),
    )


@pytest.mark.parametrize("how", ["stop", "failure", "cancel", "giving up"])
async def test_what_ends_the_wait_for_a_feed(how: str) -> None:
    """A stop, a failure that is not recovered, a cancellation, and a recovery that gives up, with
    the history, end the wait.
    """
    waiting = asyncio.Event()
    error = ValueError("wrong") if how == "failure" else ah.UnavailableError("away")
    policy = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=600, max_secs=600, jitter=False))
    if how == "giving up":
        policy = recovery_policy(max_attempts=2)
    lost = Lost(error)
    hook = Workers(lost, sessions=9 if how == "giving up" else 1)

    async def feeds() -> AsyncIterator[int]:
        waiting.set()
        await forever()
        yield 1

    session = doubling(hook, recovery=policy)
    training = asyncio.create_task(
        outcome(session, lambda session: use_up(session.steps("loss", feeds=feeds())))
    )
    await waiting.wait()
    lost.fail.set()
    await ticks()
    if how == "stop":
        session.request_stop("enough")
    elif how == "cancel":
        training.cancel()
    raised = await training
    if how in ("failure", "giving up"):
        assert raised is error
    else:
        assert isinstance(raised, asyncio.CancelledError if how == "cancel" else type(None))
    if how == "giving up":
        assert any("2 attempts are used up" in note for note in error.__notes__)
        assert hook.sessions == 3


# -- what lives through a recovery


@pytest.mark.parametrize("begins", ["before", "after"])
async def test_a_task_that_lives_through_recoveries_waits_through_them(begins: str) -> None:
    """Its wait starts the recovery, as there is no run that would, and gets what that brings."""
    lost = Lost(ah.UnavailableError("away"))
    queue = asyncio.Queue[int]()

    class Producing(Workers):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            await super().after_create_session(session, coord)
            queue.put_nowait(self.sessions)

    async def take(wait: Callable[[Awaitable[int]], Awaitable[int]]) -> list[int]:
        first = await wait(queue.get())
        lost.fail.set()
        if begins == "after":
            await ticks(5)
        return [first, await wait(queue.get())]

    async with doubling(Producing(lost), recovery=NO_BACKOFF) as session:
        task = session.start_soon(take, session.until)
        await asyncio.wait([task])
        assert task.result() == [1, 2]
        lost.fail.clear()


@pytest.mark.parametrize("later", [0, 8])
async def test_the_end_of_a_session_ends_a_recovery_that_no_run_makes(later: int) -> None:
    """That is neither a failure, nor the reason of a stop."""
    lost = Lost(ah.UnavailableError("away"))
    queue = asyncio.Queue[int]()
    policy = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=600, max_secs=600, jitter=False))
    async with doubling(Workers(lost), recovery=policy, stop_grace_period_secs=0) as session:
        loop = asyncio.create_task(use_up(session.steps("loss", feeds=queue)))
        await ticks(5)
        lost.fail.set()
        await ticks(2)
        run = asyncio.create_task(session.run("loss"))
        await ticks(12)
        run.cancel()
        await ticks(later)
    assert session.stop_reason is None
    await asyncio.wait([loop, run])
    assert (loop.exception(), run.cancelled()) == (None, True)


async def test_a_wait_that_a_recovery_may_outlast_needs_producers_that_live() -> None:
    """A task of a hook's coordinator is rejected as its producer: a recovery cancels it, and starts
    another, and the wait would end as if everything had been produced.
    """
    queue = asyncio.Queue[int]()
    tasks = list[asyncio.Task[None]]()
    coords = list[Any]()
    may_end = asyncio.Event()
    remedy = r"'produce' of a hook's coordinator.*session\.start_soon"

    async def produce() -> None:
        queue.put_nowait(1)
        await may_end.wait()

    async def start(_: object, coord: ah.Coordinator) -> None:
        coords.append(coord)
        tasks.append(coord.start_soon(produce, name="produce"))

    async def wait_in_run(context: ah.SessionRunContext) -> None:
        assert await coords[-1].until(queue.get(), producer=tasks) == 1

    async def wait_in_task() -> int:
        got: int = await coords[-1].until(queue.get(), producer=tasks)
        return got

    hooks = [PhaseHook("after_create_session", start), PhaseHook("before_run", wait_in_run)]
    async with doubling(*hooks) as session:
        with pytest.raises(ah.errors.InvalidArgumentError, match=remedy):
            session.steps("loss", feeds=queue, producer=tasks)
        for until in (session.until, session.coord.until):
            with pytest.raises(ah.errors.InvalidArgumentError, match=remedy):
                await until(queue.get(), producer=tasks)
        await session.run("loss")
        queue.put_nowait(1)
        assert await session.coord.start_soon(wait_in_task) == 1
        may_end.set()
    tasks.clear()
    async with doubling(hooks[0], recovery=ah.RecoveryPolicy(on=())) as session:
        await use_up(session.steps("loss", feeds=queue, producer=tasks))
    assert session.global_step.latest.step == 1
