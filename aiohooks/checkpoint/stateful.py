"""Objects whose state is saved: their protocol, snapshots of states, and RandomState.

snapshot   a deep copy of a state, so that the training can continue while the copy is written
host       the machine with its memory, in contrast to a device such as a GPU
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

from aiohooks.errors import CheckpointMismatchError, InvalidArgumentError

MAX_DEPTH = 64
"""How deep a state may be nested."""


class Stateful(Protocol):
    """An object whose state is saved in checkpoints: tracked by a `Scaffold`, or a hook.

    The state is plain data: None, bool, int, float, str, bytes, numpy arrays, tensors of PyTorch,
    and lists, tuples and dicts of these.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return everything needed to continue from here. A copy of it is saved."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Continue from a state returned by `state_dict`."""


def is_stateful(value: object) -> bool:
    """Return whether `value` is an object, not a class, with both methods of `Stateful`."""
    if isinstance(value, type):
        return False
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, name, None)) for name in methods)


def is_numbered(hook: object) -> bool:
    """Return whether several hooks of a name are numbered in checkpoints.

    The state of such hooks is only when they were last due.
    """
    return bool(getattr(hook, "_numbered_state", False))


def torch_support() -> Any:
    """Return the module `_torch`, or None while the program has not imported torch.

    This never imports torch, which takes seconds: a program that has a tensor has imported it.
    """
    if sys.modules.get("torch") is None:
        return None
    return importlib.import_module("aiohooks.checkpoint._torch")


class HostMemory:
    """Memory for the tensors of snapshots, of which each may use the memory of the one before.

    To get new memory from the system takes many times longer than to copy the tensors. So the
    memory is used again, as soon as nothing refers to the snapshot before. If something still does,
    the next snapshot gets new memory.
    """

    def __init__(self) -> None:
        self._memory: Any = b""
        # Returns the memory that `take` has returned last, or None when nothing refers to it.
        self._in_use: Callable[[], memoryview | None] = lambda: None

    def take(self, size: int) -> memoryview:
        """Return memory of at least `size` bytes, in use as long as the returned object exists."""
        if len(self._memory) < size or self._in_use() is not None:
            # This frees the old memory before new memory is taken, if it is not in use.
            self._memory = b""
            self._memory = torch_support().new_memory(size)
        taken = memoryview(self._memory)
        self._in_use = weakref.ref(taken)
        return taken


def snapshot(state: Any, memory: HostMemory) -> Any:
    """Return a deep copy of a state whose tensors are in the memory of the host.

    Tensors that share memory share it there, too.
    """
    torch = torch_support()
    # The copies by the `id` of the original. `deepcopy` uses this form of a dict for objects that
    # it has copied already, and so takes the copies of the tensors from it.
    copied: dict[int, Any] = {}
    try:
        if torch is not None:
            copied = torch.host_copies(_tensors_in(state, torch, {}), memory.take)
        return copy.deepcopy(state, copied)
    except RecursionError:
        raise InvalidArgumentError(
            f"a state is nested deeper than {MAX_DEPTH} levels; flatten it",
        ) from None


def _tensors_in(
    value: Any,
    torch: Any,
    seen: dict[int, object],
) -> Iterator[Any]:
    """Yield the tensors in a value, in their order.

    `seen` has the containers that were searched, by `id`. Each is searched only once, even if the
    value has it several times, or if it contains itself.
    """
    # Another name of the value, because `isinstance` narrows the type of `value`.
    items = value
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)) and id(items) not in seen:
        seen[id(items)] = items
        if isinstance(value, Mapping):
            items = items.values()
        for item in items:
            yield from _tensors_in(item, torch, seen)


_Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""Two functions: one reads the state of a random generator, the other sets it."""


class RandomState:
    """Keeps random generators in checkpoints: `Scaffold(tracked={"random": RandomState(), ...})`.

    Without arguments these are the global generators of Python's `random`, of numpy and of torch
    (and of its CUDA devices, where CUDA is in use), as far as the program has imported them. Make
    it the last tracked object, because loading the others may draw numbers.

    A data loader that other tasks run concurrently with the steps should have its own generator and
    its own state.
    """

    def __init__(self, *generators: object) -> None:
        """Keep these generators instead of the global ones.

        Args:
            generators: instances of `random.Random`, `numpy.random.Generator` or `torch.Generator`.

        Raises:
            InvalidArgumentError: something else is given.
        """
        self._generators: dict[str, _Access] = {
            str(number): _access(generator) for number, generator in enumerate(generators)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        generators = self._generators or _global_generators()
        return {name: read() for name, (read, _) in generators.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such states.

        Raises:
            CheckpointMismatchError: they belong to other generators, or to a package that is not
                imported here.
        """
        generators = self._generators or _global_generators()
        # Only generators that were given must be in the state. A global generator that was not
        # saved, such as that of a package imported since, keeps its state.
        unknown = state.keys() - generators.keys()
        not_saved = self._generators.keys() - state.keys()
        if unknown or not_saved:
            raise CheckpointMismatchError(
                f"the checkpoint has the random states {', '.join(state)}, and RandomState has"
                f" {', '.join(generators)}; import what the program imported that saved it, and"
                " give RandomState the same generators"
            )
        for name, generator_state in state.items():
            _, write = generators[name]
            write(generator_state)


def _access(generator: Any) -> _Access:
    """Return the functions that read and set the state of a generator of `random`, torch or numpy.

    Raises:
        InvalidArgumentError: it is none of these.
    """
    # Each package has names of its own: `random` here, then torch and the global functions of
    # numpy, then a generator of numpy.
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    raise InvalidArgumentError(
        f"RandomState got {generator!r}; give instances of random.Random, numpy.random.Generator or"
        " torch.Generator"
    )


def _global_generators() -> dict[str, _Access]:
    """Return the generators of packages that the program has imported."""
    generators = {"python": _access(random)}
    numpy = cast("Any", sys.modules.get("numpy"))
    if numpy is not None:
        generators["numpy"] = _access(numpy.random)
    torch = torch_support()
    if torch is not None:
        generators["torch"] = torch.random_state, torch.set_random_state
    return generators
