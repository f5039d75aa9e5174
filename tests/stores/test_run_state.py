"""The state of a run, as engines keep it."""

from __future__ import annotations

import pytest

from aiohooks.stores._protocol import (
    Expire,
    Join,
    Lead,
    Leave,
    Member,
    Position,
    Request,
    Snapshot,
    Write,
)
from aiohooks.stores.engine import RunState


def test_state_as_text_is_the_same() -> None:
    """A state that was dumped and loaded has the same snapshot and gives a repeated request the
    same answer.
    """
    state = RunState()
    member = Member("p/1", "näme", 10.0)
    requests: list[Request] = [
        Write("advance", 3, Position(1, 0), 0, "p", 1),
        Join(member),
        Lead(member._replace(id="p/2")),
        Join(member._replace(id="p/2", term=1, ready=True)),
        Write("reset", 1, Position(1, 3), 1, "p", 2),
        Leave("p/1", "näme", 1, "ValueError: x"),
    ]
    for request in requests:
        state.apply(request)
        assert RunState.load(state.dump()).snapshot() == state.snapshot()
    assert RunState.load(state.dump()).apply(requests[0]).position == Position(2, 1)
    good = state.dump()
    for data in (
        b"{}",
        good.replace(b"10.0", b"0.0"),
        good.replace(b"10.0", b"NaN"),
        good.replace(b"[2,1]", b"[2,%d]" % 2**53),
    ):
        with pytest.raises(ValueError, match="which is not the state of a run"):
            RunState.load(data)


def test_state_refuses_an_older_term() -> None:
    """There is one chief at a time; a write of an older term changes nothing, and its lease is not
    renewed.
    """
    state = RunState()
    for number in (1, 2):
        assert state.apply(Lead(Member(f"{number}/1", "chief", 1.0))).term == number
        assert state.apply(Lead(Member("x/1", "other", 1.0))).status == "busy"
        state.apply(Expire(f"{number}/1", 0))
    stale = state.apply(Write("advance", 1, Position(1, 0), 1, "1", 1))
    assert (stale.status, state.position) == ("stale", Position(1, 0))
    state.apply(Join(Member("1/1", "chief", 1.0, term=1)))
    assert not state.members
    assert state.apply(Write("advance", 1, Position(1, 0), 2, "2", 1)).position == Position(1, 1)


# --- after a loss


def test_who_knew_a_lost_run_does_not_move_one_that_has_a_chief() -> None:
    """A chief that knows nothing has begun at step 0: its step stays."""
    state = RunState()
    state.apply(Lead(Member("new/1", "chief", 1.0)))
    state.follow(Snapshot(Position(1, 7), 1, "new"))
    assert state.position == Position(2, 0)
