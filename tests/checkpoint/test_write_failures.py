"""Whatever the system refuses at whatever moment: a typed error, the earlier checkpoints intact, nothing left behind."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from aiohooks.checkpoint import KeepNewest
from aiohooks.checkpoint.saver import CheckpointDirectory
from aiohooks.errors import CheckpointError, CorruptCheckpointError
from tests.support.checkpoint_files import WatchedFs, directory, names, same, saved, saver_over, state_of

T = TypeVar("T")


def every_operation(**options: Any) -> Iterator[WatchedFs]:
    """One `os` after the other of which the first, the second, ... operation fails, until the last one was reached."""
    for number in itertools.count(1):
        fs = WatchedFs(number, **options)
        yield fs
        if fs.failed is None:
            assert number > 10
            return


def good_steps(path: Path) -> list[int]:
    """The steps that verify, the newest first, as another process sees them."""
    found = directory(path, read_only=True).verify()
    assert all(each.reason is None for each in found)
    return [each.name.step for each in found]


def outcome(call: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    """What a call returns, or the error that it raises; of another kind than a CheckpointError it may not be."""
    try:
        return call(), None
    except CheckpointError as error:
        return None, error


# Where an answer says nothing about what was saved: giving up the lock or the look at what was read, and what comes after the
# new checkpoint is durable. All else must be an error.
QUIET = {"close", "pwrite", "ftruncate", "rename", "fsync", "unlink", "rmdir", "listdir", "open", "fstat", "read"}
# The directory is there already, which is what this one answers then in any case.
QUIET_WHEN_DONE = QUIET | {"mkdir"}


@pytest.mark.parametrize(
    ("error", "done"),
    [(errno.ENOSPC, False), (errno.EMFILE, False), (errno.EIO, True)],
    ids=["disk full", "too many files", "done, and an error after it"],
)
def test_a_save_fails_whole_or_not_at_all_at_every_operation(tmp_path: Path, error: int, done: bool) -> None:
    """An error is a CheckpointError with its errno and leaves the directory as it was; without one the new one is there."""
    refused = 0
    for number, fs in enumerate(every_operation(error=error, done=done)):
        path = tmp_path / str(number)
        before = saved(path, 1, 2)
        one = directory(path, fs, KeepNewest(2))
        _, refusal = outcome(lambda: one.save(state_of(3), 3, {}))  # noqa: B023 - called at once
        one.close()
        if refusal is not None:
            assert refusal.errno == error
            assert names(path) == [each.name for each in before]
            assert good_steps(path) == [2, 1]
            refused += 1
        else:
            assert fs.failed is None or fs.failed in (QUIET_WHEN_DONE if done else QUIET)
            assert good_steps(path) in ([3, 2], [3, 2, 1])
        assert fs.opened == set()
        # The next save tidies up whatever the failing of the tidying has left.
        one = directory(path, keep=KeepNewest(2))
        one.save(state_of(4), 4, {})
        one.close()
        assert len(names(path)) == 2
    assert refused > 15


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE], ids=errno.errorcode.get)
def test_a_restore_never_takes_its_own_trouble_for_damage(tmp_path: Path, error: int) -> None:
    """What the system refuses this process says nothing about a checkpoint: none is set aside, no older one is taken."""
    for number, fs in enumerate(every_operation(error=error)):
        path = tmp_path / str(number)
        before = saved(path, 1, 2)
        one = directory(path, fs)
        restored, refusal = outcome(lambda: one.restore(None))  # noqa: B023 - called at once
        one.close()
        if refusal is not None:
            assert refusal.errno == error
            assert not isinstance(refusal, CorruptCheckpointError)
        else:
            assert restored is not None
            assert same(restored.state, state_of(2))
        assert names(path) == [each.name for each in before]
        assert fs.opened == set()


def test_a_restore_steps_over_what_the_disk_does_not_give_back(tmp_path: Path) -> None:
    """EIO while a file is read is damage; everywhere else it is an error, and no checkpoint is lost."""
    stepped_back = 0
    for number, fs in enumerate(every_operation(error=errno.EIO)):
        path = tmp_path / str(number)
        saved(path, 1, 2)
        one = directory(path, fs)
        restored, refusal = outcome(lambda: one.restore(None))  # noqa: B023 - called at once
        one.close()
        if refusal is not None:
            assert refusal.errno == errno.EIO
        else:
            assert restored is not None
            stepped_back += restored.checkpoint.step == 1
        assert len(names(path)) == 2
        assert fs.opened == set()
    assert stepped_back >= 6


def test_the_trouble_of_a_failing_set_aside_keeps_nobody_from_restoring(tmp_path: Path) -> None:
    """With a damaged newest one, any single failure leaves a typed error or the older one; nothing is removed."""
    for number, fs in enumerate(every_operation(error=errno.EROFS)):
        path = tmp_path / str(number)
        newest = saved(path, 1, 2)[1]
        (newest / "state.msgpack").write_bytes(b"")
        one = directory(path, fs)
        restored, refusal = outcome(lambda: one.restore(None))  # noqa: B023 - called at once
        one.close()
        if refusal is not None:
            assert refusal.errno == errno.EROFS
        else:
            assert restored is not None
            assert restored.checkpoint.step == 1
        assert len(names(path)) == 2
        assert fs.opened == set()


class Slow(WatchedFs):
    """Moves one byte or two at a time, and is interrupted before each."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def write(self, fd: int, data: memoryview) -> int:
        self.turn += 1
        if self.turn % 2:
            raise InterruptedError
        return os.write(fd, data[:700])

    def read(self, fd: int, size: int) -> bytes:
        self.turn += 1
        if self.turn % 2:
            raise InterruptedError
        return os.read(fd, min(size, 700))

    def close(self, fd: int) -> None:
        os.close(fd)
        self.opened.discard(fd)
        raise InterruptedError


