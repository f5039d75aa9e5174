"""What is done with tensors of PyTorch. Imported only where the program has imported torch
(`stateful.torch_support`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiohooks.checkpoint._format import DTYPES

_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if hasattr(torch, name)
}
"""The dtypes of this torch that a checkpoint can hold."""
# Subclasses have more than would be kept: a mesh, a scale, other tensors.
_TYPES = {Tensor, torch.nn.Parameter}
_ALIGNMENT = 64
_ELSEWHERE = "torch.distributed.checkpoint"


def is_tensor(value: object) -> bool:
    """Return whether `value` is a tensor, of any kind."""
    return isinstance(value, Tensor)


def refusal(tensor: Tensor) -> str | None:
    """Return why the files of a checkpoint cannot hold a tensor, and what to do, or None if they
    can.
    """
    kind = type(tensor)
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return (
            "is a parameter without a shape; run the module once before the session, or use "
            + _ELSEWHERE
        )
    if kind not in _TYPES:
        what = f"is of the type {kind.__module__}.{kind.__qualname__}, which one file cannot hold"
        return f"{what}; save it with {_ELSEWHERE}"
    if tensor.is_quantized:
        return f"has the quantised dtype {tensor.dtype}; give its dequantize(), or use {_ELSEWHERE}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        what = "is nested" if tensor.is_nested else f"has the layout {tensor.layout}"
        return f"{what}; give it as dense tensors, or use {_ELSEWHERE}"
    if tensor.device.type == "meta":
        return (
            "is on the meta device, so it has no values; load them before the session, or use"
            f" {_ELSEWHERE}"
        )
    if tensor.dtype not in _NAMES:
        return f"has the dtype {tensor.dtype}, which is not known here; use {_ELSEWHERE}"
    return None


def object_refusal(one: object) -> str | None:
    """Return why a module or an optimizer cannot be saved in one process, as far as its
    `state_dict` would not show it.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if isinstance(one, torch.nn.Module):
        if fsdp is not None and any(
            isinstance(part, fsdp.FullyShardedDataParallel) for part in one.modules()
        ):
            return (
                "has parts in FullyShardedDataParallel, whose shards are in several processes;"
                f" save it with {_ELSEWHERE}"
            )
    elif isinstance(one, torch.optim.Optimizer):  # which has no state before its first step
        for group in one.param_groups:
            for parameter in group["params"]:
                reason = refusal(parameter)
                if reason is not None:
                    return f"has a parameter that {reason}"
    return None


def dtype_name(tensor: Tensor) -> str:
    """Return the name of its dtype, one of `DTYPES`."""
    return _NAMES[tensor.dtype]


class Member(NamedTuple):
    """The place of a tensor in a block; strides and offset are in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int


@dataclass(slots=True, eq=False)
class Block:
    """The part of a storage that some tensors lie in, from the first of their bytes to the last:
    one array of a checkpoint.
    """

    storage: torch.UntypedStorage
    begin: int
    end: int
    members: list[Member] = field(default_factory=list[Member])

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def has_gaps(self) -> bool:
        """Whether there are bytes that may belong to no tensor."""
        return not any(_is_dense(member, self.nbytes) for member in self.members)

    def on_device(self) -> Tensor:
        """Return its bytes, where they are."""
        found = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return found.set_(self.storage, self.begin, (self.nbytes,), (1,))


def _is_dense(member: Member, nbytes: int) -> bool:
    """Return whether the elements of a tensor fill the block, in whatever order."""
    expected = member.item_size
    for stride, size in sorted(zip(member.strides, member.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return expected == nbytes


class Placed(NamedTuple):
    """A tensor in its block."""

    block: Block
    offset: int
    """In bytes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""


