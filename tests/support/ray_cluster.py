"""A Ray cluster for tests, on the loopback interface: one process starts it, and ends it with the
tests.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aiohooks.testing.leaks import no_leaks
from tests.support.source import ROOT

TOKEN = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(16)
"""The cluster refuses processes without it."""


def environment() -> dict[str, str]:
    """Return the environment that processes need to use the cluster."""
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_LOG_TO_DRIVER": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    # By default Ray's workers get what other processes leave: on a busy machine next to nothing.
    own_share = {"RAY_worker_niceness": "0"}
    # With this variable Ray uses the loopback interface, also on Linux.
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return {**quiet, **own_share, **loopback, **token}


os.environ.update(environment())  # Ray reads these variables when it is imported


@contextlib.contextmanager
def ray_cluster() -> Iterator[str]:
    """Run a cluster for the block; yield its address."""
    command = [sys.executable, "-m", "tests.support.ray_cluster"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if line.startswith("address "):
                    yield line.split()[1]
                    break
            else:
                raise AssertionError("no Ray cluster came up")
        finally:
            server.stdin.close()
            server.stdout.read()


_cluster: list[str] = []


def session_cluster(request: pytest.FixtureRequest) -> str:
    """Return the address of the one cluster of this test session."""
    if (
        "AIOHOOKS_TEST_RAY" in os.environ
    ):  # a running one, with RAY_AUTH_TOKEN: quicker while writing tests
        return os.environ["AIOHOOKS_TEST_RAY"]
    if not _cluster:
        context = ray_cluster()
        _cluster.append(context.__enter__())

        def stop() -> None:
            context.__exit__(None, None, None)

        request.config.add_cleanup(stop)
    return _cluster[0]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the cluster, of which this process is a member during the module's tests."""
    address = session_cluster(request)
    with membership(address):
        yield address


@contextlib.contextmanager
def membership(address: str) -> Iterator[None]:
    """Make this process a member of a cluster for the block, as programs do.

    Ray's handler of SIGTERM is removed.
    """
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def actor_of(run: str, namespace: str = "aiohooks") -> Any:
    """Return the actor that keeps a run; None if there is none."""
    import ray

    try:
        return ray.get_actor(f"aiohooks step {run}", namespace=namespace)
    except ValueError:
        return None


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """`no_leaks` without the sockets that Ray opens and closes whenever it likes; for tests marked
    `may_leak`.
    """
    check = no_leaks()
    passed = False
    try:
        async with check:
            yield
            passed = True
    except AssertionError:
        if not passed or not all("open on socket:" in line for line in check.leaks):
            raise


def main() -> None:
    """Run the cluster until the standard input ends."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
    )
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
