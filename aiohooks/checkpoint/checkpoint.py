"""The values that describe checkpoints, and the protocol of objects whose state is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol


class Stateful(Protocol):
    """An object whose state is saved in checkpoints: tracked by a `Scaffold`, or a hook.

    The state is plain data: None, bool, int, float, str, bytes, numpy arrays, tensors of PyTorch, and lists, tuples and dicts
    of these.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return everything needed to continue from here; a copy of it is saved."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Continue from a state returned by `state_dict`."""
        ...


def is_stateful(value: object) -> bool:
    """Return whether `value` has both methods of `Stateful`."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


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


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `Saver.restore`."""

    checkpoint: Checkpoint
    """The checkpoint that was read."""
    state: dict[str, Any]
    """The saved state, equal to the last bit."""
    set_aside: tuple[tuple[str, str], ...] = ()
    """Name and reason of each damaged checkpoint that was skipped, newest first."""
