"""Errors of the Redis store where the server is unavailable or refuses, TLS and rights: what is
wrong, and what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiohooks.errors import StoreRefusedError, StoreUnavailableError
from aiohooks.stores import SharedStepStore
from aiohooks.testing import ManualClock
from aiohooks.testing.step_store import check_step_store, step_store_checks
from tests.support.needs import program
from tests.support.redis_servers import KINDS, execute
from tests.support.source import ROOT
from tests.support.store_servers import Server, free_port, running
from tests.support.stores import shared_store
from tests.support.waiting import until_true

pytestmark = pytest.mark.usefixtures("streams")

HOUR_SECS = 3600.0
IN_SCRIPT = "Error running script (call to f_0123): @user_script:88: @user_script: 88:"
"""How Redis 6.2 begins the text of an error that a command of a script has met."""
PAGE = (ROOT / "docs" / "guides" / "engines.md").read_text(encoding="utf-8")
USERS = re.search(r"^user default off\nuser aiohooks .*\n", PAGE, flags=re.MULTILINE)


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path, keeps=False) as started:
        yield started


@contextlib.asynccontextmanager
async def answering(answer: str) -> AsyncIterator[str]:
    """Run a server that gives this answer to every command; yield its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(f"{answer}\r\n".encode() * len(re.findall(rb"\*\d+\r\n", data)))
                await writer.drain()
        writer.close()
        done.append(asyncio.ensure_future(writer.wait_closed()))

    done: list[asyncio.Future[None]] = []
    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await listener.wait_closed()
        await asyncio.gather(*done, return_exceptions=True)


async def refused(store: SharedStepStore, *, later: ManualClock | None = None) -> str:
    """Return the message of the error of opening the store, which comes long before the time for
    connecting is up.

    A temporary one, of a store of the clock `later`, comes when that time is up.
    """
    store._engine.attach(dataclasses.replace(store._engine.link, connect_timeout=HOUR_SECS))
    opening = asyncio.ensure_future(store.__aenter__())
    if later is not None:
        await until_true(
            lambda: later.pending or opening.done()
        )  # the pause after the first attempt
        later.advance(HOUR_SECS)
    with pytest.raises(StoreUnavailableError) as raised:
        await opening
    await store.aclose()
    assert isinstance(raised.value, StoreRefusedError) is (later is None)
    return str(raised.value)


@pytest.mark.parametrize(
    ("answer", "permanently", "said"),
    [
        ("-DENIED Redis is running in protected mode because ...", True, "protected mode"),
        ("-ERR unknown command `EVALSHA`, with args beginning with: ", True, "Redis 6.2 or later"),
        ("-NOAUTH Authentication required.", True, "user and password in the URL"),
        ("-NOPERM this user has no permissions to run the 'evalsha' command", True, "ACL SETUSER"),
        ("+what?", True, "is that a Redis server"),
        ("-MOVED 1234 10.0.0.7:6379", True, "give its address"),
        ("-LOADING Redis is loading the dataset in memory", False, "loading the dataset"),
        (
            "-MISCONF Redis is configured to save RDB snapshots, but ...",
            False,
            "MISCONF",
        ),
        (
            f"-ERR {IN_SCRIPT} -READONLY You can't write against a read only replica. ",
            False,
            "read only replica",
        ),
        ("-ERR max number of clients reached", False, "max number of clients"),
        (
            "-BUSY Redis is busy running a script. You can only call SCRIPT KILL",
            False,
            "busy running a script",
        ),
        ("HTTP/1.1 400 Bad Request", False, "redis at"),
    ],
)
async def test_a_refusal(answer: str, permanently: bool, said: str, clock: ManualClock) -> None:
    """A permanent one is raised immediately, a temporary one is tried again until
    `connect_timeout`; each says what to do.
    """
    async with answering(answer) as url:
        assert said in await refused(shared_store(url), later=None if permanently else clock)


