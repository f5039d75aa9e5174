"""Objects whose state is saved: their protocol, and snapshots of states, with tensors of PyTorch where the program has them."""

from __future__ import annotations

import copy
import importlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast

from aiohooks.errors import InvalidArgumentError

MAX_DEPTH = 64
"""How deep a state may be nested."""


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


def torch_support() -> Any:
    """Return the module `_torch`, or None while the program has not imported torch: who has a tensor has imported it."""
    return None if sys.modules.get("torch") is None else importlib.import_module("aiohooks.checkpoint._torch")


class HostMemory:
    """Memory for the tensors of one snapshot after the other.

    Memory that is new takes the system many times longer than the copy. It is used again when nothing refers to the snapshot
    before; until then the next snapshot gets new memory.
    """

    def __init__(self) -> None:
        self._memory: Any = None
        self._in_use: weakref.ref[memoryview] | None = None

    def take(self, size: int) -> memoryview:
        """Return so many bytes at least, which are in use as long as the returned object is."""
        if self._memory is None or len(self._memory) < size or (self._in_use is not None and self._in_use() is not None):
            self._memory = None  # first of all, so that there are not two
            self._memory = torch_support().new_memory(size)
        taken = memoryview(self._memory)
        self._in_use = weakref.ref(taken)
        return taken


def snapshot(state: Any, memory: HostMemory) -> Any:
    """Return a deep copy of a state whose tensors are in the memory of the host; those that share memory share it there too."""
    torch = torch_support()
    copied: dict[int, Any] = {}  # by identity, as `deepcopy` notes what it has copied
    if torch is not None:
        copied = torch.host_copies({id(tensor): tensor for tensor in tensors_in(state, torch)}, memory.take)
    try:
        return copy.deepcopy(state, copied)
    except RecursionError:
        raise InvalidArgumentError(f"a state is nested deeper than {MAX_DEPTH} levels; flatten it") from None


def tensors_in(state: Any, torch: Any) -> Iterator[Any]:
    """Yield the tensors, in their order. A container counts only one time, however often it is there, or in itself."""
    seen: dict[int, object] = {}
    waiting: list[Iterator[Any]] = [iter((state,))]
    while waiting:
        value = next(waiting[-1], waiting)
        if value is waiting:
            waiting.pop()
        elif torch.is_tensor(value):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(cast("object", value)) not in seen:
            seen[id(cast("object", value))] = value
            items = cast("Iterable[Any]", value.values() if isinstance(value, Mapping) else value)
            waiting.append(iter(items))
