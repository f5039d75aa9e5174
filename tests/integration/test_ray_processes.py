"""The Ray store and launcher in separate processes, because the tests' own process is a member of
the tests' cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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
import asyncio, os, signal
from aiohooks.distributed.ray import cluster_membership

async def main():
    received = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, received.set)
    options = {"include_dashboard": False, "object_store_memory": 80_000_000}
    async with cluster_membership("local", **options):
        os.kill(os.getpid(), signal.SIGTERM)
        await received.wait()
        print("secs until it is aborted:", signal.getitimer(signal.ITIMER_REAL)[0])

asyncio.run(main())
"""


def test_a_launcher_has_all_the_time_it_needs_after_sigterm() -> None:
    """Ray's own handler, which comes before Python's, would abort it three seconds later, in the
    middle of its last save.
    """
    done = run_script(SIGTERM)
    assert (done.returncode, done.stdout) == (0, "secs until it is aborted: 0.0\n"), done.stderr
    assert "SIGTERM" not in done.stderr


LAUNCH = """
import asyncio, sys
from aiohooks.distributed.ray import run
from aiohooks.errors import StoreUnavailableError
from tests.support.tasks import about

try:
    asyncio.run(run(about, address=sys.argv[1]))
except StoreUnavailableError as error:
    print(type(error).__name__, error)
"""


def test_no_cluster_answers() -> None:
    """The error comes immediately, and says what to do; Ray itself would try for minutes."""
    ended = run_script(LAUNCH, "127.0.0.1:1")
    assert "StoreUnavailableError no Ray cluster answers at 127.0.0.1:1" in ended.stdout, (
        ended.stderr
    )
    assert "ray start --head" in ended.stdout


def test_a_wrong_token_is_refused(request: pytest.FixtureRequest) -> None:
    """The cluster refuses the process, and the error says what to set."""
    ended = run_script(LAUNCH, session_cluster(request), RAY_AUTH_TOKEN="f" * 32)
    assert ended.stdout.startswith("StoreUnavailableError cannot join"), ended.stderr
    assert "Something answers there; if the cluster requires a token" in ended.stdout


NO_MEMBER = """
import asyncio, sys, time
import ray
from aiohooks import open_step_store
from aiohooks.errors import StoreRefusedError

async def main():
    began = time.monotonic()
    store = open_step_store("ray://aiohooks", run="outside", connect_timeout=3600)
    for call in (store.value, store.forget):
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
    assert ended.stdout.splitlines() == [error] * 2, ended.stderr
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


OWN_CLUSTER = """
import asyncio, os, sys
from aiohooks.distributed.ray import run
from tests.support.tasks import about
from tests.integration.test_ray_processes import listening

async def main():
    async def look():  # repeatedly: the kernel does not announce a new listener
        while not listening():
            await asyncio.sleep(0.05)
        found = set()
        while not done:
            found |= listening()
            await asyncio.sleep(0.05)
        return found
    done = []
    looking = asyncio.ensure_future(look())
    print([result["step"] for result in await run(about, num_workers=1)])
    done.append(None)
    print("listening on", sorted(await looking))

asyncio.run(main())
"""


def listening() -> set[str]:
    """Return the addresses on which the processes started by this one listen."""
    inodes = {name.partition("[")[2][:-1] for pid in _family() for name in _sockets(pid)}
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def _family() -> Iterator[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(
                stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            )
    family = {os.getpid()}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    yield from family - {os.getpid()}


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if (name := os.readlink(fd)).startswith("socket:"):
                yield name


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks into /proc")
def test_a_cluster_of_its_own_listens_on_loopback_only() -> None:
    """The cluster that the launcher starts exists for the run only, and other machines cannot reach
    it.
    """
    # The variable that lets the clusters of the tests listen on loopback only is unset.
    ended = run_script(OWN_CLUSTER, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1")
    assert ended.returncode == 0, ended.stderr
    assert "[1, 2]" in ended.stdout or "[2, 1]" in ended.stdout
    found: set[str] = set(json.loads(ended.stdout.partition("listening on ")[2].replace("'", '"')))
    assert found
    assert found <= LOOPBACK


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


def test_a_missing_package() -> None:
    """The error says what to install."""
    ended = run_script(
        "import sys; sys.modules['ray'] = None; import aiohooks;"
        " aiohooks.open_step_store('ray://x', run='r')"
    )
    assert "pip install 'aiohooks[ray]'" in ended.stderr
