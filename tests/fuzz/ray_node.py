"""Kill the node of the step actor, in a Ray cluster of two nodes.

    python -m tests.fuzz.ray_node

A chief and three workers run on the other node, and start one after the other (see
`distributed_tasks.staggered`). The node is killed when the chief is at step 15. Prints for each at
which step it was to start, and where it did; and to standard error each phase, so that a hang shows
where it was. Exits with EX_TEMPFAIL if the nodes have not started in time.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from typing import Any

from tests.support import tasks as distributed_tasks
from tests.support.ray_cluster import environment as environment  # before Ray is imported
from tests.support.waiting import HANG_SECS

# Only this process uses the loopback interface by a constant: see `main`.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"


RUN = "node"
LAST = 200


def enter(phase: str) -> None:
    """Print the phase that begins."""
    print(f"{time.monotonic():.1f} {phase}", file=sys.stderr, flush=True)


def open_there(run: str) -> str:
    """Open the run in a task, so that its actor is created on the task's node; return the id of the
    node.
    """
    import ray

    from aiohooks.stores import open_step_store

    async def opened() -> str:
        async with open_step_store("ray://", run=run):
            node: str = ray.get_runtime_context().get_node_id()
            return node

    return asyncio.run(opened())


async def main() -> int:
    """Run the scenario; return the exit code."""
    import ray
    from ray._private import ray_constants
    from ray.cluster_utils import Cluster

    from aiohooks.distributed.ray import run
    from aiohooks.stores import open_step_store

    ray_constants.ENABLE_RAY_CLUSTER = False  # loopback; Cluster() itself takes no address
    head_args = {
        "num_cpus": 8,
        "resources": {"head": 100},
        "include_dashboard": False,
        "object_store_memory": 80_000_000,
    }
    enter("start two nodes")
    try:
        cluster = Cluster(initialize_head=True, head_node_args=head_args)
        second = cluster.add_node(
            num_cpus=2,
            resources={"second": 1},
            object_store_memory=80_000_000,
        )
    except Exception:
        # On a busy machine: Ray gives a node 30 seconds, and then needs minutes to end.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(os.EX_TEMPFAIL)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        enter("open the run on the second node")
        there: Any = ray.remote(resources={"second": 1})(open_there)
        node = await there.remote(RUN)
        assert node == second.node_id
        assert node != ray.get_runtime_context().get_node_id()
        options = {"num_cpus": 1, "resources": {"head": 1}}
        launched = asyncio.ensure_future(
            run(distributed_tasks.staggered, args=(LAST,), run=RUN, task_options=options)
        )
        async with open_step_store("ray://", run=RUN) as store:
            enter("wait for step 15")
            await store.wait_for(15)
            enter("kill the second node")
            began = time.monotonic()
            await asyncio.to_thread(cluster.remove_node, second, allow_graceful=False)
            enter("wait for step 27")
            await store.wait_for(27)
            secs = time.monotonic() - began
            enter("wait for the last step")
            await store.wait_for(LAST)
        enter("wait for the launcher")
        started = await launched
        print(json.dumps({"started": started, "secs": round(secs, 1)}), flush=True)
    finally:
        enter("leave the cluster")
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(0.8 * HANG_SECS)
    logging.basicConfig(level=logging.WARNING)
    sys.exit(asyncio.run(main()))
