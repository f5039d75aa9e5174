"""`handle_signals`: real signals, sent to this process while the loop runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import doubling, outcome
from tests.support.waiting import forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def received() -> Iterator[list[int]]:
    """Install handlers that record the signals that a session does not handle."""
    noted: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: noted.append(number))
    yield noted
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


async def send(number: signal.Signals, arrived: Any = lambda: False) -> None:
    """Send a signal to this process, and wait until it has arrived."""
    os.kill(os.getpid(), number)
    await until_true(arrived)


async def test_what_a_signal_cancels_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """At the second signal the log has the status of the session that it cancels."""
    hangs = PhaseHook("after_run", forever)
    async with doubling(hangs, name="trainer", handle_signals=True) as session:
        running = await parked(session.run("loss"), 20)
        await send(signal.SIGTERM, session.should_stop)
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(asyncio.CancelledError):
            await send(signal.SIGTERM, task.cancelling)
        assert "cancelling session trainer: step" in caplog.text
        assert "PhaseHook.after_run" in caplog.text
        running.cancel()
        task.uncancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("place", ["run", "block"])
async def test_what_a_stopped_session_waits_for_is_logged(
    place: str, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the signal immediately, and after a second what its session still waits for: a
    hook that hangs, or the code of its block.
    """
    gate = asyncio.Event()
    hangs = PhaseHook("after_run", lambda *_: gate.wait())

    async def main() -> None:
        async with doubling(hangs, name="trainer", handle_signals=True) as session:
            if place == "block":
                gate.set()
            await session.run("loss")
            await gates[place].wait()

    gates = {"run": gate, "block": asyncio.Event()}
    caplog.set_level(logging.INFO, "aiohooks")
    training = await parked(main(), 20)
    caplog.clear()
    await send(signal.SIGTERM, lambda: caplog.messages)
    assert caplog.messages == ["session 'trainer': stopping: SIGTERM received"]
    clock.advance(0.9)
    assert len(caplog.messages) == 1
    clock.advance(0.1)
    text = caplog.messages[1]
    assert text.startswith("a caller has waited 1 s for the end of session trainer: ")
    assert {"run": "PhaseHook.after_run", "block": "the session's block"}[place] in text
    gates[place].set()
    await training
    assert clock.pending == 0


async def test_a_session_opened_after_the_second_signal_is_cancelled() -> None:
    """A session that is opened while others are cancelled by a second signal is cancelled too."""
    hook = RecordingHook()
    ends = list[BaseException | None]()

    async def open_another(_: object) -> None:
        late = doubling(hook, handle_signals=True)
        ends.append(await asyncio.create_task(outcome(late, forever)))

    async def use(session: ah.AsyncMonitoredSession) -> None:
        await send(signal.SIGTERM, session.should_stop)
        await send(signal.SIGTERM)

    session = doubling(PhaseHook("close", open_another), handle_signals=True)
    ends.append(await asyncio.create_task(outcome(session, use)))
    assert [type(error) for error in ends] == [asyncio.CancelledError] * 2
    assert (hook.phases()[-1], "end" in hook.phases()) == ("close", False)


async def test_without_it_signals_are_left_alone(received: list[int]) -> None:
    """By default a session installs no handler."""
    before = handlers()
    async with doubling() as session:
        assert handlers() == before
        await send(signal.SIGTERM, lambda: received)
        assert not session.should_stop()


async def test_outside_the_main_thread_it_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """Only the main thread gets signals; in another one a session logs a warning and works
    without.
    """
    session = doubling(handle_signals=True)
    assert (
        await asyncio.to_thread(asyncio.run, outcome(session, lambda session: session.run("loss")))
        is None
    )
    assert session.status().runs == 1
    (message,) = caplog.messages
    assert "request_stop() of the session" in message


@pytest.mark.parametrize(
    ("late", "own"),
    [(False, None), (False, 7), (True, None)],
    ids=["in the block", "exits", "at the end"],
)
@pytest.mark.parametrize(
    "run", [ah.run, lambda main: asyncio.run(main())], ids=["aiohooks", "asyncio"]
)
def test_other_tasks_continue_until_the_session_has_ended(
    run: Callable[[Any], Any], late: bool, own: int | None
) -> None:
    """A second signal that would end the program ends it when the session is closed; then the
    others are cancelled.

    The program may choose another exit code.
    """
    events: list[str] = []
    others: list[asyncio.Task[None]] = []
    tracing = sys.gettrace()

    def send_late(frame: FrameType, event: str, arg: object) -> None:
        if (
            frame.f_code.co_name == "remove_session"
        ):  # nothing waits between this and the end of the program
            sys.settrace(tracing)
            signal.raise_signal(signal.SIGTERM)

    async def other() -> None:
        try:
            await forever()
        finally:
            await ticks()
            events.append("other")

    async def close(_: object) -> None:
        await ticks()
        events.append("close")
        if late:
            sys.settrace(send_late)

    async def main() -> None:
        others.append(await parked(other()))
        try:
            async with doubling(PhaseHook("close", close), handle_signals=True):
                signal.raise_signal(signal.SIGTERM)
                if not late:
                    signal.raise_signal(signal.SIGTERM)
                    await forever()
        finally:
            if own is not None:
                sys.exit(own)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(SystemExit) as raised:
        run(main)
    assert (raised.value.code, events) == (own or 128 + signal.SIGTERM, ["close", "other"])


@pytest.mark.parametrize(
    "run", [ah.run, lambda main: asyncio.run(main())], ids=["aiohooks", "asyncio"]
)
def test_the_second_interrupt_while_the_runner_closes_the_sessions(
    run: Callable[[Any], Any],
) -> None:
    """The main task has ended, and the handler of the runner raises `KeyboardInterrupt`: `close`
    continues all the same.
    """
    events: list[object] = []
    others: list[asyncio.Task[None]] = []

    async def close(_: object) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        await ticks()
        events.append("close")

    async def other() -> None:
        async with doubling(PhaseHook("close", close), handle_signals=True):
            await forever()

    async def main() -> None:
        others.append(await parked(other()))

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as raised:
        run(main)
    assert (repr(raised.value), events) == (
        "SystemExit(130)" if run is ah.run else "KeyboardInterrupt()",
        ["close"],
    )


def test_the_second_signal_ends_a_program_whose_session_is_never_closed() -> None:
    """The task that entered it has ended: no end of a session would exit."""

    async def main() -> None:
        await asyncio.create_task(doubling(handle_signals=True).__aenter__())
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        await ticks()

    child = os.fork()
    if child == 0:
        code = 0
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            asyncio.run(main())
        except SystemExit as end:
            code = int(str(end.code))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
