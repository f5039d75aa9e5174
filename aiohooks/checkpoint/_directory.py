"""All that is done with a checkpoint directory, as plain blocking functions; `Saver` calls them in worker threads."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiohooks.checkpoint import _format
from aiohooks.checkpoint._files import DamagedError, Files, told_as_damage
from aiohooks.checkpoint._lock import DirectoryLock
from aiohooks.checkpoint.checkpoint import Checkpoint, Restored
from aiohooks.checkpoint.policies import KeepPolicy
from aiohooks.errors import CheckpointError, CorruptCheckpointError


def read_manifest(files: Files, dir_fd: int, name: _format.Name) -> _format.Manifest:
    """What a checkpoint says of itself; its files are not looked at.

    Raises:
        DamagedError: it does not verify.
        NewerVersionError: it is of a later version of the format.
        OSError: it could not be read, for a reason that is not its fault.
    """
    fd = _open(files, dir_fd, name)
    try:
        return _manifest_in(files, fd, name)
    finally:
        files.close_quietly(fd)


def read(files: Files, dir_fd: int, name: _format.Name) -> tuple[_format.Manifest, dict[str, Any]]:
    """A whole checkpoint, checked; raises as `read_manifest` does."""
    from aiohooks.checkpoint import _encoding

    fd = _open(files, dir_fd, name)
    try:
        manifest = _manifest_in(files, fd, name)
        contents = {file: _checked(files, fd, file, entry) for file, entry in manifest.files.items()}
    finally:
        files.close_quietly(fd)
    return manifest, _encoding.decode(contents[_format.STATE], contents.pop(_format.ARRAYS))


def _open(files: Files, dir_fd: int, name: _format.Name) -> int:
    with told_as_damage():
        return files.open_directory(str(name), dir_fd=dir_fd)


def _manifest_in(files: Files, fd: int, name: _format.Name) -> _format.Manifest:
    try:
        return _format.decode(files.read(_format.MANIFEST, dir_fd=fd, at_most=_format.LARGEST), name)
    except DamagedError as error:
        raise DamagedError(f"{_format.MANIFEST} {error}") from error.__cause__


def _checked(files: Files, fd: int, file: str, entry: _format.FileEntry) -> bytes:
    try:
        data = files.read(file, dir_fd=fd, size=entry.size)
        if f"{zlib.crc32(data):08x}" != entry.crc32:
            raise DamagedError("does not have the checksum in the manifest")
    except DamagedError as error:
        raise DamagedError(f"{file} {error}") from error.__cause__
    return data


_logger = logging.getLogger("aiohooks")

Chunks = Iterable[bytes | memoryview]


def commit(files: Files, dir_fd: int, name: _format.Name, metrics: Mapping[str, float], contents: Mapping[str, Chunks]) -> None:
    """Writes a checkpoint aside, makes it durable, gives it its name, and makes that durable.

    If anything fails, nothing of it is left. When it returns, a power cut does not undo it.

    Raises:
        OSError: what the system refused.
    """
    taken = set(files.names(dir_fd))
    aside = _format.free(f".tmp-{name}", taken)
    try:
        files.make_directory(aside, dir_fd=dir_fd)
        with files.directory(aside, dir_fd=dir_fd) as fd:
            entries = {file: _format.FileEntry(*files.write_new(file, chunks, dir_fd=fd)) for file, chunks in contents.items()}
            manifest = _format.encode(_format.Manifest(name, metrics, entries))
            files.write_new(_format.MANIFEST, [manifest], dir_fd=fd)
            files.sync(fd)
        files.rename(aside, str(name), dir_fd=dir_fd)
        files.sync(dir_fd)
    except BaseException:
        _undo(files, dir_fd, aside, str(name))
        raise


def _undo(files: Files, dir_fd: int, aside: str, name: str) -> None:
    # Also what has its name already: whether that would survive is what could not be found out.
    try:
        with contextlib.suppress(FileNotFoundError):
            files.rename(name, aside, dir_fd=dir_fd)
        files.remove_directory(aside, dir_fd=dir_fd)
    except OSError as error:
        _logger.warning("a failed checkpoint left %s behind (%s); the next save tries again to remove it", aside, error)


def sweep(files: Files, dir_fd: int) -> None:
    """Removes what a writer that was killed left unfinished. Only whoever holds the lock may do so."""
    for name in files.names(dir_fd):
        if _format.is_temporary(name):
            try:
                files.remove_directory(name, dir_fd=dir_fd)
            except OSError as error:
                _logger.warning("%s is left from an unfinished save and cannot be removed (%s)", name, error)


def remove(files: Files, dir_fd: int, names: list[_format.Name]) -> None:
    """Takes checkpoints away. Each loses its name first, durably, so that no half of one is ever taken for a checkpoint.

    What cannot be removed is named in a warning: the checkpoint that was just saved is none the worse for it.
    """
    aside: list[str] = []
    try:
        taken = set(files.names(dir_fd))
        for name in names:
            drop = _format.free(f".tmp-drop-{name}", taken)
            files.rename(str(name), drop, dir_fd=dir_fd)
            aside.append(drop)
        files.sync(dir_fd)
        for drop in aside:
            files.remove_directory(drop, dir_fd=dir_fd)
    except OSError as error:
        _logger.warning("old checkpoints could not be removed (%s); the next save tries again", error)


def check_space(files: Files, dir_fd: int, size: int, min_free_bytes: int) -> None:
    """Refuses to begin what would leave less than `min_free_bytes` on the disk; 0 asks nothing.

    Raises:
        CheckpointError: with ENOSPC, and how much is missing.
    """
    if min_free_bytes == 0:
        return
    missing = size + min_free_bytes - files.free_bytes(dir_fd)
    if missing > 0:
        raise CheckpointError(
            errno.ENOSPC,
            f"the checkpoint takes {size} bytes and min_free_bytes is {min_free_bytes}: the disk has {missing} bytes too few; "
            "make room, or keep fewer checkpoints",
        )


P = ParamSpec("P")
R = TypeVar("R")

# How often a reader without the lock looks again when a writer removed what it was about to read.
_MOST_LOOKS = 10
_ROOM_FOR_MANIFEST = 4096


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found when a checkpoint was read through."""

    path: Path
    name: _format.Name
    reason: str | None
    """What is wrong with it; None if it is good."""
    was_set_aside: bool = False
    manifest: _format.Manifest | None = None
    """What it says of itself; None where not even that could be read."""


