"""`SignalPolicy(drain_secs=...)`: the first signal begins a drain; a second one, or the end of the
time, makes it a stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.sessions import forever_step, outcome, same
from tests.support.waiting import advance_clock, forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python

USER = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _earlier_handler() -> Iterator[Any]:
    """Have a handler that does nothing: without it, a cancellation would end the process too."""

    def handler(*_: object) -> None: ...

    earlier = signal.signal(USER, handler)
    yield
    assert signal.getsignal(USER) is handler
    signal.signal(USER, earlier)


def send() -> None:
    os.kill(os.getpid(), USER)


def handling(source: Any = same, hooks: Any = (), **options: Any) -> ah.AsyncMonitoredSession:
    """Make a session with a policy for a signal that is otherwise unused."""
    policy = ah.SignalPolicy(signals=(USER,), **{"drain_secs": 20.0, **options})
    return ah.AsyncMonitoredSession(source, hooks, handle_signals=policy, name="drained")


async def drain_of(session: ah.AsyncMonitoredSession) -> None:
    """Send the signal; wait until a drain was recorded, and until the loop has begun it."""
    send()
    await until_true(lambda: session.drain_reason)
    await ticks()


async def test_the_first_signal_begins_a_drain(clock: ManualClock) -> None:
    """What was taken is used, waits for a drain end; the session ends cleanly because of the
    signal, with no timer left.
    """
    hook = RecordingHook()
    used = list[int]()
    async with handling(same, [hook]) as session:
        waiting = await parked(session.coord.until(forever(), drain=True))
        async for number in session.steps("same", feeds=range(99), prefetch=3):
            used.append(number)
            if number == 1:
                await until_true(lambda: session.status().feeds_unused == 3)
                await drain_of(session)
                assert (session.should_stop(), waiting.done()) == (False, True)
                with pytest.raises(ah.StopRequestedError):
                    await waiting
    assert (used, clock.pending) == ([0, 1, 2, 3, 4], 0)
    assert (session.stop_reason, session.stop_signal) == ("SIGUSR1 received", USER)
    assert hook.phases()[-2:] == ["end", "close"]


async def test_the_grace_period_of_a_session_that_cannot_drain(clock: ManualClock) -> None:
    """When it is over, it cancels that session; others continue to drain."""
    sessions = [handling(), handling(drain_secs=None, grace_secs=5.0)]
    drains, stops = [await parked(outcome(session, forever)) for session in sessions]
    send()
    await ticks()
    clock.advance(5)
    assert isinstance(await stops, asyncio.CancelledError)
    assert not sessions[0].should_stop()
    drains.cancel()
    assert isinstance(await drains, asyncio.CancelledError)


async def test_each_session_of_a_loop_has_its_own_escalation() -> None:
    """The second signal cancels a session that cannot drain, and stops one that can; the third
    cancels that.
    """
    sessions = [handling(), handling(drain_secs=None)]
    drains, stops = [await parked(outcome(session, forever)) for session in sessions]
    send()
    await ticks()
    assert [session.should_stop() for session in sessions] == [False, True]
    send()
    assert isinstance(await stops, asyncio.CancelledError)
    assert (sessions[0].should_stop(), drains.done()) == (True, False)
    send()
    assert isinstance(await drains, asyncio.CancelledError)


async def test_the_second_signal_stops(clock: ManualClock) -> None:
    """As the first one does without a drain: the step is finished, and waits end. The end of the
    drain's time is nothing more.
    """
    gate = asyncio.Event()

    async def waiting() -> int:
        await gate.wait()
        return 1

    async with handling(waiting) as session:
        running = await parked(session.run("waiting"))
        await drain_of(session)
        wait = await parked(session.until(forever()))
        assert not session.should_stop()
        send()
        with pytest.raises(ah.StopRequestedError, match="SIGUSR1 received"):
            await wait
        assert session.should_stop()
        await advance_clock(clock, 20, 20)
        gate.set()
        assert await running == 1


@pytest.mark.parametrize("by", ["the end of the time", "the second signal"])
async def test_what_stops_a_drain_and_what_cancels_then(
    by: str, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The limits of the stop begin, as without a drain, and the next signal cancels the session."""
    hook = RecordingHook()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        running = await parked(session.run("forever_step"))
        await drain_of(session)
        if by == "the second signal":
            send()
        else:
            await advance_clock(clock, 19)
            assert not session.should_stop()
            clock.advance(1)
        await until_true(session.should_stop)
        await ticks()
        clock.advance(5)
        with pytest.raises(ah.StopRequestedError, match=r"the step took longer than 5.0 s more"):
            await running
        send()
        await forever()

    raised = await asyncio.create_task(outcome(handling(forever_step, [hook], step_secs=5.0), use))
    assert isinstance(raised, asyncio.CancelledError)
    assert (clock.pending, hook.phases()[-1]) == (0, "close")
    said = "s after SIGUSR1, the drain_secs of its SignalPolicy, comes the stop of" in caplog.text
    assert said is (by == "the end of the time")


async def test_sessions_of_one_loop() -> None:
    """One that cannot drain is stopped by the first signal; one that is opened meanwhile drains
    too; the second stops all, as a task is cancelled with the last of its sessions.
    """
    async with handling() as drains, handling(drain_secs=None) as stops:
        await drain_of(drains)
        assert (drains.should_stop(), stops.should_stop(), stops.stop_reason) == (
            False,
            True,
            "SIGUSR1 received",
        )
        assert stops.drain_reason is None
        async with handling() as later:
            assert (later.should_stop(), later.drain_reason) == (False, "SIGUSR1 received")
            send()
            await until_true(later.should_stop)
            assert drains.should_stop()


async def test_a_drain_before_the_signal(clock: ManualClock) -> None:
    """Its reason is kept; the signal limits its time."""
    async with handling() as session:
        session.request_drain("enough")
        send()
        await until_true(lambda: clock.pending)
        assert not session.should_stop()
        clock.advance(20)
        await until_true(session.should_stop)
    assert (clock.pending, session.drain_reason) == (0, "enough")
    assert (session.stop_reason, session.stop_signal) == ("SIGUSR1 received", USER)
