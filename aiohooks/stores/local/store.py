"""A step store in files, for the processes of one machine: no server, and nothing that has to be started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
from asyncio import get_running_loop
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import TimerHandle
from aiohooks._aio.opening import wait_for_others
from aiohooks._validate import check_directory
from aiohooks.errors import AiohooksError, StoreClosedError, StoreDamagedError, StoreUnavailableError, copy_error
from aiohooks.stores._protocol import (
    ENGINE_ERRORS,
    Answer,
    EngineError,
    Position,
    Request,
    Snapshot,
    checked_step,
    damaged_error,
    logger,
)
from aiohooks.stores.local._files import RunFiles, RunRecord, default_directory, run_file_name
from aiohooks.stores.local._lock import FileLock, check_system
from aiohooks.stores.local._notify import InotifyWatcher, watch_run
from aiohooks.stores.report import RunReport, report_of
from aiohooks.stores.shared import REFUSED_BACKOFF, OnLost, SharedStepStore

T = TypeVar("T")
_OPEN_SECS = 5.0
_NOT_OUR_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST)
"""Errors of a file in the place of a directory, and the like."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
"""Errors that pass: files that others have open, a disk that is full."""
_CLOSE_SECS = 1.0
"""How long closing waits for the lock, which a stopped process may hold."""
_POLL_SECS = 1.0
"""How often a store without inotify checks whether a process has died."""


