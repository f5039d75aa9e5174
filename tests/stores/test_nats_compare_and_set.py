"""Compare and set, without a server: several processes' changes against one state of a run to which all are made in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiohooks._aio.clock import LoopClock
from aiohooks.errors import StoreUnavailableError
from aiohooks.stores import Position
from aiohooks.stores._protocol import Fail, Join, Lead, Leave, Member, Request, Write
from aiohooks.stores._run_state import RunState
from aiohooks.stores.nats._compare_and_set import (
    NO_MESSAGE,
    CompareAndSet,
    ForeignMessageError,
    LatestMessage,
    decode_message,
    encode_message,
    revision_key_of,
)
from aiohooks.testing import ManualClock


class Kept:
    """What a server keeps: the newest message; it tells who listens, and can lose answers, news and data."""

    def __init__(self, clock: Any = None) -> None:
        self.seq = 0
        self.data = b""
        self.listeners: list[CompareAndSet] = []
        self.answers_to_lose = 0
        self.news_to_lose = 0
        self.publishes = self.fetches = self.losses = 0
        self.states: list[RunState] = []
        self.clock = clock or ManualClock()

    def commits(self, process: str, on_latest: Any = None) -> CompareAndSet:
        async def fetch(secs: float) -> LatestMessage:
            self.fetches += 1
            seq, data = self.seq, self.data
            await asyncio.sleep(0)
            return decode_message(seq, data) if data else NO_MESSAGE

        async def publish(data: bytes, after: int) -> int | None:
            self.publishes += 1
            await asyncio.sleep(0)
            if after != self.seq:
                return None
            self.seq += 1
            seq, self.data = self.seq, data
            self.states.append(decode_message(seq, data).state)
            if self.news_to_lose:
                self.news_to_lose -= 1
            else:
                for each in self.listeners:
                    each.receive(seq, data, True)
            await asyncio.sleep(0)
            if self.answers_to_lose:
                self.answers_to_lose -= 1
                raise StoreUnavailableError("the answer was lost")
            return seq

        def lost() -> None:
            self.losses += 1

        commits = CompareAndSet(
            self.clock,
            process,
            fetch=fetch,
            publish=publish,
            on_latest=on_latest or (lambda latest, before: None),
            on_data_lost=lost,
        )
        self.listeners.append(commits)
        return commits


async def apply(commits: CompareAndSet, request: Request) -> Any:
    """As a store does: again, when there was no answer."""
    while True:
        try:
            return await commits.update(lambda state: state.apply(request), 1.0)
        except StoreUnavailableError:
            await asyncio.sleep(0)


def write(writer: str, seq: int, amount: int = 1, **other: Any) -> Write:
    return Write(
        **{"kind": "advance", "amount": amount, "floor": Position(1, 0), "term": 0, "writer": writer, "seq": seq, **other}
    )


async def test_all_that_race_are_counted_once() -> None:
    """Writers of several processes who always collide lose nothing and count nothing twice, also when answers are lost."""
    kept = Kept(LoopClock())  # who has lost three times in a row makes a pause
    processes = {name: kept.commits(name) for name in "abcde"}
    kept.answers_to_lose = 20

    async def work(name: str) -> list[int]:
        return [(await apply(processes[name], write(name, seq))).position.step for seq in range(1, 41)]

    steps = await asyncio.gather(*map(work, processes))
    assert sorted(step for each in steps for step in each) == list(range(1, 201))
    assert kept.states[-1].position == Position(1, 200)


async def test_changes_that_wait_are_made_together() -> None:
    """What is asked for while a change is on its way is one message, whatever it is."""
    kept = Kept()
    commits = kept.commits("a")
    await asyncio.gather(
        *(apply(commits, write(f"w{number}", 1)) for number in range(30)), apply(commits, Join(Member("a/1", "one", 1.0)))
    )
    assert kept.publishes <= 2
    assert kept.states[-1].position.step == 30
    assert list(kept.states[-1].members) == ["a/1"]


async def test_a_change_that_changes_nothing_is_not_sent() -> None:
    """A repeated write, and one that is refused, cost no message."""
    kept = Kept()
    commits = kept.commits("a")
    first = await apply(commits, write("a", 1))
    assert await apply(commits, write("a", 1)) == first
    await apply(commits, Lead(Member("a/1", "chief", 1.0)))
    sent = kept.publishes
    assert (await apply(commits, Lead(Member("b/1", "chief", 1.0)))).status == "busy"
    assert kept.publishes == sent


async def test_a_cancelled_change_leaves_the_others_alone() -> None:
    """Cancelling the one that was sending makes the next one send; each of the others is made once."""
    for ticks in range(8):
        kept = Kept()
        commits = kept.commits("a")
        tasks = [asyncio.ensure_future(apply(commits, write(f"w{number}", 1))) for number in range(4)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        made = kept.states[-1].position.step
        assert made in (3, 4), ticks
        assert all(f"w{number}" in kept.states[-1].answers for number in (1, 2, 3))


async def test_news_that_were_lost_are_read() -> None:
    """Who was not told that somebody was faster reads it, and makes his change to that."""
    kept = Kept()
    a, b = kept.commits("a"), kept.commits("b")
    await apply(a, write("a", 1))
    kept.news_to_lose = 1
    await apply(a, write("a", 2))
    assert (await apply(b, write("b", 1))).position.step == 3


async def test_data_that_was_lost_is_noticed() -> None:
    """An older message, or one of another life of the run, is told of; the writer's floor lifts the step."""
    kept = Kept()
    a, b = kept.commits("a"), kept.commits("b")
    await apply(a, write("a", 1, 10))
    old = kept.seq, kept.data
    await apply(a, write("a", 2, 10))
    kept.seq, kept.data = old
    assert (await apply(a, write("a", 3, 1, floor=Position(1, 20)))).position.step == 21
    assert kept.losses == 1
    await b.refresh(1.0)
    kept.seq, kept.data = 0, b""
    assert (await apply(a, write("a", 4, 1, floor=Position(1, 21)))).position.step == 22
    assert kept.losses == 3  # both have noticed
    a.reset()
    await a.refresh(1.0)
    assert kept.losses == 3


