"""VersionGateHook in several sessions of one trainer: the items of a session that has left are made
by the others, no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.version_gate import VersionGateHook
from aiohooks.testing import ManualClock
from tests.support.waiting import ticks, until_true

pytestmark = pytest.mark.every_python

MAX_LAG = 2


class Workers:
    """Sessions that make items for a trainer, each item with the version it was made with."""

    def __init__(self, count: int = 3, *, steps: ah.StepStore | None = None) -> None:
        self.versions = ah.MemoryStepStore(run="weights")
        self.items: asyncio.Queue[int] = asyncio.Queue()
        self.hooks: list[VersionGateHook] = []
        self.ahead: list[int] = []
        self.end: dict[int, BaseException | None] = {}
        self.steps = steps
        self.tasks = [self.start() for _ in range(count)]

    def start(self) -> asyncio.Task[None]:
        hook, number = VersionGateHook(self.versions, max_lag=MAX_LAG), len(self.hooks)
        self.hooks.append(hook)
        return asyncio.create_task(self.run(hook, number))

    async def run(self, hook: VersionGateHook, number: int) -> None:
        async def make() -> dict[str, int]:
            if isinstance(error := self.end.pop(number, None), Exception):
                raise error
            version = self.versions.latest.step
            await asyncio.sleep(0)
            return {"version": version}

        async with ah.AsyncMonitoredSession(
            make, [hook], name=f"worker-{number}", global_step=self.steps
        ) as session:
            async for version in session.steps("version"):
                self.items.put_nowait(version)
                assert hook.ahead is not None
                self.ahead.append(hook.ahead)

    async def leave(self, how: str) -> None:
        """Let the first worker leave."""
        task = self.tasks.pop(0)
        if how == "failed":
            self.end[0] = ZeroDivisionError("crashed")
        elif how == "finished":
            self.end[0] = ah.OutOfRangeError("no more input")
        else:
            task.cancel()
        await asyncio.wait([task])
        if how == "failed":
            assert isinstance(task.exception(), ZeroDivisionError)

    async def idle(self) -> None:
        await ticks(60)

    async def aclose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.versions.statistics().waiting == 0


class Trainer:
    """A session that makes a version of some items, and waits for them as `how` says."""

    def __init__(self, workers: Workers, *, how: str, last_step: int, batch: int = 3) -> None:
        self.workers = workers
        self.batch = batch
        self.last_step = last_step
        self.lags: list[int] = []
        self.may_train = asyncio.Event()
        self.may_train.set()
        self.task = asyncio.create_task(self.run(how))

    async def train(self, batch: list[int]) -> dict[str, int]:
        self.lags += [self.workers.versions.latest.step - version for version in batch]
        await asyncio.sleep(0)
        await self.may_train.wait()
        return {}

    async def batches(self) -> AsyncIterator[list[int]]:
        while True:
            yield [await self.workers.items.get() for _ in range(self.batch)]

    async def run(self, how: str) -> None:
        hooks = [ah.StopAtStepHook(last_step=self.last_step)]
        async with ah.AsyncMonitoredSession(
            self.train, hooks, global_step=self.workers.versions, name="trainer"
        ) as session:
            if how == "feeds":
                async for _ in session.steps("train", feeds=self.batches()):
                    pass
            while not session.should_stop():
                get = self.workers.items.get
                batch = [
                    await (session.until(get()) if how == "until" else get())
                    for _ in range(self.batch)
                ]
                await session.run("train", {"batch": batch})


@contextlib.asynccontextmanager
async def training(
    count: int = 3,
    *,
    how: str = "until",
    last_step: int = 40,
    batch: int = 3,
    steps: ah.StepStore | None = None,
) -> AsyncIterator[tuple[Workers, Trainer]]:
    """Let workers and a trainer make five versions; after the block, let them finish, which the
    trainer's end is for workers.
    """
    workers = Workers(count, steps=steps)
    trainer = Trainer(workers, how=how, last_step=last_step, batch=batch)
    await workers.versions.wait_for(5)
    yield workers, trainer
    await trainer.task
    await asyncio.gather(*workers.tasks)
    assert workers.versions.latest.step == last_step


@pytest.mark.parametrize("wait", ["until", "feeds"])
@pytest.mark.parametrize("how", ["cancelled", "failed", "finished"])
async def test_the_others_make_the_items_of_a_session_that_has_left(
    how: str, wait: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However a worker has left, a trainer with a fixed batch continues with items of the others,
    none older than the bound.
    """
    caplog.set_level(logging.INFO, logger="aiohooks.hooks")
    async with training(how=wait) as (workers, trainer):
        await workers.leave(how)
    assert max(trainer.lags) <= MAX_LAG
    assert max(workers.ahead) <= MAX_LAG
    taken_over = [hook.taken_over for hook in workers.hooks[1:]]
    assert min(taken_over) > 10, "each of them does its share"
    assert sum(taken_over) <= 40 - 5 + MAX_LAG
    said = [message for message in caplog.messages if "makes a run in their place" in message]
    assert len(said) == 1
    assert "left: worker-0 (" in said[0]


async def test_nothing_is_made_in_place_of_a_session_whose_items_are_not_needed() -> None:
    """If the trainer makes its batches smaller instead, the others get no further ahead than
    before.
    """
    async with training(2, last_step=30, batch=2) as (workers, trainer):
        trainer.batch = 1
        await workers.leave("cancelled")
    assert workers.hooks[1].taken_over == 0
    assert max(trainer.lags) <= 2 * MAX_LAG, "two items of the session that has left are used late"


