"""The compare-and-set loop without a server: updates of several processes against one `RunState` that gets them in turn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiohooks.errors import StoreRefusedError, StoreUnavailableError
from aiohooks.stores import Position
from aiohooks.stores._protocol import Fail, Lead, Member, Request, Write
from aiohooks.stores._run_state import RunState
from aiohooks.stores.nats._compare_and_set import (
    NO_MESSAGE,
    CompareAndSet,
    ForeignMessageError,
    LatestMessage,
    decode_message,
    encode_message,
)
from aiohooks.testing import ManualClock


class FakeSubject:
    """The subject of a run in a server: it republishes each message, and can lose answers, republished messages and data."""

    def __init__(self, clock: Any = None) -> None:
        self.seq = 0
        self.data = b""
        self.refused_text: str | None = None
        self.listeners: list[CompareAndSet] = []
        self.answers_to_lose = 0
        self.republished_to_lose = 0
        self.publishes = self.fetches = self.losses = 0
        self.states: list[RunState] = []
        self.clock = clock or ManualClock()

    def run_of(self, process: str, on_latest: Any = None) -> CompareAndSet:
        async def fetch(secs: float) -> LatestMessage:
            self.fetches += 1
            seq, data = self.seq, self.data
            await asyncio.sleep(0)
            return decode_message(seq, data) if data else NO_MESSAGE

        async def publish(data: bytes, after: int) -> int | None:
            self.publishes += 1
            await asyncio.sleep(0)
            if self.refused_text is not None and self.refused_text.encode() in data:
                raise StoreRefusedError("the message is too large")
            if after != self.seq:
                return None
            self.seq += 1
            seq, self.data = self.seq, data
            self.states.append(decode_message(seq, data).state)
            if self.republished_to_lose:
                self.republished_to_lose -= 1
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

        run = CompareAndSet(
            self.clock,
            fetch=fetch,
            publish=publish,
            on_latest=on_latest or (lambda latest, before: None),
            on_data_lost=lost,
            recover=lambda state, backup: state.recover(process, backup.snapshot(), backup.answers),
        )
        self.listeners.append(run)
        return run


async def apply(run: CompareAndSet, request: Request) -> Any:
    """Apply a request as a store does: again, if there was no answer."""
    while True:
        try:
            return await run.update(lambda state: state.apply(request), 1.0)
        except StoreRefusedError:
            raise
        except StoreUnavailableError:
            await asyncio.sleep(0)


def write(writer: str, seq: int, amount: int = 1, **other: Any) -> Write:
    return Write(
        **{"kind": "advance", "amount": amount, "floor": Position(1, 0), "term": 0, "writer": writer, "seq": seq, **other}
    )


async def test_an_update_without_effect_is_not_sent() -> None:
    """A repeated write and a refused request cost no message."""
    subject = FakeSubject()
    run = subject.run_of("a")
    first = await apply(run, write("a", 1))
    assert await apply(run, write("a", 1)) == first
    await apply(run, Lead(Member("a/1", "chief", 1.0)))
    sent = subject.publishes
    assert (await apply(run, Lead(Member("b/1", "chief", 1.0)))).status == "busy"
    assert subject.publishes == sent


async def test_a_lost_republished_message_is_read() -> None:
    """A process that missed a faster message reads it, and applies its update to that."""
    subject = FakeSubject()
    a, b = subject.run_of("a"), subject.run_of("b")
    await apply(a, write("a", 1))
    subject.republished_to_lose = 1
    await apply(a, write("a", 2))
    assert (await apply(b, write("b", 1))).position.step == 3


async def test_lost_data_is_noticed() -> None:
    """An older message, or one of another run id, is reported; the writer's floor raises the step."""
    subject = FakeSubject()
    a, b = subject.run_of("a"), subject.run_of("b")
    await apply(a, write("a", 1, 10))
    old = subject.seq, subject.data
    await apply(a, write("a", 2, 10))
    subject.seq, subject.data = old
    assert (await apply(a, write("a", 3, 1, floor=Position(1, 20)))).position.step == 21
    assert subject.losses == 2  # both processes
    await b.refresh(1.0)
    subject.seq, subject.data = 0, b""
    assert (await apply(a, write("a", 4, 1, floor=Position(1, 21)))).position.step == 22
    assert subject.losses == 3  # the other one is still about to give the server what it knew before the first loss
    a.reset()
    await a.refresh(1.0)
    assert subject.losses == 3


