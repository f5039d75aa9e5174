"""ProgressHook: a bar on a terminal, plain lines elsewhere, and a terminal that is left clean."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import sys
import termios
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks._observing import Progress, duration
from aiohooks.hooks.progress import ProgressHook
from aiohooks.testing import ManualClock
from tests.support.extras import hide
from tests.support.sessions import counting_graph, going_back, make_runs, run_session
from tests.support.waiting import HANG_SECS, until_true

bad_ends = pytest.mark.parametrize(
    ("error", "says"),
    [(ZeroDivisionError("0"), "failed: ZeroDivisionError"), (asyncio.CancelledError(), "cancelled")],
    ids=["failed", "cancelled"],
)


async def run(hook: ah.SessionRunHook, runs: int, clock: ManualClock, *, start: int = 0, secs: float = 1.0) -> None:
    """Make so many runs of `secs` each in a session that starts at a step."""
    async with ah.AsyncMonitoredSession(counting_graph(), [hook], global_step=ah.MemoryStepStore(start)) as session:
        for _ in range(runs):
            clock.advance(secs)
            await session.run("train")


async def fail(hook: ah.SessionRunHook, error: BaseException, clock: ManualClock) -> None:
    """Make one run in a session, and leave it with an error."""
    async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
        clock.advance(1)
        await session.run("train")
        raise error


# -- off a terminal


@pytest.mark.parametrize(
    ("options", "runs", "start", "secs", "lines"),
    [
        (
            {"values": ["loss", "total"], "total": 50, "every": ah.Every(secs=10), "description": "train"},
            *(25, 0, 1.0),
            [
                "train: step 10/50 (20%), 1 steps/s, 0:00:40 left, loss = 10, total = 9",
                "train: step 20/50 (40%), 1 steps/s, 0:00:30 left, loss = 10, total = 19",
                "train: step 25/50 (50%), 1 steps/s, done in 0:00:25, loss = 10, total = 19",
            ],
        ),
        (  # the rate of a run that starts at step 1000 does not count these steps
            {"total": 2000, "every": ah.Every(steps=10)},
            *(10, 1000, 2.0),
            ["run: step 1010/2000 (50%), 0.5 steps/s, 0:33:00 left", "run: step 1010/2000 (50%), 0.5 steps/s, done in 0:00:20"],
        ),
        (  # without a total there is no percentage and no remaining time
            {"every": ah.Every(steps=2)},
            *(2, 0, 0.25),
            ["run: step 2, 4 steps/s", "run: step 2, 4 steps/s, done in 0:00:00"],
        ),
        ({}, 0, 0, 1.0, ["run: step 0, done in 0:00:00"]),
    ],
)
async def test_plain_lines(
    clock: ManualClock, options: dict[str, Any], runs: int, start: int, secs: float, lines: list[str]
) -> None:
    """A line is written when due and at the end: step, percent, rate, remaining time and values, without escape codes."""
    file = io.StringIO()
    await run(ProgressHook(**options, file=file), runs, clock, start=start, secs=secs)
    assert file.getvalue().splitlines() == lines


async def test_a_recovery_that_moves_the_step_back(clock: ManualClock) -> None:
    """The rate counts again from the step of a recovery."""
    file = io.StringIO()
    async with going_back(ProgressHook(total=100, every=ah.Every(steps=4), file=file), at=2, to=4, start=10) as session:
        for _ in range(5):
            clock.advance(1)
            await session.run("train")
    assert file.getvalue().splitlines()[0] == "run: step 8/100 (8%), 1.33 steps/s, 0:01:09 left"


@bad_ends
async def test_the_last_line_says_how_it_ended(clock: ManualClock, error: BaseException, says: str) -> None:
    """The last line of a run that did not end cleanly says so."""
    file = io.StringIO()
    with pytest.raises(type(error)):
        await fail(ProgressHook(total=10, file=file), error, clock)
    assert file.getvalue() == f"run: step 1/10 (10%), 1 steps/s, {says}\n"


async def test_values_on_one_line_without_escape_codes(clock: ManualClock) -> None:
    """Arrays, line breaks and escape codes in values do not break the line."""
    graph = counting_graph()
    graph.operation(name="array")(lambda: np.array([[1.0, 2.0], [3.0, 4.0]]))
    graph.operation(name="text")(lambda: "a\n\x1b[31mb")
    graph.operation(name="number")(lambda: np.float32(1 / 3))
    file = io.StringIO()
    hook = ProgressHook(["array", "text", "number"], every=ah.Every(steps=1), file=file)
    await run_session(ah.AsyncMonitoredSession(graph, [hook]), 1, "train")
    assert file.getvalue().splitlines()[0] == "run: step 1, array = [[1. 2.] [3. 4.]], text = a ?[31mb, number = 0.3333"


async def test_values_are_fetched_only_for_runs_that_are_shown(clock: ManualClock) -> None:
    """A run that is not shown does not evaluate the values."""
    graph = counting_graph()
    calls: list[int] = []
    graph.operation(name="watched")(lambda: calls.append(1))
    hook = ProgressHook(["watched"], every=ah.Every(steps=5), file=io.StringIO())
    await run_session(ah.AsyncMonitoredSession(graph, [hook]), 12, "train")
    assert len(calls) == 2


async def test_errors_of_the_output_do_not_end_the_run(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """A closed file is reported once, and the run continues."""
    file = io.StringIO()
    file.close()
    await run(ProgressHook(every=ah.Every(steps=1), file=file), 3, clock)
    assert [(record.levelno, record.getMessage()[:35]) for record in caplog.records] == [
        (logging.WARNING, "progress cannot be shown any more: ")
    ]


async def test_the_default_is_the_current_stderr(clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file it writes to the stderr of the time at which the session begins; stdout is not used."""
    await run(ProgressHook(), 1, clock)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "run: step 1, 1 steps/s, done in 0:00:01\n"


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
    monkeypatch.setattr("aiohooks.hooks._rich._STOP_SECS", HANG_SECS)  # for the last state; a terminal may block all writes
    terminal = Terminal()
    yield terminal
    terminal.close()


