"""Borders of what a hook may be, and of its group's block."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="empty-body, var-annotated"
# Annotations say how results are combined, and most classes here have none.

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.errors import HookCancelledError, HookGroupClosedError
from aiohooks.testing import ManualClock
from tests.support.kinds import hook
from tests.support.waiting import parked, ticks

pytestmark = pytest.mark.every_python


class Events:
    async def on(self, name) -> None: ...


@pytest.mark.parametrize("name", ["__aenter__", "__aexit__"])
async def test_a_hook_with_half_of_a_context_manager_is_none(name: str) -> None:
    """It has to have both methods to be entered."""
    called = []

    async def note(self, name) -> None:
        called.append(name)

    async def half(self, *details) -> None:
        raise AssertionError("it is no context manager")

    async with ah.HookGroup(Events, [hook(**{"on": note, name: half})]) as group:
        await group.hooks.on("x")
    assert called == ["x"]


async def test_a_call_that_outlives_its_group_queues_nothing(clock: ManualClock) -> None:
    """It is the caller's, and gets an error: no task would wait for the queued call."""

    async def waits(self, name):
        await gate.wait()

    async def logs(self, name):
        logged.append(name)

    gate = asyncio.Event()
    logged: list[str] = []
    later = ah.configure(hook(on=logs), background=True, order=1)
    group = ah.HookGroup(Events, [hook(on=waits), later], grace_secs=5)
    await group.__aenter__()
    call = await parked(group.hooks.on("x"), 5)
    leaving = await parked(group.__aexit__(None, None, None), 5)
    clock.advance(5)
    await leaving
    gate.set()
    with pytest.raises(HookGroupClosedError, match="Observer#2 are not queued any more"):
        await call
    await ticks()
    assert logged == []


async def test_a_call_that_cancels_its_own_task_at_its_end_has_failed() -> None:
    """Also beside a call whose error is only logged."""

    async def fails(self, name):
        await asyncio.sleep(0)
        raise OSError

    async def cancels(self, name):
        await ticks(3)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    logged = ah.configure(hook(on=fails), on_error="log")
    with pytest.raises(HookCancelledError, match=r"Observer#2\.on was cancelled"):
        await ah.compose(Events, [logged, hook(on=cancels)]).on("x")


async def test_a_call_that_cannot_wait_and_raises_a_cancel_has_failed() -> None:
    """Beside one that waits, which is ended."""

    async def cancels(self, name):
        raise asyncio.CancelledError

    async def waits(self, name):
        await asyncio.get_running_loop().create_future()

    with pytest.raises(HookCancelledError, match=r"Observer#2\.on was cancelled"):
        await ah.compose(Events, [hook(on=waits), hook(on=cancels)]).on("x")
