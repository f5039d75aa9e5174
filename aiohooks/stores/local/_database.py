"""A run in a SQLite database, with the files by which its processes wake each other.

    run.db     the position, term, revision and state of the run
    waiting    a number for each slot: 1 more than the step that its process waits for, 0 for none
    notify     the position and revision of the last notification; writing to it wakes all processes
    alive/     a locked file for each process that has the run open

A process that changes the run commits first and reads `waiting` second. A process that begins to
wait writes its number first and reads the position second. So at least one of the two processes
sees the write of the other, and waiting needs no lock. If a process is killed between the commit
and the notification, the kernel closes its file in `alive/`, and the others read the database.

The name of a file in `alive/` is the number of the process's slot, and its content the name of the
process. When the process ends, in any way, the kernel releases the lock and then reports to inotify
that a file was closed after writing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import struct
import sys
import threading
from array import array
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohooks._core.fork import call_after_fork, hold_during_fork
from aiohooks.errors import StoreRefusedError, StoreUnavailableError
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    EngineError,
    Expire,
    Position,
    Request,
    Snapshot,
    damaged_error,
    logger,
)
from aiohooks.stores.engine import RunState

if sys.platform != "win32":  # Windows has no fcntl; `LocalEngine` rejects it
    import fcntl

MAX_SLOTS = 1024

no_fork = threading.Lock()
"""The lock to hold during each use of the files of a run. One thread at a time uses them, and a
child that is forked does not get them in the middle of a change.
"""
hold_during_fork(no_fork)

# The locks of the files in `alive/` are POSIX locks. When a process ends, the kernel would release
# a `flock` only after the report, when other processes may have checked the lock already. But a
# process loses a POSIX lock as soon as it closes *any* descriptor of the file, and its own locks
# never conflict. So a process never opens its own files a second time, and remembers their content
# instead.
_own_files: dict[tuple[int, int], str] = {}
"""The content of the files in `alive/` of this very process, by device and inode."""


def claim_slot(directory: Path, process: str) -> tuple[int, int]:
    """Make and lock the file of this process in the lowest free slot. Return slot and descriptor.

    The process counts as alive as long as it has the descriptor open. The caller must have the lock
    of the run, and must have removed the files of dead processes.
    """
    free_slots = set(range(MAX_SLOTS)).difference(processes_by_slot(directory))
    if not free_slots:
        raise StoreUnavailableError(f"{MAX_SLOTS} processes have this run open: limit reached")
    slot = min(free_slots)
    fd = os.open(directory / str(slot), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    os.write(fd, process.encode())
    _own_files[file_id(os.fstat(fd))] = process
    return slot, fd


def release_slot(fd: int) -> None:
    """Close the file of this process, which the kernel reports to the other processes.

    In a forked child this reports nothing, because its parent has the file open, too.
    """
    del _own_files[file_id(os.fstat(fd))]
    os.close(fd)


def file_id(status: os.stat_result) -> tuple[int, int]:
    """Return the device and the inode of a file."""
    return status.st_dev, status.st_ino


def processes_by_slot(directory: Path) -> dict[int, str | None]:
    """Return the name of the process in each slot, or None for a process that has died.

    Each process has a file with the number of its slot as its name. It keeps the file locked.
    """
    processes: dict[int, str | None] = {}
    # `Path.glob` would hide an error of the system, and all processes would look dead.
    for filename in os.listdir(directory):
        if not filename.isdecimal():
            continue  # a foreign file
        path = directory / filename
        with contextlib.suppress(FileNotFoundError):  # the process left after the listing
            process = _own_files.get(file_id(path.lstat()))
            if process is None:
                process = _process_with_lock(path)
            processes[int(filename)] = process
    return processes


def _process_with_lock(path: Path) -> str | None:
    """Return the name in the file of another process, or None if no process has locked the file."""
    with path.open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the two errors of a lock that is taken
            return file.read().decode(errors="replace")
    return None


_VERSION = 2
# Each change writes whole pages to the log. A change has only a few numbers, so pages are small.
_SETTINGS = "PRAGMA page_size = 512; PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF"
_SCHEMA = (
    "CREATE TABLE run(id INTEGER PRIMARY KEY, epoch INT, step INT, term INT, revision INT)",
    "INSERT INTO run VALUES (1, 1, 0, 0, 0)",
    # The state is in a table of its own, because an advance does not write it.
    "CREATE TABLE state(text TEXT)",
    f"INSERT INTO state VALUES ('{RunState().dump().decode()}')",
    f"PRAGMA user_version = {_VERSION}",
)
# With `id = 1`, SQLite finds the row by its key. Otherwise it would collect the rows to update in a
# temporary file.
_ADVANCE = f"""
    UPDATE run SET step = step + ?
    WHERE id = 1 AND (epoch, step) >= (?, ?) AND ? IN (0, term) AND step <= {MAX_STEP} - ?
    RETURNING epoch, step, revision
