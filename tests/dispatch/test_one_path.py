"""Every kind of method has the same rules: order, time limit, errors, notes, cancels; or a
combination is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.kinds import Does, Kinds, Next, call
from tests.support.waiting import fail, forever, ticks, uncancellable, until_true

pytestmark = pytest.mark.every_python


class Plain:
    def __init__(self, error: BaseException) -> None:
        self.calls = 0
        self.error = error

    def plain(self, text: str) -> None:
        self.calls += 1
        raise self.error


kinds = pytest.mark.parametrize(
    "kind", ["none", "unknown", "first", "merge", "chain", "wrap", "around"]
)


@kinds
async def test_a_failing_hook_is_logged_and_disabled(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_error="log"` the call continues; after so many failures in a row, which a success
    ends, the hook is not called.
    """
    outcomes = iter([True, False, True, True])
    hook = Does(lambda: fail(ValueError("no")) if next(outcomes) else asyncio.sleep(0))
    group = ah.HookGroup(Kinds, [ah.configure(hook, on_error="log", disable_after=2)])
    for _ in range(6):
        await call(group.hooks, kind)
    assert (hook.calls, group.status()[0].failures, group.status()[0].disabled) == (4, 3, True)
    assert "failed 2 times in a row and is not called any more" in caplog.messages[-1]


def test_a_plain_method_has_these_rules() -> None:
    """Its hook is noted, logged and disabled, and a cancel that it finds in a result is not the
    caller's.
    """
    hook = Plain(ValueError("no"))
    group = ah.HookGroup(Kinds, [ah.configure(hook, on_error="log", disable_after=2)])
    for _ in range(4):
        group.hooks.plain("x")
    assert (hook.calls, group.status()[0].disabled) == (2, True)
    with pytest.raises(ValueError, match="no") as raised:
        ah.compose(Kinds, [hook]).plain("x")
    assert raised.value.__notes__ == ["raised by Plain.plain"]
    with refused(ah.errors.HookCancelledError, "Plain.plain was cancelled"):
        ah.compose(Kinds, [Plain(asyncio.CancelledError())]).plain("x")


# -- hooks that wrap


class Wrapping:
    def __init__(self, act: Callable[[Next], Awaitable[Any]]) -> None:
        self.act = act

    async def wrap(self, text: str, call_next: Next) -> Any:
        return await self.act(call_next)


async def translates(call_next: Next) -> Any:
    try:
        return await call_next("x")
    except ConnectionError as error:
        raise RuntimeError("no answer") from error


async def limits(call_next: Next) -> Any:
    async with asyncio.timeout(0):
        return await call_next("x")


async def fails_after(call_next: Next) -> Any:
    await call_next("x")
    raise ValueError("after")


async def fails_before(call_next: Next) -> Any:
    raise ValueError("before")


@pytest.mark.parametrize(
    ("act", "tail_act", "raised"),
    [
        (translates, lambda: fail(ConnectionError("reset")), RuntimeError),
        (limits, forever, TimeoutError),
        (fails_after, lambda: asyncio.sleep(0), None),
        (fails_before, lambda: asyncio.sleep(0), None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_what_a_logged_hook_wraps_is_called_once(
    act: Callable[[Next], Awaitable[Any]],
    tail_act: Callable[[], Awaitable[Any]],
    raised: type[Exception] | None,
) -> None:
    """Whatever the hook does after it has called it: its answer is that of the call, and without an
    answer the error of the hook is raised.
    """
    calls: list[str] = []

    async def pay(text: str) -> str:
        calls.append(text)
        await tail_act()
        return "paid"

    hooks = ah.compose(Kinds, [ah.configure(Wrapping(act), on_error="log")])
    if raised is None:
        assert await hooks.wrap("x", pay) == "paid"
    else:
        with pytest.raises(raised):
            await hooks.wrap("x", pay)
    assert calls == ["x"]


async def test_a_hook_that_is_left_behind_cannot_call_what_it_wraps() -> None:
    """After the cancel of the caller and the grace period the call fails, and what is wrapped is
    not called when the hook continues.
    """
    calls: list[str] = []
    gate = asyncio.Event()
    ended = list[BaseException]()

    async def ignores(call_next: Next) -> None:
        await uncancellable(gate)
        try:
            await call_next("late")
        except ah.errors.HookCancelledError as error:
            ended.append(error)

    async def pay(text: str) -> str:
        calls.append(text)
        return "paid"

    group = ah.HookGroup(Kinds, [Wrapping(ignores)], grace_secs=2)
    with ManualClock() as clock:
        task = asyncio.create_task(group.hooks.wrap("x", pay))
        await ticks(5)
        task.cancel()
        await until_true(lambda: clock.pending)
        clock.advance(2)
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.set()
    await until_true(lambda: ended)
    assert calls == []
