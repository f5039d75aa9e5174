"""`python -m aiohooks run --engine ray`, on a real cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aiohooks.distributed.ray import cluster_membership
from aiohooks.stores import open_step_store
from tests.support.commands import ENVIRONMENT, command
from tests.support.ray_cluster import cluster as cluster
from tests.support.ray_cluster import environment

pytestmark = [pytest.mark.slow, pytest.mark.may_leak]

JOBS = """
import asyncio, os, sys
import training  # beside this file, and not the module of the library with that name
import aiohooks as ah

async def main(task):
    with task.store.publisher(task.name):
        await task.store.advance()
        await task.store.wait_for(task.num_workers + 1)
    return training.WORD, task.checkpoint_dir

async def trains(task):
    async def step():
        await task.store.advance()

    async with ah.AsyncMonitoredSession(step, handle_signals=True) as session:
        with open(f"started-{task.task_id}", "w") as file:
            pass
        while not session.should_stop():
            await session.run(())
    os.rename(f"started-{task.task_id}", f"stopped-{task.task_id}")
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the module `jobs`."""
    for name, value in environment().items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    (tmp_path / "jobs.py").write_text(JOBS.replace('f"st', f'f"{tmp_path}/st'))
    (tmp_path / "training.py").write_text("WORD = 'mine'\n")
    return tmp_path


def test_a_function_of_the_current_directory(jobs: Path, cluster: str) -> None:
    """It and the modules beside it are imported on the cluster; what the tasks return is
    printed.
    """
    arguments = (
        "--engine",
        "ray",
        "--address",
        cluster,
        "--workers",
        "1",
        "--checkpoint-dir",
        "model",
        "--run",
        "by command",
    )
    done = command("run", "jobs:main", *arguments, cwd=jobs)
    assert done.returncode == 0, done.stderr
    returned = ("mine", jobs / "model")
    assert done.stdout.splitlines() == [f"chief: {returned}", f"worker 1: {returned}"]

    async def step_of_run() -> int:
        async with (
            cluster_membership(cluster, log_to_driver=False),
            open_step_store("ray://aiohooks", run="by command") as store,
        ):
            return store.latest.step

    assert asyncio.run(step_of_run()) == 2
