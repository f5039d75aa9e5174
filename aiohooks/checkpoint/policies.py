"""Checkpoints, the policies that keep some of them, and the options of a mirror.

A policy is a pure function of the existing checkpoints. `|` combines two. A mirror has copies in a
file system of fsspec.

interim   said of a checkpoint where a run has stopped, and no save was due: an uninterrupted run
          would not have it
metric    a number of a checkpoint, by name, such as the loss at its step
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from aiohooks._core.validate import (
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    checked_int,
)
from aiohooks._core.waits import Backoff
from aiohooks.errors import InvalidArgumentError

INTERIM = "(interim)"
"""The name of a metric that is not one: a manifest with it belongs to an interim checkpoint."""


class FileEntry(NamedTuple):
    """The size and the checksum of a file of a checkpoint, from its manifest."""

    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk."""

    step: int
    """The global step it holds."""
    sequence: int
    """Its number in the order of commits: the newest checkpoint of a directory has the highest."""
    metrics: Mapping[str, float] = field(hash=False, default_factory=dict[str, float])
    """The metrics given to `Saver.save`. `KeepBest` compares them."""
    path: Path = Path()
    """Its directory."""
    files: Mapping[str, FileEntry] = field(hash=False, default_factory=dict[str, FileEntry])
    """The files of its state, by name: the size and the CRC-32 that each should have."""
    interim: bool = False
    """Whether it was saved where the run stopped, and was not due: the next checkpoint of the
    resumed run replaces it.
    """

    @property
    def size(self) -> int:
        """The bytes of its state."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `Saver.restore`."""

    checkpoint: Checkpoint
    """The checkpoint that was read."""
    state: dict[str, Any]
    """The saved state, equal to the last bit."""
    set_aside: tuple[tuple[str, str], ...] = ()
    """Name and reason of each damaged checkpoint that was skipped, newest first."""


class KeepPolicy:
    """Selects the checkpoints to keep. The newest is always kept.

    A policy is called when a new checkpoint is durable. Checkpoints that no part of a combination
    `a | b` keeps are removed.
    """

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics by which it selects."""
        return ()

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        """Return the checkpoints to keep among `checkpoints`, of which the newest comes first."""
        raise NotImplementedError

    def __or__(self, other: object) -> KeepPolicy:
        """Keep a checkpoint that either policy keeps."""
        return _KeepEither(self, other) if isinstance(other, KeepPolicy) else NotImplemented


def not_kept(
    policy: KeepPolicy,
    newest_first: Sequence[Checkpoint],
    saved: Checkpoint,
) -> list[Checkpoint]:
    """Return the checkpoints to remove after `saved`.

    Of each step only the newest one can be kept.
    """
    newest_of_step: dict[int, Checkpoint] = {}
    for checkpoint in newest_first:
        # Only the newest checkpoint may be interim: the run may be resumed from it. An
        # uninterrupted run would not have an older one, so the policy does not see it.
        if checkpoint == newest_first[0] or not checkpoint.interim:
            newest_of_step.setdefault(checkpoint.step, checkpoint)
    # Checkpoints are compared by their sequence. Their equality compares metrics, and one of these
    # may be NaN, which equals nothing.
    kept = {checkpoint.sequence for checkpoint in policy.kept(list(newest_of_step.values()))}
    kept.add(saved.sequence)
    return [checkpoint for checkpoint in newest_first if checkpoint.sequence not in kept]


@dataclass(frozen=True, slots=True)
class _KeepEither(KeepPolicy):
    """Keeps the checkpoints that at least one of two policies keeps."""

    first: KeepPolicy
    second: KeepPolicy

    @property
    def metrics(self) -> tuple[str, ...]:
        return *self.first.metrics, *self.second.metrics

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        return self.first.kept(checkpoints) | self.second.kept(checkpoints)


@dataclass(frozen=True, slots=True)
class KeepNewest(KeepPolicy):
    """Keeps the `n` checkpoints that were committed last.

    Raises:
        InvalidArgumentError: `n` is not an int of 1 or more.
    """

    n: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", checked_int(self.n, "n of KeepNewest", 1))

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        """Return the last `n`."""
        return set(checkpoints[: self.n])


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keeps the `k` checkpoints with the best value of a metric, and the newest.

    Of equal values the newer is better. A checkpoint whose metric is missing or NaN is never among
    the best.

    Args:
        k: the number of checkpoints to keep.
        metric: its name, as given to `save`.
        mode: "min" if lower is better, "max" if higher is.
    """

    k: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checked_int(self.k, "k of KeepBest", 1))
        check_instance(self.metric, str, "metric of KeepBest")
        check_choice(self.mode, "mode of KeepBest", "min", "max")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Its metric."""
        return (self.metric,)

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        """Return the best `k` checkpoints that are not interim, and the newest."""
        candidates = [
            checkpoint
            for checkpoint in checkpoints
            if not checkpoint.interim
            and not math.isnan(checkpoint.metrics.get(self.metric, math.nan))
        ]
        # Sorting keeps the order of equal values, also in reverse. So the newer one stays first.
        candidates.sort(
            key=lambda checkpoint: checkpoint.metrics[self.metric],
            reverse=self.mode == "max",
        )
        return {*candidates[: self.k], *checkpoints[:1]}


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
    """The state of the copies that a `Saver` makes in its mirror.

    Attributes:
        url: the mirror, without user and password.
        latest_step: the step of the checkpoint that was copied last, or found to be there, or
            None before the first.
        pending: how many are being copied or wait for it.
        failures: how many attempts have failed.
        error: why the last attempt failed, or None if it did not.
    """

    url: str
    latest_step: int | None = None
    pending: int = 0
    failures: int = 0
    error: str | None = None
