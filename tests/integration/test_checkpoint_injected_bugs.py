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
from typing import Any, NamedTuple

import pytest

from aiohooks.checkpoint import Checkpoint, Restored, _directory, _files, _format
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.checkpoint._files import Directory, DirectoryLock, FileReader
from tests.fuzz._harness import Bug, Bugs, Method
from tests.fuzz.checkpoints.__main__ import Program, run
from tests.fuzz.checkpoints.corruption import corruption
from tests.fuzz.checkpoints.faults import crash, error, full, kill, power, turns

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="kills, forks and mounts as Linux does"),
]


class Finding(NamedTuple):
    """A program that finds a bug, in so many points, by a violation that matches a pattern."""

    program: Program
    points: int
    pattern: str


failing_syncs = functools.partial(error, calls=("fsync",))
failing_opens = functools.partial(error, calls=("open",))

BUGS = Bugs()


def bug(owner: Any, name: str, *findings: Finding) -> Callable[[Method], None]:
    """Add a replacement of `owner.name`, as `Bug` has it, which each of these programs finds."""
    return BUGS.add(owner, name, findings)


# Operations that do not keep their promises


class Changed:
    """Does what another `fs` does, except some operations."""

    def __init__(self, fs: Any, **operations: Callable[..., Any]) -> None:
        self.fs = fs
        vars(self).update(operations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fs, name)


def through(*findings: Finding) -> Callable[[Callable[[Any], Changed]], None]:
    """Add a bug of the operations: a function that returns what takes the place of an `fs`."""

    def add(change: Callable[[Any], Changed]) -> None:
        def init(original: Method, self: Any, path: Path, *, fs: Any = os, **options: Any) -> None:
            original(self, path, fs=change(fs), **options)

        init.__name__ = change.__name__
        bug(CheckpointDirectory, "__init__", *findings)(init)

    return add


def without_sync(fs: Any) -> Changed:
    return Changed(fs, fsync=lambda fd: None)


through(Finding(crash, 200, "lost|torn"), Finding(power, 40, "lost|torn"))(without_sync)


@through(Finding(crash, 400, "lost"))
def without_directory_sync(fs: Any) -> Changed:
    return Changed(
        fs, fsync=lambda fd: None if stat.S_ISDIR(os.fstat(fd).st_mode) else fs.fsync(fd)
    )


@through(Finding(failing_syncs, 80, "fsync was ignored"))
def retried_sync(fs: Any) -> Changed:
    """Retry a failed sync; the retry succeeds, and the data is lost."""

    def fsync(fd: int) -> None:
        try:
            fs.fsync(fd)
        except OSError:
            fs.fsync(fd)

    return Changed(fs, fsync=fsync)


@through(
    Finding(kill, 100, "second writer"),
    Finding(turns, 20, "without the lock|two writers"),
)
def without_lock(fs: Any) -> Changed:
    """Unlock, whatever the operation."""
    return Changed(
        fs, flock=lambda fd, operation: getattr(fs, "flock", fcntl.flock)(fd, fcntl.LOCK_UN)
    )


@through(Finding(corruption, 500, "restored"))
def following_links(fs: Any) -> Changed:
    def open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        return fs.open(path, flags & ~os.O_NOFOLLOW, *args, **options)  # type: ignore[no-any-return]

    return Changed(fs, open=open)


# The order of a commit


