"""What is said about mistakes that had no message, or one without a cure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from tests.support.checks import invalid
from tests.support.sessions import counting, run_session, use_up

pytestmark = pytest.mark.every_python


def test_the_cure_is_named() -> None:
    """The message has what to give in place of a bare number, and no address."""
    with invalid("Every(steps=100)", "Every(secs=100)") as found:
        ah.CheckpointSaverHook(every=100)  # type: ignore[arg-type]
    assert "0x" not in str(found.value)


@pytest.mark.parametrize("value", [None, "0.5", [1.0, None], {"loss": 1.0}, b"1"])
async def test_nanhook_refuses_what_is_no_number(value: Any) -> None:
    """A value that NanHook cannot check is an error with the step, and not taken for a good one."""

    async def step() -> dict[str, Any]:
        return {"loss": value}

    with invalid("'loss' is ", "at step 1", "NanHook checks numbers"):
        await run_session(ah.AsyncMonitoredSession(step, [ah.NanHook("loss")]), 1, "loss")


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), np.array(3)])
async def test_whole_numbers_of_other_libraries(number: Any) -> None:
    """An option that takes an int takes one of numpy, and keeps an int; a float and a bool are
    refused.
    """
    hook = ah.StopAtStepHook(last_step=number)
    assert type(hook.last_step) is int
    kept = ah.RecoveryPolicy(max_attempts=number).max_attempts, ah.checkpoint.KeepNewest(number).n
    assert list(map(type, kept)) == [int, int]
    assert type(ah.hooks.GlobalStepWaiterHook(number).wait_until_step) is int
    async with counting(hook) as session:
        await use_up(session.steps("train"))
    assert session.global_step.latest.step == 3
    for wrong in (np.float64(3), np.bool_(True), True):
        with invalid("last_step is ", "give a whole number"):
            ah.StopAtStepHook(last_step=wrong)  # type: ignore[arg-type]
