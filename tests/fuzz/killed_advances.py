"""Kill a process at each line of the stores that its life runs through.

    python -m tests.fuzz.killed_advances --engine local

The process opens its store, publishes, advances, leads and closes, and acknowledges each advance.
It is killed at the first line of this, then at the second, until it survives. Each time the step
has every acknowledged advance, and at most the interrupted one besides; a wait of another process
ends, with the step or with the error of its dead publisher; and another process may lead.
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

from aiohooks.errors import PublisherFailedError, PublisherFinishedError
from aiohooks.stores import open_step_store
from tests.fuzz._harness import command, log_disabled
from tests.support.store_servers import PROGRAMS, running
from tests.support.waiting import HANG_SECS

RUN = "killed"
ADVANCES = 3
"""How many advances a process makes that is not killed; others wait for as many."""


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


def live(url: str, options: dict[str, Any], line: int, results: Connection) -> None:
    """Use a run, but for a kill at the line; send the step after each advance."""

    async def use_store() -> None:
        async with open_step_store(url, run=RUN, **options) as store:
            with store.publisher("killed"):
                await store.flush()
                for _ in range(ADVANCES - 1):
                    results.send(await store.advance())
                async with store.lead():
                    results.send(await store.advance())

    killer = LineKiller(line)
    threading.settrace(killer)
    sys.settrace(killer)
    asyncio.run(use_store())


def run_process(url: str, options: dict[str, Any], line: int) -> tuple[int, list[int]]:
    """Run a process that may be killed; return its exit code, and the steps that it has
    acknowledged.
    """
    context = multiprocessing.get_context("forkserver")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=live, args=(url, options, line, sender))
    process.start()
    sender.close()
    acknowledged: list[int] = []
    with contextlib.suppress(EOFError):
        while True:
            acknowledged.append(results.recv())
    process.join()
    assert process.exitcode is not None
    return process.exitcode, acknowledged


async def kill_at(url: str, options: dict[str, Any], line: int) -> tuple[int, str]:
    """Kill a process at a line; return its exit code, and the problem."""
    async with open_step_store(url, run=RUN, **options) as store:
        before = (await store.value()).step
        wait = asyncio.ensure_future(store.wait_for(before + ADVANCES))
        exit_code, acknowledged = await asyncio.to_thread(run_process, url, options, line)
        step = (await store.value()).step
        count = len(acknowledged)
        if not before + count <= step <= before + count + 1:
            return exit_code, f"step {step} after {before} and {acknowledged}"
        async with store.lead():
            if not count:  # perhaps no process knew that it publishes
                await store.advance(ADVANCES)
        await asyncio.wait([wait], timeout=HANG_SECS)
        if not wait.done():
            return exit_code, f"the wait for {before + ADVANCES} hangs"
        error = wait.exception()
        is_right = error is None or isinstance(
            error, (PublisherFailedError, PublisherFinishedError)
        )
        return exit_code, "" if is_right else f"the wait ended with {error!r}"


async def kill_at_lines(url: str, options: dict[str, Any], every: int) -> tuple[int, list[str]]:
    """Kill at one of `every` lines; return the number of kills, and the problems."""
    problems: list[str] = []
    kills = 0
    while True:
        line = 1 + kills * every
        exit_code, problem = await kill_at(url, options, line)
        if problem:
            problems.append(f"line {line}: {problem}")
        if exit_code == 0 or problem:
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
    print(f"{kills} kills on {given.engine}, {len(problems)} problems")
    return int(bool(problems) or not kills)


if __name__ == "__main__":
    sys.exit(main())
