"""The values that describe checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

INTERIM = "(interim)"
"""The metric by which a manifest says that a checkpoint is an interim one."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk."""

    step: int
    """The global step it holds."""
    sequence: int
    """Its number in the order of commits: the newest checkpoint of a directory has the highest."""
    metrics: Mapping[str, float] = field(hash=False, default_factory=lambda: MappingProxyType({}))
    """The metrics given to `Saver.save`; `KeepBest` compares them."""
    path: Path = Path()
    """Its directory."""
    size: int = 0
    """The bytes of its state."""
    interim: bool = False
    """Whether it was saved where the run stopped, and was not due: the next one of the resumed run replaces it."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `Saver.restore`."""

    checkpoint: Checkpoint
    """The checkpoint that was read."""
    state: dict[str, Any]
    """The saved state, equal to the last bit."""
    set_aside: tuple[tuple[str, str], ...] = ()
    """Name and reason of each damaged checkpoint that was skipped, newest first."""
