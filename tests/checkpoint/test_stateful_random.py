"""Generators in a checkpoint continue with the numbers that they would have drawn."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.errors import CheckpointMismatchError, InvalidArgumentError
from tests.checkpoint.test_encoding import there_and_back
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave the global generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def test_the_global_generators_continue() -> None:
    """Those of Python and numpy, also in the middle of a pair of normal numbers."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.standard_normal())]

    draw()
    random_state = ah.checkpoint.RandomState()
    state = there_and_back(random_state.state_dict())
    drawn = [draw() for _ in range(3)]
    random_state.load_state_dict(state)
    assert [draw() for _ in range(3)] == drawn


def test_given_generators_continue() -> None:
    """In their order, and the global ones are left alone."""
    python, numpy = random.Random(1), np.random.default_rng(2)
    random_state = ah.checkpoint.RandomState(python, numpy)
    state = there_and_back(random_state.state_dict())
    drawn = [python.random(), numpy.random()]
    before = random.getstate()
    random_state.load_state_dict(state)
    assert [python.random(), numpy.random()] == drawn
    assert random.getstate() == before


def test_other_generators_are_refused() -> None:
    """A state of other generators is not loaded in part."""
    one, other = (
        ah.checkpoint.RandomState(random.Random(1)),
        ah.checkpoint.RandomState(random.Random(1), random.Random(2)),
    )
    with pytest.raises(
        CheckpointMismatchError,
        match="has the random states 0, 1, and RandomState has 0;",
    ):
        one.load_state_dict(other.state_dict())
    with pytest.raises(CheckpointMismatchError, match="has the random states python, "):
        one.load_state_dict(ah.checkpoint.RandomState().state_dict())
    before = random.getstate()
    with pytest.raises(
        CheckpointMismatchError,
        match="has the random states 0, and RandomState has python",
    ):
        ah.checkpoint.RandomState().load_state_dict(one.state_dict())
    with pytest.raises(CheckpointMismatchError, match="has the random states python, jax, and"):
        ah.checkpoint.RandomState().load_state_dict(
            {"python": random.Random(5).getstate(), "jax": 1}
        )
    assert random.getstate() == before


def test_what_is_no_generator_is_refused() -> None:
    """A seed is not."""
    for wrong in (5, None):
        with pytest.raises(InvalidArgumentError, match="give instances of random"):
            ah.checkpoint.RandomState(wrong)
    with pytest.raises(
        InvalidArgumentError,
        match=(
            r"tracked\['r'\] .* such as checkpoint.RandomState\(generator\) for a random generator"
        ),
    ):
        ah.Scaffold(tracked={"r": random.Random()})  # type: ignore[dict-item]


def test_the_class_in_place_of_the_object_is_refused() -> None:
    """A class has the methods as well, and no state."""
    with pytest.raises(
        InvalidArgumentError,
        match=r"tracked\['r'\] is <class .*RandomState'>; give a name and an object with",
    ):
        ah.Scaffold(tracked={"r": ah.checkpoint.RandomState})  # type: ignore[dict-item]


def test_nothing_is_imported_for_it() -> None:
    """A program without numpy has the state of Python's generator alone."""
    program = """
        import sys
        import aiohooks as ah
        assert list(ah.checkpoint.RandomState().state_dict()) == ["python"]
        assert "numpy" not in sys.modules and "torch" not in sys.modules
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, check=True, timeout=HANG_SECS
    )
