"""A chief and three workers start one after the other, as processes of one machine, with each of
its stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from aiohooks.distributed.local import run_processes
from tests.support.store_servers import running
from tests.support.tasks import check_staggered, staggered

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["asyncio"])]


@pytest.fixture(autouse=True, scope="module")
def _tracker() -> None:
    # A process of Python's own that starts with the first child and stays as long as this process.
    resource_tracker.ensure_running()


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["local", "valkey"])
@pytest.mark.parametrize("kills", [(), (2, 0)], ids=["no death", "a worker and the chief die"])
async def test_staggered_start(kind: str, kills: Sequence[int], tmp_path: Path) -> None:
    """Each starts exactly at its step, also if tasks are killed."""
    options: dict[str, Any] = {
        "args": (40, kills),
        "run": "staggered",
    }
    if kind == "local":
        store = f"local://{tmp_path}"
        check_staggered(await run_processes(staggered, store=store, **options), kills)
        return
    with running(kind, tmp_path) as server:
        check_staggered(await run_processes(staggered, store=server.url, **options), kills)
