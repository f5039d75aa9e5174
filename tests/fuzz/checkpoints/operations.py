"""The layer of faults: a replacement of `os` that records the operations of a writer, or lets one
of them fail or be its last.

`Crash` makes of a record the states of the disk that a power cut could leave. What was synced is
there. Of the rest, any part may
be: of each write all, nothing, zeros, or some of its sectors; of the names in each directory any of
the changes since it was synced, independently. A rename is there completely or not at all.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.support.checkpoint_files import Call, Seam

SECTOR = 512
ROOT = 0

Tree = dict[str, bytes | None]
"""The contents of a directory by relative path: bytes of a file, None for a directory."""


def snapshot(path: Path) -> Tree:
    """Return the contents of a directory."""
    return {
        str(each.relative_to(path)): None if each.is_dir() else each.read_bytes()
        for each in sorted(path.rglob("*"))
    }


def materialise(tree: Tree, path: Path) -> None:
    """Make a directory have these contents, and no others; it may be a mount, which cannot be
    removed.
    """
    path.mkdir(exist_ok=True)
    for each in path.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
    base = f"{path}/"
    for name in sorted(tree):
        data = tree[name]
        if data is None:
            os.mkdir(base + name, 0o700)
        else:
            fd = os.open(base + name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            if data:
                os.write(fd, data)
            os.close(fd)


class Failing(Seam):
    """Lets one operation fail; or it fails after it was `done`; or it and `later` ones fail. A
    close that fails closes anyway.
    """

    def __init__(self, at: int, error: int, way: Literal["once", "done", "later"]) -> None:
        super().__init__()
        self.failed = ""
        """The operation that has failed first."""
        self.of_saved = False
        """Whether that was a write or a sync of a file that is being saved."""
        self.way, self._at, self._error = way, at, error

    def do(self, call: Call) -> Any:
        if call.number != self._at and not (self.way == "later" and call.number > self._at):
            return call.make()
        if not self.failed:
            self.failed = call.name
            self.of_saved = call.name in ("write", "fsync") and "/.tmp-step-" in os.readlink(
                f"/proc/self/fd/{call.args[0]}"
            )
        if call.name == "close" or self.way == "done":
            result = call.make()
            if call.name == "open":  # the caller does not get the descriptor
                os.close(result)
        raise OSError(self._error, os.strerror(self._error))


class DiedError(BaseException):
    """The process is dead; no operation is done any more."""


class Dying(Seam):
    """Lets the process die before one operation, or after some bytes of a write; `then` is called
    at that moment.
    """

    def __init__(
        self, at: int, after_bytes: int = 0, then: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.is_dead = False
        self._at, self._after_bytes, self._then = at, after_bytes, then

    def do(self, call: Call) -> Any:
        if self.is_dead:
            raise DiedError
        if call.number == self._at:
            if self._after_bytes:
                fd, data = call.args
                call.real(fd, memoryview(data)[: self._after_bytes])
            self.die()
        return call.make()

    def die(self) -> None:
        """Die, unless that has happened; the kernel closes what is open, and with it the lock."""
        if not self.is_dead:
            self._then()
            self.is_dead = True
            for fd in self.opened:
                os.close(fd)
            self.opened.clear()
        raise DiedError


# What a power cut leaves


class Name(NamedTuple):
    """A change of the names in a directory: an entry is added, removed, or both."""

    directory: int
    added: str | None
    removed: str | None
    node: int


class Write(NamedTuple):
    """Bytes written to a file; with `truncates`, its length is set to `offset` instead."""

    node: int
    offset: int
    data: bytes
    truncates: bool = False


class Sync(NamedTuple):
    """A file or a directory was synced."""

    node: int


class Acknowledged(NamedTuple):
    """So many saves have returned."""

    saves: int


@dataclass(slots=True)
class Contents:
    """Names in directories and bytes of files, by number of the node."""

    directories: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def copy(self) -> Contents:
        return Contents(
            {node: dict(names) for node, names in self.directories.items()}, dict(self.files)
        )

    @property
    def nodes(self) -> int:
        return len(self.directories) + len(self.files)


class Recorder(Seam):
    """Does each operation, and records those under `root`."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.events: list[Name | Write | Sync | Acknowledged] = []
        self._live = Contents()
        self._open: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._read_contents(root, ROOT)
        self.beginning = self._live.copy()

    @property
    def directories(self) -> frozenset[int]:
        """Return the numbers of all directories, also removed ones."""
        return frozenset(self._live.directories)

    def acknowledge(self, saves: int) -> None:
        """Record that a save has returned."""
        self.events.append(Acknowledged(saves))

    def _read_contents(self, path: Path, node: int) -> None:
        for each in sorted(path.iterdir()):
            number = self._live.nodes
            self._live.directories[node][each.name] = number
            if each.is_dir():
                self._live.directories[number] = {}
                self._read_contents(each, number)
            else:
                self._live.files[number] = each.read_bytes()

    def _resolve(self, path: str | os.PathLike[str], dir_fd: int | None) -> tuple[int | None, str]:
        """Return the directory and the name in it: no name for a directory itself, None for a path
        that is not under `root`.
        """
        if dir_fd is not None:
            return self._open.get(dir_fd), "" if path == "." else os.fspath(path)
        if not Path(path).is_relative_to(self.root):
            return None, ""
        parts, node = Path(path).relative_to(self.root).parts, ROOT
        for part in parts[:-1]:
            node = self._live.directories[node][part]
        return node, parts[-1] if parts else ""

    def do(self, call: Call) -> Any:
        result = call.make()
        if note := getattr(self, f"_{call.name}_done", None):
            note(result, *call.args, **call.kwargs)
        return result

    def _change(self, directory: int, added: str | None, removed: str | None, node: int) -> None:
        names = self._live.directories[directory]
        if removed is not None:
            del names[removed]
        if added is not None:
            names[added] = node
        self.events.append(Name(directory, added, removed, node))

    def _open_done(
        self, fd: int, path: str, flags: int, mode: int = 0, *, dir_fd: int | None = None
    ) -> None:
        directory, name = self._resolve(path, dir_fd)
        if directory is None:
            return
        node = self._live.directories[directory].get(name) if name else directory
        if node is None:
            node = self._live.nodes
            self._live.files[node] = b""
            self._change(directory, name, None, node)
        elif flags & os.O_TRUNC:
            self.events.append(Write(node, 0, b"", truncates=True))
        self._open[fd], self._offsets[fd] = node, 0

    def _close_done(self, _: None, fd: int) -> None:
        self._open.pop(fd, None)

    def _mkdir_done(self, _: None, path: str, mode: int, *, dir_fd: int | None = None) -> None:
        directory, name = self._resolve(path, dir_fd)
        if directory is not None:
            node = self._live.nodes
            self._live.directories[node] = {}
            self._change(directory, name, None, node)

    def _rename_done(
        self, _: None, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int
    ) -> None:
        directory = self._open[src_dir_fd]
        self._change(directory, new, old, self._live.directories[directory][old])

    def _unlink_done(self, _: None, name: str, *, dir_fd: int) -> None:
        directory = self._open[dir_fd]
        self._change(directory, None, name, self._live.directories[directory][name])

    _rmdir_done = _unlink_done

    def _write_done(self, size: int, fd: int, data: Any) -> None:
        self.events.append(Write(self._open[fd], self._offsets[fd], bytes(data[:size])))
        self._offsets[fd] += size

    def _pwrite_done(self, size: int, fd: int, data: Any, offset: int) -> None:
        self.events.append(Write(self._open[fd], offset, bytes(data[:size])))

    def _ftruncate_done(self, _: None, fd: int, size: int) -> None:
        self.events.append(Write(self._open[fd], size, b"", truncates=True))

    def _fsync_done(self, _: None, fd: int) -> None:
        if fd in self._open:
            self.events.append(Sync(self._open[fd]))


