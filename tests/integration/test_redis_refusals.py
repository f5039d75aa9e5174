"""Errors of the Redis store when the server is unavailable or refuses: what is wrong, and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiohooks.errors import StoreRefusedError, StoreUnavailableError
from aiohooks.stores.redis import RedisStepStore
from tests.support.needs import program
from tests.support.redis_servers import KINDS, execute
from tests.support.store_servers import Server, first_stream, free_port, running

HOUR_SECS = 3600.0
IN_SCRIPT = "Error running script (call to f_0123): @user_script:88: @user_script: 88:"
"""How Redis 6.2 begins the text of an error that a command of a script has met."""


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(request.param, tmp_path, keeps=False) as one:
        yield one


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


async def refused(store: RedisStepStore) -> StoreUnavailableError:
    """Return the error of opening the store."""
    with pytest.raises(StoreUnavailableError) as raised:
        await store.__aenter__()
    await store.aclose()
    return raised.value


async def test_no_server() -> None:
    """The error comes within `connect_timeout`, with the address and how to start a server; its cause is the client's error."""
    port = free_port()
    error = await refused(RedisStepStore(f"redis://:secret@127.0.0.1:{port}", connect_timeout=0.1))
    assert f"redis at 127.0.0.1:{port}" in str(error)
    assert f"start one (redis-server --port {port})" in str(error)
    assert type(error.__cause__).__module__ == "redis.exceptions"
    assert "secret" not in str(error)


async def test_a_server_that_is_still_starting(tmp_path: Path) -> None:
    """The first connection is tried again until `connect_timeout`."""
    server = Server("valkey", tmp_path)
    store = RedisStepStore(server.url, connect_timeout=HOUR_SECS)
    opening = asyncio.ensure_future(store.__aenter__())
    await asyncio.sleep(0)
    await asyncio.to_thread(server.start)
    try:
        await opening
        assert await store.advance() == 1
        await store.aclose()
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("-DENIED Redis is running in protected mode because ...", "requirepass"),
        ("-ERR unknown command `EVALSHA`, with args beginning with: ", "Redis 6.2 or later"),
        ("-NOAUTH Authentication required.", "put them in the URL"),
        ("-NOPERM this user has no permissions to run the 'evalsha' command", "ACL SETUSER"),
        ("-ERR AUTH <password> called without any password configured for the default user.", "leave it out of the URL"),
        ("+what?", "what?"),
        ("-ERR something new", "something new"),
        ("-MOVED 1234 10.0.0.7:6379", "give the address of that node"),
        ("-ASK 1234 10.0.0.7:6379", "give the address of that node"),
        pytest.param("-ERR " + 70_000 * "x", "a line of more than 64 kB", id="long"),
    ],
)
async def test_a_permanent_refusal_is_raised_immediately(answer: str, said: str) -> None:
    """Long before `connect_timeout`; the message says what to do."""
    async with answering(answer) as url:
        error = await refused(RedisStepStore(url, connect_timeout=HOUR_SECS))
    assert isinstance(error, StoreRefusedError)
    assert said in str(error)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("-LOADING Redis is loading the dataset in memory", "still reading its data"),
        ("-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "lost its master"),
        ("-CLUSTERDOWN The cluster is down", "the cluster is down"),
        ("-MISCONF Redis is configured to save RDB snapshots, but ...", "cannot write to its disk"),
        ("-NOREPLICAS Not enough good replicas to write.", "too few replicas"),
        ("-TRYAGAIN Multiple keys request during rehashing of slot", "being moved to another node"),
        (f"-ERR {IN_SCRIPT} -READONLY You can't write against a read only replica. ", "give the address of its master"),
        (f"-ERR {IN_SCRIPT} -OOM command not allowed when used memory > 'maxmemory'. ", "its memory is full"),
        (f"-ERR {IN_SCRIPT} -NOREPLICAS Not enough good replicas to write. ", "too few replicas"),
        ("-ERR max number of clients reached", "maxclients"),
        ("-BUSY Redis is busy running a script. You can only call SCRIPT KILL", "another script"),
    ],
)
async def test_a_temporary_refusal_is_tried_again(answer: str, said: str) -> None:
    """Until `connect_timeout`; then the message says the reason."""
    async with answering(answer) as url:
        error = await refused(RedisStepStore(url, connect_timeout=0.1))
    assert not isinstance(error, StoreRefusedError)
    assert said in str(error)


async def test_a_server_of_another_protocol() -> None:
    """An answer in another protocol is an error of the store's, with the address."""
    async with answering("HTTP/1.1 400 Bad Request") as url:
        error = await refused(RedisStepStore(url, connect_timeout=0.1))
    assert "redis at" in str(error)


@pytest.mark.parametrize("answer_timeout", [0.2, HOUR_SECS])
async def test_a_server_that_accepts_and_never_answers(answer_timeout: float, tmp_path: Path) -> None:
    """It counts as unavailable after `answer_timeout`, or `connect_timeout` if that is shorter."""
    with running("valkey", tmp_path, keeps=False) as server:
        server.pause()
        store = RedisStepStore(server.url, connect_timeout=0.2, answer_timeout=answer_timeout)
        error = await refused(store)
        server.resume()
    assert "no answer within 0.2 s" in str(error)


async def test_tls_without_a_tls_server(server: Server) -> None:
    """The error of a rediss:// URL for a server without TLS says which scheme means what."""
    error = await refused(RedisStepStore(server.url.replace("redis://", "rediss://"), connect_timeout=0.1, answer_timeout=0.5))
    assert "rediss://" in str(error)


async def test_an_unknown_database(server: Server) -> None:
    """A database number that the server does not have is refused immediately, with what to leave out."""
    error = await refused(RedisStepStore(f"{server.url}/99", connect_timeout=HOUR_SECS))
    assert "leave the number out" in str(error)