def commits_through(name: str, written_as: str, *findings: Finding) -> None:
    """Add a bug: a checkpoint is written under a name, which has the final one as {}, renamed, and
    synced last of all.
    """

    def commit(
        original: Method,
        self: CheckpointDirectory,
        directory: Directory,
        new: Checkpoint,
        contents: Mapping[str, Iterable[bytes | memoryview]],
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
                written_fd = fs.open(file, os.O_RDONLY, dir_fd=inside.fd)
                fs.fsync(written_fd)
                fs.close(written_fd)
            fs.fsync(inside.fd)
        directory.sync()
        return saved

    commit.__name__ = name
    bug(CheckpointDirectory, "_commit", *findings)(commit)


commits_through(
    "renamed_before_synced", ".tmp-{}", Finding(crash, 300, "torn"), Finding(power, 60, "torn")
)
commits_through("written_in_place", "{}", Finding(kill, 60, "torn"))


@bug(CheckpointDirectory, "_commit", Finding(kill, 60, "lost"), Finding(crash, 200, "lost"))
def removed_before_saved(
    commit: Method, self: CheckpointDirectory, directory: Directory, *rest: Any
) -> Checkpoint:
    self._remove(directory, [*self._readable(directory)][1:])
    return commit(self, directory, *rest)  # type: ignore[no-any-return]


@bug(CheckpointDirectory, "__init__", Finding(crash, 200, "restored|lost"))
def a_pointer_is_trusted(
    init: Method, self: CheckpointDirectory, path: Path, **options: Any
) -> None:
    """The name of the newest checkpoint is in a file, and only that is restored."""
    init(self, path, **options)
    save, restore = self.save, self._restore

    def saving(*args: Any) -> Checkpoint:
        saved = save(*args)
        fs = self._fs
        fd = fs.open(f"{path}/latest", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        fs.write(fd, saved.path.name.encode())
        fs.close(fd)
        return saved

    def restoring(directory: Directory, *rest: Any) -> Restored | None:
        if (path / "latest").exists():
            latest = _format.parse_name((path / "latest").read_text())
            found = _format.checkpoint_names(directory.names)
            directory.names -= {str(name) for name in found if latest is None or name > latest}
        return restore(directory, *rest)

    vars(self).update(save=saving, _restore=restoring)


# Reading


@bug(_format, "decode", Finding(corruption, 300, "restored"))
def a_manifest_has_any_form(decode: Method, data: bytes, path: Path) -> Checkpoint:
    with contextlib.suppress(ValueError):
        content = json.loads(data)
        content["checksum"] = content["checksum"].lower()
        data = _format._canonical(content)
    return decode(data, path)  # type: ignore[no-any-return]


@bug(
    FileReader,
    "check",
    Finding(corruption, 200, "came back changed|restored|reported|corrupt|raised"),
)
def checksums_are_ignored(check: Method, self: FileReader, crc32: int) -> None:
    """Whatever is read is right."""


@bug(CheckpointDirectory, "_set_aside", Finding(corruption, 50, "set aside"))
def damaged_ones_are_removed(
    set_aside: Method, self: CheckpointDirectory, directory: Directory, name: str, reason: str
) -> None:
    directory.remove(name)


@bug(_files, "_damage_errors", Finding(failing_opens, 60, "corrupt|restored"))
@contextlib.contextmanager
def errors_are_mistaken_for_damage(damage_errors: Method) -> Generator[None]:
    """A good checkpoint is set aside because this process cannot open files."""
    mistaken = {errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
    with damage_errors():
        try:
            yield
        except OSError as error:
            raise OSError(errno.EIO if error.errno in mistaken else error.errno, "") from error


# Leftovers, locks, errors


@bug(_format, "is_temporary", Finding(kill, 60, "not ours"))
def foreign_files_are_removed(is_temporary: Method, text: str) -> bool:
    return text.startswith(".tmp-")


@bug(_format, "is_temporary", Finding(kill, 60, "leftovers were not removed"))
def leftovers_are_kept(is_temporary: Method, text: str) -> bool:
    """Those of the directory itself, and those that a save of ours leaves."""
    return False


@bug(DirectoryLock, "release", Finding(turns, 200, "two writers|lock was"))
def the_lock_is_removed(release: Method, self: DirectoryLock) -> None:
    """Its file is removed once it is free; another process may have it by then."""
    release(self)
    os.sched_yield()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(self._path / _format.LOCK)


@bug(_files, "close_quietly", Finding(error, 20, "left open"), Finding(full, 20, "left open"))
def files_are_left_open(close_quietly: Method, fs: Any, fd: int) -> None:
    """Nothing is closed."""


@bug(CheckpointDirectory, "_undo_commit", Finding(full, 20, "not cleaned up|given back"))
def failed_saves_are_kept(undo_commit: Method, *args: Any) -> None:
    """Nothing is undone."""


@bug(
    _directory,
    "_checkpoint_errors",
    Finding(error, 10, "raised OSError|raised PermissionError"),
)
@contextlib.contextmanager
def errors_are_untyped(checkpoint_errors: Method, prefix: str) -> Generator[None]:
    yield


@bug(CheckpointDirectory, "save", Finding(full, 20, "lost|gone|there"))
def errors_are_ignored(save: Method, self: CheckpointDirectory, *rest: Any) -> Checkpoint:
    """A failed save returns normally."""
    try:
        return save(self, *rest)  # type: ignore[no-any-return]
    except OSError:
        return Checkpoint(1, 1)


@pytest.mark.parametrize(
    ("bug", "finding"),
    [
        pytest.param(bug, finding, id=f"{name}, {getattr(finding.program, '__name__', 'error')}")
        for name, bug in BUGS.items()
        for finding in bug.found_by
    ],
)
def test_an_injected_bug_is_found(bug: Bug, finding: Finding) -> None:
    """Each injected bug is found by the program for it."""
    with bug.injected():
        outcome = run(finding.program, finding.points)
    assert any(re.search(finding.pattern, violation) for violation in outcome.violations), (
        outcome.summary() + "\n" + "\n".join(outcome.violations[:5])
    )
