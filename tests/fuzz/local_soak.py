"""Four processes wait and advance on one run of the local store for a long time; their use of resources must not grow.

    python -m tests.fuzz.local_soak --count 1000000

In each round every process adds 1 to the step and waits until all have. So `count` is the number of waits, and of advances. Now
and then another wait is cancelled, a publisher joins and leaves, and another store is opened and closed. Ten times each process
reports its memory, and its numbers of open files, inotify watches and tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from aiohooks.stores.local import LocalStepStore
from tests.conformance.report import LOOPS, loop_factory
from tests.fuzz._harness import scratch
from tests.fuzz._local_workers import Worker, WorkerProcess
from tests.fuzz.faults_local import check_nothing_left

PROCESSES = 4
SAMPLES = 10
GROWTH_KB = 2_000
"""The memory that the interpreter itself may take in the second half."""
_RESULT_SECS = 3_600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a process and its run use."""

    kilobytes: int
    files: int
    watches: int
    tasks: int
    run_files: int
    slot_bytes: int

    @classmethod
    def now(cls, run: Path) -> Usage:
        """Measure this process, and the run in the directory `run`."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        watches = 0
        for info in Path("/proc/self/fdinfo").iterdir():
            try:
                watches += info.read_text().count("inotify wd:")
            except FileNotFoundError:
                continue  # the descriptor of the directory itself
        return cls(
            pages * os.sysconf("SC_PAGESIZE") // 1024,
            len(os.listdir("/proc/self/fd")),
            watches,
            len(asyncio.all_tasks()),
            sum(1 for _ in run.rglob("*")),
            (run / "position").stat().st_size,
        )


class SoakWorker(Worker):
    """A worker with the command `soak`."""

    async def soak(self, rounds: int) -> list[list[int]]:
        """Wait and advance `rounds` times; return the samples."""
        with self.store.publisher("soaking"):
            return await self._soak(rounds)

    async def _soak(self, rounds: int) -> list[list[int]]:
        store = self.store
        usage: list[list[int]] = []
        for number in range(1, rounds + 1):
            await store.advance()
            await store.wait_for(PROCESSES * number)
            if number % 97 == 0:
                wait = asyncio.ensure_future(store.wait_for(10**12))
                await asyncio.sleep(0)
                wait.cancel()
                await asyncio.wait([wait])
            if number % 499 == 0:
                with store.publisher("for a moment"):
                    await store.flush()
                await store.flush()
            if number % 997 == 0:
                async with LocalStepStore(store.directory.parent, run=store.run) as other:
                    await other.value()
            if number * SAMPLES % rounds < SAMPLES:
                # The other processes wait for this one to advance.
                while store._tasks:  # it may be reading what another process has written
                    await asyncio.wait(tuple(store._tasks))
                usage.append(list(dataclasses.astuple(Usage.now(store.directory))))
        return usage


def soak(count: int, loop: str = LOOPS[0]) -> list[str]:
    """Return what has grown."""
    rounds = max(SAMPLES, count // PROCESSES)
    grown: list[str] = []
    with scratch() as directory:
        workers = [WorkerProcess(directory, "run", loop=loop_factory(loop), worker=SoakWorker) for _ in range(PROCESSES)]
        for worker in workers:
            worker.call("value")
        commands = [worker.start("soak", rounds=rounds) for worker in workers]
        for worker, command in zip(workers, commands, strict=True):
            usage = [Usage(*sample) for sample in worker.result(command, _RESULT_SECS)["result"]]
            half, last = usage[len(usage) // 2], usage[-1]
            print(f"process {worker.pid}: in the middle {half}\n{'at the end':>24} {last}")
            if last.kilobytes > half.kilobytes + GROWTH_KB:
                grown.append(f"memory of {worker.pid}: {half.kilobytes} to {last.kilobytes} kB")
            grown += [
                f"{what} of {worker.pid}: {getattr(half, what)} to {getattr(last, what)}"
                for what in ("files", "watches", "tasks")
                if getattr(last, what) > getattr(half, what)
            ]
            # Another process may have its other store open just then.
            if last.run_files > half.run_files + PROCESSES or last.slot_bytes > half.slot_bytes + 8 * PROCESSES:
                grown.append(f"files of the run: {half} to {last}")
        step = workers[0].call("value")["result"]
        if step != PROCESSES * rounds:
            grown.append(f"the step is {step} after {PROCESSES * rounds} advances")
        for worker in workers:
            worker.start("quit")
        grown += [f"process {worker.pid} ended with {worker.status}" for worker in workers if worker.reap()]
        check_nothing_left(directory)
    return grown


def main(argv: Sequence[str] | None = None) -> int:
    """Print the resources of each process, and what has grown; return 1 if anything has."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.local_soak", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="how many waits, and how many advances")
    parser.add_argument("--loop", choices=LOOPS, default=LOOPS[0])
    options = parser.parse_args(argv)
    began = time.monotonic()
    grown = soak(options.count, options.loop)
    print(*grown, sep="\n", end="\n" if grown else "")
    secs = time.monotonic() - began
    print(f"{options.count} waits and as many advances in {secs:.0f} s: {'nothing has grown' if not grown else 'GROWN'}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
