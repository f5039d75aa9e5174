"""The example runs as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS


def test_the_example_recovers_and_ends() -> None:
    """It recovers once, from the checkpoint of step 100, and ends at its last step with the slope
    of the line.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/tensorflow_hooks.py"]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line != "alive"]
    assert lines == [
        "session at step 0",
        "session at step 100",
        "StopAtStepHook has requested it; recoveries: 1; slope: 3.00",
    ]