@pytest.mark.parametrize("first", ["who repeats", "who heard"])
async def test_a_write_that_was_heard_of_is_not_done_again(first: str) -> None:
    """A write's answer is lost, and then the server's data: repeated, it is counted once, whoever comes back first."""
    kept = Kept()
    a, b = kept.commits("a"), kept.commits("b")
    await apply(a, write("a", 1, 10))
    assert kept.listeners.pop(0) is a  # its link is cut
    kept.answers_to_lose = 1
    with pytest.raises(StoreUnavailableError):
        await a.update(lambda state: state.apply(write("a", 2, 3)), 1.0)
    kept.seq, kept.data, kept.listeners = 0, b"", [a, b]
    a.reset()
    b.reset()
    repeated, lifted = write("a", 2, 3, floor=Position(1, 10)), write("b", 1, 0, kind="raise", floor=Position(1, 13))
    pair = [(a, repeated), (b, lifted)]
    for commits, request in pair if first == "who repeats" else reversed(pair):
        await apply(commits, request)
    assert kept.states[-1].position == Position(1, 13)
    assert (await apply(a, write("a", 3, 1))).position.step == 14


async def test_a_lease_is_judged_by_ones_own_clock() -> None:
    """A member whose heartbeat does not change for its time is taken out, not earlier, and not by its own process."""
    kept = Kept()
    a, b = kept.commits("a"), kept.commits("b")
    await apply(a, Join(Member("a/1", "one", 2.0)))
    assert a.snapshot().expires_secs is None
    assert b.snapshot().expires_secs == 2.0
    kept.clock.advance(1.5)
    await apply(a, Join(Member("a/1", "one", 2.0)))
    assert b.snapshot().expires_secs == 2.0
    kept.clock.advance(1.9)
    await b.remove_expired(1.0)
    assert b.snapshot().members
    kept.clock.advance(0.2)
    assert b.snapshot().expires_secs == 0.0
    await a.remove_expired(1.0)
    assert b.snapshot().members
    await b.remove_expired(1.0)
    snapshot = b.snapshot()
    assert not snapshot.members
    assert snapshot.last_exit is not None
    assert (snapshot.last_exit.name, snapshot.last_exit.lost) == ("one", True)


async def test_nobody_is_taken_for_dead_after_an_outage() -> None:
    """Nobody could be heard meanwhile: everybody's time begins anew."""
    kept = Kept()
    a, b = kept.commits("a"), kept.commits("b")
    await apply(a, Join(Member("a/1", "one", 2.0)))
    kept.clock.advance(100.0)
    b.reset()
    await b.refresh(1.0)
    await b.remove_expired(1.0)
    assert b.snapshot().members


