"""A seam that records what is done to files, and the states that a crash could leave of it.

What was synced is there. Of what was not, anything may be: of each write all, nothing, zeros, or some of its sectors; of the
names of each folder any of the changes since the folder was synced, each for itself. A rename is there or it is not.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz._disk import Seam, Tree

SECTOR = 512
ROOT = 0


@dataclass(frozen=True, slots=True)
class Name:
    """A change of the names in a folder: an entry is added, is taken away, or both."""

    folder: int
    added: str | None
    removed: str | None
    node: int


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes put into a file; with `cut`, its length is set to `offset` instead."""

    node: int
    offset: int
    data: bytes
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Sync:
    """A file or a folder was synced."""

    node: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """So many saves have returned."""

    saves: int


Event = Name | Write | Sync | Acknowledged


@dataclass(slots=True)
class Beginning:
    """What was there, all of it durable: names of folders, bytes of files, by number of the node."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Beginning:
        return Beginning({node: dict(names) for node, names in self.folders.items()}, dict(self.files))

    @property
    def nodes(self) -> int:
        return len(self.folders) + len(self.files)


class Recorder(Seam):
    """Does everything under `root` for real, and keeps it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.events: list[Event] = []
        self.paths: set[str] = set()
        """Every path that was opened, made or renamed."""
        self._live = Beginning()
        self._open: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._read(root, ROOT)
        self.beginning = self._live.copy()

    @property
    def folders(self) -> frozenset[int]:
        """Numbers of all folders that there ever were."""
        return frozenset(self._live.folders)

    def acknowledge(self, saves: int) -> None:
        """Notes that a save has returned."""
        self.events.append(Acknowledged(saves))

    def _read(self, path: Path, node: int) -> None:
        for each in sorted(path.iterdir()):
            number = self._live.nodes
            self._live.folders[node][each.name] = number
            if each.is_dir():
                self._live.folders[number] = {}
                self._read(each, number)
            else:
                self._live.files[number] = each.read_bytes()

    def _resolve(self, path: str | os.PathLike[str], dir_fd: int | None) -> tuple[int | None, str]:
        """The folder and the name in it; for what is not under `root`, None; for a folder itself, no name."""
        if dir_fd is not None:
            return self._open.get(dir_fd), "" if path == "." else os.fspath(path)
        parts = Path(path).relative_to(self.root).parts if Path(path).is_relative_to(self.root) else None
        if parts is None:
            return None, ""
        node = ROOT
        for part in parts[:-1]:
            node = self._live.folders[node][part]
        return node, parts[-1] if parts else ""

    def do(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = real(*args, **kwargs)
        if note := getattr(self, f"_{name}_done", None):
            note(result, *args, **kwargs)
        return result

    def _change(self, folder: int, added: str | None, removed: str | None, node: int) -> None:
        names = self._live.folders[folder]
        if removed is not None:
            del names[removed]
        if added is not None:
            names[added] = node
        self.events.append(Name(folder, added, removed, node))

    def _open_done(self, fd: int, path: str, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> None:
        self.paths.add(os.readlink(f"/proc/self/fd/{fd}"))
        folder, name = self._resolve(path, dir_fd)
        if folder is None:
            return
        node = self._live.folders[folder].get(name) if name else folder
        if node is None:
            node = self._live.nodes
            self._live.files[node] = b""
            self._change(folder, name, None, node)
        elif flags & os.O_TRUNC:
            self.events.append(Write(node, 0, b"", cut=True))
        self._open[fd], self._offsets[fd] = node, 0

    def _close_done(self, _: None, fd: int) -> None:
        self._open.pop(fd, None)

    def _mkdir_done(self, _: None, path: str, mode: int, *, dir_fd: int | None = None) -> None:
        folder, name = self._resolve(path, dir_fd)
        if folder is not None:
            node = self._live.nodes
            self._live.folders[node] = {}
            self._change(folder, name, None, node)

    def _rename_done(self, _: None, old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        folder = self._open[src_dir_fd]
        self.paths.add(os.readlink(f"/proc/self/fd/{src_dir_fd}") + "/" + new)
        self._change(folder, new, old, self._live.folders[folder][old])

    def _unlink_done(self, _: None, name: str, *, dir_fd: int) -> None:
        folder = self._open[dir_fd]
        self._change(folder, None, name, self._live.folders[folder][name])

    _rmdir_done = _unlink_done

    def _write_done(self, size: int, fd: int, data: Any) -> None:
        self.events.append(Write(self._open[fd], self._offsets[fd], bytes(data[:size])))
        self._offsets[fd] += size

    def _pwrite_done(self, size: int, fd: int, data: Any, offset: int) -> None:
        self.events.append(Write(self._open[fd], offset, bytes(data[:size])))

    def _ftruncate_done(self, _: None, fd: int, size: int) -> None:
        self.events.append(Write(self._open[fd], size, b"", cut=True))

    def _fsync_done(self, _: None, fd: int) -> None:
        if fd in self._open:
            self.events.append(Sync(self._open[fd]))


class Crash:
    """Makes states that a crash could leave."""

    def __init__(self, recorder: Recorder) -> None:
        self.beginning, self.events, self.folders = recorder.beginning, recorder.events, recorder.folders

    def acknowledged(self, at: int) -> int:
        """How many saves had returned before the event of that number."""
        return max((each.saves for each in self.events[:at] if isinstance(each, Acknowledged)), default=0)

    def state(self, at: int, rng: random.Random) -> Tree:
        """One state after a crash before the event of that number."""
        synced = {each.node: number for number, each in enumerate(self.events[:at]) if isinstance(each, Sync)}
        now = self.beginning.copy()
        files = {node: bytearray(data) for node, data in now.files.items()}
        # Often all or nothing of one kind: what goes wrong, goes wrong there.
        names, data = rng.choice((0.0, 1.0, 1.0, 0.5, rng.random())), rng.choice((0.0, 0.0, 0.5, 1.0))
        for number, event in enumerate(self.events[:at]):
            if isinstance(event, Name):
                if number < synced.get(event.folder, -1) or rng.random() < names:
                    folder = now.folders.setdefault(event.folder, {})
                    if event.removed is not None:
                        folder.pop(event.removed, None)
                    if event.added is not None:
                        folder[event.added] = event.node
            elif isinstance(event, Write):
                file = files.setdefault(event.node, bytearray())
                if number < synced.get(event.node, -1) or rng.random() < data:
                    _put(file, event, event.data)
                else:
                    _put(file, event, _torn(event, file, rng))
        found: Tree = {}
        self._walk(ROOT, "", now, files, found)
        return found

    def _walk(self, node: int, path: str, now: Beginning, files: dict[int, bytearray], found: Tree) -> None:
        for name, each in now.folders.get(node, {}).items():
            if each in self.folders:
                found[path + name] = None
                self._walk(each, f"{path}{name}/", now, files, found)
            else:
                found[path + name] = bytes(files.get(each, b""))


def _put(file: bytearray, event: Write, data: bytes | None) -> None:
    if data is None:
        return
    if event.cut:
        del file[event.offset :]
        return
    if len(file) < event.offset:
        file += bytes(event.offset - len(file))
    file[event.offset : event.offset + len(data)] = data


def _torn(event: Write, file: bytearray, rng: random.Random) -> bytes | None:
    """What is left of a write that was not synced: nothing, zeros, its beginning, or some of its sectors."""
    kind = rng.choice((0, 1, 2, 2, 3, 3, 3))
    if kind == 0 or event.cut:
        return None
    size = len(event.data)
    if kind == 1:
        return bytes(size)
    # Sectors are those of the file, not of the write.
    ends = [*range(SECTOR - event.offset % SECTOR, size, SECTOR), size]
    if kind == 2:
        return event.data[: rng.choice([0, *ends])]
    kept = bytearray(size)
    begin = 0
    for end in ends:
        if rng.random() < 0.5:
            kept[begin:end] = event.data[begin:end]
        begin = end
    return bytes(kept)
