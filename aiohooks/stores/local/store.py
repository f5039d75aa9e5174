"""A step store in files, for the processes of one machine: no server, and nothing that has to be
started.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from asyncio import get_running_loop
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import NO_TIMER, TimerHandle
from aiohooks._aio.waits import Backoff
from aiohooks._validate import check_directory
from aiohooks.errors import StoreDamagedError, StoreUnavailableError, copy_error
from aiohooks.stores._protocol import (
    ENGINE_ERRORS,
    Answer,
    EngineError,
    Mark,
    Position,
    Request,
    RunReport,
    Snapshot,
    damaged_error,
    logger,
    report_of,
)
from aiohooks.stores.engine import Engine, EngineLink
from aiohooks.stores.local._files import RunFiles, RunRecord, default_directory, run_file_name
from aiohooks.stores.local._lock import FileLock, check_system
from aiohooks.stores.local._notify import InotifyWatcher
from aiohooks.stores.shared import OnLost, SharedStepStore

T = TypeVar("T")
_OPEN_SECS = 5.0
_NOT_OUR_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST)
"""Errors of a file in the place of a directory, and the like."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""Errors that pass: files that others have open, a disk that is full."""
_PASSING_BACKOFF = Backoff(initial_secs=0.1, max_secs=5.0)
_CLOSE_SECS = 1.0
"""How long closing waits for the lock, which a stopped process may hold."""


