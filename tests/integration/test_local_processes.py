"""The local store with real processes: concurrent, forked, killed, stopped, for a long time."""

from __future__ import annotations

import pytest

from tests.fuzz.faults_local import FAULTS
from tests.fuzz.local_scenarios import SCENARIOS
from tests.support.processes import run_python

pytestmark = pytest.mark.every_python

# Programs that fork run in a process of their own, as the process of the tests has threads.


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    """See the docstring of the scenario."""
    done = run_python("-m", "tests.fuzz.local_scenarios", name)
    if name == "without_inotify" and ("unshare" in done.stderr or "max_inotify_instances" in done.stderr):
        pytest.skip("this system does not let a user be without inotify")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind: str) -> None:
    """After a process was killed or stopped no other is stuck, no step is lost or counted twice, and nothing is left over."""
    done = run_python("-m", "tests.fuzz.faults_local", "--count", "3", "--kinds", kind)
    assert "3 faults in" in done.stdout
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.slow
def test_soak() -> None:
    """Memory, files, watches and tasks do not grow while processes wait and advance for a long time."""
    done = run_python("-m", "tests.fuzz.local_soak", "--count", "8000")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "8000 waits and as many advances" in done.stdout
    assert "nothing has grown" in done.stdout
