"""Saving and restoring: `Saver` for coroutines, over the blocking `CheckpointDirectory`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import importlib
import operator
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, SupportsFloat, TypeVar

from aiohooks._core.activity import Awaited, active
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks._core.fork import call_after_fork
from aiohooks._core.reports import logger
from aiohooks._core.validate import check_checkpoint_dir, check_instance, check_secs, checked_int
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._files import DirectoryLock, FileReader, Files, check_system
from aiohooks.checkpoint._format import (
    DamagedError,
    Manifest,
    MirrorError,
    Name,
    NewerVersionError,
    damage_in,
)
from aiohooks.checkpoint.mirror import Copier, Mirror, MirrorStatus
from aiohooks.checkpoint.policies import Checkpoint, KeepNewest, KeepPolicy, not_kept
from aiohooks.checkpoint.stateful import Stateful, torch_support
from aiohooks.errors import CheckpointError, CorruptCheckpointError, InvalidArgumentError

T = TypeVar("T")

# How often a reader without the lock starts again because a writer removed what it was reading.
_MAX_READ_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `Saver.restore`."""

    checkpoint: Checkpoint
    """The checkpoint that was read."""
    state: dict[str, Any]
    """The saved state, equal to the last bit."""
    set_aside: tuple[tuple[str, str], ...] = ()
    """Name and reason of each damaged checkpoint that was skipped, newest first."""


