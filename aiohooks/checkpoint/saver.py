"""The checkpoints of one writer, for coroutines."""

from __future__ import annotations

import importlib
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, SupportsFloat, TypeVar

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, to_thread
from aiohooks.checkpoint import _format
from aiohooks.checkpoint._directory import CheckpointDirectory
from aiohooks.checkpoint.checkpoint import Checkpoint, Restored
from aiohooks.checkpoint.policies import KeepNewest, KeepPolicy
from aiohooks.errors import InvalidArgumentError

R = TypeVar("R")

"""How long a cancelled call waits for its worker thread."""


class Saver:
    """Saves states to a directory and restores them.

    The first `save` or `restore` takes the directory for this writer alone and makes it if it is missing. It is given
    back by `aclose` or at the end of `async with`, and whenever the process ends; after that the Saver can be used again.
    Everything that blocks runs in a worker thread. A call that is cancelled waits for its thread: a cancelled `save` has
    happened as a whole or not at all. Calls of several tasks take turns.
    """

    _fs: ClassVar[Any] = os
    """Does all file operations; tests put an object of their own here, in a subclass."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        keep: KeepPolicy = KeepNewest(5),  # noqa: B008 - frozen
        min_free_bytes: int = 0,
        read_only: bool = False,
    ) -> None:
        """Touches no file yet.

        Args:
            checkpoint_dir: the directory; made, for its owner alone, when it is first needed.
            keep: which checkpoints stay after a save, such as `KeepNewest(3) | KeepBest(2, "loss")`.
            min_free_bytes: a save that would leave less than this on the disk is refused before it begins; 0 asks nothing.
            read_only: only reads, beside the one writer: takes no lock, sets nothing aside, refuses to save.

        Raises:
            InvalidArgumentError: one of them cannot be meant.
            ImportError: the extra is missing; install `aiohooks[checkpoint]`.
        """
        importlib.import_module("aiohooks.checkpoint._encoding")  # says at once what is missing, not at the first save
        if not isinstance(checkpoint_dir, (str, os.PathLike)) or not os.fspath(checkpoint_dir):
            raise InvalidArgumentError(f"checkpoint_dir is {checkpoint_dir!r}; give the path of a directory")
        if not isinstance(keep, KeepPolicy):
            raise InvalidArgumentError(
                f"keep is {keep!r}; give a policy such as KeepNewest(5) or KeepNewest(5) | KeepEvery(1000)"
            )
        if isinstance(min_free_bytes, bool) or not isinstance(min_free_bytes, int) or min_free_bytes < 0:
            raise InvalidArgumentError(f"min_free_bytes is {min_free_bytes!r}; give an int of 0 or more")
        self.checkpoint_dir: Path = Path(os.path.abspath(checkpoint_dir))
        """Where the checkpoints are, as an absolute path."""
        self._directory = CheckpointDirectory(
            self.checkpoint_dir, keep=keep, min_free_bytes=min_free_bytes, read_only=bool(read_only), fs=self._fs
        )

    def __repr__(self) -> str:
        return f"Saver({str(self.checkpoint_dir)!r})"

    async def save(
        self, state: Mapping[str, Any], step: int, *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> Checkpoint:
        """Saves a state. It is durable when this returns: a kill or a power cut does not undo it.

        Arrays are written straight from their memory, so nothing in `state` may be changed before this returns.
        Checkpoints that `keep` does not keep are removed afterwards; one that cannot be removed is named in a warning.

        Args:
            state: a mapping of None, bool, int, float, complex, str, bytes, list, tuple, dict (keys: str or int), numpy
                arrays and numbers, nested at will. They come back the same to the last bit; an OrderedDict as a dict.
            step: the global step it was taken at. If there is a checkpoint of that step already, the new one replaces it
                once it is durable.
            metrics: numbers by name, for `KeepBest` and for whoever looks.

        Raises:
            CheckpointError: the system refused something; nothing of this checkpoint is left, the earlier ones are.
            CheckpointBusyError: another writer has the directory.
            InvalidArgumentError: something in `state` has no exact form on disk; the message names its place.
        """
        step = _check_step(step)
        return await self._in_thread(self._directory.save, state, step, _format.check_metrics(metrics))

    async def restore(self, step: int | None = None) -> Restored | None:
        """Reads the newest checkpoint that verifies, or that of one step; None if there has never been one.

        Damaged ones are passed over with a warning and set aside: renamed to `damaged-...`, never removed. The newest is
        the one that was saved last, whatever its step. The arrays belong to the caller and can be written to. Takes the
        memory of the arrays twice while it runs.

        Raises:
            CorruptCheckpointError: there are checkpoints (or were, and they were set aside), and none is good.
            CheckpointError: there is none of that step, or the system refused something.
            CheckpointBusyError: another writer has the directory; `read_only=True` reads beside it.
        """
        return await self._in_thread(self._directory.restore, None if step is None else _check_step(step))

    async def checkpoints(self) -> list[Checkpoint]:
        """What there is, the newest first. Looks at the manifests only and needs no lock; damaged ones are left out."""
        return await self._in_thread(self._directory.checkpoints)

    async def verify(self) -> list[tuple[Path, str | None]]:
        """Reads every checkpoint through, without a lock and without changing anything.

        Returns:
            Path and what is wrong with it (None: it is good) of each, the newest first, then those set aside earlier.
        """
        return [(each.path, each.reason) for each in await self._in_thread(self._directory.verify)]

    async def aclose(self) -> None:
        """Gives the directory back; harmless twice."""
        await self._in_thread(self._directory.close)

    async def __aenter__(self) -> Saver:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def _in_thread(self, fn: Callable[..., R], *args: Any) -> R:
        return await to_thread(fn, *args, grace_secs=DEFAULT_GRACE_SECS)


def _check_step(step: object) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError
        found = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if not 0 <= found <= _format.LARGEST_INT:
        raise InvalidArgumentError(f"step is {step!r}; give an int from 0 to {_format.LARGEST_INT}")
    return found
