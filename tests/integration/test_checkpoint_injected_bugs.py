"""Bugs injected into the checkpoints: the program for it must find each with a small count."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aiohooks.checkpoint import Checkpoint, Restored, _directory, _files, _format
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.checkpoint._files import Directory, DirectoryLock, FileReader
from tests.fuzz.checkpoints.__main__ import Program, run
from tests.fuzz.checkpoints.corruption import corruption
from tests.fuzz.checkpoints.faults import crash, error, full, kill, power, turns

Bug = Callable[[pytest.MonkeyPatch], None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="kills, forks and mounts as Linux does"),
]


failing_syncs, failing_opens = (
    functools.partial(error, calls=("fsync",)),
    functools.partial(error, calls=("open",)),
)


# Operations that do not keep their promises


class Changed:
    """Does what another `fs` does, except some operations."""

    def __init__(self, fs: Any, **operations: Callable[..., Any]) -> None:
        self.fs = fs
        vars(self).update(operations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fs, name)


def without_sync(fs: Any) -> Changed:
    return Changed(fs, fsync=lambda fd: None)


def without_directory_sync(fs: Any) -> Changed:
    return Changed(
        fs, fsync=lambda fd: None if stat.S_ISDIR(os.fstat(fd).st_mode) else fs.fsync(fd)
    )


def retried_sync(fs: Any) -> Changed:
    """Retry a failed sync; the retry succeeds, and the data is lost."""

    def fsync(fd: int) -> None:
        try:
            fs.fsync(fd)
        except OSError:
            fs.fsync(fd)

    return Changed(fs, fsync=fsync)


def without_lock(fs: Any) -> Changed:
    """Unlock, whatever the operation."""
    return Changed(
        fs, flock=lambda fd, operation: getattr(fs, "flock", fcntl.flock)(fd, fcntl.LOCK_UN)
    )


def through(change: Callable[[Any], Changed]) -> Bug:
    def inject(patch: pytest.MonkeyPatch) -> None:
        sound = CheckpointDirectory.__init__

        def init(self: CheckpointDirectory, path: Path, *, fs: Any = os, **options: Any) -> None:
            sound(self, path, fs=change(fs), **options)

        patch.setattr(CheckpointDirectory, "__init__", init)

    return inject


# The order of a commit

Contents = Mapping[str, Iterable[bytes | memoryview]]


def commits_through(written_as: str) -> Bug:
    """Write a checkpoint under this name, which has the final one as {}, rename it, and sync last
    of all.
    """

    def commit(
        self: CheckpointDirectory,
        directory: Directory,
        new: Checkpoint,
        contents: Contents,
    ) -> Checkpoint:
        name = new.path.name
        directory.names.add(name)
        fs, written = self._fs, written_as.format(name)
        with directory.make(written) as inside:
            inside.fs = without_sync(fs)
            entries = {file: inside.write_new(file, chunks) for file, chunks in contents.items()}
            saved = dataclasses.replace(new, files=entries)
            inside.write_new(_format.MANIFEST, [_format.encode(saved)])
            if written != name:
                directory.rename(written, name)
            for file in (*contents, _format.MANIFEST):
                each = fs.open(file, os.O_RDONLY, dir_fd=inside.fd)
                fs.fsync(each)
                fs.close(each)
            fs.fsync(inside.fd)
        directory.sync()
        return saved

    return lambda patch: patch.setattr(CheckpointDirectory, "_commit", commit)


def removes_too_early(patch: pytest.MonkeyPatch) -> None:
    """Remove old checkpoints before the save."""
    sound = CheckpointDirectory._commit

    def commit(self: CheckpointDirectory, directory: Directory, *rest: Any) -> Checkpoint:
        self._remove(directory, [*self._readable(directory)][1:])
        return sound(self, directory, *rest)

    patch.setattr(CheckpointDirectory, "_commit", commit)


def trusts_a_pointer(patch: pytest.MonkeyPatch) -> None:
    """Keep the name of the newest checkpoint in a file, and restore only that."""
    save, restore = CheckpointDirectory.save, CheckpointDirectory._restore

    def saving(
        self: CheckpointDirectory, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]
    ) -> Checkpoint:
        saved = save(self, state, step, metrics)
        fs = self._fs
        fd = fs.open(f"{self.path}/latest", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        fs.write(fd, saved.path.name.encode())
        fs.close(fd)
        return saved

    def restoring(
        self: CheckpointDirectory, directory: Directory, step: int | None, *rest: Any
    ) -> Restored | None:
        if (self.path / "latest").exists():
            latest = _format.parse_name((self.path / "latest").read_text())
            found = _format.checkpoint_names(directory.names)
            directory.names -= {str(name) for name in found if latest is None or name > latest}
        return restore(self, directory, step, *rest)

    patch.setattr(CheckpointDirectory, "save", saving)
    patch.setattr(CheckpointDirectory, "_restore", restoring)


# Reading


def accepts_any_form(patch: pytest.MonkeyPatch) -> None:
    """Accept a manifest that is not canonical."""
    sound = _format.decode

    def decode(data: bytes, path: Path) -> Checkpoint:
        with contextlib.suppress(ValueError):
            content = json.loads(data)
            content["checksum"] = content["checksum"].lower()
            data = _format._canonical(content)
        return sound(data, path)

    patch.setattr(_format, "decode", decode)


def ignores_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileReader, "check", lambda self, crc32: None)


def follows_links(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_files, "_NO_LINKS", os.O_CLOEXEC)


def removes_what_is_damaged(patch: pytest.MonkeyPatch) -> None:
    def set_aside(self: CheckpointDirectory, directory: Directory, name: str, reason: str) -> None:
        directory.remove(name)

    patch.setattr(CheckpointDirectory, "_set_aside", set_aside)


def mistakes_errors_for_damage(patch: pytest.MonkeyPatch) -> None:
    """Set a good checkpoint aside because this process cannot open files."""
    mistaken = {errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
    patch.setattr(_files, "_DAMAGE", _files._DAMAGE | mistaken)


# Leftovers, locks, errors


def removes_foreign_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_format, "is_temporary", lambda name: name.startswith(".tmp-"))


def keeps_leftovers(patch: pytest.MonkeyPatch) -> None:
    """Know none of them: those of the directory itself, and not those that a save of ours would
    leave.
    """
    patch.setattr(_format, "is_temporary", lambda name: False)


def removes_the_lock(patch: pytest.MonkeyPatch) -> None:
    """Remove the file of the lock once it is free; another process may have it by then."""
    sound = DirectoryLock.release

    def release(self: DirectoryLock) -> None:
        sound(self)
        os.sched_yield()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path / _format.LOCK)

    patch.setattr(DirectoryLock, "release", release)


def leaks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_files, "close_quietly", lambda fs, fd: None)


def keeps_failed_saves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointDirectory, "_undo_commit", lambda *args: None)


def raises_any_error(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def checkpoint_errors(failure: str) -> Generator[None]:
        yield

    patch.setattr(_directory, "_checkpoint_errors", checkpoint_errors)


def ignores_errors(patch: pytest.MonkeyPatch) -> None:
    """Return normally from a failed save."""
    sound = CheckpointDirectory.save

    def save(self: CheckpointDirectory, *rest: Any) -> Checkpoint:
        try:
            return sound(self, *rest)
        except OSError:
            return Checkpoint(1, 1)

    patch.setattr(CheckpointDirectory, "save", save)


BUGS: list[tuple[str, Bug, Program, int, str]] = [
    ("no sync", through(without_sync), crash, 200, "lost|torn"),
    ("no sync, real disk", through(without_sync), power, 40, "lost|torn"),
    ("files synced, directories not", through(without_directory_sync), crash, 400, "lost"),
    ("rename before sync", commits_through(".tmp-{}"), crash, 300, "torn"),
    ("rename before sync, real disk", commits_through(".tmp-{}"), power, 60, "torn"),
    ("written in place", commits_through("{}"), kill, 60, "torn"),
    ("removed before saved", removes_too_early, kill, 60, "lost"),
    ("removed before saved, any state", removes_too_early, crash, 200, "lost"),
    ("a pointer that is trusted", trusts_a_pointer, crash, 200, "restored|lost"),
    ("sync retried", through(retried_sync), failing_syncs, 80, "fsync was ignored"),
    ("manifest in any form", accepts_any_form, corruption, 300, "restored"),
    (
        "checksums ignored",
        ignores_checksums,
        corruption,
        200,
        "came back changed|restored|reported|corrupt|raised",
    ),
    ("links followed", follows_links, corruption, 500, "restored"),
    ("damaged ones removed", removes_what_is_damaged, corruption, 50, "set aside"),
    (
        "errors mistaken for damage",
        mistakes_errors_for_damage,
        failing_opens,
        60,
        "corrupt|restored",
    ),
    ("foreign files removed", removes_foreign_files, kill, 60, "not ours"),
    ("leftovers kept", keeps_leftovers, kill, 60, "leftovers were not removed"),
    ("no lock", through(without_lock), kill, 100, "second writer"),
    ("no lock, in turn", through(without_lock), turns, 20, "without the lock|two writers"),
    ("the lock removed when it is released", removes_the_lock, turns, 200, "two writers|lock was"),
    ("files left open", leaks, error, 20, "left open"),
    ("files left open, full disk", leaks, full, 20, "left open"),
    ("failed saves kept", keeps_failed_saves, full, 20, "not cleaned up|given back"),
    ("untyped errors", raises_any_error, error, 10, "raised OSError|raised PermissionError"),
    ("errors ignored", ignores_errors, full, 20, "lost|gone|there"),
]


@pytest.mark.parametrize(
    ("bug", "program", "points", "finding"),
    [each[1:] for each in BUGS],
    ids=[each[0] for each in BUGS],
)
def test_an_injected_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Bug, program: Program, points: int, finding: str
) -> None:
    """Each injected bug is found by the program for it."""
    bug(monkeypatch)
    outcome = run(program, points)
    assert any(re.search(finding, each) for each in outcome.violations), (
        outcome.summary() + "\n" + "\n".join(outcome.violations[:5])
    )
