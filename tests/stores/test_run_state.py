"""The state of a run, as engines keep it."""

from __future__ import annotations

import json
import random

import pytest

from aiohooks.stores._protocol import (
    Expire,
    Fail,
    Join,
    Lead,
    Leave,
    Member,
    Position,
    Request,
    Write,
)
from aiohooks.stores._run_state import RunState


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
        Fail("no more"),
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


def test_a_state_of_an_older_version_is_read() -> None:
    """It says nothing of a leader, or of a loss."""
    state = RunState()
    for request in (Write("advance", 3, Position(1, 0), 0, "p", 1), Leave("p/1", "a")):
        state.apply(request)
    fields = json.loads(state.dump())
    for name in (
        "leader",
        "recovered",
        "unconfirmed",
        "gone",
        "recovered_exits",
        "recovered_revision",
    ):
        del fields[name]
    assert RunState.load(json.dumps(fields).encode()).dump() == state.dump()


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


@pytest.mark.parametrize("seed", range(20))
def test_a_repeated_request_changes_nothing(seed: int) -> None:
    """Each process repeats its requests, with those of others in between: each takes effect
    once.
    """
    draw = random.Random(seed)
    once, often = RunState(), RunState()
    last: dict[str, Request] = {}
    for number in range(1, 200):
        process = draw.choice("pqr")
        member = Member(f"{process}/1", f"trainer {process}", 10.0, draw.randrange(5))
        requests: list[Request] = [
            Write(
                draw.choice(["advance", "raise", "reset"]),
                draw.randrange(1, 9),
                once.position,
                0,
                process,
                number,
            ),
            Join(member),
            Leave(
                member.id,
                draw.choice(["", member.name]),
                number,
                f"{number}",
                f"{process}/",
                number,
            ),
            Fail(f"{number}", f"{process}/", number),
        ]
        request = draw.choice(requests)
        last[process] = request
        answer = once.apply(request)
        assert often.apply(request) == answer
        for _ in range(draw.randrange(4)):
            again = draw.choice([*last.values()])
            answer = often.apply(again)
            assert (
                answer.position == once.apply(again).position
                if isinstance(again, Write)
                else answer.status == "ok"
            )
        assert often.dump() == RunState.load(often.dump()).dump()
        shown = [
            state.snapshot()._replace(
                members=tuple(
                    sorted(member._replace(heartbeat=0) for member in state.members.values())
                )
            )
            for state in (once, often)
        ]
        assert shown[0] == shown[1]


# --- after a loss


def led_by(process: str, *, lost_exits: int = 0) -> RunState:
    """A run at step 7 with a chief in its second term, a publisher, and some exits."""
    state = RunState()
    state.apply(Lead(Member("old/1", "old chief", 1.0)))
    state.apply(Expire("old/1", 0))
    state.apply(Lead(Member(f"{process}/1", "chief", 1.0)))
    state.apply(Join(Member(f"{process}/2", "trainer", 1.0)))
    for number in range(lost_exits):
        state.apply(Leave("x/1", f"warm-up {number}", number))
    state.apply(Write("advance", 7, Position(1, 0), 2, process, 1))
    return state


def recovered(known: dict[str, RunState], state: RunState | None = None) -> RunState:
    """A run that was lost, after each process has said what it knows."""
    state = state or RunState()
    for process, its in known.items():
        state.recover(process, its.snapshot(), its.answers)
    return state


def restored_at(step: int) -> RunState:
    """A lost run in which a new chief has restored an earlier step, and made one more."""
    state = RunState()
    state.apply(Lead(Member("new/1", "new chief", 1.0)))
    state.apply(Write("reset", step - 1, Position(1, 0), 1, "new", 1))
    state.apply(Write("advance", 1, Position(2, step - 1), 1, "new", 2))
    return state


@pytest.mark.parametrize("epoch", [1, 2, 5])
def test_a_reset_since_the_loss_counts(epoch: int) -> None:
    """Who comes back later with a higher step sees it as a reset: the chief that restored an
    earlier one continues there.
    """
    known, state = RunState(), restored_at(4)
    known.position = Position(epoch, 7)
    for process in ("p", "q", "p"):
        state.recover(process, known.snapshot(), {})
        assert state.position == Position(epoch + 1, 4)
    state.apply(Write("reset", 2, state.position, 1, "new", 3))
    state.recover("r", known.snapshot(), {})
    assert state.position == Position(epoch + 2, 2)
    assert RunState.load(state.dump()).resets == 2


