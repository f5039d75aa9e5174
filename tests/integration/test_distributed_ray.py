"""The launcher on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiohooks.errors import TaskDiedError
from tests.support import tasks as distributed_tasks
from tests.support.ray_cluster import actor_of, nothing_left
from tests.support.ray_cluster import cluster as cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.may_leak,  # checked by `nothing_left`
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]


async def launch(main: Any, **options: Any) -> list[Any]:
    from aiohooks.distributed.ray import run

    async with nothing_left():
        return await run(main, **options)


async def test_tasks(cluster: str, tmp_path: Path) -> None:
    """The function of the local launchers runs on Ray; a run without a name is forgotten
    afterwards.
    """
    found = await launch(distributed_tasks.about, num_workers=2, checkpoint_dir=tmp_path)
    assert [result["task_id"] for result in found] == [0, 1, 2]
    assert {result["step"] for result in found} == {1, 2, 3}
    assert all(result["checkpoint_dir"] == tmp_path and result["attempt"] == 1 for result in found)
    assert actor_of(found[0]["run"]) is None


async def test_a_task_that_dies(cluster: str) -> None:
    """It is restarted with the next attempt, up to `max_restarts` times."""
    assert await launch(distributed_tasks.dies, num_workers=1, args=("kill", 1)) == [1, 2]
    with pytest.raises(ExceptionGroup, match="1 of 2 tasks failed") as caught:
        await launch(distributed_tasks.dies, num_workers=1, args=("kill", 9), max_restarts=0)
    (error,) = caught.value.exceptions
    assert isinstance(error, TaskDiedError)
    assert error.task_id == 1


async def test_bad_options(cluster: str) -> None:
    """Options that the launcher sets are refused before a task is started."""
    with pytest.raises(TypeError, match="multiple values for keyword argument 'max_retries'"):
        await launch(distributed_tasks.about, task_options={"max_retries": 3})


@pytest.mark.parametrize("kills", [(), (2, 0)], ids=["no death", "a worker and the chief die"])
async def test_staggered_start(cluster: str, kills: tuple[int, ...]) -> None:
    """A chief and three workers each start exactly at their step, also if some are killed."""
    run = f"staggered {len(kills)}"
    distributed_tasks.check_staggered(
        await launch(distributed_tasks.staggered, args=(200, kills), run=run), kills
    )
