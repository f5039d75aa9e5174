"""Effects of trainings that are killed: some of them in every test run, and the proof that the
program finds bugs.

All of them are a command: `python -m tests.fuzz.effects --count 2000`.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.fuzz.effects import BUGS
from tests.support.processes import run_python


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, without threads, which it forks."""
    return run_python("-m", "tests.fuzz.effects", *arguments)


@pytest.mark.slow
@pytest.mark.sample
def test_kept_steps_have_all_effects_and_undone_ones_none() -> None:
    """Each is delivered under one key, in order, and no process delivers it twice."""
    ended = run("--count", "20", "--seed", "7")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"20 trainings with \d\d+ kills, 0 of which broke a promise", ended.stdout)


@pytest.mark.slow
def test_the_injected_bugs_are_found() -> None:
    """Each of them by one of the first trainings."""
    ended = run("--injected-bugs")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("found: training") == len(BUGS)
