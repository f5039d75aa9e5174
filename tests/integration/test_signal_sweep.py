"""P14: a part of it in every test run, and the proof that it finds what it is for.

The whole of it is a command: `python -m tests.fuzz.signals --points 5000 --real 150 --loop both`.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from aiohooks.session import signals
from tests.fuzz._signal_scenarios import plain, saving, waiting
from tests.fuzz._signal_sweep import sweep
from tests.fuzz.signals import main, real

pytestmark = pytest.mark.every_python

LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_signals_anywhere(loop: str) -> None:
    """One signal or two, at any suspension: the session answers for it and leaves nothing behind."""
    tally = sweep(points=150, loop=loop)
    assert tally.violations == []
    assert tally.once >= 30
    assert tally.twice >= 30
    assert len(tally.signals) == 9


@pytest.mark.slow
def test_signals_to_processes() -> None:
    """One to three signals to real processes, some of them in a chosen phase and some at any moment."""
    found = real(processes=10, loop=LOOPS[-1])
    assert found.violations == []
    assert (len(found.phases), found.phases["any moment"]) == (6, 5)


def lost(session: Any, number: Any, late: Any) -> None:
    """Does not stop the session."""


def nameless(session: Any, number: Any, late: Any) -> None:
    """Stops it and does not say why."""
    session._root.request_stop("stopped")


def patient(taken: Any, number: Any) -> None:
    """Takes a second signal for the first one again."""


def kept(taken: Any, numbers: Any) -> None:
    """Keeps the handlers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "method", "fault", "finding"),
    [
        (signals.StopOnSignal, "request_stop", lost, "stopped because: None"),
        (signals.StopOnSignal, "request_stop", nameless, "stopped because: stopped"),
        (signals._SignalHandlers, "_cancel_sessions", patient, "ended with None"),
        (signals._SignalHandlers, "_restore", kept, "the handler of SIGINT is"),
        (signals._Wakeup, "close", lambda wakeup: None, "the wakeup fd is"),
    ],
)
def test_seeded_bug_is_found(
    owner: type, method: str, fault: Any, finding: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Each bug made on purpose is found, and called by its name."""
    monkeypatch.setattr(owner, method, fault)
    tally = sweep(points=60, loop="asyncio", scenarios=(plain, saving, waiting))
    assert any(finding in one for one in tally.violations), tally.violations


@pytest.mark.slow
def test_command_counts_what_it_fires(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what it has fired on which loop, and ends well when nothing was found."""
    assert main(["--points", "20", "--real", "1", "--loop", "asyncio"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"asyncio: 2[01] signals at \d+ points .*; 0 violations$", output, re.MULTILINE)
    assert re.search(r"asyncio: [123] signals to 1 processes in .*; 0 violations$", output, re.MULTILINE)
