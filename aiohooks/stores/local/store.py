"""The engine of a step store in a SQLite database, for the processes of one machine.

The directory of a run is on a disk of this machine, and no other user can write to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import sqlite3
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar
from urllib.parse import quote

from aiohooks._core.activity import wait_log
from aiohooks._core.clock import sleep
from aiohooks._core.fork import call_after_fork
from aiohooks._core.validate import check_directory
from aiohooks._core.waits import retrieve_exception, to_thread, wait_done, wait_for_others
from aiohooks.errors import (
    InvalidArgumentError,
    StoreDamagedError,
    StoreRefusedError,
    StoreUnavailableError,
    UnsupportedSystemError,
)
from aiohooks.stores._protocol import (
    Answer,
    EngineError,
    Position,
    Request,
    Snapshot,
    logger,
)
from aiohooks.stores.engine import Engine, EngineLink
from aiohooks.stores.local._database import (
    SYSTEM_ERRORS,
    RunDatabase,
    delete_run,
    explain,
    make_files,
)

# The file systems whose files other machines may change as well, by the number that `statfs`
# returns. Inotify does not report such changes, and a lock may be valid on one machine only. FUSE
# is among them, because any file system may be behind it.
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
"""Errors that last until the user gives another path, unlike the error of a full disk."""


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
    """Return the name of a run's directory: a different name for every run, and never a path.

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
        # All users can predict the name of the default directory, and may often write to its
        # parent. So another user could have made it, and it must be closed to others.
        _check_private(base, forbidden_mode=0o077)
    else:
        # A directory for many users, such as /dev/shm, is fine if it belongs to the root user (0),
        # because only that user can replace it.
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

    Its mode must have none of the bits of `forbidden_mode`. The default -1 is the number of no
    user.
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
    # The memory for a `struct statfs`, with room to spare. The first field of the struct is the
    # number of the file system, in its lower 32 bits.
    result = (ctypes.c_long * 64)()
    ctypes.CDLL(None).statfs(os.fsencode(path), ctypes.byref(result))
    return _REMOTE_FILE_SYSTEMS.get(result[0] & 0xFFFFFFFF)


T = TypeVar("T")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
"""The codes of SQLite while another process has locked the database."""
_OPEN_SECS = 5.0
"""How long a cancelled caller waits for the thread that opens the files."""

# Kinds of events of inotify, as bits.
MODIFY = 0x2
CLOSE_WRITE = 0x8
_REMOVED = 0x4 | 0x800
"""IN_ATTRIB and IN_MOVE_SELF: a file that is removed while it is open loses a name, which counts as
a changed attribute.
"""
_DELETED = 0x200
OVERFLOW = 0x4000
"""Events of any kind and number were lost."""

_EVENT = struct.Struct("iIII")  # watch, kinds, cookie, size of the name behind it


