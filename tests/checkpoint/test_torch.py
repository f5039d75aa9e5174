"""Tensors come back as tensors, equal to the last bit; those that share memory share it afterwards;
others are refused.
"""

from __future__ import annotations

import collections
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from aiohooks.checkpoint import _encoding, _torch
from aiohooks.checkpoint._format import DamagedError
from aiohooks.checkpoint.stateful import HostMemory, snapshot
from aiohooks.errors import InvalidArgumentError
from tests.checkpoint.test_encoding import decode, encoded, header_of, there_and_back
from tests.support.checkpoint_files import directory
from tests.support.source import ROOT
from tests.support.tensors import ALL_DTYPES, same_tensors, tensor_of
from tests.support.waiting import HANG_SECS

GOLDEN = ROOT / "tests" / "checkpoint" / "data" / "checkpoint-torch"


def taken(state: Any) -> Any:
    """Return a snapshot of a state."""
    return snapshot(state, HostMemory())


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.tensor([3.0]).expand(10**12), 4),
        (torch.arange(3.0)[:, None].expand(3, 10**10)[::2], 12),
        (torch.arange(40.0).as_strided((10**5, 3), (0, 13)), 160),
        (torch.arange(2000, dtype=torch.int16)[::2].as_strided((500, 500), (2, 2)), 4000),
    ],
    ids=["one element", "rows", "rows that are one", "windows"],
)
def test_a_tensor_that_is_larger_than_its_memory_costs_its_memory(
    tensor: torch.Tensor, size: int
) -> None:
    """The elements that are the same ones are not looked at one by one."""
    data, stored = encoded({"x": tensor})
    assert len(stored) - 8 - len(header_of(stored)) == size
    found = decode(data, stored)["x"]
    assert (found.shape, found.stride()) == (tensor.shape, tensor.stride())
    assert torch.equal(found[..., :3], tensor[..., :3])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_views_of_any_memory(data: st.DataObject) -> None:
    """Whatever the sizes, strides, offsets and dtypes of views of a few storages are."""
    storages = [torch.randint(0, 256, (96,), dtype=torch.uint8) for _ in range(2)]
    state: dict[str, Any] = {}
    for number in range(data.draw(st.integers(1, 6))):
        dtype = data.draw(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
        )
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        strides = data.draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape)))
        room = 96 // dtype.itemsize - (
            1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        )
        if room >= 0 or 0 in shape:
            storage = data.draw(st.sampled_from(storages)).untyped_storage()
            offset = data.draw(st.integers(0, max(0, min(room, 20))))
            state[str(number)] = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
    for way in (there_and_back, taken):
        found = way(state)
        assert same_tensors(found, state)
        for tree in (
            found,
            state,
        ):  # a change of one tensor is seen in the others that share its memory
            for tensor in tree.values():
                tensor[(slice(None, 1),) * tensor.dim()].fill_(1)
        assert same_tensors(found, state)


class Elsewhere(torch.Tensor):
    """Stands in for a tensor on a device: numpy cannot see its memory."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_tensors_of_a_device_are_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each to its own place."""
    here = _torch._bytes_of
    monkeypatch.setattr(_torch, "_bytes_of", lambda memory: here(memory).as_subclass(Elsewhere))
    state = {"a": torch.randn(7), "b": torch.arange(5), "c": torch.randn(2, 3).T}
    assert same_tensors(taken(state), state)


def test_other_programs_can_read_the_tensors(tmp_path: Path) -> None:
    """The reader of safetensors finds them under their place in the state, with their dtypes where
    it has a name for them.
    """
    state = {
        "model": {
            name: tensor_of(name)
            for name in ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool")
        }
    }
    (tmp_path / "file").write_bytes(encoded(state)[1])
    found = safetensors.torch.load_file(tmp_path / "file")
    assert same_tensors(
        {key.removeprefix("model/"): value for key, value in sorted(found.items())},
        dict(sorted(state["model"].items())),
    )


def test_states_of_modules_keep_their_versions() -> None:
    """By them a module of a later torch knows how to read the state of an earlier one."""
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    found = there_and_back({"model": taken(state)})["model"]
    assert type(found) is collections.OrderedDict
    assert vars(found) == vars(state)  # `_metadata`
    assert same_tensors(found, state)


def test_lazy_conjugates_and_negatives_come_back() -> None:
    """A tensor whose memory has other values than the tensor is stored as what it stands for."""
    number = torch.randn(4, dtype=torch.complex64)
    found = there_and_back(taken({"a": number.conj(), "b": number.conj().imag}))
    assert found["a"].tolist() == number.conj().tolist()
    assert found["b"].tolist() == number.conj().imag.tolist()


# What one file cannot hold


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def dtensor() -> DTensor:
    """A tensor whose parts would be in several processes."""
    return distribute_tensor(torch.randn(4), init_device_mesh("cpu", (1,)), [Shard(0)])


class Marked(torch.Tensor):
    """A subclass, which has more than its values."""


