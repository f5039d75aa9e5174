"""Counting on after a loss: what survives anywhere is enough, and nothing counts twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiohooks.stores import Position
from aiohooks.stores.ray import _counter
from aiohooks.stores.ray._counter import Ledger

WRITERS = 4


class Process:
    """A writer with its copy; it repeats a write until that is answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.copy = Ledger()
        self.seq = 0
        self.pending = 0
        """The amount of the write that has not been answered."""
        self.acknowledged = 0


class Counter:
    """What the step actor does about steps."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.seen: dict[str, int] = {}

    def hello(self, process: Process) -> None:
        for entry in self.ledger.merge(process.copy.since(0)):
            self.seen[entry.writer] = entry.seq

    def write(self, process: Process) -> None:
        if self.seen.get(process.name, 0) < process.seq:
            epoch, step = self.ledger.position
            self.ledger.add(process.name, process.seq, Position(epoch, step + process.pending))
            self.seen[process.name] = process.seq


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, WRITERS - 1), st.sampled_from(["write", "lost", "hear", "crash"])), max_size=60))
def test_every_write_counts_once(story: list[tuple[int, str]]) -> None:
    """Whatever is lost and whoever comes back first: in the end the step is the sum of all writes."""
    processes = [Process(f"p{number}") for number in range(WRITERS)]
    counter, known = Counter(), set[str]()

    def reach(process: Process) -> None:
        if process.name not in known:
            counter.hello(process)
            known.add(process.name)

    def write(process: Process, *, answered: bool) -> None:
        reach(process)
        if not process.pending:
            process.seq += 1
            process.pending = process.seq % 3 + 1
        counter.write(process)
        if answered:
            process.copy.merge(counter.ledger.since(0))
            process.acknowledged += process.pending
            process.pending = 0

    for number, event in story:
        process = processes[number]
        if event == "crash":
            counter, known = Counter(), set()
        elif event == "hear":
            reach(process)
            process.copy.merge(counter.ledger.since(0))
        else:
            write(process, answered=event == "write")
    for process in processes:
        reach(process)
    for process in processes:
        if process.pending:
            write(process, answered=True)
    assert counter.ledger.position == (1, sum(process.acknowledged for process in processes))
    assert counter.ledger.position.step == counter.ledger.base + counter.ledger.total


def test_changes_are_told_once() -> None:
    """A copy that is told what is new since it was last told is the same as one that is told everything."""
    ledger, copy, since = Ledger(), Ledger(), 0
    for number in range(20):
        ledger.add(f"w{number % 3}", number, Position(1, ledger.position.step + 2))
        if number % 4 == 0:
            pages = ledger.since(since)
            assert len(pages.entries) <= 3
            copy.merge(pages)
            since = ledger.version
            assert copy.position == ledger.position
    assert ledger.since(ledger.version).entries == ()


def test_a_new_epoch_begins_at_its_step() -> None:
    """What was added before a reset counts no more, in copies of the earlier epoch as well."""
    ledger, old = Ledger(), Ledger()
    ledger.add("a", 1, Position(1, 5))
    old.merge(ledger.since(0))
    ledger.add("a", 2, Position(2, 3))
    ledger.add("b", 1, Position(2, 4))
    assert ledger.position == (2, 4)
    ledger.merge(old.since(0))
    assert ledger.position == (2, 4)
    old.merge(ledger.since(0))
    assert old.position == (2, 4)


def test_thousands_of_writers_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger of a run with ever new writers does not grow for ever; copies that hear of it late count the same."""
    monkeypatch.setattr(_counter, "_MOST_WRITERS", 10)
    ledger, copy, since = Ledger(), Ledger(), 0
    for number in range(100):
        ledger.add(f"w{number}", 1, Position(1, ledger.position.step + 1))
        assert len(ledger.since(0).entries) <= 10
        if number % 7 == 0:
            copy.merge(ledger.since(since))
            since = ledger.version
            assert copy.position == ledger.position
    fresh: Any = Ledger()
    fresh.merge(copy.since(0))
    fresh.merge(ledger.since(0))
    assert fresh.position == ledger.position == (1, 100)