def test_a_reset_by_a_chief_that_was_none_does_not_count() -> None:
    """The chief from before the loss continues at its own step; the one that led meanwhile is
    refused.
    """
    known, state = led_by("p"), restored_at(4)
    state.recover("p", known.snapshot(), known.answers)
    assert state.position == Position(3, 7)
    assert state.apply(Write("advance", 1, Position(2, 4), 1, "new", 3)).status == "stale"
    state.recover("q", known.snapshot(), known.answers)
    assert state.position == Position(3, 7)


def test_an_older_copy_has_no_reset_since_the_loss() -> None:
    """Of the copy and what processes know, the higher position counts."""
    known, state = restored_at(9), restored_at(4)
    state.mark_older()
    state.recover("p", known.snapshot(), known.answers)
    assert state.position == Position(2, 9)


@pytest.mark.parametrize("order", ["p", "q", "pq", "qp", "qpq"])
def test_a_lost_run_is_recovered_from_those_who_know_it(order: str) -> None:
    """By one, or more in any order, also repeated: terms, exits, answers and members are as before,
    the next ones newer.
    """
    lost = led_by("p", lost_exits=3)
    state = RunState()
    for process in order:
        state.recover(process, lost.snapshot(), lost.answers)
    assert state.position == Position(1, 7)
    assert state.last_exit == lost.last_exit
    assert {id: member.term for id, member in state.members.items()} == {"p/1": 2, "p/2": 0}
    assert state.apply(Lead(Member("q/1", "standby", 1.0))).status == "busy"
    assert state.apply(Write("advance", 7, Position(1, 0), 2, "p", 1)).position == Position(1, 7)
    state.apply(Expire("p/1", state.members["p/1"].heartbeat))
    assert state.apply(Lead(Member("q/1", "standby", 1.0))).term == 3
    assert state.apply(Write("advance", 1, Position(1, 0), 2, "p", 2)).status == "stale"
    assert state.exits == lost.exits + 1


@pytest.mark.parametrize("initialised", [False, True])
def test_what_was_initialised_before_the_loss_is_initialised(initialised: bool) -> None:
    """Any process that knows it is enough; it is not so for a chief that has taken over since."""
    lost, newer = led_by("p"), RunState()
    lost.apply(Join(lost.members["p/1"]._replace(ready=initialised)))
    assert recovered({"q": lost}).snapshot().ready is initialised
    for _ in range(3):
        newer.apply(Lead(Member("new/1", "new chief", 1.0)))
        newer.apply(Leave("new/1"))
    assert not recovered({"q": lost}, newer).snapshot().ready


@pytest.mark.parametrize("process", ["p", "q"])
def test_a_chief_of_a_lost_run_and_a_newer_one_never_both_write(process: str) -> None:
    """A process that knew nothing was granted a term before the others came back: of two chiefs one
    at most can write.
    """
    lost = led_by("p")
    for terms in (1, 2, 3):
        state = RunState()
        for number in range(1, terms + 1):
            state.apply(Lead(Member(f"new/{number}", "new chief", 1.0)))
            if number < terms:
                state.apply(Leave(f"new/{number}"))
        recovered({process: lost}, state)
        writes = [
            Write("advance", 1, Position(1, 0), 2, "p", 5),
            Write("advance", 1, Position(1, 0), terms, "new", 5),
        ]
        assert [state.apply(write).status for write in writes] == (
            ["ok", "stale"] if terms < 2 else ["stale", "ok"]
        )
        assert sum(bool(member.term) for member in state.members.values()) == 1


def test_an_exit_after_the_loss_is_the_last_one() -> None:
    """It gets a higher number than any exit from before, and an exit from before never takes its
    place.
    """
    state = RunState()
    state.apply(Leave("new/1", "new trainer", 9, "ValueError: ill", "new/", 1))
    for known in (led_by("p", lost_exits=1), led_by("p", lost_exits=5), led_by("p", lost_exits=3)):
        state.recover("q", known.snapshot(), known.answers)
        assert state.last_exit is not None
        assert state.last_exit.name == "new trainer"
        assert known.last_exit is not None
        assert state.last_exit.number > known.last_exit.number
    state.apply(Leave("new/1", "new trainer", 9, "ValueError: ill", "new/", 1))
    assert state.exits == 7