async def test_a_replica(server: Server) -> None:
    """A server that takes no writes is found while connecting, not at the first advance."""
    await execute(server, "REPLICAOF", "127.0.0.1", "1")
    error = await refused(RedisStepStore(server.url, connect_timeout=0.1))
    assert "give the address of its master" in str(error)


async def test_a_full_server(server: Server) -> None:
    """An advance is applied once, when there is memory again, and the waiter of another store is woken."""
    async with RedisStepStore(server.url) as store, RedisStepStore(server.url) as other:
        wait = asyncio.ensure_future(other.wait_for(2))
        assert await store.advance() == 1
        await execute(server, "CONFIG", "SET", "maxmemory", "1")
        advance = asyncio.ensure_future(store.advance())
        while store.outage_secs is None:  # noqa: ASYNC110 - a store has no event for this
            await asyncio.sleep(0)
        await execute(server, "CONFIG", "SET", "maxmemory", "0")
        assert await advance == 2
        assert await wait == 2


async def test_max_outage_secs(server: Server) -> None:
    """Waits and advances end with the typed error, and work again when the server does."""
    async with RedisStepStore(server.url, max_outage_secs=0.2) as store:
        wait = asyncio.ensure_future(store.wait_for(5))
        assert await store.advance() == 1
        await asyncio.to_thread(server.kill)
        with pytest.raises(StoreUnavailableError, match="no connection for"):
            await store.advance()
        with pytest.raises(StoreUnavailableError, match="no connection for"):
            await wait
        await asyncio.to_thread(server.start)
        while store.outage_secs is not None:  # noqa: ASYNC110 - a store has no event for this
            await asyncio.sleep(0)
        assert await store.advance() == 2
    await asyncio.to_thread(server.kill)


async def test_a_revoked_right_ends_the_call(server: Server) -> None:
    """An advance that the server refuses for lack of a right is not repeated."""
    await execute(server, "ACL", "SETUSER", "u", "on", ">p", "~aiohooks:*", "+@all")
    async with RedisStepStore(server.url.replace("//", "//u:p@"), run="rights") as store:
        assert await store.advance() == 1
        await execute(server, "ACL", "SETUSER", "u", "-xadd")
        with pytest.raises(StoreRefusedError, match="ACL SETUSER"):
            await store.advance()
        await execute(server, "ACL", "SETUSER", "u", "+xadd")
        assert await store.advance() == 2


def test_without_the_package(tmp_path: Path) -> None:
    """The error names what to install."""
    (tmp_path / "redis.py").write_text("raise ImportError('no redis here')", encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom aiohooks.stores import open_step_store\nopen_step_store('redis://x')"
    )
    ended: Any = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "pip install 'aiohooks[redis]'" in ended.stderr


async def test_a_sentinel(tmp_path: Path) -> None:
    """The address of a Sentinel is refused, with how to find that of the master."""
    port = free_port()
    (tmp_path / "sentinel.conf").write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor m 127.0.0.1 1 1\n")
    command = [program("valkey-server"), "sentinel.conf", "--sentinel"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as sentinel:  # noqa: ASYNC220
        try:
            # The Sentinel is still starting: until then nothing listens there.
            error = await refused(RedisStepStore(f"redis://127.0.0.1:{port}", connect_timeout=HOUR_SECS))
        finally:
            sentinel.kill()
    assert isinstance(error, StoreRefusedError)
    assert "it is a Sentinel and not a server: give the address of the master" in str(error)


@contextlib.contextmanager
def running_node(directory: Path) -> Iterator[Server]:
    """Run a node of a cluster."""
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with running("valkey", directory, options, keeps=False) as server:
        yield server


async def _is_ready(node: Server) -> bool:
    """Return whether a node of a cluster knows who serves each slot: until then it refuses keys that are moved to it."""
    info: dict[str, str] = await execute(node, "CLUSTER INFO")
    return info["cluster_state"] == "ok"


async def test_a_run_that_is_moved_in_its_cluster(tmp_path: Path) -> None:
    """On the node of a cluster that has the run a store works; when the run is moved, calls and waits end with what to do."""
    with running_node(tmp_path) as node, running_node(tmp_path) as other:
        await execute(node, "CLUSTER ADDSLOTSRANGE", 0, 16383)
        bus = await execute(other, "CONFIG", "GET", "cluster-port")
        await execute(node, "CLUSTER MEET", "127.0.0.1", other.port, bus[1])
        ids = [str(await execute(each, "CLUSTER MYID")) for each in (node, other)]
        for each, id in ((node, ids[1]), (other, ids[0])):
            while id not in str(await execute(each, "CLUSTER NODES")) or not await _is_ready(each):
                pass  # nothing is reported
        async with RedisStepStore(node.url, run="r", heartbeat=0.5) as store:
            assert await store.advance() == 1
            waiting = asyncio.ensure_future(store.wait_for(9))
            slot = await execute(node, "CLUSTER KEYSLOT", "aiohooks:{r}")
            await execute(other, "CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
            await execute(node, "CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
            for key in await execute(node, "CLUSTER GETKEYSINSLOT", slot, 100):
                await execute(node, "MIGRATE", "127.0.0.1", other.port, key, 0, 5000)
            for each in (other, node):
                await execute(each, "CLUSTER SETSLOT", slot, "NODE", ids[1])
            for call in (waiting, store.advance(), store.wait_for(9)):
                with pytest.raises(StoreRefusedError, match="the run is on another one: give the address of that node"):
                    await call
        error = await refused(RedisStepStore(node.url, run="r"))
        assert f"127.0.0.1:{other.port}" in str(error)
        async with RedisStepStore(other.url, run="r") as store:
            assert (await store.value()).step == 1
