"""A chief and three workers start one after the other, as processes of one machine, with each of its stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from aiohooks import Backoff, open_step_store
from aiohooks.distributed.local import run_processes
from tests.support import tasks as distributed_tasks
from tests.support.store_servers import Server, first_stream, running
from tests.support.tasks import check_staggered, starts_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_factories=["asyncio"])]
SERVERS = ("valkey", "nats")
RUN, LAST = "staggered", 40


@pytest.fixture(autouse=True, scope="module")
def _tracker() -> None:
    # A process of Python's own that starts with the first child and stays as long as this process.
    resource_tracker.ensure_running()


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server | None]:
    if request.param == "local":
        yield None
        return
    with running(request.param, tmp_path) as server:
        yield server


async def staggered(server: Server | None, kills: Sequence[int] = (), faults: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the wanted and the actual first steps of the four."""
    main, args, no_pauses = distributed_tasks.staggered, (LAST, kills, faults), Backoff(initial_secs=0)
    url = None if server is None else server.url
    return await run_processes(main, args=args, store=url, run=RUN, backoff=no_pauses)


@pytest.mark.sample
@pytest.mark.parametrize("server", ["local", *SERVERS], indirect=True)
@pytest.mark.parametrize("kills", [(), (2, 0)], ids=["no death", "a worker and the chief die"])
async def test_staggered_start(server: Server | None, kills: Sequence[int]) -> None:
    """Each starts exactly at its step, also if tasks are killed."""
    check_staggered(await staggered(server, kills), kills)


@pytest.mark.parametrize("server", SERVERS, indirect=True)
async def test_staggered_start_while_the_server_is_killed(server: Server) -> None:
    """It restarts with its data, and later without, which the processes then restore: each task starts at its step."""
    await first_stream()
    launched = asyncio.ensure_future(staggered(server, faults=(10, 24)))
    async with open_step_store(server.url, run=RUN) as steps, open_step_store(server.url, run=starts_of(RUN)) as starts:
        for step, starts_before, data_lost in (10, 0, False), (24, 3, True):
            await steps.wait_for(step)
            await starts.wait_for(starts_before)
            await asyncio.to_thread(server.kill)
            if data_lost:
                server.lose_data()
            await asyncio.to_thread(server.start)
            await starts.advance()
        check_staggered(await launched)
    server.kill()
