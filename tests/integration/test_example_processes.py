"""examples/train_digits.py in several processes: on this machine, with a given store, on Ray."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.needs import need
from tests.support.ray_cluster import environment
from tests.support.source import ROOT

pytestmark = pytest.mark.slow


def train(*options: object) -> str:
    """Run the example and return its output."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "train_digits.py"), *map(str, options)]
    need("scikit-learn", *(["ray"] if "ray" in options else []))
    env = {**os.environ, **environment(), "PYTHONPATH": str(ROOT), "RAY_LOG_TO_DRIVER": "1", "RAY_DEDUP_LOGS": "0"}
    ended = processes.run(command, env=env)
    assert ended.returncode == 0, ended
    return ended.stdout + ended.stderr


def starts(output: str) -> dict[str, tuple[int, int]]:
    """Return, for each task, the step at which it was to start, and the one at which it did."""
    found = re.findall(r"(chief|worker \d+): asked to start at step (\d+), started at step (\d+)", output)
    return {name: (int(wanted), int(started)) for name, wanted, started in found}


def check(output: str, steps: int, workers: int) -> None:
    """Check that all tasks made steps, none too early, and that the model is good."""
    seen = starts(output)
    wanted_starts = {"chief": 0, "worker 1": 13, "worker 2": 21, "worker 3": 27}
    assert {name: wanted for name, (wanted, _) in seen.items()} == dict(itertools.islice(wanted_starts.items(), workers))
    assert all(started >= wanted for wanted, started in seen.values())
    made = re.search(r"(\d+) steps in", output)
    assert made
    assert steps <= int(made[1]) < steps + workers
    accuracy = re.search(r"held-out images: ([\d.]+)", output)
    assert accuracy
    assert float(accuracy[1]) > 0.85


def test_processes_of_this_machine() -> None:
    """Each process trains its own copy of the model; the chief's is the mean."""
    check(train("--processes", "--workers", 3, "--steps", 600, "--k", 20), 600, workers=3)


def test_a_given_store(tmp_path: Path) -> None:
    """--store implies processes; with --checkpoint-dir a second run continues where the first one ended."""
    options = ("--store", f"local://{tmp_path}/steps", "--checkpoint-dir", tmp_path / "model", "--k", 20)
    check(train(*options, "--workers", 2, "--steps", 600), 600, workers=2)
    output = train(*options, "--workers", 1, "--steps", 900)
    assert re.search(r"continuing from step 60\d, the newest checkpoint", output)
    assert "chief: asked to start at step 0, started at step 60" in output


def test_on_ray() -> None:
    """The same on a Ray cluster that the example starts."""
    check(train("--engine", "ray", "--steps", 600, "--k", 20), 600, workers=4)


def test_options_that_exclude_each_other() -> None:
    """With Ray the cluster keeps the step, so a store is refused."""
    command = [sys.executable, str(ROOT / "examples" / "train_digits.py"), "--engine", "ray", "--store", "local:///x"]
    ended = processes.run(command)
    assert ended.returncode == 2
    assert "--engine ray keeps the global step in the cluster: leave out --store" in ended.stderr