class LocalEngine(Engine):
    """A run in a directory, for the processes of one machine: a SQLite database.

    There is no server. The kernel (inotify) notifies waiters when their step is reached, and when a
    process that publishes has died. There are no leases, and a process that is merely stopped
    counts as alive. Any process may be killed at any moment. The step outlives all processes, until
    `forget`, but not every restart of the machine: see `default_directory`.
    """

    remote = False
    connect_timeout: ClassVar[float] = 0.0  # the first error is raised immediately

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Open no file yet.

        Args:
            directory: the parent directory, in which each run has a directory of its own. By
                default `default_directory()`. It is made if it is missing. It must be on a file
                system of this machine, and no other user may write to the directory of a run.

        Raises:
            InvalidArgumentError: `directory` is not a path.
            UnsupportedSystemError: the system is not Linux, or its SQLite is too old.
        """
        _check_system()
        self._base: Path | None = None
        if directory is not None:
            check_directory(directory, "directory", url="the URL is for open_step_store")
            self._base = Path(directory).absolute()
        self._database: RunDatabase | None = None
        self._inotify: Inotify | None = None
        # The step that the store has subscribed to last.
        self._subscribed_step: int | None = None
        # The revision of the latest state that was reported, or None if it is unknown.
        self._reported_revision: int | None = None
        # Logs a long wait for the lock of the run.
        self._lock_log = wait_log(lambda: f"the lock of {self.directory}, which a process has")

    def attach(self, link: EngineLink) -> None:
        super().attach(link)
        run_file_name(link.run)  # raises an error for a name that is too long

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return (self._base or default_directory()) / run_file_name(self.link.run)

    # Opening and closing.

    async def connect(self) -> Snapshot:
        await self.disconnect()
        try:
            database = await to_thread(self._open_files, grace_secs=_OPEN_SECS)
            self._database = database
            # Watch first and read second, so that no change is missed.
            self._inotify = Inotify()
            self._inotify.add_run(self.directory)
            snapshot = await self._call(lambda database: database.register(self.link.process))
            self._reported_revision = snapshot.revision
        except SYSTEM_ERRORS as error:
            # Without a cause: the raised error has the text of this error, or says that the run is
            # gone.
            raise self._explain(error) from None
        # If another process has deleted the run meanwhile, make a new run.
        if database.is_gone():
            return await self.connect()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inotify.fd, self._on_inotify, database, self._inotify)
        return snapshot

    def _open_files(self) -> RunDatabase:
        """Make the files of the run, unless they are there, and open them. Blocks."""
        make_run_directory(self._base, self.link.run)
        make_files(self.directory)
        return RunDatabase(self.directory)

    async def disconnect(self) -> None:
        database = self._database
        self._database = None
        self._subscribed_step = None
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        if database is None:
            return
        try:
            # In a deleted run, no process would notice that this one leaves.
            if not database.is_gone():
                leaving = call_when_unlocked(database.leave)
                leaving.add_done_callback(retrieve_exception)
                # If a suspended process has the lock, give up after a second. Closing the files
                # below ends the attempts, and lets the kernel report to the other processes that
                # this process has left.
                await wait_done([leaving], 1.0)
        finally:
            database.close()

    async def delete(self) -> None:
        # If other files have replaced the files of this run, they must not be deleted.
        gone_error = self._gone_error()
        if gone_error is not None:
            raise gone_error
        await self.disconnect()
        try:
            await to_thread(delete_run, self.directory)
        except OSError as error:
            raise self._explain(error) from error

    # Requests.

    def advance_nowait(self, by: int, floor: Position, term: int) -> Position | None:
        if self._database is None:
            return None
        try:
            return self._database.advance(by, floor, term)
        except SYSTEM_ERRORS:
            return None  # the store calls `request`, which waits for the lock or raises the error

    async def request(self, request: Request) -> Answer:
        answer, snapshot = await self._call(lambda database: database.apply(request))
        self._reported_revision = snapshot.revision
        self.link.observe(snapshot)
        return answer

    async def read(self) -> Snapshot:
        return await self._call(RunDatabase.snapshot)

    async def _call(self, work: Callable[[RunDatabase], T]) -> T:
        """Call `work` with the open database. Wait while another process has the lock.

        The wait ends when the current session stops: the other process may be suspended (SIGSTOP),
        and then keeps the lock indefinitely.
        """
        if self._database is None:
            raise StoreUnavailableError(f"the files of run {self.link.run!r} are not open")
        outcome = call_when_unlocked(partial(work, self._database))
        try:
            # Usually the lock was free, and the outcome is done.
            if not outcome.done():
                self._lock_log.begin(outcome)
                await wait_for_others(outcome)
            return outcome.result()
        except SYSTEM_ERRORS as error:
            raise self._explain(error) from error
        finally:
            self._lock_log.end(outcome)
            # If a stop has ended the wait, do not call `work`. Otherwise this has no effect.
            outcome.cancel()

    # Notifications.

    def subscribe(self, step: int | None) -> None:
        database = self._database
        if database is None or step == self._subscribed_step:
            return
        self._subscribed_step = step
        try:
            database.write_slot(step)
        except OSError as error:
            self.link.observe(self._explain(error))
            return
        # Read the position after the step is written: a process that changed the run before has not
        # seen the step, and does not wake this process.
        if step is not None:
            self._report_change(database.position)

    def _on_inotify(self, database: RunDatabase, inotify: Inotify) -> None:
        """Read the events, and report a change, a run that is gone, and processes that ended."""
        events = inotify.read_events()
        # Any other event may mean that a file of the run was deleted, moved or replaced.
        if events & ~(MODIFY | CLOSE_WRITE) and database.is_gone():
            database.close()  # calls fail from now on
        if events & ~CLOSE_WRITE:
            self._report_change(database.notification)
        # The kernel closes the file of a process that ends. An overflow may have lost this event.
        if events & (CLOSE_WRITE | OVERFLOW):
            self.link.tasks.spawn(self._report(RunDatabase.remove_dead), "removing the dead")

    def _report_change(self, read: Callable[[], tuple[Position, int]]) -> None:
        """Report the position that `read` returns. If the revision is new, report the state later.

        Do not report the state synchronously: the caller may be in the middle of beginning a wait,
        which a report of the state could end. A task reports it.
        """
        revision: int | None
        try:
            position, revision = read()
        except SYSTEM_ERRORS:
            # The revision is unknown, so let the task read the state. It waits if another process
            # has the lock, and reports the error if there is one.
            revision = None
        else:
            self.link.observe(position)
        if revision is None or revision != self._reported_revision:
            self._reported_revision = revision
            self.link.tasks.spawn(self._report(RunDatabase.snapshot), "reading the run")

    async def _report(self, read: Callable[[RunDatabase], Snapshot]) -> None:
        """Report the state that `read` returns, or an error that will not pass.

        After an error that may pass, such as the error of a full disk, try again each second.
        """
        while self._database is not None:
            try:
                self.link.observe(await self._call(read))
                return
            except (StoreDamagedError, StoreUnavailableError) as error:
                if isinstance(error, StoreDamagedError) or self._gone_error():
                    self.link.observe(error)
                    return
                logger.warning("run %s: the waits continue: %s", self.link.run, error)
            await sleep(1.0, self.link.clock)

    def _gone_error(self) -> EngineError | None:
        """Return the error to raise if the run's files were deleted, moved or replaced."""
        if self._database is None or not self._database.is_gone():
            return None
        return StoreUnavailableError(
            f"the run {self.link.run!r} was deleted, or its directory {self.directory} was moved:"
            " close this store and make a new one"
        )

    def _explain(self, error: Exception) -> EngineError:
        """Return the store's error for an error of the database."""
        return self._gone_error() or explain(error, self.directory, self.link.run)


