"""A directory of checkpoints: saving, restoring and verifying, with methods that block."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aiohooks._core.activity import logger
from aiohooks.checkpoint import _encoding, _format
from aiohooks.checkpoint._files import Directory, DirectoryLock, exists
from aiohooks.checkpoint._format import DamagedError, Name
from aiohooks.checkpoint.policies import Checkpoint, KeepNewest, KeepPolicy, Restored, not_kept
from aiohooks.errors import CheckpointError, CorruptCheckpointError

_MAX_LISTINGS = 100
"""How often a reader lists a directory again whose writer has removed what was being read."""


class _RemovedError(Exception):
    """A writer has removed a checkpoint while it was read."""


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
        self._fs = fs
        self._lock = DirectoryLock(fs, path)
        # Whether the log has the warning of `_warn_of_missing_metrics`.
        self._has_warned = False

    @contextlib.contextmanager
    def _locked(self, error_prefix: str) -> Generator[Directory]:
        """Yield the directory, which this process has locked, and whose names were just listed.

        The leftovers of a writer that was killed are removed. An error of the system, here or in
        the block, becomes a `CheckpointError` whose message begins with `error_prefix`.
        """
        with self._lock.mutex, _checkpoint_errors(error_prefix):
            if self._read_only:
                raise CheckpointError(
                    errno.EROFS,
                    f"the Saver of {self.path} has read_only=True, so it cannot save",
                )
            directory = self._lock.acquire()
            for name in sorted(filter(_format.is_temporary, directory.list_names())):
                try:
                    directory.remove(name)
                except OSError as error:
                    logger.warning(
                        "%s is left from an unfinished save and cannot be removed (%s)",
                        name,
                        error,
                    )
            yield directory

    @contextlib.contextmanager
    def _opened(self) -> Generator[Directory]:
        """Yield the directory for reading, without the lock. Its names were just listed."""
        self._lock.check_place()
        with Directory(self._fs, self.path) as directory:
            directory.list_names()
            yield directory

    # Saving

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metrics: Mapping[str, float],
        least_sequence: int = 0,
    ) -> Checkpoint:
        """Save a state. Its sequence is the next one here, or `least_sequence` if that is later."""
        error_prefix = f"the checkpoint of step {step} was not saved in {self.path}"
        contents = _encoding.encode(state)
        with self._locked(error_prefix) as directory:
            name = Name(max(_format.next_sequence(directory.names), least_sequence), step)
            new = _format.checkpoint_of(self.path / str(name), metrics, {})
            saved = self._commit(directory, new, contents)
            self._remove_old(directory, saved)
            return saved

    def add_metrics(
        self,
        step: int,
        metrics: Mapping[str, float],
    ) -> Checkpoint | None:
        """Add metrics to the newest checkpoint of a step. Return None if there is none."""
        error_prefix = f"the metrics of step {step} were not added to its checkpoint in {self.path}"
        with self._locked(error_prefix) as directory:
            # It reads no manifests after that of the wanted checkpoint.
            with contextlib.closing(self._readable(directory)) as newest_first:
                saved = next((saved for saved in newest_first if saved.step == step), None)
            if saved is None:
                return None
            all_metrics = _format.check_metrics({**saved.metrics, **metrics})
            changed = dataclasses.replace(saved, metrics=all_metrics)
            # Its manifest is replaced in one operation.
            temporary = f".tmp-{_format.MANIFEST}"
            with directory.open_checkpoint(saved.path.name) as inside:
                inside.unlink(temporary)  # of a writer that was killed
                inside.write_new(temporary, [_format.encode(changed)])
                inside.rename(temporary, _format.MANIFEST)
                inside.sync()
            self._remove_old(directory, changed)
            return changed

    def add_download(
        self,
        checkpoint: Checkpoint,
        contents: Mapping[str, Iterable[bytes]],
    ) -> None:
        """Write a checkpoint that was downloaded from the mirror, under the name it has there."""
        name = checkpoint.path.name
        error_prefix = f"checkpoint {name} was not downloaded to {self.path}"
        with self._locked(error_prefix) as directory:
            if name in directory.names:
                message = f"{name} exists, is damaged, and cannot be set aside"
                raise FileExistsError(errno.EEXIST, message)
            new = dataclasses.replace(checkpoint, path=self.path / name)
            self._commit(directory, new, contents)

    def _commit(
        self,
        directory: Directory,
        new: Checkpoint,
        contents: Mapping[str, Iterable[bytes | memoryview]],
    ) -> Checkpoint:
        """Write a checkpoint under a temporary name, and rename it when it is durable.

        Return it with the files that were written. The new name is durable when this returns. If an
        operation fails, nothing is left of it.
        """
        name = new.path.name
        temporary = directory.unused_name(f".tmp-{name}")
        try:
            with directory.make(temporary) as inside:
                files = {file: inside.write_new(file, data) for file, data in contents.items()}
                saved = dataclasses.replace(new, files=MappingProxyType(files))
                inside.write_new(_format.MANIFEST, [_format.encode(saved)])
                inside.sync()
            directory.rename(temporary, name)
            directory.sync()
            self._lock.check_place()  # it may have been moved meanwhile
        except BaseException:
            self._undo_commit(directory, temporary, name)
            raise
        directory.names.add(name)
        return saved

    def _undo_commit(
        self,
        directory: Directory,
        temporary: str,
        name: str,
    ) -> None:
        """Remove what a failed save has written. An error of that is logged."""
        try:
            # It may have its final name already. Whether that is durable is not known, so that the
            # save has failed.
            with contextlib.suppress(FileNotFoundError):
                directory.rename(name, temporary)
            directory.remove(temporary)
        except OSError as error:
            logger.warning(
                "a failed save left %s behind (%s); the next save tries again to remove it",
                temporary,
                error,
            )

    def _remove_old(self, directory: Directory, saved: Checkpoint) -> None:
        """Remove the checkpoints that the policy does not keep.

        Errors, also of the policy, are logged: the new checkpoint is durable.
        """
        try:
            newest_first = list(self._readable(directory))
            removed = not_kept(self._keep, newest_first, saved)
            if removed:
                self._warn_of_missing_metrics(newest_first, saved)
                self._remove(directory, removed)
        except Exception as error:
            logger.warning(
                "old checkpoints could not be removed (%s); the next save tries again",
                error,
                exc_info=not isinstance(error, OSError),
            )

    def _remove(
        self,
        directory: Directory,
        old: list[Checkpoint],
    ) -> None:
        """Remove checkpoints.

        Each is renamed first, durably, so that a part of one never has the name of a checkpoint.
        """
        renamed: list[str] = []
        for checkpoint in old:
            name = checkpoint.path.name
            temporary = directory.unused_name(f".tmp-drop-{name}")
            with contextlib.suppress(FileNotFoundError):  # the user may have removed it
                directory.rename(name, temporary)
                renamed.append(temporary)
        directory.sync()
        for temporary in renamed:
            directory.remove(temporary)

    def _warn_of_missing_metrics(
        self,
        newest_first: list[Checkpoint],
        saved: Checkpoint,
    ) -> None:
        """Warn once of a metric of `keep` that no checkpoint has."""
        # The evaluation of `saved` may be to come, and at step 0 there may be none.
        early = {0, saved.step}
        if self._has_warned or all(checkpoint.step in early for checkpoint in newest_first):
            return
        metrics = [checkpoint.metrics for checkpoint in newest_first]
        for metric in set(self._keep.metrics).difference(*metrics):
            self._has_warned = True
            logger.warning(
                "%s: no checkpoint has the metric %r by which KeepBest is to keep the best, so it"
                " keeps none; give metrics={%r: ...} to CheckpointSaverHook, or an EvaluatorHook"
                " that returns it and is due when it saves",
                self.path,
                metric,
                metric,
            )

    # Reading

    def _readable(self, directory: Directory) -> Generator[Checkpoint]:
        """Yield the checkpoints whose manifest verifies, newest first. Read no other file."""
        for name in map(str, _format.checkpoint_names(directory.names)):
            with contextlib.suppress(DamagedError), directory.open_checkpoint(name) as inside:
                yield inside.read_manifest(self.path / name)

    def _read(
        self,
        directory: Directory,
        name: str,
    ) -> tuple[Checkpoint, dict[str, Any]]:
        """Return a checkpoint and its state. Raises as `Directory.read_manifest` does."""
        with directory.open_checkpoint(name) as inside:
            checkpoint = inside.read_manifest(self.path / name)
            entry = checkpoint.files[_format.ARRAYS]
            with inside.verified(_format.ARRAYS, entry) as file:
                arrays = _encoding.read_arrays(file, entry.size)
            entry = checkpoint.files[_format.STATE]
            with inside.verified(_format.STATE, entry) as file:
                data = file.read(entry.size)
        return checkpoint, _encoding.decode(data, arrays)

    def restore(
        self,
        step: int | None,
        set_aside: list[tuple[str, str]] | None = None,
    ) -> Restored | None:
        """Restore the newest good checkpoint, or that of a step. See `Saver.restore`.

        Args:
            step: the step, or None for the newest.
            set_aside: names and reasons of damaged checkpoints that an earlier call has set aside.
                This call adds its own.
        """
        error_prefix = f"no checkpoint could be restored from {self.path}"
        if not self._read_only:
            with self._locked(error_prefix) as directory:
                return self._restore(directory, step, [] if set_aside is None else set_aside)
        with self._lock.mutex, _checkpoint_errors(error_prefix):
            if step is None and not exists(self._fs, self.path):
                return None
            with self._opened() as directory:
                for _ in range(_MAX_LISTINGS):
                    with contextlib.suppress(_RemovedError):
                        return self._restore(directory, step, [])
                raise CheckpointError(
                    errno.EBUSY,
                    f"{error_prefix}: its writer removed {_MAX_LISTINGS} checkpoints while they"
                    " were read; keep more of them",
                )

    def _restore(
        self,
        directory: Directory,
        step: int | None,
        set_aside: list[tuple[str, str]],
    ) -> Restored | None:
        """Read the newest checkpoint that is good, or that of `step`. Set the damaged ones aside.

        Return None if there are none at all.

        Raises:
            CheckpointError: there is none of `step`.
            CorruptCheckpointError: all are damaged.
            _RemovedError: the writer has removed the one that was read. `directory` has the names
                that are there now, for another call.
        """
        names = _format.checkpoint_names(directory.names)
        for name in names:
            if step not in (None, name.step):
                continue
            text = str(name)
            try:
                checkpoint, state = self._read(directory, text)
                return Restored(checkpoint, state, tuple(set_aside))
            except DamagedError as error:
                damage = str(error)
            if self._read_only and text not in directory.list_names():
                raise _RemovedError
            set_aside.append((text, damage))
            self._set_aside(directory, text, damage)
        if set_aside:
            raise self._none_is_good(*set_aside[0])
        if step is not None:
            existing = sorted({name.step for name in names})
            steps = ", ".join(map(str, existing))
            message = f"{self.path} has no checkpoint of step {step}"
            raise CheckpointError(errno.ENOENT, f"{message}; there are: {steps or 'none at all'}")
        earlier = _format.damaged_names(directory.names)
        if earlier:
            raise self._none_is_good(earlier[0], "was set aside as damaged before")
        return None

    def _none_is_good(self, newest: str, reason: str) -> CorruptCheckpointError:
        """Return the error for a directory whose checkpoints are all damaged."""
        return CorruptCheckpointError(
            f"{self.path} has checkpoints and none of them is good, the newest is {newest}:"
            f" {reason}; to start from the beginning, use another directory",
            path=self.path / newest,
            reason=reason,
        )

    def _set_aside(
        self,
        directory: Directory,
        name: str,
        reason: str,
    ) -> None:
        """Rename a damaged checkpoint, if this process may. Never remove it."""
        outcome = "was skipped"
        if not self._read_only:
            aside = directory.unused_name(f"damaged-{name}")
            outcome = f"was set aside as {aside}"
            try:
                directory.rename(name, aside)
                directory.sync()
            except OSError as error:
                outcome = f"could not be set aside ({error})"
        path = self.path / name
        logger.warning("checkpoint %s is damaged and %s: %s", path, outcome, reason)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints whose manifest verifies, newest first."""
        with (
            self._lock.mutex,
            _checkpoint_errors(f"the checkpoints in {self.path} could not be listed"),
            contextlib.suppress(FileNotFoundError),
            self._opened() as directory,
        ):
            return list(self._readable(directory))
        return []

    def verify(self) -> list[tuple[Path, str | None]]:
        """Read all checkpoints. See `Saver.verify`."""
        verified: list[tuple[Path, str | None]] = []
        with (
            _checkpoint_errors(f"the checkpoints in {self.path} could not be verified"),
            contextlib.suppress(FileNotFoundError),
            self._opened() as directory,
        ):
            for name in map(str, _format.checkpoint_names(directory.names)):
                damage: str | None = None
                try:
                    self._read(directory, name)
                except DamagedError as error:
                    # A writer may have removed it, or set it aside, meanwhile.
                    if name not in directory.list_names():
                        continue
                    damage = str(error)
                verified.append((self.path / name, damage))
            damaged = _format.damaged_names(directory.list_names())
            verified += [(self.path / text, "was set aside as damaged") for text in damaged]
        return verified

    def close(self) -> None:
        """Release the lock. The directory can be used again."""
        with self._lock.mutex:
            self._lock.release()


@contextlib.contextmanager
def _checkpoint_errors(prefix: str) -> Generator[None]:
    """Convert errors of the system to `CheckpointError`, with their errno and a prefix."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        code = error.errno or errno.EIO
        # The message has all that the error of the system says.
        raise CheckpointError(code, f"{prefix}: {error.strerror or error}") from None