def plain(output: str) -> str:
    """Return the output without escape codes."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)


def assert_clean(terminal: Terminal) -> None:
    """Assert that the cursor is visible, at the beginning of a line, and without colour."""
    output = terminal.output()
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")
    after = output.rsplit("\n", 1)[1]
    assert plain(after).strip("\r") == ""
    assert output.rfind("\x1b[0m") >= max(output.rfind(code) for code in ("\x1b[1m", "\x1b[2", "\x1b[36m", "\x1b[31m"))


async def test_a_bar_on_a_terminal(clock: ManualClock, terminal: Terminal) -> None:
    """A terminal gets a bar that ends in the last state, with the values below it; the terminal is left clean."""
    await run(ProgressHook({"loss": "loss"}, total=20, description="[train]", file=terminal.file), 20, clock)
    shown = plain(terminal.output())
    assert "━" in shown
    assert re.search(r"\[train\] ━+ 20/20 1 steps/s, done in 0:00:20 *\r*\n *loss = 10", shown)
    assert_clean(terminal)
    await run(ProgressHook(description="endless", file=terminal.file), 2, clock)  # without a total there is no bar
    assert "endless · 2 1 steps/s, done in 0:00:02" in plain(terminal.output())


@bad_ends
async def test_a_terminal_is_left_clean(clock: ManualClock, terminal: Terminal, error: BaseException, says: str) -> None:
    """However the run ends, the terminal is clean, the last state stays, and the process's streams are restored."""
    streams = sys.stdout, sys.stderr
    with pytest.raises(type(error)):
        await fail(ProgressHook(total=10, file=terminal.file), error, clock)
    assert f"1/10 1 steps/s, {says}" in plain(terminal.output())
    assert_clean(terminal)
    assert (sys.stdout, sys.stderr) == streams


