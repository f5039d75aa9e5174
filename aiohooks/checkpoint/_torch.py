"""Tensors of PyTorch: copies, and memory as bytes.

This module is imported only where the program has imported torch (`stateful.torch_support`).

storage   the memory of a tensor; several tensors may have parts of the same storage
host      the machine with its memory, in contrast to a device such as a GPU
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import is_tensor as is_tensor

from aiohooks.checkpoint._format import TORCH_DTYPES

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in TORCH_DTYPES if hasattr(torch, name)
}
"""The dtypes of this torch that a checkpoint can hold."""
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Other subclasses of `Tensor` have more than its values, such as a mesh, a scale or other tensors,
# which would be lost.
_TYPES = {Tensor, torch.nn.Parameter}
_ALIGNMENT = 64


def refusal(tensor: Tensor) -> str | None:
    """Return why the files of a checkpoint cannot hold a tensor, or None if they can."""
    # Tensors on the meta device, such as parameters of a lazy module, have no values.
    can_be_stored = (
        type(tensor) in _TYPES
        and tensor.dtype in NAMES
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_nested
    )
    if can_be_stored:
        return None
    return (
        f"is a tensor of the type {type(tensor).__qualname__}, {tensor.dtype}, {tensor.layout},"
        f" {tensor.device}, which one file cannot hold; give dense tensors with values, or use"
        " torch.distributed.checkpoint"
    )


def as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has its values, without its graph of gradients.

    A conjugated or negated tensor of torch has the memory of the original, and only a flag.
    """
    return tensor.detach().resolve_conj().resolve_neg()


def storage_address(tensor: Tensor) -> object:
    """Return the identity of the memory of a tensor.

    Other memory may have the same address after the storage is freed.
    """
    storage = tensor.untyped_storage()
    return storage.device, storage.data_ptr(), storage.nbytes()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the bytes of a storage, on its device."""
    return tensor_in(storage, "uint8", 0, (storage.nbytes(),), (1,))


def host_bytes(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage: its own memory if that is the host's, otherwise a copy."""
    data: Any = _bytes_of(storage).cpu().numpy()
    return memoryview(data)


def new_memory(size: int) -> Any:
    """Return new memory of the host with `size` bytes, as an array of numpy."""
    return torch.empty(size, dtype=torch.uint8, device="cpu").numpy()


def host_copies(
    tensors: Iterable[Tensor],
    take: Callable[[int], memoryview],
) -> dict[int, Any]:
    """Return copies of tensors by their `id`, in the memory that `take` gives.

    Shared memory stays shared. Tensors that a checkpoint cannot hold are returned as they are: a
    copy may be impossible, and the save rejects them.
    """
    # Each tensor itself, until it is replaced by its copy.
    copies = {id(tensor): tensor for tensor in tensors}
    # The tensors that are copied, by the `id` of the original; and the bytes of their storages,
    # each once, even if several tensors share it.
    stored = {key: as_stored(value) for key, value in copies.items() if refusal(value) is None}
    sources = {
        storage_address(value): _bytes_of(value.untyped_storage()) for value in stored.values()
    }
    # The copies of all storages lie one after another in one memory.
    offsets: dict[object, int] = {}
    size = 0
    for address, source in sources.items():
        offsets[address] = size
        # The size is rounded up to a multiple of the alignment.
        size += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = take(size)
    host_storages = {
        address: _copy_to(_host_part(memory, offsets[address], source.nbytes), source)
        for address, source in sources.items()
    }
    for key, tensor in stored.items():
        copies[key] = tensor_in(
            host_storages[storage_address(tensor)],
            NAMES[tensor.dtype],
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
        )
    return copies


def _copy_to(host: Tensor, source: Tensor) -> torch.UntypedStorage:
    """Copy bytes to the memory of the host, and return the storage of that memory."""
    if source.device.type == "cpu":
        # numpy copies with one memcpy, which is faster than `copy_`, and lets other threads run
        # meanwhile.
        host.numpy()[:] = source.numpy()
    else:
        host.copy_(source)
    return host.untyped_storage()


def _host_part(memory: memoryview, offset: int, size: int) -> Tensor:
    """Return a part of memory as a tensor of bytes, with a storage of its own."""
    # `frombuffer` rejects an empty part.
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(
        memory,
        dtype=torch.uint8,
        offset=offset,
        count=size,
    )


def storage_of(data: Any) -> torch.UntypedStorage:
    """Return an array of bytes as the storage of tensors."""
    return _host_part(data, 0, len(data)).untyped_storage()


def tensor_in(
    storage: torch.UntypedStorage,
    dtype: str,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """Return the tensor at an offset (in elements) of a storage.

    Raises:
        RuntimeError: it does not lie in the storage.
        ValueError: this torch has no such dtype.
    """
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise ValueError(f"this torch has no {dtype}")
    empty = torch.empty(0, dtype=kind, device=storage.device)
    return empty.set_(storage, offset, shape, strides)


def random_state() -> dict[str, Any]:
    """Return the states of torch's own generators."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the states of torch's own generators to those that `random_state` has returned.

    Raises:
        RuntimeError: `state` has the state of a device that is not here.
    """
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
