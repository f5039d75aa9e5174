"""The checkpoints in a directory of an fsspec file system: blocking calls, made in threads that may be left behind.

A checkpoint is there if its manifest is: that is written last and removed first. File systems raise what they like; errors pass
as they are.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from aiohooks.checkpoint import _format
from aiohooks.checkpoint._format import DamagedError, FileEntry, Manifest, Name, NewerVersionError, damage_in
from aiohooks.checkpoint.checkpoint import Checkpoint
from aiohooks.checkpoint.policies import KeepPolicy, not_kept
from aiohooks.errors import InvalidArgumentError, missing_extra

try:
    import fsspec as _untyped  # type: ignore[import-untyped]
except ImportError as _missing:
    raise missing_extra("a mirror of checkpoints", "fsspec") from _missing

fsspec: Any = _untyped

_READ_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 8 << 20
_MAX_BLOCKS = 5_000
"""Parts of one file; object stores allow 10,000."""

Alive = Callable[[], None]
"""Called between operations: notes progress, and raises if the caller has left the call behind."""


def check_url(url: str) -> None:
    """Raise unless there is a file system for the URL.

    Raises:
        InvalidArgumentError: the protocol is unknown.
        ImportError: its package is not installed; the message says which one.
    """
    protocol = url.partition("://")[0].rpartition("::")[2] if "://" in url else "file"
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise InvalidArgumentError(f"mirror has the protocol {protocol!r}, which fsspec does not know") from None


class RemoteDirectory:
    """A directory of checkpoints in a file system of fsspec, which is opened by the first call.

    Only names of checkpoints and of their files are ever written or removed.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url
        self._options = dict(options)
        self._opened: tuple[Any, str] | None = None
        self._known: dict[Name, Checkpoint] = {}
        """The checkpoints whose manifest has been read or written."""

    def _open(self, alive: Alive) -> tuple[Any, str]:
        """Return the file system and the path of the directory; called before each operation."""
        alive()
        if self._opened is None:
            # An instance of its own: its connections end with it.
            fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **self._options)
            self._opened = fs, str(root).rstrip("/")
        self._opened[0].invalidate_cache()  # of listings, which others may have changed
        return self._opened

    # Reading

    def names(self, alive: Alive) -> list[Name]:
        """Return the checkpoints, newest first, and those whose upload has not been finished."""
        fs, root = self._open(alive)
        try:
            paths: list[str] = fs.ls(root, detail=False)
        except FileNotFoundError:
            return []
        return _format.checkpoint_names(path.rstrip("/").rpartition("/")[2] for path in paths)

    def read_manifest(self, name: Name, alive: Alive) -> Manifest | None:
        """Read the manifest of a checkpoint; None if its upload has not been finished.

        Raises:
            DamagedError: it does not verify.
            NewerVersionError: it has a later version of the format.
        """
        data = self._read_manifest_file(name, alive)
        if data is None:
            return None
        with damage_in(_format.MANIFEST):
            return _format.decode(data, name)

    def _read_manifest_file(self, name: Name, alive: Alive) -> bytes | None:
        fs, root = self._open(alive)
        try:
            with fs.open(f"{root}/{name}/{_format.MANIFEST}", "rb") as file:
                alive()
                return cast("bytes", file.read(_format.MAX_MANIFEST_BYTES + 1))
        except FileNotFoundError:
            return None

    def read_file(self, name: Name, file: str, entry: FileEntry, alive: Alive) -> Generator[bytes]:
        """Read a file of a checkpoint; raise `DamagedError` at its end, or before, if it does not verify."""
        with damage_in(file):
            yield from _format.checked_pieces(self._read_pieces(f"{name}/{file}", alive), entry)

    def _read_pieces(self, path: str, alive: Alive) -> Generator[bytes]:
        fs, root = self._open(alive)
        try:
            opened = fs.open(f"{root}/{path}", "rb", block_size=_MIN_BLOCK_BYTES)
        except FileNotFoundError:
            raise DamagedError("is missing") from None
        with opened:
            alive()
            while piece := opened.read(_READ_BYTES):
                alive()
                yield piece

    # Writing

    def upload(
        self, data: bytes, manifest: Manifest, contents: Mapping[str, Iterable[bytes]], alive: Alive, *, read_back: bool
    ) -> bool:
        """Write a checkpoint, unless it is there: its files, and when they verify, its manifest `data`.

        Returns:
            Whether it was written.

        Raises:
            DamagedError: `contents` do not fit the manifest, or what was written does not come back.
            OSError: another checkpoint has that name.
        """
        name = manifest.name
        found = self._read_manifest_file(name, alive)
        if found is not None:
            if found == data and all(self._has_size(name, *each, alive) for each in manifest.files.items()):
                self._note(manifest)
                return False
            self._check_replaceable(name, found, data)
            self._remove_file(f"{name}/{_format.MANIFEST}", alive)
        for file, entry in manifest.files.items():
            with damage_in(file):
                self._write_file(f"{name}/{file}", _format.checked_pieces(contents[file], entry), entry.size, alive)
        for file, entry in manifest.files.items():
            if not self._has_size(name, file, entry, alive):
                raise DamagedError(f"{file} does not have {entry.size} bytes after its upload")
            if read_back:
                with damage_in("what was read back of"):
                    for _ in self.read_file(name, file, entry, alive):
                        pass
        self._write_file(f"{name}/{_format.MANIFEST}", [data], len(data), alive)
        if self._read_manifest_file(name, alive) != data:
            raise DamagedError(f"{_format.MANIFEST} is not what was uploaded")
        self._note(manifest)
        return True

    def _check_replaceable(self, name: Name, found: bytes, data: bytes) -> None:
        """Raise if there is another good manifest: another writer made it."""
        if found == data:
            return
        with contextlib.suppress(DamagedError):
            with contextlib.suppress(NewerVersionError):
                _format.decode(found, name)
            raise FileExistsError(errno.EEXIST, f"another checkpoint has the name {name}: a mirror has one writer")

    def _has_size(self, name: Name, file: str, entry: FileEntry, alive: Alive) -> bool:
        fs, root = self._open(alive)
        try:
            return bool(fs.info(f"{root}/{name}/{file}")["size"] == entry.size)
        except FileNotFoundError:
            return False

    def _write_file(self, path: str, pieces: Iterable[bytes], size: int, alive: Alive) -> None:
        fs, root = self._open(alive)
        path = f"{root}/{path}"
        block_size = max(_MIN_BLOCK_BYTES, size // _MAX_BLOCKS)
        try:
            file = fs.open(path, "wb", block_size=block_size)
        except FileNotFoundError:  # it has directories; an object store has none, and would make a bucket
            fs.makedirs(fs._parent(path), exist_ok=True)
            file = fs.open(path, "wb", block_size=block_size)
        try:
            alive()
            for piece in pieces:
                file.write(piece)
                alive()
        except BaseException:
            _discard_file(file)
            raise
        file.close()

    # Removing

    def remove_old(self, keep: KeepPolicy, saved: Name, alive: Alive) -> None:
        """Remove what the policy does not keep after `saved`, and unfinished uploads before it."""
        names = self.names(alive)
        unfinished: list[Name] = []
        for name in names:
            if name not in self._known:
                with contextlib.suppress(DamagedError, NewerVersionError):
                    manifest = self.read_manifest(name, alive)
                    if manifest is not None:
                        self._note(manifest)
                    elif name < saved:
                        unfinished.append(name)
        there = [self._known[name] for name in names if name in self._known]
        removed = not_kept(keep, there, self._known[saved])
        for name in [*unfinished, *(Name(each.sequence, each.step) for each in removed)]:
            self._remove(name, alive)

    def _remove(self, name: Name, alive: Alive) -> None:
        # The manifest first: without it the rest is no checkpoint.
        for file in (_format.MANIFEST, *_format.FILES):
            self._remove_file(f"{name}/{file}", alive)
        self._known.pop(name, None)
        fs, root = self._open(alive)
        with contextlib.suppress(OSError):  # there may be files of others in it; an object store has no directories
            fs.rmdir(f"{root}/{name}")

    def _remove_file(self, path: str, alive: Alive) -> None:
        fs, root = self._open(alive)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{path}")

    def _note(self, manifest: Manifest) -> None:
        name = manifest.name
        self._known[name] = Checkpoint(name.step, name.sequence, manifest.metrics, Path(str(name)), manifest.size)


def _discard_file(file: Any) -> None:
    """Close a file whose upload has failed; without its manifest, what is there of it is no checkpoint."""
    with contextlib.suppress(Exception):
        if isinstance(file, fsspec.spec.AbstractBufferedFile):
            try:
                file.discard()
            finally:
                file.closed = True  # its finaliser would upload the rest, in any thread
        else:
            file.close()