class LocalStepStore(SharedStepStore):
    """The step of a run in the files of a directory, which the processes of one machine share; each opens its own store.

    There is no server. The kernel (inotify) notifies waiters when their step is reached, and when a process that publishes has
    died; there are no leases, and a process that is merely stopped counts as alive. Any process may be killed at any moment. The
    step outlives them all, until `forget`; not every restart of the machine, see `default_directory`.

    Where there is no inotify, or the user has reached its limit, a warning says so. Then named pipes notify of steps, and deaths
    are found by polling once a second.
    """

    _leased: ClassVar[bool] = False
    _inotify_class: ClassVar[type[InotifyWatcher]] = InotifyWatcher

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        run: str = "default",
        on_lost: OnLost = "raise",
        lease_secs: float = 10.0,
        join_grace_secs: float = 30.0,
    ) -> None:
        """Open nothing yet.

        Args:
            directory: where the runs are kept, a directory for each; made if it is missing, `default_directory()` if left out.
                It must be on a file system of this machine, and no other user may write to a run's directory.
            run: see `SharedStepStore`; any name is valid, it is quoted for the file system.
            on_lost: see `SharedStepStore`.
            lease_secs: not used, as the kernel reports deaths; accepted so that the same options fit every kind of store.
            join_grace_secs: see `SharedStepStore`.

        Raises:
            InvalidArgumentError: `directory` is not a path, or the name of the run is too long.
            UnsupportedSystemError: the system has no file locks as Unix has them.
        """
        check_system()
        super().__init__(run=run, on_lost=on_lost, lease_secs=lease_secs, join_grace_secs=join_grace_secs)
        if directory is not None:
            check_directory(directory, "directory", url="the URL is for open_step_store")
        self._directory = None if directory is None else Path(directory).absolute()
        run_file_name(self.run)  # raises for one that is too long
        self._files: RunFiles | None = None
        self._lock: FileLock | None = None
        self._inotify: InotifyWatcher | None = None
        self._poll_timer: TimerHandle | None = None
        self._poll_task: asyncio.Task[None] | None = None
        self._ready = False
        self._gone: EngineError | None = None  # why the files that are open are not those of the run any more
        self._retry_timer: TimerHandle | None = None
        self._failed_reads = 0  # in a row
        self._wanted_step: int | None = None  # that the engine should notify of
        self._subscribed_step: int | None = None  # that it notifies of

    @property
    def directory(self) -> Path:
        """The directory of this run."""
        return (default_directory() if self._directory is None else self._directory) / run_file_name(self.run)

    # Opening and closing.

    async def _open(self) -> None:
        snapshot = None
        while snapshot is None:
            await self._disconnect()
            snapshot = await self._open_once()
        self._observe_snapshot(snapshot)
        self._ready = True
        self._subscribe(self._wanted_step)

    async def _open_once(self) -> Snapshot | None:
        """Open the run; return None if it was deleted meanwhile."""
        self._files = files = RunFiles(self._directory, self.run, self._process)
        try:
            await to_thread(files.open, grace_secs=_OPEN_SECS)
            self._lock = FileLock(files.run_fd, self._refresh_nowait)
            # Watched first and read second, so that no change is missed.
            self._inotify = watch_run(files.path, self.run, self._inotify_class)
            snapshot = await self._lock.run(functools.partial(files.register, with_fifo=self._inotify is None))
        except OSError as error:
            raise self._engine_error(error) from error
        loop = get_running_loop()
        if self._inotify is not None:
            loop.add_reader(self._inotify.fd, self._on_inotify)
        if files.fifo is not None:
            loop.add_reader(files.fifo.fd, self._on_fifo)
            self._poll_timer = self._clock.call_later(_POLL_SECS, self._poll)
        return snapshot

    async def _disconnect(self) -> None:
        self._ready = False
        self._subscribed_step = None
        for timer in (self._poll_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._poll_timer = self._retry_timer = None
        files, lock, inotify = self._files, self._lock, self._inotify
        self._files = self._lock = self._inotify = None
        loop = get_running_loop()
        if inotify is not None:
            loop.remove_reader(inotify.fd)
            inotify.close()
        if files is None:
            return
        if files.fifo is not None:
            loop.remove_reader(files.fifo.fd)
        timer = None
        try:
            if lock is not None and files.slot >= 0 and self._gone is None:
                timer = self._clock.call_later(_CLOSE_SECS, functools.partial(lock.close, self._closed_error()))
                with contextlib.suppress(OSError, StoreClosedError, StoreDamagedError):  # other processes find out
                    await lock.run(files.leave)
        finally:
            if timer is not None:
                timer.cancel()
            self._close_files(files, lock)

    def _close_files(self, files: RunFiles, lock: FileLock | None) -> None:
        # A thread that still waits for the lock closes the descriptor when it has it.
        if lock is not None:
            lock.close(self._closed_error())
        elif files.run_fd >= 0:
            os.close(files.run_fd)
        files.close()

    async def _delete_run(self) -> None:
        if self._files is None:  # it could not be opened
            self._files = files = RunFiles(self._directory, self.run, self._process)
            try:
                await to_thread(files.open_directory, grace_secs=_OPEN_SECS)
            except OSError as error:
                raise self._engine_error(error) from error
            self._lock = FileLock(files.run_fd, self._refresh_nowait)
        await self._with_lock(lambda files: files.delete())
        self._gone = self._deleted_error()

    async def _inspect(self) -> RunReport | None:
        files, lock = RunFiles(self._directory, self.run, self._process), None
        try:
            if not await to_thread(files.open_existing, grace_secs=_OPEN_SECS):
                return None
            lock = FileLock(files.run_fd, lambda: None)
            found = await lock.run(files.inspect)
        except OSError as error:
            raise self._engine_error(error) from error
        finally:
            self._close_files(files, lock)
        return None if found is None else report_of(self.run, *found)

    # Requests.

    async def value(self) -> Position:
        """See `StepStore.value`; does not suspend once the store is open."""
        await self._ensure_open()
        if self._files is None or self._gone is not None:
            raise self._unusable_error()
        try:
            self._observe_record(self._files.read())
        except (OSError, StoreDamagedError) as error:
            self._raise_reason(error)
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; suspends only while another process holds the lock."""
        # Once per step of every session, so this is kept fast.
        if type(by) is not int or by < 1:
            by = checked_step(by, "advance by", least=1)
        if self._loop is not get_running_loop() or not self._ready or self._waits.forked:
            await self._ensure_open()
        files, lock, waits = self._files, self._lock, self._waits
        if files is None or lock is None or self._gone is not None:
            raise self._unusable_error()
        try:
            if lock.try_acquire():
                try:
                    position = files.advance(by, waits.latest, self._term)
                finally:
                    lock.release()
            else:
                position = await self._wait_for_lock(lock, functools.partial(files.advance, by, waits.latest, self._term))
        except (OSError, StoreDamagedError) as error:
            self._raise_reason(error)
        if position is None:
            return (await self._write("advance", by)).step  # raises the reason
        waits.observe(position)
        return position.step

    async def _request(self, request: Request) -> Answer:
        answer, snapshot = await self._with_lock(lambda files: files.apply(request))
        if snapshot is not None:
            self._observe_snapshot(snapshot)
        return answer

    async def _read_run(self) -> Snapshot:
        return await self._with_lock(lambda files: files.remove_dead(None))

    async def _with_lock(self, work: Callable[[RunFiles], T]) -> T:
        files, lock = self._files, self._lock
        if files is None or lock is None or self._gone is not None:
            raise self._unusable_error()
        try:
            if lock.try_acquire():
                try:
                    return work(files)
                finally:
                    lock.release()
            return await self._wait_for_lock(lock, functools.partial(work, files))
        except (OSError, StoreDamagedError) as error:
            self._raise_reason(error)

    async def _wait_for_lock(self, lock: FileLock, work: Callable[[], T]) -> T:
        """Call `work` under the lock, which another process has: for as long as it is stopped, if it is."""
        with self._outages.outage():
            return await wait_for_others(lock.run(work))

    def _raise_reason(self, error: OSError | StoreDamagedError) -> NoReturn:
        """Raise what a call raises for this error; damage ends the waits as well."""
        reason = self._engine_error(error) if isinstance(error, OSError) else error
        if isinstance(reason, StoreDamagedError) and (self._waits.waiting or self._vacancies):
            self._fail_waits(reason)
        raise reason from error if reason is not error else error.__cause__

    def _engine_error(self, error: OSError) -> EngineError:
        path = Path(self.directory, str(error.filename or ""))
        if error.errno in _NOT_OUR_FILE and path.resolve().is_relative_to(self.directory.resolve()):
            found, expected = str(error.strerror), "what this version makes"
            delete = f"remove the directory {self.directory}"
            return damaged_error(self.run, str(path), found=found, expected=expected, delete=delete)
        return StoreUnavailableError(f"the files of run {self.run!r} in {self.directory} cannot be used: {error}")

    def _unusable_error(self) -> StoreClosedError | EngineError:
        return self._closed_error() if self._gone is None else copy_error(self._gone)

    def _deleted_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"the run {self.run!r} was deleted, or its directory {self.directory} was moved: close this store and make a new one"
        )

    # Notifications.

    def _subscribe(self, step: int | None) -> None:
        self._wanted_step, files = step, self._files
        if not self._ready or step == self._subscribed_step or files is None or self._gone is not None:
            return
        subscribed, self._subscribed_step = self._subscribed_step, step
        try:
            if step is not None:
                record = files.subscribe(step)
            elif subscribed == 0 or (subscribed is not None and subscribed > self._waits.latest.step):
                files.unsubscribe()
                return
            else:
                return  # the step is reached already, so there are no more notifications of it
        except (OSError, *ENGINE_ERRORS) as error:
            self._fail_waits(error)
            return
        self._observe(record.position)
        if record.revision > self._snapshot.revision:
            # Later: the caller may be about to park a waiter.
            get_running_loop().call_soon(self._read_notified)

    def _on_inotify(self) -> None:
        inotify, files = self._inotify, self._files
        if inotify is None or files is None:
            return
        try:
            events = inotify.read_events()
            if (events.removed or events.moved) and self._is_gone(files):
                return
        except OSError as error:
            self._fail_waits(error)
            return
        if events.notified:
            self._read_notified()
        if events.ended is None or events.ended:
            self._spawn(self._remove_dead(events.ended), "removing dead processes")

    def _on_fifo(self) -> None:
        if self._files is not None and self._files.fifo is not None:
            self._files.fifo.drain()
            self._read_notified()

    def _poll(self) -> None:
        if self._files is not None and self._is_gone(self._files):
            return
        if self._poll_task is None or self._poll_task.done():
            self._poll_task = self._spawn(self._remove_dead(None), "removing dead processes")
        self._poll_timer = self._clock.call_later(_POLL_SECS, self._poll)

    async def _remove_dead(self, slots: set[str] | None) -> None:
        try:
            self._observe_snapshot(await self._with_lock(lambda files: files.remove_dead(slots)))
        except ENGINE_ERRORS as error:
            self._fail_waits(error)

    def _observe_snapshot(self, snapshot: Snapshot) -> None:
        # A snapshot that a thread has read may arrive after a newer one.
        if snapshot.revision < self._snapshot.revision:
            self._observe(snapshot.position)
        else:
            super()._observe_snapshot(snapshot)

    def _on_unreachable(self) -> None:
        # All changes of other processes are in the files, and are read without the lock.
        self._refresh_nowait()
        self._waits.fail_unreachable()

    def _read_notified(self) -> None:
        self._read_nowait(RunFiles.read_notified)

    def _refresh_nowait(self) -> None:
        """Read where the run is; this process is not notified of its own changes."""
        self._read_nowait(RunFiles.read)

    def _read_nowait(self, read: Callable[[RunFiles], RunRecord]) -> None:
        files = self._files
        if files is None or not self._ready or self._gone is not None:
            return
        try:
            self._observe_record(read(files))
        except (OSError, *ENGINE_ERRORS) as error:
            self._fail_waits(error)

    def _observe_record(self, record: RunRecord) -> None:
        if record.revision > self._snapshot.revision and self._files is not None:
            self._observe_snapshot(self._files.load_state(record).snapshot())
        else:
            self._waits.observe(record.position)

    def _is_gone(self, files: RunFiles) -> bool:
        """Return whether the open files are not those of the run any more, after ending all waits if this is new."""
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
            self._fail_waits(gone)
        return gone is not None

    def _read_again(self) -> None:
        self._retry_timer = None
        self._subscribed_step = None
        self._spawn(self._read_all(), "reading the run again")

    async def _read_all(self) -> None:
        """Read everything of which this process may have missed the notification."""
        failed = self._failed_reads
        self._subscribe(self._wanted_step)
        await self._remove_dead(None)
        if failed == self._failed_reads:
            self._failed_reads = 0

    def _fail_waits(self, error: OSError | AiohooksError) -> None:
        """End all waits with `error`, as no notification can be relied on any more; or read again, if it may pass."""
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            if self._retry_timer is None and self._ready:
                self._failed_reads += 1
                log = logger.warning if self._failed_reads == 1 else logger.info
                log("run %s: the waits continue, trying again: %s", self.run, error)
                self._retry_timer = self._clock.call_later(REFUSED_BACKOFF.pause_secs(self._failed_reads), self._read_again)
        elif not self._waits.closed:
            reason = self._engine_error(error) if isinstance(error, OSError) else error
            logger.error("run %s: %s", self.run, reason)
            self._abort_waits(reason)
