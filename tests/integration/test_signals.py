"""Signals to processes: a part of `python -m tests.fuzz.signals` in every test run."""

from __future__ import annotations

import pytest

from tests.conformance.report import installed_loops
from tests.fuzz.signals.processes import send_to_processes

pytestmark = [pytest.mark.slow, pytest.mark.every_python]


def test_signals_to_processes() -> None:
    """One to three signals to processes, some of them in a chosen phase and some at a random
    moment.
    """
    found = send_to_processes(count=10, loop=installed_loops()[-1])
    assert found.violations == []
    assert (len(found.phases), found.phases["random moment"]) == (6, 5)
