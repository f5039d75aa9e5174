"""Tensors in a mirror."""

from __future__ import annotations

from pathlib import Path

import torch

from aiohooks.checkpoint import Saver
from tests.checkpoint.test_mirror import FILES
from tests.support.faulty_files import Disk


async def test_the_version_of_the_format_is_kept(tmp_path: Path) -> None:
    """A checkpoint with tensors, which has a later version than others, comes back with the same files."""
    disk = Disk()
    weights = torch.arange(4, dtype=torch.bfloat16)
    async with Saver(tmp_path / "a", mirror=disk.mirror()) as saver:
        await saver.restore()
        path = (await saver.save({"weights": weights}, 1)).path
    async with Saver(tmp_path / "b", mirror=disk.mirror()) as saver:
        restored = await saver.restore()
    assert restored is not None
    assert torch.equal(restored.state["weights"], weights)
    for file in FILES:
        assert (restored.checkpoint.path / file).read_bytes() == (path / file).read_bytes()
