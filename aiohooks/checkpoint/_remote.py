"""The checkpoints in a directory of an fsspec file system: blocking calls, made in threads that may
be left behind.

A checkpoint is there if its manifest is: that is written last and removed first. File systems raise
what they like; errors pass as they are.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from aiohooks._core.reports import logger
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._format import (
    DamagedError,
    FileEntry,
    Manifest,
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

_MIN_BLOCK_BYTES = 8 << 20
_MAX_BLOCKS = 5_000
"""Parts of one file; object stores allow 10,000."""

_seen: set[str] = set()
"""The URLs of directories that this process has found there: one that is missing later is away, and
not new.
"""

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
        raise InvalidArgumentError(
            f"mirror has the protocol {protocol!r}, which fsspec does not know"
        ) from None


class RemoteDirectory:
    """A directory of checkpoints in a file system of fsspec, which is opened by the first call.

    Only names of checkpoints and of their files are ever written or removed.

    Args:
        url: where it is.
        options: arguments of the file system.
        read_back: whether a file is read after its upload to verify its checksum; otherwise its
            size is compared.
    """

    def __init__(self, url: str, options: Mapping[str, Any], *, read_back: bool = True) -> None:
        self._url = url
        self._options = dict(options)
        self._read_back = read_back
        self._opened: tuple[Any, str] | None = None
        self._known: dict[Name, Checkpoint] = {}
        """The checkpoints whose manifest has been read or written."""
        self._listed: set[Name] | None = None
        """What is there; None if it has to be listed, at first and after a failure."""
        self.is_there = False
        """Whether the last listing has found the directory."""
        self._is_new = False
        """Whether it has never been there, which has been logged."""

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

    def names(self, alive: Alive, *, missing_ok: bool = False) -> list[Name]:
        """Return the checkpoints, newest first, and those whose upload has not been finished.

        With `missing_ok` a directory that has never been there counts as empty, if the one above
        its parent is there.

        Raises:
            FileNotFoundError: the directory or the bucket is missing, which says nothing about what
                is in it.
        """
        fs, root = self._open(alive)
        self._listed = None
        try:
            paths: list[str] = _s3_prefixes(fs, root) if _is_s3(fs) else fs.ls(root, detail=False)
            self.is_there = bool(paths) or _has_directories(root) or _is_s3(fs)
        except FileNotFoundError:
            paths, self.is_there = [], False
        if not self.is_there and not _has_directories(
            root
        ):  # an object store has no empty directories
            # Who may list a part of a bucket may not be allowed to ask for the bucket, which is
            # there then.
            bucket = root.partition("/")[0]
            with contextlib.suppress(PermissionError):
                if not self._exists(bucket, alive):
                    raise FileNotFoundError(
                        errno.ENOENT,
                        f"the bucket {bucket} does not exist; make it, or correct the URL",
                    )
            self.is_there = True
        url = str(fs.unstrip_protocol(root))
        if self.is_there:
            _seen.add(url)
        elif (
            not missing_ok or url in _seen or not self._exists(fs._parent(fs._parent(root)), alive)
        ):
            raise FileNotFoundError(
                errno.ENOENT,
                f"{root} does not exist, and may not be mounted; mount it, or make it if the mirror"
                " is new",
            )
        elif not self._is_new:
            self._is_new = True
            logger.warning(
                "mirror %s does not exist: it counts as new, and the first copy makes it; is a"
                " mount missing?",
                url,
            )
        names = _format.checkpoint_names(path.rstrip("/").rpartition("/")[2] for path in paths)
        self._listed = set(names) if self.is_there else None
        return names

    def _exists(self, path: str, alive: Alive) -> bool:
        """Return whether a directory or bucket is there; `exists` of fsspec takes each error for a
        missing file.
        """
        fs, _ = self._open(alive)
        try:
            return path in ("", "/") or bool(fs.info(path))
        except FileNotFoundError:
            return False

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
            return cast(
                "bytes",
                fs.cat_file(
                    f"{root}/{name}/{_format.MANIFEST}", start=0, end=_format.MAX_MANIFEST_BYTES + 1
                ),
            )
        except FileNotFoundError:
            return None

    def read_file(self, name: Name, file: str, entry: FileEntry, alive: Alive) -> Generator[bytes]:
        """Read a file of a checkpoint; raise `DamagedError` at its end, or before, if it does not
        verify.
        """
        with damage_in(file):
            yield from _format.checked_pieces(self._read_pieces(f"{name}/{file}", alive), entry)

    def _read_pieces(self, path: str, alive: Alive) -> Generator[bytes]:
        start, piece = 0, b""
        while start == 0 or len(piece) > _MIN_BLOCK_BYTES:
            fs, root = self._open(alive)
            try:  # one byte more, so that no request begins behind the end
                piece = cast(
                    "bytes",
                    fs.cat_file(f"{root}/{path}", start=start, end=start + _MIN_BLOCK_BYTES + 1),
                )
            except FileNotFoundError:
                raise DamagedError("is missing") from None
            alive()
            yield piece[:_MIN_BLOCK_BYTES]
            start += _MIN_BLOCK_BYTES

    # Writing

    def upload(
        self,
        manifest: Manifest,
        contents: Mapping[str, Iterable[bytes]],
        alive: Alive,
        *,
        is_new: bool,
        may_make: bool,
    ) -> bool | None:
        """Write a checkpoint: its files, and when they verify, its manifest.

        Returns:
            Whether it was written; False if it is there, None if it was left out: it is not
            `is_new`, and there is a newer one.

        Raises:
            DamagedError: `contents` do not fit the manifest, or what was written does not come
                back.
            OSError: another checkpoint has that name.
        """
        name, data = manifest.name, _format.encode(manifest)
        listed = (
            set(self.names(alive, missing_ok=may_make)) if self._listed is None else self._listed
        )
        self._listed = None
        found = self._read_manifest_file(name, alive) if name in listed else None
        written: bool | None = True
        if found == data and self._wrong_size(manifest, alive) is None:
            written = False
        elif not is_new and any(
            each > name and self._read_manifest_file(each, alive) is not None for each in listed
        ):
            written = None
        else:
            if found is not None:
                if found != data:
                    _check_replaceable(manifest, found)
                self._remove_files(name, [_format.MANIFEST], alive)
            self._write(manifest, data, contents, alive)
        self._listed = {*listed, name}
        if written is not None:
            self._known[name] = manifest.checkpoint(Path())
        return written

    def _write(
        self, manifest: Manifest, data: bytes, contents: Mapping[str, Iterable[bytes]], alive: Alive
    ) -> None:
        name = manifest.name
        fs, root = self._open(alive)
        if not self.is_there:
            fs.makedirs(root, exist_ok=True)
            self.names(alive)
        for file, entry in manifest.files.items():
            with damage_in(file):
                self._write_file(
                    name, file, _format.checked_pieces(contents[file], entry), entry.size, alive
                )
        if not self._read_back and (wrong := self._wrong_size(manifest, alive)) is not None:
            raise DamagedError(
                f"{wrong} does not have {manifest.files[wrong].size} bytes after its upload"
            )
        for file, entry in manifest.files.items() if self._read_back else ():
            with damage_in("what was read back of"):
                for _ in self.read_file(name, file, entry, alive):
                    pass
        etag = self._write_file(name, _format.MANIFEST, [data], len(data), alive)
        # A store that answers with the checksum of what it has got need not be asked again.
        is_right = etag == hashlib.md5(data, usedforsecurity=False).hexdigest()
        if not is_right and self._read_manifest_file(name, alive) != data:
            raise DamagedError(f"{_format.MANIFEST} is not what was uploaded")

    def _wrong_size(self, manifest: Manifest, alive: Alive) -> str | None:
        """Return a file of a checkpoint that is missing or has another size, or None."""
        fs, root = self._open(alive)
        try:
            listed: list[dict[str, Any]] = fs.ls(f"{root}/{manifest.name}", detail=True)
        except FileNotFoundError:
            listed = []
        sizes = {str(each["name"]).rpartition("/")[2]: each["size"] for each in listed}
        return next(
            (file for file, entry in manifest.files.items() if sizes.get(file) != entry.size), None
        )

    def _write_file(
        self, name: Name, file: str, pieces: Iterable[bytes], size: int, alive: Alive
    ) -> str:
        """Write a file; return its checksum if the store has answered with one."""
        fs, root = self._open(alive)
        path = f"{root}/{name}/{file}"
        if _is_s3(fs) and size <= _MIN_BLOCK_BYTES:
            answer: dict[str, Any] = fs.pipe_file(path, b"".join(pieces))
            return str(answer.get("ETag")).strip('"')
        block_size = max(_MIN_BLOCK_BYTES, size // _MAX_BLOCKS)
        try:
            opened = fs.open(path, "wb", block_size=block_size)
        except (
            FileNotFoundError
        ):  # it has directories; an object store has none, and would make a bucket
            # Not its parents: where the directory of the mirror is missing, it is away.
            fs.mkdir(f"{root}/{name}", create_parents=False)
            opened = fs.open(path, "wb", block_size=block_size)
        try:
            alive()
            for piece in pieces:
                opened.write(piece)
                alive()
        except BaseException:
            _discard_file(opened)
            raise
        opened.close()
        return ""

    # Removing

    def remove_old(self, keep: KeepPolicy, saved: Name, alive: Alive) -> None:
        """Remove what the policy does not keep after `saved`, and unfinished uploads before it;
        never what is newer.
        """
        listed = self._listed or set()
        newest_first = sorted(listed, reverse=True)
        unfinished: list[Name] = []
        for name in newest_first:
            if name not in self._known:
                with contextlib.suppress(DamagedError, NewerVersionError):
                    manifest = self.read_manifest(name, alive)
                    if manifest is None:
                        unfinished.append(name)
                    else:
                        self._known[name] = manifest.checkpoint(Path())
        there = [self._known[name] for name in newest_first if name in self._known]
        not_wanted = not_kept(keep, there, self._known[saved])
        removed = [*unfinished, *(Name(each.sequence, each.step) for each in not_wanted)]
        for name in filter(saved.__gt__, removed):
            # The manifest first: without it the rest is no checkpoint.
            self._remove_files(name, [_format.MANIFEST, *_format.FILES], alive)
            self._known.pop(name, None)
            listed.discard(name)
            fs, root = self._open(alive)
            if _has_directories(root):
                with contextlib.suppress(OSError):  # there may be files of others in it
                    fs.rmdir(f"{root}/{name}")

    def _remove_files(self, name: Name, files: Iterable[str], alive: Alive) -> None:
        fs, root = self._open(alive)
        paths = [f"{root}/{name}/{file}" for file in files]
        if not _is_s3(fs):
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    self._open(alive)[0].rm_file(path)
            return
        # One request; that of s3fs itself says nothing about files that could not be removed.
        keys = [{"Key": fs.split_path(path)[1]} for path in paths]
        answer = fs.call_s3(
            "delete_objects", Bucket=fs.split_path(root)[0], Delete={"Objects": keys, "Quiet": True}
        )
        for error in answer.get("Errors", ()):
            raise PermissionError(
                errno.EACCES, f"{error.get('Key')}: {error.get('Code')} {error.get('Message')}"
            )


def _has_directories(root: str) -> bool:
    """Return whether a file system has directories, which may be missing or empty: its paths begin
    at a root.
    """
    return root.startswith("/")


def _is_s3(fs: Any) -> bool:
    return hasattr(fs, "call_s3")


def _s3_prefixes(fs: Any, root: str) -> list[str]:
    """Return what is in a directory, by one request for each thousand; s3fs itself makes two where
    there is nothing.
    """
    bucket, key, _ = fs.split_path(root)
    found, more = list[str](), dict[str, str]()
    while True:
        answer = fs.call_s3(
            "list_objects_v2",
            fs.kwargs,
            Bucket=bucket,
            Prefix=f"{key}/" if key else "",
            Delimiter="/",
            **more,
        )
        found += [each["Prefix"] for each in answer.get("CommonPrefixes", ())]
        if not answer.get("IsTruncated"):
            return found
        more = {"ContinuationToken": answer["NextContinuationToken"]}


def _check_replaceable(manifest: Manifest, found: bytes) -> None:
    """Raise if there is another good manifest, and not only of other metrics: another writer made
    it.
    """
    name = manifest.name
    with contextlib.suppress(DamagedError):
        with contextlib.suppress(NewerVersionError):
            if _format.decode(found, name).files == manifest.files:
                return
        raise FileExistsError(
            errno.EEXIST, f"another checkpoint has the name {name}: a mirror has one writer"
        )


def _discard_file(file: Any) -> None:
    """Close a file whose upload has failed; without its manifest, what is there of it is no
    checkpoint.
    """
    with contextlib.suppress(Exception):
        if isinstance(file, fsspec.spec.AbstractBufferedFile):
            try:
                file.discard()
            finally:
                file.closed = True  # its finaliser would upload the rest, in any thread
        else:
            file.close()
