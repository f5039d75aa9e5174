"""Any operation may fail: the error is typed, earlier checkpoints are intact, and nothing is left behind."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.checkpoint import KeepNewest, Restored
from aiohooks.errors import CheckpointError, CorruptCheckpointError
from tests.support.checkpoint_files import WatchedFs, directory, names, same, saved, state_of
from tests.support.checks import refused

T = TypeVar("T")


def every_operation(**options: Any) -> Iterator[WatchedFs]:
    """Yield replacements of `os` whose first, second, ... operation fails, until one does not fail."""
    for number in itertools.count(1):
        fs = WatchedFs(number, **options)
        yield fs
        if fs.failed is None:
            assert number > 10
            return


def raising(error: Exception) -> Callable[..., Any]:
    """Return an operation that raises an error."""

    def operation(*args: Any, **kwargs: Any) -> None:
        raise error

    return operation


def good_steps(path: Path) -> list[int]:
    """Return the steps that another process verifies, newest first."""
    found = directory(path, read_only=True).verify()
    assert all(each.reason is None for each in found)
    return [each.name.step for each in found]


def outcome(call: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    """Return the result of a call, or its CheckpointError."""
    try:
        return call(), None
    except CheckpointError as error:
        return None, error


# Operations that may fail without an error: those that release the lock or end a read, and those after the new checkpoint is
# durable.
QUIET = {"close", "pwrite", "ftruncate", "rename", "fsync", "unlink", "rmdir", "listdir", "open", "fstat", "readv"}
# The directory exists already, as this operation expects.
QUIET_WHEN_DONE = QUIET | {"mkdir"}


@pytest.mark.parametrize(
    ("error", "done"),
    [(errno.ENOSPC, False), (errno.EMFILE, False), (errno.EIO, True)],
    ids=["disk full", "too many files", "done, and an error after it"],
)
def test_a_save_fails_whole_or_not_at_all_at_every_operation(tmp_path: Path, error: int, done: bool) -> None:
    """Either CheckpointError with the errno is raised, and the directory is unchanged, or the new checkpoint is there."""
    refused = 0
    for number, fs in enumerate(every_operation(error=error, done=done)):
        path = tmp_path / str(number)
        before = saved(path, 1, 2)
        one = directory(path, fs, KeepNewest(2))
        _, refusal = outcome(lambda: one.save(state_of(3), 3, {}))  # noqa: B023 - called immediately
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
        # The next save removes what could not be removed.
        one = directory(path, keep=KeepNewest(2))
        one.save(state_of(4), 4, {})
        one.close()
        assert len(names(path)) == 2
    assert refused > 15


async def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    """The message says that it is to be written to, also when nothing is there that could be restored."""
    (tmp_path / "file").touch()
    with refused(CheckpointError, "cannot use the checkpoint directory", "file, where this process must be able to write"):
        await ah.Saver(tmp_path / "file").restore()


def every_restore(root: Path, error: int, *, damaged: bool = False) -> Iterator[tuple[list[Path], Restored | None]]:
    """Restore with each operation failing in turn; yield what had been saved and what was restored, None for a typed error."""
    for number, fs in enumerate(every_operation(error=error)):
        before = saved(root / str(number), 1, 2)
        if damaged:
            (before[1] / "state.msgpack").write_bytes(b"")
        one = directory(root / str(number), fs)
        restored, refusal = outcome(lambda: one.restore(None))  # noqa: B023 - called immediately
        one.close()
        assert (refusal is None) == (restored is not None)
        assert refusal is None or (refusal.errno == error and not isinstance(refusal, CorruptCheckpointError))
        assert len(names(root / str(number))) == 2
        assert fs.opened == set()
        yield before, restored


@pytest.mark.parametrize("error", [errno.EACCES, errno.EMFILE], ids=errno.errorcode.get)
def test_a_restore_does_not_mistake_errors_of_the_process_for_damage(tmp_path: Path, error: int) -> None:
    """Missing permissions or descriptors are not damage: nothing is set aside, and no older checkpoint is restored."""
    for before, restored in every_restore(tmp_path, error):
        assert restored is None or same(restored.state, state_of(2))
        assert names(before[0].parent) == [each.name for each in before]


def test_a_restore_skips_what_the_disk_does_not_return(tmp_path: Path) -> None:
    """EIO of reading a file is damage; elsewhere it is an error. No checkpoint is lost."""
    found = [restored.checkpoint.step for _, restored in every_restore(tmp_path, errno.EIO) if restored is not None]
    assert found.count(1) >= 6


def test_a_failing_set_aside_does_not_prevent_a_restore(tmp_path: Path) -> None:
    """With a damaged newest checkpoint, any failure leads to a typed error or the older checkpoint; nothing is removed."""
    for _, restored in every_restore(tmp_path, errno.EROFS, damaged=True):
        assert restored is None or restored.checkpoint.step == 1


class Slow(WatchedFs):
    """Writes 700 bytes at a time, and is interrupted after each close."""

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data[:700])

    def close(self, fd: int) -> None:
        os.close(fd)
        self.opened.discard(fd)
        raise InterruptedError


def test_interrupts_and_short_writes_are_retried(tmp_path: Path) -> None:
    """Writes continue after a short one, as reads do in `test_files`; an interrupted close has closed."""
    fs = Slow()
    one = directory(tmp_path, fs)
    state = {"a": np.arange(5000.0), "b": "c" * 3000}
    one.save(state, 1, {})
    restored = one.restore(None)
    assert restored is not None
    assert same(restored.state, state)
    one.close()
    assert fs.opened == set()


def test_a_write_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    """It is not retried indefinitely."""
    one = directory(tmp_path, WatchedFs(write=lambda fd, data: 0))
    with pytest.raises(CheckpointError, match="a write wrote nothing"):
        one.save({}, 1, {})
    one.close()
    assert names(tmp_path) == []


def test_a_file_that_ends_early_is_damage(tmp_path: Path) -> None:
    """Its size is checked when it is opened, and again by what is read."""
    saved(tmp_path, 1)
    one = directory(tmp_path, WatchedFs(readv=lambda fd, buffers: 0))
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json ends \d+ bytes early"):
        one.restore(None)
    one.close()


def test_too_little_memory_is_not_damage(tmp_path: Path) -> None:
    """The checkpoint is not set aside."""
    [path] = saved(tmp_path, 1)
    one = directory(tmp_path, WatchedFs(readv=raising(MemoryError())))
    with pytest.raises(CheckpointError, match="not enough memory"):
        one.restore(None)
    one.close()
    assert path.exists()


class NearlyFull(WatchedFs):
    """Has so many thousand bytes left, 10 unless told otherwise."""

    free_kilobytes: float = 10

    def statvfs(self, fd: int) -> Any:
        return SimpleNamespace(f_bavail=self.free_kilobytes, f_frsize=1000)


def test_a_save_takes_the_space_that_it_says_it_needs(tmp_path: Path) -> None:
    """With one byte less it is refused; what it writes is not more."""
    fs = NearlyFull()
    fs.free_kilobytes = 0
    one = directory(tmp_path, fs, min_free_bytes=500)
    state = {"array": np.zeros(300), "bytes": bytes(20_000)}
    with pytest.raises(CheckpointError) as caught:
        one.save(state, 1, {})
    assert (caught.value.errno, names(tmp_path)) == (errno.ENOSPC, [])
    numbers = re.search(r"needs (\d+) bytes and min_free_bytes is 500: the disk has (\d+) bytes too few", str(caught.value))
    assert numbers is not None
    needed, missing = map(int, numbers.groups())
    assert missing == needed + 500
    fs.free_kilobytes = (missing - 1) / 1000
    with pytest.raises(CheckpointError, match="the disk has 1 bytes too few"):
        one.save(state, 1, {})
    fs.free_kilobytes = missing / 1000
    path = one.save(state, 1, {}).path
    one.close()
    assert needed - 4096 <= sum(each.stat().st_size for each in path.iterdir()) <= needed


UNDONE = {
    "old ones": ("rmdir", "old checkpoints could not be removed ([Errno 1] not allowed); the next save tries again"),
    "a failed save": ("write rmdir", "a failed save left .tmp-step-000000000002.000003 behind ([Errno 1] not allowed); the next"),
    "damage": ("rename", "is damaged and could not be set aside ([Errno 1] not allowed): state.msgpack is missing"),
    "damage, read only": ("", "step-000000000001.000002 is damaged and was skipped: state.msgpack is missing"),
}


@pytest.mark.parametrize("what", UNDONE)
def test_what_is_left_undone_is_logged(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the name, and the reason of the system."""
    refused, says = UNDONE[what]
    newest = saved(tmp_path, 0, 1)[1]
    fs = WatchedFs()
    vars(fs).update(dict.fromkeys(refused.split(), raising(PermissionError(errno.EPERM, "not allowed"))))
    one = directory(tmp_path, fs, KeepNewest(1), read_only=not refused)
    if "rmdir" in refused:
        outcome(lambda: one.save(state_of(2), 2, {}))
    else:
        (newest / "state.msgpack").unlink()
        assert one.restore(None) is not None
    one.close()
    assert [message for message in caplog.messages if says in message]


