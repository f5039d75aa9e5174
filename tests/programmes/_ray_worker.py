"""A process of the fault programme of the Ray store: `tests.store_worker` as a part of the cluster.

    python -m tests.programmes._ray_worker asyncio|uvloop ADDRESS

The cluster's token is in the environment.
"""

from __future__ import annotations

import asyncio
import sys

from aiohooks.stores import _ray_cluster
from tests.conformance.report import loop_factory
from tests.store_worker import Worker


async def main(address: str) -> None:
    """Joins, obeys until the input ends, and leaves."""
    await asyncio.to_thread(_ray_cluster.join, address, timeout=30, log_to_driver=False)
    await Worker().serve()
    await asyncio.to_thread(_ray_cluster.leave)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory(sys.argv[1])) as runner:
        runner.run(main(sys.argv[2]))
