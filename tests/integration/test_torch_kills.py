"""Training with torch that is killed ends as if it had not been killed: a few kills.

There are more of them in the command: `python -m tests.fuzz.torch_kills --count 30`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aiohooks.checkpoint import Saver
from tests.fuzz.torch_kills import differences, torch_kills


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Killed with SIGKILL, also inside a save, and started again: the same weights, optimizer and records."""
    tally = torch_kills(tmp_path, count=3, seed=1)
    assert not tally.violations, tally.report()
    assert tally.kills == 3
    assert tally.restarts > 0


@pytest.mark.parametrize(
    ("weight", "losses", "finding"),
    [
        (1.0, "ab", None),
        (math.nextafter(1.0, 2.0), "ab", "the state of 'model' is not the same to the last bit"),
        (1.0, "ac", "the records are not the same"),
        (1.0, "aab", "the records are not the same"),
    ],
)
def test_a_difference_at_the_end_is_found(weight: float, losses: Sequence[str], finding: str | None, tmp_path: Path) -> None:
    """One bit of one weight is a difference, and one loss, and a step that was recorded twice."""

    async def save(name: str, value: float, recorded: Sequence[str]) -> None:
        async with Saver(tmp_path / name) as saver:
            weights: dict[str, Any] = {"model": {"weight": torch.tensor([value], dtype=torch.float64)}}
            best = {"best": 0.99, "best_step": 1, "best_states": {}}
            await saver.save({"tracked": weights, "hooks": {"EarlyStoppingHook": best}}, 2)
        lines = [f"{min(number, 2)},0,{loss},1" for number, loss in enumerate(recorded, 1)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["step,time,loss,rate", *lines, ""]))

    asyncio.run(save("alone", 1.0, "ab"))
    asyncio.run(save("killed", weight, losses))
    assert list(differences(tmp_path / "alone", tmp_path / "killed", 2)) == ([] if finding is None else [finding])
