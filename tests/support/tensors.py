"""Shared by the tests of torch: states with tensors of every kind, and a comparison to the last
bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from aiohooks.checkpoint._format import TORCH_DTYPES
from tests.support.checkpoint_files import same

ALL_DTYPES = sorted(name for name in TORCH_DTYPES if hasattr(torch, name))


def tensor_of(dtype: str) -> torch.Tensor:
    """Return a tensor of 3 x 5 elements with random bits."""
    kind: torch.dtype = getattr(torch, dtype)
    bits = torch.randint(
        0,
        256,
        (3 * 5 * kind.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    if dtype == "bool":
        bits %= 2
    with warnings.catch_warnings(
        category=UserWarning, action="ignore"
    ):  # complex32 is experimental
        return torch.empty(0, dtype=kind).set_(bits.untyped_storage(), 0, (3, 5), (5, 1))


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of its elements, in order."""
    plain, size = tensor.detach().resolve_conj().resolve_neg(), tensor.dtype.itemsize
    strides = [step * size for step in plain.stride()]
    # As bytes, because torch can compute nothing with some dtypes.
    found = torch.empty(0, dtype=torch.uint8).set_(
        plain.untyped_storage(), plain.storage_offset() * size, [*plain.shape, size], [*strides, 1]
    )
    return found.contiguous().numpy().tobytes()


def same_tensors(one: Any, other: Any) -> bool:
    """Return whether two states are equal, their tensors to the last bit, with dtype, shape and
    strides.
    """
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            and bits_of(one) == bits_of(other)
        )
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and list(one) == list(other)
            and all(same_tensors(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(map(same_tensors, one, other))
        )
    return same(one, other)
