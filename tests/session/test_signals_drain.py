"""`SignalPolicy(drain_secs=...)`: the first signal begins a drain; a second one, or the end of the time, makes it a stop."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.waiting import forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python

USER = signal.SIGUSR1


def send() -> None:
    os.kill(os.getpid(), USER)


def policy(**options: Any) -> ah.SignalPolicy:
    """Return a policy for a signal that is otherwise unused."""
    return ah.SignalPolicy(signals=(USER,), **{"drain_secs": 20.0, **options})


async def same(number: int) -> int:
    return number


async def drain_of(session: ah.AsyncMonitoredSession) -> None:
    """Wait until a drain was recorded, and until the loop has begun it."""
    await until_true(lambda: session.drain_reason)
    await ticks()


async def test_the_first_signal_begins_a_drain() -> None:
    """What was taken is used; the session ends cleanly because of the signal, and its handler is removed."""
    earlier, hook, used = signal.getsignal(USER), RecordingHook(), list[int]()
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(same, [hook], handle_signals=policy()) as session:
            async for number in session.steps("same", feeds=range(99), prefetch=3):
                used.append(number)
                if number == 1:
                    await until_true(lambda: session.status().feeds_unused == 3)
                    send()
                    await drain_of(session)
                    assert not session.should_stop()
        assert clock.pending == 0
    assert used == [0, 1, 2, 3, 4]
    assert (session.stop_reason, session.stop_signal) == ("SIGUSR1 received", USER)
    assert hook.phases()[-2:] == ["end", "close"]
    assert signal.getsignal(USER) == earlier


async def test_a_signal_ends_the_waits_for_a_drain() -> None:
    """As `request_drain` does."""
    async with ah.AsyncMonitoredSession(same, handle_signals=policy()) as session:
        waiting = await parked(session.coord.wait_for_drain())
        send()
        await drain_of(session)
        assert waiting.done()


async def test_the_time_of_a_drain_that_is_over_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A session that has drained, and whose end takes its time, is not stopped once more."""

    class SlowEnd(ah.SessionRunHook):
        async def end(self, session: ah.Session) -> None:
            clock.advance(20)
            await ticks()

    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(same, [SlowEnd()], handle_signals=policy()) as session:
            async for _ in session.steps("same", feeds=range(9)):
                send()
                await drain_of(session)
    assert session.stop_reason == "SIGUSR1 received"
    assert "the time for the drain" not in caplog.text


async def test_a_signal_is_recorded_immediately() -> None:
    """A loop that only computes misses it by no step."""

    async def step(number: int) -> int:
        if number == 2:
            signal.raise_signal(USER)
        return number

    async with ah.AsyncMonitoredSession(step, handle_signals=policy(), yield_secs=None) as session:
        assert [number async for number in session.steps("step", feeds=range(9))] == [0, 1, 2]
    assert session.stop_reason == "SIGUSR1 received"


async def test_the_grace_period_of_a_session_that_cannot_drain() -> None:
    """When it is over, it ends those that drain, too, as another signal would."""

    async def main(**options: Any) -> None:
        async with ah.AsyncMonitoredSession(same, handle_signals=policy(**options)):
            await forever()

    earlier = signal.signal(USER, lambda *_: None)  # without it, the cancellation would end the process too
    with ManualClock() as clock:
        sessions = [await parked(main()), await parked(main(drain_secs=None, grace_secs=5.0))]
        send()
        await ticks()
        clock.advance(5)
        await asyncio.wait(sessions)
    signal.signal(USER, earlier)
    assert all(session.cancelled() for session in sessions)


async def drained_by_a_signal(session: ah.AsyncMonitoredSession) -> asyncio.Task[Any]:
    """Return a task that is in a step when the session drains."""
    running = await parked(session.run("waiting"))
    send()
    await drain_of(session)
    assert not session.should_stop()
    return running


async def test_the_second_signal_stops() -> None:
    """As the first one does without a drain: the step is finished, and waits end. The end of the drain's time is nothing more."""
    gate = asyncio.Event()

    async def waiting() -> int:
        await gate.wait()
        return 1

    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(waiting, handle_signals=policy()) as session:
            running = await drained_by_a_signal(session)
            wait = await parked(session.until(forever()))
            send()
            with pytest.raises(ah.StopRequestedError, match="SIGUSR1 received"):
                await wait
            assert session.should_stop()
            clock.advance(20)
            await ticks(20)
            gate.set()
            assert await running == 1


