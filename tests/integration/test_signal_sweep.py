"""A part of `python -m tests.fuzz.signals` in every test run, and the injected bugs that it must find."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aiohooks.session import signals
from tests.conformance.report import installed_loops
from tests.fuzz.signals.__main__ import main
from tests.fuzz.signals.processes import send_to_processes
from tests.fuzz.signals.scenarios import plain, saving, waiting
from tests.fuzz.signals.sweep import sweep

pytestmark = pytest.mark.every_python

LOOPS = installed_loops()


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_signals_anywhere(loop: str) -> None:
    """One signal or two, at any suspension: the session ends as documented and leaves nothing behind."""
    tally = sweep(points=150, loop=loop)
    assert tally.violations == []
    assert tally.once >= 30
    assert tally.twice >= 30
    assert len(tally.signals) == 10


@pytest.mark.slow
@pytest.mark.sample
def test_signals_to_processes() -> None:
    """One to three signals to processes, some of them in a chosen phase and some at a random moment."""
    found = send_to_processes(count=10, loop=LOOPS[-1])
    assert found.violations == []
    assert (len(found.phases), found.phases["random moment"]) == (6, 5)


def without_stop(session: Any, number: Any, drain: bool) -> None:
    """Does not stop the session."""


def without_reason(session: Any, number: Any, drain: bool) -> None:
    """Stops the session without naming the signal."""
    session.state.record_stop("stopped")


def without_cancel(handlers: Any, number: Any) -> None:
    """Ignores the second signal."""


def without_restore(handlers: Any, numbers: Any) -> None:
    """Keeps the handlers installed."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "fault", "finding"),
    [
        (signals.StopOnSignal, "record", without_stop, "stopped because: (None|step 4 reached)"),
        (signals.StopOnSignal, "record", without_reason, "stopped because: stopped"),
        (signals._SignalHandlers, "_cancel_sessions", without_cancel, "ended with None"),
        (signals._SignalHandlers, "_restore", without_restore, "the handler of SIGINT is"),
        (signals._Wakeup, "close", lambda wakeup: None, "the wakeup fd is"),
    ],
)
def test_injected_bug_is_found(
    owner: type, method: str, fault: Any, finding: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Each injected bug is found, with the right violation."""
    monkeypatch.setattr(owner, method, fault)
    tally = sweep(points=60, loop="asyncio", scenarios=(plain, saving, waiting))
    assert any(re.search(finding, one) for one in tally.violations), tally.violations


@pytest.mark.slow
def test_command_counts_its_signals(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the number of signals on each loop, and returns 0 when it found no violation."""
    assert main(["--points", "20", "--real", "1", "--loop", "asyncio"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"asyncio: 2[01] signals at \d+ points .*; 0 violations$", output, re.MULTILINE)
    assert re.search(r"asyncio: [123] signals to 1 processes in .*; 0 violations$", output, re.MULTILINE)
