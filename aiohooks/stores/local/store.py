"""A step store in a SQLite database, for the processes of one machine."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from aiohooks._core.cancel import retrieve_exception, to_thread, wait_done
from aiohooks._core.clock import sleep
from aiohooks._core.fork import call_after_fork
from aiohooks._core.validate import check_directory
from aiohooks._core.waits import wait_for_others
from aiohooks.errors import (
    StoreDamagedError,
    StoreUnavailableError,
    UnsupportedSystemError,
)
from aiohooks.stores._protocol import (
    ENGINE_ERRORS,
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
from aiohooks.stores.local._directory import (
    default_directory,
    make_run_directory,
    run_file_name,
)

T = TypeVar("T")
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


# Events of inotify.
MODIFY = 0x2
CLOSE_WRITE = 0x8
_REMOVED = 0x4 | 0x800
"""ATTRIB, as a file that is removed while it is open has one name less, and MOVE_SELF."""
_DELETED = 0x200
OVERFLOW = 0x4000
"""Any number of events was lost, of any kind."""

_EVENT = struct.Struct("iIII")


class LocalEngine(Engine):
    """A run in a directory, for the processes of one machine: a SQLite database.

    There is no server. The kernel (inotify) notifies waiters when their step is reached, and when a
    process that publishes has died; there are no leases, and a process that is merely stopped
    counts as alive. Any process may be killed at any moment. The step outlives them all, until
    `forget`; not every restart of the machine, see `default_directory`.
    """

    remote = False
    connect_timeout: ClassVar[float] = 0.0  # an error of the system is raised immediately

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Open nothing yet.

        Args:
            directory: where the runs are kept, a directory for each; made if it is missing,
                `default_directory()` if left out. It must be on a file system of this machine, and
                no other user may write to a run's directory.

        Raises:
            InvalidArgumentError: `directory` is not a path.
            UnsupportedSystemError: the system is not Linux, or its SQLite is too old.
        """
        _check_system()
        self._base: Path | None = None
        if directory is not None:
            check_directory(directory, "directory", url="the URL is for open_step_store")
            self._base = Path(directory).absolute()
        self._run: RunDatabase | None = None
        self._inotify: Inotify | None = None
        self._subscribed: int | None = None
        self._revision: int | None = None  # that was reported

    def attach(self, link: EngineLink) -> None:
        super().attach(link)
        run_file_name(link.run)  # raises for one that is too long

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return (self._base or default_directory()) / run_file_name(self.link.run)

    # Opening and closing.

    async def connect(self) -> Snapshot:
        await self.disconnect()
        try:
            self._run = run = await to_thread(self._open_files, grace_secs=5.0)
            # Watched first and read second, so that no change is missed.
            self._inotify = Inotify()
            self._inotify.add_run(self.directory)
            snapshot = await submit(partial(run.register, self.link.process))
            self._revision = snapshot.revision
        except SYSTEM_ERRORS as error:
            raise self._explain(error) from error
        if run.is_gone():  # it was deleted meanwhile
            return await self.connect()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inotify.fd, self._on_inotify, run, self._inotify)
        return snapshot

    def _open_files(self) -> RunDatabase:
        make_run_directory(self._base, self.link.run)
        make_files(self.directory)
        return RunDatabase(self.directory)

    async def disconnect(self) -> None:
        run = self._run
        self._run = None
        self._subscribed = None
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None
        if run is None:
            return
        try:
            if not run.is_gone():  # otherwise no other process has these files open
                leaving = submit(run.leave)
                leaving.add_done_callback(retrieve_exception)
                # A stopped process may hold the lock. Then the attempts to leave end when the
                # files are closed, and another process finds that this one has left.
                await wait_done([leaving], 1.0)
        finally:
            run.close()

    async def delete(self) -> None:
        gone = self._gone_error()
        if gone is not None:
            raise gone
        await self.disconnect()
        try:
            await to_thread(delete_run, self.directory)
        except OSError as error:
            raise self._explain(error) from error

    # Requests.

    def advance_nowait(self, by: int, floor: Position, term: int) -> Position | None:
        if self._run is None:
            return None
        try:
            return self._run.advance(by, floor, term)
        except (sqlite3.Error, OSError):
            return None  # `request` waits for the lock, or explains the error

    async def request(self, request: Request) -> Answer:
        answer, snapshot = await self._call(lambda run: run.apply(request))
        self._revision = snapshot.revision
        self.link.observe(snapshot)
        return answer

    async def read(self) -> Snapshot:
        return await self._call(RunDatabase.snapshot)

    async def _call(self, work: Callable[[RunDatabase], T]) -> T:
        """Call `work` with the open run.

        A wait for the lock is one for others, which a stop ends: another process has the lock, and
        is stopped if that lasts.
        """
        if self._run is None:
            raise StoreUnavailableError(f"the files of run {self.link.run!r} are not open")
        answer = submit(partial(work, self._run))
        try:
            if not answer.done():
                await wait_for_others(answer)
            return answer.result()
        except SYSTEM_ERRORS as error:
            raise self._explain(error) from error
        finally:
            answer.cancel()  # a stop has ended the wait

    # Notifications.

    def subscribe(self, step: int | None) -> None:
        run = self._run
        if run is None or step == self._subscribed:
            return
        self._subscribed = step
        try:
            run.write_slot(step)
        except OSError as error:
            self.link.fail(self._explain(error))
        if step is not None:
            self._observe(run)

    def _on_inotify(self, run: RunDatabase, inotify: Inotify) -> None:
        events = inotify.read_events()
        if events & ~(MODIFY | CLOSE_WRITE) and run.is_gone():
            run.close()  # calls fail from now on
        if events & ~CLOSE_WRITE:
            self._observe(run)
        if events & (CLOSE_WRITE | OVERFLOW):
            self.link.spawn(self._report(RunDatabase.remove_dead), "removing the dead")

    def _observe(self, run: RunDatabase) -> None:
        """Report the position, and later the state if it has changed.

        The caller may be about to park a waiter.
        """
        revision = None
        with contextlib.suppress(*SYSTEM_ERRORS):  # `_report` waits, or finds the error as well
            position, revision = run.position()
            self.link.waits.observe(position)
        if revision is None or revision != self._revision:
            self._revision = revision
            self.link.spawn(self._report(RunDatabase.snapshot), "reading the run")

    async def _report(self, read: Callable[[RunDatabase], Snapshot]) -> None:
        """Report the run; after an error that may pass, such as that of a full disk, try again."""
        while self._run is not None:
            try:
                self.link.observe(await self._call(read))
                return
            except ENGINE_ERRORS as error:
                if isinstance(error, StoreDamagedError) or self._gone_error():
                    self.link.fail(error)
                    return
                logger.warning("run %s: the waits continue: %s", self.link.run, error)
            await sleep(1.0, self.link.clock)

    def _gone_error(self) -> EngineError | None:
        """Return the error if the files are no longer those of the run."""
        if self._run is None or not self._run.is_gone():
            return None
        return StoreUnavailableError(
            f"the run {self.link.run!r} was deleted, or its directory {self.directory} was moved:"
            " close this store and make a new one"
        )

    def _explain(self, error: Exception) -> EngineError:
        return self._gone_error() or explain(error, self.directory, self.link.run)


