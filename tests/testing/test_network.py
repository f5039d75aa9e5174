"""The network of an exploration: what programs see of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from aiohooks.testing import ExplorationError, explore

pytestmark = pytest.mark.every_python


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back each line."""
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        async for line in reader:
            writer.write(line)


@contextlib.asynccontextmanager
async def connected() -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a server that sends back each line."""
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        streams = await asyncio.open_connection(*server.sockets[0].getsockname())
        with contextlib.closing(streams[1]):
            yield streams
        await streams[1].wait_closed()
        await asyncio.sleep(60)  # also beyond a partition, until the server has ended


async def test_lines_arrive_in_their_order() -> None:
    """Whatever time each message takes."""

    async def program() -> None:
        async with connected() as (reader, writer):
            for number in range(5):
                writer.write(f"{number}\n".encode())
            writer.write_eof()
            assert await reader.read() == b"0\n1\n2\n3\n4\n"

    explored = await explore(program, seeds=200, disturb=["order", "slow"])
    assert {"slow:message", "slow:partition"} <= {*explored.disturbances}


async def test_a_partition_holds_messages() -> None:
    """They arrive when it has ended; a time limit of the program's own may end before."""
    waits: set[float] = set()

    async def program() -> None:
        loop = asyncio.get_running_loop()
        async with connected() as (reader, writer):
            before = loop.time()
            writer.write(b"hello\n")
            assert await reader.readline() == b"hello\n"
            waits.add(round(loop.time() - before, 3))

    await explore(program, disturb=["slow"], exhaust=1)
    assert max(waits) == 30
    assert min(waits) == 0


async def test_a_time_limit_may_end_what_a_partition_delays() -> None:
    """A `TimeoutError` of the program is expected if time passed for a message or a partition, and
    is a problem otherwise.
    """

    async def program() -> None:
        async with asyncio.timeout(5), connected() as (reader, writer):
            writer.write(b"hello\n")
            await reader.readline()

    async def waits_too_long() -> None:
        async with asyncio.timeout(5):
            await asyncio.Event().wait()

    explored = await explore(program, disturb=["slow"], replay="slow:partition@1=1")
    assert explored.disturbances == {"slow:partition": 1}
    with pytest.raises(ExplorationError, match="an error: TimeoutError"):
        await explore(waits_too_long, disturb=["order"])


async def test_a_lost_connection_is_an_error_on_both_sides() -> None:
    """What reads gets a `ConnectionResetError`; it may come out of the program."""
    ends: set[str] = set()

    async def program() -> None:
        async with connected() as (reader, writer):
            writer.write(b"hello\n")
            try:
                ends.add((await reader.readline()).decode())
            except ConnectionResetError as error:
                ends.add(str(error))
                raise

    explored = await explore(program, disturb=["failure"], exhaust=1)
    assert explored.disturbances == {"failure:connection": 2}
    assert ends == {"hello\n", "[Errno 104] the simulated network lost the connection"}


async def test_a_server_that_does_not_listen() -> None:
    """A connection is rejected where no server listens, and after it has closed; a port has one
    server.
    """

    async def program() -> None:
        with pytest.raises(ConnectionRefusedError, match=r"no server .* at host:80"):
            await asyncio.open_connection("host", 80)
        server = await asyncio.start_server(echo, "host", 80)
        assert server.is_serving()
        with pytest.raises(OSError, match="port 80 is in use"):
            await asyncio.start_server(echo, "host", 80)
        serving = asyncio.create_task(server.serve_forever())
        await asyncio.sleep(1)
        serving.cancel()
        await asyncio.wait([serving])
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("host", 80)

    await explore(program, seeds=20, disturb=["order"])


async def test_what_is_written_to_a_closed_connection() -> None:
    """The other side gets a `ConnectionResetError`."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def program() -> None:
        async with await asyncio.start_server(close, "host", 80):
            reader, writer = await asyncio.open_connection("host", 80)
            assert await reader.read() == b""
            assert writer.get_extra_info("peername") == ("127.0.0.1", 80)
            with contextlib.closing(writer):
                writer.write(b"late")
                await asyncio.sleep(1)
                with pytest.raises(ConnectionResetError):
                    await writer.drain()

    await explore(program, seeds=20, disturb=["order"])


async def test_an_error_of_a_handler_is_found() -> None:
    """Where a handler lets the loss of its connection pass, its error is lost, as in production."""

    async def careless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            writer.write(await reader.readline())
            await writer.drain()

    async def program() -> None:
        async with await asyncio.start_server(careless, "host", 80):
            reader, writer = await asyncio.open_connection("host", 80)
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                writer.write(b"hello\n")
                await reader.readline()
            await asyncio.sleep(1)

    with pytest.raises(ExplorationError, match="Unhandled exception in client_connected_cb"):
        await explore(program, disturb=["failure"])
