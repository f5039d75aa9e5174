"""Shared by the tests of checkpoints: an `os` that records, states, other entries on the disk, and
an exact comparison.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aiohooks.checkpoint import KeepNewest, KeepPolicy, Restored, Saver
from aiohooks.checkpoint._directory import CheckpointDirectory


class Call(NamedTuple):
    """An operation: its number, its name in `os`, and what it is called with."""

    number: int
    name: str
    real: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self) -> Any:
        """Do the operation."""
        return self.real(*self.args, **self.kwargs)


class Seam:
    """Replaces `os` in the library; each operation is done by `do`."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        """The operations that have begun, and how many bytes they were to write."""
        self.opened: set[int] = set()
        """The descriptors that are open."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = fcntl.flock if name == "flock" else getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.done)
            self.done.append((name, len(args[1]) if name == "write" else 0))
            result = self.do(Call(number, name, real, args, kwargs))
            if name == "open":
                self.opened.add(result)
            elif name == "close":
                self.opened.discard(args[0])
            return result

        self.__dict__[name] = call
        return call

    def do(self, call: Call) -> Any:
        """Do one operation."""
        return call.make()


class WatchedFs(Seam):
    """Records every operation. `operations` replace those of `os`, unrecorded."""

    def __init__(self, **operations: Callable[..., Any]) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.before: Callable[[str, tuple[Any, ...]], None] = lambda name, args: None
        vars(self).update(operations)

    def do(self, call: Call) -> Any:
        self.before(call.name, call.args)
        if call.name == "write":
            self.written.append(call.args[1])
        # No test here cuts the power, so waiting for the disk would only take time.
        return None if call.name == "fsync" else call.make()


def saver_over(fs: Any, path: Path, **options: Any) -> Saver:
    """Return a Saver that uses `fs`."""

    class WatchedSaver(Saver):
        _fs = fs

    return WatchedSaver(path, **options)


def directory(
    path: Path, fs: Any = os, keep: KeepPolicy = KeepNewest(5), **options: Any
) -> CheckpointDirectory:
    """Return the blocking directory of a Saver, for tests without an event loop."""
    return CheckpointDirectory(path, keep=keep, fs=fs, **options)


def saved(path: Path, *steps: int) -> list[Path]:
    """Save `state_of(step)` for each step; return the paths."""
    one = directory(path, WatchedFs(), KeepNewest(100))
    try:
        return [one.save(state_of(step), step, {}).path for step in steps]
    finally:
        one.close()


def step_of(restored: Restored | None) -> int | None:
    """Return the step of what was restored; None if nothing was."""
    return None if restored is None else restored.checkpoint.step


def saved_step(path: Path) -> int | None:
    """Return the step of the newest good checkpoint in a directory."""
    return step_of(asyncio.run(Saver(path, read_only=True).restore()))


def state_of(step: int) -> dict[str, Any]:
    """Return a small state that differs for each step."""
    return {
        "step": step,
        "weights": np.arange(4.0) + step,
        "rest": {"name": "a", "items": [1, (2, 3)]},
    }


def sealed_manifest(content: dict[str, Any], **changes: Any) -> bytes:
    """Return a manifest with changes (`...` removes a key), and the right checksum of itself."""
    content = {key: value for key, value in {**content, **changes}.items() if value is not ...}
    content.pop("checksum", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


OTHER_ENTRIES = (
    "link",
    "hanging link",
    "fifo",
    "directory",
    "socket",
    "device",
    "sparse",
    "nothing",
)


def replace_entry(path: Path, kind: str, elsewhere: Path) -> None:
    """Replace a file or directory by another kind of entry, one of `OTHER_ENTRIES`."""
    moved = path.with_name("moved")
    path.rename(moved)
    if kind == "link":
        path.symlink_to(moved)  # to the very same bytes
    elif kind == "hanging link":
        path.symlink_to(elsewhere / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)
        with socket.socket(
            socket.AF_UNIX
        ) as one:  # through the open directory, because the path of a socket is limited
            one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)


def names(path: Path) -> list[str]:
    """Return the names in a checkpoint directory, except the lock."""
    return sorted(each for each in os.listdir(path) if each != ".lock")


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same type and are equal to the last bit."""
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