async def test_without_a_publisher_that_waits_nothing_is_taken_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the trainer may be at work the bound holds; a line a minute names waiters, publishers and
    who has left.
    """
    caplog.set_level(logging.INFO, logger="aiohooks.version_gate")
    with ManualClock() as clock:
        workers = Workers(3)
        trainer = Trainer(workers, how="queue", last_step=40)
        await workers.versions.wait_for(5)
        await workers.leave("cancelled")
        await workers.idle()
        version = workers.versions.latest.step
        assert version < 40
        assert [hook.taken_over for hook in workers.hooks] == [0, 0, 0]
        clock.advance(125)
        trainer.task.cancel()
        await asyncio.wait([trainer.task])
        await workers.aclose()
    waits = (
        f"2 of 2 sessions wait for version {version + 1} or more of 'weights', now at {version},"
        " published by trainer"
    )
    assert [
        record.getMessage() for record in caplog.records if record.name == "aiohooks.version_gate"
    ] == [f"{waits}; left: worker-0 (CancelledError), for {secs} s now" for secs in (60, 120)]
    assert clock.pending == 0


@pytest.mark.parametrize("wait", ["until", "feeds"])
async def test_while_the_trainer_is_at_work_nothing_is_taken_over(wait: str) -> None:
    """Its waits are over: the bound holds however long its step takes."""
    async with training(how=wait) as (workers, trainer):
        trainer.may_train.clear()
        await workers.leave("cancelled")
        await workers.idle()
        assert [hook.taken_over for hook in workers.hooks] == [0, 0, 0]
        trainer.may_train.set()
    assert max(trainer.lags) <= MAX_LAG


async def test_a_session_that_joins_replaces_one_that_has_left() -> None:
    """A new worker makes its own items; what is made in place of the old one is at most what that
    did not make until then.
    """
    async with training(last_step=60) as (workers, trainer):
        await workers.leave("failed")
        await workers.versions.wait_for(20)
        workers.tasks.append(workers.start())
        await workers.versions.wait_for(22)
        assert 0 < sum(hook.taken_over for hook in workers.hooks) <= 22
    assert sum(hook.taken_over for hook in workers.hooks) <= 22 + MAX_LAG
    assert max(trainer.lags) <= MAX_LAG


async def test_one_new_session_in_place_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """When all workers have left and the trainer waits, a warning names them; a new one makes the
    items of all.
    """
    async with training() as (workers, trainer):
        for task in workers.tasks:
            task.cancel()
        await asyncio.wait(workers.tasks)
        await workers.idle()
        (warning,) = caplog.messages
        assert warning.startswith("no session waits for versions of 'weights', now at")
        assert (
            "published by trainer; left: worker-0 (CancelledError), worker-1 (CancelledError),"
            " worker-2" in warning
        )
        workers.tasks = [workers.start()]
    assert max(trainer.lags) <= MAX_LAG
    assert workers.hooks[-1].taken_over > 40


async def test_sessions_that_share_their_step_take_nothing_over() -> None:
    """Where sessions share one step, the others make the steps of one that has left anyway."""
    async with training(batch=1, steps=ah.MemoryStepStore(run="shipped")) as (workers, _):
        await workers.leave("cancelled")
    assert [hook.taken_over for hook in workers.hooks] == [0, 0, 0]


async def test_a_reset_of_the_versions_forgets_what_was_missing() -> None:
    """After a reset a session that has left counts as equal to the version, as the others do."""
    workers = Workers(2)
    trainer = Trainer(workers, how="until", last_step=1_000, batch=2)
    await workers.versions.wait_for(10)
    await workers.leave("cancelled")
    await workers.versions.wait_for(20)
    await workers.versions.reset(0)
    hook = workers.hooks[1]
    before = hook.taken_over
    await workers.versions.wait_for(10)
    assert 0 < hook.taken_over - before <= 10 + MAX_LAG + 1
    trainer.task.cancel()
    await asyncio.wait([trainer.task])
    await workers.aclose()


async def test_a_session_that_is_cancelled_as_it_is_let_in() -> None:
    """A cancellation in the tick in which a session is let in ends it; the others are let in
    instead.
    """
    workers = Workers(3)
    workers.end[0] = ah.OutOfRangeError(
        "no input"
    )  # it makes none of the three items that it may make

    async def train() -> dict[str, Any]:
        return {}

    async def cancel_the_first_that_is_let_in() -> int:
        await until_true(lambda: any(hook.taken_over for hook in workers.hooks))
        (number,) = (number for number, hook in enumerate(workers.hooks) if hook.taken_over)
        workers.tasks[number].cancel()
        await asyncio.wait([workers.tasks[number]])
        await workers.idle()
        return number

    async with ah.AsyncMonitoredSession(train, global_step=workers.versions) as trainer:
        cancelled = await trainer.until(cancel_the_first_that_is_let_in())
        other = 3 - cancelled
        assert workers.tasks[cancelled].cancelled()
        assert workers.hooks[other].taken_over >= 2
        assert workers.items.qsize() == 3 * (MAX_LAG + 1), "all items that three sessions may make"
        await workers.aclose()
