"""The checkpoints in a directory of an fsspec file system.

A checkpoint is there if its manifest is: the manifest is written last and removed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiohooks._core.cancel import retrieve_exception, to_thread, wait_done
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._files import FileReader
from aiohooks.checkpoint._format import (
    DamagedError,
    Manifest,
    MirrorError,
    Name,
    NewerVersionError,
    damage_in,
)
from aiohooks.checkpoint.policies import Checkpoint, KeepPolicy, not_kept
from aiohooks.errors import InvalidArgumentError, missing_extra

try:
    import fsspec as _untyped  # type: ignore[import-untyped]
except ImportError as _missing:
    raise missing_extra("a mirror of checkpoints", "fsspec") from _missing

fsspec: Any = _untyped

T = TypeVar("T")

_BLOCK_BYTES = 8 << 20
"""How much one call reads or writes."""
_PART_BYTES = 32 << 20
"""How much an object store gets in one part; it allows 10,000 for a file."""


class RemoteDirectory:
    """A directory of checkpoints in a file system of fsspec, which the first call opens.

    A file system may block indefinitely, and a thread cannot be stopped. So each operation runs in
    a daemon thread of its own, which does not keep the process alive, and fails if it takes longer
    than `timeout_secs`. Only checkpoints and their files are ever written or removed.
    """

    def __init__(self, url: str, options: Mapping[str, Any], timeout_secs: float) -> None:
        protocol = url.partition("://")[0].rpartition("::")[2] if "://" in url else "file"
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise InvalidArgumentError(
                f"mirror has the protocol {protocol!r}, which fsspec does not know",
            ) from None
        self._url = url
        self._options = dict(options)
        self._timeout_secs = timeout_secs
        self._opened: tuple[Any, str] | None = None
        self._checkpoints: dict[Name, Checkpoint] = {}
        """The checkpoints whose manifest has been read or written."""

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a blocking function.

        Raises:
            MirrorError: the function failed, or took longer than `timeout_secs`.
        """
        future = self._start(function, *args)
        if not await wait_done([future], self._timeout_secs):
            self._opened = None  # its connections may be dead
            raise MirrorError(f"no progress for {self._timeout_secs} s")
        return future.result()

    def _start(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(retrieve_exception)  # the caller may have been cancelled

        def run() -> None:
            finish: Callable[[], None]
            try:
                finish = functools.partial(future.set_result, function(*args))
            except Exception as error:
                # The error gets no traceback: its frames refer to open files, whose finalizers
                # would block the event loop.
                text = f"{type(error).__name__}: {error}".removesuffix(": ")
                finish = functools.partial(future.set_exception, MirrorError(text))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish)

        threading.Thread(target=run, name=f"aiohooks: mirror {self._url}", daemon=True).start()
        return future

    def _open(self) -> tuple[Any, str]:
        """Return the file system and the path of the directory."""
        if self._opened is None:
            # An instance of its own: its connections end with it.
            fs, root = fsspec.core.url_to_fs(self._url, skip_instance_cache=True, **self._options)
            self._opened = fs, str(root).rstrip("/")
        self._opened[0].invalidate_cache()  # of listings, which others may have changed
        return self._opened

    # Reading

    async def names(self) -> list[Name]:
        """Return the checkpoints, also those whose upload has not been finished, newest first.

        Raises:
            MirrorError: the directory or the bucket is missing, which says nothing about the
                checkpoints in it; or it cannot be read.
        """
        paths = await self.call(self._list)
        return _format.checkpoint_names(path.rstrip("/").rpartition("/")[2] for path in paths)

    def _list(self) -> list[str]:
        fs, root = self._open()
        with contextlib.suppress(FileNotFoundError):
            paths: list[str] = fs.ls(root, detail=False)
            return paths
        if _has_directories(root):
            raise FileNotFoundError(
                f"{root} does not exist, and may not be mounted; mount it, or make it if the"
                " mirror is new",
            )
        # An object store has no empty directories. Whoever may list a part of a bucket may not be
        # allowed to ask for the bucket, which exists then.
        bucket = root.partition("/")[0]
        with contextlib.suppress(PermissionError):
            try:
                fs.info(bucket)
            except FileNotFoundError:
                text = f"the bucket {bucket} does not exist; make it, or correct the URL"
                raise FileNotFoundError(text) from None
        return []

    async def read_manifest(self, name: Name) -> Manifest | None:
        """Read the manifest of a checkpoint; None if its upload has not been finished.

        Raises:
            DamagedError: it does not verify.
            NewerVersionError: it has a later version of the format.
        """
        data = await self._read_manifest_file(name)
        if data is None:
            return None
        with damage_in(_format.MANIFEST):
            return _format.decode(data, name)

    async def _read_manifest_file(self, name: Name) -> bytes | None:
        path = f"{name}/{_format.MANIFEST}"
        return await self.call(self.read_range, path, 0, _format.MAX_MANIFEST_BYTES + 1)

    def read_range(self, path: str, start: int, end: int) -> bytes | None:
        """Read a part of a file; return None if the file is missing. This method blocks."""
        fs, root = self._open()
        try:
            data: bytes = fs.cat_file(f"{root}/{path}", start=start, end=end)
        except FileNotFoundError:
            return None
        return data

    def file(self, manifest: Manifest, file: str) -> RemoteFile:
        """Return a reader of a file of a checkpoint."""
        return RemoteFile(self, manifest, file)

    # Writing

    async def upload(self, manifest: Manifest, contents: Mapping[str, FileReader]) -> None:
        """Write a checkpoint: its files, and when they verify, its manifest.

        Nothing is written if the checkpoint is there, and only the manifest if its metrics differ.

        Raises:
            DamagedError: a file that is read back does not fit the manifest.
            MirrorError: another checkpoint has that name, or the mirror could not be written.
        """
        name = manifest.name
        existing: Manifest | None = None
        with contextlib.suppress(DamagedError):
            existing = await self.read_manifest(name)
        if existing is None:
            for file, reader in contents.items():
                await self._write_file(f"{name}/{file}", reader)
            for file in manifest.files:
                with damage_in("what was read back of"):
                    await self.file(manifest, file).verify()
        elif existing.files != manifest.files:
            raise MirrorError(f"another checkpoint has the name {name}: a mirror has one writer")
        data = _format.encode(manifest)
        if existing is None or _format.encode(existing) != data:
            await self._write_file(f"{name}/{_format.MANIFEST}", io.BytesIO(data))
            if await self._read_manifest_file(name) != data:
                raise DamagedError(f"{_format.MANIFEST} is not what was uploaded")
        self._checkpoints[name] = manifest.checkpoint(Path())

    async def _write_file(self, path: str, source: FileReader | io.BytesIO) -> None:
        file = await self.call(self._create, path)
        try:
            while block := await to_thread(source.read, _BLOCK_BYTES):
                await self.call(file.write, block)
            await self.call(file.close)
        except BaseException as error:
            discarding = self._start(_discard, file)
            if isinstance(error, Exception):
                await wait_done([discarding], self._timeout_secs)
            raise

    def _create(self, path: str) -> Any:
        fs, root = self._open()
        with contextlib.suppress(FileNotFoundError):
            return fs.open(f"{root}/{path}", "wb", block_size=_PART_BYTES)
        # The file system has directories; an object store has none, and would make a bucket.
        # Parents are not made: if the directory of the mirror is missing, it is not mounted.
        fs.mkdir(f"{root}/{path.partition('/')[0]}", create_parents=False)
        return fs.open(f"{root}/{path}", "wb", block_size=_PART_BYTES)

    # Removing

    async def remove_old(self, keep: KeepPolicy, names: Sequence[Name], saved: Name) -> None:
        """Remove the checkpoints among `names` that are older than `saved` and not kept.

        Uploads that have not been finished are removed, too.
        """
        old: list[Name] = []
        for name in names:
            if name not in self._checkpoints:
                with contextlib.suppress(DamagedError, NewerVersionError):
                    manifest = await self.read_manifest(name)
                    if manifest is None:
                        old.append(name)
                    else:
                        self._checkpoints[name] = manifest.checkpoint(Path())
        newest_first = sorted({saved, *names}, reverse=True)
        there = [self._checkpoints[name] for name in newest_first if name in self._checkpoints]
        not_wanted = not_kept(keep, there, self._checkpoints[saved])
        old += [_format.name_of(checkpoint) for checkpoint in not_wanted]
        for name in old:
            if name < saved:
                await self.call(self._remove, name)
                self._checkpoints.pop(name, None)

    def _remove(self, name: Name) -> None:
        fs, root = self._open()
        # The manifest first: without it the rest is no checkpoint.
        for file in (_format.MANIFEST, *_format.FILES):
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{root}/{name}/{file}")
        if _has_directories(root):
            with contextlib.suppress(OSError):  # there may be files of others in it
                fs.rmdir(f"{root}/{name}")


