"""The commands of `python -m aiohooks`, as a user runs them: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import processes
from tests.support.source import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
Completed = subprocess.CompletedProcess[str]


def command(*arguments: str | Path, cwd: Path = ROOT) -> Completed:
    """Run a command; standard output and error are kept apart."""
    line = [sys.executable, "-m", "aiohooks", *map(str, arguments)]
    return processes.run(line, cwd=cwd, env=ENVIRONMENT)


def start_command(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """Start a command whose output is read from pipes."""
    return processes.start(
        [sys.executable, "-m", "aiohooks", *map(str, arguments)], cwd=cwd, env=ENVIRONMENT
    )
