"""Tensors of PyTorch in a state, without importing torch: who has a tensor has imported it already."""

from __future__ import annotations

import copy
import importlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from aiohooks.errors import InvalidArgumentError

MAX_DEPTH = 64
"""How deep a state may be nested."""


class TensorDtype(NamedTuple):
    """How elements of a dtype of torch are stored."""

    array: str
    """The dtype of numpy that the tensor is read as where torch is not imported: the same, or else the bits as integers."""
    native: str | None = None
    """The name that safetensors has for it; without one, plain bytes are stored."""


DTYPES: Mapping[str, TensorDtype] = {
    "bool": TensorDtype("|b1", "BOOL"),
    "uint8": TensorDtype("|u1", "U8"),
    "int8": TensorDtype("|i1", "I8"),
    "uint16": TensorDtype("<u2", "U16"),
    "int16": TensorDtype("<i2", "I16"),
    "uint32": TensorDtype("<u4", "U32"),
    "int32": TensorDtype("<i4", "I32"),
    "uint64": TensorDtype("<u8", "U64"),
    "int64": TensorDtype("<i8", "I64"),
    "float16": TensorDtype("<f2", "F16"),
    "float32": TensorDtype("<f4", "F32"),
    "float64": TensorDtype("<f8", "F64"),
    "complex64": TensorDtype("<c8"),
    "complex128": TensorDtype("<c16"),
    "bfloat16": TensorDtype("<u2", "BF16"),
    "complex32": TensorDtype("<u4"),
    "float8_e4m3fn": TensorDtype("|u1", "F8_E4M3"),
    "float8_e5m2": TensorDtype("|u1", "F8_E5M2"),
    **dict.fromkeys(
        ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"],
        TensorDtype("|u1"),
    ),
    **{f"{kind}{bits}": TensorDtype("|u1") for kind in ("int", "uint") for bits in range(1, 8)},
    "bits16": TensorDtype("<u2"),
}
"""By the name in torch. Quantised ones are not among them: their elements mean nothing without a scale."""


def torch_support() -> Any:
    """Return the module `_torch`, or None while the program has not imported torch."""
    return None if sys.modules.get("torch") is None else importlib.import_module("aiohooks.checkpoint._torch")


class HostMemory:
    """Memory for the tensors of one snapshot after the other.

    Memory that is new takes the system many times longer than the copy. It is used again when nothing refers to the snapshot
    before; until then the next snapshot gets new memory.
    """

    def __init__(self) -> None:
        self._memory: Any = None
        self._in_use: weakref.ref[memoryview] | None = None

    def take(self, size: int, torch: Any) -> memoryview:
        """Return so many bytes at least, which are in use as long as the returned object is."""
        if self._memory is None or len(self._memory) < size or (self._in_use is not None and self._in_use() is not None):
            self._memory = None  # first of all, so that there are not two
            self._memory = torch.new_memory(size)
        taken = memoryview(self._memory)
        self._in_use = weakref.ref(taken)
        return taken


def snapshot(state: Any, memory: HostMemory) -> Any:
    """Return a deep copy of a state whose tensors are in the memory of the host; those that share memory share it there too."""
    torch = torch_support()
    copied: dict[int, Any] = {}  # by identity, as `deepcopy` notes what it has copied
    if torch is not None:
        copied = torch.host_copies({id(tensor): tensor for tensor in tensors_in(state, torch)}, memory)
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
