"""Every file operation of this package, relative to open directories, through one `fs` object that is `os` in real life.

Tests put an object of their own in its place to record, fail or kill at any operation. What the functions of `os`
raise is passed on as it is; what is not a plain file of the expected size is a `DamagedError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import zlib
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any


class DamagedError(Exception):
    """What reading one file found wrong with it; private to this package, a `CorruptCheckpointError` is made of it."""


_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# Opening a pipe to read it would wait for a writer.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
# One call of read or write moves 2 GiB at most; smaller ones also let other threads in.
_LARGEST_READ = 1 << 30

# What an open or a read says of an entry that is not the file it ought to be, or that the medium has lost. All else is the
# trouble of this process (its rights, its limits) and says nothing about the checkpoint.
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


class Files:
    """The file operations, done by `fs`, an object with the functions of `os` (and `flock`, if that is to be replaced)."""

    def __init__(self, fs: Any = os) -> None:
        """Takes whoever does them."""
        self._fs = fs

    # Directories

    def open_directory(self, path: Path | str, *, dir_fd: int | None = None) -> int:
        """Opens a directory; inside another one it may not be a symbolic link."""
        if dir_fd is None:
            return int(self._fs.open(path, _DIRECTORY))
        return int(self._fs.open(path, _DIRECTORY | _NO_LINKS, dir_fd=dir_fd))

    @contextlib.contextmanager
    def directory(self, path: Path | str, *, dir_fd: int | None = None) -> Generator[int]:
        """A directory, open for the length of a block."""
        fd = self.open_directory(path, dir_fd=dir_fd)
        with self._closing(fd):
            yield fd

    def make_directories(self, path: Path) -> None:
        """Makes a directory that only its owner may enter, and what is missing above it, so that they survive a power cut."""
        self._make(path, 0o700)

    def _make(self, path: Path, mode: int) -> bool:
        """Makes it and what is missing above it; returns whether it was missing."""
        try:
            self._fs.mkdir(path, mode)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if path.parent == path:
                raise
            if self._make(path.parent, 0o777):
                self.sync_path(path.parent.parent)
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(path, mode)
        return True

    def make_directory(self, name: str, *, dir_fd: int) -> None:
        """Makes a directory that only its owner may enter."""
        self._fs.mkdir(name, 0o700, dir_fd=dir_fd)

    def remove_directory(self, name: str, *, dir_fd: int) -> None:
        """Removes a directory of plain files, or what stands in its place; what is gone already is no error."""
        try:
            with self.directory(name, dir_fd=dir_fd) as fd:
                for each in sorted(self._fs.listdir(fd)):
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.unlink(each, dir_fd=fd)
            self._fs.rmdir(name, dir_fd=dir_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self._fs.unlink(name, dir_fd=dir_fd)  # a link or a file of this name: it alone goes, not what it points to

    def names(self, dir_fd: int) -> list[str]:
        """What is in a directory, sorted."""
        # Listed through a descriptor of its own: a listing begins where the last one on the same descriptor has been left, and
        # that going back to the start can fail is said by nobody.
        with self.directory(".", dir_fd=dir_fd) as fd:
            return sorted(self._fs.listdir(fd))

    def exists(self, name: str, *, dir_fd: int) -> bool:
        """Whether there is anything of this name."""
        try:
            self._fs.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def rename(self, old: str, new: str, *, dir_fd: int) -> None:
        """Renames inside one directory."""
        self._fs.rename(old, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def sync(self, fd: int) -> None:
        """Waits until what was written is on the disk. If it fails once, what was written is lost: nobody may ask again."""
        self._fs.fsync(fd)

    def sync_path(self, path: Path) -> None:
        """Makes the names in a directory durable, as far as this process may open it."""
        try:
            fd = self.open_directory(path)
        except PermissionError:
            return
        with self._closing(fd):
            self._fs.fsync(fd)

    def status(self, fd: int) -> os.stat_result:
        """What `os.fstat` says."""
        status: os.stat_result = self._fs.fstat(fd)
        return status

    def free_bytes(self, dir_fd: int) -> int:
        """How much can still be written to the file system of a directory."""
        status = self._fs.statvfs(dir_fd)
        return int(status.f_bavail * status.f_frsize)

    # Files

    def write_new(self, name: str, chunks: Iterable[bytes | memoryview], *, dir_fd: int) -> tuple[int, str]:
        """Writes a file that does not exist yet and waits until it is on the disk; returns its size and CRC-32."""
        fd = self._fs.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o600, dir_fd=dir_fd)
        checksum = size = 0
        with self._closing(fd):
            for chunk in chunks:
                checksum = zlib.crc32(chunk, checksum)  # cheap: when training uses every core, its time is lost to it
                size += len(chunk)
                self._write(fd, memoryview(chunk))
            self._fs.fsync(fd)
        return size, f"{checksum:08x}"

    def _write(self, fd: int, left: memoryview) -> None:
        while left:
            try:
                written = self._fs.write(fd, left)
            except InterruptedError:
                continue
            if written <= 0:
                raise OSError(errno.EIO, "a write took nothing")
            left = left[written:]

    def read(self, name: str, *, dir_fd: int, size: int | None = None, at_most: int | None = None) -> bytes:
        """Reads a plain file whole.

        Args:
            name: its name in the directory.
            dir_fd: the directory.
            size: what it must measure.
            at_most: what it may measure, if that is not known.

        Raises:
            DamagedError: it is missing, not a plain file, not of that size, or the disk does not give it back.
        """
        with told_as_damage():
            fd = self._fs.open(name, os.O_RDONLY | _NO_WAIT | _NO_LINKS, dir_fd=dir_fd)
            with self._closing(fd):
                status = self._fs.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise DamagedError("is not a plain file")
                if size is not None and status.st_size != size:
                    raise DamagedError(f"has {status.st_size} bytes instead of {size}")
                if at_most is not None and status.st_size > at_most:
                    raise DamagedError(f"has {status.st_size} bytes, more than the {at_most} allowed")
                return self._read(fd, status.st_size)

    def _read(self, fd: int, size: int) -> bytes:
        parts: list[bytes] = []
        left = size
        while left:
            try:
                part = self._fs.read(fd, min(left, _LARGEST_READ))
            except InterruptedError:
                continue
            if not part:
                raise DamagedError(f"ends {left} bytes early")
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)  # the usual one part is not copied

    # The lock

    def lock(self, name: str, *, dir_fd: int) -> int | None:
        """Opens a file and locks it for this process; None if another one has it.

        Raises:
            OSError: the file cannot be opened, is no plain file, or files cannot be locked here.
        """
        fd: int = self._fs.open(name, os.O_RDWR | os.O_CREAT | _NO_WAIT | _NO_LINKS, 0o600, dir_fd=dir_fd)
        try:
            if not stat.S_ISREG(self._fs.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, f"{name} is not a plain file")
            self._flock(fd)
        except BaseException as error:
            self.close_quietly(fd)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return fd

    def _flock(self, fd: int) -> None:
        try:
            import fcntl
        except ImportError:
            raise OSError(errno.ENOTSUP, "this system has no flock, which keeps a second writer out") from None
        flock = getattr(self._fs, "flock", fcntl.flock)
        flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, fd: int) -> None:
        """Gives a lock up and closes its file. Closing alone would not do while a forked child has the file open too."""
        import fcntl

        with contextlib.suppress(OSError):
            getattr(self._fs, "flock", fcntl.flock)(fd, fcntl.LOCK_UN)
        self.close_quietly(fd)

    def write_note(self, fd: int, text: str) -> None:
        """Puts a short text in place of what a file has; as it is only a note, a full disk is no reason to fail."""
        with contextlib.suppress(OSError):
            self._fs.ftruncate(fd, 0)
            self._fs.pwrite(fd, text.encode("ascii"), 0)

    def read_note(self, name: str, *, dir_fd: int) -> str:
        """The short text in a file; empty if there is none."""
        try:
            return self.read(name, dir_fd=dir_fd, at_most=64).decode("ascii")
        except (OSError, DamagedError, UnicodeError):
            return ""

    # Closing

    def close(self, fd: int) -> None:
        """Closes; after an interrupt Linux has closed the file too."""
        with contextlib.suppress(InterruptedError):
            self._fs.close(fd)

    def close_quietly(self, fd: int) -> None:
        """Closes while something else goes wrong, or what was only read."""
        with contextlib.suppress(OSError):
            self._fs.close(fd)

    @contextlib.contextmanager
    def _closing(self, fd: int) -> Generator[None]:
        """Closes at the end of a block. An error of the block wins over one of closing; closing may tell of a lost write."""
        try:
            yield
        except BaseException:
            self.close_quietly(fd)
            raise
        self.close(fd)


@contextlib.contextmanager
def told_as_damage() -> Generator[None]:
    """Turns the errors that speak of the file and not of this process into `DamagedError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _DAMAGE:
            raise DamagedError(_DAMAGE[error.errno]) from error
        raise
