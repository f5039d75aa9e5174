"""Which checkpoints are kept: pure functions of what there is, combined with `|`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from aiohooks.checkpoint.checkpoint import Checkpoint
from aiohooks.errors import InvalidArgumentError


class KeepPolicy:
    """Says which checkpoints stay. The newest one always stays, whatever a policy says.

    A policy is asked after a new checkpoint is durable; what no part of a combination `a | b` keeps is removed.
    """

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        """The ones to keep of those there are, in whatever order they come; looks at nothing else."""
        raise NotImplementedError

    def __or__(self, other: object) -> KeepPolicy:
        """Keeps what either of the two keeps."""
        return _KeepEither(self, other) if isinstance(other, KeepPolicy) else NotImplemented


@dataclass(frozen=True, slots=True)
class _KeepEither(KeepPolicy):
    """What `a | b` is."""

    one: KeepPolicy
    other: KeepPolicy

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        return self.one.kept(checkpoints) | self.other.kept(checkpoints)


@dataclass(frozen=True, slots=True)
class KeepNewest(KeepPolicy):
    """Keeps the `n` checkpoints that were committed last.

    Raises:
        InvalidArgumentError: `n` is not an int of 1 or more.
    """

    n: int = 5

    def __post_init__(self) -> None:
        _check_count(self.n, "n of KeepNewest")

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        """The last `n`."""
        return set(_newest_first(checkpoints)[: self.n])


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keeps the `k` checkpoints with the best value of a metric; of equal ones the newer.

    One without the metric, or where it is not a number, is never among the best.

    Args:
        k: how many.
        metric: the name under which it was given to `save`.
        mode: "min" if less is better, "max" if more is.

    Raises:
        InvalidArgumentError: one of them cannot be meant.
    """

    k: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_count(self.k, "k of KeepBest")
        if not isinstance(self.metric, str) or not self.metric:
            raise InvalidArgumentError(f"metric of KeepBest is {self.metric!r}; give the name of a metric given to save")
        if self.mode not in ("min", "max"):
            raise InvalidArgumentError(f"mode of KeepBest is {self.mode!r}; give 'min' or 'max'")

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        """The best `k`, and the newest."""
        newest_first = _newest_first(checkpoints)
        known = [each for each in newest_first if not math.isnan(each.metrics.get(self.metric, math.nan))]
        sign = 1 if self.mode == "min" else -1
        known.sort(key=lambda each: sign * each.metrics[self.metric])
        return {*known[: self.k], *newest_first[:1]}


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keeps for ever the first checkpoint at or after each multiple of `steps`, and the newest.

    Raises:
        InvalidArgumentError: `steps` is not an int of 1 or more.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_count(self.steps, "steps of KeepEvery")

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[Checkpoint]:
        """The first one of each stretch of `steps`, and the newest."""
        newest_first = _newest_first(checkpoints)
        first: dict[int, Checkpoint] = {}
        for each in newest_first:
            stretch = each.step // self.steps
            if stretch not in first or each.step < first[stretch].step:
                first[stretch] = each
        return {*first.values(), *newest_first[:1]}


def _newest_first(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda each: (each.sequence, each.step), reverse=True)


def _check_count(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{what} is {value!r}; give an int of 1 or more")