class RemoteFile:
    """Reads a file of a checkpoint in a mirror, and verifies it."""

    def __init__(self, directory: RemoteDirectory, manifest: Manifest, file: str) -> None:
        self._directory = directory
        self._path = f"{manifest.name}/{file}"
        self._file = file
        self._entry = manifest.files[file]
        self._size = 0
        self._crc32 = 0

    async def read(self) -> bytes:
        """Return the next block; b"" at the end.

        Raises:
            DamagedError: the file is missing, or does not have the size or checksum of its entry.
            MirrorError: it could not be read.
        """
        left = self._entry.size - self._size
        if not left:
            return b""
        with damage_in(self._file):
            data = await self._directory.call(self._read_block)
            if data is None:
                raise DamagedError("is missing")
            # A block is read with the byte after it, which finds a file that is too long.
            if len(data) != min(_BLOCK_BYTES + 1, left):
                raise DamagedError(f"does not have the {self._entry.size} bytes in the manifest")
            block = data[:_BLOCK_BYTES]
            self._size += len(block)
            if len(block) == left and self._crc32 != self._entry.crc32:
                raise DamagedError("does not have the checksum in the manifest")
            return block

    def _read_block(self) -> bytes | None:
        end = self._size + _BLOCK_BYTES + 1
        data = self._directory.read_range(self._path, self._size, end)
        if data is not None:
            self._crc32 = zlib.crc32(data[:_BLOCK_BYTES], self._crc32)
        return data

    async def verify(self) -> None:
        """Read the file to its end. Raises as `read` does."""
        while await self.read():
            pass


def _has_directories(root: str) -> bool:
    """Return whether a file system has directories, which may be missing or empty.

    The paths of such a file system begin at a root.
    """
    return root.startswith("/")


def _discard(file: Any) -> None:
    """Close a file whose upload has failed; without its manifest, the rest is no checkpoint."""
    with contextlib.suppress(Exception):
        if isinstance(file, fsspec.spec.AbstractBufferedFile):
            try:
                file.discard()
            finally:
                file.closed = True  # its finalizer would upload the rest, in any thread
        else:
            file.close()
