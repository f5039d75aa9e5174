"""Redis and Valkey servers for tests: their kinds, and what a server says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis.asyncio

from tests.support.store_servers import Server, running

KINDS = ("valkey", "redis")


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of each kind for the tests of a module, which leave it running."""
    with running(request.param, tmp_path_factory.mktemp(request.param), keeps=False) as one:
        yield one


async def execute(server: Server, *command: str | int) -> Any:
    """Return the server's reply to a command of another client."""
    async with redis.asyncio.Redis(port=server.port, protocol=2, decode_responses=True) as other:
        return await cast("Any", other).execute_command(*command)
