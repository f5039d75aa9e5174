"""Redis and Valkey servers for tests: their kinds, and what a server says of itself."""

from __future__ import annotations

from typing import Any, cast

import redis.asyncio

from tests.support.store_servers import Server

KINDS = ("valkey", "redis")


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
