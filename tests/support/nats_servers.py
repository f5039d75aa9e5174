"""NATS servers for tests: requests of JetStream's API, and a cluster of three whose leader can be found and killed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.errors import NoRespondersError

from tests.support.store_servers import Server, free_port
from tests.support.waiting import HANG_SECS


async def request_api(url: str, what: str, body: Any = None) -> Any:
    """Return the reply to a request of JetStream's API; `url` may have the addresses of several servers."""
    client = Client()
    await client.connect(url.split(","), reconnect_time_wait=0)
    try:
        while True:
            with contextlib.suppress(NoRespondersError):  # while the servers elect a leader
                reply = await client.request(f"$JS.API.{what}", json.dumps(body or {}).encode(), timeout=HANG_SECS)
                return json.loads(reply.data)
    finally:
        await client.close()


class Cluster:
    """The servers, by name."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        """The URL of all of them."""
        return "nats://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers.values())

    async def leader(self, stream: str) -> Server:
        """Return the server that leads a stream."""
        while True:  # none while the servers elect one, as after one has come back
            reply = await request_api(self.url, f"STREAM.INFO.{stream}")
            if leader := reply.get("cluster", {}).get("leader"):
                return self.servers[leader]


@contextlib.contextmanager
def running_cluster(directory: Path) -> Iterator[Cluster]:
    """Run three servers for the block."""
    routes = {name: free_port() for name in ("one", "two", "three")}
    all_routes = ",".join(f"nats://127.0.0.1:{port}" for port in routes.values())
    servers = {
        name: Server(
            "nats",
            directory,
            ["-n", name, "--cluster_name", "c", "--cluster", f"nats://127.0.0.1:{port}", "--routes", all_routes],
        )
        for name, port in routes.items()
    }
    try:
        for server in servers.values():
            server.start()
        yield Cluster(servers)
    finally:
        for server in servers.values():
            server.kill()
