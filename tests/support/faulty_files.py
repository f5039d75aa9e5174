"""A file system of fsspec, in memory, that fails on demand: `faulty://disk/run` with
`storage_options={"disk": Disk()}`.

Directories are prefixes of names, as in an object store. With `partial=True` a file that is being
written is visible, as in a file system; otherwise it appears when it is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from aiohooks.checkpoint import Mirror, MirrorStatus, Saver
from tests.support.waiting import HANG_SECS


def status_of(saver: Saver) -> MirrorStatus:
    """Return the status of the mirror of a Saver that has one."""
    status = saver.mirror_status
    assert status is not None
    return status


def memory_mirror(tmp_path: Path) -> Mirror:
    """Return a mirror in a new directory of fsspec's file system in memory."""
    fsspec.filesystem("memory").mkdir(f"/{tmp_path.name}")
    return Mirror(f"memory://{tmp_path.name}")


class Disk:
    """The files of a file system, what was done to them, and what fails.

    `before` is called in the mirror's thread before each operation, with its name and path: it may
    raise, block or change files.
    """

    def __init__(self, *, partial: bool = False) -> None:
        self.files: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        self.partial = partial
        self.is_missing = False
        """Whether its bucket is missing."""
        self.before: Callable[[str, str], None] = lambda operation, path: None
        self.opened = 0
        """How many file systems have been opened on it."""

    def note(self, operation: str, path: str) -> None:
        """Record an operation, which `before` may let fail."""
        path = path.removeprefix("disk/run/")
        self.log.append((operation, path))
        self.before(operation, path)

    def mirror(self, **options: Any) -> Mirror:
        """Return a mirror on this disk."""
        return Mirror("faulty://disk/run", storage_options={"disk": self}, **options)

    def checkpoints(self) -> list[str]:
        """Return the names of the checkpoints that have a manifest, in order."""
        found = [path.split("/")[-2] for path in self.files if path.endswith("/manifest.json")]
        return sorted(found, key=lambda name: name.rpartition(".")[2])

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that have a manifest, in the order of their
        sequences.
        """
        return [int(name[5:17]) for name in self.checkpoints()]

    def fail(self, *operations: str) -> None:
        """Let these operations fail from now on; all of them, if none is named."""

        def fail(operation: str, path: str) -> None:
            if not operations or operation in operations:
                raise ConnectionRefusedError("refused")

        self.before = fail

    def heal(self) -> None:
        """Let everything succeed."""
        self.before = lambda operation, path: None

    def hang(self, operation: str, path: str = "", *, once: bool = False) -> Hang:
        """Let an operation on paths that contain `path` block until it is released."""
        hang = Hang()

        def block(found: str, where: str) -> None:
            if found == operation and path in where and not (once and hang.reached.is_set()):
                hang.reached.set()
                assert hang.released.wait(HANG_SECS)

        self.before = block
        return hang


class Hang:
    """An operation that blocks; a context manager that releases it at the end."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def __enter__(self) -> Hang:
        return self

    def __exit__(self, *exc: object) -> None:
        self.released.set()


class _Upload:
    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path, self._data, self._closed = disk, path, b"", False
        self._show()

    def _show(self) -> None:
        if self._disk.partial:
            self._disk.files[self._path] = self._data

    def write(self, data: bytes) -> int:
        self._disk.note("write", self._path)
        self._data += data
        self._show()
        return len(data)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disk.note("close", self._path)
            self._disk.files[self._path] = self._data


class FaultyFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """See the module."""

    protocol = "faulty"

    def __init__(self, disk: Disk, **options: Any) -> None:
        super().__init__(**options)
        self.disk = disk
        disk.opened += 1

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        self.disk.note("ls", path)
        start = path.rstrip("/") + "/"
        found = sorted(
            {
                start + each.removeprefix(start).split("/")[0]
                for each in self.disk.files
                if each.startswith(start)
            }
        )
        if not found:
            raise FileNotFoundError(path)
        return [self._entry(each) for each in found] if detail else found

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self.disk.note("info", path)
        if path == "disk" and not self.disk.is_missing:
            return {"name": path, "type": "directory", "size": 0}
        if path not in self.disk.files:
            raise FileNotFoundError(path)
        return self._entry(path)

    def _entry(self, path: str) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self.disk.files.get(path, b""))}

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        self.disk.note("read", path)
        if path not in self.disk.files:
            raise FileNotFoundError(path)
        return self.disk.files[path][start:end]

    def open(self, path: str, mode: str = "wb", **options: Any) -> Any:
        self.disk.note(f"open {mode}", path)
        return _Upload(self.disk, path)

    def rm_file(self, path: str) -> None:
        self.disk.note("remove", path)
        if self.disk.files.pop(path, None) is None:
            raise FileNotFoundError(path)

    def rmdir(self, path: str) -> None:
        raise FileNotFoundError(path)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