async def test_only_what_matters_is_looked_into() -> None:
    """Of messages that came together only the newest is read, unless more than the step has changed."""
    heard: list[int] = []
    kept = Kept()
    commits = kept.commits("b", lambda head, before: heard.append(head.seq))
    state = RunState()
    commits.receive(1, encode_message(b"life", state), True)
    for seq in range(2, 6):
        state.position = Position(1, seq)
        commits.receive(seq, encode_message(b"life", state), seq == 5)
    assert heard == [1, 5]
    state.apply(Fail("x"))
    commits.receive(6, encode_message(b"life", state), False)
    commits.receive(4, encode_message(b"life", state), True)
    assert heard == [1, 5, 6]


async def test_what_is_not_read_at_once_is_still_checked() -> None:
    """Of a message in which the step alone has changed the rest is read by who needs it; one that lies is found out then."""
    kept = Kept()
    commits = kept.commits("a")
    await apply(commits, write("a", 1))
    start, _, _ = kept.data.partition(b" {")
    kept.seq, kept.data = 2, start.replace(b" 1.1", b" 1.7") + b" {lies}"
    commits.receive(2, kept.data, True)
    assert commits.latest is not None
    assert commits.latest.position == Position(1, 7)
    with pytest.raises(ForeignMessageError, match="begins with"):
        await commits.update(lambda state: state.apply(write("a", 2)), 1.0)
    with pytest.raises(ForeignMessageError, match="begins with"):
        await commits.refresh(1.0)


members = st.builds(
    Member,
    id=st.sampled_from(["a/1", "a/2", "b/1"]),
    name=st.sampled_from(["x", "y z"]),
    ttl=st.sampled_from([1.0, 5.0]),
    waits_for=st.integers(0, 3),
    term=st.integers(0, 2),
    ready=st.booleans(),
    heartbeat=st.just(0),
)
requests = st.one_of(
    st.builds(
        Write,
        kind=st.sampled_from(["advance", "raise", "reset"]),
        amount=st.integers(1, 50),
        floor=st.builds(Position, st.integers(1, 3), st.integers(0, 50)),
        term=st.integers(0, 2),
        writer=st.sampled_from(["a", "b"]),
        seq=st.integers(1, 5),
    ),
    st.builds(Join, members),
    st.builds(Lead, members),
    st.builds(
        Leave,
        id=st.sampled_from(["a/1", "b/1"]),
        name=st.sampled_from(["", "x"]),
        step=st.integers(0, 9),
        error=st.sampled_from(["", "e"]),
        writer=st.sampled_from(["a/", "b/"]),
        seq=st.integers(0, 3),
    ),
    st.builds(Fail, error=st.just("e"), writer=st.sampled_from(["a/", "b/"]), seq=st.integers(0, 3)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), requests), max_size=25))
def test_it_does_what_the_state_of_a_run_does(asked: list[tuple[bool, Request]]) -> None:
    """Requests of two processes, one after the other, have the same answers and the same state as made to it directly."""

    async def play() -> None:
        kept = Kept()
        a, b = kept.commits("a"), kept.commits("b")
        model = RunState()
        for first, request in asked:
            assert await apply(a if first else b, request) == model.apply(request)
            if kept.states:
                assert kept.states[-1].dump() == model.dump()
                assert (a.latest or NO_MESSAGE).data == kept.data

    asyncio.run(play())


def test_a_message_of_somebody_else_is_refused() -> None:
    """A subject that others write to is said to be so."""
    assert (
        revision_key_of(encode_message(b"abc", RunState()))
        == LatestMessage(1, encode_message(b"abc", RunState())).revision_key
        == (b"abc", b"0.0")
    )
    good = encode_message(b"a", RunState())
    strange = (b"", b"hello", b"2" + good[1:], good[:-1], b"1 a 0.0 1.0 {}", b"1 a 0.0 1.0 [1]", b"1 a 0.0 1 {}", b"\xff x y z a")
    for data in strange:
        assert revision_key_of(b"") == (b"", b"")
        with pytest.raises(ForeignMessageError, match=rf"a message of {len(data)} bytes"):
            decode_message(1, data)
