"""Saving and restoring for coroutines: `Saver`.

intact   a checkpoint is intact if all of its files verify
mirror   a directory in another file system with copies of the checkpoints
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

from aiohooks._core.activity import Awaited, active
from aiohooks._core.clock import current_clock, sleep
from aiohooks._core.validate import check_checkpoint_dir, check_instance, check_secs, checked_int
from aiohooks._core.waits import DEFAULT_GRACE_SECS, to_thread
from aiohooks.checkpoint import _format
from aiohooks.checkpoint.policies import (
    Checkpoint,
    KeepNewest,
    KeepPolicy,
    Mirror,
    MirrorStatus,
    Restored,
)
from aiohooks.errors import InvalidArgumentError

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
        # Calls get this lock in their order, so that a restore does not overtake a save. The mutex
        # of the directory is not enough, because threads get it in any order.
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
            # The sequence must be later than all in the mirror. Without a mirror, 0 is no limit.
            least_sequence = 0 if copier is None else copier.least_sequence()
            saved = await to_thread(self._directory.save, state, step, checked, least_sequence)
            if copier is not None:
                # This checkpoint is newer than all in the mirror.
                copier.may_be_newer = False
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
            return await self._copier.restore(self._directory, wanted)

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
        # The sequence of the latest checkpoint that was yielded. One that is committed later has a
        # higher sequence.
        latest = 0
        # When the wait for the next checkpoint began.
        since = clock.now()
        while timeout is None or clock.now() - since < timeout:
            checkpoints = await self.checkpoints()
            if not checkpoints:
                # The directory was emptied: the sequence begins again.
                latest = 0
            if not checkpoints or checkpoints[0].sequence <= latest:
                await sleep(every_secs)
                continue
            latest = checkpoints[0].sequence
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
                await to_thread(self._directory.close)

    async def __aenter__(self) -> Saver:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def check_state(state: Mapping[str, Any]) -> None:
    """Check that a checkpoint can hold a state. Write nothing.

    Raises:
        InvalidArgumentError: a checkpoint cannot hold a value in the state. The message names its
            place.
        ImportError: the extra is missing.
    """
    from aiohooks.checkpoint._encoding import encode

    encode(state)


def is_same(
    state: Mapping[str, Any],
    other: Mapping[str, Any],
) -> bool:
    """Return whether two states are equal to the last bit in a checkpoint."""
    from aiohooks.checkpoint._encoding import encode

    chunks = itertools.chain(*encode(state).values())
    other_chunks = itertools.chain(*encode(other).values())
    # `map` ends with the shorter of both. But the first chunks are headers with the sizes of all
    # arrays: if these are equal, both have the same number of chunks.
    return all(map(operator.eq, chunks, other_chunks))


def _checked_step(step: object) -> int:
    checked: int = checked_int(
        step,
        "step",
        most=_format.MAX_INT,
        expected=f"an int from 0 to {_format.MAX_INT}",
    )
    return checked
