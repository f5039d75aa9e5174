"""Training that is killed ends as if it had not been killed: a few kills.

There are more of them in the command: `python -m tests.fuzz.kill_training --count 30`.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from aiohooks.checkpoint import Saver
from tests.fuzz.kill_training import (
    KillPoint,
    ProcessRun,
    differences,
    kill_training,
    violations,
)
from tests.support.needs import need


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Killed with SIGKILL, also inside a save, and started again: nothing differs, and no more
    steps are lost than promised.
    """
    need("torch")
    need("scikit-learn")
    tally = kill_training(tmp_path, kills=3, seed=1)
    assert not tally.violations, tally.report()
    assert tally.kills == 3
    assert tally.lost


@pytest.mark.parametrize(
    ("run", "finding"),
    [
        (ProcessRun(-9, "", 50, 170), ""),
        (ProcessRun(-9, "", 49, 170), "had reached step 150, continued from 49"),
        (ProcessRun(-9, "", 151, 170), "had reached step 150, continued from 151"),
        (ProcessRun(1, "Traceback", 150, 170), "ended with 1: Traceback"),
        (ProcessRun(-9, "checkpoint x is damaged", 150, 170), "a checkpoint was found damaged"),
    ],
)
def test_a_run_that_breaks_a_promise_is_found(run: ProcessRun, finding: str) -> None:
    """It lost more than two intervals, began at a step never reached, was not killed, or found a
    damaged checkpoint.
    """
    found = list(violations(run, KillPoint("step", 20), 150))
    assert len(found) == bool(finding)
    assert finding in "".join(found)


def test_a_difference_at_the_end_is_found(tmp_path: Path) -> None:
    """One bit of one weight, and a loss."""
    need("torch")
    import torch

    async def save(name: str, value: float, losses: str) -> None:
        model = {"weight": torch.tensor([value], dtype=torch.float64)}
        async with Saver(tmp_path / name) as saver:
            hooks = {"EarlyStoppingHook": {"best": 0.99}}
            await saver.save({"tracked": {"model": model}, "hooks": hooks}, 2)
        lines = [
            {"step": step, "time": 0, "loss": loss}
            for step, loss in zip((1, 2), losses, strict=True)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    for name, value, losses in (
        ("alone", 1.0, "ab"),
        ("same", 1.0, "ab"),
        ("other", math.nextafter(1.0, 2.0), "ac"),
    ):
        asyncio.run(save(name, value, losses))
    assert list(differences(tmp_path / "alone", tmp_path / "same", 2)) == []
    assert list(differences(tmp_path / "alone", tmp_path / "other", 2)) == [
        "the state of 'model' is not the same to the last bit",
        "the records are not the same",
    ]
