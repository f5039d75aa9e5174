"""Four processes wait and advance on one run of the local store for a long time; what they use must not grow.

    python -m tests.fuzz.local_soak --count 1000000

They go round by round: each adds 1 to the step and waits until all have. So `count` is how many waits there are, and how many
advances. Every now and then one more wait is cancelled, a publisher comes and goes, and another store is opened and closed. At
ten moments each process says how much memory, and how many open files, inotify watches and tasks it has.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohooks.stores.local import LocalStepStore
from tests.conformance.report import LOOPS, loop_factory
from tests.fuzz._local_crew import Crew, Member
from tests.fuzz.faults_local import check_nothing_left

PROCESSES = 4
MOMENTS = 10
GROWTH_KB = 2_000
"""So much more memory in the second half is still no growth: the interpreter's own is not counted to the byte."""
_PATIENCE_SECS = 3_600.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process uses."""

    kilobytes: int
    files: int
    watches: int
    tasks: int
    run_files: int
    slot_bytes: int

    @classmethod
    def now(cls, run: Path) -> Usage:
        """Of this process, and of the run."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        watches = 0
        for info in Path("/proc/self/fdinfo").iterdir():
            try:
                watches += info.read_text().count("inotify wd:")
            except FileNotFoundError:
                continue  # that of the directory itself
        return cls(
            pages * os.sysconf("SC_PAGESIZE") // 1024,
            len(os.listdir("/proc/self/fd")),
            watches,
            len(asyncio.all_tasks()),
            sum(1 for _ in run.rglob("*")),
            (run / "quiet").stat().st_size,
        )


class Soaking(Member):
    """A process that can do this."""

    async def soak(self, rounds: int) -> list[list[int]]:
        """Goes so many rounds."""
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
            if number * MOMENTS % rounds < MOMENTS:
                # All of them are here, and none goes on before all have looked.
                now = Usage.now(store.directory)
                usage.append([now.kilobytes, now.files, now.watches, now.tasks, now.run_files, now.slot_bytes])
        return usage


def soak(count: int, loop: str = LOOPS[0]) -> list[str]:
    """Returns what has grown."""
    rounds = max(MOMENTS, count // PROCESSES)
    grown: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        directory = Path(name)
        crew = [Crew(directory, "run", loop=loop_factory(loop), member=Soaking) for _ in range(PROCESSES)]
        for one in crew:
            one.do("value")
        orders = [one.order("soak", rounds=rounds) for one in crew]
        for one, order in zip(crew, orders, strict=True):
            answer = one.answer(order, _PATIENCE_SECS)
            usage = [Usage(*each) for each in answer["result"]]
            half, last = usage[len(usage) // 2], usage[-1]
            print(f"process {one.pid}: in the middle {half}\n{'at the end':>24} {last}")
            if last.kilobytes > half.kilobytes + GROWTH_KB:
                grown.append(f"memory of {one.pid}: {half.kilobytes} to {last.kilobytes} kB")
            grown += [
                f"{what} of {one.pid}: {getattr(half, what)} to {getattr(last, what)}"
                for what in ("files", "watches", "tasks")
                if getattr(last, what) > getattr(half, what)
            ]
            # Another process may have its other store open in that moment.
            if last.run_files > half.run_files + PROCESSES or last.slot_bytes > half.slot_bytes + 8 * PROCESSES:
                grown.append(f"files of the run: {half} to {last}")
        step = crew[0].do("value")["result"]
        if step != PROCESSES * rounds:
            grown.append(f"the step is {step} after {PROCESSES * rounds} advances")
        for one in crew:
            one.order("quit")
        grown += [f"process {one.pid} ended with {one.status}" for one in crew if one.reap()]
        check_nothing_left(directory)
    return grown


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what each process used, and what has grown; 1 if anything has."""
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
