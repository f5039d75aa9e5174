"""Copies of checkpoints in a file system of fsspec: made in the background, and read by a restore.

The mirror has a checkpoint if it has the manifest, which is written last and removed first.

mirror    the directory in the other file system, and the checkpoints in it
here      in the directory of the `Saver`, in contrast to the mirror
pending   said of a checkpoint that is being copied to the mirror, or waits for that
sequence  the number of a checkpoint in the order of commits: the newest has the highest
object store   a file system without directories, such as S3: a path is only a name
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import io
import os
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiohooks._core.activity import Awaited, active, awaited_tasks, logger
from aiohooks._core.fork import call_after_fork
from aiohooks._core.waits import Waiters, new_task, retrieve_exception, to_thread, wait_done
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.checkpoint._files import Directory, FileReader, exists
from aiohooks.checkpoint._format import DamagedError, Name, damage_in
from aiohooks.checkpoint.policies import (
    Checkpoint,
    KeepPolicy,
    Mirror,
    MirrorStatus,
    Restored,
    not_kept,
)
from aiohooks.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    missing_extra,
)

try:
    import fsspec as _untyped  # type: ignore[import-untyped]
except ImportError as _missing:
    raise missing_extra("a mirror of checkpoints", "fsspec") from _missing

fsspec: Any = _untyped

T = TypeVar("T")
Download = tuple[Checkpoint, Mapping[str, list[bytes]]]
"""A checkpoint of the mirror that verifies, and the blocks of its files by name."""

_BLOCK_BYTES = 8 << 20
"""How much one call reads or writes."""
_PART_BYTES = 32 << 20
"""The size of the parts in which a file is sent to an object store, which allows 10,000 parts."""


class MirrorError(Exception):
    """A mirror could not be read or written. Private to this module."""


class Copier:
    """Copies checkpoints to a mirror in the background, and back when they are restored.

    While a checkpoint is being copied, only the newest of the submitted ones waits: the others are
    not copied.

    Attributes:
        may_be_newer: whether the mirror may have a newer checkpoint than the directory, so that a
            restore must read it. That is so before the first save or restore: another process may
            have saved while the lock of the directory was free. The `Saver` clears it after a save.
    """

    def __init__(self, mirror: Mirror, keep: KeepPolicy) -> None:
        self.mirror = mirror
        self._keep = keep
        self._status = MirrorStatus(str(mirror))
        self._reset()
        call_after_fork(self)

    def _reset(self) -> None:
        self.may_be_newer = True
        self._remote = RemoteDirectory(self.mirror)
        # At most two checkpoints: the first is being copied, and the second is the newest of those
        # that were submitted since.
        self._pending: list[Checkpoint] = []
        # The task of `_copy_pending`, which ends when nothing is pending.
        self._task: asyncio.Task[None] | None = None
        # How many attempts have failed one after another. It sets the pause before the next.
        self._attempt = 0
        # Waits for the end of a pause between two attempts. `flush` wakes it.
        self._pauses = Waiters()

    # A forked child has neither the threads nor the connections of its parent's uploads, so it
    # begins again. `call_after_fork` calls this method.
    after_fork = _reset

    @property
    def status(self) -> MirrorStatus:
        return dataclasses.replace(self._status, pending=len(self._pending))

    def least_sequence(self) -> int:
        """Return a sequence for the next checkpoint that is later than all in the mirror.

        The mirror may have later checkpoints than the directory, for example if an earlier run had
        another directory. A new checkpoint with a lower sequence would be taken for an older one.
        If the mirror has not been read, this is the Unix time in milliseconds. It is higher than
        what earlier runs can have reached by counting, or by this rule.
        """
        newest = self._remote.newest_sequence
        return int(time.time() * 1000) if newest is None else newest + 1

    # Copying there

    def submit(self, checkpoint: Checkpoint) -> None:
        """Copy a committed checkpoint in the background, unless a newer one is submitted first."""
        # The first pending checkpoint is being copied. At most one other waits, and this one
        # replaces it, unless this one is older. With the same sequence, it has more metrics.
        waiting = self._pending[1:]
        if not waiting or waiting[0].sequence <= checkpoint.sequence:
            self._pending[1:] = [checkpoint]
        if self._task is None or self._task.done():
            self._task = new_task(self._copy_pending(), f"copies to {self.mirror}")

    def _describe(self) -> Awaited:
        return Awaited(
            "mirror",
            f"{self.mirror}, {self._status.error or 'without an error'}",
            ends=False,
        )

    async def _copy_pending(self) -> None:
        """Copy checkpoints until none is pending. A copy that fails is made again."""
        self._attempt = 0
        while self._pending:
            checkpoint = self._pending[0]
            try:
                with active("save", f"mirror {self.mirror}", self._describe):
                    await self._copy(checkpoint)
                self._attempt = 0
            # The error may also be one of this system, such as too many open files or little
            # memory.
            except Exception as error:
                self._note_failure(checkpoint, str(error) or repr(error))
                await self._pauses.wait(self.mirror.backoff.pause_secs(self._attempt))
                # Copy the same checkpoint again, unless a newer one replaces it.
                if len(self._pending) == 1:
                    continue
            del self._pending[0]

    def _note_failure(self, checkpoint: Checkpoint, error: str) -> None:
        """Count a failed attempt. Log the first one since the last success."""
        if self._status.error is None:
            logger.warning(
                "mirror %s: the checkpoint of step %d was not copied (%s); trying again, and"
                " training continues",
                self.mirror,
                checkpoint.step,
                error,
            )
        self._status = dataclasses.replace(
            self._status,
            failures=self._status.failures + 1,
            error=error,
        )
        self._attempt += 1

    async def _copy(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint, and remove the old ones in the mirror.

        An error of the removal is only logged, because the copy itself has succeeded. If the
        checkpoint was removed here meanwhile, nothing is copied.
        """
        names = await self._remote.names()
        with contextlib.ExitStack() as opened:
            try:
                files = await to_thread(_open_files, checkpoint, opened)
            except (FileNotFoundError, DamagedError):
                # If its directory still exists, the checkpoint is damaged. Otherwise the policy or
                # a user has removed it, and there is nothing to copy.
                if await to_thread(exists, os, checkpoint.path):
                    raise
                logger.info("mirror %s: %s is gone, and not copied", self.mirror, checkpoint.path)
                return
            await self._remote.upload(checkpoint, files)
        self._status = dataclasses.replace(self._status, latest_step=checkpoint.step, error=None)
        try:
            await self._remote.remove_old(self._keep, names, checkpoint)
        # The error may also be one of the policy.
        except Exception as error:
            logger.warning(
                "mirror %s: old checkpoints could not be removed (%r); the next copy tries again",
                self.mirror,
                error,
            )

    async def flush(self, secs: float | None) -> bool:
        """Wait until all pending checkpoints have been copied, at most `secs`.

        Return whether they have been copied. If not, a warning lists their steps.
        """
        # End the current pause. The next pauses are short again, as after the first failure.
        self._attempt = 0
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
        """Wait for the pending checkpoints, at most `grace_secs`. Then copy no more."""
        try:
            await self.flush(grace_secs)
        finally:
            # The next use begins again, while the old task may still be ending.
            task = self._task
            self._reset()
            if task is not None and not task.done():
                task.cancel()
                task.add_done_callback(retrieve_exception)
                await wait_done([task], None)

    # Copying back

    async def restore(
        self,
        directory: CheckpointDirectory,
        step: int | None,
    ) -> Restored | None:
        """Restore the newest good checkpoint of both sides, or that of a step. See `Saver.restore`.

        Afterwards, the checkpoint is in the directory. If it is the newest of both sides, it is
        copied to the mirror as well.
        """
        restored = await self._restore_newest(directory, step)
        if restored is not None and step is None:
            self.may_be_newer = False
            # The upload writes nothing if the mirror has it already.
            self.submit(restored.checkpoint)
        return restored

    async def _restore_newest(
        self,
        directory: CheckpointDirectory,
        step: int | None,
    ) -> Restored | None:
        """Restore from the directory, after a download if the mirror has a newer checkpoint.

        The directory is read first. If the mirror has checkpoints that are newer than the newest
        good one here, the first good one of these is downloaded, and the directory is read again.
        Damaged checkpoints of the mirror are no error if there is a good one here.
        """
        restored: Restored | None = None
        failure: CheckpointError | None = None
        # The newest good checkpoint in the directory, or None if there is none.
        newest_here: Name | None = None
        # The checkpoints of the mirror to download from, newest first.
        names: list[Name] = []
        # Both reads add to this list, because the second one no longer finds the checkpoints that
        # the first one has set aside.
        set_aside: list[tuple[str, str]] = []
        try:
            restored = await to_thread(directory.restore, step, set_aside)
        except CheckpointError as error:
            # The mirror may have the checkpoint that is missing or damaged here. Other errors are
            # final.
            if error.errno != errno.ENOENT and not isinstance(error, CorruptCheckpointError):
                raise
            failure = error
        if restored is not None:
            # The mirror has nothing newer. But if a checkpoint was damaged here, the mirror may
            # have a good copy of it.
            if not self.may_be_newer and not set_aside:
                return restored
            newest_here = _format.name_of(restored.checkpoint)
        try:
            names = [
                name
                for name in await self._remote.names()
                if step in (None, name.step) and (newest_here is None or name > newest_here)
            ]
            if names:
                # This frees the memory of the first read for the download.
                restored = None
                # The download is not kept in a variable, so that its memory is free for the second
                # read.
                await to_thread(directory.add_download, *await self._download(names))
        except MirrorError as error:
            if newest_here is None:
                raise CheckpointError(
                    errno.EIO,
                    f"there is no good checkpoint in {directory.path}, and the mirror"
                    f" {self.mirror} could not be read: {error}; try again when it can be, or"
                    " restore without it",
                ) from error
            logger.warning(
                "the mirror %s could not be read (%s): continuing with step %d, the newest here",
                self.mirror,
                error,
                newest_here.step,
            )
        except CorruptCheckpointError:
            # If the directory has checkpoints, the second read returns the newest good one, or
            # raises the error of its damaged ones.
            if newest_here is None and not set_aside:
                raise
        # Also after a failed download, because the first result was dropped for it.
        if names:
            return await to_thread(directory.restore, step, set_aside)
        if failure is not None:
            raise failure
        return restored

    async def _download(self, names: Iterable[Name]) -> Download:
        """Return the first good one of these checkpoints. Skip the damaged ones with a warning.

        Raises:
            MirrorError: the mirror could not be read.
            CorruptCheckpointError: all are damaged.
            CheckpointError: one has a later version of the format.
        """
        # The name and the damage of the first checkpoint, which is the newest.
        newest = ""
        for name in names:
            try:
                return await self._remote.download(name)
            except DamagedError as error:
                newest = newest or f"{name}: {error}"
                logger.warning(
                    "checkpoint %s in the mirror %s was skipped: %s",
                    name,
                    self.mirror,
                    error,
                )
        raise CorruptCheckpointError(
            f"the mirror {self.mirror} has checkpoints and none of them is good, the newest is"
            f" {newest}",
            reason=newest,
        )


