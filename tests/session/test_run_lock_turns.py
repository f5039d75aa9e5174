"""`yield_secs`: before a run the event loop gets a turn, if it had none for so long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.hooks import PhaseHook
from tests.support.sessions import make_runs
from tests.support.waiting import result_without_suspending

pytestmark = [pytest.mark.every_python, pytest.mark.turns]

COMPUTING_SECS = 0.006
Loop = Callable[[ah.AsyncMonitoredSession, int], Awaitable[None]]


def computing(
    clock: ManualClock, where: str = "step", secs: float = COMPUTING_SECS, **options: Any
) -> ah.AsyncMonitoredSession:
    """Make a session whose step function, operation or hook computes for so long, and never
    suspends.
    """

    async def step() -> dict[str, int]:
        clock.advance(secs if where == "step" else 0)
        return {"loss": 1}

    async def compute(*_: object) -> None:
        clock.advance(secs)

    graph = ah.Graph()
    graph.variable("total", 0)

    @graph.operation
    def loss() -> int:
        clock.advance(secs)
        return 1

    graph.train_op(adds_to="total")(lambda loss: loss)
    hooks = [PhaseHook("after_run", compute)] if where == "hook" else []
    return ah.AsyncMonitoredSession(graph if where == "operation" else step, hooks, **options)


async def by_run(session: ah.AsyncMonitoredSession, count: int) -> None:
    await make_runs(session, count, "loss")


async def by_steps(session: ah.AsyncMonitoredSession, count: int) -> None:
    async for _ in session.steps("loss"):
        count -= 1
        if not count:
            break


async def by_step_functions(session: ah.AsyncMonitoredSession, count: int) -> None:
    for _ in range(count):
        await in_a_step_function(session, 1)


async def in_a_step_function(session: ah.AsyncMonitoredSession, count: int) -> None:
    async def all_of_them(context: ah.session.StepContext) -> None:
        for _ in range(count):
            await context.run_with_hooks("loss")

    await session.run_step_fn(all_of_them)


@pytest.mark.parametrize("loop", [by_run, by_steps, by_step_functions, in_a_step_function])
@pytest.mark.parametrize("where", ["step", "operation", "hook"])
async def test_steps_that_compute_do_not_starve_the_loop(
    clock: ManualClock, where: str, loop: Loop
) -> None:
    """Between two steps that compute for longer than `yield_secs` another task runs."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with computing(clock, where) as session:
        task = asyncio.create_task(other())
        await loop(session, 10)
        task.cancel()
    assert turns >= 9


async def test_short_steps_together(clock: ManualClock) -> None:
    """Steps that are shorter than `yield_secs` give a turn when they took longer together."""
    seen: list[int] = []
    async with computing(clock, secs=0.25, yield_secs=1.0) as session:
        for number in range(10):
            asyncio.get_running_loop().call_soon(seen.append, number)
            await by_run(session, 1)
            if number == 4:
                assert seen == []
        assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("never", [0, None])
async def test_without_turns(clock: ManualClock, never: float | None) -> None:
    """With 0 or None no run waits for the loop."""
    async with computing(clock, yield_secs=never) as session:
        for _ in range(10):
            assert result_without_suspending(session.run("loss")) == 1


@pytest.mark.plain_tasks
async def test_a_cancellation_in_the_turn(clock: ManualClock) -> None:
    """A cancellation that arrives in the turn ends `run` before anything of it is done; the steps
    before it were returned.
    """
    returned: list[int] = []

    async def train(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(20):
            asyncio.get_running_loop().call_soon(task.cancel)
            await session.run("loss")
            returned.append(session.global_step.latest.step)

    async with computing(clock) as session:
        task = asyncio.create_task(train(session))
        await asyncio.wait([task])
        assert task.cancelled()
        assert (returned, session.global_step.latest.step) == ([1], 1)
        await session.run("loss")
    assert session.global_step.latest.step == 2