async def test_only_the_last_of_several_messages_is_decoded() -> None:
    """Of messages that arrive together only the last is decoded, unless more than the position has changed."""
    latest: list[int] = []
    subject = FakeSubject()
    run = subject.run_of("b", lambda message, before: latest.append(message.seq))
    state = RunState()
    run.receive(1, encode_message(b"id", state), True)
    for seq in range(2, 6):
        state.position = Position(1, seq)
        run.receive(seq, encode_message(b"id", state), seq == 5)
    assert latest == [1, 5]
    state.apply(Fail("x"))
    run.receive(6, encode_message(b"id", state), False)
    run.receive(4, encode_message(b"id", state), True)
    assert latest == [1, 5, 6]


@pytest.mark.parametrize("ahead", [1, 1000])
@pytest.mark.parametrize("stored", [True, False])
async def test_a_state_that_is_decoded_later_is_still_checked(ahead: int, stored: bool) -> None:
    """A message in which only the position has changed is decoded when needed: damage is found then, unless others made it up."""
    subject = FakeSubject()
    run = subject.run_of("a")
    await apply(run, write("a", 1))
    cut = subject.data.replace(b" 1.1 ", b" 1.7 ").replace(b'"position":[1,1],', b'"position":[1,7],')[:-3]
    if stored:
        subject.seq, subject.data = subject.seq + ahead, cut
    run.receive(1 + ahead, cut, True)
    assert run.latest is not None
    assert run.latest.position == Position(1, 7)
    if not stored:
        assert (await run.update(lambda state: state.apply(write("a", 2)), 1.0)).position.step == 2
        assert (subject.fetches, subject.losses) == (2, 0)
        return
    with pytest.raises(ForeignMessageError, match="begins with"):
        await run.update(lambda state: state.apply(write("a", 2)), 1.0)
    run.reset()
    with pytest.raises(ForeignMessageError, match="begins with"):
        await run.refresh(1.0)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("seq", [1, 2, 10**9])
async def test_what_others_publish_does_not_hide_what_the_server_publishes(seq: int, first: bool) -> None:
    """After a message that looks like one of the server's, with a number of its own, the next real one is noticed."""
    subject = FakeSubject()
    a, b = subject.run_of("a"), subject.run_of("b")
    await apply(a, write("a", 1))
    foreign = subject.data if seq > 1 else subject.data.replace(b"1.1 ", b"1.0 ").replace(b"[1,1],", b"[1,0],")
    subject.listeners.remove(b)
    await apply(a, write("a", 2))
    for number, data in [(seq, foreign), (2, subject.data)][:: 1 if first else -1]:
        b.receive(number, data, data is foreign or first)
    assert subject.losses == 1  # the store connects again, and compares
    assert (await apply(b, write("b", 1))).position.step == 3


def test_a_foreign_message_is_refused() -> None:
    """A message that no store has written raises an error that shows it."""
    good = encode_message(b"a", RunState())
    strange = [b"", b"hello", b"2" + good[1:], good[:-1], b"1 a 0.0 1.0 {}", b"1 a 0.0 1.0 [1]", b"1 a 0.0 1 {}", b"\xff x y z a"]
    strange += [good.replace(b" 1.0 ", b" 1.%b " % step) for step in (b"7", b"-1", b"9" * 5000)]
    strange += [_at(step) for step in (2**53, 2**70)]
    strange += [good[: good.index(b"{")] + b"[" * 200_000]
    for data in strange:
        with pytest.raises(ForeignMessageError, match=rf"a message of {len(data)} bytes"):
            decode_message(1, data)
    assert decode_message(1, _at(2**53 - 1)).position.step == 2**53 - 1


def _at(step: int) -> bytes:
    state = RunState()
    state.position = Position(1, step)
    return encode_message(b"a", state)
