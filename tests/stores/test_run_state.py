"""The state of a run, as engines keep it."""

from __future__ import annotations

import random

import pytest

from aiohooks.stores._protocol import Fail, Join, Lead, Leave, Member, Position, Request, Write
from aiohooks.stores._run_state import RunState


def test_state_as_text_is_the_same() -> None:
    """A state that was dumped and loaded has the same snapshot and gives a repeated request the same answer."""
    state = RunState()
    member = Member("p/1", "näme", 10.0)
    requests: list[Request] = [
        Write("advance", 3, Position(1, 0), 0, "p", 1),
        Join(member),
        Lead(member._replace(id="p/2")),
        Join(member._replace(id="p/2", term=1, ready=True)),
        Write("reset", 1, Position(1, 3), 1, "p", 2),
        Leave("p/1", "näme", 1, "ValueError: x"),
        Fail("no more"),
    ]
    for request in requests:
        state.apply(request)
        assert RunState.load(state.dump()).snapshot() == state.snapshot()
    assert RunState.load(state.dump()).apply(requests[0]).position == Position(2, 1)
    with pytest.raises(ValueError, match="which is not the state of a run"):
        RunState.load(b"{}")


def test_state_refuses_an_older_term() -> None:
    """There is one chief at a time; a write of an older term changes nothing, and its lease is not renewed."""
    state = RunState()
    for number in (1, 2):
        assert state.apply(Lead(Member(f"{number}/1", "chief", 1.0))).term == number
        assert state.apply(Lead(Member("x/1", "other", 1.0))).status == "busy"
        state.expire(f"{number}/1", 0)
    stale = state.apply(Write("advance", 1, Position(1, 0), 1, "1", 1))
    assert (stale.status, state.position) == ("stale", Position(1, 0))
    state.apply(Join(Member("1/1", "chief", 1.0, term=1)))
    assert not state.members
    assert state.apply(Write("advance", 1, Position(1, 0), 2, "2", 1)).position == Position(1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_repeated_request_changes_nothing(seed: int) -> None:
    """Each process repeats its requests, with those of others in between: each takes effect once."""
    draw = random.Random(seed)
    once, often = RunState(), RunState()
    last: dict[str, Request] = {}
    for number in range(1, 200):
        process = draw.choice("pqr")
        member = Member(f"{process}/1", f"trainer {process}", 10.0, draw.randrange(5))
        requests: list[Request] = [
            Write(draw.choice(["advance", "raise", "reset"]), draw.randrange(1, 9), once.position, 0, process, number),
            Join(member),
            Leave(member.id, draw.choice(["", member.name]), number, f"{number}", f"{process}/", number),
            Fail(f"{number}", f"{process}/", number),
        ]
        request = draw.choice(requests)
        last[process] = request
        answer = once.apply(request)
        assert often.apply(request) == answer
        for _ in range(draw.randrange(4)):
            again = draw.choice([*last.values()])
            answer = often.apply(again)
            assert answer.position == once.apply(again).position if isinstance(again, Write) else answer.status == "ok"
        assert often.dump() == RunState.load(often.dump()).dump()
        shown = [
            state.snapshot()._replace(members=tuple(sorted(member._replace(heartbeat=0) for member in state.members.values())))
            for state in (once, often)
        ]
        assert shown[0] == shown[1]
