"""A run in the files of its directory.

    position   the latest record that no waiter was due for; then a slot for each process: the
               lowest step that it waits for
    notify     the latest record that a waiter was due for, or that a new `state` came with; all
               processes watch this file, so that one write is both the change and the notification
    state      publishers, chief, last exit; replaced as a whole, before `notify` refers to it
    alive/     a locked file for each process that has the run open

The run is at the later one of the two records. Every change is made under the lock of the run, a
`flock` on its directory. A process may be killed at any moment, so each change is one small write
or one rename: the kernel does it completely or not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote
from zlib import crc32

from aiohooks._aio.fork import call_after_fork
from aiohooks.errors import InvalidArgumentError, StoreDamagedError, StoreRefusedError
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    Expire,
    Member,
    Position,
    Request,
    Snapshot,
    Write,
    damaged_error,
)
from aiohooks.stores._run_state import RunState
from aiohooks.stores.local._lock import check_processes, claim_slot, release_slot, taken_slots

# The directory.

# File systems, by the number that `statfs` gives them, whose files other machines change as well:
# inotify does not report such changes, and locks may hold on one machine only. FUSE is among them
# because anything may be behind it.
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
_MAX_NAME = 255
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_BAD_PATH = (
    *_FORBIDDEN,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
"""Errors that last until another path is given, unlike a full disk."""


def default_directory() -> Path:
    """Return the directory of runs that `LocalStepStore` uses by default, the same for all
    processes of this user.

    It is `$XDG_RUNTIME_DIR/aiohooks` where a login has set that variable, otherwise
    `aiohooks-<uid>` in the directory for temporary files. Neither survives a restart of the
    machine.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if (
        os.path.isabs(runtime)
        and os.path.isdir(runtime)
        and os.stat(runtime).st_uid == os.geteuid()
    ):
        return Path(runtime, "aiohooks")
    return Path(tempfile.gettempdir(), f"aiohooks-{os.geteuid()}")


def run_file_name(run: str) -> str:
    """Return the file name of a run: different for every run, and never a path that leaves the
    directory.

    Raises:
        InvalidArgumentError: the file name is too long.
    """
    name = quote(run, safe="")
    if name[0] == ".":
        name = "%2E" + name[1:]
    if len(name) > _MAX_NAME:
        raise InvalidArgumentError(
            f"run={run!r} makes a file name of {len(name)} characters; give one of {_MAX_NAME} at"
            " most"
        )
    return name


def make_run_directory(directory: Path | None, run: str) -> Path:
    """Make the directory of a run, and its parents, accessible to this user only; check one that
    exists.

    Raises:
        InvalidArgumentError: it belongs to another user, is open to others, or is on a file system
            of several machines.
        StoreRefusedError: it can never be made there.
        OSError: it cannot be made now.
    """
    base = default_directory() if directory is None else directory
    _make_directory(base, _BAD_PATH, parents=True)
    base = base.resolve()
    if directory is None:
        _check_private(base, forbidden_mode=0o077)
    elif base.stat().st_uid not in (os.geteuid(), 0):
        raise _not_private(base, f"belongs to user {base.stat().st_uid}")
    if (file_system := remote_file_system(base)) is not None:
        raise InvalidArgumentError(
            f"{base} is on {file_system}, which may be shared with other machines: their changes"
            " would be noticed late or never. Give a directory on a local disk or in memory"
            " (/dev/shm, $XDG_RUNTIME_DIR); for several machines use redis://"
        )
    path = base / run_file_name(run)
    for each in (path, path / "alive"):
        _make_directory(each, _FORBIDDEN)
        _check_private(each, forbidden_mode=0o022)
    return path


def _make_directory(path: Path, refused: tuple[int, ...], *, parents: bool = False) -> None:
    try:
        path.mkdir(mode=0o700, parents=parents, exist_ok=True)
    except OSError as error:
        if error.errno not in refused:
            raise
        raise StoreRefusedError(
            f"the directory {path} cannot be made: {error}; give one that user {os.geteuid()} may"
            " make and write in"
        ) from error


