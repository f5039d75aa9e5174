"""The local store: the checks of every step store, with and without inotify, and its own."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import select
from pathlib import Path
from typing import ClassVar

import pytest

import aiohooks as ah
from aiohooks.stores import open_step_store
from aiohooks.stores.local import LocalStepStore
from aiohooks.stores.local._notify import InotifyWatcher
from aiohooks.testing import ManualClock, check_step_store, step_store_checks

pytestmark = pytest.mark.every_python


class NoInotify(InotifyWatcher):
    """As where the user has reached the limit."""

    def __init__(self, path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


class WithoutInotify(LocalStepStore):
    """As where inotify is missing, or its limit is reached."""

    _inotify_class: ClassVar[type[InotifyWatcher]] = NoInotify


@pytest.mark.parametrize("check", step_store_checks())
@pytest.mark.parametrize("kind", [LocalStepStore, WithoutInotify])
async def test_conformance(tmp_path: Path, kind: type[LocalStepStore], check: str) -> None:
    """The checks of every step store hold, with inotify and with named pipes, and no file of a process is left over."""
    await check_step_store(lambda run: kind(tmp_path, run=run), check)
    folders = [tmp_path / run / folder for run in os.listdir(tmp_path) for folder in ("alive", "fifos")]
    assert [name for folder in folders for name in os.listdir(folder)] == []


async def test_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`local:///directory` names the directory; without one it is the default."""
    async with open_step_store(f"local://{tmp_path}", run="r", on_lost="keep") as store:
        assert isinstance(store, LocalStepStore)
        assert store.directory == tmp_path / "r"
        assert await store.advance() == 1
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    default = open_step_store("local://")
    assert isinstance(default, LocalStepStore)
    assert default.directory == tmp_path / "aiohooks" / "default"


@pytest.mark.parametrize("directory", ["", 3, b""])
def test_invalid_directories(directory: object) -> None:
    """An argument that is not a path is refused immediately."""
    with pytest.raises(ah.errors.InvalidArgumentError, match="give the path of a directory"):
        LocalStepStore(directory)  # type: ignore[arg-type]


async def test_the_step_outlives_all_processes(tmp_path: Path) -> None:
    """The step, its epoch and the number of terms are there when the run is opened again, until it is forgotten."""
    async with LocalStepStore(tmp_path) as store:
        await store.advance(7)
        await store.reset(3)
        async with store.lead() as term:
            assert term.number == 1
    async with LocalStepStore(tmp_path) as store:
        assert await store.value() == ah.Position(2, 3)
        async with store.lead() as term:
            assert term.number == 2
        await store.forget()
    assert os.listdir(tmp_path) == []
    async with LocalStepStore(tmp_path) as store:
        assert await store.value() == ah.Position(1, 0)


async def test_forgetting_ends_the_waits_of_others(tmp_path: Path) -> None:
    """Waits in other stores end when the run is deleted, and later calls say why."""
    async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
        wait = asyncio.ensure_future(other.wait_for(5))
        await asyncio.sleep(0)
        await store.forget()
        with pytest.raises(ah.errors.StoreUnavailableError, match="was deleted"):
            await wait
        for call in (other.advance, other.value):
            with pytest.raises(ah.errors.StoreUnavailableError, match="was deleted"):
                await call()


async def test_forgetting_keeps_foreign_files(tmp_path: Path) -> None:
    """A file that is not the store's own is not deleted with the run, and the error names the directory."""
    async with LocalStepStore(tmp_path) as store:
        (store.directory / "notes.txt").write_text("mine")
        with pytest.raises(ah.errors.StoreUnavailableError, match="default"):
            await store.forget()
    assert (store.directory / "notes.txt").read_text() == "mine"


async def test_an_advance_without_due_waiters_wakes_no_process(tmp_path: Path) -> None:
    """A process that waits gets no event until its own step is reached."""
    async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
        wait = asyncio.ensure_future(other.wait_for(10))
        await asyncio.sleep(0)
        inotify = other._inotify
        assert inotify is not None
        for _ in range(9):
            await store.advance()
        assert select.select([inotify.fd], [], [], 0)[0] == []
        assert other.latest.step == 0
        await store.advance()
        assert select.select([inotify.fd], [], [], 0)[0] == [inotify.fd]
        assert await wait == 10


async def test_no_timer_runs_while_waiting(tmp_path: Path) -> None:
    """Nothing is polled or renewed: steps and the end of a publisher are notified although the clock does not move."""
    with ManualClock():
        async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
            with other.publisher("one"):
                async with other.lead(ttl=1.0):
                    await other.flush()
                    step = asyncio.ensure_future(store.wait_for(1))
                    never = asyncio.ensure_future(store.wait_for(2))
                    await asyncio.sleep(0)
                    await other.advance()
                    assert await step == 1
                    assert store._poll_timer is store._renewal is other._renewal is None
            with pytest.raises(ah.errors.PublisherFinishedError, match="one finished at step 1"):
                await never


async def test_an_old_snapshot_is_ignored(tmp_path: Path) -> None:
    """A snapshot that a thread has read may arrive after a newer one."""
    async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
        old = await store._read_run()
        with other.publisher("one"):
            await other.flush()
            await store.value()
            store._observe_snapshot(old)
            assert store.statistics().publishers == ("one",)


async def test_missing_inotify_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the limit that was reached."""
    with caplog.at_level(logging.WARNING, "aiohooks.stores"):
        async with WithoutInotify(tmp_path, run="r") as store:
            assert store._poll_timer is not None
    (record,) = caplog.records
    assert "run r: inotify is not available" in record.getMessage()
    assert "fs.inotify.max_user_instances" in record.getMessage()


async def test_an_advance_cancelled_too_late_still_wakes(tmp_path: Path) -> None:
    """A thread that waited for the lock has advanced already: waiters in this process are woken."""
    async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
        await other.value()
        lock = os.open(store.directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait = asyncio.ensure_future(store.wait_for(1))
        advance = asyncio.ensure_future(store.advance())
        await asyncio.sleep(0)
        assert not advance.done()
        os.close(lock)
        while (await other.value()).step < 1:  # does not suspend
            os.sched_yield()
        advance.cancel()
        assert await wait == 1
        with pytest.raises(asyncio.CancelledError):
            await advance