class LocalStepStore(SharedStepStore):
    """The step of a run in the files of a directory, which the processes of one machine share; each
    opens its own store.

    There is no server. The kernel (inotify) notifies waiters when their step is reached, and when a
    process that publishes has died; there are no leases, and a process that is merely stopped
    counts as alive. Any process may be killed at any moment. The step outlives them all, until
    `forget`; not every restart of the machine, see `default_directory`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        run: str = "default",
        on_lost: OnLost = "raise",
        join_grace_secs: float = 30.0,
    ) -> None:
        """Open nothing yet.

        Args:
            directory: where the runs are kept, a directory for each; made if it is missing,
                `default_directory()` if left out. It must be on a file system of this machine, and
                no other user may write to a run's directory.
            run: see `SharedStepStore`; any name is valid, it is quoted for the file system.
            on_lost: see `SharedStepStore`.
            join_grace_secs: see `SharedStepStore`.

        Raises:
            InvalidArgumentError: `directory` is not a path, or the name of the run is too long.
            UnsupportedSystemError: the system is not Linux.
        """
        check_system()
        if directory is not None:
            check_directory(directory, "directory", url="the URL is for open_step_store")
        self._local = LocalEngine(directory)
        super().__init__(self._local, run=run, on_lost=on_lost, join_grace_secs=join_grace_secs)

    @property
    def directory(self) -> Path:
        """The directory of this run."""
        return self._local.directory


class LocalEngine(Engine):
    """The files of a run, its lock, and the kernel's notifications."""

    remote: ClassVar[bool] = False

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._base = None if directory is None else Path(directory).absolute()
        self._files: RunFiles | None = None
        self._lock: FileLock | None = None
        self._inotify: InotifyWatcher | None = None
        self._registered = False
        self._gone: EngineError | None = (
            None  # why the files that are open are not those of the run any more
        )
        self._subscribed: int | None = None  # the step of which this process is notified
        self._retry_timer: TimerHandle | None = None
        self._failed_reads = 0  # in a row
        self._seen_revision = 0

    def attach(self, link: EngineLink) -> None:
        super().attach(link)
        run_file_name(link.run)  # raises for one that is too long

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return (default_directory() if self._base is None else self._base) / run_file_name(
            self.link.run
        )

    # Opening and closing.

    async def connect(self, known: Mark) -> Snapshot:
        while True:
            await self.disconnect()
            self._files = files = self._new_files()
            try:
                await to_thread(files.open, grace_secs=_OPEN_SECS)
                self._lock = FileLock(files.run_fd, self._read_record)
                # Watched first and read second, so that no change is missed.
                self._inotify = inotify = InotifyWatcher(files.path)
                snapshot = await self._lock.run(files.register)
            except OSError as error:
                raise self._explain(error) from error
            if snapshot is not None:  # otherwise it was deleted meanwhile
                get_running_loop().add_reader(inotify.fd, self._on_inotify)
                self._registered = True
                return snapshot

    def _new_files(self) -> RunFiles:
        return RunFiles(self._base, self.link.run, self.link.process)

    async def disconnect(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        files, lock, inotify = self._files, self._lock, self._inotify
        self._files = self._lock = self._inotify = self._retry_timer = self._subscribed = None
        self._registered = False
        if inotify is not None:
            get_running_loop().remove_reader(inotify.fd)
            inotify.close()
        if files is None:
            return
        timer = NO_TIMER
        try:
            if lock is not None and files.slot >= 0 and self._gone is None:
                timer = self.link.clock.call_later(
                    _CLOSE_SECS, functools.partial(lock.close, self._closed_error())
                )
                with contextlib.suppress(OSError, *ENGINE_ERRORS):  # other processes find out
                    await lock.run(files.leave)
        finally:
            timer.cancel()
            self._close_files(files, lock)

    def _close_files(self, files: RunFiles, lock: FileLock | None) -> None:
        # A thread that still waits for the lock closes the descriptor when it has it.
        if lock is not None:
            lock.close(self._closed_error())
        elif files.run_fd >= 0:
            os.close(files.run_fd)
        files.close()

    def _closed_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the files of run {self.link.run!r} are not open")

    async def delete(self) -> None:
        if self._files is None:  # it could not be opened
            self._files = files = self._new_files()
            try:
                await to_thread(files.open_directory, grace_secs=_OPEN_SECS)
            except OSError as error:
                raise self._explain(error) from error
            self._lock, self._gone = FileLock(files.run_fd, lambda: None), None
        await self._with_lock(RunFiles.delete)
        self._gone = self._deleted_error()

    async def inspect(self) -> RunReport | None:
        files, lock = self._new_files(), None
        try:
            if not await to_thread(files.open_existing, grace_secs=_OPEN_SECS):
                return None
            lock = FileLock(files.run_fd, lambda: None)
            found = await lock.run(files.inspect)
        except OSError as error:
            raise self._explain(error) from error
        finally:
            self._close_files(files, lock)
        return None if found is None else report_of(self.link.run, *found)

    # Requests.

    def advance_nowait(self, by: int, floor: Position, term: int) -> Position | None:
        files, lock = self._files, self._lock
        if files is None or lock is None or self._gone is not None or not lock.try_acquire():
            return None
        try:
            return files.advance(by, floor, term)
        except OSError as error:
            raise self._explain(error) from error
        finally:
            lock.release()

    async def request(self, request: Request) -> Answer:
        answer, snapshot = await self._with_lock(lambda files: files.apply(request))
        if snapshot is not None:
            self.link.observe(snapshot)
        return answer

    async def read(self) -> Snapshot:
        # Not the dead: the kernel notifies of them. So this needs no lock, which a stopped process
        # may hold.
        files, _ = self._open_files()
        try:
            return files.load_state(files.read()).snapshot()
        except OSError as error:
            raise self._explain(error) from error

    async def _with_lock(self, work: Callable[[RunFiles], T]) -> T:
        files, lock = self._open_files()
        try:
            return await lock.run(functools.partial(work, files), self.link.outage)
        except OSError as error:
            raise self._explain(error) from error

    def _open_files(self) -> tuple[RunFiles, FileLock]:
        if self._gone is not None:
            raise copy_error(self._gone)
        if self._files is None or self._lock is None:
            raise self._closed_error()
        return self._files, self._lock

    def _explain(self, error: OSError) -> EngineError:
        path = Path(self.directory, str(error.filename or ""))
        if error.errno in _NOT_OUR_FILE and path.resolve().is_relative_to(self.directory.resolve()):
            found, expected = str(error.strerror), "what this version makes"
            delete = f"remove the directory {self.directory}"
            return damaged_error(
                self.link.run, str(path), found=found, expected=expected, delete=delete
            )
        return StoreUnavailableError(
            f"the files of run {self.link.run!r} in {self.directory} cannot be used: {error}"
        )

    def _deleted_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the run {self.link.run!r} was deleted, or its directory {self.directory} was moved:"
            " close this store and make a new one"
        )

    # Notifications.

    def subscribe(self, step: int | None) -> None:
        files = self._files
        if (
            not self._registered
            or step == self._subscribed
            or files is None
            or self._gone is not None
        ):
            return
        subscribed, self._subscribed = self._subscribed, step
        try:
            if step is not None:
                record = files.subscribe(step)
            elif subscribed == 0 or (subscribed is not None and subscribed > self.link.latest.step):
                return files.unsubscribe()
            else:
                return  # the step is reached already, so there are no more notifications of it
        except (OSError, *ENGINE_ERRORS) as error:
            return self._report(error)
        self.link.observe(record.position)
        if record.revision > self._seen_revision:
            # Later: the caller may be about to park a waiter.
            get_running_loop().call_soon(self._read_record, RunFiles.read_notified)

    def _on_inotify(self) -> None:
        inotify, files = self._inotify, self._files
        if inotify is None or files is None:
            return
        try:
            events = inotify.read_events()
            if (events.removed or events.moved) and self._is_gone(files):
                return
        except OSError as error:
            self._report(error)
            return
        if events.notified:
            self._read_record(RunFiles.read_notified)
        if events.ended is None or events.ended:
            self.link.spawn(self._remove_dead(events.ended), "removing dead processes")

    def _read_record(self, read: Callable[[RunFiles], RunRecord] = RunFiles.read) -> None:
        """Read where the run is, by default also after a change of this process itself, of which it
        is not notified.
        """
        files = self._files
        if files is None or not self._registered or self._gone is not None:
            return
        try:
            record = read(files)
            if record.revision > self._seen_revision:
                self._seen_revision = record.revision
                self.link.observe(files.load_state(record).snapshot())
            else:
                self.link.observe(record.position)
        except (OSError, *ENGINE_ERRORS) as error:
            self._report(error)

    async def _remove_dead(self, slots: set[str] | None) -> None:
        try:
            self.link.observe(await self._with_lock(lambda files: files.remove_dead(slots)))
        except ENGINE_ERRORS as error:
            self._report(error)

    def _is_gone(self, files: RunFiles) -> bool:
        """Return whether the open files are not those of the run any more, after ending all waits
        if this is new.
        """
        gone: EngineError | None = None
        if files.is_evicted() or files.is_deleted():
            gone = self._deleted_error()
        else:
            try:
                files.check_files()
            except StoreDamagedError as error:
                gone = error
        if gone is not None and self._gone is None:
            self._gone = gone
            self._report(gone)
        return gone is not None

    def _report(self, error: OSError | EngineError) -> None:
        """End all waits with `error`, as no notification can be relied on any more; or read again,
        if it may pass.
        """
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            if self._retry_timer is None and self._registered:
                self._failed_reads += 1
                log = logger.warning if self._failed_reads == 1 else logger.info
                log("run %s: the waits continue, trying again: %s", self.link.run, error)
                pause = _PASSING_BACKOFF.pause_secs(self._failed_reads)
                self._retry_timer = self.link.clock.call_later(pause, self._read_again)
            return
        reason = self._explain(error) if isinstance(error, OSError) else error
        if not isinstance(reason, StoreDamagedError):  # which the store logs
            logger.error("run %s: %s", self.link.run, reason)
        self.link.fail(reason)

    def _read_again(self) -> None:
        self._retry_timer = self._subscribed = None
        self.link.spawn(self._read_all(), "reading the run again")

    async def _read_all(self) -> None:
        """Read everything of which this process may have missed the notification."""
        failed = self._failed_reads
        self.subscribe(self.link.threshold)
        await self._remove_dead(None)
        if failed == self._failed_reads:
            self._failed_reads = 0
