"""The local store with real processes: forked, killed, with the lock taken, without inotify, for a
long time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.stores import StepStore
from tests.fuzz.checkpoints.faults import PAGES, small_tmpfs
from tests.fuzz.store_faults.engines import left_in
from tests.support.store_processes import WorkerProcess, reply_to
from tests.support.stores import local_store

pytestmark = [
    pytest.mark.every_python,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]


@contextlib.asynccontextmanager
async def processes(directory: Path, count: int) -> AsyncIterator[list[WorkerProcess]]:
    """Run processes with the run open; those that live in the end close it, and then nothing of
    them is left there.
    """
    workers = await asyncio.gather(*(WorkerProcess.start() for _ in range(count)))
    try:
        for worker in workers:
            await worker.do("open", url=f"local://{directory}", run="run")
        yield list(workers)
        await asyncio.gather(*(worker.do("close") for worker in workers if worker.alive))
        assert left_in(directory / "run") == ""
    finally:
        await asyncio.gather(*(worker.kill() for worker in workers))


@pytest.mark.sample
async def test_a_forked_store(tmp_path: Path) -> None:
    """A store inherited by a forked child does not work there, and the child does not hide the
    parent's death.
    """
    async with processes(tmp_path, 2) as (waiter, parent):
        await parent.do("lead")
        wait = waiter.order("wait", step=10**6)
        await waiter.do("parked")
        child, error = await parent.do("fork")
        try:
            assert error.startswith("<SharedStepStore 'run'")
            assert "fork" in error
            parent.process.kill()
            assert (await reply_to(wait, "the wait"))["error"] == "PublisherFailedError"
        finally:
            os.kill(child, signal.SIGKILL)
        await parent.ended()


async def test_closing_with_the_lock_taken(tmp_path: Path) -> None:
    """A store can be closed, and its process end, while a stopped process holds the lock; no loop
    is blocked.
    """
    async with processes(tmp_path, 3) as (holder, other, last):
        await holder.do("hold_lock")
        holder.stop()
        other.order("advance")
        await other.do("ready")
        await other.end()
        assert other.process.returncode == 0
        await holder.kill()
        assert await last.do("value") == 0


async def test_killed_as_another_closes(tmp_path: Path) -> None:
    """A process that closes its store removes another that was killed just before: perhaps no other
    process will.
    """
    async with processes(tmp_path, 1) as (killed,), local_store(tmp_path, run="run"):
        await killed.do("advance")
        await killed.kill()


async def test_without_inotify(tmp_path: Path) -> None:
    """Where the user has no inotify left, opening the store says which limit to raise."""
    worker = await WorkerProcess.start()
    try:
        # In a process without other threads.
        if "error" in await reply_to(worker.order("forbid_inotify"), "without inotify"):
            pytest.skip("this system does not let a user be without inotify")
        reply = await reply_to(
            worker.order("open", url=f"local://{tmp_path}", run="run"), "the opening"
        )
        assert reply["error"] == "StoreUnavailableError"
        assert "raise fs.inotify.max_user_instances" in reply["text"]
    finally:
        await worker.kill()


async def advance_to(store: StepStore, step: int) -> None:
    """Advance step by step."""
    while store.latest.step < step:
        await store.advance()


async def test_a_disk_without_room() -> None:
    """On a full disk writes raise an error that names the directory, and no wait ends. With room
    again all writes count: those that raised no error, and no other one.
    """
    with small_tmpfs() as disk:
        async with (
            local_store(disk.path / "runs") as store,
            local_store(disk.path / "runs") as other,
        ):
            disk.fill(0)
            waiting = asyncio.ensure_future(other.wait_for(PAGES**2))
            full_disk = pytest.raises(ah.errors.StoreUnavailableError, match=r"runs.* make room")
            with full_disk:
                await advance_to(store, PAGES**2 - 1)
            step = store.latest.step
            assert not waiting.done()
            disk.fill(PAGES // 2)
            assert (await other.value()).step == step
            await store.advance(PAGES**2 - step)
            assert await waiting == PAGES**2
