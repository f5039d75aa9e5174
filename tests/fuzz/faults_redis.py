"""Faults of the Redis store's servers, connections and processes, each counted; see `tests.support.store_faults`.

    python -m tests.fuzz.faults_redis --count 484 [--server valkey|redis]

Besides the faults of every engine: the server drops its clients, loses all keys under open connections, becomes a replica
for a while, or has no memory left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.support.redis_servers import KINDS, execute
from tests.support.store_faults import FAULTS, Trial, TrialSetup, resumes
from tests.support.store_servers import Server
from tests.support.store_trials import report, run_trials


async def clients_dropped(setup: TrialSetup) -> str:
    """The server closes all connections."""
    waiter, advancer, _ = await setup.begin()

    async def fault() -> None:
        await execute(setup.server, "CLIENT", "KILL", "TYPE", "normal")

    return await resumes(setup, waiter, advancer, fault)


async def keys_deleted(setup: TrialSetup) -> str:
    """All keys and scripts are deleted, and no connection is lost."""
    waiter, advancer, _ = await setup.begin()

    async def fault() -> None:
        await execute(setup.server, "FLUSHALL")
        await execute(setup.server, "SCRIPT", "FLUSH")

    return await resumes(setup, waiter, advancer, fault)


async def refused_for_a_while(setup: TrialSetup, refuse: tuple[str, ...], allow: tuple[str, ...]) -> str:
    """The server refuses all writes for a while."""
    waiter, advancer, _ = await setup.begin()

    async def fault() -> None:
        await execute(setup.server, *refuse)
        await setup.last(0.5)
        await execute(setup.server, *allow)

    return await resumes(setup, waiter, advancer, fault)


REDIS_FAULTS: Mapping[str, Trial] = {
    **FAULTS,
    "clients dropped by the server": clients_dropped,
    "keys and scripts deleted": keys_deleted,
    "server a replica for a while": partial(
        refused_for_a_while, refuse=("REPLICAOF", "127.0.0.1", "1"), allow=("REPLICAOF", "NO", "ONE")
    ),
    "server's memory full for a while": partial(
        refused_for_a_while, refuse=("CONFIG", "SET", "maxmemory", "1"), allow=("CONFIG", "SET", "maxmemory", "0")
    ),
}


@contextlib.asynccontextmanager
async def staged(kind: str, directory: Path, seed: int) -> AsyncIterator[TrialSetup]:
    """Set a setup with a server of that kind, whose data is on the disk."""

    async def left() -> str:
        clients = (await execute(setup.server, "CLIENT LIST")) or []
        stats = await execute(setup.server, "INFO", "clients")
        return f"{len(clients) - 1} connections are left" if len(clients) > 1 or stats["blocked_clients"] else ""

    server = Server(kind, directory)
    await asyncio.to_thread(server.start)
    setup = TrialSetup(server, seed, b"EVALSHA", left)
    async with setup.start():
        yield setup


async def played(
    count: int, seed: int, kinds: list[str], directory: Path, only: Sequence[str] = ()
) -> tuple[Counter[str], list[str]]:
    """Run `count` trials, divided among the kinds of servers; return the verdicts and the problems."""
    verdicts: Counter[str] = Counter()
    problems: list[str] = []
    faults = [(name, REDIS_FAULTS[name]) for name in only or REDIS_FAULTS]
    for kind in kinds:
        async with staged(kind, directory, seed) as setup:
            some, wrong = await run_trials(setup, count // len(kinds), [(f"{kind}: {name}", trial) for name, trial in faults])
        verdicts += some
        problems += wrong
    return verdicts, problems


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2 * len(REDIS_FAULTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", action="append", choices=KINDS, help="only this one")
    parser.add_argument("--fault", action="append", choices=tuple(REDIS_FAULTS), help="only this one; may be repeated")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return report(*asyncio.run(played(given.count, given.seed, given.server or KINDS, Path(directory), given.fault or ())))


if __name__ == "__main__":
    sys.exit(main())
