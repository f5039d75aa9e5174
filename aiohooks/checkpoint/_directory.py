"""All that is done with a checkpoint directory, as plain blocking functions; `Saver` calls them in worker threads."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from aiohooks._errors import CheckpointError, CorruptCheckpointError
from aiohooks.checkpoint import _manifest, _names, _reading, _writing
from aiohooks.checkpoint._checkpoint import Checkpoint, Restored
from aiohooks.checkpoint._errors import DamagedError
from aiohooks.checkpoint._files import Files
from aiohooks.checkpoint._keep import KeepPolicy
from aiohooks.checkpoint._lock import DirectoryLock

_logger = logging.getLogger("aiohooks")
P = ParamSpec("P")
R = TypeVar("R")

# How often a reader without the lock looks again when a writer removed what it was about to read.
_MOST_LOOKS = 10
_ROOM_FOR_MANIFEST = 4096


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found when a checkpoint was read through."""

    path: Path
    name: _names.Name
    reason: str | None
    """What is wrong with it; None if it is good."""
    was_set_aside: bool = False
    manifest: _manifest.Manifest | None = None
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
        self._manifests: dict[_names.Name, Checkpoint] = {}

    def mutex(self) -> threading.Lock:
        """Held during each operation; a forked child has its own, as nobody would ever release the one it inherited."""
        if self._mutex_pid != os.getpid():
            self._mutex, self._mutex_pid = threading.Lock(), os.getpid()
        return self._mutex

    # Saving

    @_one_at_a_time
    def save(self, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> Checkpoint:
        """Puts a state on disk; see `Saver.save`."""
        from aiohooks.checkpoint import _state

        with _told(f"the checkpoint of step {step} was not saved in {self.path}"):
            if self._read_only:
                raise CheckpointError(errno.EROFS, f"the Saver of {self.path} was made with read_only=True; it saves nothing")
            data, arrays = _state.encode(state)
            dir_fd = self._lock.take()
            _writing.sweep(self._files, dir_fd)
            size = arrays.size + len(data) + _ROOM_FOR_MANIFEST
            _writing.check_space(self._files, dir_fd, size, self._min_free_bytes)
            name = _names.Name(_names.next_sequence(self._files.names(dir_fd)), step)
            contents: dict[str, _writing.Chunks] = {_names.ARRAYS: arrays.chunks(), _names.STATE: [data]}
            _writing.commit(self._files, dir_fd, name, metrics, contents)
        saved = self._manifests[name] = self._checkpoint(name, metrics)
        self._remove_old(dir_fd, saved)
        return saved

    def _remove_old(self, dir_fd: int, saved: Checkpoint) -> None:
        """From here on nothing fails any more: the checkpoint is there."""
        try:
            there = self._known(dir_fd)
            newest_of_step = {each.step: each for each in sorted(there, key=lambda each: each.sequence)}
            kept = self._keep.kept(sorted(newest_of_step.values(), key=lambda each: each.sequence, reverse=True))
            names = [_names.Name(each.sequence, each.step) for each in there if each != saved and each not in kept]
        except OSError as error:
            _logger.warning("no old checkpoint is removed: those there are could not be looked at (%s)", error)
            return
        except Exception:
            _logger.exception("no old checkpoint is removed: what to keep could not be found out")
            return
        if names:
            _writing.remove(self._files, dir_fd, names)
            for name in names:
                self._manifests.pop(name, None)

    def _known(self, dir_fd: int) -> list[Checkpoint]:
        """The checkpoints whose manifest is sound, the newest first."""
        names = self._there(dir_fd)
        self._manifests = {name: self._manifests[name] for name in names if name in self._manifests}
        for name in names:
            if name not in self._manifests:
                with contextlib.suppress(DamagedError, _manifest.NewerVersionError):
                    manifest = _reading.read_manifest(self._files, dir_fd, name)
                    self._manifests[name] = self._checkpoint(name, manifest.metrics)
        return [self._manifests[name] for name in names if name in self._manifests]

    def _checkpoint(self, name: _names.Name, metrics: Mapping[str, float]) -> Checkpoint:
        return Checkpoint(step=name.step, sequence=name.sequence, metrics=metrics, path=self.path / str(name))

    def _there(self, dir_fd: int) -> list[_names.Name]:
        found = [name for each in self._files.names(dir_fd) if (name := _names.parse(each)) is not None]
        return sorted(found, reverse=True)

    # Restoring

    @_one_at_a_time
    def restore(self, step: int | None) -> Restored | None:
        """The newest checkpoint that verifies; see `Saver.restore`."""
        with _told(f"no checkpoint could be restored from {self.path}"):
            if not self._read_only:
                dir_fd = self._lock.take()
                _writing.sweep(self._files, dir_fd)
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
                manifest, state = _reading.read(self._files, dir_fd, name)
            except DamagedError as error:
                if self._read_only and not self._files.exists(str(name), dir_fd=dir_fd):
                    raise _VanishedError from None
                passed.append((str(name), str(error)))
                self._set_aside(dir_fd, name, str(error))
            except _manifest.NewerVersionError as error:
                raise CheckpointError(
                    errno.ENOTSUP,
                    f"{self.path / str(name)} is of version {error} of the format, and this aiohooks reads up to version "
                    f"{_manifest.VERSION}; install a later one",
                ) from None
            else:
                return Restored(self._checkpoint(name, manifest.metrics), state, tuple(passed))
        if passed:
            raise self._nothing_good(passed)
        if step is not None:
            steps = ", ".join(str(each) for each in sorted({name.step for name in names})) or "none at all"
            raise CheckpointError(errno.ENOENT, f"{self.path} has no checkpoint of step {step}; there are: {steps}")
        aside = [name for name in there if _names.parse_damaged(name) is not None]
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

    def _set_aside(self, dir_fd: int, name: _names.Name, reason: str) -> None:
        """Takes a damaged checkpoint out of the way, if this process may; never removes it."""
        self._manifests.pop(name, None)
        if self._read_only:
            _logger.warning("checkpoint %s is damaged and was passed over: %s", self.path / str(name), reason)
            return
        try:
            aside = _names.free(f"damaged-{name}", set(self._files.names(dir_fd)))
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
                        if (was := _names.parse_damaged(each)) is not None
                    ]
            except FileNotFoundError:
                return []
        return found

    def _verify(self, dir_fd: int, name: _names.Name) -> Verified:
        path, manifest = self.path / str(name), None
        try:
            manifest = _reading.read_manifest(self._files, dir_fd, name)
            _reading.read(self._files, dir_fd, name)
        except DamagedError as error:
            return Verified(path, name, str(error), manifest=manifest)
        except _manifest.NewerVersionError as error:
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
