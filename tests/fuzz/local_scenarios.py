"""Things that happen between real processes on the local store; tests run each as a process of its own.

    python -m tests.fuzz.local_scenarios NAME

A process with threads should not fork, and that of the tests has some: hence this one. It prints nothing if all is well.
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
from aiohooks.stores import open_step_store
from aiohooks.stores.local import LocalStepStore
from tests.fuzz._local_crew import Crew
from tests.fuzz.faults_local import check_nothing_left

TIMES = 5_000
CROWD = 250


def parallel_advances(directory: Path) -> None:
    """Four processes that advance at the same time lose nothing and count nothing twice."""
    crew = [Crew(directory, "run") for _ in range(4)]
    orders = [one.order("advance_together", callers=5, times=TIMES // 5) for one in crew]
    for one, order in zip(crew, orders, strict=True):
        assert one.answer(order, 120)["result"] == TIMES
    assert crew[0].do("value")["result"] == 4 * TIMES
    _end(crew)


def crowds(directory: Path) -> None:
    """A thousand waiters in four processes, at many steps, are all woken by the steps of a fifth."""
    crew = [Crew(directory, "run") for _ in range(4)]
    waits = [(one, step, one.order("wait", step=step)) for one in crew for step in range(1, CROWD + 1)]
    for one in crew:
        assert one.do("parked")["result"] == CROWD
    advancer = Crew(directory, "run")
    advancer.do("advance", times=CROWD)
    for one, step, order in waits:
        assert one.answer(order)["result"] >= step
    _end([*crew, advancer])


def fork_with_a_store(directory: Path) -> None:
    """A store that came into a child by a fork does not work there; and the child does not keep the parent's death a secret."""
    waiter = Crew(directory, "run")
    told, tell = os.pipe()
    middle = os.fork()
    if middle == 0:
        with contextlib.suppress(BaseException):
            asyncio.run(_fork_inside(directory, tell))
        os._exit(9)
    os.close(tell)
    assert _line(told) == "leads"
    wait = waiter.order("wait", step=1_000_000)
    waiter.do("parked")
    pid, said = sorted((_line(told), _line(told)))
    child = int(pid)
    try:
        assert said.startswith("WrongLoopError: <LocalStepStore 'run'"), said
        assert "came here by a fork" in said
    finally:
        os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)
        # The child still lives.
        answer = waiter.answer(wait)
        os.kill(child, signal.SIGKILL)
    assert answer["error"] == "PublisherFailedError"
    _end([waiter])


async def _fork_inside(directory: Path, tell: int) -> None:
    store = LocalStepStore(directory, run="run")
    with store.publisher("parent"):
        async with store.lead():
            await store.flush()
            os.write(tell, b"leads\n")
            child = os.fork()
            if child == 0:
                try:
                    store.latest  # noqa: B018 - may be read anywhere
                    store.publisher("child")
                except ah.errors.WrongLoopError as error:
                    os.write(tell, f"WrongLoopError: {error}\n".encode())
                select.select([], [], [], None)  # lives until it is killed
            os.write(tell, b"%d\n" % child)
            await asyncio.get_running_loop().create_future()


def spawned_by_url(directory: Path) -> None:
    """A store is not pickled into another process: that one opens its own by the URL."""

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
    """A store is closed, and its process ends, also while a process that was stopped has the lock."""
    holder, other = Crew(directory, "run"), Crew(directory, "run")
    other.do("value")
    holder.do("hold")
    holder.send(signal.SIGSTOP)
    holder.stopped()
    other.order("advance", times=1)
    other.do("ping")
    other.order("quit")
    assert other.reap() == 0
    holder.send(signal.SIGCONT)
    holder.order("quit")
    assert holder.reap() == 0
    last = Crew(directory, "run")
    assert last.do("value")["result"] == 0
    _end([last])


def without_inotify(directory: Path) -> None:
    """Where the user has no inotify left, named pipes tell, and a death is found by looking."""
    new_user_namespace = 0x10000000
    assert ctypes.CDLL(None).unshare(new_user_namespace) == 0, "unshare"  # os.unshare came with Python 3.12
    Path("/proc/sys/user/max_inotify_instances").write_text("0")
    waiter, chief, other = (Crew(directory, "run") for _ in range(3))
    chief.do("lead")
    wait = waiter.order("wait", step=5)
    waiter.do("parked")
    other.do("advance", times=6)
    assert waiter.answer(wait)["result"] >= 5
    wait = waiter.order("wait", step=50)
    waiter.do("parked")
    assert (directory / "run" / "bells").iterdir()
    chief.send(signal.SIGKILL)
    chief.reap()
    assert waiter.answer(wait)["error"] == "PublisherFailedError"
    _end([waiter, other])


def _end(crew: list[Crew]) -> None:
    for one in crew:
        one.order("quit")
        assert one.reap() == 0


def _line(fd: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([fd], [], [], 30)[0], "stuck"
        byte = os.read(fd, 1)
        assert byte, line
        line += byte
    return line.decode().rstrip()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        parallel_advances,
        crowds,
        fork_with_a_store,
        spawned_by_url,
        closing_with_the_lock_taken,
        without_inotify,
    )
}


def main(name: str) -> int:
    """Runs one."""
    with tempfile.TemporaryDirectory() as directory:
        SCENARIOS[name](Path(directory))
        check_nothing_left(Path(directory))
        # Nobody has the lock either.
        fd = os.open(Path(directory, "run"), os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
