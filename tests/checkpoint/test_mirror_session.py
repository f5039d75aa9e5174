"""A session whose checkpoints are mirrored: it never waits for the mirror, except at its end and
for a limited time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import aiohooks as ah
from aiohooks.checkpoint import MirrorStatus
from tests.support.faulty_files import Disk


def graph() -> ah.Graph:
    graph = ah.Graph()
    graph.variable("weights", np.zeros(3))

    @graph.train_op(adds_to="weights")
    async def train() -> object:
        return np.ones(3)

    return graph


async def train(
    saver: ah.checkpoint.Saver, last_step: int, grace_secs: float = 10
) -> MirrorStatus | None:
    """Train to a step with a save after each; return the status of the mirror before the end."""
    creator = ah.ChiefSessionCreator(graph(), checkpoint_dir=saver)
    hooks = [ah.CheckpointSaverHook(every=ah.Every(steps=1), save_on_begin=False)]
    async with ah.AsyncMonitoredSession(
        creator, hooks, stop_grace_period_secs=grace_secs
    ) as session:
        while session.global_step.latest.step < last_step:
            await session.run("train")
        status = saver.mirror_status
    return status


async def test_a_run_continues_on_another_machine(tmp_path: Path) -> None:
    """The end of a session waits until its newest checkpoint is there, also for a Saver that it
    does not close.

    Without a mirror there is no status, and nothing to wait for.
    """
    disk = Disk()
    async with ah.checkpoint.Saver(tmp_path / "none") as saver:
        assert await train(saver, 1) is None
        assert await saver.flush_mirror()
    async with ah.checkpoint.Saver(tmp_path / "a", mirror=disk.mirror()) as saver:
        await train(saver, 3)
        assert disk.steps()[-1] == 3
    async with ah.checkpoint.Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        await train(saver, 5)
        restored = await saver.restore()
        assert restored is not None
        assert restored.state["variables"]["weights"].tolist() == [5, 5, 5]
    assert disk.steps()[-1] == 5
