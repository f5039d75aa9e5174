"""Rows about the local store, over real processes, each against the least that can do it by hand: a watched file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import struct
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import itemgetter
from pathlib import Path

from tests.benchmarks._local_peer import CROWD, Counter, counter
from tests.benchmarks.measure import Counts, Figure, Lane, Row, Setup, measure, repeated
from tests.benchmarks.report import header, line

KINDS = ("ours", "bare")
PROCESSES = 4


@asynccontextmanager
async def _peer(directory: Path, kind: str, role: str) -> AsyncIterator[Process]:
    loop = "uvloop" if type(asyncio.get_running_loop()).__module__.startswith("uvloop") else "asyncio"
    arguments = [sys.executable, "-m", "tests.benchmarks._local_peer", str(directory), kind, role, loop]
    process = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await process.stdout.readexactly(1) == b"r"
        yield process
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def wake_over_processes(_: Counts) -> AsyncIterator[Setup]:
    """From calling `advance` in one process to the moment in which the waiter in another one goes on."""
    async with contextlib.AsyncExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for kind in KINDS:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            one = counter(directory, kind)
            stack.push_async_callback(one.aclose)
            await one.wait_for(0)
            lanes[kind] = _one_wake(one, await stack.enter_async_context(_peer(directory, kind, "answer")))
        yield Setup(
            lanes,
            [
                Figure(
                    "local store: a wake in another process / a watched file by hand",
                    1.5,
                    itemgetter("ours"),
                    itemgetter("bare"),
                )
            ],
        )


def _one_wake(one: Counter, peer: Process) -> Lane:
    async def lane(times: int) -> float:
        assert peer.stdin is not None
        assert peer.stdout is not None
        secs = 0.0
        for _ in range(times):
            step = await one.advance()
            peer.stdin.write(b"%d\n" % (step + 1))
            assert await peer.stdout.readexactly(1) == b"p"
            began = time.perf_counter()  # the same clock in all processes
            await one.advance()
            secs += struct.unpack("=d", await peer.stdout.readexactly(8))[0] - began
        return secs

    return lane


@asynccontextmanager
async def wake_crowds(_: Counts) -> AsyncIterator[Setup]:
    """One advance wakes a thousand waiters in four processes; until all of them have run."""
    async with contextlib.AsyncExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for kind in KINDS:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            one = counter(directory, kind)
            stack.push_async_callback(one.aclose)
            await one.wait_for(0)
            peers = [await stack.enter_async_context(_peer(directory, kind, "crowd")) for _ in range(PROCESSES)]
            lanes[kind] = _waking(one, peers)
        yield Setup(
            lanes,
            [
                Figure(
                    f"local store: {PROCESSES * CROWD:,} waiters in {PROCESSES} processes at one step / a watched file by hand",
                    1.5,
                    itemgetter("ours"),
                    itemgetter("bare"),
                )
            ],
            most_times=1,
            most_rounds=60,
        )


def _waking(one: Counter, peers: list[Process]) -> Lane:
    steps = [0]

    async def told(word: bytes) -> None:
        for peer in peers:
            assert peer.stdout is not None
            assert await peer.stdout.readexactly(1) == word

    async def lane(times: int) -> float:
        secs = 0.0
        for _ in range(times):
            steps[0] += 1
            for peer in peers:
                assert peer.stdin is not None
                peer.stdin.write(b"%d\n" % steps[0])
            await told(b"p")
            began = time.perf_counter()
            await one.advance()
            await told(b"w")
            secs += time.perf_counter() - began
        return secs

    return lane


@asynccontextmanager
async def advance_on_disk(_: Counts) -> AsyncIterator[Setup]:
    """Advancing while nobody is due."""
    async with contextlib.AsyncExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for kind in KINDS:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            one = counter(directory, kind)
            stack.push_async_callback(one.aclose)
            await one.wait_for(0)
            lanes[kind] = repeated(one.advance)
        yield Setup(
            lanes,
            [Figure("local store: advance, nobody due / lock, read, write by hand", 3.0, itemgetter("ours"), itemgetter("bare"))],
        )


LOCAL_ROWS: dict[str, Row] = {"local wake": wake_over_processes, "local crowd": wake_crowds, "local advance": advance_on_disk}


async def _all(counts: Counts) -> None:
    print(header())
    for name, row in LOCAL_ROWS.items():
        for result in await measure(name, row, counts):
            print(line(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    asyncio.run(_all(Counts(rounds=parser.parse_args().rounds)))
