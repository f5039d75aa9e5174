"""A learner that is killed just after a checkpoint, with the items that it has received."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import start
from tests.support.store_servers import running
from tests.support.waiting import HANG_SECS

pytestmark = pytest.mark.every_python


@pytest.fixture(params=["local", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a step store."""
    if request.param == "local":
        yield f"local://{tmp_path / 'steps'}"
    else:
        with running(request.param, tmp_path) as server:
            yield server.url


@contextlib.contextmanager
def process(role: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process of `tests.support.learner_and_worker` for the block."""
    module = "tests.support.learner_and_worker"
    with start([sys.executable, "-m", module, role, *arguments]) as child:
        try:
            yield child
        finally:
            child.kill()


def test_a_learner_that_is_killed_after_a_save_gets_new_items(url: str, tmp_path: Path) -> None:
    """The learner is killed just after a save, when it has received all items that the gate of the
    worker admits. Its successor restores the step that the store has; the worker sends further
    items, and both end normally.
    """
    with process("learner", url, str(tmp_path), "6", "3") as learner:
        assert learner.stdout is not None
        assert learner.stdout.readline() == "ready\n"
        with process("worker", url, str(tmp_path)) as worker:
            learner.communicate(timeout=HANG_SECS)
            assert learner.returncode == -signal.SIGKILL
            with process("learner", url, str(tmp_path), "6", "0") as successor:
                learned, _ = successor.communicate(timeout=HANG_SECS)
                assert (successor.returncode, learned) == (0, "ready\nlearned 6\n")
            worked, _ = worker.communicate(timeout=HANG_SECS)
            assert (worker.returncode, worked) == (0, "finished\n")