class Crash:
    """Generates states that a crash could leave."""

    def __init__(self, recorder: Recorder) -> None:
        self.beginning, self.events, self.directories = (
            recorder.beginning,
            recorder.events,
            recorder.directories,
        )

    def acknowledged(self, at: int) -> int:
        """Return how many saves had returned before the event of that number."""
        return max(
            (each.saves for each in self.events[:at] if isinstance(each, Acknowledged)), default=0
        )

    def state(self, at: int, rng: random.Random) -> Tree:
        """Return a random state after a crash before the event of that number."""
        synced = {
            each.node: number
            for number, each in enumerate(self.events[:at])
            if isinstance(each, Sync)
        }
        now = self.beginning.copy()
        files = {node: bytearray(data) for node, data in now.files.items()}
        # Often all or nothing of one kind: these states find most errors.
        names, data = (
            rng.choice((0.0, 1.0, 1.0, 0.5, rng.random())),
            rng.choice((0.0, 0.0, 0.5, 1.0)),
        )
        for number, event in enumerate(self.events[:at]):
            if isinstance(event, Name):
                if number < synced.get(event.directory, -1) or rng.random() < names:
                    directory = now.directories.setdefault(event.directory, {})
                    if event.removed is not None:
                        directory.pop(event.removed, None)
                    if event.added is not None:
                        directory[event.added] = event.node
            elif isinstance(event, Write):
                file = files.setdefault(event.node, bytearray())
                is_whole = number < synced.get(event.node, -1) or rng.random() < data
                _apply_write(file, event, event.data if is_whole else _torn(event, rng))
        found: Tree = {}
        self._walk(ROOT, "", now, files, found)
        return found

    def _walk(
        self, node: int, path: str, now: Contents, files: dict[int, bytearray], found: Tree
    ) -> None:
        for name, each in now.directories.get(node, {}).items():
            if each in self.directories:
                found[path + name] = None
                self._walk(each, f"{path}{name}/", now, files, found)
            else:
                found[path + name] = bytes(files.get(each, b""))


def _apply_write(file: bytearray, event: Write, data: bytes | None) -> None:
    if data is None:
        return
    if event.truncates:
        del file[event.offset :]
        return
    file += bytes(max(0, event.offset - len(file)))
    file[event.offset : event.offset + len(data)] = data


def _torn(event: Write, rng: random.Random) -> bytes | None:
    """Return what is left of a write that was not synced: nothing, zeros, its beginning, or some of
    its sectors.
    """
    kind = rng.choice((0, 1, 2, 2, 3, 3, 3))
    if kind == 0 or event.truncates:
        return None
    size = len(event.data)
    if kind == 1:
        return bytes(size)
    # The sectors of the file, not of the write.
    ends = [*range(SECTOR - event.offset % SECTOR, size, SECTOR), size]
    if kind == 2:
        return event.data[: rng.choice([0, *ends])]
    kept, begin = bytearray(size), 0
    for end in ends:
        if rng.random() < 0.5:
            kept[begin:end] = event.data[begin:end]
        begin = end
    return bytes(kept)


def open_files() -> set[tuple[str, str]]:
    """Return the descriptors of the open files of this process, with their targets."""
    found: set[tuple[str, str]] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found
