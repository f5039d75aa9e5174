"""The file operations of checkpoints, and the lock of a checkpoint directory.

Names are relative to open directories. All go through one `fs` object, which is `os` except in
tests that record, fail or kill at any operation. Errors of `os` pass as they are; an entry that is
not a plain file of the expected size raises `DamagedError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

from aiohooks._core.fork import call_after_fork
from aiohooks.checkpoint._format import LOCK, DamagedError
from aiohooks.errors import CheckpointBusyError, CheckpointError

# Python closes each descriptor in a new program, and tries again what a signal has interrupted,
# except `close`.
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
# Opening a pipe for reading would wait for a writer.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
# One read or write moves 2 GiB at most; smaller ones also let other threads run.
_MAX_READ_BYTES = 1 << 20

# Errors of open and read that mean the entry is damaged. All others are trouble of this process
# (permissions, limits) and say nothing about the checkpoint.
_DAMAGE = {
    errno.ENOENT: "is missing",
    errno.ELOOP: "is a symbolic link",
    errno.EMLINK: "is a symbolic link",
    errno.ENOTDIR: "is not a directory",
    errno.EISDIR: "is a directory",
    errno.ENXIO: "is not a plain file",
    errno.ENODEV: "is not a plain file",
    errno.EIO: "cannot be read from the disk (EIO)",
    getattr(errno, "EBADMSG", -1): "cannot be read from the disk (EBADMSG)",
    getattr(errno, "EUCLEAN", -1): "cannot be read from the disk (EUCLEAN)",
}


@contextlib.contextmanager
def _damage_errors() -> Generator[None]:
    """Convert the errors in `_DAMAGE` to `DamagedError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise DamagedError(_DAMAGE[error.errno]) from error
        raise


def check_system() -> None:
    """Refuse a system that opens no directories."""
    if os.open not in os.supports_dir_fd:
        raise OSError(
            errno.ENOTSUP,
            "checkpoints need directories that can be opened, as on Unix; use Linux, macOS, or"
            " Linux in Windows (WSL)",
        )


class Files:
    """File operations.

    Args:
        fs: an object with the functions of `os`, and optionally `flock`.
    """

    def __init__(self, fs: Any = os) -> None:
        self.fs = fs

    # Directories

    def open_directory(self, path: Path | str, *, dir_fd: int | None = None) -> int:
        """Open a directory; with `dir_fd` it must not be a symbolic link."""
        check_system()
        flags = _DIRECTORY if dir_fd is None else _DIRECTORY | _NO_LINKS
        return int(self.fs.open(path, flags, dir_fd=dir_fd))

    @contextlib.contextmanager
    def directory(
        self,
        path: Path | str,
        *,
        dir_fd: int | None = None,
        of_checkpoint: bool = False,
    ) -> Generator[int]:
        """Open a directory for the block.

        An error of closing is ignored: nothing is written through this descriptor.

        Raises:
            DamagedError: it is `of_checkpoint`, and missing, not a directory, or unreadable.
        """
        with _damage_errors() if of_checkpoint else contextlib.nullcontext():
            fd = self.open_directory(path, dir_fd=dir_fd)
        try:
            yield fd
        finally:
            self.close_quietly(fd)

    def make_directories(self, path: Path) -> None:
        """Make a directory with mode 0700, if it is missing, and its missing parents.

        The names of the parents are durable; `DirectoryLock.acquire` syncs that of the directory.
        """
        missing: list[Path] = []
        for parent in (path, *path.parents):
            if self.exists(parent):
                break
            missing.append(parent)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self.fs.mkdir(directory, 0o700 if directory is path else 0o777)
            if directory is not path:
                self.sync_names_in(directory.parent)

    def remove_directory(self, name: str, *, dir_fd: int) -> None:
        """Remove a directory of plain files, or the file or link of that name.

        Do nothing if it is missing.
        """
        try:
            with self.directory(name, dir_fd=dir_fd) as fd:
                for file in sorted(self.fs.listdir(fd)):
                    with contextlib.suppress(FileNotFoundError):
                        self.fs.unlink(file, dir_fd=fd)
            self.fs.rmdir(name, dir_fd=dir_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self.fs.unlink(name, dir_fd=dir_fd)  # a link itself is removed, not its target

    def list_names(self, dir_fd: int) -> set[str]:
        # A listing starts where the last one on the same descriptor ended. Python rewinds, but
        # ignores an error of that, so a descriptor is opened for each listing.
        with self.directory(".", dir_fd=dir_fd) as fd:
            return set(self.fs.listdir(fd))

    def exists(self, name: str | Path, *, dir_fd: int | None = None) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self.fs.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            return True
        return False

    def rename(self, old: str, new: str, *, dir_fd: int) -> None:
        """Rename within one directory."""
        self.fs.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def sync_names_in(self, path: Path) -> None:
        """Make the names in a directory durable, if this process may open it."""
        with contextlib.suppress(PermissionError), self.directory(path) as fd:
            self.fs.fsync(fd)

    # Files

    def write_new(
        self,
        name: str,
        chunks: Iterable[bytes | memoryview],
        *,
        dir_fd: int,
    ) -> tuple[int, int]:
        """Write a new file, wait until it is durable, and return its size and CRC-32."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS
        fd = self.fs.open(name, flags, 0o600, dir_fd=dir_fd)
        size = 0
        crc32 = 0
        try:
            for chunk in chunks:
                crc32 = zlib.crc32(chunk, crc32)
                size += len(chunk)
                rest = memoryview(chunk)
                while rest:
                    written = self.fs.write(fd, rest)
                    if written <= 0:
                        raise OSError(errno.EIO, "a write wrote nothing")
                    rest = rest[written:]
            # Never again after a failure: the data is lost by then, and a second sync succeeds.
            self.fs.fsync(fd)
        except BaseException:
            self.close_quietly(fd)
            raise
        # An error of closing may mean a lost write. After an interrupt Linux has closed the file,
        # too.
        with contextlib.suppress(InterruptedError):
            self.fs.close(fd)
        return size, crc32

    def read(self, name: str, *, dir_fd: int, max_size: int) -> bytes:
        """Return the content of a plain file; see `opened`."""
        with self.opened(name, dir_fd=dir_fd, max_size=max_size) as file:
            return b"".join(file.pieces())

    @contextlib.contextmanager
    def opened(
        self,
        name: str,
        *,
        dir_fd: int,
        size: int | None = None,
        max_size: int | None = None,
    ) -> Generator[FileReader]:
        """Open a plain file for reading.

        Raises:
            DamagedError: it is missing, not a plain file, unreadable, of another size than `size`,
                or of more than `max_size`.
        """
        with _damage_errors():
            fd = self.fs.open(name, os.O_RDONLY | _NO_WAIT | _NO_LINKS, dir_fd=dir_fd)
        try:
            with _damage_errors():
                status = self.fs.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError("is not a plain file")
            if size is not None and status.st_size != size:
                raise DamagedError(f"has {status.st_size} bytes instead of {size}")
            if max_size is not None and status.st_size > max_size:
                raise DamagedError(f"has {status.st_size} bytes, more than the {max_size} allowed")
            yield FileReader(self.fs, fd, status.st_size)
        finally:
            self.close_quietly(fd)

    def lock(self, fd: int, *, release: bool = False) -> None:
        """Lock an open file, or raise `BlockingIOError`; or release it."""
        import fcntl  # which Windows, where no directory can be opened, has not

        flock = getattr(self.fs, "flock", fcntl.flock)
        flock(fd, fcntl.LOCK_UN if release else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close_quietly(self, fd: int) -> None:
        """Close a descriptor and ignore errors."""
        with contextlib.suppress(OSError):
            self.fs.close(fd)


class FileReader:
    """Reads an open file from its beginning.

    The pieces are small, so that other threads wait only for a short time.

    Attributes:
        left: how many bytes have not been read.
        crc32: the checksum of those that have.
    """

    def __init__(self, fs: Any, fd: int, size: int) -> None:
        self._fs = fs
        self._fd = fd
        self.left = size
        self.crc32 = 0

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes; b"" at the end.

        Raises:
            DamagedError: the file is too short, or unreadable.
        """
        piece = bytearray(min(self.left, size))
        self.read_into([memoryview(piece)])
        return bytes(piece)

    def pieces(self) -> Generator[bytes]:
        """Read the rest of the file. Raises as `read` does."""
        while self.left:
            yield self.read(_MAX_READ_BYTES)

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, a thousand at most, with the next bytes. Raises as `read` does."""
        if sum(map(len, buffers)) > self.left:
            raise DamagedError("is too short")
        if len(buffers) > 1:
            self._fill([buffer for buffer in buffers if buffer])
            return
        for buffer in buffers:
            for start in range(0, len(buffer), _MAX_READ_BYTES):
                self._fill([buffer[start : start + _MAX_READ_BYTES]])

    def check(self, crc32: int) -> None:
        """Read the rest; raise `DamagedError` if the file has another checksum."""
        for _ in self.pieces():
            pass
        if self.crc32 != crc32:
            raise DamagedError("does not have the checksum in the manifest")

    def _fill(self, buffers: list[memoryview]) -> None:
        while buffers:
            with _damage_errors():
                count: int = self._fs.readv(self._fd, buffers)
            if not count:
                raise DamagedError(f"ends {self.left} bytes early")
            self.left -= count
            filled = 0
            while filled < len(buffers) and count >= len(buffers[filled]):
                self.crc32 = zlib.crc32(buffers[filled], self.crc32)
                count -= len(buffers[filled])
                filled += 1
            buffers = buffers[filled:]
            if count:
                self.crc32 = zlib.crc32(buffers[0][:count], self.crc32)
                buffers[0] = buffers[0][count:]


class DirectoryLock:
    """The lock of a checkpoint directory, which admits one writer.

    The kernel releases it when the process ends.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._directory: int | None = None
        self._lock: int | None = None
        call_after_fork(self)

    @property
    def is_held(self) -> bool:
        return self._directory is not None

    def acquire(self) -> int:
        """Return the descriptor of the directory, which is made if missing, and locked.

        Raises:
            CheckpointBusyError: another writer has the lock.
            CheckpointError: see `check_place`.
            OSError: as the system raised it.
        """
        if self._directory is not None:
            self.check_place()
            self._lock_again(self._directory)
            return self._directory
        check_system()
        self._files.make_directories(self._path)
        directory = self._files.open_directory(self._path)
        self._directory = directory
        try:
            self._lock = self._lock_file(directory)
            # The name of the directory itself, which may be new, or not yet durable since a crash.
            self._files.sync_names_in(self._path.parent)
        except BaseException:
            self.release()
            raise
        return directory

    def check_place(self) -> None:
        """Raise `CheckpointError` if the locked directory is not the one at its path.

        A later process would not find what is written to a directory that was renamed, removed or
        mounted over.
        """
        directory = self._directory
        if directory is None:
            return
        locked = self._files.fs.fstat(directory)
        there = "nothing"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = self._files.fs.stat(self._path)
            if os.path.samestat(status, locked):
                return
            there = f"device {status.st_dev}, inode {status.st_ino}"
        moved_to = "unknown"
        with contextlib.suppress(OSError):
            moved_to = os.readlink(f"/proc/self/fd/{directory}")
        raise CheckpointError(
            errno.ESTALE,
            f"{self._path} is not the directory that this Saver has locked, which was moved,"
            f" removed or mounted over: that is device {locked.st_dev}, inode {locked.st_ino}, now"
            f" at {moved_to}, and at the path there is {there}; put it back, or close the Saver to"
            " use what is at the path",
        )

    def _lock_again(self, directory: int) -> None:
        """Take the lock again if its file was removed or replaced.

        Another writer could take that of the new file.
        """
        fs = self._files.fs
        held = self._lock
        assert held is not None
        with contextlib.suppress(FileNotFoundError):
            status = fs.stat(LOCK, dir_fd=directory, follow_symlinks=False)
            if os.path.samestat(status, fs.fstat(held)):
                return
        self._lock = self._lock_file(directory)
        self._files.close_quietly(held)

    def _lock_file(self, directory: int) -> int:
        fs = self._files.fs
        flags = os.O_RDWR | os.O_CREAT | _NO_WAIT | _NO_LINKS
        fd: int = fs.open(LOCK, flags, 0o600, dir_fd=directory)
        try:
            if not stat.S_ISREG(fs.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, f"{LOCK} is not a plain file")
            self._files.lock(fd)
        except BaseException as error:
            self._files.close_quietly(fd)
            if isinstance(error, BlockingIOError):
                raise self._busy_error(directory) from None
            raise
        with contextlib.suppress(OSError):  # only for the message to other writers
            fs.ftruncate(fd, 0)
            fs.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        return fd

    def release(self) -> None:
        lock = self._lock
        directory = self._directory
        self._lock = None
        self._directory = None
        if lock is not None:
            # Closing would not release it while a forked child has the file open.
            with contextlib.suppress(OSError):
                self._files.lock(lock, release=True)
            self._files.close_quietly(lock)
        if directory is not None:
            self._files.close_quietly(directory)

    def after_fork(self) -> None:
        """Close the descriptors that a forked child inherited; the parent keeps the lock."""
        for fd in (self._lock, self._directory):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._lock = None
        self._directory = None

    def _busy_error(self, directory: int) -> CheckpointBusyError:
        try:
            text = self._files.read(LOCK, dir_fd=directory, max_size=64).decode("ascii").strip()
        except (OSError, DamagedError, UnicodeError):
            text = ""
        pid = None
        holder = "another writer"
        if text.isdigit() and len(text) <= 10:
            pid = int(text)
            holder = "this process itself" if pid == os.getpid() else f"process {pid}"
        return CheckpointBusyError(
            f"{self._path} is in use by {holder}; a directory has one writer: close that Saver"
            " first, use another directory, or pass read_only=True to read only",
            pid=pid,
        )
