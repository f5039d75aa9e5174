"""The local store's files: where they are, who may use them, what is in them."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import select
import stat
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.stores import open_step_store
from aiohooks.stores._protocol import Position
from aiohooks.stores.local import LocalStepStore, _directory
from aiohooks.stores.local._directory import default_directory, remote_kind, run_name
from aiohooks.stores.local._files import NOBODY, SIZE, Record, asked, bells, pack, packed_slot, unpack
from aiohooks.testing import ManualClock

pytestmark = pytest.mark.every_python

# -- where


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the runtime directory of the login, if that is there and ours, and in the one for temporary files otherwise."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_directory() == tmp_path / "aiohooks"
    for other in ("relative", str(tmp_path / "missing"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", other)
        assert default_directory().name == f"aiohooks-{os.geteuid()}"


async def test_only_the_user_may_look(tmp_path: Path) -> None:
    """Directories and files are made for the user alone, whatever the umask."""
    old = os.umask(0)
    try:
        async with LocalStepStore(tmp_path / "new" / "runs", run="a") as store:
            await store.flush()
            made = [store.directory, *store.directory.rglob("*")]
    finally:
        os.umask(old)
    assert [path for path in made if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077] == []


async def test_a_default_directory_that_is_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have made it, in a place where all may write."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "aiohooks").mkdir()
    (tmp_path / "aiohooks").chmod(0o770)
    with pytest.raises(ah.errors.InvalidArgumentError, match=r"is open to other users \(mode 770\)"):
        await LocalStepStore().value()


@pytest.mark.parametrize("name", ["", "alive", "bells"])
async def test_a_run_that_others_may_write_to_is_refused(tmp_path: Path, name: str) -> None:
    """Neither its directory nor those in it may be."""
    async with LocalStepStore(tmp_path) as store:
        await store.advance()
    (store.directory / name).chmod(0o777)
    with pytest.raises(ah.errors.InvalidArgumentError, match="is open to other users"):
        await LocalStepStore(tmp_path).value()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """That of a run, and the one above it, must belong to the user, or the latter to root."""
    async with LocalStepStore(tmp_path / "runs") as store:
        await store.advance()
    os.chown(store.directory, 12345, 12345)
    with pytest.raises(ah.errors.InvalidArgumentError, match="default belongs to user 12345"):
        await LocalStepStore(tmp_path / "runs").value()
    os.chown(tmp_path / "runs", 12345, 12345)
    with pytest.raises(ah.errors.InvalidArgumentError, match="runs belongs to user 12345"):
        await LocalStepStore(tmp_path / "runs").value()


async def test_a_link_in_place_of_a_run_is_refused(tmp_path: Path) -> None:
    """It could lead anywhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "default").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ah.errors.InvalidArgumentError, match="default is not a directory"):
        await LocalStepStore(tmp_path).value()
    assert not any((tmp_path / "elsewhere").iterdir())


async def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A path that will not do is refused, with what the system says of it and what to give instead."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ah.errors.StoreRefusedError, match=rf"{path} cannot be made: .*; give one that user \d+ may"):
            await LocalStepStore(path).value()


async def test_a_run_that_is_deleted_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made in its place, which would be open to others: who opens it tries again."""
    monkeypatch.setattr(_directory, "_check_ours", lambda path, **_: path.rmdir())
    with pytest.raises(ah.errors.StoreUnavailableError, match=r"cannot be used: .*No such file") as caught:
        await LocalStepStore(tmp_path).value()
    assert not isinstance(caught.value, ah.errors.StoreRefusedError)
    assert not (tmp_path / "default").exists()


async def test_a_full_disk_may_have_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no refusal, so a session tries again."""

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ah.errors.StoreUnavailableError, match=r"cannot be used: .*No space left") as caught:
        await LocalStepStore(tmp_path / "runs").value()
    assert not isinstance(caught.value, ah.errors.StoreRefusedError)