def test_a_member_that_has_left_does_not_come_back() -> None:
    """Who knows less recent news of a member than others, or than its own process, does not bring
    it back.
    """
    before = led_by("p")
    after = before.copy()
    after.apply(Leave("p/2", "trainer", 7, "", "p/", 1))
    for order in (("q", before), ("r", after)), (("r", after), ("q", before)):
        state = recovered(dict(order))
        assert list(state.members) == ["p/1"], order
    own = after.snapshot()._replace(revision=0)
    for first in (True, False):
        state = RunState()
        if first:
            state.recover("p", own, after.answers)
        state.recover("q", before.snapshot(), before.answers)
        if not first:
            state.recover("p", own, after.answers)
        assert list(state.members) == ["p/1"], first


def test_a_member_that_was_found_dead_since_the_loss_does_not_come_back() -> None:
    """A process that says late what it knows does not bring it back, to be found dead again; the
    member itself may come back.
    """
    lost = led_by("p")
    state = recovered({"q": lost})
    for member in tuple(state.members.values()):
        state.apply(Expire(member.id, member.heartbeat))
    exits = state.exits
    state = RunState.load(state.dump())
    state.recover("r", lost.snapshot(), lost.answers)
    assert not state.members
    assert state.exits == exits
    state.recover("p", lost.snapshot(), lost.answers)
    assert state.members.keys() == lost.members.keys()
    older = state.copy()
    older.mark_older()  # in which nothing is known of what was found since
    older.recover("r", state.snapshot(), state.answers)
    assert older.members.keys() == lost.members.keys()


def test_a_process_with_older_news_removes_no_member() -> None:
    """It does not know the member that others know, and that has not been announced again."""
    before = RunState()
    after = led_by("p")
    state = recovered({"q": after, "r": before})
    assert state.members.keys() == after.members.keys()
    state.recover("p", after.snapshot(), after.answers)
    assert state.members.keys() == after.members.keys()


@pytest.mark.parametrize("seed", range(20))
def test_a_recovered_state_as_text_is_the_same(seed: int) -> None:
    """What a run remembers of its recovery is kept with it."""
    draw = random.Random(seed)
    state, text = RunState(), RunState()
    for _ in range(6):
        process, known = (
            draw.choice("pqr"),
            led_by(draw.choice("pqr"), lost_exits=draw.randrange(4)),
        )
        state.recover(process, known.snapshot(), known.answers)
        text = RunState.load(text.dump())
        text.recover(process, known.snapshot(), known.answers)
        assert text.dump() == state.dump()


def test_a_failure_is_recovered_unless_there_is_a_newer_one() -> None:
    """What was reported before the loss is known again; a process that knows of none changes
    nothing.
    """
    failed, healthy = led_by("p"), led_by("q")
    failed.apply(Fail("no more"))
    state = recovered({"q": healthy, "p": failed, "r": healthy})
    assert state.failure is not None
    assert state.failure.error == "no more"
    newer = RunState()
    newer.apply(Fail("since the loss"))
    assert recovered({"p": failed}, newer).failure == newer.failure
    assert newer.failure is not None
    assert newer.failure.error == "since the loss"


def test_an_older_copy_has_nothing_from_after_the_loss() -> None:
    """Its exits come before those that a process knows, and who has left since is no member any
    more.
    """
    state = RunState()
    for number, name in enumerate(("first", "second", "third"), 1):
        state.apply(Join(Member(f"{name}/1", name, 10.0)))
        state.apply(Leave(f"{name}/1", name, number, "", f"{name}/", 1))
        recovered({"r": state}, state)  # the engine has lost its data before
        state.apply(Join(Member(f"{name} too/1", name, 10.0)))
        if number == 1:
            copy = state.copy()
            state.apply(Leave(f"{name} too/1", name, number, "", f"{name} too/", 1))
    copy.mark_older()
    for process in ("p", "r"):
        copy.recover(process, state.snapshot(), state.answers)
        assert copy.last_exit == state.last_exit
        assert copy.members.keys() == state.members.keys()


def test_what_is_recovered_is_a_new_revision() -> None:
    """It is newer than any before the loss, so that every process takes note; who says nothing new
    changes nothing.
    """
    lost = led_by("p", lost_exits=3)
    state = recovered({"q": lost})
    assert (revision := state.revision) > lost.revision
    state.recover("q", lost.snapshot(), lost.answers)
    assert state.revision == revision


def test_an_older_copy_gets_back_the_members_of_all_processes() -> None:
    """Also those of a process that has said what it knows after an earlier loss."""
    older = recovered({"p": led_by("p")})
    state = older.copy()
    state.apply(Join(Member("p/3", "second trainer", 1.0)))
    older.mark_older()
    older.recover("q", state.snapshot(), state.answers)
    assert older.members.keys() == state.members.keys()
