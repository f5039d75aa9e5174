"""The local store: the checks of every step store, and its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import select
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.stores import SharedStepStore, open_step_store
from aiohooks.stores._protocol import Snapshot
from aiohooks.testing import ManualClock, check_step_store, step_store_checks
from tests.support.processes import run_python
from tests.support.stores import directory_of, engine_of, local_store, locked
from tests.support.waiting import advance_clock, parked, ticks, until_true

pytestmark = pytest.mark.every_python


@pytest.mark.parametrize("check", step_store_checks())
async def test_conformance(tmp_path: Path, check: str) -> None:
    """The checks of every step store hold, and no file of a process is left over."""
    await check_step_store(lambda run: local_store(tmp_path, run=run), check)
    assert [
        name for run in os.listdir(tmp_path) for name in os.listdir(tmp_path / run / "alive")
    ] == []


async def test_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`local:///directory` names the directory; without one it is the default."""
    async with open_step_store(f"local://{tmp_path}", run="r", on_lost="keep") as store:
        assert isinstance(store, SharedStepStore)
        assert directory_of(store) == tmp_path / "r"
        assert await store.advance() == 1
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    default = open_step_store("local://")
    assert isinstance(default, SharedStepStore)
    assert directory_of(default) == tmp_path / "aiohooks" / "default"


async def test_the_step_outlives_all_processes(tmp_path: Path) -> None:
    """The step, its epoch and the number of terms are there when the run is opened again, until it
    is forgotten.
    """
    async with local_store(tmp_path) as store:
        await store.advance(7)
        await store.reset(3)
        async with store.lead() as term:
            assert term.number == 1
    async with local_store(tmp_path) as store:
        assert await store.value() == ah.stores.Position(2, 3)
        async with store.lead() as term:
            assert term.number == 2
        await store.forget()
    assert os.listdir(tmp_path) == []
    async with local_store(tmp_path) as store:
        assert await store.value() == ah.stores.Position(1, 0)


async def test_closing_waits_for_a_process_that_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that close the database at the same time would leave SQLite's files behind."""
    async with local_store(tmp_path) as store, local_store(tmp_path) as other:
        await store.advance()
        await other.value()
        names = [directory_of(store) / "run.db-wal", directory_of(store) / "run.db-shm"]
        holder = os.open(directory_of(store) / "waiting", os.O_RDWR)
        fcntl.flock(holder, fcntl.LOCK_EX)
        turns = list[bool]()

        def release_later() -> None:
            """Let the process that has the lock run: at its tenth turn it releases the lock."""
            turns.append(all(name.exists() for name in names))
            if len(turns) == 10:
                os.close(holder)

        monkeypatch.setattr(os, "sched_yield", release_later)
        for opened in (other, store):
            database = engine_of(opened)._database
            assert database is not None
            database.close()
    assert turns == [True] * 10
    assert not any(name.exists() for name in names)


async def test_an_advance_in_another_event_loop_is_rejected(tmp_path: Path) -> None:
    """Before it has any effect, also here, where an advance usually needs no wait."""
    async with local_store(tmp_path) as store:
        await store.advance()

        def advance_in_another_loop() -> None:
            with pytest.raises(ah.errors.WrongLoopError, match="another event loop"):
                asyncio.run(store.advance())

        await asyncio.to_thread(advance_in_another_loop)
        assert store.latest.step == 1


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no file more in the block."""
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.dup(0))
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in opened:
            os.close(fd)


async def test_used_up_descriptors_end_no_wait(tmp_path: Path) -> None:
    """A death that cannot be seen because too many files are open is seen later: other waits
    continue, and new ones begin.
    """
    with ManualClock() as clock:
        async with local_store(tmp_path) as store, local_store(tmp_path) as other:
            killed = local_store(tmp_path)
            killed.publisher("trainer")
            await killed.flush()
            await until_true(lambda: other.statistics().publishers)
            run = engine_of(killed)._database
            assert run is not None
            run.close()  # as the kernel does at the death of a process
            with no_descriptors():
                waiting = await parked(other.wait_for(3))
                await ticks(20)
                assert other.statistics().publishers == ("trainer",)
                await store.advance(3)
                assert await waiting == 3
            clock.advance(1.0)
            await until_true(lambda: not other.statistics().publishers)
            engine_of(killed)._database = None
            await killed.aclose()


async def test_a_full_disk_ends_no_wait(tmp_path: Path) -> None:
    """Writes raise an error with the directory while there is no room; waits continue."""
    async with local_store(tmp_path) as store, local_store(tmp_path) as other:
        waiting = await parked(other.wait_for(2))
        await store.advance()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(ah.errors.StoreUnavailableError, match=f"{tmp_path}.* make room"):
                await store.advance()
            assert not waiting.done()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert await store.advance() == await waiting == 2


async def test_waits_outlast_an_error_of_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the waits continue: the run is read again until that succeeds."""

    def read(run: object) -> Snapshot:
        error = sqlite3.OperationalError("attempt to write a readonly database")
        error.sqlite_errorcode = sqlite3.SQLITE_READONLY
        raise error

    async with local_store(tmp_path) as store:
        waiting = await parked(store.wait_for(3))
        engine_of(store).link.tasks.spawn(engine_of(store)._report(read), "reading")
        await until_true(lambda: "the waits continue" in caplog.text)
        assert "a readonly database; make room on the disk" in caplog.text
        await store.advance(3)
        assert await waiting == 3