def _open_files(
    checkpoint: Checkpoint,
    opened: contextlib.ExitStack,
) -> dict[str, FileReader]:
    """Open the files of a checkpoint. `opened` closes them.

    An open file can be read to its end, even if the checkpoint is removed meanwhile.
    """
    directory = opened.enter_context(Directory(os, checkpoint.path))
    return {
        file: opened.enter_context(directory.opened(file, entry.size))
        for file, entry in checkpoint.files.items()
    }


class RemoteDirectory:
    """A directory of checkpoints in a file system of fsspec, which the first call opens.

    A file system may block indefinitely, and a thread cannot be stopped. So each operation runs in
    a daemon thread of its own, which does not keep the process alive. The operation fails if it
    takes longer than `timeout_secs`, and its thread is left alone. Only checkpoints and their files
    are ever written or removed.
    """

    def __init__(self, mirror: Mirror) -> None:
        # Of a chain of URLs such as "simplecache::s3://", fsspec returns the first protocol.
        protocol = fsspec.utils.get_protocol(mirror.url)
        # This call is for its error.
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise InvalidArgumentError(
                f"the mirror {mirror} has the protocol {protocol!r}, which fsspec does not know;"
                " correct the URL, or register its file system in fsspec first",
            ) from None
        self._mirror = mirror
        self.newest_sequence: int | None = None
        """The highest sequence in the mirror, or None until it has been read."""
        # The file system, and the path of the directory in it, or None while it is not open.
        self._opened: tuple[Any, str] | None = None
        # The checkpoints whose manifest has been read or written, so that it is read only once.
        self._checkpoints: dict[Name, Checkpoint] = {}

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a blocking function in a thread, and return its result.

        Raises:
            MirrorError: the function failed, or took longer than `timeout_secs`.
            MemoryError: there was too little memory, which says nothing about the mirror.
        """
        future = self._start(function, *args)
        if not await wait_done([future], self._mirror.timeout_secs):
            # The connections of the file system may be dead, so the next call opens it again.
            self._opened = None
            raise MirrorError(f"no progress for {self._mirror.timeout_secs} s")
        return future.result()

    def _start(
        self,
        function: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Call a function in a new daemon thread, and return the future of its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        # If the caller was cancelled, nothing else retrieves an exception, and asyncio would log
        # it.
        future.add_done_callback(retrieve_exception)

        def run() -> None:
            finish: Callable[[], None]
            try:
                finish = functools.partial(future.set_result, function(*args))
            except Exception as error:
                # The error of the thread is not raised: the frames in its traceback refer to open
                # files, whose finalizers would block the event loop.
                text = f"{type(error).__name__}: {error}".removesuffix(": ")
                kind = MemoryError if isinstance(error, MemoryError) else MirrorError
                finish = functools.partial(future.set_exception, kind(text))
            # This fails if the event loop was closed: then no one waits for the result.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finish)

        threading.Thread(target=run, name=f"aiohooks: mirror {self._mirror}", daemon=True).start()
        return future

    def _open(self) -> tuple[Any, str]:
        """Return the file system and the path of the directory."""
        if self._opened is None:
            # Not a cached instance of fsspec, which other code may use: its connections must end
            # with this object.
            fs, root = fsspec.core.url_to_fs(
                self._mirror.url,
                skip_instance_cache=True,
                **(self._mirror.storage_options or {}),
            )
            self._opened = fs, str(root).rstrip("/")
        # fsspec caches listings, and other processes may have changed the directory.
        self._opened[0].invalidate_cache()
        return self._opened

    # Reading

    async def names(self) -> list[Name]:
        """Return the checkpoints, newest first, even if their upload has not been finished.

        Raises:
            MirrorError: the directory or the bucket is missing, which says nothing about the
                checkpoints in it; or it cannot be read.
        """
        paths = await self.call(self._list)
        entries = [path.rstrip("/").rpartition("/")[2] for path in paths]
        names = _format.checkpoint_names(entries)
        self.newest_sequence = names[0].sequence if names else 0
        return names

    def _list(self) -> list[str]:
        """Return the paths in the directory. See `names`."""
        fs, root = self._open()
        with contextlib.suppress(FileNotFoundError):
            paths: list[str] = fs.ls(root, detail=False)
            return paths
        if _has_directories(root):
            raise FileNotFoundError(
                f"{root} does not exist, and may not be mounted; mount it, or make it if the"
                " mirror is new",
            )
        # An object store has no empty directories: the mirror has no checkpoints, if the bucket
        # exists. If the user may not ask for the bucket, it exists, too.
        bucket = root.partition("/")[0]
        with contextlib.suppress(PermissionError):
            try:
                fs.info(bucket)
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"the bucket {bucket} does not exist; make it, or correct the URL",
                ) from None
        return []

    async def read_manifest(self, name: Name) -> Checkpoint | None:
        """Return the checkpoint of a name, or None if its upload has not been finished.

        Raises:
            DamagedError: its manifest does not verify.
            CheckpointError: it has a later version of the format.
        """
        data = await self.call(
            self._read_range,
            f"{name}/{_format.MANIFEST}",
            0,
            _format.MAX_MANIFEST_BYTES + 1,
        )
        if data is None:
            return None
        with damage_in(_format.MANIFEST):
            return _format.decode(data, Path(str(name)))

    async def download(self, name: Name) -> Download:
        """Return a checkpoint with the contents of its files, whole in memory.

        Raises:
            DamagedError: it does not verify.
            MirrorError: it could not be read.
            CheckpointError: it has a later version of the format.
        """
        checkpoint = await self.read_manifest(name)
        if checkpoint is None:
            raise DamagedError("its upload was not finished")
        contents: dict[str, list[bytes]] = {}
        for file in checkpoint.files:
            contents[file] = [block async for block in self._verified_blocks(checkpoint, file)]
        return checkpoint, contents

    async def _verified_blocks(
        self,
        checkpoint: Checkpoint,
        file: str,
    ) -> AsyncGenerator[bytes]:
        """Yield the blocks of a file of a checkpoint, and verify them.

        Raises:
            DamagedError: it is missing, or has another size or checksum.
            MirrorError: it could not be read.
        """
        path = f"{checkpoint.path.name}/{file}"
        entry = checkpoint.files[file]
        crc32 = 0
        with damage_in(file):
            # `max` gives an empty file a block as well, because the file may be missing, or longer.
            for start in range(0, max(1, entry.size), _BLOCK_BYTES):
                end = min(start + _BLOCK_BYTES, entry.size)
                is_last = end == entry.size
                # The last block asks for one byte more (`is_last` counts as 1), which the mirror
                # has only if the file is too long.
                block = await self.call(self._read_range, path, start, end + is_last)
                if block is None:
                    raise DamagedError("is missing")
                if len(block) != end - start:
                    raise DamagedError(f"does not have the {entry.size} bytes of the manifest")
                crc32 = await to_thread(zlib.crc32, block, crc32)
                yield block
            if crc32 != entry.crc32:
                raise DamagedError("does not have the checksum in the manifest")

    def _read_range(
        self,
        path: str,
        start: int,
        end: int,
    ) -> bytes | None:
        """Read a part of a file. Return None if the file is missing. This method blocks."""
        fs, root = self._open()
        with contextlib.suppress(FileNotFoundError):
            data: bytes = fs.cat_file(f"{root}/{path}", start=start, end=end)
            return data
        return None

    # Writing

    async def upload(
        self,
        checkpoint: Checkpoint,
        sources: Mapping[str, FileReader],
    ) -> None:
        """Write a checkpoint: its files, and when these verify in the mirror, its manifest.

        If the mirror has the checkpoint, only the manifest is written, and only if its metrics
        differ.

        Raises:
            DamagedError: a file that is read back does not fit the manifest.
            MirrorError: another checkpoint has that name, or the mirror could not be written.
        """
        name = _format.name_of(checkpoint)
        manifest = _format.encode(checkpoint)
        # A checkpoint with a damaged manifest is written again.
        existing: Checkpoint | None = None
        with contextlib.suppress(DamagedError):
            existing = await self.read_manifest(name)
        if existing is None:
            for file, source in sources.items():
                await self._write_file(f"{name}/{file}", source)
            # Read the files back only to verify them. `damage_in` begins the message of an error.
            with damage_in("what was read back of"):
                for file in checkpoint.files:
                    async for _ in self._verified_blocks(checkpoint, file):
                        pass
        elif existing.files != checkpoint.files:
            raise MirrorError(f"another checkpoint has the name {name}: a mirror has one writer")
        if existing is None or _format.encode(existing) != manifest:
            await self._write_file(f"{name}/{_format.MANIFEST}", io.BytesIO(manifest))
            written = await self.read_manifest(name)
            if written is None or _format.encode(written) != manifest:
                raise DamagedError(f"{_format.MANIFEST} is not what was uploaded")
        self._checkpoints[name] = checkpoint

    async def _write_file(
        self,
        path: str,
        source: io.BufferedIOBase,
    ) -> None:
        """Write a file in blocks. Discard it if a block fails."""
        file = await self.call(self._create, path)
        try:
            while block := await to_thread(source.read, _BLOCK_BYTES):
                await self.call(file.write, block)
            await self.call(file.close)
        except BaseException as error:
            # In a thread, which continues if nothing waits for it. After a cancellation (which is
            # no `Exception`), do not wait for a file system that may hang.
            discarding = self._start(_discard, file)
            if isinstance(error, Exception):
                await wait_done([discarding], self._mirror.timeout_secs)
            raise

    def _create(self, path: str) -> Any:
        """Open a new file for writing. Make the directory of its checkpoint, if it is missing."""
        fs, root = self._open()
        open_file = functools.partial(
            fs.open,
            f"{root}/{path}",
            "wb",
            block_size=_PART_BYTES,
        )
        with contextlib.suppress(FileNotFoundError):
            return open_file()
        # So the file system has directories, and that of the checkpoint is missing. (An object
        # store has none, and `mkdir` would make a bucket.) Its parents are not made: if the
        # directory of the mirror is missing, it may not be mounted.
        fs.mkdir(f"{root}/{path.partition('/')[0]}", create_parents=False)
        return open_file()

    # Removing

    async def remove_old(
        self,
        keep: KeepPolicy,
        names: Sequence[Name],
        saved: Checkpoint,
    ) -> None:
        """Remove the checkpoints among `names` that are older than `saved` and not kept.

        Uploads that have not been finished are removed, too. Damaged checkpoints stay.
        """
        saved_name = _format.name_of(saved)
        # The checkpoints with a manifest that verifies, newest first.
        readable: dict[Name, Checkpoint] = {}
        unfinished: list[Name] = []
        for name in sorted({saved_name, *names}, reverse=True):
            with contextlib.suppress(DamagedError):
                checkpoint = self._checkpoints.get(name) or await self.read_manifest(name)
                if checkpoint is None:
                    unfinished.append(name)
                else:
                    readable[name] = checkpoint
        self._checkpoints = readable
        removed = not_kept(keep, list(readable.values()), saved)
        for name in (*unfinished, *map(_format.name_of, removed)):
            if name < saved_name:
                await self.call(self._remove, name)
                readable.pop(name, None)

    def _remove(self, name: Name) -> None:
        """Remove a checkpoint, and no other files in its directory."""
        fs, root = self._open()
        # The manifest is removed first. Without it, the rest is no checkpoint, if this is
        # interrupted.
        for file in (_format.MANIFEST, *_format.FILES):
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{root}/{name}/{file}")
        if _has_directories(root):
            # This fails if there are other files in the directory, which stay.
            with contextlib.suppress(OSError):
                fs.rmdir(f"{root}/{name}")


def _has_directories(root: str) -> bool:
    """Return whether a file system has directories, which may be missing or empty.

    The paths of such a file system begin at a root.
    """
    return root.startswith("/")


def _discard(file: Any) -> None:
    """Close a file whose upload has failed. Without its manifest, the rest is no checkpoint."""
    with contextlib.suppress(Exception):
        if isinstance(file, fsspec.spec.AbstractBufferedFile):
            try:
                file.discard()
            finally:
                # Otherwise the finalizer of the file would upload the rest, in any thread.
                file.closed = True
        else:
            file.close()