def _check_system() -> None:
    """Raise an error on a system without inotify, or with an SQLite that is too old."""
    if sys.platform != "linux":
        raise UnsupportedSystemError(
            "the step store local:// needs Linux, whose kernel notifies of changed files (inotify);"
            " on this system use redis://, or memory:// in one process"
        )
    if sqlite3.sqlite_version_info < (3, 35):  # the first with RETURNING
        raise UnsupportedSystemError(
            "the step store local:// needs SQLite 3.35 or later, and this Python has"
            f" {sqlite3.sqlite_version}: use another Python, or redis://"
        )


def _try_to_settle(work: Callable[[], T], outcome: asyncio.Future[T] | Future[T]) -> bool:
    """Call `work`, set the future to its result or error, and return True.

    If another process has locked the database, return False and leave the future pending.
    """
    try:
        result = work()
    except Exception as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if isinstance(error, BlockingIOError) or code in _BUSY:
            return False
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
    return True


def call_when_unlocked(work: Callable[[], T]) -> asyncio.Future[T]:
    """Call `work` now. If the database is locked, repeat the call in a thread until it is not.

    Returns:
        The outcome of `work`. If you cancel it, or close the database, the thread ends.
    """
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    if _try_to_settle(work, outcome):
        return outcome
    late_outcome: Future[T] = Future()

    def retry() -> None:
        pause_secs = 0.0002
        # Setting the outcome raises InvalidStateError if it was cancelled during the call.
        with contextlib.suppress(InvalidStateError):
            while not (late_outcome.cancelled() or _try_to_settle(work, late_outcome)):
                wait([late_outcome], pause_secs)  # a pause that a cancellation ends
                pause_secs = min(2 * pause_secs, 0.01)

    # A stopped process may have locked the database for as long as it is stopped. So use a daemon
    # thread: a thread of a pool would keep the interpreter from exiting.
    threading.Thread(target=retry, name="aiohooks step store", daemon=True).start()
    return asyncio.wrap_future(late_outcome)


class Inotify:
    """An inotify instance. Its `fd` becomes readable when there are events."""

    def __init__(self) -> None:
        """Make an instance without watches.

        Raises:
            StoreUnavailableError: the user has reached the limit of instances.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        _check_result(self.fd, "inotify")
        call_after_fork(self)

    def add(self, path: Path, kinds: int) -> None:
        """Watch a file, or the files in a directory, for events of these kinds.

        Raises:
            StoreUnavailableError: the user has reached the limit of watches.
            OSError: the path cannot be watched.
        """
        watch = self._libc.inotify_add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(kinds))
        _check_result(watch, str(path))

    def add_run(self, path: Path) -> None:
        """Watch the files of the run in the directory `path`, and the directory itself."""
        self.add(path / "notify", MODIFY | _REMOVED)
        self.add(path / "alive", CLOSE_WRITE | _DELETED)
        for watched in (path / "run.db", path / "waiting", path, path.parent):
            self.add(watched, _REMOVED)

    def read_events(self) -> int:
        """Return the kinds of the events since the last call, as combined bits. Do not wait."""
        try:
            data = os.read(self.fd, 8192)  # if there are more, the event loop calls again
        except BlockingIOError:
            return 0
        kinds = 0
        offset = 0
        while offset < len(data):
            _, kind, _, name_size = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + name_size
            kinds |= kind
        return kinds

    def close(self) -> None:
        """Close the instance with all its watches. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # A forked child closes its copy, which would keep the instance alive: it counts towards the
    # limit of the user.
    after_fork = close


def _check_result(result: int, subject: str) -> None:
    """Raise the error of a system call of inotify if its result is -1."""
    if result >= 0:
        return
    number = ctypes.get_errno()
    text = os.strerror(number)
    if number not in (errno.EMFILE, errno.ENOSPC):
        raise OSError(number, text, subject)
    raise StoreUnavailableError(
        f"local:// cannot watch {subject}, as a limit of this user is reached ({text}):"
        " raise fs.inotify.max_user_instances and fs.inotify.max_user_watches, and the number of"
        " files that a process may have open; close other stores, or use redis://"
    )