@pytest.mark.parametrize("moved", ["base/default", "base"])
async def test_a_run_directory_that_is_moved(tmp_path: Path, moved: str) -> None:
    """Whoever waits there, or uses the store later, is notified: another store of the run would
    begin anew.
    """
    async with local_store(tmp_path / "base") as store:
        await store.advance()
        waiting = await parked(store.wait_for(3))
        async with local_store(tmp_path / "base") as chief, chief.lead():
            leading = asyncio.ensure_future(store.lead().__aenter__())
            await until_true(lambda: store._waits.vacancies)
            (tmp_path / moved).rename(tmp_path / "elsewhere")
            for wait in (waiting, leading):
                with pytest.raises(
                    ah.errors.StoreUnavailableError,
                    match=r"its directory .* was moved: close this store",
                ):
                    await wait
        for use in (store.advance, store.value, store.forget):
            with pytest.raises(ah.errors.StoreUnavailableError, match="was moved"):
                await use()
    assert list((tmp_path / "elsewhere").rglob("run.db")) != []


async def test_forgetting_keeps_foreign_files(tmp_path: Path) -> None:
    """A file that is not the store's own is not deleted with the run, and the error names the
    directory.
    """
    async with local_store(tmp_path) as store:
        (directory_of(store) / "notes.txt").write_text("mine")
        with pytest.raises(ah.errors.StoreUnavailableError, match="default"):
            await store.forget()
    assert (directory_of(store) / "notes.txt").read_text() == "mine"


async def test_an_advance_without_due_waiters_wakes_no_process(tmp_path: Path) -> None:
    """A process that waits gets no event until its own step is reached."""
    async with local_store(tmp_path) as store, local_store(tmp_path) as other:
        wait = await parked(other.wait_for(10))
        inotify = engine_of(other)._inotify
        assert inotify is not None
        for _ in range(9):
            await store.advance()
        assert select.select([inotify.fd], [], [], 0)[0] == []
        assert other.latest.step == 0
        await store.advance()
        assert select.select([inotify.fd], [], [], 0)[0] == [inotify.fd]
        assert await wait == 10
        wait = await parked(other.wait_for(20))
        wait.cancel()
        await ticks()
        await store.advance(10)
        assert select.select([inotify.fd], [], [], 0)[0] == []


async def test_a_process_that_comes_later_removes_no_one(tmp_path: Path) -> None:
    """Who opens the run looks which processes are alive: their publishers and their chief stay; in
    this process or another.
    """
    program = f"""
import asyncio
from aiohooks.stores import SharedStepStore, open_step_store
from aiohooks.stores._protocol import Snapshot
from tests.support.stores import directory_of, local_store

async def main():
    async with open_step_store("local://{tmp_path}") as store:
        print(*store.statistics().publishers)

asyncio.run(main())
"""
    async with local_store(tmp_path) as store, store.lead():
        with store.publisher("trainer"):
            await store.flush()
            async with local_store(tmp_path) as late:
                assert late.statistics().publishers == ("trainer",)
            assert (await asyncio.to_thread(run_python, "-c", program)).stdout == "trainer\n"


async def test_an_old_snapshot_is_ignored(tmp_path: Path) -> None:
    """A snapshot that a thread has read may arrive after a newer one."""
    async with local_store(tmp_path) as store, local_store(tmp_path) as other:
        old = await store._members.read()
        with other.publisher("one"):
            await other.flush()
            await store.value()
            store._members.observe(old)
            assert store.statistics().publishers == ("one",)


async def test_an_advance_cancelled_too_late_still_wakes(tmp_path: Path) -> None:
    """A thread that waited for the lock has advanced already: waiters in this process are woken."""
    async with local_store(tmp_path) as store, local_store(tmp_path) as other:
        await other.value()
        with locked(other):
            wait = asyncio.ensure_future(store.wait_for(1))
            advance = await parked(store.advance(), 5)
            assert not advance.done()
        while (await other.value()).step < 1:  # does not suspend
            os.sched_yield()
        advance.cancel()
        assert await wait == 1
        with pytest.raises(asyncio.CancelledError):
            await advance


async def test_a_long_wait_for_the_lock_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that is suspended may keep the lock: the other one logs that it waits for it."""
    with ManualClock() as clock:
        async with local_store(tmp_path) as store:
            with locked(store):
                write = await parked(store.raise_to(5))
                await ticks(20)
                await advance_clock(clock, 1)
                directory = directory_of(store)
                assert caplog.messages == [
                    f"a caller has waited 1 s for the lock of {directory}, which a process has"
                ]
            assert await write == 5


async def test_waits_and_reads_need_no_lock(tmp_path: Path) -> None:
    """While another process has locked the database, the position is read and waits begin; writes
    follow in their order.
    """
    async with local_store(tmp_path) as store:
        with locked(store):
            writes = [await parked(write) for write in (store.raise_to(5), store.advance())]
            wait = await parked(store.wait_for(6))
            assert (await store.value()).step == 0
        assert [await write for write in writes] == [5, 6]
        assert await wait == 6
