"""Generators of torch in a checkpoint continue with the numbers that they would have drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiohooks as ah
from tests.checkpoint.test_encoding import there_and_back


def test_the_global_generator_continues() -> None:
    """Together with those of Python and numpy."""
    with torch.random.fork_rng():
        random_state = ah.checkpoint.RandomState()
        state = there_and_back(random_state.state_dict())
        assert list(state) == ["python", "numpy", "torch"]
        drawn = torch.rand(3).tolist()
        random_state.load_state_dict(state)
        assert torch.rand(3).tolist() == drawn


def test_a_given_generator_continues() -> None:
    """That of a data loader, for instance."""
    generator = torch.Generator().manual_seed(5)
    random_state = ah.checkpoint.RandomState(generator)
    state = there_and_back(random_state.state_dict())
    drawn = torch.randperm(10, generator=generator).tolist()
    random_state.load_state_dict(state)
    assert torch.randperm(10, generator=generator).tolist() == drawn


@pytest.mark.parametrize(("is_there", "is_used"), [(True, True), (True, False), (False, False)])
def test_generators_of_devices_continue(
    is_there: bool, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all devices, where the program has used one: asking for them would begin to use
    it.
    """
    states, given = [torch.arange(16, dtype=torch.uint8)], list[Any]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    random_state = ah.checkpoint.RandomState()
    state = there_and_back(random_state.state_dict())
    random_state.load_state_dict(state)
    assert [[each.tolist() for each in all_devices] for all_devices in given] == (
        [[states[0].tolist()]] if is_used else []
    )