def _check_private(path: Path, *, forbidden_mode: int) -> None:
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise _not_private(path, "is not a directory")
    if found.st_uid != os.geteuid():
        raise _not_private(path, f"belongs to user {found.st_uid}")
    if found.st_mode & forbidden_mode:
        raise _not_private(path, f"is open to other users (mode {stat.S_IMODE(found.st_mode):o})")


def _not_private(path: Path, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path} {problem}; a run can only be kept where no other user than {os.geteuid()} writes:"
        " give another directory, or remove this one or change its mode, if it is yours"
    )


def remote_file_system(path: Path) -> str | None:
    """Return the kind of the file system of `path` if other machines may change it too, otherwise
    None.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    result = (
        ctypes.c_long * 64
    )()  # `struct statfs`, whose first member is the kind, with room to spare
    if libc.statfs(os.fsencode(path), ctypes.byref(result)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return _REMOTE_FILE_SYSTEMS.get(result[0] & 0xFFFFFFFF)


# Records.

_HALF = struct.Struct("<5Q")
_MAGIC = int.from_bytes(b"ahooks.1", "little")
RECORD_SIZE = 2 * _HALF.size


_new_tuple: Any = cast("Any", tuple).__new__


class RunRecord(NamedTuple):
    """Where a run is. A later record is greater: nothing decreases, except the step in a new
    epoch.
    """

    position: Position
    revision: int
    term: int


def make_record(epoch: int, step: int, revision: int, term: int) -> RunRecord:
    """Return `RunRecord(Position(epoch, step), revision, term)`, in half the time."""
    position = _new_tuple(Position, (epoch, step))
    record: RunRecord = _new_tuple(RunRecord, (position, revision, term))
    return record


def pack_record(epoch: int, step: int, revision: int, term: int) -> bytes:
    """Return the bytes of a record: its fields twice, which detects a torn one faster than a
    checksum would.
    """
    return 2 * _HALF.pack(_MAGIC, epoch, step, revision, term)


def unpack_record(data: bytes) -> RunRecord | None:
    """Return the record at the beginning of `data`; None if it is torn or damaged."""
    half = _HALF.size
    if len(data) < RECORD_SIZE or data[:half] != data[half:RECORD_SIZE]:
        return None
    magic, epoch, step, revision, term = _HALF.unpack_from(data)
    return make_record(epoch, step, revision, term) if magic == _MAGIC else None


def _describe_damage(data: bytes) -> str:
    """Describe, for a message, `data` that is not a record."""
    first, second = data[: _HALF.size], data[_HALF.size : RECORD_SIZE]
    if len(data) < RECORD_SIZE:
        return f"{len(data)} bytes"
    if not first.startswith(b"ahooks."):
        return f"something else, which begins with {first[:8]!r}"
    if first != second:
        return "a record whose two copies differ"
    return f"a record of version {first[7:8]!r}"


class _RecordCache:
    """Unpacks the record of one file, which mostly has not changed since it was read last. Threads
    may share it.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[bytes, RunRecord | None] = b"", None

    def put(self, data: bytes, record: RunRecord) -> None:
        """Remember a record that was written, or that is expected to be read next."""
        self._last = data, record

    def unpack(self, data: bytes) -> RunRecord | None:
        last = self._last
        if data != last[0]:
            self._last = last = data, unpack_record(data)
        return last[1]


# Slots.

NOT_WAITING = 0
"""The value of a slot whose process does not wait; one that waits for step n has n + 1, where step
0 stands for every step.
"""
_SLOT = struct.Struct("<Q")


def find_due(slots: bytes, own_slot: int, old: int, new: int) -> tuple[bool, int]:
    """Return whether a process is due when the step moves from `old` to `new`, and the lowest
    higher step waited for.

    `own_slot` is that of this process, which needs no notification.
    """
    due, later = False, MAX_STEP + 1
    for slot, (number,) in enumerate(_SLOT.iter_unpack(slots)):
        if number != NOT_WAITING and slot != own_slot:
            step = number - 1
            if step > new:
                if step < later:
                    later = step
            elif step > old:
                due = True
            elif step == 0:
                return True, 0
    return due, later


