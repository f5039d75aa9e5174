"""The local store over real processes: together, forked, killed, stopped, for long."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fuzz.faults_local import FAULTS
from tests.fuzz.local_scenarios import SCENARIOS
from tests.support.source import ROOT

pytestmark = pytest.mark.every_python

# What forks runs in a process of its own: that of the tests has threads.


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    """What the scenario's docstring says."""
    done = _run("tests.fuzz.local_scenarios", name)
    if name == "without_inotify" and ("unshare" in done.stderr or "max_inotify_instances" in done.stderr):
        pytest.skip("this system lets nobody try to be without inotify")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind: str) -> None:
    """A killed or stopped process leaves nobody stuck, nothing lost, nothing counted twice and nothing behind."""
    done = _run("tests.fuzz.faults_local", "--count", "3", "--kinds", kind)
    assert "3 faults in" in done.stdout
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.slow
def test_soak() -> None:
    """Waiting and advancing for long makes nothing grow."""
    done = _run("tests.fuzz.local_soak", "--count", "8000")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "8000 waits and as many advances" in done.stdout
    assert "nothing has grown" in done.stdout
