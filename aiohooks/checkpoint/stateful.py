"""The protocol of objects whose state is saved."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Return whether `value` is an object, not a class, with both methods of `Stateful`."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def is_numbered(hook: object) -> bool:
    """Return whether several hooks of a name are numbered in checkpoints: their state is only when they were last due."""
    return bool(getattr(hook, "_numbered_state", False))