@pytest.mark.parametrize(
    ("answer_timeout", "connect_timeout"), [(0.1, HOUR_SECS), (HOUR_SECS, 0.1)]
)
async def test_a_server_that_accepts_and_never_answers(
    server: Server, answer_timeout: float, connect_timeout: float, clock: ManualClock
) -> None:
    """It counts as unavailable after `answer_timeout`, or `connect_timeout` if that is shorter."""
    store = shared_store(server.url, answer_timeout=answer_timeout, connect_timeout=connect_timeout)
    server.pause()
    opening = asyncio.ensure_future(store.__aenter__())
    await until_true(lambda: clock.pending)
    clock.advance(HOUR_SECS)
    with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.1 s"):
        await opening
    server.resume()
    await store.aclose()


async def test_a_server_of_another_kind(server: Server, clock: ManualClock) -> None:
    """Without TLS, with too few databases, a replica: found while connecting, not at the first
    advance, with what to give.
    """
    tls = shared_store(
        server.url.replace("redis://", "rediss://"), answer_timeout=0.1
    )  # it waits for more of the handshake
    assert "rediss://" in await refused(tls, later=clock)
    assert "DB index is out of range" in await refused(shared_store(f"{server.url}/99"))
    await execute(server, "REPLICAOF", "127.0.0.1", "1")
    assert "read only replica" in await refused(shared_store(server.url), later=clock)


async def test_a_sentinel(tmp_path: Path) -> None:
    """The address of a Sentinel is rejected, with what to give for one."""
    port = free_port()
    (tmp_path / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor m 127.0.0.1 1 1\n"
    )
    command = [program("valkey-server"), "sentinel.conf", "--sentinel"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=tmp_path, stdout=quiet) as sentinel:  # noqa: ASYNC220
        try:
            # The Sentinel is still starting: until then nothing listens there.
            said = await refused(shared_store(f"redis://127.0.0.1:{port}"))
        finally:
            sentinel.kill()
    assert "for a Sentinel, give client=" in said


@contextlib.contextmanager
def running_node(directory: Path) -> Iterator[Server]:
    """Run a node of a cluster."""
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with running("valkey", directory, options, keeps=False) as server:
        yield server


async def _is_ready(node: Server) -> bool:
    """Return whether a node of a cluster knows who serves each slot: until then it refuses keys
    that are moved to it.
    """
    info: dict[str, str] = await execute(node, "CLUSTER INFO")
    return info["cluster_state"] == "ok"


