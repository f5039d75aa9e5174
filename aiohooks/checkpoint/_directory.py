"""A directory of checkpoints: saving, restoring and verifying, with methods that block.

readable    a checkpoint is readable if its manifest verifies; its other files may be damaged
good        a checkpoint is good if all of its files verify
set aside   to rename a damaged checkpoint, so that it is neither restored nor lost
names       the names in the directory when it was listed last, kept up to date by the lock's holder
"""

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
"""How often a reader begins again because a writer has removed the checkpoint that it was reading.
"""


class _RemovedError(Exception):
    """A writer has removed a checkpoint while it was read."""


class CheckpointDirectory:
    """A directory of checkpoints, with blocking methods that run one at a time.

    A call that has locked the directory lists it once, at the beginning: only the holder of the
    lock changes the checkpoints.
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
        # Whether `_warn_of_missing_metrics` has logged its warning, which is logged only once.
        self._has_warned = False

    @contextlib.contextmanager
    def _locked(self, error_prefix: str) -> Generator[Directory]:
        """Lock the directory, list its names, and yield it.

        The unfinished directories that a killed writer has left are removed before. An error of the
        system, here or in the block, becomes a `CheckpointError` whose message begins with
        `error_prefix`. The lock is kept afterwards, until `close`.
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
        """Save a state, and remove old checkpoints.

        Args:
            state: the state.
            step: its global step.
            metrics: its metrics, which were checked.
            least_sequence: the sequence is the next one in this directory, but at least this one. A
                mirror may have later checkpoints than the directory, for example if that was lost.
                Then the next one here would be taken for an older one than those in the mirror.
        """
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
        with self._locked(
            f"the metrics of step {step} were not added to its checkpoint in {self.path}",
        ) as directory:
            # `_readable` reads a manifest when the next one is asked for, so `closing` ends it
            # after the manifest of the wanted checkpoint.
            with contextlib.closing(self._readable(directory)) as newest_first:
                saved = next((saved for saved in newest_first if saved.step == step), None)
            if saved is None:
                return None
            all_metrics = _format.check_metrics({**saved.metrics, **metrics})
            changed = dataclasses.replace(saved, metrics=all_metrics)
            # The rename replaces the manifest in one operation, so a kill leaves the old or the
            # new.
            temporary = f".tmp-{_format.MANIFEST}"
            with directory.open_checkpoint(saved.path.name) as inside:
                # A writer that was killed may have left this file.
                inside.unlink(temporary)
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
        with self._locked(
            f"checkpoint {name} was not downloaded to {self.path}",
        ) as directory:
            # A download follows a restore that found no good checkpoint of this name here. So it
            # would have set a directory of this name aside, if it could.
            if name in directory.names:
                raise FileExistsError(
                    errno.EEXIST,
                    f"{name} exists, is damaged, and cannot be set aside",
                )
            new = dataclasses.replace(checkpoint, path=self.path / name)
            self._commit(directory, new, contents)

    def _commit(
        self,
        directory: Directory,
        new: Checkpoint,
        contents: Mapping[str, Iterable[bytes | memoryview]],
    ) -> Checkpoint:
        """Write a checkpoint under a temporary name, and rename it when it is durable.

        Return it with the sizes and checksums of the files that were written. When this returns,
        the checkpoint is durable under its name. If an operation fails, what was written is
        removed.
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
            # Raise if the directory was moved meanwhile: no process would find the checkpoint.
            self._lock.check_place()
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
        """Remove what a failed save has written. Log an error of the removal."""
        try:
            # The checkpoint may have its final name already. But the operation after the rename has
            # failed, so the name may not be durable. The save has failed, and the name is undone.
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
        """Remove the checkpoints that the policy does not keep after `saved`.

        Errors, also of the policy, are only logged, because the save itself has succeeded.
        """
        try:
            newest_first = list(self._readable(directory))
            removed = not_kept(self._keep, newest_first, saved)
            if removed:
                self._warn_of_missing_metrics(newest_first, saved)
                self._remove(directory, removed)
        except Exception as error:
            # A traceback helps only with an error of the policy.
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

        All are renamed first, durably. So if a kill interrupts the removal, the rest of a
        checkpoint does not have the name of one.
        """
        renamed: list[str] = []
        for checkpoint in old:
            name = checkpoint.path.name
            temporary = directory.unused_name(f".tmp-drop-{name}")
            # The user may have removed it.
            with contextlib.suppress(FileNotFoundError):
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
        # The evaluation of the step of `saved` may come later, and step 0 may have none. With only
        # such checkpoints it is too early for a warning.
        early = {0, saved.step}
        if self._has_warned or all(checkpoint.step in early for checkpoint in newest_first):
            return
        metrics = [checkpoint.metrics for checkpoint in newest_first]
        for metric in set(self._keep.metrics).difference(*metrics):
            self._has_warned = True
            logger.warning(
                "%s: no checkpoint has the metric %r by which KeepBest is to keep the best, so it"
                " keeps none; give the session an EvaluatorHook that returns it and is due when"
                " the CheckpointSaverHook saves, or metrics={%r: ...} to Saver.save",
                self.path,
                metric,
                metric,
            )

    # Reading

    def _readable(self, directory: Directory) -> Generator[Checkpoint]:
        """Yield the checkpoints whose manifest verifies, newest first. Skip all others.

        Each manifest is read when its checkpoint is asked for, and no other file is read.
        """
        for name in map(str, _format.checkpoint_names(directory.names)):
            with contextlib.suppress(DamagedError), directory.open_checkpoint(name) as inside:
                yield inside.read_manifest(self.path / name)

    def _read(
        self,
        directory: Directory,
        name: str,
    ) -> tuple[Checkpoint, dict[str, Any]]:
        """Return a checkpoint and its state.

        Raises:
            DamagedError: its manifest or another file does not verify.
            CheckpointError: it has a later version of the format.
            OSError: the system refused an operation for a reason that is not damage.
        """
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
                This call adds its own to the list, even if it raises an error.
        """
        error_prefix = f"no checkpoint could be restored from {self.path}"
        # A new list only for None: an empty list of the caller must get the names as well.
        if not self._read_only:
            with self._locked(error_prefix) as directory:
                return self._restore(directory, step, [] if set_aside is None else set_aside)
        with self._lock.mutex, _checkpoint_errors(error_prefix):
            if step is None and not exists(self._fs, self.path):
                return None
            # Without the lock, a writer may remove the checkpoint that is being read. Then
            # `_restore` has listed the directory again, and is called once more.
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
            _RemovedError: a writer has removed the checkpoint that was being read. `directory` has
                the current names, for another call.
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
            # It looks damaged if a writer has removed it meanwhile. With the lock, there is no
            # other writer.
            if self._read_only and text not in directory.list_names():
                raise _RemovedError
            set_aside.append((text, damage))
            self._set_aside(directory, text, damage)
        # There were checkpoints, and the first one in the list is the newest.
        if set_aside:
            raise self._none_is_good(*set_aside[0])
        if step is not None:
            existing = sorted({name.step for name in names})
            steps = ", ".join(map(str, existing))
            raise CheckpointError(
                errno.ENOENT,
                f"{self.path} has no checkpoint of step {step};"
                f" there are: {steps or 'none at all'}",
            )
        # Earlier processes may have set all of them aside. That is not a new directory.
        earlier = _format.damaged_names(directory.names)
        if earlier:
            raise self._none_is_good(earlier[0], "was set aside as damaged before")
        return None

    def _none_is_good(self, newest: str, reason: str) -> CorruptCheckpointError:
        """Return the error for a directory whose checkpoints are all damaged.

        `newest` is the name of the newest one, and `reason` its damage.
        """
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
        logger.warning("checkpoint %s is damaged and %s: %s", self.path / name, outcome, reason)

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints whose manifest verifies, newest first."""
        with (
            self._lock.mutex,
            _checkpoint_errors(f"the checkpoints in {self.path} could not be listed"),
            contextlib.suppress(FileNotFoundError),
            self._opened() as directory,
        ):
            return list(self._readable(directory))
        # The directory does not exist, or was removed while it was read.
        return []

    def verify(self) -> list[tuple[Path, str | None]]:
        """Read all checkpoints, without the lock, and return the path and the damage of each.

        The damage of a good one is None. See `Saver.verify`.
        """
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
                    # It looks damaged if a writer has removed it meanwhile, or set it aside.
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
        # The message contains the text of the system's error, so that need not be the cause as
        # well.
        raise CheckpointError(code, f"{prefix}: {error.strerror or error}") from None
