"""Saving and restoring for coroutines: `Saver`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import operator
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

from aiohooks._core.activity import Awaited, active, logger
from aiohooks._core.clock import current_clock, sleep
from aiohooks._core.validate import check_checkpoint_dir, check_instance, check_secs, checked_int
from aiohooks._core.waits import DEFAULT_GRACE_SECS, to_thread
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._format import MirrorError, Name
from aiohooks.checkpoint.policies import (
    Checkpoint,
    KeepNewest,
    KeepPolicy,
    Mirror,
    MirrorStatus,
    Restored,
)
from aiohooks.checkpoint.stateful import Stateful
from aiohooks.errors import CheckpointError, CorruptCheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from aiohooks.checkpoint._remote import Copier


class Saver:
    """Saves states to a directory and restores them.

    The first `save` or `restore` makes the directory if it is missing, and locks it: a directory
    has one writer. `aclose`, the end of `async with` and the end of the process release the lock.
    The Saver can be used again after `aclose`. Everything that blocks runs in a worker thread. A
    call that is cancelled waits for its thread, so a cancelled `save` is completed or has no
    effect. Concurrent calls run one after the other.
    """

    _fs: ClassVar[Any] = os
    """Does all file operations. Tests replace it in a subclass."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        keep: KeepPolicy = KeepNewest(5),
        read_only: bool = False,
        mirror: str | Mirror | None = None,
    ) -> None:
        """Check the arguments. No file is touched yet.

        Args:
            checkpoint_dir: the directory, made with mode 0700 when it is first needed.
            keep: which checkpoints to keep after a save, such as `KeepNewest(3) | KeepBest(2,
                "loss")`.
            read_only: read while another process writes. It takes no lock, sets nothing aside and
                rejects saves.
            mirror: a URL such as "s3://bucket/run", or a `Mirror` with options. Each checkpoint is
                copied there in the background, and a restore uses the newest intact checkpoint of
                both.

        Raises:
            InvalidArgumentError: an argument is invalid.
            ImportError: an extra is missing. Install `aiohooks[checkpoint]`, and for a mirror
                `aiohooks[fsspec]` and the package of its file system.
            CheckpointError: checkpoints need Unix.
        """
        # This module needs an extra. A missing package is found here, not at the first save.
        from aiohooks.checkpoint._directory import CheckpointDirectory

        check_checkpoint_dir(checkpoint_dir)
        check_instance(keep, KeepPolicy, "keep")
        if isinstance(mirror, str):
            mirror = Mirror(mirror)
        check_instance(mirror, Mirror, "mirror", optional=True)
        if mirror is not None and read_only:
            raise InvalidArgumentError(
                "read_only=True and a mirror exclude each other: a restore copies from the mirror",
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
        self._copier: Copier | None = None
        if mirror is not None:
            from aiohooks.checkpoint._remote import Copier

            self._copier = Copier(mirror, keep)
        self._mirror_may_be_newer = True
        """Whether a restore looks into the mirror as well: until this Saver has saved or restored,
        since another process may have saved before it took the lock.
        """
        # Calls get this lock in their order, so that a restore does not overtake a save. Threads
        # would get the mutex of the directory in any order.
        self._call_lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Saver({str(self.checkpoint_dir)!r})"

    @contextlib.asynccontextmanager
    async def _in_order(
        self,
        method: str,
        step: int | None,
    ) -> AsyncGenerator[None]:
        """Enter the block when the calls before this one have ended.

        A status and `why` show this call by its method and its step until the block has ended.
        """
        what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        name = f"{method} of {what} in {self.checkpoint_dir}"
        description = Awaited("checkpoint", name, ends=False)
        with active("save", name, lambda: description):
            async with self._call_lock:
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
        before this returns. Checkpoints that `keep` does not keep are removed afterwards. If that
        fails, a warning is logged and the next save tries again.

        Args:
            state: a mapping of None, bool, int, float, complex, str, bytes, list, tuple, dict
                (keys: str or int), Counter, numpy arrays and scalars, and tensors of PyTorch,
                nested to any depth up to 64. They come back equal to the last bit. An OrderedDict
                comes back as a dict, unless it is the state of a module. See docs/guides/pytorch.md
                for tensors.
            step: the global step of the state. An existing checkpoint of the same step is removed
                once the new one is durable.
            metrics: numbers by name, for `KeepBest` and for readers of the checkpoint.

        Raises:
            CheckpointError: an operation of the system failed. Nothing of this checkpoint is left,
                and earlier checkpoints are unchanged.
            MemoryError: there is too little memory. The directory is unchanged, too.
            CheckpointBusyError: another writer has the directory.
            InvalidArgumentError: something in `state` has no exact form on disk. The message names
                its place.
        """
        step = _checked_step(step)
        checked = _format.check_metrics(metrics)
        copier = self._copier
        async with self._in_order("save", step):
            least_sequence = 0 if copier is None else copier.least_sequence()
            saved = await to_thread(self._directory.save, state, step, checked, least_sequence)
            self._mirror_may_be_newer = False
            if copier is not None:
                copier.submit(saved)
            return saved

    async def add_metrics(
        self,
        step: int,
        metrics: Mapping[str, SupportsFloat],
    ) -> Checkpoint | None:
        """Add metrics to the newest checkpoint of a step, such as the result of a late evaluation.

        Checkpoints that `keep` does not keep with them are removed.

        Returns:
            The checkpoint, or None if there is none of that step.

        Raises:
            CheckpointError: an operation of the system failed, and the checkpoint is unchanged.
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
    ) -> Restored | None:
        """Read the newest intact checkpoint, or the checkpoint of a step.

        Return None if the directory has never had one, or does not exist. A missing directory or
        bucket of a mirror is an error, as it may not be mounted. Damaged checkpoints are skipped
        with a warning and set aside: renamed to `damaged-...`, never removed. The newest checkpoint
        is the checkpoint that was saved last, whatever its step. The arrays belong to you and are
        writable. If the mirror has a newer intact checkpoint, it is downloaded first,
        whole into memory and then to the directory.

        Args:
            step: the global step of the checkpoint, or None for the newest.

        Raises:
            CorruptCheckpointError: there are checkpoints, or some that were set aside before, and
                none verifies.
            CheckpointError: there is no checkpoint of that step, an operation of the system failed,
                or there is no local checkpoint and the mirror cannot be read.
            MemoryError: there is too little memory. It is no damage, so nothing is set aside.
            CheckpointBusyError: another writer has the directory. Use `read_only=True` to read
                meanwhile.
        """
        wanted = None if step is None else _checked_step(step)
        async with self._in_order("restore", wanted):
            if self._copier is None:
                return await to_thread(self._directory.restore, wanted)
            restored = await self._restore_newest(self._copier, wanted)
            if restored is not None and wanted is None:
                self._mirror_may_be_newer = False
                self._copier.submit(restored.checkpoint)  # does nothing if it is there
            return restored

    async def _restore_newest(
        self,
        copier: Copier,
        step: int | None,
    ) -> Restored | None:
        """Restore from the directory, after a download if the mirror has a newer checkpoint.

        Damaged checkpoints of the mirror are no error if there is a good one here.
        """
        restored: Restored | None = None
        failure: CheckpointError | None = None
        newest_here: Name | None = None
        names: list[Name] = []
        # What the first read has set aside is reported by the second as well.
        set_aside: list[tuple[str, str]] = []
        try:
            restored = await to_thread(self._directory.restore, step, set_aside)
        except CheckpointError as error:
            # The mirror may have what is missing or damaged here.
            if error.errno != errno.ENOENT and not isinstance(error, CorruptCheckpointError):
                raise
            failure = error
        if restored is not None:
            if not self._mirror_may_be_newer and not set_aside:
                return restored
            newest_here = _format.name_of(restored.checkpoint)
        try:
            names = await copier.newer_names(newest_here, step)
            if names:
                restored = None  # frees its memory for the download
                await self._download(copier, names)
        except MirrorError as error:
            if newest_here is None:
                raise CheckpointError(
                    errno.EIO,
                    f"there is no good checkpoint in {self.checkpoint_dir}, and the mirror"
                    f" {copier.mirror} could not be read: {error}; try again when it can be, or"
                    " restore without it",
                ) from error
            logger.warning(
                "the mirror %s could not be read (%s): continuing with step %d, the newest here",
                copier.mirror,
                error,
                newest_here.step,
            )
        except CorruptCheckpointError:
            # Those here come first: a second read returns one, or there is the error of the first.
            if newest_here is None and not set_aside:
                raise
        if failure is not None and not names:
            raise failure
        if names and restored is None:
            restored = await to_thread(self._directory.restore, step, set_aside)
        return restored

    async def _download(self, copier: Copier, names: list[Name]) -> None:
        """Write the first good one of these checkpoints of the mirror to the directory."""
        checkpoint, contents = await copier.download(names)
        await to_thread(self._directory.add_download, checkpoint, contents)

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """The state of the copies in the mirror, or None without a mirror."""
        return None if self._copier is None else self._copier.status

    async def flush_mirror(self, timeout: float | None = None) -> bool:
        """Wait until the pending checkpoints have been copied to the mirror.

        A pause between attempts ends.

        Returns:
            Whether they have been copied within `timeout` seconds. If not, a warning is logged and
            the upload continues.
        """
        check_secs(timeout, "timeout", optional=True)
        return self._copier is None or await self._copier.flush(timeout)

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, newest first.

        Only manifests are read, without the lock. Damaged checkpoints are omitted.
        """
        return await to_thread(self._directory.checkpoints)

    async def follow(
        self, *, every_secs: float, timeout: float | None = None
    ) -> AsyncGenerator[Checkpoint]:
        """Yield the newest checkpoint, and then each newer checkpoint.

        Use it with `read_only=True` for an evaluator in another process. Checkpoints that come
        between two reads, or while you are busy, are skipped.

        Args:
            every_secs: the seconds between two reads of the directory.
            timeout: end after this many seconds without a new checkpoint, or None for never.

        Raises:
            InvalidArgumentError: an argument is invalid.
        """
        check_secs(every_secs, "every_secs", positive=True)
        check_secs(timeout, "timeout", optional=True, positive=True)
        clock = current_clock()
        latest: Path | None = None
        since = clock.now()
        while timeout is None or clock.now() - since < timeout:
            checkpoints = await self.checkpoints()
            if not checkpoints or checkpoints[0].path == latest:
                await sleep(every_secs)
                continue
            latest = checkpoints[0].path
            yield checkpoints[0]
            since = clock.now()

    async def verify(self) -> list[tuple[Path, str | None]]:
        """Read every checkpoint completely, without the lock and without changing anything.

        Returns:
            The path and the damage of each checkpoint (None if it is good), newest first, then the
            checkpoints that were set aside earlier.
        """
        return await to_thread(self._directory.verify)

    async def aclose(self, *, grace_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Release the lock of the directory. Calling it again has no effect.

        This waits at most `grace_secs` for pending copies to the mirror. A warning lists the steps
        that were not copied in this time. The next `restore` copies the newest checkpoint again.
        """
        check_secs(grace_secs, "grace_secs")
        async with self._call_lock:
            try:
                if self._copier is not None:
                    await self._copier.aclose(grace_secs)
            finally:
                # Without the lock, another process may save.
                self._mirror_may_be_newer = True
                await to_thread(self._directory.close)

    async def __aenter__(self) -> Saver:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def check_tracked(
    tracked: Mapping[str, Stateful],
    state_of: Callable[[Stateful], Any],
) -> None:
    """Check that a checkpoint can hold the states of tracked objects. Write nothing.

    Raises:
        InvalidArgumentError: it cannot hold one of them. The message has its name.
    """
    # This module needs an extra.
    from aiohooks.checkpoint._encoding import encode

    states = {name: state_of(value) for name, value in tracked.items()}
    encode({"tracked": states})


def is_same(
    state: Mapping[str, Any],
    other: Mapping[str, Any],
) -> bool:
    """Return whether two states are equal to the last bit in a checkpoint."""
    from aiohooks.checkpoint._encoding import encode

    data, arrays = encode(state)
    other_data, other_arrays = encode(other)
    # Both have the same number of chunks if their first ones, the headers, are equal: a header has
    # the size of each array.
    return data == other_data and all(
        map(
            operator.eq,
            arrays.chunks(),
            other_arrays.chunks(),
        )
    )


def _checked_step(step: object) -> int:
    checked: int = checked_int(
        step,
        "step",
        most=_format.MAX_INT,
        expected=f"an int from 0 to {_format.MAX_INT}",
    )
    return checked
