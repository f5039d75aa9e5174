"""The other process of the rows about the local store, and the least that can do the same by hand.

    python -m tests.benchmarks._local_peer DIRECTORY ours|bare answer|crowd LOOP

`answer`: waits for each step that it is told (a line on its input), and says when it went on. `crowd`: has many waits parked
at each step that it is told, says so, and says when all have ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import sys
import time
from pathlib import Path
from typing import Protocol

from aiohooks.stores._inotify import MODIFY, Inotify
from aiohooks.stores.local import LocalStepStore
from tests.conformance.report import loop_factory

_STEP = struct.Struct("=Q")


class Counter(Protocol):
    """What both can do."""

    async def advance(self) -> int: ...
    async def wait_for(self, step: int) -> int: ...
    async def aclose(self) -> None: ...


class Bare:
    """A number in a file, watched: a lock, a read and a write to advance; an event, a read and a future to be woken.

    Every advance wakes everybody, nobody knows who publishes, and what is damaged or deleted is not noticed.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory / "number", os.O_RDWR | os.O_CREAT)
        self._inotify = Inotify()
        self._inotify.add(directory / "number", MODIFY)
        asyncio.get_running_loop().add_reader(self._inotify.fd, self._changed)
        self._waits: dict[asyncio.Future[int], int] = {}

    def _read(self) -> int:
        return int(_STEP.unpack(os.pread(self._fd, _STEP.size, 0) or bytes(_STEP.size))[0])

    def _changed(self) -> None:
        os.read(self._inotify.fd, 4096)
        step = self._read()
        for wait in [wait for wait, wanted in self._waits.items() if wanted <= step]:
            del self._waits[wait]
            wait.set_result(step)

    async def advance(self) -> int:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        step = self._read() + 1
        os.pwrite(self._fd, _STEP.pack(step), 0)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return step

    async def wait_for(self, step: int) -> int:
        if (seen := self._read()) >= step:
            return seen
        wait: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waits[wait] = step
        return await wait

    async def aclose(self) -> None:
        asyncio.get_running_loop().remove_reader(self._inotify.fd)
        self._inotify.close()
        os.close(self._fd)


def counter(directory: Path, kind: str) -> Counter:
    """The one or the other."""
    return LocalStepStore(directory) if kind == "ours" else Bare(directory)


CROWD = 250
"""Waits of one process."""


async def serve(directory: Path, kind: str, role: str) -> None:
    """Until its input ends."""
    one = counter(directory, kind)
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    async def answer(step: int) -> None:
        wait = asyncio.ensure_future(one.wait_for(step))
        await asyncio.sleep(0)
        os.write(1, b"p")
        await wait
        os.write(1, struct.pack("=d", time.perf_counter()))

    async def crowd(step: int) -> None:
        waits = [asyncio.ensure_future(one.wait_for(step)) for _ in range(CROWD)]
        await asyncio.sleep(0)
        os.write(1, b"p")
        await asyncio.gather(*waits)
        os.write(1, b"w")

    tasks = set[asyncio.Task[None]]()
    work = answer if role == "answer" else crowd

    def told() -> None:
        data = os.read(0, 4096)
        if not data:
            over.set_result(None)
        for line in data.split():
            tasks.add(asyncio.ensure_future(work(int(line))))

    await one.wait_for(0)
    os.write(1, b"r")
    loop.add_reader(0, told)
    await over
    loop.remove_reader(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await one.aclose()


if __name__ == "__main__":
    place, which, what, on = sys.argv[1:]
    with asyncio.Runner(loop_factory=loop_factory(on)) as runner:
        runner.run(serve(Path(place), which, what))