class Saver:
    """Saves states to a directory and restores them.

    The first `save` or `restore` makes the directory if it is missing, and locks it: a directory
    has one writer. `aclose`, the end of `async with` and the end of the process release the lock;
    the Saver can be used again after `aclose`. Everything that blocks runs in a worker thread. A
    call that is cancelled waits for its thread, so a cancelled `save` is completed or has no
    effect. Concurrent calls run one after the other.
    """

    _fs: ClassVar[Any] = os
    """Does all file operations; tests replace it in a subclass."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        keep: KeepPolicy = KeepNewest(5),
        read_only: bool = False,
        mirror: str | Mirror | None = None,
    ) -> None:
        """Check the arguments; no file is touched yet.

        Args:
            checkpoint_dir: the directory; made with mode 0700 when it is first needed.
            keep: which checkpoints to keep after a save, such as `KeepNewest(3) | KeepBest(2,
                "loss")`.
            read_only: read beside a writer: take no lock, set nothing aside, refuse to save.
            mirror: a URL such as "s3://bucket/run", or a `Mirror` with options: each checkpoint is
                copied there in the background, and a restore takes the newest that verifies, here
                or there.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: an extra is missing; install `aiohooks[checkpoint]`, and for a mirror
                `aiohooks[fsspec]` and the package of its file system.
        """
        # A missing package is found here, not at the first save.
        importlib.import_module("aiohooks.checkpoint._encoding")
        check_checkpoint_dir(checkpoint_dir)
        if not isinstance(keep, KeepPolicy):
            example = "KeepNewest(5) or KeepNewest(5) | KeepEvery(1000)"
            raise InvalidArgumentError(
                f"keep is {keep!r}; give a policy of aiohooks.checkpoint, such as {example}",
            )
        self.checkpoint_dir: Path = Path(os.path.abspath(checkpoint_dir))
        """The directory, as an absolute path."""
        self.read_only: bool = bool(read_only)
        """Whether it only reads."""
        self._directory = CheckpointDirectory(
            self.checkpoint_dir,
            keep=keep,
            read_only=self.read_only,
            fs=self._fs,
        )
        if isinstance(mirror, str):
            mirror = Mirror(mirror)
        check_instance(mirror, Mirror, "mirror", optional=True)
        if mirror is not None and read_only:
            raise InvalidArgumentError(
                "read_only=True and a mirror exclude each other: a restore copies from the mirror",
            )
        self._copier = None if mirror is None else Copier(mirror, keep)
        self._is_newest_here = False
        """Whether what is here needs no comparison with the mirror: this Saver has restored or
        saved since it took the lock.
        """
        # In the order of the calls: threads get a mutex in any order, and a restore must not
        # overtake a save.
        self._order = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Saver({str(self.checkpoint_dir)!r})"

    @contextlib.asynccontextmanager
    async def _in_order(self, method: str, step: int | None) -> AsyncGenerator[None]:
        """Wait for the calls before this one, and be the current call in the block."""
        what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        name = f"{method} of {what} in {self.checkpoint_dir}"
        description = Awaited("checkpoint", name, ends=False)
        with active("save", name, lambda: description):
            async with self._order:
                yield

    async def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> Checkpoint:
        """Save a state. It is durable when this returns: a kill or a power cut does not undo it.

        Arrays and tensors are written from their own memory, so nothing in `state` may be changed
        before this returns. Checkpoints that `keep` does not keep are removed afterwards; if that
        fails, a warning is logged and the next save tries again.

        Args:
            state: a mapping of None, bool, int, float, complex, str, bytes, list, tuple, dict
                (keys: str or int), Counter, numpy arrays and scalars, and tensors of PyTorch,
                nested to any depth up to 64. They come back equal to the last bit; an OrderedDict
                comes back as a dict, unless it is the state of a module; see docs/guides/pytorch.md
                for tensors.
            step: the global step of the state. An existing checkpoint of the same step is removed
                once the new one is durable.
            metrics: numbers by name, for `KeepBest` and for readers of the checkpoint.

        Raises:
            CheckpointError: the system refused an operation. Nothing of this checkpoint is left;
                earlier ones are unchanged.
            CheckpointBusyError: another writer has the directory.
            InvalidArgumentError: something in `state` has no exact form on disk; the message names
                its place.
        """
        step = _checked_step(step)
        checked = _format.check_metrics(metrics)
        copier = self._copier
        async with self._in_order("save", step):
            least_sequence = 0 if copier is None else copier.least_sequence()
            saved = await to_thread(self._directory.save, state, step, checked, least_sequence)
            self._is_newest_here = True
            if copier is not None:
                copier.submit(saved)
            return saved

    async def add_metrics(
        self,
        step: int,
        metrics: Mapping[str, SupportsFloat],
    ) -> Checkpoint | None:
        """Add metrics to the newest checkpoint of a step, such as those of a late evaluation.

        Checkpoints that `keep` does not keep with them are removed.

        Returns:
            The checkpoint; None if there is none of that step.

        Raises:
            CheckpointError: the system refused an operation, and the checkpoint is unchanged.
            InvalidArgumentError: the metrics are not numbers by name.
        """
        step = _checked_step(step)
        checked = _format.check_metrics(metrics)
        async with self._in_order("add_metrics", step):
            changed = await to_thread(self._directory.add_metrics, step, checked)
            if changed is not None and self._copier is not None:
                self._copier.submit(changed)
            return changed

    async def restore(
        self,
        step: int | None = None,
        *,
        missing_ok: bool = False,
    ) -> Restored | None:
        """Read the newest checkpoint that verifies, or that of one step.

        Return None if the directory has never had one. Damaged checkpoints are skipped with a
        warning and set aside: renamed to `damaged-...`, never removed. The newest checkpoint is the
        one saved last, whatever its step. The arrays belong to the caller and are writable. If
        there is a newer one in the mirror that verifies, it is downloaded to the directory first.

        Args:
            step: the global step of the checkpoint; None for the newest.
            missing_ok: whether a checkpoint directory that does not exist counts as empty, as in a
                session. Otherwise it is an error, as its name may be wrong. A missing directory or
                bucket of a mirror is an error in any case, as it may not be mounted.

        Raises:
            CorruptCheckpointError: there are checkpoints, or some that were set aside before, and
                none verifies.
            CheckpointError: there is none of that step, or no directory, or the system refused an
                operation; or there is none here, and the mirror cannot be read.
            CheckpointBusyError: another writer has the directory; `read_only=True` reads beside it.
        """
        wanted = None if step is None else _checked_step(step)
        async with self._in_order("restore", wanted):
            if self._copier is None:
                return await to_thread(self._directory.restore, wanted, missing_ok)
            restored = await self._restore_newest(self._copier, wanted)
            if restored is not None and wanted is None:
                self._is_newest_here = True
                self._copier.submit(restored.checkpoint)  # does nothing if it is there
            return restored

    async def _restore_newest(self, copier: Copier, step: int | None) -> Restored | None:
        """Restore from the directory, after a download if the mirror has a newer checkpoint."""
        restored, error = await self._restore_here(step)
        if restored is not None and not restored.set_aside and self._is_newest_here:
            return restored
        set_aside = () if restored is None else restored.set_aside
        damaged: list[str] = []
        try:
            for name in await copier.names():
                if restored is not None and name <= _format.name_of(restored.checkpoint):
                    break
                if step is not None and step != name.step:
                    continue
                damage = await copier.download(name, self._directory.add)
                if damage is None:
                    restored = None  # frees its memory
                    restored, error = await self._restore_here(step)
                else:
                    damaged.append(f"{name}: {damage}")
                    message = "checkpoint %s in the mirror %s was skipped: %s"
                    logger.warning(message, name, copier.mirror, damage)
        except MirrorError as failure:
            if restored is None:
                raise CheckpointError(
                    errno.EIO,
                    f"there is no good checkpoint in {self.checkpoint_dir}, and the mirror"
                    f" {copier.mirror} could not be read: {failure}; try again when it can be, or"
                    " restore without it",
                ) from error
            logger.warning(
                "the mirror %s could not be read (%s): continuing with step %d, the newest here",
                copier.mirror,
                failure,
                restored.checkpoint.step,
            )
        if restored is not None:
            all_set_aside = dict.fromkeys([*set_aside, *restored.set_aside])
            return dataclasses.replace(restored, set_aside=tuple(all_set_aside))
        if error is not None:
            raise error
        if damaged:
            raise CorruptCheckpointError(
                f"the mirror {copier.mirror} has checkpoints and none of them is good:"
                f" {'; '.join(damaged[:5])}",
                reason=damaged[0],
            )
        return None

    async def _restore_here(
        self,
        step: int | None,
    ) -> tuple[Restored | None, CheckpointError | None]:
        """Restore from the directory; or return the error, if the mirror may help."""
        try:
            return await to_thread(self._directory.restore, step), None
        except CheckpointError as error:
            if isinstance(error, CorruptCheckpointError) or error.errno == errno.ENOENT:
                return None, error
            raise

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """What has been copied to the mirror; None without one."""
        return None if self._copier is None else self._copier.status

    async def flush_mirror(self, timeout: float | None = None) -> bool:
        """Wait until the pending checkpoints have been copied to the mirror.

        A pause between attempts ends.

        Returns:
            Whether they have been copied within `timeout` seconds; if not, a warning is logged and
            the upload continues.
        """
        check_secs(timeout, "timeout", optional=True)
        return self._copier is None or await self._copier.flush(timeout)

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, newest first.

        Only manifests are read, without the lock; damaged ones are left out.
        """
        return await to_thread(self._directory.checkpoints)

    async def verify(self) -> list[tuple[Path, str | None]]:
        """Read every checkpoint completely, without the lock and without changing anything.

        Returns:
            Path and damage of each (None: it is good), newest first, then those set aside earlier.
        """
        verified = await to_thread(self._directory.verify)
        return [(checkpoint.path, checkpoint.reason) for checkpoint in verified]

    async def aclose(self, *, grace_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Release the directory. Calling it again has no effect.

        Checkpoints that are not in the mirror yet are copied first, the newest one before others,
        for at most `grace_secs`. A warning names those that are not; the newest one is copied after
        the next restore.
        """
        check_secs(grace_secs, "grace_secs")
        async with self._order:
            try:
                if self._copier is not None:
                    await self._copier.aclose(grace_secs)
            finally:
                self._is_newest_here = False
                await to_thread(self._directory.close)

    async def __aenter__(self) -> Saver:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def check_tracked(tracked: Mapping[str, Stateful], state_of: Callable[[Stateful], Any]) -> None:
    """Encode the states of tracked objects, and write nothing.

    Raises:
        InvalidArgumentError: a checkpoint cannot hold one; the message has its name.
    """
    from aiohooks.checkpoint import _encoding

    torch = torch_support()
    for name, value in tracked.items():
        reason = None if torch is None else torch.object_refusal(value)
        if reason is not None:
            raise InvalidArgumentError(f"tracked[{name!r}] {reason}")
        _encoding.encode({"tracked": {name: state_of(value)}})


def is_same(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two states are equal to the last bit in a checkpoint."""
    from aiohooks.checkpoint import _encoding

    data, arrays = _encoding.encode(state)
    other_data, other_arrays = _encoding.encode(other)
    # Chunks begin with a header that has the number of all bytes.
    return data == other_data and all(map(operator.eq, arrays.chunks(), other_arrays.chunks()))


def _checked_step(step: object) -> int:
    checked: int = checked_int(
        step,
        "step",
        most=_format.MAX_INT,
        expected=f"an int from 0 to {_format.MAX_INT}",
    )
    return checked


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of reading one checkpoint completely."""

    path: Path
    name: Name
    reason: str | None
    """What is damaged, or None."""
    was_set_aside: bool = False
    manifest: Manifest | None = None
    """The manifest, if it could be read."""


class CheckpointDirectory:
    """A directory of checkpoints, with blocking methods that run one at a time.

    A call lists the directory once: other processes do not change what belongs to the holder of the
    lock.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: KeepPolicy = KeepNewest(5),
        read_only: bool = False,
        fs: Any = os,
    ) -> None:
        self.path = path
        self._keep = keep
        self._read_only = read_only
        self._files = Files(fs)
        self._lock = DirectoryLock(self._files, path)
        # For calls of several tasks, and for a thread that its cancelled caller no longer waits
        # for.
        self._mutex = threading.Lock()
        self._missing_metrics: set[str] = set()
        self._checkpoints: dict[Name, Checkpoint] = {}
        """The checkpoints whose manifest has been read or written."""
        call_after_fork(self)

    def after_fork(self) -> None:
        """Replace the mutex in a forked child, where no thread would release it."""
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def _one_at_a_time(self, failure: str, *, writes: str | None = None) -> Generator[None]:
        """Run the block alone; its errors begin with `failure`.

        If the directory is read only, an operation that `writes` names is an error.
        """
        with self._mutex, _error_context(failure):
            if writes is not None and self._read_only:
                raise CheckpointError(
                    errno.EROFS,
                    f"the Saver of {self.path} has read_only=True, so it cannot {writes}",
                )
            yield

    def _acquire(self) -> tuple[int, set[str]]:
        """Return the directory, locked, and the names in it.

        The leftovers of a writer that was killed are removed.
        """
        dir_fd = self._lock.acquire()
        names = self._files.list_names(dir_fd)
        for name in sorted(filter(_format.is_temporary, names)):
            try:
                self._files.remove_directory(name, dir_fd=dir_fd)
            except OSError as error:
                logger.warning(
                    "%s is left from an unfinished save and cannot be removed (%s)",
                    name,
                    error,
                )
        return dir_fd, names

    # Saving

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metrics: Mapping[str, float],
        least_sequence: int = 0,
    ) -> Checkpoint:
        """Save a state, with the next sequence, or with `least_sequence` if that is later."""
        from aiohooks.checkpoint import _encoding

        with self._one_at_a_time(
            f"the checkpoint of step {step} was not saved in {self.path}",
            writes="save",
        ):
            data, arrays = _encoding.encode(state)
            dir_fd, names = self._acquire()
            name = Name(max(_format.next_sequence(names), least_sequence), step)
            contents = {_format.ARRAYS: arrays.chunks(), _format.STATE: [data]}
            manifest = Manifest(name, metrics, {})
            saved = self._commit(dir_fd, names, manifest, contents)
            self._checkpoints[name] = saved
            self._remove_old(dir_fd, names, saved)
            return saved

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> Checkpoint | None:
        """Add metrics to the newest checkpoint of a step; return None if there is none."""
        what = f"the metrics of step {step} were not added to its checkpoint in {self.path}"
        with self._one_at_a_time(what, writes="add metrics"):
            dir_fd, names = self._acquire()
            sound = self._sound(dir_fd, names)
            of_step = (checkpoint for checkpoint in sound if checkpoint.step == step)
            newest = next(of_step, None)
            if newest is None:
                return None
            name = _format.name_of(newest)
            temporary = f".tmp-{_format.MANIFEST}"
            with self._files.directory(str(name), dir_fd=dir_fd) as fd:
                manifest = self._read_manifest(fd, name)
                added = _format.check_metrics({**manifest.metrics, **metrics})
                manifest = dataclasses.replace(manifest, metrics=added)
                with contextlib.suppress(FileNotFoundError):  # of a writer that was killed
                    self._files.fs.unlink(temporary, dir_fd=fd)
                self._files.write_new(temporary, [_format.encode(manifest)], dir_fd=fd)
                self._files.rename(temporary, _format.MANIFEST, dir_fd=fd)
                self._files.fs.fsync(fd)
            changed = manifest.checkpoint(self.path)
            self._checkpoints[name] = changed
            self._remove_old(dir_fd, names, changed)
            return changed

    def add(self, manifest: Manifest, contents: Mapping[str, Iterable[bytes]]) -> None:
        """Commit a checkpoint that was made elsewhere, under the same name.

        Errors of `contents` pass as they are.
        """
        name = manifest.name
        with self._one_at_a_time(f"checkpoint {name} was not downloaded to {self.path}"):
            dir_fd, names = self._acquire()
            if str(name) in names:
                raise FileExistsError(
                    errno.EEXIST,
                    f"{name} exists, is damaged, and cannot be set aside",
                )
            self._commit(dir_fd, names, manifest, contents)

    def _commit(
        self,
        dir_fd: int,
        names: set[str],
        manifest: Manifest,
        contents: Mapping[str, Iterable[bytes | memoryview]],
    ) -> Checkpoint:
        """Write a checkpoint under a temporary name, and rename it when it is durable.

        The new name is durable when this returns. If an operation fails, nothing is left of it. The
        manifest gets the files that are written.
        """
        files = self._files
        name = str(manifest.name)
        temporary = _format.unused_name(f".tmp-{name}", names)
        try:
            files.fs.mkdir(temporary, 0o700, dir_fd=dir_fd)
            with files.directory(temporary, dir_fd=dir_fd) as fd:
                written = {
                    file: _format.FileEntry(*files.write_new(file, data, dir_fd=fd))
                    for file, data in contents.items()
                }
                manifest = dataclasses.replace(manifest, files=written)
                files.write_new(_format.MANIFEST, [_format.encode(manifest)], dir_fd=fd)
                files.fs.fsync(fd)
            files.rename(temporary, name, dir_fd=dir_fd)
            files.fs.fsync(dir_fd)
            self._lock.check_place()  # it may have been moved meanwhile
        except BaseException:
            self._undo_commit(dir_fd, temporary, name)
            raise
        names.add(name)
        return manifest.checkpoint(self.path)

    def _undo_commit(self, dir_fd: int, temporary: str, name: str) -> None:
        try:
            # If it has its final name, it is not known whether that is durable: the save failed all
            # the same.
            with contextlib.suppress(FileNotFoundError):
                self._files.rename(name, temporary, dir_fd=dir_fd)
            self._files.remove_directory(temporary, dir_fd=dir_fd)
        except OSError as error:
            logger.warning(
                "a failed save left %s behind (%s); the next save tries again to remove it",
                temporary,
                error,
            )

    def _remove_old(self, dir_fd: int, names: set[str], saved: Checkpoint) -> None:
        """Remove the checkpoints that the policy does not keep.

        Errors are logged: the new checkpoint is durable.
        """
        try:
            there = self._sound(dir_fd, names)
            removed = not_kept(self._keep, there, saved)
        except OSError as error:
            logger.warning(
                "no old checkpoint is removed: the existing ones could not be read (%s)",
                error,
            )
            return
        except Exception:
            logger.exception("no old checkpoint is removed: the policy %r failed", self._keep)
            return
        if not removed:
            return
        self._warn_of_missing_metrics(there, saved)
        self._remove(dir_fd, names, [_format.name_of(checkpoint) for checkpoint in removed])

    def _warn_of_missing_metrics(self, there: list[Checkpoint], saved: Checkpoint) -> None:
        """Warn of a metric that no checkpoint has, once."""
        # An evaluation of the last one may be to come.
        if not any(checkpoint.step and checkpoint != saved for checkpoint in there):
            return
        for metric in self._keep.metrics:
            is_missing = not any(metric in checkpoint.metrics for checkpoint in there)
            if is_missing and metric not in self._missing_metrics:
                self._missing_metrics.add(metric)
                logger.warning(
                    "%s: no checkpoint has the metric %r by which KeepBest is to keep the best,"
                    " so it keeps none; give metrics={%r: ...} to CheckpointSaverHook, or an"
                    " EvaluatorHook that returns it and is due when it saves",
                    self.path,
                    metric,
                    metric,
                )

    def _remove(self, dir_fd: int, names: set[str], old: list[Name]) -> None:
        """Remove checkpoints.

        Each is renamed first, durably, so that a part of one never has the name of a checkpoint.
        """
        renamed: list[str] = []
        try:
            for name in old:
                temporary = _format.unused_name(f".tmp-drop-{name}", names)
                with contextlib.suppress(
                    FileNotFoundError,
                ):  # the user may have removed it during the save
                    self._files.rename(str(name), temporary, dir_fd=dir_fd)
                    renamed.append(temporary)
            self._files.fs.fsync(dir_fd)
            for temporary in renamed:
                self._files.remove_directory(temporary, dir_fd=dir_fd)
        except OSError as error:
            logger.warning(
                "old checkpoints could not be removed (%s); the next save tries again",
                error,
            )

    # Reading

    def _sound(self, dir_fd: int, names: set[str]) -> list[Checkpoint]:
        """Return the checkpoints whose manifest is valid, newest first."""
        before = self._checkpoints
        self._checkpoints = {}
        for name in _format.checkpoint_names(names):
            if name in before:
                self._checkpoints[name] = before[name]
                continue
            with (
                contextlib.suppress(DamagedError, NewerVersionError),
                self._files.directory(str(name), dir_fd=dir_fd, of_checkpoint=True) as fd,
            ):
                self._checkpoints[name] = self._read_manifest(fd, name).checkpoint(self.path)
        return list(self._checkpoints.values())

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        """Open the directory for the block, without taking the lock."""
        self._lock.check_place()
        return self._files.directory(self.path)

    def _read_manifest(self, fd: int, name: Name) -> Manifest:
        """Read the manifest of a checkpoint whose directory is open.

        Raises:
            DamagedError: it does not verify.
            NewerVersionError: it has a later version of the format.
            OSError: the system refused an operation for a reason that is not damage.
        """
        with damage_in(_format.MANIFEST):
            data = self._files.read(
                _format.MANIFEST,
                dir_fd=fd,
                max_size=_format.MAX_MANIFEST_BYTES,
            )
            return _format.decode(data, name)

    def _read_state(self, fd: int, manifest: Manifest) -> dict[str, Any]:
        """Read and verify the files of a checkpoint. Raises as `_read_manifest` does."""
        from aiohooks.checkpoint import _encoding

        size = manifest.files[_format.ARRAYS].size

        def read_arrays(file: FileReader) -> dict[str, Any]:
            return _encoding.read_arrays(file.read_into, size)

        def read_tree(file: FileReader) -> bytes:
            return b"".join(file.pieces())

        arrays = self._read_file(fd, manifest, _format.ARRAYS, read_arrays)
        return _encoding.decode(self._read_file(fd, manifest, _format.STATE, read_tree), arrays)

    def _read_file(
        self,
        fd: int,
        manifest: Manifest,
        file: str,
        load: Callable[[FileReader], T],
    ) -> T:
        """Return what `load` makes of a file, if that has the right checksum."""
        entry = manifest.files[file]
        with damage_in(file), self._files.opened(file, dir_fd=fd, size=entry.size) as reader:
            try:
                loaded = load(reader)
            except DamagedError:
                reader.check(entry.crc32)  # of the whole file, whatever `load` has found in it
                raise
            reader.check(entry.crc32)
            return loaded

    def _read(self, dir_fd: int, name: Name) -> tuple[Manifest, dict[str, Any]]:
        with self._files.directory(str(name), dir_fd=dir_fd, of_checkpoint=True) as fd:
            manifest = self._read_manifest(fd, name)
            return manifest, self._read_state(fd, manifest)

    def restore(self, step: int | None, missing_ok: bool = True) -> Restored | None:
        with self._one_at_a_time(f"no checkpoint could be restored from {self.path}"):
            if not self._read_only:
                check_system()
                if not (missing_ok or self._lock.is_held or self._files.exists(self.path)):
                    raise self._missing_error()
                with _error_context(
                    f"cannot use the checkpoint directory {self.path}, where this process must be"
                    " able to write",
                ):
                    dir_fd, names = self._acquire()
                return self._restore(dir_fd, names, step)
            try:
                with self._opened() as dir_fd:
                    for _ in range(_MAX_READ_ATTEMPTS):
                        with contextlib.suppress(_VanishedError):
                            return self._restore(dir_fd, self._files.list_names(dir_fd), step)
            except FileNotFoundError:
                if missing_ok and step is None:
                    return None
                raise self._missing_error() from None
            raise CheckpointError(
                errno.EAGAIN,
                f"the checkpoints in {self.path} are removed faster than they can be read",
            )

    def _restore(self, dir_fd: int, names: set[str], step: int | None) -> Restored | None:
        there = _format.checkpoint_names(names)
        set_aside: list[tuple[str, str]] = []
        for name in there:
            if step not in (None, name.step):
                continue
            try:
                manifest, state = self._read(dir_fd, name)
            except DamagedError as error:
                if self._read_only and not self._files.exists(str(name), dir_fd=dir_fd):
                    raise _VanishedError from None
                set_aside.append((str(name), str(error)))
                self._set_aside(dir_fd, names, name, str(error))
            else:
                return Restored(manifest.checkpoint(self.path), state, tuple(set_aside))
        if step is not None and not set_aside:
            steps = ", ".join(str(step) for step in sorted({name.step for name in there}))
            message = f"{self.path} has no checkpoint of step {step}"
            raise CheckpointError(errno.ENOENT, f"{message}; there are: {steps or 'none at all'}")
        if not set_aside:
            earlier = sorted(filter(_format.parse_damaged, names), reverse=True)
            set_aside = [(name, "was set aside as damaged before") for name in earlier]
        if not set_aside:
            return None
        listed = "; ".join(f"{name}: {reason}" for name, reason in set_aside[:5])
        if len(set_aside) > 5:
            listed += "; ..."
        newest, reason = set_aside[0]
        raise CorruptCheckpointError(
            f"{self.path} has checkpoints and none of them is good: {listed}; to start from the"
            " beginning, use another directory",
            path=self.path / newest,
            reason=reason,
        )

    def _missing_error(self) -> CheckpointError:
        return CheckpointError(
            errno.ENOENT,
            f"{self.path} does not exist, so there is nothing to restore; check the name, or pass"
            " missing_ok=True if nothing may have been saved yet",
        )

    def _set_aside(self, dir_fd: int, names: set[str], name: Name, reason: str) -> None:
        """Rename a damaged checkpoint, if this process may; never remove it."""
        self._checkpoints.pop(name, None)
        path = self.path / str(name)
        if self._read_only:
            logger.warning("checkpoint %s is damaged and was skipped: %s", path, reason)
            return
        aside = _format.unused_name(f"damaged-{name}", names)
        try:
            self._files.rename(str(name), aside, dir_fd=dir_fd)
            self._files.fs.fsync(dir_fd)
        except OSError as error:
            logger.warning(
                "checkpoint %s is damaged and could not be set aside (%s): %s",
                path,
                error,
                reason,
            )
        else:
            logger.warning(
                "checkpoint %s is damaged and was set aside as %s: %s",
                path,
                aside,
                reason,
            )

    def checkpoints(self) -> list[Checkpoint]:
        with self._one_at_a_time(f"the checkpoints in {self.path} could not be listed"):
            try:
                with self._opened() as dir_fd:
                    return self._sound(dir_fd, self._files.list_names(dir_fd))
            except FileNotFoundError:
                return []

    def verify(self) -> list[Verified]:
        verified: list[Verified] = []
        with _error_context(f"the checkpoints in {self.path} could not be verified"):
            try:
                with self._opened() as dir_fd:
                    for name in _format.checkpoint_names(self._files.list_names(dir_fd)):
                        result = self._verify(dir_fd, name)
                        if result.reason is None or self._files.exists(str(name), dir_fd=dir_fd):
                            verified.append(result)
                    # Listed again, because a writer may have set one aside meanwhile.
                    names = self._files.list_names(dir_fd)
            except FileNotFoundError:
                return []
        for text in sorted(names, reverse=True):
            damaged = _format.parse_damaged(text)
            if damaged is not None:
                reason = "was set aside as damaged"
                verified.append(Verified(self.path / text, damaged, reason, was_set_aside=True))
        return verified

    def _verify(self, dir_fd: int, name: Name) -> Verified:
        manifest = reason = None
        try:
            with self._files.directory(str(name), dir_fd=dir_fd, of_checkpoint=True) as fd:
                manifest = self._read_manifest(fd, name)
                self._read_state(fd, manifest)
        except DamagedError as error:
            reason = str(error)
        except NewerVersionError as error:
            reason = error.strerror
        return Verified(self.path / str(name), name, reason, manifest=manifest)

    def close(self) -> None:
        """Release the lock; the directory can be used again."""
        with self._mutex:
            self._lock.release()


class _VanishedError(Exception):
    """A writer removed the checkpoint that a reader was reading."""


@contextlib.contextmanager
def _error_context(what: str) -> Generator[None]:
    """Convert errors of the system to `CheckpointError`, with their errno."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            error.errno or errno.EIO,
            f"{what}: {error.strerror or error}",
        ) from error
    except MemoryError as error:
        raise CheckpointError(errno.ENOMEM, f"{what}: there is not enough memory") from error