def test_interrupts_and_short_writes_are_gone_on_from(tmp_path: Path) -> None:
    """They are no errors, for reading and writing alike."""
    fs = Slow()
    one = directory(tmp_path, fs)
    state = {"a": np.arange(5000.0), "b": "c" * 3000}
    one.save(state, 1, {})
    restored = one.restore(None)
    assert restored is not None
    assert same(restored.state, state)
    one.close()
    assert fs.opened == set()


class Full(WatchedFs):
    """Takes nothing more, without saying why."""

    def write(self, fd: int, data: memoryview) -> int:
        return 0


def test_a_write_that_takes_nothing_does_not_go_on_for_ever(tmp_path: Path) -> None:
    """It is an error like any other."""
    one = directory(tmp_path, Full())
    with pytest.raises(CheckpointError, match="a write wrote nothing"):
        one.save({}, 1, {})
    one.close()
    assert names(tmp_path) == []


class NoMemory(WatchedFs):
    """Has no room for what is read."""

    def read(self, fd: int, size: int) -> bytes:
        raise MemoryError


def test_too_little_memory_is_no_damage(tmp_path: Path) -> None:
    """The checkpoint stays where it is."""
    [path] = saved(tmp_path, 1)
    one = directory(tmp_path, NoMemory())
    with pytest.raises(CheckpointError, match="not enough memory"):
        one.restore(None)
    one.close()
    assert path.exists()


class Nearly(WatchedFs):
    """Has 10,000 bytes left."""

    def statvfs(self, fd: int) -> Any:
        return SimpleNamespace(f_bavail=10, f_frsize=1000)


async def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """With how much is missing; the earlier checkpoint stays."""
    fs = Nearly()
    async with saver_over(fs, tmp_path, min_free_bytes=1000) as saver:
        await saver.save({"a": np.zeros(10)}, 1)
        with pytest.raises(CheckpointError, match=r"min_free_bytes is 1000: the disk has \d+ bytes too few") as caught:
            await saver.save({"a": np.zeros(10_000)}, 2)
        assert caught.value.errno == errno.ENOSPC
        assert len(names(tmp_path)) == 1
    async with saver_over(Nearly(), tmp_path) as saver:
        await saver.save({"a": np.zeros(10_000)}, 2)


def test_old_ones_that_cannot_be_removed_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The save has succeeded by then; the next one removes them."""

    class Sticky(WatchedFs):
        def unlink(self, *args: Any, **kwargs: Any) -> None:
            raise PermissionError(errno.EPERM, "not allowed")

    saved(tmp_path, 1)
    one = directory(tmp_path, Sticky(), KeepNewest(1))
    one.save(state_of(2), 2, {})
    one.save(state_of(3), 3, {})
    one.close()
    assert "not allowed" in caplog.text
    assert good_steps(tmp_path) == [3]
    one = directory(tmp_path, keep=KeepNewest(1))
    one.save(state_of(4), 4, {})
    one.close()
    assert names(tmp_path) == ["step-000000000004.000004"]


def test_a_fsync_that_failed_is_not_asked_again(tmp_path: Path) -> None:
    """What was written may be lost although the second one says that all is well."""
    fs = WatchedFs()
    asked: list[str] = []

    class Forgetful(WatchedFs):
        def fsync(self, fd: int) -> None:
            target = os.readlink(f"/proc/self/fd/{fd}")
            asked.append(target)
            if target.endswith("state.msgpack"):
                raise OSError(errno.EIO, "lost")

    one: CheckpointDirectory = directory(tmp_path, Forgetful())
    with pytest.raises(CheckpointError, match="lost"):
        one.save({}, 1, {})
    one.close()
    assert len([each for each in asked if each.endswith("state.msgpack")]) == 1
    assert names(tmp_path) == []
    assert fs.failed is None


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """What is open is the old one; the next save sees that and begins anew."""
    one = directory(tmp_path / "a")
    path = one.save({}, 1, {}).path
    for each in sorted(path.iterdir()):
        each.unlink()
    path.rmdir()
    (tmp_path / "a" / ".lock").unlink()
    (tmp_path / "a").rmdir()
    assert one.save({}, 2, {}).path.exists()
    one.close()


def test_a_system_without_flock_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lock a second writer could not be kept out."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    fs = WatchedFs()
    with pytest.raises(CheckpointError, match="no flock"):
        directory(tmp_path, fs).save({}, 1, {})
    assert fs.opened == set()
