"""A cluster of three NATS servers on the loopback; the leader of a stream can be found and killed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from nats.aio.client import Client
from nats.errors import NoRespondersError

from tests.support.store_servers import Server, free_port
from tests.support.waiting import HANG_SECS


class Cluster:
    """The servers, by name."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self.servers = servers

    @property
    def url(self) -> str:
        """The URL of all of them."""
        return "nats://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers.values())

    async def leader(self, stream: str) -> str:
        """Return the name of the server that leads a stream."""
        client = Client()
        await client.connect(self.url.split(","), reconnect_time_wait=0)
        try:
            while True:  # none while the servers elect one, as after one has come back
                with contextlib.suppress(NoRespondersError):
                    reply = await client.request(f"$JS.API.STREAM.INFO.{stream}", b"{}", timeout=HANG_SECS)
                    if leader := json.loads(reply.data).get("cluster", {}).get("leader"):
                        return str(leader)
        finally:
            await client.close()


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
