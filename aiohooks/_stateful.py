"""What has a state that a checkpoint keeps: the two methods, in the manner of torch and of most data loaders."""

from __future__ import annotations

from collections.abc import Mapping
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
