"""A cluster of NATS servers that loses its leader."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aiohooks.stores.nats import NatsStepStore
from tests.support.nats_cluster import running_cluster


@pytest.mark.slow
def test_the_leader_of_three_servers_is_killed(tmp_path: Path) -> None:
    """No acknowledged step is lost, each counts once, waiters are woken; the dead server comes back."""

    async def on_three_servers() -> None:
        with running_cluster(tmp_path) as cluster:
            options: dict[str, Any] = {"replicas": 3, "lease_secs": 30.0, "connect_timeout": 40.0}
            async with NatsStepStore(cluster.url, **options) as a, NatsStepStore(cluster.url, **options) as b:
                for round_ in range(2):
                    wait = asyncio.ensure_future(b.wait_for(30 * round_ + 30))
                    assert await a.advance(10) == 30 * round_ + 10
                    leader = cluster.servers[await cluster.leader("AIOHOOKS")]
                    leader.kill()
                    steps = [await a.advance() for _ in range(20)]
                    assert steps == list(range(30 * round_ + 11, 30 * round_ + 31))
                    assert await wait == 30 * round_ + 30
                    await asyncio.to_thread(leader.start)
                assert (await b.value()).step == 60

    asyncio.run(on_three_servers())
