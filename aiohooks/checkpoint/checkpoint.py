"""What is said of a checkpoint without its contents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol


class Stateful(Protocol):
    """An object whose state is kept in a checkpoint: tracked through a `Scaffold`, or a hook.

    The state is plain data: None, bool, int, float, str, bytes, numpy arrays, and lists, tuples and dicts of these.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Everything that is needed to go on from here; a copy of it is saved."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Goes on from a state that `state_dict` gave."""
        ...


def is_stateful(value: object) -> bool:
    """Whether `value` has both methods."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


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
