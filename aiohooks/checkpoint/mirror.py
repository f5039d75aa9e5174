"""Mirrors: copies of checkpoints in a file system of fsspec, made in the background."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohooks._core.activity import Awaited, active, awaited_tasks
from aiohooks._core.cancel import new_task, retrieve_exception, to_thread, wait_done
from aiohooks._core.fork import call_after_fork
from aiohooks._core.reports import logger
from aiohooks._core.validate import check_instance, check_mapping, check_secs
from aiohooks._core.waiters import Waiters
from aiohooks._core.waits import Backoff
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._files import Directory, FileReader
from aiohooks.checkpoint._format import DamagedError, Manifest, MirrorError, Name
from aiohooks.checkpoint.policies import Checkpoint, KeepPolicy
from aiohooks.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from aiohooks.checkpoint._remote import RemoteDirectory, RemoteFile

Commit = Callable[[Manifest, Mapping[str, Iterable[bytes]]], object]
"""Writes a checkpoint that was made elsewhere; blocks."""


@dataclass(frozen=True, slots=True, repr=False)
class Mirror:
    """Where and how the checkpoints of a `Saver` are mirrored.

    Args:
        url: a directory of any file system that fsspec knows, such as "s3://bucket/run". Only one
            run may write there. The directory must exist, or the bucket of an object store.
        storage_options: arguments of the file system, such as credentials and time limits.
        timeout_secs: an operation of the file system, such as the transfer of 8 MiB, fails if it
            takes longer.
        backoff: the pauses between attempts of an upload, which have no end.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """

    url: str
    storage_options: Mapping[str, Any] | None = None
    timeout_secs: float = 60.0
    backoff: Backoff = Backoff(initial_secs=1.0, max_secs=60.0)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url:
            raise InvalidArgumentError(
                f'the URL of a mirror is {self.url!r}; give a str such as "s3://bucket/run"',
            )
        check_mapping(self.storage_options, "storage_options")
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
        pending: how many are being copied or wait for it.
        failures: how many attempts have failed.
        error: why the last attempt failed; None if it did not.
    """

    url: str
    latest_step: int | None = None
    pending: int = 0
    failures: int = 0
    error: str | None = None

    def __str__(self) -> str:
        parts = [f"mirror {self.url}: latest step {self.latest_step}"]
        if self.pending:
            parts.append(f"{self.pending} pending")
        if self.failures:
            parts.append(f"{self.failures} failures")
        if self.error is not None:
            parts.append(f"failing: {self.error}")
        return ", ".join(parts)


def open_remote(mirror: Mirror) -> RemoteDirectory:
    """Return the directory of a mirror.

    Raises:
        InvalidArgumentError: the protocol is unknown.
        ImportError: the extra or the package of the file system is missing.
    """
    from aiohooks.checkpoint._remote import RemoteDirectory

    return RemoteDirectory(mirror.url, mirror.storage_options or {}, mirror.timeout_secs)


