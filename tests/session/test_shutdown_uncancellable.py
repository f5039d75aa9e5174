"""Hooks, steps and cleanups that ignore a cancellation, or are cancelled by others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph, doubling, outcome
from tests.support.waiting import (
    Uncancellable,
    advance_clock,
    cancel_and_wait,
    parked,
    raises_after,
    ticks,
    until_true,
)

# -- in a run


@pytest.mark.parametrize("where", ["hook", "operation"])
async def test_an_uncancellable_call_has_the_grace_period(
    where: str,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is named in a warning then, and left behind."""
    uncancellable = Uncancellable()
    graph = counting_graph()
    fails = raises_after(2, OSError("broken"))

    @graph.operation(name="fails")
    async def fail() -> None:
        await fails()

    @graph.operation
    async def waits() -> None:
        await uncancellable.wait()

    hooks = (
        [PhaseHook("before_run", fails), PhaseHook("before_run", uncancellable.wait)]
        if where == "hook"
        else []
    )
    async with ah.AsyncMonitoredSession(graph, hooks, stop_grace_period_secs=9) as session:
        running = asyncio.create_task(
            session.run("loss" if where == "hook" else ["fails", "waits"])
        )
        await until_true(lambda: uncancellable.cancels)
        await advance_clock(clock, 8.9)
        assert not running.done()
        clock.advance(0.1)
        with pytest.raises(OSError, match="broken"):
            await running
        name = (
            "PhaseHook#2.before_run at step 1" if where == "hook" else "operation 'waits' at step 1"
        )
        assert caplog.messages == [
            f"{name} still runs 9 s after its cancellation; continuing without it"
        ]
        await uncancellable.release()


# -- at the end


async def test_a_closing_that_takes_too_long_after_a_cancel(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller is cancelled while hooks close: they have the grace period; then they are cancelled,
    and named if they ignore it.

    The cancellation comes out, and what could be closed is closed; an error that comes after that
    is logged.
    """
    uncancellable = Uncancellable(OSError("too late"))
    hook = RecordingHook()
    hooks: list[Any] = [hook, ah.configure(PhaseHook("close", uncancellable.wait), timeout=1000)]
    session = doubling(*hooks, stop_grace_period_secs=9, name="trainer")
    ending = await parked(outcome(session))
    await ticks(20)
    ending.cancel()
    await ticks(20)
    assert not ending.done()
    clock.advance(9)
    await until_true(lambda: uncancellable.cancels)
    assert not ending.done()
    clock.advance(9)
    assert isinstance(await ending, asyncio.CancelledError)
    assert caplog.messages[-1:] == [
        "the end of session 'trainer' still runs 9 s after its cancellation; continuing without it"
    ]
    await uncancellable.release()
    await until_true(lambda: hook.closed_with and "OSError: too late" in caplog.text)
    await ticks()


async def test_background_tasks_are_waited_for_after_others_have_cancelled_the_wait() -> None:
    """Such as a framework that cancels all tasks: the block ends when its own background tasks
    have.
    """
    gate = asyncio.Event()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(gate.wait)

    ending = await parked(outcome(doubling(), use))
    await ticks(20)
    (closing,) = [
        task for task in asyncio.all_tasks() if task.get_name().startswith("the end of session")
    ]
    closing.cancel()
    await ticks(20)
    assert not ending.done()
    gate.set()
    assert await ending is None


@pytest.mark.parametrize("where", ["create_session", "after_create_session"])
@pytest.mark.parametrize(
    "interrupted", [False, True], ids=["in a recovery", "after an interrupted recovery"]
)
async def test_a_raw_session_that_is_created_too_late_is_closed(
    where: str, interrupted: bool, clock: ManualClock
) -> None:
    """Its creation ignores the cancellation until the monitored session is closed: it is closed,
    and not used.
    """
    uncancellable = Uncancellable()
    created = list[ah.Session]()
    hook = RecordingHook()

    class Creator:
        graph = counting_graph()

        async def create_session(self) -> ah.Session:
            if created and where == "create_session":
                await uncancellable.wait()
            created.append(ah.Session(self.graph))
            return created[-1]

    async def wait(*_: object) -> None:
        if len(created) == 2 and where == "after_create_session":
            await uncancellable.wait()

    lost = FaultInjectionHook({("before_run", 1): ah.UnavailableError("away")})
    options: dict[str, Any] = {
        "recovery": ah.RecoveryPolicy(backoff=ah.Backoff(5 if interrupted else 0, jitter=False))
    }
    hooks = [hook, lost, PhaseHook("after_create_session", wait)]
    async with ah.AsyncMonitoredSession(
        Creator(), hooks, stop_grace_period_secs=9, **options
    ) as session:
        running = asyncio.create_task(session.run("train"))
        if interrupted:
            await until_true(lambda: created[0].closed and clock.pending)
            await cancel_and_wait(running)
            running = asyncio.create_task(session.run("train"))
        await uncancellable.waiting.wait()
        closing = asyncio.create_task(session.aclose())
        while not closing.done():
            await advance_clock(clock, 1)
    calls = hook.phases()
    await uncancellable.release()
    with pytest.raises(
        ah.errors.SessionClosedError,
        match=r"the session was closed (during this run|while a raw session)",
    ):
        await running
    assert [raw.closed for raw in created] == [True, True]
    assert (calls[-1], hook.phases()) == ("close", calls)
