"""Scenarios with several processes on the local store; tests run each in a process of its own.

    python -m tests.fuzz.local_scenarios NAME

A process with threads should not fork, and that of the tests has threads: hence this one. It prints nothing on success.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import StoreUnavailableError
from aiohooks.stores import open_step_store
from aiohooks.stores.local import LocalStepStore
from tests.fuzz._local_workers import WorkerProcess
from tests.fuzz.faults_local import check_nothing_left
from tests.support.waiting import HANG_SECS


def fork_with_a_store(directory: Path) -> None:
    """A store inherited by a forked child does not work there, and the child does not hide the parent's death."""
    waiter = WorkerProcess(directory, "run")
    lines, lines_out = os.pipe()
    middle = os.fork()
    if middle == 0:
        with contextlib.suppress(BaseException):
            asyncio.run(_fork_inside(directory, lines_out))
        os._exit(9)
    os.close(lines_out)
    assert _line(lines) == "leads"
    wait = waiter.start("wait", step=1_000_000)
    waiter.call("parked")
    pid, error = sorted((_line(lines), _line(lines)))
    child = int(pid)
    try:
        assert error.startswith("WrongLoopError: <LocalStepStore 'run'"), error
        assert "fork" in error
    finally:
        os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)
        # The child still lives.
        ended = waiter.result(wait)
        os.kill(child, signal.SIGKILL)
    assert ended["error"] == "PublisherFailedError"
    _end([waiter])


async def _fork_inside(directory: Path, lines_out: int) -> None:
    store = LocalStepStore(directory, run="run")
    with store.publisher("parent"):
        async with store.lead():
            await store.flush()
            os.write(lines_out, b"leads\n")
            child = os.fork()
            if child == 0:
                try:
                    store.latest  # noqa: B018 - may be read anywhere
                    store.publisher("child")
                except ah.errors.WrongLoopError as error:
                    os.write(lines_out, f"WrongLoopError: {error}\n".encode())
                select.select([], [], [], None)  # lives until it is killed
            os.write(lines_out, b"%d\n" % child)
            await asyncio.get_running_loop().create_future()


def spawned_by_url(directory: Path) -> None:
    """A store cannot be pickled into another process, which opens its own by the URL."""

    async def main() -> None:
        spawn = multiprocessing.get_context("spawn")
        async with open_step_store(f"local://{directory}", run="run") as store:
            process: Any = spawn.Process(target=print, args=(store,))
            with pytest.raises(TypeError, match="open_step_store"):
                process.start()
            wait = asyncio.ensure_future(store.wait_for(3))
            process = spawn.Process(target=_advance_by_url, args=(f"local://{directory}",))
            process.start()
            assert await wait == 3
            await asyncio.to_thread(process.join)
            assert process.exitcode == 0

    asyncio.run(main())


def _advance_by_url(url: str) -> None:
    async def main() -> None:
        async with open_step_store(url, run="run") as store:
            await store.advance(3)

    asyncio.run(main())


def closing_with_the_lock_taken(directory: Path) -> None:
    """A store can be closed, and its process end, while a stopped process holds the lock."""
    holder, other = WorkerProcess(directory, "run"), WorkerProcess(directory, "run")
    other.call("value")
    holder.call("hold_lock")
    holder.send(signal.SIGSTOP)
    holder.wait_stopped()
    other.start("advance", times=1)
    other.call("ping")
    other.start("quit")
    assert other.reap() == 0
    holder.send(signal.SIGCONT)
    holder.start("quit")
    assert holder.reap() == 0
    last = WorkerProcess(directory, "run")
    assert last.call("value")["result"] == 0
    _end([last])


def killed_as_another_closes(directory: Path) -> None:
    """A process that closes its store removes another that was killed just before: perhaps no other process will."""

    async def main() -> None:
        async with LocalStepStore(directory, run="run"):
            killed.call("advance", times=1)
            killed.send(signal.SIGKILL)
            killed.reap()

    killed = WorkerProcess(directory, "run")
    asyncio.run(main())


def without_inotify(directory: Path) -> None:
    """Where the user has no inotify left, opening the store says which limit to raise; one that is open stays."""
    new_user_namespace = 0x10000000
    assert ctypes.CDLL(None).unshare(new_user_namespace) == 0, "unshare"  # os.unshare came with Python 3.12
    Path("/proc/sys/user/max_inotify_instances").write_text("1")

    async def main() -> None:
        stores = [LocalStepStore(directory, run="run") for _ in range(2)]
        async with stores[0] as store, contextlib.aclosing(stores[1]) as other:
            with pytest.raises(StoreUnavailableError, match=r"raise fs\.inotify\.max_user_instances"):
                await other.advance()
            assert await store.advance() == 1

    asyncio.run(main())


def _end(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.start("quit")
        assert worker.reap() == 0


def _line(fd: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([fd], [], [], HANG_SECS)[0], "stuck"
        byte = os.read(fd, 1)
        assert byte, line
        line += byte
    return line.decode().rstrip()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (fork_with_a_store, spawned_by_url, closing_with_the_lock_taken, killed_as_another_closes, without_inotify)
}


def main(name: str) -> int:
    """Run a scenario."""
    with tempfile.TemporaryDirectory() as directory:
        SCENARIOS[name](Path(directory))
        check_nothing_left(Path(directory))
        # The lock is free too.
        fd = os.open(Path(directory, "run"), os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
