"""Kill a process at each line of the stores that an advance runs through.

    python -m tests.fuzz.killed_advances --engine local

The process acknowledges an advance, and is killed in the next one: at the first line, then at the
second, until the advance survives. Each time the step has every acknowledged advance, and at most
the interrupted one besides; and a wait of another process ends, with the step or with the error of
its dead publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from aiohooks.errors import PublisherFailedError
from aiohooks.stores import open_step_store
from tests.fuzz._harness import command, log_disabled
from tests.support.store_servers import PROGRAMS, running
from tests.support.waiting import HANG_SECS

RUN = "killed"
WAITED_ADVANCES = 2
"""How many advances the other process waits for; a process that is killed makes 1 or 2."""


class LineKiller:
    """A trace function that kills this process at a line of the stores."""

    def __init__(self, line: int) -> None:
        self._remaining = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> LineKiller | None:
        if f"{os.sep}stores{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self._remaining -= 1
            if not self._remaining:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def advance_twice(url: str, options: dict[str, Any], line: int, results: Connection) -> None:
    """Advance a run, and once more, but for a kill at the line; send the step after each."""

    async def advance() -> None:
        async with open_step_store(url, run=RUN, **options) as store:
            with store.publisher("killed"):
                await store.flush()
                results.send(await store.advance())
                killer = LineKiller(line)
                threading.settrace(killer)
                sys.settrace(killer)
                step = await store.advance()
                sys.settrace(None)
                results.send(step)

    asyncio.run(advance())


def run_process(url: str, options: dict[str, Any], line: int) -> list[int]:
    """Run a process that advances twice; return the steps that it has acknowledged."""
    context = multiprocessing.get_context("forkserver")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=advance_twice, args=(url, options, line, sender))
    process.start()
    sender.close()
    acknowledged: list[int] = []
    with contextlib.suppress(EOFError):
        while True:
            acknowledged.append(results.recv())
    process.join()
    return acknowledged


async def kill_at(url: str, options: dict[str, Any], line: int) -> tuple[int, str]:
    """Kill a process at a line; return the number of acknowledged advances, and the problem."""
    async with open_step_store(url, run=RUN, **options) as store:
        before = (await store.value()).step
        wait = asyncio.ensure_future(store.wait_for(before + WAITED_ADVANCES))
        acknowledged = await asyncio.to_thread(run_process, url, options, line)
        step = (await store.value()).step
        count = len(acknowledged)
        if not before + count <= step <= before + count + 1:
            return count, f"step {step} after {before} and {acknowledged}"
        await asyncio.wait([wait], timeout=HANG_SECS)
        if not wait.done():
            return count, f"the wait for {before + WAITED_ADVANCES} hangs"
        error = wait.exception()
        if error is None or isinstance(error, PublisherFailedError):
            return count, ""
        return count, f"the wait ended with {error!r}"


async def kill_at_lines(url: str, options: dict[str, Any], every: int) -> tuple[int, list[str]]:
    """Kill at one of `every` lines; return the number of kills, and the problems."""
    problems: list[str] = []
    kills = 0
    while True:
        line = 1 + kills * every
        count, problem = await kill_at(url, options, line)
        if problem:
            problems.append(f"line {line}: {problem}")
        if count == WAITED_ADVANCES or problem:
            return kills, problems
        kills += 1


@contextlib.contextmanager
def engine_of(name: str, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the URL of an engine, and the options of its stores."""
    if name == "local":
        yield f"local://{directory}", {}
        return
    with running(name, directory, keeps=False) as server:
        yield server.url, {"lease_secs": 0.5}


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command("killed_advances", __doc__)
    parser.add_argument("--engine", choices=["local", *PROGRAMS], required=True)
    parser.add_argument("--every", type=int, default=1, help="kill at each such line (default 1)")
    given = parser.parse_args(arguments)
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    with (
        log_disabled(),
        tempfile.TemporaryDirectory() as directory,
        engine_of(given.engine, Path(directory)) as (url, options),
    ):
        kills, problems = asyncio.run(kill_at_lines(url, options, given.every))
    print(*problems, sep="\n")
    print(f"{kills} kills in an advance on {given.engine}, {len(problems)} problems")
    return int(bool(problems) or not kills)


if __name__ == "__main__":
    sys.exit(main())