def _check_system() -> None:
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


def _attempt(work: Callable[[], T], outcome: asyncio.Future[T] | Future[T]) -> bool:
    """Call `work` and set its outcome; return False if another process has locked the database."""
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


def submit(work: Callable[[], T]) -> asyncio.Future[T]:
    """Call `work`, immediately or in a thread as soon as the database is not locked.

    Return its result. The thread ends if that is cancelled, or when the database is closed.

    It is a daemon and not one of a pool, whose threads keep the interpreter from exiting: a stopped
    process may have locked the database for as long as it is stopped.
    """
    result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    if _attempt(work, result):
        return result
    outcome: Future[T] = Future()

    def run() -> None:
        pause_secs = 0.0002
        with contextlib.suppress(InvalidStateError):  # it is cancelled just now
            while not (outcome.cancelled() or _attempt(work, outcome)):
                wait([outcome], pause_secs)
                pause_secs = min(2 * pause_secs, 0.01)

    threading.Thread(target=run, name="aiohooks step store", daemon=True).start()
    return asyncio.wrap_future(outcome)


class Inotify:
    """One inotify instance; its `fd` becomes readable when there are events."""

    def __init__(self) -> None:
        """Raise `StoreUnavailableError` where the user has reached the limit of instances."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        _check(self.fd, "inotify")
        call_after_fork(self)

    def add(self, path: Path, kinds: int) -> None:
        """Watch a file, or the files in a directory.

        Raises:
            StoreUnavailableError: the user has reached the limit of watches.
            OSError: the system refuses it.
        """
        watch = self._libc.inotify_add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(kinds))
        _check(watch, str(path))

    def add_run(self, path: Path) -> None:
        """Watch the files of the run in the directory `path`."""
        self.add(path / "notify", MODIFY | _REMOVED)
        self.add(path / "alive", CLOSE_WRITE | _DELETED)
        for watched in (path / "run.db", path / "waiting", path, path.parent):
            self.add(watched, _REMOVED)

    def read_events(self) -> int:
        """Return the kinds of the events since the last call, combined, without waiting."""
        try:
            data = os.read(self.fd, 8192)  # the next iteration of the loop reads the others
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
        """Close it with all its watches; harmless when called twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    after_fork = close  # a child would keep it alive, and it counts towards the user's limit


def _check(result: int, subject: str) -> None:
    """Raise the error of a call of the system."""
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
