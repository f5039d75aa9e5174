"""Mirrors: each committed checkpoint is copied to a file system of fsspec in the background, and
back if it is missing here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import re
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from aiohooks._core.activity import Awaited, active, awaited_tasks
from aiohooks._core.cancel import new_task, retrieve_exception, to_thread, wait_done
from aiohooks._core.clock import sleep
from aiohooks._core.fork import call_after_fork
from aiohooks._core.reports import logger
from aiohooks._core.validate import check_instance, check_mapping, check_secs, checked_int
from aiohooks._core.waiters import Waiters
from aiohooks._core.waits import Backoff
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._files import Files
from aiohooks.checkpoint._format import DamagedError, Manifest, Name, NewerVersionError
from aiohooks.checkpoint.policies import Checkpoint, KeepPolicy
from aiohooks.errors import InvalidArgumentError

if TYPE_CHECKING:
    from aiohooks.checkpoint._remote import Alive, RemoteDirectory

T = TypeVar("T")

_READ_ATTEMPTS = 3
"""How often a restore tries to read the mirror."""
_PIECES_AHEAD = 2
"""How many pieces of a download may wait to be written."""
_UNSEEN = 1_000_000
"""How many checkpoints a mirror that could not be read may have that are not here."""


@dataclass(frozen=True, slots=True, repr=False)
class Mirror:
    """Where and how the checkpoints of a `Saver` are mirrored.

    Args:
        url: a directory of any file system that fsspec knows, such as "s3://bucket/run". Only one
            run may write there.
        storage_options: arguments of the file system, such as credentials and time limits.
        max_pending: how many checkpoints may wait for their upload; a newer one replaces the oldest
            that has not begun. The newest one always waits until it has been copied.
        read_back: whether to read each file back after its upload and to verify its checksum.
            Otherwise only its size is compared; the manifest is read back in any case.
        timeout_secs: an upload or download without any progress for so long has failed.
        backoff: the pauses between attempts of an upload, which have no end, and of reading in a
            restore, which are three.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """

    url: str
    storage_options: Mapping[str, Any] | None = None
    max_pending: int = 1
    read_back: bool = True
    timeout_secs: float = 60.0
    backoff: Backoff = Backoff(initial_secs=1.0, max_secs=60.0)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url:
            raise InvalidArgumentError(
                f'the URL of a mirror is {self.url!r}; give a str such as "s3://bucket/run"'
            )
        check_mapping(self.storage_options, "storage_options")
        object.__setattr__(self, "max_pending", checked_int(self.max_pending, "max_pending", 1))
        check_secs(self.timeout_secs, "timeout_secs", positive=True)
        check_instance(self.backoff, Backoff, "backoff")

    def __repr__(self) -> str:
        return f"Mirror({str(self)!r})"

    def __str__(self) -> str:
        """Return the URL without user and password."""
        return re.sub(r"(?<=://)[^/]*@", "", self.url)


@dataclass(frozen=True, slots=True)
class MirrorStatus:
    """What a `Saver` has copied to its mirror.

    Attributes:
        url: the mirror, without user and password.
        latest_step: the step of the checkpoint that was copied last, or found to be there; None
            before the first.
        copied: how many checkpoints have been copied.
        pending: how many are being copied or wait for it.
        replaced: how many were not copied, because newer ones replaced them while the mirror was
            slow or away.
        failures: how many attempts have failed.
        error: why the last attempt failed; None if it did not.
    """

    url: str
    latest_step: int | None = None
    copied: int = 0
    pending: int = 0
    replaced: int = 0
    failures: int = 0
    error: str | None = None

    def __str__(self) -> str:
        parts = [f"mirror {self.url}: {self.copied} copied"]
        if self.latest_step is not None:
            parts.append(f"latest step {self.latest_step}")
        for number, what in (
            (self.pending, "pending"),
            (self.replaced, "replaced by newer ones"),
            (self.failures, "failures"),
        ):
            if number:
                parts.append(f"{number} {what}")
        if self.error is not None:
            parts.append(f"failing: {self.error}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that waits for its upload."""

    checkpoint: Checkpoint
    is_new: bool
    """Whether it was saved or changed, and not restored: it is copied also if there are newer
    ones.
    """


class MirrorError(Exception):
    """The mirror could not be read or written. Private to this package."""


class _MirrorStalledError(MirrorError):
    """A call made no progress for `timeout_secs`."""


class _LeftBehindError(Exception):
    """Ends the thread of a call that its caller no longer waits for."""


