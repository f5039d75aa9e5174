"""Training that is killed ends as if it had not been killed: a few kills.

There are more of them in the command: `python -m tests.fuzz.kill_training --kills 30`.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiohooks.checkpoint import Saver
from tests.fuzz.kill_training import (
    KillPoint,
    ProcessRun,
    Tally,
    differences,
    kill_training,
    violations,
)
from tests.support.needs import need

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the points inside a save are found by inotify"
)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kills"), [("waiting", 5), ("torch", 3)])
def test_a_killed_run_ends_with_the_same_bits(mode: str, kills: int, tmp_path: Path) -> None:
    """Killed with SIGKILL, also inside a save, and started again: nothing differs, and no more
    steps are lost than promised.
    """
    if mode == "torch":
        need("torch")
    tally = kill_training(tmp_path, kills=kills, seed=1, mode=mode)
    assert not tally.violations, tally.report()
    assert tally.kills == kills
    assert tally.restarts > 0


@pytest.mark.parametrize(
    ("run", "finding"),
    [
        (ProcessRun(-9, "", 50, 70, True), None),
        (ProcessRun(-9, "", 49, 70, True), "had reached step 100, continued from 49"),
        (ProcessRun(-9, "", 101, 120, True), "had reached step 100, continued from 101"),
        (ProcessRun(1, "Traceback", 100, 120, False), "ended with 1: Traceback"),
        (
            ProcessRun(-9, "checkpoint x is damaged", 100, 120, True),
            "a checkpoint was found damaged",
        ),
    ],
)
def test_a_run_that_breaks_a_promise_is_found(run: ProcessRun, finding: str | None) -> None:
    """It lost more than an interval, began at a step never reached, was not killed, or found a
    damaged checkpoint.
    """
    found = list(violations(run, KillPoint("step", 20), 100, Tally("waiting", 1000)))
    assert len(found) == (finding is not None)
    assert finding is None or finding in found[0]


@pytest.mark.parametrize(
    ("mode", "weight", "step", "losses", "finding"),
    [
        (
            "waiting",
            math.nextafter(1.0, 2.0),
            2,
            "ab",
            "the weights are not the same to the last bit",
        ),
        ("waiting", 1.0, 1, "ab", "killed: the last checkpoint is of step 1, not of 2"),
        ("torch", 1.0, 2, "ab", None),
        (
            "torch",
            math.nextafter(1.0, 2.0),
            2,
            "ab",
            "the state of 'model' is not the same to the last bit",
        ),
        ("torch", 1.0, 2, "ac", "the records are not the same"),
    ],
)
def test_a_difference_at_the_end_is_found(
    mode: str, weight: float, step: int, losses: str, finding: str | None, tmp_path: Path
) -> None:
    """One bit of one weight, or another step; with torch also one loss, and a step that was
    recorded twice.
    """

    async def save(name: str, value: float, at: int, recorded: str) -> None:
        weights: Any = np.full((65, 10), value)
        if mode == "torch":
            import torch

            weights = torch.tensor([value], dtype=torch.float64)
        best = {"best": 0.99, "best_step": 1, "best_states": {}}
        async with Saver(tmp_path / name) as saver:
            state = {"variables": {"weights": weights}, "tracked": {"model": {"weight": weights}}}
            await saver.save({**state, "hooks": {"EarlyStoppingHook": best}}, at)
        lines = [
            {"step": min(number, 2), "time": 0, "loss": loss}
            for number, loss in enumerate(recorded, 1)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    asyncio.run(save("alone", 1.0, 2, "ab"))
    asyncio.run(save("killed", weight, step, losses))
    found = list(differences(tmp_path / "alone", tmp_path / "killed", 2, mode))
    assert found == ([] if finding is None else [finding])
