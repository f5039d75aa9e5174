"""A hook that ignores its cancellation has the grace period; then the others continue without it,
and its end is logged.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import BeforeRunHook
from tests.support.sessions import doubling
from tests.support.waiting import Uncancellable, fail, parked, ticks, until_true

pytestmark = [pytest.mark.every_python, pytest.mark.may_leak]


places = pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])


@places
@pytest.mark.parametrize("ended_by", ["time limit", "time limit, logged", "failure"])
async def test_a_cancel_that_is_ignored(
    place: int, ended_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The time limit, or the failure of another hook, and the grace period pass: the run ends with
    that error, or continues.

    The hook is left running in a task that is not the caller's; a later error of it is logged.
    """
    hook = Uncancellable(error := OSError("late"))
    hooks: list[Any] = [
        BeforeRunHook((lambda: fail(ValueError("first"))) if ended_by == "failure" else ticks)
    ]
    options: dict[str, Any] = {} if ended_by == "failure" else {"timeout": 5}
    if ended_by == "time limit, logged":
        options["on_error"] = "log"
    name = "BeforeRunHook#2" if place else "BeforeRunHook"
    hooks.insert(place, ah.configure(BeforeRunHook(hook.wait), **options))
    with ManualClock() as clock:
        async with doubling(*hooks, stop_grace_period_secs=9) as session:
            run = await parked(session.run("loss"), 5)
            if ended_by != "failure":
                clock.advance(5)
            await until_true(lambda: hook.cancels)
            await ticks()
            assert (hook.cancels, run.done()) == (1, False)
            clock.advance(9)
            if ended_by == "failure":
                with pytest.raises(ValueError, match="first"):
                    await run
            elif ended_by == "time limit":
                with refused(ah.errors.HookTimeoutError, f"{name}.before_run", "5 s"):
                    await run
            else:
                assert await run == 2
            assert run.cancelling() == 0
            await hook.release()
            assert hook.task is not run
    messages = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    left = (
        f"{name}.before_run at step 1 still runs 9 s after its cancellation; continuing without it"
    )
    assert left in messages
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)