class Copier:
    """Copies checkpoints to a mirror in the background, and back.

    While a checkpoint is copied, the newest of the others waits.
    """

    def __init__(self, mirror: Mirror, keep: KeepPolicy) -> None:
        self.mirror = mirror
        self._keep = keep
        self._status = MirrorStatus(str(mirror))
        self._reset()
        call_after_fork(self)

    def _reset(self) -> None:
        self._remote = open_remote(self.mirror)
        self._newest_there: int | None = None
        """The highest sequence in the mirror; None until it has been read."""
        self._current: Checkpoint | None = None
        self._next: Checkpoint | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempt = 0
        self._pauses = Waiters()

    # A forked child has neither the threads nor the connections of its parent's uploads.
    after_fork = _reset

    @property
    def status(self) -> MirrorStatus:
        return dataclasses.replace(self._status, pending=len(self._pending))

    @property
    def _pending(self) -> list[Checkpoint]:
        """The checkpoints that are not in the mirror yet."""
        return [waiting for waiting in (self._current, self._next) if waiting is not None]

    def least_sequence(self) -> int:
        """Return a sequence that is later than those in the mirror.

        If the mirror has not been read, this is the time in milliseconds: the last run that wrote
        there may have got further than this directory.
        """
        if self._newest_there is None:
            return int(time.time() * 1000)
        return self._newest_there + 1

    async def _names(self) -> list[Name]:
        """Return the checkpoints in the mirror, newest first."""
        names = await self._remote.names()
        if self._newest_there is None:
            self._newest_there = names[0].sequence if names else 0
        return names

    # Copying there

    def submit(self, checkpoint: Checkpoint) -> None:
        """Copy a committed checkpoint in the background, unless a newer one is submitted first."""
        if self._next is None or self._next.sequence <= checkpoint.sequence:
            self._next = checkpoint
        if self._task is None or self._task.done():
            self._task = new_task(self._copy_pending(), f"copies to {self.mirror}")

    def _awaited_copy(self) -> Awaited:
        return Awaited("mirror", str(self._status), ends=False)

    async def _copy_pending(self) -> None:
        self._attempt = 0
        while self._next is not None:
            checkpoint = self._next
            self._next = None
            self._current = checkpoint
            try:
                with active("save", f"mirror {self.mirror}", self._awaited_copy):
                    await self._copy(checkpoint)
                self._attempt = 0
            except (MirrorError, DamagedError, CheckpointError) as error:
                self._note_failure(checkpoint, str(error))
            finally:
                self._current = None
            if self._attempt:
                # `flush` ends the pause.
                await self._pauses.wait(self.mirror.backoff.pause_secs(self._attempt))

    def _note_failure(self, checkpoint: Checkpoint, error: str) -> None:
        if self._status.error is None:
            logger.warning(
                "mirror %s: the checkpoint of step %d was not copied (%s); trying again, and"
                " training continues",
                self.mirror,
                checkpoint.step,
                error,
            )
        failures = self._status.failures + 1
        self._status = dataclasses.replace(self._status, failures=failures, error=error)
        self._attempt += 1
        if self._next is None:
            self._next = checkpoint

    async def _copy(self, checkpoint: Checkpoint) -> None:
        names = await self._names()
        with contextlib.ExitStack() as opened:
            try:
                manifest, contents = await to_thread(_open_checkpoint, checkpoint, opened)
            except (FileNotFoundError, DamagedError):
                if await to_thread(checkpoint.path.exists):
                    raise
                # `keep` or a user has removed it.
                logger.info("mirror %s: %s is gone, and not copied", self.mirror, checkpoint.path)
                return
            await self._remote.upload(manifest, contents)
        if self._status.error is not None:
            logger.info(
                "mirror %s: the checkpoint of step %d was copied; it works again",
                self.mirror,
                checkpoint.step,
            )
        self._status = dataclasses.replace(self._status, latest_step=checkpoint.step, error=None)
        try:
            await self._remote.remove_old(self._keep, names, manifest.name)
        except Exception as error:  # also of the policy
            logger.warning(
                "mirror %s: old checkpoints could not be removed (%r); the next copy tries again",
                self.mirror,
                error,
            )

    async def flush(self, secs: float | None) -> bool:
        """Wait until all pending checkpoints have been copied, at most `secs`.

        Returns:
            Whether they have been copied.
        """
        self._attempt = 0  # the next pauses are short
        self._pauses.wake()
        if self._task is None:
            return True
        with active("wait", f"mirror {self.mirror}", functools.partial(awaited_tasks, self._task)):
            complete = await wait_done([self._task], secs)
        if not complete:
            logger.warning(
                "mirror %s: not copied within %s s: the checkpoints of the steps %s (%s)",
                self.mirror,
                secs,
                ", ".join(str(checkpoint.step) for checkpoint in self._pending),
                self._status.error or "it is slow",
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

    async def download_newer(
        self,
        newest_here: Name | None,
        step: int | None,
        commit: Commit,
    ) -> tuple[bool, list[str]]:
        """Download the newest good checkpoint of the mirror, or of a step, if it is newer.

        Args:
            newest_here: only later ones are newer.
            step: the step, or None for any.
            commit: writes the checkpoint, in a thread.

        Returns:
            Whether there is one; and the damage of those that were skipped.

        Raises:
            MirrorError: the mirror could not be read.
            CheckpointError: the checkpoint could not be written here, or has a later version of the
                format.
        """
        damaged: list[str] = []
        for name in await self._names():
            if newest_here is not None and name <= newest_here:
                break
            if step is not None and step != name.step:
                continue
            try:
                await self._download(name, commit)
            except DamagedError as error:
                damaged.append(f"{name}: {error}")
                message = "checkpoint %s in the mirror %s was skipped: %s"
                logger.warning(message, name, self.mirror, error)
            else:
                return True, damaged
        return False, damaged

    async def _download(self, name: Name, commit: Commit) -> None:
        """Call `commit` in a thread with a checkpoint of the mirror."""
        manifest = await self._remote.read_manifest(name)
        if manifest is None:
            raise DamagedError("its upload was not finished")
        download = _Download()
        contents = {
            file: download.blocks(self._remote.file(manifest, file)) for file in manifest.files
        }
        await to_thread(commit, manifest, contents, on_cancel=download.cancel)


class _Download:
    """Reads files in the event loop for the thread that writes them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reading: concurrent.futures.Future[bytes] | None = None
        self._is_cancelled = False

    def blocks(self, file: RemoteFile) -> Iterator[bytes]:
        """Yield the blocks of a file in the thread. Raises as `RemoteFile.read` does."""
        while True:
            self._reading = asyncio.run_coroutine_threadsafe(file.read(), self._loop)
            if self._is_cancelled:  # perhaps before the assignment
                self._reading.cancel()
            block = self._reading.result()
            if not block:
                return
            yield block

    def cancel(self) -> None:
        """End the thread at its next block."""
        self._is_cancelled = True
        if self._reading is not None:
            self._reading.cancel()


def _open_checkpoint(
    checkpoint: Checkpoint,
    opened: contextlib.ExitStack,
) -> tuple[Manifest, dict[str, FileReader]]:
    """Open a checkpoint, whose files can be read to their end when it is removed meanwhile."""
    directory = opened.enter_context(Directory(os, checkpoint.path))
    manifest = directory.read_manifest(_format.name_of(checkpoint))
    files = {
        file: opened.enter_context(directory.opened(file, entry.size))
        for file, entry in manifest.files.items()
    }
    return manifest, files
