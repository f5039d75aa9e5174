"""A process that is asked why it waits: by its own code, by signals, by other processes; and who
may ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import re
import signal
import socket
import threading
import types
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.__main__ import main
from aiohooks.errors import InvalidArgumentError
from aiohooks.session import why
from tests.support.hangs import disable_why, unfolded
from tests.support.sessions import doubling, use_up
from tests.support.waiting import HANG_SECS, forever, parked, ticks

pytestmark = pytest.mark.every_python


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the sockets of a program that was started with AIOHOOKS_WHY=1."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("AIOHOOKS_WHY", "1")
    monkeypatch.setattr(
        "aiohooks._command_line._ANSWER_SECS", HANG_SECS
    )  # within which a process answers
    signal.signal(
        signal.SIGQUIT, signal.SIG_DFL
    )  # as in a terminal: the `&` of a script has it ignored
    return tmp_path / f"aiohooks-{os.getuid()}"


def files(folder: Path) -> list[str]:
    """Return what is there."""
    return sorted(path.name for path in folder.glob("*"))


@contextlib.asynccontextmanager
async def opened(
    *hooks: ah.SessionRunHook, **options: Any
) -> AsyncGenerator[ah.AsyncMonitoredSession]:
    """Run a session; in the end its process cannot be asked any more, and nothing is left of
    that.
    """
    try:
        async with ah.AsyncMonitoredSession(step, hooks, name="chief", **options) as session:
            yield session
    finally:
        disable_why()


async def step() -> None:
    """Do nothing."""


class Stuck(ah.SessionRunHook):
    """Waits until it is let go."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.released = asyncio.Event()

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Wait."""
        self.waits.set()
        await self.released.wait()


async def test_a_wait_for_a_feed_leads_into_the_feeds() -> None:
    """From the loop over the task that reads them to the line where they wait."""
    arrived = asyncio.Event()

    async def feeds() -> AsyncIterator[int]:
        await arrived.wait()
        yield 1

    async with doubling() as session:
        loop = await parked(use_up(session.steps(feeds=feeds())), 10)
        pattern = (
            r" waits for next feed, .* s <- next feed, .*\.feeds at .*, .* s"
            r" <- asyncio.Event.wait"
        )
        assert re.search(pattern, unfolded(str(session.why())))
        arrived.set()
        await loop


async def test_a_session_says_why_it_waits() -> None:
    """From its own loop and from another thread; it names its sessions, the hook, and what that
    waits for.
    """
    hook = Stuck()
    async with opened(hook) as session:
        assert str(session.why()).startswith("session 'chief' (step 0, open for ")
        run = asyncio.create_task(session.run(()))
        await hook.waits.wait()
        await ticks()
        for graph in (session.why(), await asyncio.to_thread(session.why)):
            pattern = (
                r"'chief' \(step 0, in run 1 for .* waits for Stuck.before_run at step 1, .* s <-"
                r" asyncio.Event.wait"
            )
            assert re.search(pattern, unfolded(str(graph))), str(graph)
            assert {node.kind for node in graph.nodes} >= {"session", "hook", "function"}
        hook.released.set()
        await run
    assert str(session.why()) != ""


async def test_other_processes_ask(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They ask by the process ID and get text; a pause is named, too."""
    async with opened() as session:
        assert files(folder) == [f"{os.getpid()}.sock"]
        assert os.stat(folder).st_mode & 0o777 == 0o700
        session.pause("a look at the weights")
        run = await parked(session.run(()), 5)
        assert await asyncio.to_thread(main, ["why", str(os.getpid())]) == 0
        printed = capsys.readouterr().out
        assert "\n    waits for the end of the pause (a look at the weights)" in printed
        assert ", paused: a look at the weights" in printed
        assert "stopping" not in printed
        session.resume()
        await run
    assert files(folder) == []


