"""Signals to processes: a part of `python -m tests.fuzz.signals` in every test run, and of its part that computes."""

from __future__ import annotations

import re

import pytest

from tests.conformance.report import installed_loops
from tests.fuzz.signals import __main__ as signals
from tests.fuzz.signals import computing
from tests.fuzz.signals.processes import send_to_processes

pytestmark = [pytest.mark.slow, pytest.mark.every_python]


@pytest.mark.sample
def test_signals_to_processes() -> None:
    """One to three signals to processes, some of them in a chosen phase and some at a random moment."""
    found = send_to_processes(count=10, loop=installed_loops()[-1])
    assert found.violations == []
    assert (len(found.phases), found.phases["random moment"]) == (6, 5)


def test_the_command_counts_its_signals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints the number of signals on each loop, and how soon computing steps end; one step too many fails."""
    stop = computing.Stop(0.25, 1, "SIGTERM received", 0)
    monkeypatch.setattr(signals, "stop_process", lambda *_, **__: stop)
    assert signals.main(["--processes", "1", "--loop", "asyncio", "--computing", "2"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"asyncio: [123] signals to 1 processes in .*; 0 violations$", output, re.MULTILINE)
    assert "graph                stopped after 250.0 ms, and 1 step(s) after the signal\n" in output
    stop = computing.Stop(0.25, 2, "SIGTERM received", 0)
    assert signals.main(["--processes", "0", "--loop", "asyncio"]) == 1


@pytest.mark.parametrize("kind", computing.KINDS)
def test_steps_that_compute_end_at_sigterm(kind: str) -> None:
    """A training that only computes ends with the step in which SIGTERM arrives, or with the next one."""
    stop = computing.stop_process(kind)
    reason = "the server received SIGTERM" if kind == "service" else "SIGTERM received"
    assert (stop.reason, stop.exit_code, stop.replies) == (reason, 0, computing.REQUESTS if kind == "service" else 0)
    assert stop.steps_after <= 1
