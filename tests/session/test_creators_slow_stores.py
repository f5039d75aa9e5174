"""Sessions whose step store suspends, as that of several processes does: variables and step are
committed together there, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.testing import choose, explore
from tests.support.sessions import counting_graph
from tests.support.waiting import parked, until_true

pytestmark = pytest.mark.every_python


class SlowStore(ah.MemoryStepStore):
    """A store whose `advance` suspends, as a remote engine's does; it may refuse the first one."""

    inline: ClassVar[bool] = False

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asked: list[int] = []
        self.error = error

    async def advance(self, by: int = 1) -> int:
        self.asked.append(by)
        await self.gate.wait()
        if self.error is not None and len(self.asked) == 1:
            raise self.error
        return await super().advance(by)


async def test_a_run_that_read_what_was_undone_is_repeated() -> None:
    """Variables are there before their step; a run that had read those of a step that was refused
    begins again.
    """
    graph, read, gate = ah.Graph(), list[int](), asyncio.Event()
    graph.placeholder("waits")
    graph.variable("v", 1)

    @graph.train_op(updates="v")
    async def double(v: int, waits: bool) -> int:
        read.append(v)
        if waits:
            await gate.wait()
        return 2 * v

    session = ah.Session(graph, global_step=(store := SlowStore(ah.UnavailableError("no"))))
    refused = await parked(session.run("double", {"waits": False}))
    await until_true(lambda: store.asked)
    waiting = await parked(session.run("double", {"waits": True}))
    await until_true(lambda: len(read) == 2)
    store.gate.set()
    with pytest.raises(ah.UnavailableError):
        await refused
    gate.set()
    assert await waiting == session.variables.snapshot()["v"] == 2
    assert read == [1, 2, 1]


class UnreliableStore(ah.MemoryStepStore):
    """A store whose `advance` takes its time, or is refused."""

    inline: ClassVar[bool] = False

    async def advance(self, by: int = 1) -> int:
        await sleep(choose(0, 0.01))
        if choose(False, True):
            raise OSError("refused")
        step = await super().advance(by)
        await sleep(choose(0, 0.01))
        return step


async def train_with_time_limits() -> None:
    """Make runs that fail, and some that a time limit ends anywhere; in the end all agree about
    which of them count.
    """
    store, graph, read, raw = UnreliableStore(), counting_graph(), list[int](), list[ah.Session]()
    loops: list[Any] = []

    @graph.train_op(adds_to="total", name="record")
    async def record(x: int) -> int:
        ah.effect("recorded", x)
        await sleep(choose(0, 0.01))
        return 1

    delivered: list[str] = []

    async def deliver(effect: ah.hooks.Effect) -> None:
        await sleep(choose(0, 0.01))
        delivered.append(effect.key)

    async def feeds() -> AsyncIterator[dict[str, int]]:
        for number in range(6):
            read.append(number)
            yield {"x": number}

    @ah.hook("after_create_session")
    async def keep(session: ah.Session, coord: ah.Coordinator) -> None:
        raw.append(session)

    effects = ah.hooks.EffectsHook({"recorded": deliver}, run="r", when="commit")
    session = ah.AsyncMonitoredSession(
        graph,
        [keep, effects, ah.StopAtStepHook(last_step=5)],
        global_step=store,
        stop_grace_period_secs=1e6,
    )
    try:
        async with session:
            steps = session.steps("record", feeds=feeds(), prefetch=choose(0, 1))
            loops.append(steps)
            ended = False
            while not ended:
                with contextlib.suppress(TimeoutError, OSError):
                    async with asyncio.timeout(choose(None, 0.015)):
                        ended = await anext(steps, None) is None
    finally:
        (status,) = effects.status()
        counted = [one.variables.snapshot()["total"] for one in raw]
        counted += [len(read) - len(one.unused) for one in loops]
        counted += [len(delivered) + status.pending]
        assert {*counted} == {store.latest.step}, counted


@pytest.mark.asyncio(loop_factories=["asyncio"])  # what is explored has a loop of its own
async def test_variables_feeds_and_effects_are_those_of_the_step() -> None:
    """However runs end: in any order, refused, cancelled, stopped, or at a time limit."""
    explored = await explore(train_with_time_limits, seeds=60)
    assert explored.disturbances.keys() >= {"cancel", "choice"}
