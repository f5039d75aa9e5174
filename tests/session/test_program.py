"""`aiohooks.run`: what it takes, what it returns, and how a program ends after a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import traceback
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

import aiohooks as ah
from aiohooks._core.clock import LoopClock, TimerHandle, set_current_clock, sleep
from aiohooks.errors import raise_unchanged
from aiohooks.session import run as run_module
from tests.support.checks import invalid, refused
from tests.support.sessions import do_nothing, doubling
from tests.support.waiting import forever

T = TypeVar("T")

pytestmark = pytest.mark.every_python

USER = signal.SIGUSR1
INTERRUPTED = 128 + signal.SIGINT
STOPPED = 128 + USER


@pytest.fixture(autouse=True)
def _handler_of_interrupts() -> Iterator[None]:
    """Begin with Python's own handler, and restore the one before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: 5, ["main is 5", "function"]),
        (
            do_nothing,
            ["main is <coroutine object", "give the function and its arguments, not the call"],
        ),
    ],
    ids=["int", "coroutine"],
)
def test_run_takes_a_coroutine_function(make: Callable[[], Any], says: list[str]) -> None:
    """Anything else is refused before there is a loop; a coroutine is closed, not left
    un-awaited.
    """
    with invalid(*says):
        ah.run(make())


def test_run_refuses_a_function_without_a_coroutine() -> None:
    """A plain function, such as one that lacks its `async`, is refused with its result."""
    with invalid("main returned 7", "give a coroutine function"):
        ah.run(lambda: 7)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (ah.errors.CheckpointError("no room"), ["run", "main"]),
        (ValueError("no room"), ["run", "main", "raise_unchanged"]),
    ],
)
def test_a_traceback_begins_at_the_code_of_the_program(error: Exception, names: list[str]) -> None:
    """The frames of the event loop are left out and, of an error of aiohooks, also the frames of
    aiohooks that the program called.
    """

    async def main() -> None:
        raise_unchanged(error)

    with pytest.raises(type(error)) as raised:
        ah.run(main)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames if frame.name in names] == names
    assert [frame.name for frame in frames][-len(names) :][1:] == names[1:]


def test_run_runs_the_function() -> None:
    """`run(main, *args)` returns what `main(*args)` returns; where a loop is running it is
    refused.
    """

    async def main(first: int, second: int) -> int:
        with refused(
            ah.errors.WrongLoopError, "while an event loop is running", "write `await main()` there"
        ):
            ah.run(do_nothing)
        return first + second

    assert ah.run(main, 1, 2) == 3


def test_an_interrupt_cancels_the_program() -> None:
    """A Ctrl-C that no session handles cancels `main`, which can clean up, and `run` raises
    `KeyboardInterrupt`.
    """
    ends: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ends.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt):
        ah.run(main)
    assert ends == ["cleaned up"]


# -- after a signal


def stopped_main(end: object) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return a program whose session is stopped by a signal, and which then returns `end`, or
    raises it.
    """

    async def main() -> Any:
        async with doubling(handle_signals=ah.SignalPolicy(signals=(USER,))) as session:
            signal.raise_signal(USER)
            assert session.should_stop()
        if isinstance(end, BaseException):
            raise end
        return end

    return main


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (None, STOPPED),
        (ah.StopRequestedError("before it was open"), STOPPED),
        (KeyboardInterrupt(), INTERRUPTED),
        (asyncio.CancelledError("received"), STOPPED),
    ],
    ids=["nothing", "a stop", "a Ctrl-C", "a cancellation"],
)
def test_the_signal_is_the_exit(end: object, code: int) -> None:
    """Of a program that returns nothing; also where a session was not open yet, or another Ctrl-C
    came when it had ended.
    """
    with pytest.raises((SystemExit, KeyboardInterrupt, ah.StopRequestedError)) as raised:
        ah.run(stopped_main(end))
    assert raised.value.args == (code,)


@pytest.mark.parametrize("end", [0, False, 7], ids=repr)
def test_any_other_result_is_returned(end: object) -> None:
    """The program has said how it ends; the signal's handlers are as they were."""
    assert ah.run(stopped_main(end)) is end
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def fails_with(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("?"), ah.StopRequestedError("enough")], ids=repr
)
def test_what_ends_a_program_without_a_signal_is_raised(error: BaseException) -> None:
    """Where no signal has stopped a session, there is no exit code; after one, an error is not
    hidden by the exit.
    """
    with pytest.raises(type(error)) as raised:
        ah.run(fails_with, error)
    assert raised.value is error
    for after in (RuntimeError("of the program"), ValueError("of the program")):
        with pytest.raises(type(after), match="of the program") as hidden:
            ah.run(stopped_main(after))
        assert hidden.value is after


