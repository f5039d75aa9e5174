"""The directory of a run: on a disk of this machine, and no other user can write to it."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import tempfile
from pathlib import Path
from urllib.parse import quote

from aiohooks.errors import InvalidArgumentError, StoreRefusedError

# The file systems whose files other machines may change as well, by the number that `statfs`
# returns: inotify does not report such changes, and locks may hold on one machine only. Behind FUSE
# there may be any file system.
_REMOTE_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x786F4256: "VirtualBox shared folders",
}
_PATH_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
"""Errors that last until the user gives another path, unlike that of a full disk."""


def default_directory() -> Path:
    """Return the directory of runs that `LocalEngine` uses by default.

    All processes of a user have the same one: `$XDG_RUNTIME_DIR/aiohooks` where a login has set
    that variable, otherwise `aiohooks-<uid>` in the directory for temporary files. Both may be
    deleted when the machine restarts.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == os.geteuid():
        return runtime / "aiohooks"
    return Path(tempfile.gettempdir(), f"aiohooks-{os.geteuid()}")


def run_file_name(run: str) -> str:
    """Return the name of a run's directory: a different one for every run, and never a path.

    Raises:
        InvalidArgumentError: the file name is too long.
    """
    name = quote(run, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > 255:
        raise InvalidArgumentError(
            f"run={run!r} makes a file name of {len(name)} characters; give one of 255 at most"
        )
    return name


def make_run_directory(directory: Path | None, run: str) -> None:
    """Make the directory of a run, and its parents, accessible to this user only.

    If the directory exists, no other user may be able to write to it.

    Raises:
        InvalidArgumentError: the directory belongs to another user, is open to others, or is on a
            file system of several machines.
        StoreRefusedError: the directory can never be made there.
        OSError: the directory cannot be made now.
    """
    base = directory or default_directory()
    _make_directory(base, parents=True)
    base = base.resolve()
    if directory is None:
        # All users can predict its name, and may often write to its parent: another user could have
        # made it.
        _check_private(base, forbidden_mode=0o077)
    else:
        # A directory for many users, such as /dev/shm, is fine if it belongs to the root user, who
        # alone can replace it.
        _check_private(base, forbidden_mode=0, other_owner=0)
    file_system = remote_file_system(base)
    if file_system is not None:
        raise InvalidArgumentError(
            f"{base} is on {file_system}, which may be shared with other machines: their changes"
            " would be noticed late or never. Give a directory on a local disk or in memory"
            " (/dev/shm, $XDG_RUNTIME_DIR); for several machines use redis://"
        )
    path = base / run_file_name(run)
    for private in (path, path / "alive"):  # `alive` has a file for each process
        _make_directory(private)
        _check_private(private, forbidden_mode=0o022)


def _make_directory(path: Path, *, parents: bool = False) -> None:
    """Make a directory unless it exists. Raise `StoreRefusedError` for a bad path."""
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        raise StoreRefusedError(
            f"the directory {path} cannot be made: {error}; give one that user {os.geteuid()} may"
            " make and write in"
        ) from error


def _check_private(path: Path, *, forbidden_mode: int, other_owner: int = -1) -> None:
    """Raise an error unless the path is a directory of this user, or of `other_owner`.

    Its mode must have none of the bits of `forbidden_mode`.
    """
    status = path.lstat()
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory"
    elif status.st_uid not in (os.geteuid(), other_owner):
        problem = f"belongs to user {status.st_uid}"
    elif status.st_mode & forbidden_mode:
        problem = f"is open to other users (mode {stat.S_IMODE(status.st_mode):o})"
    if problem:
        raise InvalidArgumentError(
            f"{path} {problem}; a run can only be kept where no other user than {os.geteuid()}"
            " writes: give another directory, or remove this one or change its mode, if it is yours"
        )


def remote_file_system(path: Path) -> str | None:
    """Return the name of the file system of `path` if other machines may change its files, too.

    Return None for a file system of this machine.
    """
    # For `struct statfs`, with room to spare. Its first member is the number of the file system.
    result = (ctypes.c_long * 64)()
    ctypes.CDLL(None).statfs(os.fsencode(path), ctypes.byref(result))
    return _REMOTE_FILE_SYSTEMS.get(result[0] & 0xFFFFFFFF)