# The files.

_SLOTS_OFFSET = 128
_MAX_READS = 100
_WHOLE_RECORD = "a whole record of version b'1'"
_WHOLE_STATE = "the state of the run, with its checksum"
_NOT_BEGUN = b"not begun"
"""The content of `notify` until everything else is there, so that an empty file is a damaged
one.
"""


class RunFiles:
    """The open files of one run, of one store."""

    def __init__(self, directory: Path | None, run: str, process: str) -> None:
        self.path: Path = Path()
        self.run_fd: int = -1
        """The run's directory; a `FileLock` that takes it over also closes it."""
        self.slot: int = -1
        self._directory = directory
        self._run = run
        self._process = process
        self._position_fd = -1
        self._notify_fd = -1
        self._alive_fd = -1
        self._read_size = _SLOTS_OFFSET + 8 * _SLOT.size  # bytes of `position` read in one call
        self._position_cache = _RecordCache()
        self._notify_cache = _RecordCache()
        self._due_cache = (
            b"",
            0,
            0,
        )  # slots, epoch, and the lowest step that these slots wait for there
        call_after_fork(self)

    def open_existing(self) -> bool:
        """Open the directory and the files for reading only; return whether they are there.
        Blocks.
        """
        self.path = (
            default_directory() if self._directory is None else self._directory
        ) / run_file_name(self._run)
        try:
            self.run_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            self._position_fd = self._open_file("position", os.O_RDONLY)
            self._notify_fd = self._open_file("notify", os.O_RDONLY)
        except FileNotFoundError:
            return False
        return True

    def open_directory(self) -> None:
        """Open the run's directory, making it if it is missing. Blocks."""
        self.path = make_run_directory(self._directory, self._run)
        self.run_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def open(self) -> None:
        """Open the directory and the files, making them if they are missing. Blocks."""
        self.open_directory()
        self._position_fd = self._open_file("position", os.O_RDWR | os.O_CREAT)
        self._notify_fd = self._open_file("notify", os.O_RDWR | os.O_CREAT)

    def _open_file(self, name: str, flags: int) -> int:
        # O_NONBLOCK: opening a pipe in the place of the file would wait for its other end.
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self.run_fd)
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise
            raise self._damaged(name, f"no file ({error.strerror})", "a file") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._damaged(name, "no file", "a file")
        return fd

    def is_deleted(self) -> bool:
        """Return whether the run's directory was deleted or moved: there is none in its place, or
        another one.
        """
        return not _is_at(self.path, self.run_fd)

    def check_files(self) -> None:
        """Raise `StoreDamagedError` if a file was removed or replaced: other processes would not
        read what is written to it.
        """
        for name, fd in (("position", self._position_fd), ("notify", self._notify_fd)):
            if not _is_at(self.path / name, fd):
                raise self._damaged(
                    name, "no file, or another one", "the file that this process has open"
                )

    def is_evicted(self) -> bool:
        """Return whether another process has removed this one's file in `alive/`, which only
        deleting the run does.
        """
        return self._alive_fd >= 0 and os.fstat(self._alive_fd).st_nlink == 0

    # Without the lock.

    def read(self) -> RunRecord:
        position = None
        for _ in range(_MAX_READS):
            position = self._position_cache.unpack(os.pread(self._position_fd, RECORD_SIZE, 0))
            notified = self._notify_cache.unpack(os.pread(self._notify_fd, RECORD_SIZE, 0))
            if position is not None and notified is not None:
                return position if position > notified else notified
            # Torn: another process is writing it, or it is damaged.
        raise self._no_record("position" if position is None else "notify")

    def read_notified(self) -> RunRecord:
        """Return the record of the last notification, which is recent enough for waiters."""
        record = self._notify_cache.unpack(os.pread(self._notify_fd, RECORD_SIZE, 0))
        return self.read() if record is None else record

    def load_state(self, record: RunRecord) -> RunState:
        """Return the state of the run, not older than `record`."""
        state = RunState()
        if record.revision:
            try:
                fd = self._open_file("state", os.O_RDONLY)
            except FileNotFoundError:
                raise self._damaged("state", "nothing", _WHOLE_STATE) from None
            with open(fd, "rb") as file:
                data = file.read()
            if data[:9] != b"%08x " % crc32(data[9:]):
                raise self._damaged(
                    "state", f"{len(data)} bytes with another checksum", _WHOLE_STATE
                )
            try:
                state = RunState.load(data[9:])
            except ValueError as error:
                raise self._damaged("state", str(error), _WHOLE_STATE) from error
            if state.revision < record.revision:
                expected = f"revision {record.revision}, as in the file notify"
                raise self._damaged("state", f"revision {state.revision}", expected)
        state.position = record.position
        if record.term > state.term:
            state.term, state.leader = record.term, ""
        return state

    def _no_record(self, name: str) -> StoreDamagedError:
        data = os.pread(
            self._position_fd if name == "position" else self._notify_fd, RECORD_SIZE, 0
        )
        return self._damaged(name, _describe_damage(data), _WHOLE_RECORD)

    def _damaged(self, name: str, found: str, expected: str) -> StoreDamagedError:
        path = self.path / name
        return damaged_error(
            self._run,
            str(path),
            found=found,
            expected=expected,
            delete=f"remove the directory {self.path}",
        )

    def subscribe(self, step: int) -> RunRecord:
        """Request a notification when `step` is reached (0: of every change), and return where the
        run is.

        This writes first and reads second; a process that advances writes first and reads the slots
        second. So at least one of the two sees the other's write, and waiting does not need the
        lock.
        """
        self._write_slot(step + 1)
        (epoch, seen), revision, term = record = self.read()
        # Expect the record that will most likely be notified next, so that it need not be unpacked.
        expected = epoch, step or seen + 1, revision, term
        self._notify_cache.put(pack_record(*expected), make_record(*expected))
        return record

    def unsubscribe(self) -> None:
        self._write_slot(NOT_WAITING)

    def _write_slot(self, value: int) -> None:
        os.pwrite(self._position_fd, _SLOT.pack(value), _SLOTS_OFFSET + _SLOT.size * self.slot)

    # Only with the lock.

    def register(self) -> Snapshot | None:
        """Take a slot for this process; return None if the run was deleted while this waited for
        the lock.
        """
        if self.is_deleted():
            return None
        self._begin_run()
        snapshot = self.remove_dead(None)
        self.slot, self._alive_fd = claim_slot(self.run_fd, self._process)
        self._write_slot(NOT_WAITING)
        return snapshot

    def _begin_run(self) -> None:
        """Write the first records, unless they are there; continue where a process was killed doing
        so.
        """
        first, notified = pack_record(1, 0, 0, 0), os.pread(self._notify_fd, RECORD_SIZE, 0)
        if not os.fstat(self._position_fd).st_size:
            if notified not in (b"", _NOT_BEGUN) or "state" in os.listdir(self.run_fd):
                raise self._damaged("position", "nothing", _WHOLE_RECORD)
            os.pwrite(self._notify_fd, _NOT_BEGUN, 0)
            os.pwrite(self._position_fd, first.ljust(_SLOTS_OFFSET, b"\0"), 0)
        elif notified != _NOT_BEGUN:
            return
        os.pwrite(self._notify_fd, first, 0)

    def leave(self) -> None:
        """Give up the slot, and those of processes that have died: perhaps no other process will be
        notified of their end.
        """
        try:
            self.remove_dead(None)
        finally:
            self.unregister()

    def unregister(self) -> None:
        if self.slot >= 0:
            self._free_slot(str(self.slot))
            self.slot = -1

    def _free_slot(self, name: str) -> None:
        self._unlink(f"alive/{name}")
        os.pwrite(self._position_fd, bytes(_SLOT.size), _SLOTS_OFFSET + _SLOT.size * int(name))
        last = max((int(other) for other in taken_slots(self.run_fd)), default=-1)
        os.ftruncate(self._position_fd, _SLOTS_OFFSET + _SLOT.size * (last + 1))

    def remove_dead(self, slots: set[str] | None) -> Snapshot:
        """Remove the members of those processes in `slots` (None: of all) that have died."""
        living, dead = check_processes(self.run_fd, slots)
        record = self.read()
        state = self.load_state(record)
        processes = set(living.values()) if slots is None else set(dead.values())
        lost = [
            member
            for member in state.members.values()
            if (member.process in processes) == (slots is not None)
        ]
        _expire(state, lost)
        self._save_state(state, record, changed=bool(lost))
        for slot in dead:
            self._free_slot(slot)
        return state.snapshot()

    def inspect(self) -> tuple[Snapshot, tuple[int, ...]] | None:
        """Return the run without the members that have died, and the steps that processes wait for;
        None if it has not begun.

        This changes nothing, and removes no one: the next process that opens the run does.
        """
        if os.pread(self._notify_fd, RECORD_SIZE, 0) in (b"", _NOT_BEGUN):
            return None
        living, dead = check_processes(self.run_fd, None)
        record, slots = self._read_with_slots()
        state = self.load_state(record)
        processes = set(living.values())
        _expire(
            state, [member for member in state.members.values() if member.process not in processes]
        )
        steps = (
            number - 1
            for slot, (number,) in enumerate(_SLOT.iter_unpack(slots))
            if number and str(slot) not in dead
        )
        # A step that is reached stays in the slot until the process waits again.
        return state.snapshot(), tuple(
            sorted(step for step in steps if step == 0 or step > record.position.step)
        )

    def advance(self, by: int, floor: Position, term: int) -> Position | None:
        """Add to the step; return None if that is refused, with a reason that `apply` gives."""
        record, slots = self._read_with_slots()
        position, revision, current_term = record
        epoch, old = position
        step = old + by
        if (term and term != current_term) or position < floor or step > MAX_STEP:
            answer = self._apply_write(record, slots, Write("advance", by, floor, term, "", 0))
            return answer.position if answer.status == "ok" else None
        cached_slots, cached_epoch, lowest = self._due_cache
        if (slots == cached_slots and epoch == cached_epoch and step < lowest) or not self._is_due(
            slots, epoch, old, step
        ):
            return self._write_position(epoch, step, revision, current_term, slots, old)
        return self._write_notify(epoch, step, revision, current_term)

    def _is_due(self, slots: bytes, epoch: int, old: int, new: int) -> bool:
        due, later = find_due(slots, self.slot, old, new)
        self._due_cache = slots, epoch, later
        return due

    def apply(self, request: Request) -> tuple[Answer, Snapshot | None]:
        """Apply a request; return a snapshot too if more than the position may have changed."""
        record, slots = self._read_with_slots()
        if isinstance(request, Write):
            return self._apply_write(record, slots, request), None
        state = self.load_state(record)
        answer = state.apply(request)
        state.answers.clear()  # no request is sent twice here
        self._save_state(state, record, changed=answer.status == "ok")
        return answer, state.snapshot()

    def _apply_write(self, record: RunRecord, slots: bytes, write: Write) -> Answer:
        """Do as `RunState` does, on the record alone; no write is sent twice here."""
        position = record.position
        if write.floor > position:
            return Answer("lost", position, record.term)
        epoch, step = write.target(position)
        if 0 < write.term < record.term:
            return Answer("stale", position, record.term)
        if step > MAX_STEP:
            return Answer("full", position, record.term)
        term = max(record.term, write.term)
        if (epoch, step) != position or term != record.term:
            if epoch != position.epoch or self._is_due(slots, epoch, position.step, step):
                position = self._write_notify(epoch, step, record.revision, term)
            else:
                position = self._write_position(
                    epoch, step, record.revision, term, slots, position.step
                )
        return Answer("ok", position, term)

    def _save_state(self, state: RunState, record: RunRecord, *, changed: bool) -> None:
        if changed:
            data = state.dump()
            fd = os.open(
                "state.new",
                os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW,
                0o600,
                dir_fd=self.run_fd,
            )
            with open(fd, "wb") as file:
                file.write(b"%08x %s" % (crc32(data), data))
            os.rename("state.new", "state", src_dir_fd=self.run_fd, dst_dir_fd=self.run_fd)
        # Also if the process that changed it last was killed before it notified.
        if (state.revision, state.term) != (record.revision, record.term):
            self._write_notify(*record.position, state.revision, state.term)

    def _write_position(
        self, epoch: int, step: int, revision: int, term: int, slots: bytes, old: int
    ) -> Position:
        """Write a record that no waiter is due for."""
        data = pack_record(epoch, step, revision, term)
        os.pwrite(self._position_fd, data, 0)
        record = make_record(epoch, step, revision, term)
        self._position_cache.put(data, record)
        # Another process may have subscribed since, without seeing this record yet. If this process
        # is killed here, the end of its file in `alive/` makes the others look.
        slots_now = os.pread(self._position_fd, self._read_size - _SLOTS_OFFSET, _SLOTS_OFFSET)
        if slots_now != slots and self._is_due(slots_now, epoch, old, step):
            self._write_notify(epoch, step, revision, term)
        return record.position

    def _write_notify(self, epoch: int, step: int, revision: int, term: int) -> Position:
        """Write a record that waiters are due for; the write wakes them."""
        data = pack_record(epoch, step, revision, term)
        os.pwrite(self._notify_fd, data, 0)
        record = make_record(epoch, step, revision, term)
        self._notify_cache.put(data, record)
        return record.position

    def _read_with_slots(self) -> tuple[RunRecord, bytes]:
        """Return where the run is, and the slots."""
        data = os.pread(self._position_fd, self._read_size, 0)
        while len(data) == self._read_size:
            self._read_size *= 2  # there may be more
            data = os.pread(self._position_fd, self._read_size, 0)
        notified = self._notify_cache.unpack(os.pread(self._notify_fd, RECORD_SIZE, 0))
        position = self._position_cache.unpack(data[:RECORD_SIZE])
        if position is None:
            raise self._no_record("position")
        if len(data) < _SLOTS_OFFSET or len(data) % _SLOT.size:
            raise self._damaged(
                "position",
                f"{len(data)} bytes",
                f"{_SLOTS_OFFSET} bytes, and {_SLOT.size} for each slot",
            )
        if notified is None:
            raise self._no_record("notify")
        return (position if position > notified else notified), data[_SLOTS_OFFSET:]

    def delete(self) -> None:
        """Delete the run. Foreign files in its directory stay, and the error names the
        directory.
        """
        self.unregister()
        for name in os.listdir(self.path / "alive"):
            self._unlink(f"alive/{name}")
        os.rmdir("alive", dir_fd=self.run_fd)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir("fifos", dir_fd=self.run_fd)  # of a run that an earlier version made
        for name in ("state.new", "state", "position", "notify"):
            self._unlink(name)
        os.rmdir(self.path)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self.run_fd)

    def close(self) -> None:
        """Close everything except the directory, which the lock closes; harmless when called
        twice.
        """
        if self._alive_fd >= 0:
            release_slot(self._alive_fd)
        self._close_files(self._position_fd, self._notify_fd)

    def after_fork(self) -> None:
        """Close the descriptors that a child has inherited; `_lock` closes that of the file in
        `alive/`.
        """
        self._close_files(self.run_fd, self._position_fd, self._notify_fd)

    def _close_files(self, *fds: int) -> None:
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        self.run_fd = self._alive_fd = self._position_fd = self._notify_fd = -1


def _is_at(path: Path, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    return False


def _expire(state: RunState, lost: list[Member]) -> None:
    """Remove members that have died from a state."""
    # The lease of a chief goes first: waiters get the name of the last one, and that of a publisher
    # says more.
    for member in sorted(lost, key=lambda member: -member.term):
        state.apply(Expire(member.id, member.heartbeat))
