"""examples/train_torch.py, run as a user runs it."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_examples import command, environment
from tests.support import processes
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS


def run(*options: object) -> subprocess.CompletedProcess[str]:
    """Run the example to its end."""
    return processes.run(command("train_torch.py", *options), env=environment())


@pytest.mark.slow
def test_training_reaches_its_accuracy_and_is_continued(tmp_path: Path) -> None:
    """SIGTERM ends it after the step; started again it continues from there, and ends with the best weights."""
    options = ("--every", 50, "--patience", 10**6, "--checkpoint-dir", tmp_path)
    arguments = command("train_torch.py", *options, "--steps", 10**6)
    first = subprocess.Popen(arguments, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    with first:
        assert "step 50/1000000" in first.stderr.readline()
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=HANG_SECS)
    assert first.returncode == 128 + signal.SIGTERM
    newest = int(max(path.name for path in tmp_path.glob("step-*")).split("-")[1].split(".")[0])
    done = run(*options, "--steps", newest + 450)
    assert done.returncode == 0, done
    assert (found := re.search(r"continuing from step (\d+)", done.stdout))
    assert 50 <= int(found[1]) == newest
    assert (found := re.search(r"accuracy on 450 held-out images: (\d\.\d+), with the weights of step (\d+)", done.stdout))
    assert float(found[1]) >= 0.95


@pytest.mark.slow
def test_training_stops_when_it_gets_no_better() -> None:
    """The best weights are those of an evaluation before the last ones."""
    done = run("--steps", 900, "--every", 10, "--patience", 3)
    assert done.returncode == 0, done
    assert "accuracy" in done.stdout.splitlines()[0]  # the reason of the stop
    assert "with the weights of step" in done.stdout
