"""TensorFlow's own tests of recovery (111-120 and 132-136 in the table)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, counting
from tests.support.waiting import ticks
from tests.tensorflow.blocks import DyingCreator

pytestmark = pytest.mark.every_python

Use = Callable[[ah.AsyncMonitoredSession], Awaitable[Any]]


async def run_with_hooks(session: ah.AsyncMonitoredSession) -> Any:
    async def step_fn(context: ah.session.StepContext) -> Any:
        return await context.run_with_hooks("loss")

    return await session.run_step_fn(step_fn)


async def run_raw(session: ah.AsyncMonitoredSession) -> Any:
    async def step_fn(context: ah.session.StepContext) -> Any:
        return await context.session.run("loss")

    return await session.run_step_fn(step_fn)


USES: dict[str, Use] = {
    "run": lambda session: session.run("loss"),
    "step function with hooks": run_with_hooks,
    "step function without": run_raw,
}
each_use = pytest.mark.parametrize("use", USES.values(), ids=USES)


async def fail(error: BaseException) -> None:
    """Fail, as a background task does."""
    raise error


# -- what is recovered from


async def test_recovery_keeps_variables_and_step() -> None:
    """Unlike TensorFlow's without a checkpoint, a recovered session continues from the values and
    the step that were reached.

    A run that failed left nothing; one whose `after_run` failed was complete, and is made once
    more.
    """
    hook = FaultInjectionHook(
        {("before_run", 3): ah.AbortedError("lost"), ("after_run", 4): ah.UnavailableError("away")}
    )
    async with counting(hook, recovery=NO_BACKOFF) as session:
        seen = [(await session.run(["total", "train"], {"x": 10}))[0] for _ in range(4)]
        assert seen == [0, 10, 20, 40]
        assert session.global_step.latest.step == 5


# -- background tasks


@each_use
async def test_a_lost_background_task_is_recovered_from(use: Use) -> None:
    """A recoverable failure of a task of the created session is no stop: the next run replaces the
    session first.
    """
    creator = DyingCreator([9, 9])
    async with ah.AsyncMonitoredSession(creator, recovery=NO_BACKOFF) as session:
        session.coord.start_soon(fail, ah.AbortedError("lost"))
        await ticks()
        assert not session.should_stop()
        assert await use(session) == 10
        assert not session.should_stop()
        assert [one.closed for one in creator.made] == [True, False]
        assert await use(session) == 10
    assert len(creator.made) == 2


async def test_what_a_run_raises_beside_a_lost_task_is_recovered_too() -> None:
    """If a task is lost and the run fails because of it with another error, both are recovered
    from.
    """

    async def lose(run_context: ah.SessionRunContext) -> None:
        if run_context.attempt == 1:
            session.coord.request_stop(ah.AbortedError("the reader is gone"))
            raise OSError("nothing to read")

    async with counting(PhaseHook("before_run", lose), recovery=NO_BACKOFF) as session:
        assert await session.run("train") == 1
        assert session.status().recoveries == 1