def _one_at_a_time(
    fn: Callable[Concatenate[CheckpointDirectory, P], R],
) -> Callable[Concatenate[CheckpointDirectory, P], R]:
    """Keeps a call that its caller no longer waits for, and those of other tasks, out of each other's way."""

    @functools.wraps(fn)
    def wrapped(self: CheckpointDirectory, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.mutex():
            return fn(self, *args, **kwargs)

    return wrapped


class CheckpointDirectory:
    """One directory of checkpoints."""

    def __init__(self, path: Path, *, keep: KeepPolicy, min_free_bytes: int, read_only: bool, fs: Any = os) -> None:
        """Touches nothing yet."""
        self.path = path
        self._keep = keep
        self._min_free_bytes = min_free_bytes
        self._read_only = read_only
        self._files = Files(fs)
        self._lock = DirectoryLock(self._files, path)
        self._mutex = threading.Lock()
        self._mutex_pid = os.getpid()
        self._manifests: dict[_format.Name, Checkpoint] = {}

    def mutex(self) -> threading.Lock:
        """Held during each operation; a forked child has its own, as nobody would ever release the one it inherited."""
        if self._mutex_pid != os.getpid():
            self._mutex, self._mutex_pid = threading.Lock(), os.getpid()
        return self._mutex

    # Saving

    @_one_at_a_time
    def save(self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> Checkpoint:
        """Puts a state on disk; see `Saver.save`."""
        from aiohooks.checkpoint import _encoding

        with _told(f"the checkpoint of step {step} was not saved in {self.path}"):
            if self._read_only:
                raise CheckpointError(errno.EROFS, f"the Saver of {self.path} was made with read_only=True; it saves nothing")
            data, arrays = _encoding.encode(state)
            dir_fd = self._lock.take()
            sweep(self._files, dir_fd)
            size = arrays.size + len(data) + _ROOM_FOR_MANIFEST
            check_space(self._files, dir_fd, size, self._min_free_bytes)
            name = _format.Name(_format.next_sequence(self._files.names(dir_fd)), step)
            contents: dict[str, Chunks] = {_format.ARRAYS: arrays.chunks(), _format.STATE: [data]}
            commit(self._files, dir_fd, name, metrics, contents)
        saved = self._manifests[name] = self._checkpoint(name, metrics)
        self._remove_old(dir_fd, saved)
        return saved

    def _remove_old(self, dir_fd: int, saved: Checkpoint) -> None:
        """From here on nothing fails any more: the checkpoint is there."""
        try:
            there = self._known(dir_fd)
            newest_of_step = {each.step: each for each in sorted(there, key=lambda each: each.sequence)}
            kept = self._keep.kept(sorted(newest_of_step.values(), key=lambda each: each.sequence, reverse=True))
            names = [_format.Name(each.sequence, each.step) for each in there if each != saved and each not in kept]
        except OSError as error:
            _logger.warning("no old checkpoint is removed: those there are could not be looked at (%s)", error)
            return
        except Exception:
            _logger.exception("no old checkpoint is removed: what to keep could not be found out")
            return
        if names:
            remove(self._files, dir_fd, names)
            for name in names:
                self._manifests.pop(name, None)

    def _known(self, dir_fd: int) -> list[Checkpoint]:
        """The checkpoints whose manifest is sound, the newest first."""
        names = self._there(dir_fd)
        self._manifests = {name: self._manifests[name] for name in names if name in self._manifests}
        for name in names:
            if name not in self._manifests:
                with contextlib.suppress(DamagedError, _format.NewerVersionError):
                    manifest = read_manifest(self._files, dir_fd, name)
                    self._manifests[name] = self._checkpoint(name, manifest.metrics)
        return [self._manifests[name] for name in names if name in self._manifests]

    def _checkpoint(self, name: _format.Name, metrics: Mapping[str, float]) -> Checkpoint:
        return Checkpoint(step=name.step, sequence=name.sequence, metrics=metrics, path=self.path / str(name))

    def _there(self, dir_fd: int) -> list[_format.Name]:
        found = [name for each in self._files.names(dir_fd) if (name := _format.parse(each)) is not None]
        return sorted(found, reverse=True)

    # Restoring

    @_one_at_a_time
    def restore(self, step: int | None) -> Restored | None:
        """The newest checkpoint that verifies; see `Saver.restore`."""
        with _told(f"no checkpoint could be restored from {self.path}"):
            if not self._read_only:
                dir_fd = self._lock.take()
                sweep(self._files, dir_fd)
                return self._restore(dir_fd, step)
            try:
                with self._files.directory(self.path) as dir_fd:
                    for _ in range(_MOST_LOOKS):
                        with contextlib.suppress(_VanishedError):
                            return self._restore(dir_fd, step)
            except FileNotFoundError:
                if step is None:
                    return None
                raise
            raise CheckpointError(errno.EAGAIN, f"the checkpoints in {self.path} are removed faster than they can be read")

    def _restore(self, dir_fd: int, step: int | None) -> Restored | None:
        there = self._files.names(dir_fd)
        names = self._there(dir_fd)
        wanted = names if step is None else [name for name in names if name.step == step]
        passed: list[tuple[str, str]] = []
        for name in wanted:
            try:
                manifest, state = read(self._files, dir_fd, name)
            except DamagedError as error:
                if self._read_only and not self._files.exists(str(name), dir_fd=dir_fd):
                    raise _VanishedError from None
                passed.append((str(name), str(error)))
                self._set_aside(dir_fd, name, str(error))
            except _format.NewerVersionError as error:
                raise CheckpointError(
                    errno.ENOTSUP,
                    f"{self.path / str(name)} is of version {error} of the format, and this aiohooks reads up to version "
                    f"{_format.VERSION}; install a later one",
                ) from None
            else:
                return Restored(self._checkpoint(name, manifest.metrics), state, tuple(passed))
        if passed:
            raise self._nothing_good(passed)
        if step is not None:
            steps = ", ".join(str(each) for each in sorted({name.step for name in names})) or "none at all"
            raise CheckpointError(errno.ENOENT, f"{self.path} has no checkpoint of step {step}; there are: {steps}")
        aside = [name for name in there if _format.parse_damaged(name) is not None]
        if aside:
            raise self._nothing_good([(name, "was set aside as damaged before") for name in sorted(aside, reverse=True)])
        return None

    def _nothing_good(self, passed: list[tuple[str, str]]) -> CorruptCheckpointError:
        listed = "; ".join(f"{name}: {reason}" for name, reason in passed[:5]) + ("; ..." if len(passed) > 5 else "")
        return CorruptCheckpointError(
            f"{self.path} has checkpoints and none of them is good: {listed}; to start anew, take another directory",
            path=self.path / passed[0][0],
            reason=passed[0][1],
        )

    def _set_aside(self, dir_fd: int, name: _format.Name, reason: str) -> None:
        """Takes a damaged checkpoint out of the way, if this process may; never removes it."""
        self._manifests.pop(name, None)
        if self._read_only:
            _logger.warning("checkpoint %s is damaged and was passed over: %s", self.path / str(name), reason)
            return
        try:
            aside = _format.free(f"damaged-{name}", set(self._files.names(dir_fd)))
            self._files.rename(str(name), aside, dir_fd=dir_fd)
            self._files.sync(dir_fd)
        except OSError as error:
            _logger.warning("checkpoint %s is damaged and could not be set aside (%s): %s", self.path / str(name), error, reason)
        else:
            _logger.warning("checkpoint %s is damaged and was set aside as %s: %s", self.path / str(name), aside, reason)

    # Looking

    @_one_at_a_time
    def checkpoints(self) -> list[Checkpoint]:
        """Those whose manifest is sound, the newest first."""
        with _told(f"the checkpoints in {self.path} could not be listed"):
            try:
                with self._files.directory(self.path) as dir_fd:
                    return self._known(dir_fd)
            except FileNotFoundError:
                return []

    def verify(self) -> list[Verified]:
        """Reads everything through and changes nothing; the newest first, those set aside last."""
        found: list[Verified] = []
        with _told(f"the checkpoints in {self.path} could not be verified"):
            try:
                with self._files.directory(self.path) as dir_fd:
                    for name in self._there(dir_fd):
                        one = self._verify(dir_fd, name)
                        if one.reason is None or self._files.exists(str(name), dir_fd=dir_fd):
                            found.append(one)
                    found += [
                        Verified(self.path / each, was, "was set aside as damaged", was_set_aside=True)
                        for each in reversed(self._files.names(dir_fd))
                        if (was := _format.parse_damaged(each)) is not None
                    ]
            except FileNotFoundError:
                return []
        return found

    def _verify(self, dir_fd: int, name: _format.Name) -> Verified:
        path, manifest = self.path / str(name), None
        try:
            manifest = read_manifest(self._files, dir_fd, name)
            read(self._files, dir_fd, name)
        except DamagedError as error:
            return Verified(path, name, str(error), manifest=manifest)
        except _format.NewerVersionError as error:
            return Verified(path, name, f"is of the later version {error} of the format")
        return Verified(path, name, None, manifest=manifest)

    @_one_at_a_time
    def close(self) -> None:
        """Gives the directory up; it can be used again."""
        self._lock.release()


class _VanishedError(Exception):
    """A checkpoint was removed while it was read, by the writer whose it is."""


@contextlib.contextmanager
def _told(what: str) -> Generator[None]:
    """Makes a CheckpointError of what the system refuses, with its errno."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(error.errno or errno.EIO, f"{what}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(errno.ENOMEM, f"{what}: there is not enough memory") from error
