"""Saver.add_metrics: metrics of a checkpoint that come after it, here and in its mirror."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.checkpoint import KeepBest, Saver
from tests.support.checks import refused


@pytest.mark.parametrize("mirrored", [False, True])
async def test_later_metrics_are_those_of_the_checkpoint(tmp_path: Path, mirrored: bool) -> None:
    """They are added to the others, on the disk and in the mirror, and what is no longer the best is removed."""
    mirror = f"memory://{tmp_path.name}" if mirrored else None
    async with Saver(tmp_path / "here", keep=KeepBest(1, "score"), mirror=mirror) as saver:
        await saver.save({"weights": 1}, 1, metrics={"score": 3})
        await saver.save({"weights": 2}, 2, metrics={"loss": 5})
        assert await saver.flush_mirror()
        assert [one.step for one in await saver.checkpoints()] == [2, 1]
        found = await saver.add_metrics(2, {"score": 2})
        assert await saver.add_metrics(7, {"score": 2}) is None
        assert await saver.flush_mirror()
        assert [one.step for one in await saver.checkpoints()] == [2]
        assert await saver.verify() == [(found.path if found else None, None)]
    async with Saver(tmp_path / ("elsewhere" if mirrored else "here"), mirror=mirror) as saver:
        restored = await saver.restore()  # also compares what is here with the mirror
        assert await saver.flush_mirror()
        assert saver.mirror_status is None or saver.mirror_status.failures == 0
    assert restored is not None
    assert (restored.checkpoint.step, dict(restored.checkpoint.metrics)) == (2, {"loss": 5, "score": 2})
    assert restored.state == {"weights": 2}


async def test_what_cannot_be_added_is_refused(tmp_path: Path) -> None:
    """A reader adds nothing, and what is no number is refused; the checkpoint is unchanged."""
    async with Saver(tmp_path) as saver:
        await saver.save({}, 1)
        with refused(ah.errors.InvalidArgumentError, "metrics['score'] is 'x'"):
            await saver.add_metrics(1, {"score": "x"})  # type: ignore[dict-item]
        with refused(ah.errors.CheckpointError, "read_only=True"):
            await Saver(tmp_path, read_only=True).add_metrics(1, {"score": 1})
        assert [dict(one.metrics) for one in await saver.checkpoints()] == [{}]
