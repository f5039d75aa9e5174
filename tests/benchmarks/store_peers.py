"""The other processes of the rows about stores: waiters, which print when the last of them was
woken.

    python -m tests.benchmarks.store_peers ENGINE KIND URL COUNT LOOP

Each line of the input of such a process is a step: so many waiters wait for it, the process prints
`armed`, and then the time at which the last one was woken. It ends with its input.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.benchmarks.store_engine import engine_of, opened
from tests.conformance.report import loop_factory
from tests.support.source import ROOT


class Peers:
    """Processes with waiters, seen from the process that advances."""

    def __init__(self, processes: list[Process]) -> None:
        self._processes = processes

    async def arm(self, step: int) -> None:
        """Let all of them wait for a step."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"%d\n" % step)
        assert set(await self.read_lines()) == {b"armed\n"}

    async def woken(self) -> float:
        """Return the time at which the last waiter of all was woken; all processes have the same
        clock.
        """
        return max(map(float, await self.read_lines()))

    async def read_lines(self) -> list[bytes]:
        """Read a line of each."""
        return await asyncio.gather(
            *(one.stdout.readline() for one in self._processes if one.stdout is not None)
        )


@asynccontextmanager
async def peers(name: str, kind: str, url: str, processes: int, count: int) -> AsyncIterator[Peers]:
    """Start so many processes with so many waiters each, on the same event loop as this one."""
    loop = (
        "uvloop" if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else "asyncio"
    )
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.store_peers",
        name,
        kind,
        url,
        str(count),
        loop,
    ]
    async with AsyncExitStack() as stack:
        started: list[Process] = []
        for _ in range(processes):
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, cwd=ROOT
            )
            assert process.stdin is not None
            stack.push_async_callback(process.wait)
            stack.callback(process.stdin.close)
            started.append(process)
        found = Peers(started)
        assert set(await found.read_lines()) == {b"ready\n"}
        try:
            yield found
        except BaseException:
            for process in (
                started
            ):  # waiters of a step that does not come would never see the end of their input
                process.kill()
            raise


async def serve(name: str, kind: str, url: str, count: int) -> None:
    """Be such a process, until its input ends."""
    lines = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    last = 0.0

    async def waiter(step: int) -> None:
        nonlocal last
        await counter.wait_for(step)
        last = time.perf_counter()

    async with opened(engine_of(name), kind, url) as counter:
        await counter.wait_for(0)
        print("ready", flush=True)
        while line := await lines.readline():
            waiters = [asyncio.ensure_future(waiter(int(line))) for _ in range(count)]
            await asyncio.sleep(0)  # now all of them wait
            print("armed", flush=True)
            await asyncio.gather(*waiters)
            print(last, flush=True)
    pipe.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory(sys.argv[5])) as runner:
        runner.run(serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
