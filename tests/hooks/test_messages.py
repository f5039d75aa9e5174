"""What is said about mistakes that had no message, or one without a cure."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from tests.support.checks import invalid, refused
from tests.support.sessions import counting, run_session, use_up
from tests.support.waiting import HANG_SECS

pytestmark = pytest.mark.every_python


class Plain:
    """Not a hook."""


@pytest.mark.parametrize(
    ("make", "error", "parts"),
    [
        (
            lambda: ah.CheckpointSaverHook(every=100),  # type: ignore[arg-type]
            ah.errors.InvalidArgumentError,
            ("Every(steps=100)", "Every(secs=100)"),
        ),
        (
            lambda: counting(Plain()),
            ah.errors.InvalidHookError,
            ("Plain object>, which is not a SessionRunHook",),
        ),
    ],
)
def test_the_cure_is_named(make: Callable[[], Any], error: Any, parts: tuple[str, ...]) -> None:
    """The message has the value and what to give instead, and no address."""
    with refused(error, *parts) as found:
        make()
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


async def test_the_line_of_a_failed_hook_has_its_error(caplog: pytest.LogCaptureFixture) -> None:
    """One line of the log says which hook failed, and with what."""

    async def fail(context: object, values: object) -> None:
        raise ConnectionError("down")

    hook = ah.configure(ah.hooks.LambdaHook(after_run=fail), on_error="log")
    await run_session(counting(hook), 1, "train")
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR] == [
        "LambdaHook.after_run at step 1 failed; continuing, as its on_error says:"
        " ConnectionError('down')"
    ]


@pytest.mark.parametrize("where", ["hook", "block"])
async def test_a_blocked_loop_is_warned_of_once(
    where: str, start_watch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever blocks the event loop is named by file and line, in one warning, while it blocks
    it.
    """
    monkeypatch.setattr("aiohooks._why.blocked_loop._BLOCKED_SECS", 0.1)
    lines: list[str] = []
    warned = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has been blocked" in record.getMessage():
                lines.append(record.getMessage())
                warned.set()

    async def block(*_: object) -> None:
        if not warned.is_set():
            start_watch()
        assert warned.wait(HANG_SECS)  # blocks the loop

    handler, logger = Listening(), logging.getLogger("aiohooks")
    logger.addHandler(handler)
    try:
        hooks = [ah.hooks.LambdaHook(after_run=block)] if where == "hook" else []
        async with counting(*hooks) as session:
            await session.run("train")
            await block()
    finally:
        logger.removeHandler(handler)
    assert len(lines) == 1
    assert f"block ({__file__}:" in lines[0]
