"""A process of the programs with faults: `tests.support.store_worker` as a member of the cluster.

    python -m tests.support.ray_worker asyncio|uvloop ADDRESS

The cluster's token is in the environment.
"""

from __future__ import annotations

import asyncio
import sys

from aiohooks.stores.ray import _cluster
from tests.conformance.report import loop_factory
from tests.support.store_worker import Worker
from tests.support.waiting import HANG_SECS


async def main(address: str) -> None:
    """Join the cluster, execute orders until the input ends, and leave."""
    await asyncio.to_thread(_cluster.join, address, timeout=HANG_SECS, log_to_driver=False)
    await Worker().serve()
    await asyncio.to_thread(_cluster.leave)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory(sys.argv[1])) as runner:
        runner.run(main(sys.argv[2]))
