"""A part of `python -m tests.fuzz.signals.computing` in every test run."""

from __future__ import annotations

import pytest

from tests.fuzz.signals import computing

pytestmark = [pytest.mark.slow, pytest.mark.every_python]


@pytest.mark.parametrize("kind", computing.KINDS)
def test_steps_that_compute_end_at_sigterm(kind: str) -> None:
    """A training that only computes ends with the step in which SIGTERM arrives, or with the next one."""
    stop = computing.stop_process(kind)
    reason = "the server received SIGTERM" if kind == "service" else "SIGTERM received"
    assert (stop.reason, stop.exit_code, stop.replies) == (reason, 0, computing.REQUESTS if kind == "service" else 0)
    assert stop.steps_after <= 1


def test_command_prints_the_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints a line for each kind, and fails if a step too many was made."""
    monkeypatch.setattr(computing, "stop_process", lambda *_: computing.Stop(0.25, 1, "SIGTERM received", 0))
    assert computing.main(["--processes", "2"]) == 0
    assert "graph                  2                 250.0 ms               1\n" in capsys.readouterr().out
    monkeypatch.setattr(computing, "stop_process", lambda *_: computing.Stop(0.25, 2, "SIGTERM received", 0))
    assert computing.main([]) == 1