async def test_a_remote_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its changes are not heard of; the error names it, and what to use."""
    assert remote_kind(tmp_path) is None

    class Everything(dict[int, str]):
        def get(self, key: int, default: object = None) -> str:
            return "NFS"

    monkeypatch.setattr(_directory, "_REMOTE", Everything())
    with pytest.raises(ah.errors.InvalidArgumentError, match=r"is on NFS, which may be shared with other machines.*redis://"):
        await LocalStepStore(tmp_path).value()


@pytest.mark.parametrize("run", ["../up", "..", ".", "/etc/passwd", "a/b", "a b\u00fc", ".hidden", "%2F"])
async def test_no_run_leads_out_of_its_directory(tmp_path: Path, run: str) -> None:
    """Whatever a run is called, its files are in a directory of its own."""
    async with LocalStepStore(tmp_path / "runs", run=run) as store:
        await store.advance()
    assert os.listdir(tmp_path) == ["runs"]
    assert os.listdir(tmp_path / "runs") == [run_name(run)] == [store.directory.name]


def test_no_two_runs_have_the_same_name() -> None:
    """Quoting keeps different names different, and a name that gets too long is refused."""
    names = ["a", "a/b", "a%2Fb", "a%252Fb", ".a", "%2Ea", "A", "a b", "a+b"]
    assert len({run_name(name) for name in names}) == len(names)
    with pytest.raises(ah.errors.InvalidArgumentError, match="makes a file name of 264 characters"):
        LocalStepStore(run="\u00fc" * 44)


@pytest.mark.parametrize("directory", ["", 3, b""])
def test_bad_directories(directory: object) -> None:
    """What is no path is refused at once."""
    with pytest.raises(ah.errors.InvalidArgumentError, match="give the path of a directory"):
        LocalStepStore(directory)  # type: ignore[arg-type]


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


# -- what lasts


async def test_the_step_outlives_all_processes(tmp_path: Path) -> None:
    """It is there when the run is opened again, with its epoch and the terms it has had, until it is forgotten."""
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
    """They would wait for ever; all that they do then says why."""
    async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
        wait = asyncio.ensure_future(other.wait_for(5))
        await asyncio.sleep(0)
        await store.forget()
        with pytest.raises(ah.errors.StoreUnavailableError, match="was deleted"):
            await wait
        for call in (other.advance, other.value):
            with pytest.raises(ah.errors.StoreUnavailableError, match="was deleted"):
                await call()


async def test_what_else_lies_there_is_not_deleted(tmp_path: Path) -> None:
    """Somebody may have put it there by mistake."""
    async with LocalStepStore(tmp_path) as store:
        (store.directory / "notes.txt").write_text("mine")
        with pytest.raises(ah.errors.StoreUnavailableError, match="default"):
            await store.forget()
    assert (store.directory / "notes.txt").read_text() == "mine"


# -- who is disturbed, and how often


async def test_an_advance_that_nobody_waits_for_disturbs_nobody(tmp_path: Path) -> None:
    """The kernel has nothing to tell a waiter until its own step is reached."""
    async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
        wait = asyncio.ensure_future(other.wait_for(10))
        await asyncio.sleep(0)
        ears = other._ears
        assert ears is not None
        for _ in range(9):
            await store.advance()
        assert select.select([ears.fd], [], [], 0)[0] == []
        assert other.latest.step == 0
        await store.advance()
        assert select.select([ears.fd], [], [], 0)[0] == [ears.fd]
        assert await wait == 10


async def test_no_timer_runs_while_waiting(tmp_path: Path) -> None:
    """Nothing is polled or renewed: with a clock that stands still, a step and a publisher's end come through all the same."""
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
                    assert store._next_look is store._members._renewal is other._members._renewal is None
            with pytest.raises(ah.errors.PublisherFinishedError, match="one finished at step 1"):
                await never


async def test_stale_news_is_not_believed(tmp_path: Path) -> None:
    """What a thread has read may arrive after something newer."""
    async with LocalStepStore(tmp_path) as store, LocalStepStore(tmp_path) as other:
        old = await store._read_run()
        with other.publisher("one"):
            await other.flush()
            await store.value()
            store._observe_snapshot(old)
            assert store.statistics().publishers == ("one",)


async def test_used_up_inotify_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says what is used up, and what that means."""
    from tests.stores.test_local_contract import WithoutInotify

    with caplog.at_level(logging.WARNING, "aiohooks.stores"):
        async with WithoutInotify(tmp_path, run="r") as store:
            assert store._next_look is not None
    (record,) = caplog.records
    assert "run r: the kernel does not tell of changes of files" in record.getMessage()
    assert "fs.inotify.max_user_instances" in record.getMessage()


async def test_an_advance_that_was_cancelled_too_late_wakes_all_the_same(tmp_path: Path) -> None:
    """A thread has done it, after another process gave up the lock; who waits in this process is woken."""
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


# -- records and slots


def test_records() -> None:
    """A record comes back as it was, also from among other bytes; what is not whole is none."""
    record = Record(Position(3, 2**53 - 1), 17, 4)
    data = pack(3, 2**53 - 1, 17, 4)
    assert len(data) == SIZE
    assert unpack(data + b"more") == record
    assert unpack(data[:-1]) is unpack(b"") is unpack(bytes(SIZE)) is None
    for place in range(SIZE):
        assert unpack(data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :]) is None


def test_slots() -> None:
    """Who is due is whoever waits for a step that is passed now, and whoever waits for everything; not this process itself."""
    steps = [NOBODY, 6, 11, 11]  # for nothing, 5, 10, 10
    slots = b"".join(packed_slot(step, bell=step == 6) for step in steps)
    nobody_later = 2**53
    assert [asked(slots, -1, *moved) for moved in [(0, 4), (4, 5), (5, 9), (9, 10), (10, 99), (0, 99)]] == [
        (False, 5),
        (True, 10),
        (False, 10),
        (True, nobody_later),
        (False, nobody_later),
        (True, nobody_later),
    ]
    assert asked(slots, 1, 0, 9) == (False, 10)
    assert bells(slots, -1) == [1]
    assert bells(slots, 1) == []
    everything = packed_slot(1, bell=True) + packed_slot(NOBODY, bell=True)
    assert asked(everything, -1, 7, 8) == (True, 0)
    assert asked(everything, 0, 7, 8) == (False, nobody_later)
    assert bells(everything, -1) == [0, 1]