def test_an_interrupt_at_the_exit_ends_the_program_quietly() -> None:
    """The system's handler shows no traceback of the interpreter's shutdown; a handler of the
    program's own stays.
    """

    def own(number: int, frame: object) -> None: ...

    for before, after in ((signal.default_int_handler, signal.SIG_DFL), (own, own)):
        signal.signal(signal.SIGINT, before)
        with pytest.raises(SystemExit):
            ah.run(stopped_main(None))
        assert signal.getsignal(signal.SIGINT) is after


class _InterruptedLoop(asyncio.SelectorEventLoop):
    """Behaves as uvloop after a Ctrl-C in its last iteration: `is_running` stays true, and it
    cannot be closed.
    """

    stuck = False

    def run_until_complete(self, future: Any) -> Any:
        if self.stuck:
            future.close()
            raise RuntimeError("this event loop is already running")
        super().run_until_complete(future)
        self.stuck = True
        raise KeyboardInterrupt

    def is_running(self) -> bool:
        return self.stuck or super().is_running()


@pytest.mark.parametrize("stopped", [True, False])
def test_an_interrupt_in_the_last_iteration_of_a_loop(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """It ends the program as the first one does, and not with the error of the loop that cannot be
    closed.
    """
    loop = _InterruptedLoop()
    monkeypatch.setattr(run_module, "_new_event_loop", lambda: loop)
    monkeypatch.setattr(run_module, "stopped_by", lambda _: signal.SIGINT if stopped else None)
    try:
        with pytest.raises(SystemExit if stopped else KeyboardInterrupt) as caught:
            ah.run(do_nothing)
        if stopped:
            assert caught.value.args == (INTERRUPTED,)
    finally:
        loop.stuck = False
        loop.close()
        asyncio.set_event_loop(None)


class _QuickClock(LoopClock):
    """A clock on which a second takes a millisecond."""

    def now(self) -> float:
        return super().now() * 1000

    def call_later(self, secs: float, callback: Callable[[], object]) -> TimerHandle:
        return super().call_later(secs / 1000, callback)


def run_quickly(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what `aiohooks.run` returns with the quick clock."""
    restore = set_current_clock(_QuickClock())
    try:
        return ah.run(main)
    finally:
        restore()


async def clean_up(secs: float, ends: list[str]) -> None:
    """Wait to be cancelled, and then take so long to end."""
    try:
        await forever()
    finally:
        await sleep(secs)
        ends.append("cleaned up")


def test_the_end_does_not_wait_for_what_was_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A call that ignores its cancellation is left behind, and 10 s later `run` ends without it,
    with the result of `main`. Before, it waits for tasks that still clean up. The log names both
    after a second.
    """
    ends: list[str] = []

    async def ignores_cancels() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await forever()

    async def main() -> int:
        call = ah.compose_functions([ah.configure(ignores_cancels, timeout=0.001, on_error="log")])
        await call()
        tasks.append(asyncio.create_task(clean_up(20, ends), name="cleaner"))
        await asyncio.sleep(0)
        return 5

    tasks: list[asyncio.Task[None]] = []
    assert run_quickly(main) == 5
    assert ends == ["cleaned up"]
    waits = [text for text in caplog.messages if "for the end of aiohooks.run: " in text]
    assert "task 'ignores_cancels', at " in waits[0]
    assert "task 'cleaner', at " in waits[0]
    assert "aiohooks.run ends without task 'ignores_cancels', at " in caplog.messages[-1]
