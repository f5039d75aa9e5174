"""What is said of a checkpoint without its contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any


def _no_metrics() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint on disk: the step it was taken at, its place in the order of commits, its metrics and where it is."""

    step: int
    """The global step it holds."""
    sequence: int
    """The newest checkpoint of a directory is the one with the highest."""
    metrics: Mapping[str, float] = field(hash=False, default_factory=_no_metrics)
    """What was measured when it was taken; `KeepBest` goes by it."""
    path: Path = Path()
    """Its own directory."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` found: the state, and what it had to pass over."""

    checkpoint: Checkpoint
    """The checkpoint that was taken."""
    state: dict[str, Any]
    """What was saved, equal to the last bit."""
    set_aside: tuple[tuple[str, str], ...] = ()
    """Name and reason of each damaged checkpoint that was passed over, the newest first."""
