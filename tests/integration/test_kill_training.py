"""Training that is killed ends as if it had not been: a few kills.

There are more of them in the command: `python -m tests.fuzz.kill_training --kills 30`.
"""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from aiohooks.checkpoint import Saver
from tests.fuzz.kill_training import INTERVAL, Life, Moment, Tally, differences, kill_training, main, moments, wrong

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify, which finds the moments inside a save, is Linux's")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kills"), [("waiting", 5), ("background", 3)])
def test_a_killed_run_ends_with_the_same_weights(mode: str, kills: int, tmp_path: Path) -> None:
    """Killed with SIGKILL, also inside a save, and started again: the same weights, and no more steps lost than promised."""
    tally = kill_training(tmp_path, kills=kills, seed=1, mode=mode)
    assert not tally.violations, tally.report()
    assert tally.kills == kills
    assert tally.restarts > 0


def test_half_of_the_moments_lie_in_the_directory() -> None:
    """A seed decides the moments; every second one is found by what is done in the directory, the others by steps and output."""
    some = moments(30, seed=0)
    assert some == moments(30, seed=0) != moments(30, seed=1)
    assert [one.kind for one in some].count("file") == 15
    assert {one.kind for one in some} == {"step", "line", "file"}


@pytest.mark.parametrize(
    ("life", "finding"),
    [
        (Life(-9, "", 50, 70, True), None),
        (Life(-9, "", None, None, False), None),
        (Life(-9, "", 49, 70, True), "had reached step 100, went on from 49"),
        (Life(-9, "", 101, 120, True), "had reached step 100, went on from 101"),
        (Life(1, "Traceback", 100, 120, False), "ended with 1: Traceback"),
        (Life(0, "", 100, 1000, False), "ended with 0"),
        (Life(-9, "checkpoint x is damaged", 100, 120, True), "a checkpoint was found damaged"),
    ],
)
def test_a_life_that_breaks_a_promise_is_found(life: Life, finding: str | None) -> None:
    """More than an interval lost, a step that was never reached, an end that was not the kill, a damaged checkpoint."""
    found = list(wrong(life, Moment("step", 20), 100, Tally("waiting", 1000)))
    assert len(found) == (finding is not None)
    assert finding is None or finding in found[0]


def test_without_waiting_two_intervals_may_be_lost() -> None:
    """The one whose checkpoint is being written, and the one that is trained meanwhile."""
    assert Tally("waiting", 1000).promised == INTERVAL
    assert Tally("background", 1000).promised == 2 * INTERVAL


@pytest.mark.parametrize(
    ("weight", "step", "finding"),
    [
        (1.0, 100, None),
        (math.nextafter(1.0, 2.0), 100, "the weights are not the same to the last bit"),
        (1.0, 99, "the last checkpoints are of the steps [100, 99], not of 100"),
    ],
)
def test_a_difference_at_the_end_is_found(weight: float, step: int, finding: str | None, tmp_path: Path) -> None:
    """One bit of one weight, or another step, is a difference."""

    async def save(name: str, value: float, at: int) -> None:
        async with Saver(tmp_path / name) as saver:
            await saver.save({"variables": {"weights": np.full((65, 10), value)}}, at)

    asyncio.run(save("alone", 1.0, 100))
    asyncio.run(save("killed", weight, step))
    assert list(differences(tmp_path / "alone", tmp_path / "killed", 100)) == ([] if finding is None else [finding])


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """A number of kills that cannot be meant is refused in one sentence."""
    with pytest.raises(SystemExit, match="2"):
        main(["--kills", "0"])
    assert "--kills is at least 1" in capsys.readouterr().err
