"""Signals to processes: a part of `python -m tests.fuzz.signals` in every test run."""

from __future__ import annotations

import re

import pytest

from tests.conformance.report import installed_loops
from tests.fuzz.signals.__main__ import main
from tests.fuzz.signals.processes import send_to_processes

pytestmark = [pytest.mark.slow, pytest.mark.every_python]


def test_signals_to_processes() -> None:
    """One to three signals to processes, some of them in a chosen phase and some at a random
    moment.
    """
    found = send_to_processes(count=10, loop=installed_loops()[-1])
    assert found.violations == []
    assert (len(found.phases), found.phases["random moment"]) == (6, 5)


@pytest.mark.sample
def test_the_command_counts_its_signals(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the number of signals on each loop."""
    assert main(["--processes", "1", "--loop", "asyncio"]) == 0
    output = capsys.readouterr().out
    assert re.search(
        r"asyncio: [123] signals to 1 processes in .*; 0 violations$", output, re.MULTILINE
    )