async def test_other_output_appears_above(clock: ManualClock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints and logs to the same terminal appear in lines of their own, and the handlers' streams are restored."""
    monkeypatch.setattr(sys, "stderr", terminal.file)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        async with ah.AsyncMonitoredSession(counting_graph(), [ProgressHook(total=10)]) as session:
            await until_true(lambda: sys.stderr is not terminal.file and handler.stream is not terminal.file)
            logging.getLogger("some").error("from a log")
            print("from a print", file=sys.stderr)
            await session.run("train")
    finally:
        logging.getLogger().removeHandler(handler)
    lines = [line.strip() for line in plain(terminal.output()).replace("\r", "\n").splitlines()]
    assert "from a log" in lines
    assert "from a print" in lines
    assert sys.stderr is terminal.file
    assert handler.stream is terminal.file
    assert_clean(terminal)


async def test_a_redirected_stdout_stays_redirected(
    clock: ManualClock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bar on the terminal, output to a stdout that is a file is written to the file."""
    stdout = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal.file)
    monkeypatch.setattr(sys, "stdout", stdout)
    async with ah.AsyncMonitoredSession(counting_graph(), [ProgressHook()]) as session:
        await until_true(lambda: sys.stderr is not terminal.file)
        print("a result")
        await session.run("train")
    assert stdout.getvalue() == "a result\n"
    assert "a result" not in terminal.output()


async def test_several_sessions_share_a_terminal(clock: ManualClock, terminal: Terminal) -> None:
    """Sessions that run at the same time have a line each, which stays until the last one has ended."""
    hook = ProgressHook(total=5, description="chief", file=terminal.file)
    async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as outer:
        await run(ProgressHook(total=3, description="worker", file=terminal.file), 3, clock)
        await until_true(lambda: "\x1b[?25h" in terminal.output())  # the cursor is visible: it stays so after a kill
        await outer.run("train")
    assert re.search(r"chief [━╺]+ 1/5 [^\n]*\n *worker ━+ 3/3 ", plain(terminal.output()).replace("\r", ""))
    assert_clean(terminal)


async def test_a_stopped_terminal_does_not_block_the_run(clock: ManualClock, terminal: Terminal) -> None:
    """While the terminal blocks all writes, as after Ctrl-S, runs continue; the last state is shown once it is resumed."""
    termios.tcflow(terminal.file, termios.TCOOFF)
    async with ah.AsyncMonitoredSession(counting_graph(), [ProgressHook(total=5, file=terminal.file)]) as session:
        await make_runs(session, 5, "train")
        assert terminal.output() == ""
        termios.tcflow(terminal.file, termios.TCOON)
    assert "5/5" in plain(terminal.output())
    assert_clean(terminal)


async def test_a_dumb_terminal_gets_plain_lines(clock: ManualClock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal without escape codes gets none; so does any with `display="plain"`."""
    await run(ProgressHook(total=2, file=terminal.file, display="plain"), 2, clock)
    monkeypatch.setenv("TERM", "dumb")
    await run(ProgressHook(total=2, file=terminal.file), 2, clock)
    assert "\x1b" not in terminal.output()
    assert terminal.output().count("step 2/2") == 2


async def test_a_hook_may_be_used_again(clock: ManualClock, terminal: Terminal) -> None:
    """A second session with the same hook counts separately."""
    hook = ProgressHook(total=20, file=terminal.file)
    await run(hook, 20, clock)
    await run(hook, 2, clock, start=4)
    assert "6/20 1 steps/s, done" in plain(terminal.output())
    assert hook.progress == Progress("run", 20, 6, 4, 2.0, "", "done in 0:00:02")


async def test_a_terminal_without_rich(
    clock: ManualClock, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without rich a terminal gets plain lines and a hint that says what to install."""
    hide(monkeypatch, "rich", "aiohooks.hooks._rich")
    caplog.set_level(logging.INFO, logger="aiohooks.hooks")
    await run(ProgressHook(total=2, file=terminal.file), 2, clock)
    assert terminal.output() == "run: step 2/2 (100%), 1 steps/s, done in 0:00:02\r\n"
    assert "pip install 'aiohooks[rich]'" in caplog.text


# -- the rest


@pytest.mark.parametrize(
    ("secs", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (183_600, "2d 3:00:00"), (-5, "0:00:00")]
)
def test_durations(secs: float, text: str) -> None:
    """Hours, minutes and seconds are shown, and days if there are any."""
    assert duration(secs) == text
