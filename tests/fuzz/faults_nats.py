"""Faults of the NATS store's server, connections and processes, each counted; see `tests.support.store_faults`.

    python -m tests.fuzz.faults_nats --count 119 [--seed 1]

The leader of three servers is killed in `tests/integration/test_nats_faults.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.store_faults import FAULTS, TrialSetup
from tests.support.store_servers import Server, free_port
from tests.support.store_trials import report, run_trials


async def played(count: int, seed: int, directory: Path, only: Sequence[str] = ()) -> tuple[Counter[str], list[str]]:
    """Run `count` trials; return the verdicts and the problems."""
    monitor = free_port()

    def monitored(what: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/{what}", timeout=10) as reply:
            return json.load(reply)

    def count_left() -> str:
        clients, consumers = monitored("connz")["num_connections"], monitored("jsz")["consumers"]
        return f"{clients} connections and {consumers} consumers are left" if clients or consumers else ""

    async def left() -> str:
        return await asyncio.to_thread(count_left)

    server = Server("nats", directory, ["-m", str(monitor)])
    await asyncio.to_thread(server.start)
    async with TrialSetup(server, seed, b"AIOHOOKS.run", left).start() as setup:
        return await run_trials(setup, count, [(name, FAULTS[name]) for name in only or FAULTS])


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=7 * len(FAULTS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", action="append", choices=tuple(FAULTS), help="only this one; may be repeated")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return report(*asyncio.run(played(given.count, given.seed, Path(directory), given.fault or ())))


if __name__ == "__main__":
    sys.exit(main())