def quantised() -> torch.Tensor:
    """A tensor of integers with a scale."""
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # it is deprecated
        return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    """A tensor of rows of different lengths."""
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # it is a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "dtensor": (
        dtensor,
        "is a tensor of the type DTensor, .*, which one file cannot hold",
    ),
    "subclass": (
        lambda: torch.zeros(3).as_subclass(Marked),
        "is a tensor of the type Marked",
    ),
    "quantised": (quantised, "is a tensor .* torch.qint8,"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "is a tensor .* torch.sparse_coo,"),
    "nested": (nested, "is a tensor"),
    "meta": (lambda: torch.empty(3, device="meta"), "is a tensor .* meta, which"),
    "lazy": (
        lambda: torch.nn.LazyLinear(3).weight,
        "is a tensor of the type UninitializedParameter",
    ),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused(kind: str) -> None:
    """The message names the place, and torch.distributed.checkpoint."""
    make, message = REFUSED[kind]
    state = {"model": {"weight": make()}}
    with pytest.raises(
        InvalidArgumentError,
        match=rf"^state\['model'\]\['weight'\] {message}.*torch.distributed.checkpoint$",
    ):
        _encoding.encode(taken(state))


# Where torch is not imported


def run(program: str, *arguments: str) -> str:
    """Run a program, and return what it printed."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(
        command, cwd=ROOT, check=True, timeout=HANG_SECS, text=True, stdout=subprocess.PIPE
    ).stdout


def test_checkpoints_of_arrays_do_not_import_torch(tmp_path: Path) -> None:
    """Importing the library, saving and restoring arrays, and listing checkpoints with tensors, go
    without torch.
    """
    program = """
        import asyncio, sys
        import numpy as np
        import aiohooks as ah
        from aiohooks.__main__ import main

        async def both():
            async with ah.checkpoint.Saver(sys.argv[1]) as saver:
                random = ah.checkpoint.RandomState().state_dict()
                await saver.save({"a": np.arange(3), "random": random}, 1)
                await saver.restore()

        asyncio.run(both())
        assert main(["checkpoints", sys.argv[2]]) == 0
        assert "torch" not in sys.modules
    """
    assert ": good, " in run(program, str(tmp_path), str(GOLDEN))


def golden_state() -> dict[str, Any]:
    """Return a state with tensors of each dtype, views of one memory and the state of a module."""
    weights = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    module = torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.5, -0.0]))
    return {
        "dtypes": {name: tensor_of(name) for name in ALL_DTYPES},
        "views": [weights, weights.T, weights[1:, ::2], weights.view(torch.int32)[2]],
        "module": module.state_dict(),
        "counter": collections.Counter({2: 1, 7: 3}),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's, once in a process
def test_files_with_tensors_are_read() -> None:
    """The files in the repository are read as the state that they were made from."""
    restored = directory(GOLDEN, read_only=True).restore(None)
    assert restored is not None
    assert same_tensors(restored.state, golden_state())
    assert type(restored.state["counter"]) is collections.Counter


def test_the_same_bytes_are_written(tmp_path: Path) -> None:
    """By every torch."""
    golden = next(GOLDEN.glob("step-*"))
    for file in golden.iterdir():
        assert (write(tmp_path / file.name).path / file.name).read_bytes() == file.read_bytes(), (
            file.name
        )


def test_without_torch_tensors_are_read_as_bytes() -> None:
    """A program that has not imported torch gets the memory of each tensor."""
    program = """
        import sys
        from pathlib import Path
        import numpy as np
        from tests.support.checkpoint_files import directory

        state = directory(Path(sys.argv[1]), read_only=True).restore(None).state
        assert "torch" not in sys.modules
        print(state["dtypes"]["bfloat16"].view(np.uint16).astype(np.uint64).sum())
    """
    bits = tensor_of("bfloat16").view(torch.uint16).to(torch.int64)
    assert run(program, str(GOLDEN)).strip() == str(int(bits.sum()))


# Files with the right checksums that no writer makes


def test_states_that_no_writer_makes_are_refused() -> None:
    """Checksums do not prove that a writer of ours made a file: no tensor reaches outside of its
    array.
    """
    data, file = encoded({"x": torch.arange(12, dtype=torch.int32).reshape(3, 4)[:, 1:]})

    def tree(*items: Any, code: int = 6) -> bytes:
        return msgspec.msgpack.encode(
            {"x": msgspec.msgpack.Ext(code, msgspec.msgpack.encode(list(items)))}
        )

    good = ("x", "int32", [3, 3], [4, 1], 1)
    assert data == tree(*good)
    wrong: list[tuple[Any, ...]] = [
        ("y", *good[1:]),
        (1, *good[1:]),
        ("x", "float31", *good[2:]),
        ("x", None, *good[2:]),
        ("x", "int64", *good[2:]),
        ("x", "__class__", *good[2:]),
        ("x", "qint8", *good[2:]),
        ("x", "int32", [3, 4], [4, 1], 1),
        (*good[:3], [4, 2], 0),
        (*good[:3], [4, -1], 0),
        (*good[:3], [4], 0),
        (*good[:3], None, 0),
        (*good[:4], 4),
        (*good[:4], -4),
        (*good[:4], None),
        (*good[:4], True),
        good[:3],
        good[:4],
        good[:2],
        (),
        ("x", "int32", [2**62, 2**62], [0, 0], 0),
        ("x", "int32", [3, 3], [2**62, 1], 0),
    ]
    for items in wrong:
        with pytest.raises(DamagedError):
            decode(tree(*items), file)
    _, empty = encoded({})
    for state in (
        tree(code=7),
        tree({}, code=8),
        tree([1], 2, code=8),
        tree({}, 1, 2, code=8),
    ):
        with pytest.raises(DamagedError):
            decode(state, empty)


def write(path: Path) -> Any:
    """Save the golden state."""
    run_directory = directory(path)
    try:
        return run_directory.save(golden_state(), 12, {})
    finally:
        run_directory.close()


if __name__ == "__main__":  # writes the files again; only before the release of a new version
    print(write(GOLDEN))
    (GOLDEN / ".lock").unlink()
