"""The Ray store and launcher in separate processes, because the tests' own process is a member of
the tests' cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support import processes
from tests.support.ray_cluster import environment, session_cluster

pytestmark = pytest.mark.slow


def run_script(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new process."""
    return processes.run(
        [sys.executable, "-c", code, *args], env={**os.environ, **environment(), **env}
    )


SIGTERM = """
import asyncio, os, signal, sys
import ray
from aiohooks.distributed.ray import run
from tests.support.tasks import signals_the_launcher

async def main():
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    try:
        await run(signals_the_launcher, num_workers=0, args=(os.getpid(),))
    except SystemExit as request:
        print("exit code", request.code)
    print("secs until it is aborted:", signal.getitimer(signal.ITIMER_REAL)[0])

asyncio.run(main())
"""


def test_sigterm_ends_the_tasks_of_a_launcher(request: pytest.FixtureRequest) -> None:
    """A launcher has all the time that its tasks need. Ray's own handler, which comes before
    Python's, would abort it three seconds later.
    """
    done = run_script(SIGTERM, session_cluster(request))
    assert done.stdout.splitlines() == ["exit code 143", "secs until it is aborted: 0.0"], (
        done.stderr
    )
    assert "SIGTERM" not in done.stderr


NO_MEMBER = """
import asyncio, sys, time
import ray
from aiohooks import open_step_store
from aiohooks.distributed.ray import run
from aiohooks.errors import StoreRefusedError
from tests.support.tasks import about

async def main():
    began = time.monotonic()
    store = open_step_store("ray://aiohooks", run="outside", connect_timeout=3600)
    for call in (store.value, store.forget, lambda: run(about)):
        try:
            await call()
        except StoreRefusedError as error:
            print(error)
    await store.aclose()
    print(ray.is_initialized(), file=sys.stderr)

asyncio.run(main())
"""


def test_a_process_that_is_no_member_of_a_cluster(request: pytest.FixtureRequest) -> None:
    """Each call raises an error that says what to do, and is not tried again. The process neither
    joins the cluster at RAY_ADDRESS nor starts one.
    """
    ended = run_script(NO_MEMBER, RAY_ADDRESS=session_cluster(request))
    error = (
        "this process is not part of a Ray cluster: call ray.init(address=...) before the store is"
        " used"
    )
    assert ended.stdout.splitlines() == [error] * 3, ended.stderr
    assert ended.stderr == "False\n"


MEMBER = """
import asyncio, sys
import ray
from aiohooks import open_step_store
from aiohooks.distributed.ray import run
from tests.support.tasks import about

async def main():
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
    async with open_step_store("ray://aiohooks", run="member") as store:
        await store.advance(7)
    async with open_step_store("ray://aiohooks", run="member") as store:
        waiting = asyncio.ensure_future(store.wait_for(9))
        await asyncio.sleep(0.1)
        print((await store.value()).step, ray.is_initialized())
        await store.forget()
        await asyncio.wait([waiting])
    print([result["step"] for result in await run(about, num_workers=0)])
    print(ray.is_initialized())
    ray.shutdown()

asyncio.run(main())
"""


def test_a_member_of_a_cluster_stays_a_member(request: pytest.FixtureRequest) -> None:
    """Neither a store nor a launcher ends the membership of a process that has called `ray.init`.
    The process may leave the cluster as soon as it has closed its stores.
    """
    ended = run_script(MEMBER, session_cluster(request))
    assert ended.stdout.splitlines() == ["7 True", "[1]", "True"], ended.stderr
    assert ended.returncode == 0, ended.stderr


def test_the_node_of_the_step_actor_is_killed() -> None:
    """On a cluster of two nodes: the actor comes back on the other one, and each worker starts
    where it should.
    """
    env = {**os.environ, **environment()}
    for _ in range(3):
        ended = processes.run([sys.executable, "-m", "tests.fuzz.ray_node"], env=env)
        if ended.returncode != os.EX_TEMPFAIL:  # otherwise the machine was too busy for Ray
            break
    assert ended.returncode == 0, ended.stderr
    printed: dict[str, Any] = json.loads(
        [line for line in ended.stdout.splitlines() if line.startswith("{")][-1]
    )
    assert printed["started"] == [[0, 0], [13, 13], [21, 21], [27, 27]]