class Copier:
    """Copies checkpoints to a mirror and back.

    A file system may block indefinitely, and a thread cannot be stopped. So each call runs in a
    daemon thread that does not keep the process alive. If it makes no progress, it is left behind;
    it ends at its next operation.
    """

    def __init__(self, mirror: Mirror, keep: KeepPolicy, check_place: Callable[[], None]) -> None:
        from aiohooks.checkpoint import _remote

        _remote.check_url(mirror.url)
        self.mirror = mirror
        self._keep = keep
        self._check_place = check_place
        options = mirror.storage_options or {}
        self._make_remote = functools.partial(
            _remote.RemoteDirectory, mirror.url, options, read_back=mirror.read_back
        )
        self._reset()
        self._copied = self._replaced = self._failures = 0
        self._error: str | None = None
        self._latest_step: int | None = None
        call_after_fork(self)

    def _reset(self) -> None:
        self._remote: RemoteDirectory = self._make_remote()
        self._newest_there: int | None = None
        """The highest sequence in the mirror; None until that has been read."""
        self._is_away = False
        """Whether the last restore could not read the mirror, or has missed its directory, which
        then is not made either.
        """
        self._saves_unseen = False
        """Whether the sequence of the save that has begun is chosen without knowing those in the
        mirror.
        """
        self._unseen: set[int] = set()
        """The sequences that were chosen so."""
        self._shift = 0
        """What makes them later than all that were in the mirror."""
        self._pending: deque[_Pending] = deque()
        self._current: _Pending | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempt = 0
        self._pauses = Waiters()

    # forgets the parent's uploads in a child, which has neither its threads nor its connections
    after_fork = _reset

    @property
    def status(self) -> MirrorStatus:
        return MirrorStatus(
            url=str(self.mirror),
            latest_step=self._latest_step,
            copied=self._copied,
            pending=len(self._waiting),
            replaced=self._replaced,
            failures=self._failures,
            error=self._error,
        )

    def begin_save(self) -> tuple[int, int]:
        """Return the least sequence of the checkpoint that is to be saved, and how far it has to be
        after the one before.

        Sequences follow from what was seen. If the mirror could not be read, the first one leaves
        room for what may be there; if it has more, all that were chosen so get a higher one there
        (`_name_there`).
        """
        self._saves_unseen = self._newest_there is None
        if self._newest_there is not None:
            return self._newest_there + 1, 1
        return 0, _UNSEEN if self._is_away and not self._unseen else 1

    # Copying there

    def submit(
        self, checkpoint: Checkpoint, *, is_new: bool = True, is_saved: bool = False
    ) -> None:
        """Copy a committed checkpoint in the background; one that `is_saved` has its sequence since
        the last `begin_save`.
        """
        pending = _Pending(checkpoint, is_new)
        if is_saved and self._saves_unseen:
            if not self._unseen:
                self._shift = max(0, (self._newest_there or 0) + 1 - checkpoint.sequence)
            self._unseen.add(checkpoint.sequence)
        self._pending.append(pending)
        if self._newest_there is not None:
            self._newest_there = max(self._newest_there, self._name_there(pending).sequence)
        self._drop_replaced()
        if self._task is None or self._task.done():
            self._task = new_task(self._copy_pending(), f"copies to {self.mirror}")

    def _name_there(self, pending: _Pending) -> Name:
        """Return the name of a checkpoint in the mirror."""
        sequence = pending.checkpoint.sequence
        return Name(
            sequence + self._shift if sequence in self._unseen else sequence,
            pending.checkpoint.step,
        )

    async def _look(self, *, missing_ok: bool) -> list[Name]:
        """Return the names in the mirror, newest first, and learn the highest sequence."""
        remote = self._remote
        names = await self._in_thread(lambda alive: remote.names(alive, missing_ok=missing_ok))
        newest = names[0].sequence if names else 0
        if self._newest_there is None and (remote.is_there or self._current is not None):
            self._shift = max(0, newest + 1 - min(self._unseen, default=newest + 1))
            self._newest_there = max(
                newest, *(self._name_there(each).sequence for each in self._waiting), 0
            )
        return names

    @property
    def _waiting(self) -> list[_Pending]:
        """All that are not in the mirror yet, also the one that is being copied."""
        return [*(() if self._current is None else (self._current,)), *self._pending]

    def _drop_replaced(self) -> None:
        while len(self._pending) > self.mirror.max_pending:
            self._pending.popleft()
            self._replaced += 1

    def _awaited_copy(self) -> Awaited:
        return Awaited("mirror", f"mirror {self.mirror}", str(self._error or ""), ends=False)

    async def _copy_pending(self) -> None:
        self._attempt = 0
        while self._pending:
            pending = self._current = self._pending.popleft()
            try:
                with active("save", f"mirror {self.mirror}", self._awaited_copy):
                    await self._copy(pending)
            except (MirrorError, DamagedError) as error:
                self._attempt += 1
                self._failures += 1
                if self._error is None:
                    logger.warning(
                        "mirror %s: the checkpoint of step %d was not copied (%s); trying again,"
                        " and training continues",
                        *(self.mirror, pending.checkpoint.step, error),
                    )
                self._error = str(error)
                self._pending.appendleft(pending)
                self._drop_replaced()
            else:
                self._attempt = 0
            finally:
                self._current = None
            if self._attempt:
                await self._pauses.wait(
                    self.mirror.backoff.pause_secs(self._attempt)
                )  # which `flush` ends

    async def _copy(self, pending: _Pending) -> None:
        if self._newest_there is None:
            await self._look(missing_ok=not self._is_away)
        remote, keep, checkpoint, name = (
            self._remote,
            self._keep,
            pending.checkpoint,
            self._name_there(pending),
        )
        may_make = not self._is_away

        def upload(alive: Alive) -> bool | None:
            with contextlib.ExitStack() as opened:
                try:
                    manifest, contents = _open_checkpoint(checkpoint, opened)
                except (FileNotFoundError, DamagedError):
                    self._check_place()
                    if checkpoint.path.exists():
                        raise
                    return None  # `keep` or a user has removed it
                manifest = dataclasses.replace(manifest, name=name)
                return remote.upload(
                    manifest, contents, alive, is_new=pending.is_new, may_make=may_make
                )

        written = await self._in_thread(upload)
        if written is None:
            self._replaced += 1
            return
        if self._error is not None:
            logger.info(
                "mirror %s: the checkpoint of step %d was copied; it works again",
                self.mirror,
                checkpoint.step,
            )
        self._copied, self._latest_step, self._error = self._copied + written, checkpoint.step, None
        if not written:
            return
        try:
            await self._in_thread(lambda alive: remote.remove_old(keep, name, alive))
        except MirrorError as error:
            logger.warning(
                "mirror %s: old checkpoints could not be removed (%s); the next copy tries again",
                self.mirror,
                error,
            )

    async def flush(self, secs: float | None) -> bool:
        """Wait until all pending checkpoints have been copied, at most `secs`; return whether they
        have.
        """
        self._attempt = 0  # the pauses that follow are short again
        self._pauses.wake()
        if self._task is None:
            return True
        if len(self._pending) > 1:
            self._pending.rotate(1)  # the newest first: there may be no time for the others
        with active("wait", f"mirror {self.mirror}", functools.partial(awaited_tasks, self._task)):
            complete = await wait_done([self._task], secs)
        if not complete:
            steps = ", ".join(str(each.checkpoint.step) for each in self._waiting)
            logger.warning(
                "mirror %s: not copied within %s s: the checkpoints of the steps %s (%s)",
                *(self.mirror, secs, steps, self._error or "it is slow"),
            )
        return complete

    async def aclose(self, grace_secs: float) -> None:
        """Wait for the pending checkpoints, at most `grace_secs`, and give up the others."""
        try:
            await self.flush(grace_secs)
        finally:
            task = self._task
            self._reset()
            if task is not None and not task.done():
                task.cancel()
                task.add_done_callback(retrieve_exception)
                await wait_done([task], None)

    # Copying back

    async def names(self, *, missing_ok: bool) -> list[Name]:
        """Return the names in the mirror, newest first; with `missing_ok` a directory that has
        never been there is empty.

        Raises:
            MirrorError: it could not be read, or its directory or bucket is missing.
        """
        self._is_away = True
        names = await self._with_retries(lambda: self._look(missing_ok=missing_ok))
        self._is_away = False
        return names

    async def download(
        self, name: Name, commit: Callable[[Manifest, Mapping[str, Iterable[bytes]]], object]
    ) -> str | None:
        """Call `commit` in a thread with a checkpoint of the mirror; return its damage, or None.

        Raises:
            MirrorError: it could not be read.
            CheckpointError: it could not be written here, or has a later version of the format.
        """
        try:
            return await self._with_retries(lambda: self._download(name, commit))
        except DamagedError as error:
            return str(error)
        except NewerVersionError as error:
            raise error.of(f"{self.mirror}/{name}") from None

    async def _download(
        self, name: Name, commit: Callable[[Manifest, Mapping[str, Iterable[bytes]]], object]
    ) -> str | None:
        manifest = await self._in_thread(lambda alive: self._remote.read_manifest(name, alive))
        if manifest is None:
            return "its upload was not finished"
        pipe = _Pipe()
        reading = asyncio.get_running_loop().create_task(
            self._in_thread(lambda alive: _read(self._remote, manifest, pipe, alive)),
            name=f"download of {name}",
        )
        reading.add_done_callback(pipe.end)
        try:
            contents = {file: pipe.file() for file in manifest.files}
            await to_thread(commit, manifest, contents, on_cancel=reading.cancel)
        finally:
            pipe.close()
            reading.cancel()
            await wait_done([reading], None)
        return None

    async def _with_retries(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(1, _READ_ATTEMPTS):
            try:
                return await call()
            except _MirrorStalledError:
                raise
            except MirrorError as error:
                logger.info("mirror %s: attempt %d failed (%s)", self.mirror, attempt, error)
                await sleep(self.mirror.backoff.pause_secs(attempt))
        return await call()

    async def _in_thread(self, fn: Callable[[Alive], T]) -> T:
        """Call a blocking function in a daemon thread.

        Raises:
            MirrorError: the call failed, or made no progress for `timeout_secs`.
            DamagedError: as the function raised it, like `NewerVersionError`.
        """
        secs, loop = self.mirror.timeout_secs, asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(retrieve_exception)  # its caller may have been cancelled
        progress, is_left_behind = 0, False

        def alive() -> None:
            nonlocal progress
            progress += 1
            if is_left_behind:
                raise _LeftBehindError

        def set_outcome(result: Any, error: Exception | None) -> None:
            if not is_left_behind:
                future.set_result(result) if error is None else future.set_exception(error)

        def run() -> None:
            # No error with its traceback: the frames refer to open files, whose finalisers would
            # block the event loop.
            error: Exception | None = None
            result: Any = None
            try:
                result = fn(alive)
            except (DamagedError, NewerVersionError) as raised:
                error = type(raised)(*raised.args)
            except Exception as raised:
                error = MirrorError(
                    f"{type(raised).__name__}: {raised}" if str(raised) else type(raised).__name__
                )
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(set_outcome, result, error)

        threading.Thread(target=run, name=f"aiohooks: mirror {self.mirror}", daemon=True).start()
        try:
            while not future.done():
                seen = progress
                if not await wait_done([future], secs) and progress == seen:
                    self._remote = self._make_remote()  # the connections of the old one may be dead
                    raise _MirrorStalledError(f"no progress for {secs} s")
        finally:
            is_left_behind = True
        return future.result()


class _Pipe:
    """The files of a checkpoint on their way from the thread that reads the mirror to the one that
    writes them here.
    """

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_PIECES_AHEAD)
        self._closed = False

    def put(self, piece: bytes | None, alive: Alive) -> None:
        """Put a piece, or None at the end of a file; wait while the writer is behind."""
        while not self._closed and not self._room.acquire(timeout=1.0):
            alive()  # a slow disk here is no stall of the mirror
        if self._closed:
            raise _LeftBehindError
        self._pieces.put(piece)

    def file(self) -> Iterator[bytes]:
        """Iterate over the next file; raise the error of the reader."""
        while (piece := self._pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            self._room.release()
            yield piece
        self._room.release()

    def end(self, reading: asyncio.Task[None]) -> None:
        """End the writer, too, if the reader has failed."""
        if reading.cancelled():
            self._pieces.put(MirrorError("the download was cancelled"))
        elif (error := reading.exception()) is not None:
            self._pieces.put(error)

    def close(self) -> None:
        """End the reader."""
        self._closed = True
        self._room.release()


def _open_checkpoint(
    checkpoint: Checkpoint, opened: contextlib.ExitStack
) -> tuple[Manifest, dict[str, Iterable[bytes]]]:
    """Open a checkpoint, whose files can be read to their end when it is removed here meanwhile."""
    files = Files()
    parent = opened.enter_context(files.directory(checkpoint.path.parent))
    fd = opened.enter_context(files.directory(checkpoint.path.name, dir_fd=parent))
    data = files.read(_format.MANIFEST, dir_fd=fd, max_size=_format.MAX_MANIFEST_BYTES)
    manifest = _format.decode(data, Name(checkpoint.sequence, checkpoint.step))
    contents: dict[str, Iterable[bytes]] = {
        file: opened.enter_context(files.opened(file, dir_fd=fd, size=entry.size)).pieces()
        for file, entry in manifest.files.items()
    }
    return manifest, contents


def _read(remote: RemoteDirectory, manifest: Manifest, pipe: _Pipe, alive: Alive) -> None:
    for file, entry in manifest.files.items():
        for piece in remote.read_file(manifest.name, file, entry, alive):
            pipe.put(piece, alive)
        pipe.put(None, alive)
