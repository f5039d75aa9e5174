"""`SignalPolicy`: signals and time limits; and the handlers of other code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.session import signals
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import drop, refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph, double, doubling, outcome
from tests.support.waiting import advance_clock, forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python

USER = signal.SIGUSR1


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore the handlers of the signals that tests replace."""
    earlier = {number: signal.getsignal(number) for number in (USER, signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def installed(handler: Any) -> Iterator[None]:
    """Have this handler of the signal in the block."""
    earlier = signal.signal(USER, handler)
    try:
        yield
    finally:
        signal.signal(USER, earlier)


def handling(source: Any = double, hooks: Any = (), **options: Any) -> ah.AsyncMonitoredSession:
    """Make a session with a policy for a signal that is otherwise unused."""
    policy = ah.SignalPolicy(**{"signals": (USER,), **options})
    return ah.AsyncMonitoredSession(source, hooks, handle_signals=policy, yield_secs=None)


async def stop_of(session: ah.AsyncMonitoredSession) -> None:
    """Send the signal; wait until it was recorded, and until the loop has started the timers of the
    policy.
    """
    os.kill(os.getpid(), USER)
    await until_true(session.should_stop)
    await ticks()


# -- time limits


@pytest.mark.parametrize("ends_in_time", [False, True])
async def test_the_time_limit_of_the_step(ends_in_time: bool, clock: ManualClock) -> None:
    """After `step_secs` the step is abandoned, with nothing committed; the session ends cleanly,
    with `end` of its hooks.
    """
    hook = RecordingHook()
    gate = asyncio.Event()

    async def wait(run_context: ah.SessionRunContext) -> None:
        await gate.wait()

    async with handling(
        counting_graph(), [PhaseHook("before_run", wait), hook], step_secs=5.0
    ) as session:
        running = await parked(session.run("train"))
        await stop_of(session)
        await advance_clock(clock, 4.9)
        assert not running.done()
        if ends_in_time:
            gate.set()
            await running
        clock.advance(0.2)
        if not ends_in_time:
            with refused(
                ah.StopRequestedError, "SIGUSR1 received, and the step took longer than 5.0 s more"
            ):
                await running
    assert session.global_step.latest.step == ends_in_time
    assert hook.phases()[-2:] == ["end", "close"]


@pytest.mark.plain_tasks
@pytest.mark.parametrize("phase", ["begin", "before_run", "end"])
async def test_the_grace_period_ends_the_session(
    phase: str, caplog: pytest.LogCaptureFixture, clock: ManualClock
) -> None:
    """After `grace_secs` the session is cancelled, in any phase, with a warning."""
    hook = RecordingHook()
    inside = asyncio.Event()

    async def hang(*_: object) -> None:
        inside.set()
        await forever()

    with installed(lambda *_: None):  # without it, the cancellation would end the process too
        session = handling(double, [hook, PhaseHook(phase, hang)], grace_secs=20.0)
        running = asyncio.create_task(outcome(session, lambda session: session.run("loss")))
        await inside.wait()
        await stop_of(session)
        await advance_clock(clock, 19.0)
        assert not running.done()
        clock.advance(2.0)
        assert isinstance(await running, asyncio.CancelledError)
    assert hook.phases()[-1] == "close"
    assert (
        "20.0 s after SIGUSR1, the grace_secs of its SignalPolicy, comes the cancel of session"
        in caplog.text
    )


@pytest.mark.parametrize("again", [False, True])
async def test_a_signal_is_recorded_immediately(again: bool) -> None:
    """`should_stop` knows of a signal before the loop has a turn: steps that compute end with the
    one it fell into.
    """
    steps = 0

    async def step() -> dict[str, int]:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(USER)
        return {"loss": steps}

    async with handling(step) as session:
        while steps < 9 and not session.should_stop():
            await session.run("loss")
        assert (steps, session.stop_reason, session.stop_signal) == (3, "SIGUSR1 received", USER)
        if again:  # a session opened before the loop has had its turn is stopped as well
            async with handling(step) as late:
                assert (late.should_stop(), late.stop_signal) == (True, USER)


# -- the handlers


def test_no_signal_is_lost_while_the_handlers_are_restored() -> None:
    """A signal at any line of the restoring is handled either by the session or by the previous
    handler.

    The timer of the grace period is cancelled in either case.
    """
    noted: list[int] = []
    by_session: list[bool] = []
    signal.signal(USER, lambda number, frame: noted.append(number))

    async def main(at: int) -> bool:
        left = [at]

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            if frame.f_code.co_filename != signals.__file__:
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    signal.raise_signal(USER)
            return trace

        async def close(exc: BaseException | None) -> None:
            sys.settrace(trace)

        noted.clear()
        session = handling(double, [PhaseHook("close", close)], grace_secs=2)
        with ManualClock() as clock:
            try:
                async with session:
                    pass
                await asyncio.sleep(0)
            finally:
                sys.settrace(before)
            assert clock.pending == 0
        if left[0] <= 0:
            by_session.append(session.stop_signal is USER)
            assert [*noted, session.stop_signal].count(USER) == 1
        return left[0] > 0

    before = sys.gettrace()
    assert any(asyncio.run(main(at)) for at in range(1, 200))
    assert set(by_session) == {True, False}


async def test_an_ignored_signal_stays_ignored() -> None:
    """A signal that the parent process made this one ignore (`nohup`) is still ignored."""
    with installed(signal.SIG_IGN):
        async with handling() as session:
            os.kill(os.getpid(), USER)
            await ticks(20)
            assert not session.should_stop()


async def test_the_replaced_handler_is_back_at_the_end() -> None:
    """But for a handler that was installed later."""

    def server_handler(number: int, frame: object) -> None: ...
    def later(number: int, frame: object) -> None: ...

    with installed(server_handler):
        async with handling():
            pass
        assert signal.getsignal(USER) is server_handler
        async with handling():
            signal.signal(USER, later)
        assert signal.getsignal(USER) is later


@pytest.mark.parametrize(
    ("refused_by", "why"),
    [
        ("getsignal", "is left alone: it is handled outside of Python"),
        ("signal", "cannot be handled here, and is left alone: no such"),
    ],
)
async def test_a_signal_that_cannot_be_handled_is_left_alone(
    refused_by: str, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that embeds Python may handle it, or the system refuse: the session works without
    it, and says so.
    """

    def refuse(number: int, handler: Any) -> Any:
        if number == USER:
            raise OSError("no such signal")
        return install(number, handler)

    install = signal.signal
    earlier = signal.getsignal(USER)
    with monkeypatch.context() as patched:
        patched.setattr(
            signal, refused_by, {"getsignal": lambda _: None, "signal": refuse}[refused_by]
        )
        assert await outcome(handling(), lambda session: session.run("loss")) is None
    assert signal.getsignal(USER) is earlier
    (message,) = caplog.messages
    assert why in message


async def test_handlers_of_the_loop_stay(caplog: pytest.LogCaptureFixture) -> None:
    """A handler that was added to the loop before is called as well, once for each signal, and
    stays installed.
    """
    loop = asyncio.get_running_loop()
    received = list[signal.Signals]()
    for number in (USER, signal.SIGUSR2):
        loop.add_signal_handler(number, received.append, number)

    async def stopped_twice() -> None:
        async with handling() as session:
            await stop_of(session)
            await until_true(lambda: received)
            assert caplog.text == ""
            os.kill(os.getpid(), USER)
            await forever()

    try:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(stopped_twice())
        await until_true(lambda: len(received) == 2)
        os.kill(os.getpid(), signal.SIGUSR2)
        await until_true(lambda: signal.SIGUSR2 in received)
        await ticks()
        assert received == [USER, USER, signal.SIGUSR2]
        os.kill(os.getpid(), USER)
        await until_true(lambda: len(received) == 4)
    finally:
        for number in (USER, signal.SIGUSR2):
            loop.remove_signal_handler(number)


def wakeup_fd() -> int:
    """Return the file descriptor into which Python writes signals."""
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


async def test_the_wakeup_fd_is_restored() -> None:
    """Signals write into a wakeup fd while a session handles them, and then as before."""
    before = wakeup_fd()
    async with handling():
        assert wakeup_fd() != -1
        assert wakeup_fd_of_child() == -1
    assert wakeup_fd() == before


async def test_a_wakeup_fd_of_other_code_stays() -> None:
    """If other code sets another wakeup fd meanwhile, it stays, in a forked child as well."""
    before = wakeup_fd()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    try:
        async with handling():
            signal.set_wakeup_fd(writer.fileno())
            # Since Python 3.12, asyncio itself unsets the wakeup fd of a forked child.
            expected = -1 if sys.version_info >= (3, 12) else writer.fileno()
            assert wakeup_fd_of_child() == expected
        assert wakeup_fd() == writer.fileno()
    finally:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()


def wakeup_fd_of_child() -> int:
    """Return the wakeup fd of a forked child."""
    child = os.fork()
    if child == 0:
        # An exit code is at most 255; 255 stands for none.
        os._exit(wakeup_fd() % 256)
    fd = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return -1 if fd == 255 else fd


async def test_whether_nothing_but_sessions_handles_a_signal() -> None:
    """In the main thread, while its handler is the system's or that of sessions; a process that is
    started asks for it.
    """
    with installed(signal.SIG_DFL):
        assert signals.may_handle(USER)
        assert not await asyncio.to_thread(signals.may_handle, USER)
        async with handling():
            assert signals.may_handle(USER)
    with installed(lambda number, frame: None):
        assert not signals.may_handle(USER)


def test_a_loop_that_was_closed_without_its_sessions() -> None:
    """The previous handler gets the signal and is restored, because the sessions cannot be
    stopped.
    """
    noted: list[int] = []
    signal.signal(USER, lambda number, frame: noted.append(number))
    before = signal.getsignal(USER)
    sessions = [handling()]
    with asyncio.Runner() as runner:
        runner.run(sessions[0].__aenter__())
    os.kill(os.getpid(), USER)
    assert noted == [USER]
    assert signal.getsignal(USER) is before
    with pytest.warns(ResourceWarning, match="never closed"):
        drop(sessions)


def test_request_stop_in_a_handler_of_ones_own_wakes_the_loop() -> None:
    """`session.request_stop` may be called in a handler of `signal.signal`, also while the loop
    waits for events.
    """
    woken: list[bool] = []

    class InterruptedSelector(selectors.DefaultSelector):
        """Is interrupted by a signal when it is to wait for events the first time."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if woken or timeout == 0:
                return super().select(timeout)
            signal.raise_signal(USER)
            events = super().select(0)
            woken.append(bool(events))
            return events

    async def main() -> None:
        async with doubling() as session:
            signal.signal(USER, lambda *_: session.request_stop("asked by a signal"))
            with pytest.raises(ah.StopRequestedError, match="asked by a signal"):
                await session.until(forever())

    with asyncio.Runner(
        loop_factory=lambda: asyncio.SelectorEventLoop(InterruptedSelector())
    ) as runner:
        runner.run(main())
    assert woken == [True]


@pytest.mark.parametrize("signals", [(), signal.SIGTERM, ("TERM",)], ids=["none", "one", "a name"])
def test_what_is_no_signal_is_refused(signals: Any) -> None:
    """A session would silently handle nothing."""
    with pytest.raises(ah.errors.InvalidArgumentError, match=r"signals is .*; give signals"):
        ah.SignalPolicy(signals=signals)
