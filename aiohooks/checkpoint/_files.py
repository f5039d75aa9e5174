"""The file operations of checkpoints, and the lock of a checkpoint directory.

Names are relative to an open `Directory`. All operations go through one `fs` object, which is `os`
except in tests that record, fail or kill at any operation. Errors of `os` pass as they are. An
entry that is not a plain file of the expected size raises `DamagedError`.

entry     a name in a directory, of whatever kind: a file, a directory, a link, a pipe
durable   said of what a power cut does not undo: a file is durable after a sync of the file, and a
          name after a sync of its directory
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import stat
import threading
import zlib
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from aiohooks._core.files import write_all
from aiohooks._core.fork import call_after_fork
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._format import DamagedError, damage_in
from aiohooks.checkpoint.policies import Checkpoint, FileEntry
from aiohooks.errors import CheckpointBusyError, CheckpointError

try:
    import fcntl
except ImportError as error:
    raise CheckpointError(
        errno.ENOTSUP,
        "checkpoints need directories that can be opened, as on Unix; use Linux, macOS, or Linux in"
        " Windows (WSL)",
    ) from error

# Python itself sets O_CLOEXEC, and repeats calls that a signal has interrupted (except `close`), so
# neither is done here.
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NO_LINKS = os.O_NOFOLLOW
# Without this flag, opening a pipe for reading would wait for a writer.
_NO_WAIT = os.O_NONBLOCK
# How much one call reads: a small piece lets other threads run soon, and is still in the cache of
# the processor when its checksum is computed.
_PIECE_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 16

# Errors of open and read that mean the entry is damaged. All other errors come from this process
# (permissions, limits) and say nothing about the checkpoint.
_DAMAGE = {
    errno.ENOENT,
    errno.ELOOP,
    errno.EMLINK,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENXIO,
    errno.ENODEV,
    errno.EIO,
    errno.EBADMSG,
    getattr(errno, "EUCLEAN", errno.EIO),
}


@contextlib.contextmanager
def _damage_errors() -> Generator[None]:
    """Convert the errors in `_DAMAGE` to `DamagedError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise DamagedError(f"cannot be read ({error.strerror})") from error
        raise


def close_quietly(fs: Any, fd: int) -> None:
    """Close a descriptor through which nothing was written, and ignore errors."""
    with contextlib.suppress(OSError):
        fs.close(fd)


def exists(fs: Any, path: Path) -> bool:
    """Return whether there is an entry at a path."""
    with contextlib.suppress(FileNotFoundError):
        # A link counts, even if its target is missing.
        fs.stat(path, follow_symlinks=False)
        return True
    return False


class Directory:
    """An open directory, and the operations on the entries in it.

    Args:
        fs: an object with the functions of `os`, and optionally `flock`.
        path: its path, or its name in the directory `dir_fd`, where it must not be a link.
        dir_fd: the descriptor of an open directory.

    Attributes:
        names: the names in it when `list_names` was called last, and those committed since.
    """

    def __init__(
        self,
        fs: Any,
        path: str | Path,
        dir_fd: int | None = None,
    ) -> None:
        self.fs = fs
        # Only the path that the user has given may be a link.
        flags = _DIRECTORY if dir_fd is None else _DIRECTORY | _NO_LINKS
        self.fd: int = fs.open(path, flags, dir_fd=dir_fd)
        self.names: set[str] = set()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exc: object) -> None:
        close_quietly(self.fs, self.fd)

    def unused_name(self, name: str) -> str:
        """Return `name`, with a number at its end if the listed names have it already."""
        unused = name
        number = 1
        while unused in self.names:
            number += 1
            unused = f"{name}-{number}"
        return unused

    def subdirectory(self, name: str) -> Directory:
        """Open a directory in this one."""
        return Directory(self.fs, name, self.fd)

    def open_checkpoint(self, name: str) -> Directory:
        """Open the directory of a checkpoint.

        Raises:
            DamagedError: it is missing, not a directory, or unreadable.
        """
        with _damage_errors():
            return self.subdirectory(name)

    def list_names(self) -> set[str]:
        """Read the names in the directory."""
        self.names = set(self.fs.listdir(self.fd))
        return self.names

    def make(self, name: str) -> Directory:
        """Make a directory, and open it."""
        self.fs.mkdir(name, 0o700, dir_fd=self.fd)
        return self.subdirectory(name)

    def rename(self, old: str, new: str) -> None:
        self.fs.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file or a link, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.unlink(name, dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a directory of plain files, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            with self.subdirectory(name) as inner:
                for file in sorted(self.fs.listdir(inner.fd)):
                    inner.unlink(file)
            self.fs.rmdir(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Make the names in the directory durable."""
        self.fs.fsync(self.fd)

    def write_new(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
    ) -> FileEntry:
        """Write a new file, and wait until it is durable."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS
        fd = self.fs.open(name, flags, 0o600, dir_fd=self.fd)
        write = functools.partial(self.fs.write, fd)
        size = 0
        crc32 = 0
        try:
            for chunk in chunks:
                crc32 = zlib.crc32(chunk, crc32)
                size += len(chunk)
                write_all(write, chunk, name)
            # A failed sync is not repeated: the system may have dropped the data, and a second sync
            # would succeed all the same.
            self.fs.fsync(fd)
        except BaseException:
            close_quietly(self.fs, fd)
            raise
        # Unlike `close_quietly`, this raises an error, because it may mean a lost write.
        self.fs.close(fd)
        return FileEntry(size, crc32)

    @contextlib.contextmanager
    def opened(
        self,
        name: str,
        size: int | None = None,
    ) -> Generator[FileReader]:
        """Open a plain file for reading, for the block.

        Raises:
            DamagedError: it is missing, not a plain file, unreadable, or of another size than
                `size`.
        """
        with _damage_errors():
            fd = self.fs.open(
                name,
                os.O_RDONLY | _NO_WAIT | _NO_LINKS,
                dir_fd=self.fd,
            )
            try:
                status = self.fs.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise DamagedError("is not a plain file")
                if size is not None and status.st_size != size:
                    raise DamagedError(f"has {status.st_size} bytes instead of {size}")
                # The reader has a buffer. Without it, each of many small arrays would need a read
                # of the system, and these would take longer than everything else.
                yield FileReader(_OpenFile(self.fs, fd, status.st_size), _BUFFER_BYTES)
            finally:
                close_quietly(self.fs, fd)

    def read_manifest(self, path: Path) -> Checkpoint:
        """Return the checkpoint at this path, which is that of this directory.

        Raises:
            DamagedError: its manifest does not verify.
            CheckpointError: it has a later version of the format.
            OSError: the system refused an operation for a reason that is not damage.
        """
        with damage_in(_format.MANIFEST), self.opened(_format.MANIFEST) as file:
            size = file.raw.size
            if size > _format.MAX_MANIFEST_BYTES:
                raise DamagedError(f"has {size} bytes, more than a manifest")
            return _format.decode(file.read(size), path)

    @contextlib.contextmanager
    def verified(
        self,
        file: str,
        entry: FileEntry,
    ) -> Generator[FileReader]:
        """Open a file for the block. Raise as `opened` does, or if it has another checksum.

        If the block finds damage, a wrong checksum is reported instead, which is its cause.
        """
        with damage_in(file), self.opened(file, entry.size) as reader:
            try:
                yield reader
            except DamagedError:
                # Raise the error of a wrong checksum instead, if that is the cause.
                reader.check(entry.crc32)
                raise
            # After another error in the block, such as a MemoryError, this is not reached: such an
            # error says nothing about the file.
            reader.check(entry.crc32)


class FileReader(io.BufferedReader):
    """Reads an open file, each byte once, from the beginning, and computes its checksum.

    Its methods raise `DamagedError` if the file ends early. `Directory.opened` converts the errors
    of the system in its block.
    """

    raw: Any
    """The `_OpenFile` below the buffer, which has the size and the checksum."""

    def check(self, crc32: int) -> None:
        """Read the rest. Raise `DamagedError` if the file has another checksum."""
        while self.read(_PIECE_BYTES):
            pass
        if self.raw.crc32 != crc32:
            raise DamagedError("does not have the checksum in the manifest")


class _OpenFile(io.RawIOBase):
    """An open file, which its owner closes, with the checksum of the bytes read so far."""

    def __init__(self, fs: Any, fd: int, size: int) -> None:
        self.size = size
        self.crc32 = 0
        self._fs = fs
        self._fd = fd
        self._unread = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read a piece into the buffer, and return its size: 0 at the expected end of the file."""
        piece = memoryview(buffer)[: min(_PIECE_BYTES, self._unread)]
        if not piece:
            return 0
        count: int = self._fs.readv(self._fd, [piece])
        if not count:
            raise DamagedError(f"ends {self._unread} bytes early")
        self._unread -= count
        self.crc32 = zlib.crc32(piece[:count], self.crc32)
        return count


class DirectoryLock:
    """The lock of a checkpoint directory, which admits one writer.

    The kernel releases it when the process ends.

    Attributes:
        mutex: held by the thread of this process that uses the directory. Other threads may wait
            for it: those of other tasks, and a thread whose caller was cancelled.
    """

    def __init__(self, fs: Any, path: Path) -> None:
        self._fs = fs
        self._flock: Any = getattr(fs, "flock", fcntl.flock)
        self._path = path
        # The directory and its open file `.lock`, or None while it is not locked. The stack closes
        # both.
        self._directory: Directory | None = None
        self._lock_fd: int | None = None
        self._opened = contextlib.ExitStack()
        self.mutex = threading.Lock()
        call_after_fork(self)

    def acquire(self) -> Directory:
        """Lock the directory, unless it is locked already, and return it.

        A missing directory is made, with mode 0700.

        Raises:
            CheckpointBusyError: another writer has the lock.
            CheckpointError: the locked directory is no longer at its path, see `check_place`.
            OSError: as the system raised it.
        """
        if self._directory is not None:
            self.check_place()
            return self._directory
        self._make_parent(self._path.parent)
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(self._path, 0o700)
        try:
            self._directory = self._opened.enter_context(Directory(self._fs, self._path))
            self._lock_file(self._directory)
            # The name of the directory must be durable before a checkpoint in it is. It may be new,
            # or a crash has come between its making and this sync.
            self._sync_names_in(self._path.parent)
        except BaseException:
            self.release()
            raise
        return self._directory

    def _make_parent(self, path: Path) -> None:
        """Make a directory if it is missing, and its missing parents, with durable names."""
        if not exists(self._fs, path):
            self._make_parent(path.parent)
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(path, 0o777)
            self._sync_names_in(path.parent)

    def _sync_names_in(self, path: Path) -> None:
        """Make the names in a directory durable, if this process may open it."""
        with contextlib.suppress(PermissionError), Directory(self._fs, path) as directory:
            directory.sync()

    def check_place(self) -> None:
        """Raise `CheckpointError` if the locked directory or its `.lock` is no longer at its path.

        A later process would not find files that were written to a directory that was renamed,
        removed or mounted over, and another writer could lock a new `.lock`.
        """
        directory = self._directory
        if directory is None or self._lock_fd is None:
            return
        is_in_place = self._is_at(self._path, directory.fd)
        if is_in_place and self._is_at(_format.LOCK, self._lock_fd, directory.fd):
            return
        raise CheckpointError(
            errno.ESTALE,
            f"{self._path} is not the directory that this Saver has locked, which was moved,"
            f" removed or mounted over, or its {_format.LOCK} was; put it back, or close the Saver"
            " to use what is at the path",
        )

    def _is_at(
        self,
        path: str | Path,
        fd: int,
        dir_fd: int | None = None,
    ) -> bool:
        """Return whether an open file or directory is still at a path."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = self._fs.stat(path, dir_fd=dir_fd)
            return os.path.samestat(status, self._fs.fstat(fd))
        return False

    def _lock_file(self, directory: Directory) -> None:
        """Lock the file `.lock`, which is made if it is missing."""
        flags = os.O_RDWR | os.O_CREAT | _NO_WAIT | _NO_LINKS
        fd: int = self._fs.open(
            _format.LOCK,
            flags,
            0o600,
            dir_fd=directory.fd,
        )
        self._opened.callback(close_quietly, self._fs, fd)
        try:
            self._flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointBusyError(
                f"another writer, perhaps in this process, has the lock of {self._path}; a"
                " directory has one writer: close that Saver first, use another directory, or"
                " pass read_only=True to read only",
            ) from None
        self._lock_fd = fd

    def release(self) -> None:
        """Release the lock, if it is held, and close the files."""
        if self._lock_fd is not None:
            # The lock is released before the file is closed: closing it would not release the lock
            # while a forked child has the file open.
            with contextlib.suppress(OSError):
                self._flock(self._lock_fd, fcntl.LOCK_UN)
        self._close_files()

    def after_fork(self) -> None:
        """Forget the lock in a forked child. The parent keeps it."""
        # The mutex may be held by a thread of the parent, which does not exist in the child.
        self.mutex = threading.Lock()
        self._close_files()

    def _close_files(self) -> None:
        """Close the directory and `.lock`. A lock that the parent process has stays locked."""
        self._opened.close()
        self._lock_fd = None
        self._directory = None
