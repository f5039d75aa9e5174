"""The keep policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiohooks.checkpoint import Checkpoint, KeepBest, KeepNewest, KeepPolicy


def made(*steps: int, losses: Sequence[float | None] = ()) -> list[Checkpoint]:
    """Return checkpoints of these steps in the order of their commits, with a loss where one is
    given.
    """
    found: list[Checkpoint] = []
    for place, step in enumerate(steps):
        loss = losses[place] if place < len(losses) else None
        found.append(
            Checkpoint(
                step=step,
                sequence=place + 1,
                metrics=MappingProxyType({} if loss is None else {"loss": loss}),
            )
        )
    return found


def kept(policy: KeepPolicy, checkpoints: list[Checkpoint]) -> list[int]:
    """Return the sequences that a policy keeps of checkpoints in the order of their commits."""
    return sorted(checkpoint.sequence for checkpoint in policy.kept(checkpoints[::-1]))


def test_the_best_by_a_metric_and_the_newest() -> None:
    """Lower is better with "min", higher with "max"; the newer of equals; never one without a
    number.
    """
    losses = [2.0, 1.0, math.nan, None, 1.0, -math.inf, 3.0]
    these = made(*range(7), losses=losses)
    assert kept(KeepBest(2, "loss"), these) == [5, 6, 7]
    assert kept(KeepBest(1, "loss", "max"), these) == [7]
    assert kept(KeepBest(9, "loss"), these[:4]) == [1, 2, 4]
    assert kept(KeepBest(1, "accuracy"), these) == [7]


def test_policies_are_combined() -> None:
    """What any part keeps is kept."""
    these = made(0, 10, 20, 30, 40, losses=[0.1, 0.5, 0.3, 0.4, 0.9])
    both = KeepNewest(2) | KeepBest(1, "loss")
    assert kept(both, these) == [1, 4, 5]
    assert kept(both | KeepBest(1, "loss", "max"), these) == [1, 4, 5]
    assert kept(KeepBest(2, "loss") | KeepNewest(1), these) == [1, 3, 5]
    assert KeepNewest(2) | KeepNewest(1) == KeepNewest(2) | KeepNewest(1)
    with pytest.raises(TypeError, match="unsupported operand"):
        KeepNewest(2) | 3


def test_a_policy_of_ones_own_says_what_it_keeps() -> None:
    """One that does not is an error, and nothing is removed."""
    with pytest.raises(NotImplementedError):
        KeepPolicy().kept([])


POLICIES = st.recursive(
    st.one_of(
        st.integers(1, 5).map(KeepNewest),
        st.builds(KeepBest, st.integers(1, 4), st.just("loss"), st.sampled_from(["min", "max"])),
    ),
    lambda inner: st.builds(lambda one, other: one | other, inner, inner),
    max_leaves=4,
)


@given(POLICIES, st.lists(st.tuples(st.integers(0, 200), st.none() | st.floats()), max_size=20))
def test_every_policy_keeps_the_newest_and_only_existing_ones(
    policy: KeepPolicy, what: list[tuple[int, float | None]]
) -> None:
    """Applied again to what it kept, it keeps all of it."""
    these = made(*(step for step, _ in what), losses=[loss for _, loss in what])
    these.reverse()
    found = policy.kept(these)
    assert found <= set(these)
    assert not these or these[0] in found
    assert policy.kept([checkpoint for checkpoint in these if checkpoint in found]) == found
