"""The counter of the Ray store: any copy that survives is enough to continue from, and no write
counts twice.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiohooks.stores import Position
from aiohooks.stores.ray import _actor
from aiohooks.stores.ray._actor import GCounter

WRITERS = 4


class Process:
    """A writer with its copy of the counter; it repeats a write until it is answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.copy = GCounter()
        self.seq = 0
        self.pending = 0
        """The amount of the write that has not been answered."""
        self.acknowledged = 0


class Actor:
    """What the step actor does with writes."""

    def __init__(self) -> None:
        self.counter = GCounter()
        self.seen: dict[str, int] = {}

    def connect(self, process: Process) -> None:
        for entry in self.counter.merge(process.copy.delta_since(0)):
            self.seen[entry.writer] = entry.seq

    def write(self, process: Process) -> None:
        if self.seen.get(process.name, 0) < process.seq:
            epoch, step = self.counter.position
            self.counter.add(process.name, process.seq, Position(epoch, step + process.pending))
            self.seen[process.name] = process.seq


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, WRITERS - 1),
            st.sampled_from(["write", "lose answer", "receive", "crash"]),
        ),
        max_size=60,
    )
)
def test_every_write_counts_once(events: list[tuple[int, str]]) -> None:
    """Whatever is lost, and whichever process connects first: in the end the step is the sum of all
    writes.
    """
    processes = [Process(f"p{number}") for number in range(WRITERS)]
    actor, known = Actor(), set[str]()

    def reach(process: Process) -> None:
        if process.name not in known:
            actor.connect(process)
            known.add(process.name)

    def write(process: Process, *, answered: bool) -> None:
        reach(process)
        if not process.pending:
            process.seq += 1
            process.pending = process.seq % 3 + 1
        actor.write(process)
        if answered:
            process.copy.merge(actor.counter.delta_since(0))
            process.acknowledged += process.pending
            process.pending = 0

    for number, event in events:
        process = processes[number]
        if event == "crash":
            actor, known = Actor(), set()
        elif event == "receive":
            reach(process)
            process.copy.merge(actor.counter.delta_since(0))
        else:
            write(process, answered=event == "write")
    for process in processes:
        reach(process)
    for process in processes:
        if process.pending:
            write(process, answered=True)
    assert actor.counter.position == (1, sum(process.acknowledged for process in processes))
    assert actor.counter.position.step == actor.counter.base + actor.counter.total


def test_a_delta_has_each_change_once() -> None:
    """A copy that merges the delta since its last one equals a copy that merges everything."""
    counter, copy, since = GCounter(), GCounter(), 0
    for number in range(20):
        counter.add(f"w{number % 3}", number, Position(1, counter.position.step + 2))
        if number % 4 == 0:
            delta = counter.delta_since(since)
            assert len(delta.totals) <= 3
            copy.merge(delta)
            since = counter.version
            assert copy.position == counter.position
    assert counter.delta_since(counter.version).totals == ()


def test_a_new_epoch_begins_at_its_step() -> None:
    """Writes before a reset no longer count, in copies of the earlier epoch as well."""
    counter, old = GCounter(), GCounter()
    counter.add("a", 1, Position(1, 5))
    old.merge(counter.delta_since(0))
    counter.add("a", 2, Position(2, 3))
    counter.add("b", 1, Position(2, 4))
    assert counter.position == (2, 4)
    counter.merge(old.delta_since(0))
    assert counter.position == (2, 4)
    old.merge(counter.delta_since(0))
    assert old.position == (2, 4)


def test_silent_writers_are_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ever new writers the counter does not grow without bound; copies that merge late have
    the same step.
    """
    monkeypatch.setattr(_actor, "_MAX_WRITERS", 10)
    counter, copy, since = GCounter(), GCounter(), 0
    for number in range(100):
        counter.add(f"w{number}", 1, Position(1, counter.position.step + 1))
        assert len(counter.delta_since(0).totals) <= 10
        if number % 7 == 0:
            copy.merge(counter.delta_since(since))
            since = counter.version
            assert copy.position == counter.position
    fresh: Any = GCounter()
    fresh.merge(copy.delta_since(0))
    fresh.merge(counter.delta_since(0))
    assert fresh.position == counter.position == (1, 100)