@pytest.mark.parametrize("slowly", [False, True])
async def test_a_run_that_is_moved_in_its_cluster(tmp_path: Path, slowly: bool) -> None:
    """On the node of a cluster that has the run a store works; when the run is moved, calls and
    waits end with what to do.

    Also where the store has seen the node with half of the run, which counts as an outage.
    """
    with running_node(tmp_path) as node, running_node(tmp_path) as other:
        await execute(node, "CLUSTER ADDSLOTSRANGE", 0, 16383)
        bus = await execute(other, "CONFIG", "GET", "cluster-port")
        await execute(node, "CLUSTER MEET", "127.0.0.1", other.port, bus[1])
        ids = [str(await execute(member, "CLUSTER MYID")) for member in (node, other)]
        for member, id in ((node, ids[1]), (other, ids[0])):
            while id not in str(await execute(member, "CLUSTER NODES")) or not await _is_ready(
                member
            ):
                pass  # nothing is reported
        async with shared_store(node.url, run="r", heartbeat=0.5) as store:
            assert await store.advance() == 1
            waiting = asyncio.ensure_future(store.wait_for(9))
            slot = await execute(node, "CLUSTER KEYSLOT", "aiohooks:{r}")
            await execute(other, "CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
            await execute(node, "CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            for key in await execute(node, "CLUSTER GETKEYSINSLOT", slot, 100):
                await execute(node, "MIGRATE", "127.0.0.1", other.port, key, 0, 5000)
                # When the last key has gone, the store may have found that already.
                await until_true(
                    lambda: not slowly or store._connection.lost_at is not None or waiting.done()
                )
            for member in (other, node):
                await execute(member, "CLUSTER SETSLOT", slot, "NODE", ids[1])
            for call in (waiting, store.advance(), store.wait_for(9)):
                with pytest.raises(
                    StoreRefusedError,
                    match="the run is on that node of the cluster: give its address",
                ):
                    await call
        assert f"127.0.0.1:{other.port}" in await refused(shared_store(node.url, run="r"))
        async with shared_store(other.url, run="r") as store:
            assert (await store.value()).step == 1


# Users and rights.


@contextlib.contextmanager
def with_users(kind: str, directory: Path, users: Callable[[str], str] = str) -> Iterator[Server]:
    """Run a server with the users of the page, as `users` changes them."""
    assert USERS is not None, "the page has no users"
    (directory / "users.acl").write_text(users(USERS[0]), encoding="utf-8")
    with running(
        kind, directory, ["--aclfile", str(directory / "users.acl")], keeps=False
    ) as server:
        yield server


def store_of(server: Server, user: str, run: str = "digits", **options: Any) -> SharedStepStore:
    return shared_store(f"redis://{user}@127.0.0.1:{server.port}", run=run, **options)


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_rights_of_the_page(kind: str, tmp_path: Path) -> None:
    """They are enough for every check of a step store; other users are refused immediately."""
    with with_users(kind, tmp_path) as server:
        for check in step_store_checks():
            await check_step_store(lambda run: store_of(server, "aiohooks:secret", run), check)
        for user in ("aiohooks:wrong", ":", "unknown:secret"):
            assert "user and password in the URL" in await refused(store_of(server, user))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_user_with_the_right_to_one_run(kind: str, tmp_path: Path) -> None:
    """Another run's keys are refused."""
    with with_users(
        kind, tmp_path, lambda users: users.replace("~aiohooks:*", "~aiohooks:{digits}*")
    ) as server:
        async with store_of(server, "aiohooks:secret", "digits") as store:
            assert await store.advance() == 1
        assert "ACL SETUSER" in await refused(store_of(server, "aiohooks:secret", "letters"))


@pytest.mark.parametrize("missing", ["evalsha", "eval", "xread", "xadd", "hmget", "hset"])
async def test_each_right_is_needed(tmp_path: Path, missing: str) -> None:
    """Without it the store is refused: while connecting, or at the first request that needs the
    right.
    """
    with with_users(
        "valkey", tmp_path, lambda users: re.sub(rf"\+{missing}\b ?", "", users)
    ) as server:
        store = store_of(server, "aiohooks:secret")
        with pytest.raises(StoreRefusedError, match="ACL SETUSER"):
            await store.advance()
        await store.aclose()


# TLS.


@contextlib.contextmanager
def with_tls(directory: Path, certificates: Path, *options: str) -> Iterator[Server]:
    """Run a server with a certificate."""
    files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    given = [
        part
        for what, file in files.items()
        for part in (f"--tls-{what}-file", str(certificates / file))
    ]
    with running(
        "redis", directory, ["--port", "0", "--tls-port", "{port}", *given, *options], keeps=False
    ) as server:
        yield server


async def test_tls(tmp_path: Path, certificates: Path, clock: ManualClock) -> None:
    """TLS works with the given authority; without it, by another name, or with another authority,
    the server is refused.
    """
    trusted, other = str(certificates / "ca.crt"), str(certificates / "other.crt")
    with with_tls(
        tmp_path, certificates, "--requirepass", "p@ss", "--tls-auth-clients", "no"
    ) as server:
        url = f"rediss://:p%40ss@localhost:{server.port}"
        await check_step_store(
            lambda run: shared_store(url, run=run, ssl_ca_certs=trusted), "wakes"
        )
        async with shared_store(f"{url}?protocol=3", ssl_ca_certs=trusted) as store:
            assert await store.advance() == 1
        assert "ssl_ca_certs=" in await refused(shared_store(url))
        assert "ssl_ca_certs=" in await refused(shared_store(url, ssl_ca_certs=other))
        by_address = shared_store(url.replace("localhost", "127.0.0.1"), ssl_ca_certs=trusted)
        assert "is not valid for" in await refused(by_address)
        assert "password" in await refused(
            shared_store(url.replace("p%40ss", "x"), ssl_ca_certs=trusted)
        )
        assert "rediss://" in await refused(
            shared_store(url.replace("rediss", "redis")), later=clock
        )
