"""LoggingHook over a restart; what it logs otherwise is in the tests of TensorFlow's behaviour."""

from __future__ import annotations

import logging

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.hooks import RestoringHook
from tests.support.sessions import counting


async def test_a_resumed_run_logs_as_an_uninterrupted_one(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """At the same steps; the first run of the second part is no first one."""
    caplog.set_level(logging.INFO, logger="aiohooks.hooks")
    first, second = (ah.LoggingHook(["loss"], every=ah.Every(steps=3)) for _ in range(2))
    for hook, others, start in ((first, [], 0), (second, [RestoringHook(second, None)], 4)):
        for restoring in others:
            restoring.state = first.state_dict()
        async with counting(hook, *others, global_step=ah.MemoryStepStore(start)) as session:
            for _ in range(4):
                clock.advance(2.0)
                await session.run("train")
    assert [text for text in caplog.messages if "loss" in text] == [
        "step 1: loss = 10",
        "step 3: loss = 10 (4.000 sec)",
        "step 6: loss = 10",
    ]
