"""What the tests of checkpoints share: an `os` that watches and fails, states of every type, and telling them apart."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from aiohooks.checkpoint import KeepNewest, KeepPolicy, Saver
from aiohooks.checkpoint.saver import CheckpointDirectory


class WatchedFs:
    """Stands in for `os`: records every operation, fails one of them if told to, and knows what is open.

    Args:
        fail_at: the number of the operation that fails, counted from 1.
        error: what it fails with.
        done: whether the operation is done before it fails, as one whose answer was lost.
    """

    def __init__(self, fail_at: int | None = None, error: int = errno.EIO, *, done: bool = False) -> None:
        self.log: list[tuple[str, Any]] = []
        self.failed: str | None = None
        self.opened: set[int] = set()
        self.written: list[Any] = []
        self.before: Callable[[str, tuple[Any, ...]], None] = lambda name, args: None
        self._fail_at = fail_at
        self._error = error
        self._done = done

    def __getattr__(self, name: str) -> Any:
        operation = getattr(os, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.before(name, args)
            self.log.append((name, args[0] if args else None))
            fails = len(self.log) == self._fail_at
            if fails:
                self.failed = name
            # A file is closed whatever closing it answers.
            if fails and not self._done and name != "close":
                raise OSError(self._error, os.strerror(self._error))
            if name == "write":
                self.written.append(args[1])
            # No test here cuts the power: waiting for the disk would show nothing.
            result: Any = None if name == "fsync" else operation(*args, **kwargs)
            if name == "open":
                self.opened.add(result)
            elif name == "close":
                self.opened.discard(args[0])
            if fails:
                if name == "open":  # nobody will ever hear of it
                    self.opened.discard(result)
                    os.close(result)
                raise OSError(self._error, os.strerror(self._error))
            return result

        return watched

    @property
    def names(self) -> list[str]:
        """The operations in their order."""
        return [name for name, _ in self.log]


def saver_over(fs: Any, path: Path, **options: Any) -> Saver:
    """A Saver whose file operations `fs` does."""

    class WatchedSaver(Saver):
        _fs = fs

    return WatchedSaver(path, **options)


def directory(path: Path, fs: Any = os, keep: KeepPolicy = KeepNewest(5), **options: Any) -> CheckpointDirectory:  # noqa: B008
    """What a Saver works with, for a test without an event loop."""
    options = {"min_free_bytes": 0, "read_only": False, **options}
    return CheckpointDirectory(path, keep=keep, fs=fs, **options)


def saved(path: Path, *steps: int) -> list[Path]:
    """Saves `{"step": step, "weights": ...}` for each of these steps; where they are."""
    one = directory(path, WatchedFs(), KeepNewest(100))
    try:
        return [one.save(state_of(step), step, {}).path for step in steps]
    finally:
        one.close()


def state_of(step: int) -> dict[str, Any]:
    """A small state that is another one at each step."""
    return {"step": step, "weights": np.arange(4.0) + step, "rest": {"name": "a", "items": [1, (2, 3)]}}


def names(path: Path) -> list[str]:
    """What is in a checkpoint directory besides the lock."""
    return sorted(each for each in os.listdir(path) if each != ".lock")


def same(one: Any, other: Any) -> bool:
    """Whether two values are of the same type and the same to the last bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
