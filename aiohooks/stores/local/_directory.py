"""Where the runs of one machine are kept, and whether that place will do."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from aiohooks.errors import InvalidArgumentError, StoreRefusedError

# What `statfs` calls file systems whose files other machines change as well: inotify sees no change from there, and locks may
# hold on one machine only. FUSE is among them because one cannot tell what is behind it.
_REMOTE = {
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
_LONGEST_NAME = 255
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_PLACE = (*_FORBIDDEN, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
"""What stays as it is until somebody gives another path; a full disk, say, may not."""


def default_directory() -> Path:
    """Where `LocalStepStore` keeps its runs unless told otherwise: the same place for all processes of this user.

    It is `$XDG_RUNTIME_DIR/aiohooks` where a login has set that variable, and otherwise a directory in the one for temporary
    files, named by the number of the user. Neither outlives a restart of the machine.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        return Path(runtime, "aiohooks")
    return Path(tempfile.gettempdir(), f"aiohooks-{os.geteuid()}")


def run_name(run: str) -> str:
    """The name of a run as that of a file: no two runs have the same, and none leads out of its directory."""
    name = quote(run, safe="")
    if name[0] == ".":
        name = "%2E" + name[1:]
    if len(name) > _LONGEST_NAME:
        raise InvalidArgumentError(
            f"run={run!r} makes a file name of {len(name)} characters; give one of {_LONGEST_NAME} at most"
        )
    return name


def make_run_directory(directory: Path | None, run: str) -> Path:
    """Makes the directory of a run, and those above it, for this user alone; one that is there is checked.

    Raises:
        InvalidArgumentError: it is of somebody else or open to others, or on a file system that other machines change too.
        StoreRefusedError: it can never be made there.
        OSError: it cannot be made in this moment.
    """
    base = default_directory() if directory is None else directory
    _make(base, _NO_PLACE, parents=True)
    base = base.resolve()
    if directory is None:
        _check_ours(base, forbidden=0o077)
    elif base.stat().st_uid not in (os.geteuid(), 0):
        raise _not_ours(base, f"belongs to user {base.stat().st_uid}")
    if (kind := remote_kind(base)) is not None:
        raise InvalidArgumentError(
            f"{base} is on {kind}, which may be shared with other machines: what they write there is not seen in time. Give a "
            "directory on a local disk or in memory (/dev/shm, $XDG_RUNTIME_DIR); for several machines use redis:// or nats://"
        )
    path = base / run_name(run)
    for each in (path, path / "alive", path / "bells"):
        _make(each, _FORBIDDEN)
        _check_ours(each, forbidden=0o022)
    return path


def _make(path: Path, refusals: tuple[int, ...], *, parents: bool = False) -> None:
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        if error.errno not in refusals:
            raise
        raise StoreRefusedError(
            f"the directory {path} cannot be made: {error}; give one that user {os.geteuid()} may make and write in"
        ) from error


def _check_ours(path: Path, *, forbidden: int) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise _not_ours(path, "is not a directory")
    if found.st_uid != os.geteuid():
        raise _not_ours(path, f"belongs to user {found.st_uid}")
    if found.st_mode & forbidden:
        raise _not_ours(path, f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})")


def _not_ours(path: Path, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path} {what}; a run can only be kept where nobody else but user {os.geteuid()} writes: give another directory, "
        "or remove this one or change its mode, if it is yours"
    )


def remote_kind(path: Path) -> str | None:
    """The kind of file system that `path` is on, if that is one which other machines may change too."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    answer = (ctypes.c_long * 64)()  # `struct statfs`, whose first member is the kind, with room to spare
    if libc.statfs(os.fsencode(path), ctypes.byref(answer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return _REMOTE.get(answer[0] & 0xFFFFFFFF)