"""
_FILES = ("notify", "waiting", "run.db")
_NOTIFICATION = struct.Struct("QQQ")  # epoch, step, revision
_SLOT_SIZE = 8
_LOCK_ATTEMPTS = 30
_CLOSE_ATTEMPTS = 1_000
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""SQLITE_ERROR is the code for a missing table."""
SYSTEM_ERRORS = (OSError, sqlite3.Error)
"""The errors of a `RunDatabase`. `explain` returns the store's error for them."""


class NoRunError(sqlite3.DatabaseError):
    """The files can be read, but do not contain a whole run."""


class RunDatabase:
    """The files of a run, which one store has opened.

    No method waits for another process. If another process has the lock of the run, a method raises
    `BlockingIOError`.

    The lock is a `flock` on the file `waiting`, which readers share. SQLite's own locks are not
    enough: if a process is stopped at the wrong moment, SQLite sleeps for ten seconds before it
    gives up.
    """

    def __init__(self, path: Path) -> None:
        """Open the files that `make_files` has made in the directory `path`."""
        self._path = path
        self._alive = path / "alive"
        self._slot = -1
        self._waiting_fd = -1
        # The names of the directory of the run ("") and of its files. If any of them is replaced,
        # the run is gone.
        self._names = ["", "alive", *_FILES]
        self._resources = contextlib.ExitStack()
        call_after_fork(self)
        try:
            self._opened_ids = self._file_ids()
            self._notify_fd = self._open_file("notify")
            self._waiting_fd = self._open_file("waiting")
            with no_fork:  # a child would get half a connection
                self._db = sqlite3.connect(
                    f"file:{quote(str(path))}/run.db?mode=rw",
                    uri=True,
                    timeout=0.0,  # SQLite must not wait for a lock
                    isolation_level=None,  # `_change` begins transactions
                    check_same_thread=False,  # `no_fork` admits one thread at a time
                )
                self._resources.callback(self._db.close)
        except BaseException:
            self.close()
            raise

    def _open_file(self, name: str) -> int:
        """Open a file of the run until `close`, and return its descriptor."""
        fd = os.open(self._path / name, os.O_RDWR)
        self._resources.callback(os.close, fd)
        return fd

    def close(self) -> None:
        """Close all files. A second call does nothing."""
        with no_fork:
            # SQLite deletes its own files when the last process closes a database. If two processes
            # closed it at the same time, neither would be the last. So let a process that has the
            # lock run for a moment. If it is stopped, this one is not the last, and closes anyway.
            with contextlib.suppress(OSError):
                self._lock(fcntl.LOCK_EX, attempts=_CLOSE_ATTEMPTS)
            self.after_fork()

    def after_fork(self) -> None:
        """Close the files, also in a forked child, which must not use the files of its parent."""
        # SQLite remembers the locks of a process. If a child only forgot the database, and opened
        # the run itself, SQLite would believe that the child has the locks of its parent.
        self._resources.close()
        self._opened_ids = []  # `is_gone` is true from now on
        # The system may give the number of the closed descriptor to another file.
        self._waiting_fd = -1

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Generator[None]:
        """Hold the lock of the run in the block, in which no thread can fork.

        Raises:
            BlockingIOError: another process has the lock.
        """
        with no_fork:
            self._lock(kind)
            try:
                yield
            finally:
                fcntl.flock(self._waiting_fd, fcntl.LOCK_UN)

    def _lock(self, kind: int, *, attempts: int = _LOCK_ATTEMPTS) -> None:
        """Take the lock of the run: `LOCK_EX`, or `LOCK_SH` to read.

        Args:
            kind: the kind of the lock.
            attempts: how often to try. After the usual number, let other processes run between.

        Raises:
            BlockingIOError: another process still has the lock after some attempts.
        """
        if self._waiting_fd < 0:
            raise OSError(errno.EBADF, "the files of the run were closed")
        # Another process has the lock for some microseconds only, unless it is stopped.
        for attempt in range(attempts):
            try:
                fcntl.flock(self._waiting_fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt >= _LOCK_ATTEMPTS:
                    os.sched_yield()
        raise BlockingIOError(errno.EAGAIN, "another process has the lock of the run")

    def _file_ids(self) -> list[tuple[int, int]]:
        """Return the device and inode of each file as it is now, in the order of `_names`."""
        return [file_id((self._path / name).lstat()) for name in self._names]

    def is_gone(self) -> bool:
        """Return whether the files are closed, or were deleted, moved or replaced.

        If so, no other process would see a change that is made by this object.
        """
        try:
            return self._file_ids() != self._opened_ids
        except OSError:
            return True

    def register(self, process: str) -> Snapshot:
        """Register this process in a free slot, and return the run.

        Begin the run if it is new, and remove dead processes.
        """
        with self._locked(fcntl.LOCK_EX):
            self._db.executescript(_SETTINGS)  # SQLite ignores these in a transaction
        with self._change() as state:
            self._remove_dead(state)
            self._slot, fd = claim_slot(self._alive, process)
            self._resources.callback(release_slot, fd)
            self._names.append(f"alive/{self._slot}")
            self._opened_ids.append(file_id(os.fstat(fd)))
            # These first writes allocate the space on the disk, so that no later notification fails
            # for lack of space.
            self.write_slot(None)
            self._notify(state.position, state.revision)
        return state.snapshot()

    def has_begun(self) -> bool:
        """Return whether the database has a run. A new database has none.

        Raises:
            NoRunError: the database has another version of its format, or has lost the run.
        """
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == _VERSION:
            return True
        if version != 0:  # the version of a new database is 0
            raise NoRunError(f"version {version}")
        # The first process of a run writes to the file `waiting`. So if it is not empty, there was
        # a run, and an empty database has replaced it.
        if os.fstat(self._waiting_fd).st_size:
            raise NoRunError("an empty database")
        return False

    def leave(self) -> None:
        """Free the slots of this process and of dead processes.

        If this is the last process, no other process would remove the dead ones.
        """
        if self._slot >= 0:
            self.remove_dead()
            self._free_slot(self._slot)

    def _free_slot(self, slot: int) -> None:
        """Delete the number and the file of a slot."""
        # Delete the number first: another process may claim the slot as soon as the file is gone.
        os.pwrite(self._waiting_fd, bytes(_SLOT_SIZE), _SLOT_SIZE * slot)
        (self._alive / str(slot)).unlink(missing_ok=True)

    # Reading.

    def position(self) -> tuple[Position, int]:
        """Return the position and the revision of the run."""
        with self._locked(fcntl.LOCK_SH):
            epoch, step, revision = self._fetch_row("SELECT epoch, step, revision FROM run")
        return Position(epoch, step), revision

    def notification(self) -> tuple[Position, int]:
        """Return the position and the revision of the last notification, faster than `position`."""
        with self._locked(fcntl.LOCK_SH):
            self._check_waiting()
            data = os.pread(self._notify_fd, _NOTIFICATION.size, 0)
        if len(data) < _NOTIFICATION.size:
            raise NoRunError("the file `notify` was cut off")
        epoch, step, revision = _NOTIFICATION.unpack(data)
        return Position(epoch, step), revision

    def snapshot(self) -> Snapshot:
        """Return the state of the run."""
        with self._locked(fcntl.LOCK_SH):
            return self._load().snapshot()

    def _load(self) -> RunState:
        """Read the state. Its position comes from the table `run`, which an advance writes."""
        epoch, step, text = self._fetch_row("SELECT epoch, step, text FROM run, state")
        try:
            state = RunState.load(text)
        except ValueError as error:
            raise NoRunError(str(error)) from error
        state.position = Position(epoch, step)
        return state

    def _fetch_row(self, query: str) -> Any:
        """Return the only row of a query."""
        self._check_waiting()
        row = self._db.execute(query).fetchone()
        if row is None:
            raise NoRunError("no row of the run")
        return row

    def _check_waiting(self) -> None:
        """Raise `NoRunError` if the number of this process in `waiting` is missing."""
        end_of_slot = _SLOT_SIZE * (self._slot + 1)
        if os.fstat(self._waiting_fd).st_size < end_of_slot:
            raise NoRunError("the file `waiting` was cut off")

    # Changes.

    def write_slot(self, step: int | None) -> None:
        """Request a notification when `step` is reached.

        With 0, request a notification of each change, and with None, request none.
        """
        # The number is 1 more than the step, because 0 stands for no request.
        number = 0 if step is None else step + 1
        os.pwrite(self._waiting_fd, array("Q", [number]), _SLOT_SIZE * self._slot)

    def advance(self, by: int, floor: Position, term: int) -> Position | None:
        """Add `by` to the step, and return the new position.

        Return None, and change nothing, if the run is behind `floor`, if `term` is over, or if the
        step would be too high: `apply` of the same write returns the reason.
        """
        with self._locked(fcntl.LOCK_EX):
            row = self._db.execute(_ADVANCE, (by, *floor, term, by)).fetchone()
            if row is None:
                return None
            epoch, step, revision = row
            position = Position(epoch, step)
            if self._is_awaited(step - by, step, except_slot=self._slot):
                self._notify(position, revision)
        return position

    def apply(self, request: Request) -> tuple[Answer, Snapshot]:
        """Apply a request, and return the answer with the state after it."""
        with self._change() as state:
            answer = state.apply(request)
        return answer, state.snapshot()

    def remove_dead(self) -> Snapshot:
        """Remove the members of dead processes, free their slots, and return the new state."""
        with self._change() as state:
            self._remove_dead(state)
        return state.snapshot()

    def _remove_dead(self, state: RunState) -> None:
        """Remove the members of dead processes from the state, and free their slots."""
        processes = processes_by_slot(self._alive)
        living = set(processes.values())
        dead = [member for member in state.members.values() if member.process not in living]
        # Remove the chief first, which is the only member with a term. The errors of waits name the
        # member that was removed last, and a publisher explains better why the step is not reached.
        dead.sort(key=lambda member: member.term, reverse=True)
        for member in dead:
            state.apply(Expire(member.id, member.heartbeat))
        for slot, process in processes.items():
            if process is None:
                self._free_slot(slot)

    @contextlib.contextmanager
    def _change(self) -> Generator[RunState]:
        """Let the block change the state in a transaction. Then wake the processes that wait."""
        with self._locked(fcntl.LOCK_EX):
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                if not self.has_begun():
                    for statement in _SCHEMA:
                        self._db.execute(statement)
                state = self._load()
                old_position = state.position
                old_revision = state.revision
                yield state
                # Answers are kept for requests that are repeated because their answers were lost.
                # Here no answer can be lost, so keep none.
                state.answers.clear()
                self._db.execute(
                    "UPDATE run SET epoch = ?, step = ?, term = ?, revision = ?",
                    (*state.position, state.term, state.revision),
                )
                self._db.execute("UPDATE state SET text = ?", (state.dump().decode(),))
            position = state.position
            # A change of the epoch or of the state wakes all processes. A change of the step wakes
            # only the processes that wait for the step.
            has_changed = (old_position.epoch, old_revision) != (position.epoch, state.revision)
            # Except no slot (-1 is none), so that this process is woken as well: if its caller was
            # cancelled, it would not notice the change otherwise.
            if has_changed or self._is_awaited(old_position.step, position.step, except_slot=-1):
                self._notify(position, state.revision)

    def _notify(self, position: Position, revision: int) -> None:
        """Wake all processes by a write to the file `notify`, which inotify reports to them.

        Only log an error: the change is committed, and raising the error would mean that it has
        failed.
        """
        try:
            os.pwrite(self._notify_fd, _NOTIFICATION.pack(*position, revision), 0)
        except OSError as error:
            logger.error("%s: the waiting processes were not woken: %s", self._path, error)

    def _is_awaited(self, old: int, new: int, *, except_slot: int) -> bool:
        """Return whether a process waits for a step after `old` up to `new`, or for any change.

        The process in `except_slot` does not count.
        """
        try:
            numbers = self._slot_numbers()
        except OSError:
            numbers = array("Q")  # no numbers, as in a file that was cut off
        if len(numbers) <= self._slot:  # the file is damaged: the woken processes report this
            return True
        for slot, number in enumerate(numbers):
            # A number is 1 more than the awaited step. 1 stands for any change, see `write_slot`.
            if slot != except_slot and (number == 1 or old + 1 < number <= new + 1):
                return True
        return False

    def _slot_numbers(self) -> array[int]:
        """Return the numbers in `waiting`, by slot."""
        data = os.pread(self._waiting_fd, _SLOT_SIZE * MAX_SLOTS, 0)
        return array("Q", data[: len(data) // _SLOT_SIZE * _SLOT_SIZE])


def make_files(path: Path) -> None:
    """Make the files of a run in the directory `path`, unless they are there.

    Raises:
        StoreRefusedError: an earlier version has made the run.
    """
    if (path / "position").exists() and not (path / "run.db").exists():
        raise StoreRefusedError(
            f"{path} has a run of an earlier version: finish it with that version, or delete the"
            " directory; a chief continues from its newest checkpoint"
        )
    for name in _FILES:
        # Do not open the file: closing its descriptor would release the locks that SQLite in this
        # process has on the file.
        with contextlib.suppress(FileExistsError):
            os.mknod(path / name, 0o600)


def delete_run(path: Path) -> None:
    """Delete the files of a run and its directory. Raise an error if it has any other files."""
    files = [path / name for name in (*_FILES, "run.db-wal", "run.db-shm")]
    for file in (*files, *(path / "alive").iterdir()):
        file.unlink(missing_ok=True)
    (path / "alive").rmdir()
    path.rmdir()


def explain(error: Exception, path: Path, run: str) -> EngineError:
    """Return the store's error for an error of a `RunDatabase`."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, NoRunError) or code in _DAMAGED:
        return damaged_error(
            run,
            str(path / "run.db"),
            found=str(error),
            expected=f"a database of version {_VERSION}",
            delete=f"remove the directory {path}",
        )
    error_type = StoreUnavailableError
    if code == sqlite3.SQLITE_READONLY:
        error_type = StoreRefusedError
    return error_type(
        f"the files of run {run!r} in {path} cannot be used: {error}; make room on the disk, close"
        " other files, or let this user write there"
    )