def place(tensors: Mapping[int, Tensor]) -> dict[int, Placed]:
    """Return where each tensor lies that a checkpoint can hold; those whose memory overlaps are in
    one block.
    """
    by_storage: dict[object, list[tuple[int, int, int, Tensor]]] = {}
    for key, given in tensors.items():
        if refusal(given) is not None:
            continue
        tensor = given.detach().resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        begin = end = int(tensor.storage_offset()) * size
        if tensor.numel():
            end += size * (
                1
                + sum(
                    (n - 1) * stride
                    for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
                )
            )
        address = storage.device, storage.data_ptr(), storage.nbytes()
        by_storage.setdefault(address, []).append((begin, end, key, tensor))
    found: dict[int, Placed] = {}
    for parts in by_storage.values():
        parts.sort(key=lambda part: part[:2])
        first = 0
        while first < len(parts):
            end, last = parts[first][1], first + 1
            while last < len(parts) and parts[last][0] < end:
                end = max(end, parts[last][1])
                last += 1
            _place_in_block(parts[first:last], end, found)
            first = last
    return found


def _place_in_block(
    parts: Sequence[tuple[int, int, int, Tensor]], end: int, found: dict[int, Placed]
) -> None:
    # So that each tensor begins at a multiple of its own item size, as views of different dtypes
    # need it.
    begin = parts[0][0] - parts[0][0] % max(tensor.element_size() for *_, tensor in parts)
    block = Block(parts[0][3].untyped_storage(), begin, end)
    for start, _, key, tensor in parts:
        size, shape, strides = tensor.element_size(), tuple(tensor.shape), tensor.stride()
        block.members.append(
            Member(start - begin, shape, tuple(size * stride for stride in strides), size)
        )
        found[key] = Placed(block, start - begin, shape, strides)


def new_memory(size: int) -> Any:
    """Return so many bytes of the host's memory, as an array of numpy."""
    return torch.empty(size, dtype=torch.uint8, device="cpu").numpy()


def host_copies(tensors: Mapping[int, Tensor], take: Callable[[int], memoryview]) -> dict[int, Any]:
    """Return copies of tensors in the memory that `take` gives, where they share it as the tensors
    do.

    Tensors that a checkpoint cannot hold are returned as they are: not each can be copied, and the
    save refuses them.
    """
    placed = place(tensors)
    offsets: dict[Block, int] = {}
    size = 0
    for one in placed.values():
        if one.block not in offsets:
            offsets[one.block] = size
            size += -(-one.block.nbytes // _ALIGNMENT) * _ALIGNMENT
    everything = torch.frombuffer(take(max(size, 1)), dtype=torch.uint8)
    host, array = everything.untyped_storage(), everything.numpy()
    for block, offset in offsets.items():
        source = block.on_device()
        if source.device.type == "cpu":
            # numpy copies with one memcpy, which is faster than `copy_`, and lets other threads run
            # meanwhile.
            array[offset : offset + block.nbytes] = source.numpy()
        else:
            everything[offset : offset + block.nbytes].copy_(source)
    copies = {
        key: _view(
            host, tensors[key].dtype, offsets[one.block] + one.offset, one.shape, one.strides
        )
        for key, one in placed.items()
    }
    return {**tensors, **copies}


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    found = torch.empty(0, dtype=dtype, device="cpu")
    return found.set_(storage, offset // dtype.itemsize, tuple(shape), tuple(strides))


def storage_of(data: Any) -> torch.UntypedStorage:
    """Return an array of bytes as the storage of tensors."""
    found = (
        torch.frombuffer(data, dtype=torch.uint8)
        if len(data)
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return found.untyped_storage()


def tensor_in(
    storage: torch.UntypedStorage,
    dtype: str,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """Return the tensor at an offset (in bytes) of a storage; several of one storage share its
    memory.
    """
    kind = getattr(torch, dtype, None)
    if kind is None:
        raise TypeError(f"this torch has no {dtype}")
    return _view(storage, kind, offset, shape, strides)


def random_state() -> dict[str, Any]:
    """Return the states of torch's own generators."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set them to what `random_state` has returned.

    Raises:
        RuntimeError: it has the state of a device that is not here.
    """
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
