"""Four processes wait and advance on one run of the local store for a long time; their use of
resources must not grow.

    python -m tests.fuzz.local_soak --count 1000000

In each round every process adds 1 to the step and waits until all have. So `count` is the number of
waits, and of advances. Now and then another wait is cancelled, a publisher joins and leaves, and
another store is opened and closed. In the middle and at the end each process reports its memory,
and its numbers of open files, inotify watches and tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from tests.fuzz._harness import scratch
from tests.fuzz.store_faults.engines import left_in
from tests.support.store_processes import WorkerProcess, reply_to

PROCESSES = 4
GROWTH_KB = 2_000
"""The memory that the interpreter itself may take in the second half."""
GROWTH_BYTES = 1_000_000
"""What the log of the database may have grown since its last checkpoint."""
_RESULT_SECS = 3_600.0


async def soak(count: int) -> list[str]:
    """Return what has grown."""
    half = max(1, count // PROCESSES // 2)
    with scratch() as directory:
        workers = await asyncio.gather(*(WorkerProcess.start() for _ in range(PROCESSES)))
        try:
            for one in workers:
                await one.do("open", url=f"local://{directory}", run="run")
                await one.do("publish", name="soaking")
            middle, end = [
                await _work(workers, directory / "run", first, half) for first in (1, half + 1)
            ]
            step = await workers[0].do("value")
            await asyncio.gather(*(one.do("close") for one in workers))
        finally:
            await asyncio.gather(*(one.kill() for one in workers))
        grown = (
            []
            if step == 2 * half * PROCESSES
            else [f"the step is {step} after {2 * half * PROCESSES} advances"]
        )
        grown += [left] if (left := left_in(directory / "run")) else []
    for who, before in middle.items():
        spare = {"kilobytes": GROWTH_KB, "bytes": GROWTH_BYTES}
        print(f"{who}: in the middle {before}, at the end {end[who]}")
        grown += [
            f"{what} of {who}: {was} to {end[who][what]}"
            for what, was in before.items()
            if end[who][what] > was + spare.get(what, 0)
        ]
    return grown


async def _work(
    workers: list[WorkerProcess], run: Path, first: int, rounds: int
) -> dict[str, dict[str, int]]:
    """Let all work; return what each process and the run use."""
    orders = [one.order("soak", first=first, rounds=rounds, processes=PROCESSES) for one in workers]
    for order in orders:
        reply = await reply_to(order, "soak", _RESULT_SECS)
        assert "result" in reply, reply
    used: dict[str, Any] = {
        f"process {number}": await one.do("usage") for number, one in enumerate(workers)
    }
    files = len(list(run.rglob("*")))  # noqa: ASYNC240
    return {
        **used,
        "the run": {
            "files": files,
            "bytes": sum(path.stat().st_size for path in run.glob("run.db*")),  # noqa: ASYNC240
        },
    }


def main() -> int:
    """Print the resources of each process, and what has grown; return 1 if anything has."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.local_soak", description=__doc__)
    parser.add_argument(
        "--count", type=int, default=1_000_000, help="how many waits, and how many advances"
    )
    options = parser.parse_args()
    began = time.monotonic()
    grown = asyncio.run(soak(options.count))
    print(*grown, sep="\n", end="\n" if grown else "")
    secs = time.monotonic() - began
    print(
        f"{options.count} waits and as many advances in {secs:.0f} s:"
        f" {'nothing has grown' if not grown else 'GROWN'}"
    )
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
