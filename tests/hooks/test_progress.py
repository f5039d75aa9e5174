"""ProgressHook: a bar on a terminal, the last state elsewhere, and a terminal that is left
clean.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import sys
import termios
from collections.abc import Iterator

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks.progress import ProgressHook
from aiohooks.testing import ManualClock
from tests.support.sessions import counting, counting_graph, run_session
from tests.support.waiting import until_true


async def run(hook: ah.SessionRunHook, runs: int, clock: ManualClock, *, start: int = 0) -> None:
    """Make so many runs of a second each in a session that starts at a step."""
    async with counting(hook, global_step=ah.MemoryStepStore(start)) as session:
        for _ in range(runs):
            clock.advance(1.0)
            await session.run("train")


async def fail(hook: ah.SessionRunHook, error: BaseException) -> None:
    """Make one run in a session, and leave it with an error."""
    async with counting(hook) as session:
        await session.run("train")
        raise error


def words(output: str) -> list[str]:
    """Return the words of the last line, without the bar."""
    return [word for word in output.splitlines()[-1].split() if not set(word) & set("━╸╺")]


# -- off a terminal


async def test_the_last_state_is_written(clock: ManualClock) -> None:
    """Off a terminal one line is written at the end: description, step, and the values of the last
    run; no escape codes.
    """
    file = io.StringIO()
    await run(
        ProgressHook({"loss": "loss", "sum": "total"}, total=50, description="[train]", file=file),
        25,
        clock,
    )
    (line,) = file.getvalue().splitlines()
    assert words(line)[:2] == ["[train]", "25/50"]
    assert line.rstrip().endswith("loss = 10, sum = 24")
    assert "\x1b" not in line


async def test_a_run_without_a_total_or_a_step() -> None:
    """Without a total the number of steps is shown; a session without a run shows where it
    starts.
    """
    file = io.StringIO()
    async with counting(ProgressHook(file=file), global_step=ah.MemoryStepStore(7)):
        pass
    assert words(file.getvalue())[:2] == ["run", "7/?"]


async def test_values_on_one_line_without_escape_codes(clock: ManualClock) -> None:
    """Arrays, line breaks and escape codes in values do not break the line."""
    graph = counting_graph()
    graph.operation(name="array")(lambda: np.array([[1.0, 2.0], [3.0, 4.0]]))
    graph.operation(name="text")(lambda: "a\n\x1b[31mb")
    graph.operation(name="number")(lambda: np.float32(1 / 3))
    graph.operation(name="count")(lambda: 1234567)
    file = io.StringIO()
    for tag in ("array", "text", "number", "count"):
        await run_session(
            ah.AsyncMonitoredSession(graph, [ProgressHook([tag], file=file)]), 1, "train"
        )
    shown = [line.split("= ")[1].rstrip() for line in file.getvalue().splitlines()]
    assert shown == [r"[[1. 2.]\n [3. 4.]]", r"a\n\x1b[31mb", "0.333333", "1234567"]


async def test_errors_of_the_output_do_not_end_the_run(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A closed file is reported, and the run continues."""
    file = io.StringIO()
    file.close()
    await run(ProgressHook(file=file), 3, clock)
    assert {(record.levelno, record.getMessage()[:27]) for record in caplog.records} == {
        (logging.WARNING, "progress cannot be shown: V")
    }


# -- on a terminal


class Terminal:
    """A pseudo-terminal: `file` is the program's end, `output()` is what was written to it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        os.set_blocking(self._master, False)
        termios.tcsetwinsize(slave, (24, 100))
        self.file = os.fdopen(slave, "w", encoding="utf-8")
        self._read = b""

    def output(self) -> str:
        """Return everything written so far."""
        try:
            while part := os.read(self._master, 65536):
                self._read += part
        except OSError:  # no more output yet
            pass
        return self._read.decode()

    def close(self) -> None:
        """Close both ends."""
        self.file.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal for this test."""
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    yield terminal
    terminal.close()


def plain(output: str) -> str:
    """Return the output without escape codes."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)


def assert_clean(terminal: Terminal) -> None:
    """Assert that the cursor is visible and at the beginning of a line."""
    output = terminal.output()
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")
    assert plain(output.rsplit("\n", 1)[1]).strip("\r") == ""


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("0"), asyncio.CancelledError()], ids=["failed", "cancelled"]
)
async def test_a_terminal_is_left_clean(
    clock: ManualClock, terminal: Terminal, error: BaseException
) -> None:
    """However the run ends, the last state stays, and the terminal and the process's streams are
    restored.
    """
    streams = sys.stdout, sys.stderr
    with pytest.raises(type(error)):
        await fail(ProgressHook(total=10, file=terminal.file), error)
    assert " 1/10 " in plain(terminal.output())
    assert_clean(terminal)
    assert (sys.stdout, sys.stderr) == streams


async def test_other_output_appears_above(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output to the same terminal appears in lines of its own; a stdout that is a file stays
    one.
    """
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal.file)
    monkeypatch.setattr(sys, "stdout", stdout)
    async with counting(ProgressHook(total=10)) as session:
        print("from a print", file=sys.stderr)
        print("a result")
        await session.run("train")
    lines = [line.strip() for line in plain(terminal.output()).replace("\r", "\n").splitlines()]
    assert "from a print" in lines
    assert sys.stderr is terminal.file
    assert stdout.getvalue() == "a result\n"
    assert "a result" not in lines
    assert_clean(terminal)


async def test_a_stopped_terminal_does_not_block_the_steps(
    clock: ManualClock, terminal: Terminal
) -> None:
    """While the terminal blocks all writes, as after Ctrl-S, runs continue; the last state is shown
    once it is resumed.
    """
    async with counting(ProgressHook(total=5, file=terminal.file)) as session:
        await until_true(lambda: "0/5" in terminal.output())
        termios.tcflow(terminal.file, termios.TCOOFF)
        for _ in range(5):
            clock.advance(1.0)
            await session.run("train")
        termios.tcflow(terminal.file, termios.TCOON)
    assert "5/5" in plain(terminal.output())
    assert_clean(terminal)
