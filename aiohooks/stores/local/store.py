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
from typing import ClassVar, TypeVar

from aiohooks._aio.cancel import to_thread
from aiohooks._aio.clock import TimerHandle
from aiohooks.errors import InvalidArgumentError, StoreClosedError, StoreUnavailableError
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
from aiohooks.stores.local._directory import default_directory as default_directory
from aiohooks.stores.local._directory import run_name
from aiohooks.stores.local._files import Record, RunFiles
from aiohooks.stores.local._lock import Turns
from aiohooks.stores.local._notify import Ears, Inotify, listen
from aiohooks.stores.shared import OnLost, SharedStepStore

T = TypeVar("T")
_OPEN_SECS = 5.0
_FOREIGN = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST)
"""What the system says of a file in the place of a directory, and the like."""
_CLOSE_SECS = 1.0
"""How long closing waits for the lock, which a process that was stopped may have."""
_LOOK_SECS = 1.0
"""How often a store looks by itself that cannot be told by inotify."""


class LocalStepStore(SharedStepStore):
    """The step of a run in the files of a directory, which the processes of one machine share; each opens its own store.

    There is no server. Who waits is told by the kernel (inotify) when its step is reached, and when a process that publishes
    has died; there are no leases, and a process that is merely stopped counts as alive. Any process may be killed at any
    moment. The step outlives them all, until `forget`; not every restart of the machine, see `default_directory`.

    Where there is no inotify, or the user has too many instances of it already, a warning says so. Steps are told by named pipes
    then, and deaths are found by looking once a second.
    """

    _leased: ClassVar[bool] = False

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        run: str = "default",
        on_lost: OnLost = "raise",
        lease_secs: float = 10.0,
        join_grace_secs: float = 30.0,
    ) -> None:
        """Opens nothing yet.

        Args:
            directory: where the runs are kept, a directory for each; it is made if need be. `default_directory()`, if left out.
                It must be on a file system of this machine, and nobody else may write to a run's directory.
            run: see `SharedStepStore`; any name will do, it is quoted for the file system.
            on_lost: see `SharedStepStore`.
            lease_secs: not used here, where the kernel tells of a death; taken, so that options hold for every kind of store.
            join_grace_secs: see `SharedStepStore`.
        """
        super().__init__(run=run, on_lost=on_lost, lease_secs=lease_secs, join_grace_secs=join_grace_secs)
        given: object = directory
        if given is not None and (not isinstance(given, str | os.PathLike) or not os.fspath(given)):
            raise InvalidArgumentError(f"directory={directory!r}: give the path of a directory, or leave it out")
        self._directory = None if directory is None else Path(directory).absolute()
        run_name(self.run)  # refuses one that is too long
        self._files: RunFiles | None = None
        self._turns: Turns | None = None
        self._ears: Ears | None = None
        self._next_look: TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._ready = False
        self._deleted = False
        self._wanted: int | None = None  # the step that the engine should tell of
        self._subscribed: int | None = None  # and the one that it tells of

    @property
    def directory(self) -> Path:
        """Where the files of this run are."""
        return (default_directory() if self._directory is None else self._directory) / run_name(self.run)

    # Opening and closing.

    async def _open(self) -> None:
        snapshot = None
        while snapshot is None:
            await self._disconnect()
            snapshot = await self._open_once()
        self._observe_snapshot(snapshot)
        self._ready = True
        self._subscribe_now()

    async def _open_once(self) -> Snapshot | None:
        self._files = files = RunFiles(self._directory, self.run, self._process)
        try:
            await to_thread(files.open, grace_secs=_OPEN_SECS)
            self._turns = Turns(files.run_fd, self._look_here)
            # Subscribed first, and then read.
            self._ears = listen(files.path, self.run, self._make_inotify)
            snapshot = await self._turns.take(functools.partial(files.enter, by_bell=self._ears is None))
        except OSError as error:
            raise self._unavailable(error) from error
        loop = get_running_loop()
        if self._ears is not None:
            loop.add_reader(self._ears.fd, self._hear)
        if files.bell is not None:
            loop.add_reader(files.bell.fd, self._hear_bell)
            self._look_later()
        return snapshot

    def _make_inotify(self) -> Inotify:
        return Inotify()

    async def _disconnect(self) -> None:
        self._ready = False
        self._subscribed = None
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        files, turns, ears = self._files, self._turns, self._ears
        self._files = self._turns = self._ears = None
        loop = get_running_loop()
        if ears is not None:
            loop.remove_reader(ears.fd)
            ears.close()
        if files is None:
            return
        if files.bell is not None:
            loop.remove_reader(files.bell.fd)
        timer = None
        try:
            if turns is not None and files.slot >= 0 and not self._deleted:
                timer = self._clock.call_later(_CLOSE_SECS, functools.partial(turns.close, self._closed_error()))
                with contextlib.suppress(OSError, StoreClosedError):  # the others find out
                    await turns.take(files.leave)
        finally:
            if timer is not None:
                timer.cancel()
            # The lock may still be waited for by a thread, which closes it then.
            if turns is not None:
                turns.close(self._closed_error())
            elif files.run_fd >= 0:
                os.close(files.run_fd)
            files.close()

    async def forget(self) -> None:
        """See `SharedStepStore.forget`; a store that is still open cannot go on: its waits end with `StoreUnavailableError`."""
        await super().forget()

    async def _delete_run(self) -> None:
        if self._files is None:  # it could not be opened
            self._files = files = RunFiles(self._directory, self.run, self._process)
            try:
                await to_thread(files.find, grace_secs=_OPEN_SECS)
            except OSError as error:
                raise self._unavailable(error) from error
            self._turns = Turns(files.run_fd, self._look_here)
        await self._in_turn(lambda files: files.forget())
        self._deleted = True

    # Asking.

    async def value(self) -> Position:
        """See `StepStore.value`; does not suspend, once the store is open."""
        await self._ensure_open()
        self._news(self._read())
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; suspends only where another process is advancing in this moment."""
        # Once per step of every session: written to be quick.
        if type(by) is not int or by < 1:
            by = checked_step(by, "advance by", least=1)
        if self._loop is not get_running_loop() or not self._ready or self._forked:
            await self._ensure_open()
        files, turns, waits = self._files, self._turns, self._waits
        if files is None or turns is None or self._deleted:
            raise self._deleted_error() if self._deleted else self._closed_error()
        try:
            if turns.enter():
                try:
                    position = files.advance(by, waits.latest, self._term)
                finally:
                    turns.leave()
            else:
                position = await turns.queue(functools.partial(files.advance, by, waits.latest, self._term))
        except OSError as error:
            raise self._unavailable(error) from error
        if position is None:
            return (await self._write("advance", by)).step  # says why not
        waits.observe(position)
        return position.step

    async def _request(self, request: Request) -> Answer:
        answer, snapshot = await self._in_turn(lambda files: files.apply(request))
        if snapshot is not None:
            self._observe_snapshot(snapshot)
        return answer

    async def _read_run(self) -> Snapshot:
        return await self._in_turn(lambda files: files.sweep(None))

    async def _in_turn(self, work: Callable[[RunFiles], T]) -> T:
        if self._files is None or self._turns is None or self._deleted:
            raise self._deleted_error() if self._deleted else self._closed_error()
        try:
            return await self._turns.take(functools.partial(work, self._files))
        except OSError as error:
            raise self._unavailable(error) from error

    def _read(self) -> Record:
        if self._files is None or self._deleted:
            raise self._deleted_error() if self._deleted else self._closed_error()
        try:
            return self._files.read()
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> EngineError:
        path = Path(self.directory, str(error.filename or ""))
        if error.errno in _FOREIGN and path.resolve().is_relative_to(self.directory.resolve()):
            delete = f"remove the directory {self.directory}"
            return damaged_error(
                self.run, str(path), found=str(error.strerror), expected="what this version makes", delete=delete
            )
        return StoreUnavailableError(f"the files of run {self.run!r} in {self.directory} cannot be used: {error}")

    def _deleted_error(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"the run {self.run!r} was deleted ({self.directory}): close this store, and make a new one")

    # Being told.

    def _subscribe(self, step: int | None) -> None:
        self._wanted = step
        if self._ready:
            self._subscribe_now()

    def _subscribe_now(self) -> None:
        """Has the engine tell of the lowest step that somebody waits for."""
        wanted, files = self._wanted, self._files
        if wanted == self._subscribed or files is None or self._deleted:
            return
        armed, self._subscribed = self._subscribed, wanted
        try:
            if wanted is not None:
                record = files.arm(wanted)
            elif armed == 0 or (armed is not None and armed > self._waits.latest.step):
                files.disarm()
                return
            else:
                return  # what it tells of is reached, so it tells of nothing
        except (OSError, *ENGINE_ERRORS) as error:
            self._broken(error)
            return
        self._observe(record.position)
        if record.revision > self._watcher.snapshot.revision:
            # Not at once: this may be in the middle of parking a waiter.
            get_running_loop().call_soon(self._read_news)

    def _hear(self) -> None:
        """Called by the event loop when the kernel has something to tell."""
        ears, files = self._ears, self._files
        if ears is None or files is None:
            return
        try:
            heard = ears.hear()
            if heard.deleted and files.evicted:
                self._was_deleted()
                return
        except OSError as error:
            self._broken(error)
            return
        if heard.news:
            self._read_news()
        if heard.ended is None or heard.ended:
            self._spawn(self._sweep(heard.ended), "looking who has died")

    def _hear_bell(self) -> None:
        if self._files is not None and self._files.bell is not None:
            self._files.bell.read()
            self._read_news()

    def _look_later(self) -> None:
        self._next_look = self._clock.call_later(_LOOK_SECS, self._look_by_itself)

    def _look_by_itself(self) -> None:
        if self._files is not None and self._files.evicted:
            self._was_deleted()
            return
        if self._looking is None or self._looking.done():
            self._looking = self._spawn(self._sweep(None), "looking who has died")
        self._look_later()

    async def _sweep(self, slots: set[str] | None) -> None:
        try:
            self._observe_snapshot(await self._in_turn(lambda files: files.sweep(slots)))
        except ENGINE_ERRORS as error:
            self._broken(error)

    def _observe_snapshot(self, snapshot: Snapshot) -> None:
        # What a thread has read may be told after something newer.
        if self._watcher.has_snapshot and snapshot.revision < self._snapshot.revision:
            self._observe(snapshot.position)
        else:
            super()._observe_snapshot(snapshot)

    def _on_unreachable(self) -> None:
        # All that others have done is in the files: it is read at once, and without waiting for a turn.
        self._look_here()
        self._waits.fail_unreachable()

    def _read_news(self) -> None:
        files = self._files
        if files is None or not self._ready or self._deleted:
            return
        try:
            self._news(files.told())
        except (OSError, *ENGINE_ERRORS) as error:
            self._broken(error)

    def _look_here(self) -> None:
        """Reads where the run is; of what this process itself has done, nobody tells it."""
        if self._ready and not self._deleted:
            try:
                self._news(self._read())
            except ENGINE_ERRORS as error:
                self._broken(error)

    def _news(self, record: Record) -> None:
        if record.revision <= self._watcher.snapshot.revision or self._files is None:
            self._waits.observe(record.position)
            return
        try:
            self._observe_snapshot(self._files.load(record).snapshot())
        except OSError as error:
            raise self._unavailable(error) from error

    def _was_deleted(self) -> None:
        if not self._deleted:
            self._deleted = True
            self._broken(self._deleted_error())

    def _broken(self, error: OSError | EngineError) -> None:
        """Nothing more will be heard: who waits must know."""
        if not self._waits.closed:
            told = self._unavailable(error) if isinstance(error, OSError) else error
            logger.error("run %s: %s", self.run, told)
            self._waits.abort(told)