async def test_an_answer_that_fails_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever asks gets the error, and the program continues."""
    monkeypatch.setattr(why, "wait_graph", functools.partial(open, "/missing"))
    async with opened() as session:
        assert await asyncio.to_thread(main, ["why", str(os.getpid())]) == 0
        await session.run(())
    assert "could not be found out: TypeError(" in capsys.readouterr().out


async def test_a_question_that_cannot_be_accepted(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process with too many open files logs that, and answers when it has fewer."""
    failures = [OSError(errno.EMFILE, "Too many open files")]

    class Busy(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if failures:
                raise failures.pop()
            return super().accept()

    monkeypatch.setattr(why, "_PAUSE_SECS", 0.0)
    monkeypatch.setattr("aiohooks.session.why.socket.socket", Busy)
    async with opened():
        assert await asyncio.to_thread(main, ["why", str(os.getpid())]) == 0
    assert "session 'chief'" in capsys.readouterr().out
    assert [text for text in caplog.messages if "question" in text] == [
        "a question why this process waits could not be accepted: [Errno 24] Too many open files"
    ]


async def test_an_answer_that_takes_too_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not taken for a process that cannot answer."""
    asked = threading.Event()
    made = why.process_text

    def late() -> str:
        asked.wait()
        return made()

    monkeypatch.setattr(why, "process_text", late)
    # The time is over when the first part of the answer has come.
    clock = types.SimpleNamespace(monotonic=iter((0.0, 2 * HANG_SECS)).__next__)
    monkeypatch.setattr("aiohooks._command_line.time", clock)
    monkeypatch.setattr("aiohooks._command_line._ANSWER_SECS", HANG_SECS)
    async with opened():
        assert await asyncio.to_thread(main, ["why", str(os.getpid())]) == 1
        asked.set()
    assert "s: it has too many tasks, or the machine is busy: ask again" in capsys.readouterr().out


def test_a_socket_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of the system is said."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp/" + "long" * 50)
    assert main(["why", "1"]) == 1
    assert "AF_UNIX path too long" in capsys.readouterr().out


async def test_a_blocked_loop_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another thread asks while the loop is blocked, and gets the line."""
    codes: list[int] = []

    class Block(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            asking = threading.Thread(target=lambda: codes.append(main(["why", str(os.getpid())])))
            asking.start()
            asking.join()

    async with opened(Block()) as session:
        await session.run(())
    assert codes == [0]
    assert re.search(
        r"waits for Block.before_run \(runs; the event loop waits for it\), .*test_why.py:\d+"
        r" <- thread",
        re.sub(r"\S*<locals>\.", "", unfolded(capsys.readouterr().out)),
    )


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGQUIT"])
async def test_signals_print_it(name: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A signal prints the answer to standard error, and the program continues."""
    async with opened() as session:
        signal.raise_signal(getattr(signal, name))
        printed = capfd.readouterr().err
        assert f"why process {os.getpid()} waits:\nsession 'chief' (step 0, open for " in printed
        assert " (runs; the event loop waits for it), " in printed
        await session.run(())


async def test_a_signal_with_a_handler_is_left_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A session that pauses by SIGUSR1 is paused by it; so is one that has its handler from
    elsewhere, which is logged.
    """
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        async with opened():
            signal.raise_signal(signal.SIGUSR1)
            assert received == [signal.SIGUSR1]
            assert (
                "SIGUSR1 does not print why this process waits: it has a handler already"
                in caplog.text
            )
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_session_takes_a_signal_that_would_print_it(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one ends the program with the same exit code as without `why`, and nothing warns
    of it.
    """
    before = signal.getsignal(signal.SIGUSR1)

    async def main() -> None:
        async with ah.AsyncMonitoredSession(
            step, handle_signals=ah.SignalPolicy(signals=(signal.SIGUSR1,))
        ):
            assert caplog.text == ""
            for _ in range(2):
                signal.raise_signal(signal.SIGUSR1)
            await forever()

    try:
        with pytest.raises(SystemExit) as raised:
            ah.run(main)
        assert raised.value.code == 128 + signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) is why._print_why
    finally:
        disable_why()
    assert signal.getsignal(signal.SIGUSR1) is before


async def test_a_signal_that_is_ignored_stays_ignored(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The `&` of a script has SIGQUIT ignored: that is no handler of the program, and no
    warning.
    """
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        async with opened():
            assert signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGUSR1) is why._print_why
    finally:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    assert caplog.text == ""


async def test_a_directory_of_others_is_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither are questions answered there, nor asked; the session is opened all the same."""
    os.mkdir(folder, 0o755)
    async with opened() as session:
        await session.run(())
    assert "AIOHOOKS_WHY is set, but this process cannot be asked why it waits: " in caplog.text
    assert (
        f"{folder} can be used by others than this user; remove it, or make its mode 0700"
        in caplog.text
    )
    assert main(["why", str(os.getpid())]) == 2
    os.rmdir(folder)
    os.symlink(folder.parent, folder)
    with pytest.raises(InvalidArgumentError, match="can be used by others"):
        why.why_folder()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "1",
            "; start it with AIOHOOKS_WHY=1, and ask as its user",
        ),
        ("4194304", "process 4194304: does not exist any more"),
    ],
)
def test_a_process_that_cannot_be_asked(
    target: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command shows the reason, and what to do."""
    assert main(["why", target]) == 1
    assert says in capsys.readouterr().out