def test_old_ones_that_cannot_be_read_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The save has succeeded by then; the log says why none was removed."""
    old = saved(tmp_path, 1)[0]

    def open_others(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == old.name:
            raise OSError(errno.EMFILE, "too many files")
        return os.open(path, *args, **kwargs)

    one = directory(tmp_path, WatchedFs(open=open_others), KeepNewest(1))
    new = one.save(state_of(2), 2, {}).path
    one.close()
    assert names(tmp_path) == [old.name, new.name]
    assert [one for one in caplog.messages if "no old checkpoint is removed" in one and "too many files" in one]


@pytest.mark.parametrize("existing", range(4))
def test_the_name_of_the_directory_is_durable(tmp_path: Path, existing: int) -> None:
    """And so are those of the parents that are made with it; one that is there may be so since a crash only."""
    path = tmp_path / "a" / "b" / "c"
    [tmp_path, *reversed(path.parents[:2]), path][existing].mkdir(parents=True, exist_ok=True)
    synced: list[str] = []

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    one = directory(path, WatchedFs(fsync=sync))
    one.save({}, 1, {})
    one.close()
    parents = [str(each) for each in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    assert [each for each in synced if each in parents] == (parents[existing:] or parents[-1:])


def test_a_directory_whose_name_is_not_durable_is_not_used(tmp_path: Path) -> None:
    """The lock is released, and the next save makes the name durable first."""
    synced: list[str] = []

    def sync(fd: int) -> None:
        target = os.readlink(f"/proc/self/fd/{fd}")
        if target == str(tmp_path):
            synced.append(target)
            if len(synced) == 1:
                raise OSError(errno.EIO, "lost")

    one = directory(tmp_path / "a", WatchedFs(fsync=sync))
    with pytest.raises(CheckpointError, match="lost"):
        one.save({}, 1, {})
    other = directory(tmp_path / "a")
    other.save({}, 2, {})
    other.close()
    one.save({}, 3, {})
    one.close()
    assert len(synced) == 2


def test_what_was_set_aside_stays_so(tmp_path: Path) -> None:
    """The new name is durable before anything else is read or written: a power cut does not bring the damage back."""
    newest = saved(tmp_path, 1, 2)[1]
    (newest / "state.msgpack").write_bytes(b"")
    fs = WatchedFs()
    one = directory(tmp_path, fs)
    assert one.restore(None) is not None
    one.close()
    operations = [name for name, _ in fs.log]
    assert operations[operations.index("rename") + 1] == "fsync"