async def test_the_end_of_the_time_stops(caplog: pytest.LogCaptureFixture) -> None:
    """As a second signal does: the limits of the stop begin, and the next signal cancels the session."""
    hook = RecordingHook()

    async def waiting() -> None:
        await forever()

    async def main() -> None:
        async with ah.AsyncMonitoredSession(waiting, [hook], handle_signals=policy(step_secs=5.0), name="drained") as session:
            running = await drained_by_a_signal(session)
            clock.advance(19)
            await ticks()
            assert not session.should_stop()
            clock.advance(1)
            await until_true(session.should_stop)
            await ticks()
            clock.advance(5)
            with pytest.raises(ah.StopRequestedError, match=r"the step took longer than 5.0 s more"):
                await running
            send()
            await forever()

    earlier = signal.signal(USER, lambda *_: None)  # without it, the cancellation would end the process too
    with ManualClock() as clock:
        task = asyncio.create_task(main())
        await asyncio.wait([task])
        assert clock.pending == 0
    signal.signal(USER, earlier)
    assert task.cancelled()
    assert hook.phases()[-1] == "close"
    assert "the time for the drain after SIGUSR1 is over; stopping session 'drained'" in caplog.text


async def test_the_third_signal_cancels() -> None:
    """As the second one does without a drain."""

    async def waiting() -> None:
        await forever()

    async def main() -> None:
        async with ah.AsyncMonitoredSession(waiting, handle_signals=policy()) as session:
            running = await drained_by_a_signal(session)
            send()
            await until_true(session.should_stop)
            send()
            await running

    earlier = signal.signal(USER, lambda *_: None)
    task = asyncio.create_task(main())
    await asyncio.wait([task])
    signal.signal(USER, earlier)
    assert task.cancelled()


async def test_sessions_of_one_loop() -> None:
    """One that cannot drain is stopped by the first signal; one that is opened meanwhile drains too; the second stops all."""
    async with (
        ah.AsyncMonitoredSession(same, handle_signals=policy()) as drains,
        ah.AsyncMonitoredSession(same, handle_signals=policy(drain_secs=None)) as stops,
    ):
        send()
        await drain_of(drains)
        assert (drains.should_stop(), stops.should_stop(), stops.stop_reason) == (False, True, "SIGUSR1 received")
        assert stops.drain_reason is None
        async with ah.AsyncMonitoredSession(same, handle_signals=policy()) as later:
            assert (later.should_stop(), later.drain_reason) == (False, "SIGUSR1 received")
            send()
            await until_true(later.should_stop)
            assert drains.should_stop()


async def test_the_drain_of_one_that_is_opened_meanwhile_has_an_end() -> None:
    """Its own time begins when it is opened."""
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(same, handle_signals=policy()) as first:
            send()
            await drain_of(first)
            clock.advance(1)
            async with ah.AsyncMonitoredSession(same, handle_signals=policy(drain_secs=5.0)) as later:
                clock.advance(4.9)
                await ticks()
                assert not later.should_stop()
                clock.advance(0.1)
                await until_true(later.should_stop)


async def test_one_of_them_stops_already() -> None:
    """The time limits of its stop begin at the first signal; the others drain."""
    with ManualClock() as clock:
        stopped = ah.AsyncMonitoredSession(same, handle_signals=policy(step_secs=5.0, grace_secs=30.0))
        async with stopped, ah.AsyncMonitoredSession(same, handle_signals=policy()) as drains:
            stopped.request_stop("over")
            send()
            await drain_of(drains)
            assert clock.pending == 3, "two of the stop, one of the drain"
            assert not drains.should_stop()


async def test_a_stop_before_the_signal() -> None:
    """A session that stops already has nothing to drain: the next signal cancels it, as without `drain_secs`."""

    async def main() -> None:
        async with ah.AsyncMonitoredSession(same, handle_signals=policy()) as session:
            session.request_stop("over")
            send()
            await ticks(20)
            send()
            await forever()

    earlier = signal.signal(USER, lambda *_: None)
    task = asyncio.create_task(main())
    await asyncio.wait([task])
    signal.signal(USER, earlier)
    assert task.cancelled()


@pytest.mark.parametrize("secs", [None, 10.0])
async def test_a_drain_before_the_signal(secs: float | None) -> None:
    """Its reason and its time are kept; the signal limits its time too."""
    own = secs is not None
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(same, handle_signals=policy()) as session:
            session.request_drain("enough", secs=secs)
            send()
            await until_true(lambda: clock.pending > own)
            assert (clock.pending, session.should_stop()) == (1 + own, False)
            clock.advance(secs or 20)
            await until_true(session.should_stop)
        assert clock.pending == 0
    assert session.drain_reason == "enough"
    assert session.stop_reason == ("enough, and the drain took longer than 10.0 s" if own else "SIGUSR1 received")
    assert session.stop_signal == (None if own else USER)


def test_the_exit_code() -> None:
    """Of a session that has drained: that of the signal."""

    async def main() -> None:
        async with ah.AsyncMonitoredSession(same, handle_signals=policy()) as session:
            send()
            await drain_of(session)
            async for _ in session.steps("same", feeds=range(9)):
                pass

    with pytest.raises(SystemExit) as raised:
        ah.run(main)
    assert raised.value.code == 128 + USER
