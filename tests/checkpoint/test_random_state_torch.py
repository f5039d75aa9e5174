"""Generators of torch in a checkpoint continue with the numbers that they would have drawn."""

from __future__ import annotations

import torch

import aiohooks as ah
from tests.checkpoint.test_encoding import there_and_back


def test_the_global_generator_continues() -> None:
    """Together with those of Python and numpy."""
    with torch.random.fork_rng():
        one = ah.checkpoint.RandomState()
        state = there_and_back(one.state_dict())
        assert list(state) == ["python", "numpy", "torch"]
        drawn = torch.rand(3).tolist()
        one.load_state_dict(state)
        assert torch.rand(3).tolist() == drawn


def test_a_given_generator_continues() -> None:
    """That of a data loader, for instance."""
    generator = torch.Generator().manual_seed(5)
    one = ah.checkpoint.RandomState(generator)
    state = there_and_back(one.state_dict())
    drawn = torch.randperm(10, generator=generator).tolist()
    one.load_state_dict(state)
    assert torch.randperm(10, generator=generator).tolist() == drawn
