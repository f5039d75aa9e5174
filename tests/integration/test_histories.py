"""Histories of real processes under faults: some are recorded on each engine, and bugs in them are found."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiohooks.stores import Position
from tests.fuzz.histories import record
from tests.support.engine_faults import ENGINES
from tests.support.linearizability import BUGS, Injected, Kind, Operation, find_miscount, find_violation, wake_early


def operation(kind: Kind, amount: int, began: float, ended: float, step: int, process: int = 0) -> Operation:
    return Operation(process, kind, amount, began, ended, Position(1, step))


def unanswered(began: float, amount: int = 1, kind: Kind = "advance") -> Operation:
    return Operation(1, kind, amount, began)


# Ray's runs take many seconds each; its command is in CONTRIBUTING.md.
@pytest.mark.slow
@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "ray"])
def test_a_history_is_linearizable(engine: str, tmp_path: Path) -> None:
    """The check passes on real histories, with and without a loss of the data."""
    outcome = asyncio.run(record(engine, 10_000, 2, tmp_path, calls_each=450, most_runs=4))
    assert outcome.problems == []
    assert outcome.calls > 1000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Operation]:
    """A real history with advances, reads, waits and raises or resets."""
    outcome = asyncio.run(record("local", 900, 3, tmp_path_factory.mktemp("history"), calls_each=900, most_runs=1))
    assert outcome.problems == []
    return outcome.last_history


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_an_injected_bug_is_found(recorded: Sequence[Operation], bug: Injected) -> None:
    """A lost write, a double count, a stale read, two writers with one answer, an early wake: wherever it is put."""
    advances = sum(one.kind == "advance" and one.is_known for one in recorded)
    places = [-1] if bug is wake_early else range(0, advances - 1, 7)
    answered = [one for one in recorded if one.is_known or one.kind in ("read", "wait")]
    if len(answered) < len(recorded):
        pytest.skip("a killed process may have made what looks like a bug")
    wrong = {at: bug(answered, at) for at in places}
    # The last advance of an epoch can be lost, or count twice, without anyone seeing it.
    seen = {at: history for at, history in wrong.items() if history != answered}
    assert seen
    assert [at for at, history in seen.items() if not find_violation(history)] == []


def test_what_has_no_answer_counts_once_or_not_at_all() -> None:
    """A killed process may have added a step, from its call on; not two by one call, and none before it."""
    first, late = operation("advance", 1, 1.0, 2.0, 1), operation("advance", 1, 5.0, 6.0, 3)
    assert find_violation([first, late, unanswered(3.0)]) == ""
    assert find_violation([first, operation("advance", 1, 5.0, 6.0, 2), unanswered(3.0)]) == ""
    assert "counted twice" in find_violation([first, late])
    assert "counted twice" in find_violation([first, late, unanswered(6.5)])
    assert "counted twice" in find_violation([first, operation("advance", 1, 5.0, 6.0, 4), unanswered(3.0)])
    assert find_violation([first, operation("advance", 1, 5.0, 6.0, 9), unanswered(3.0, 8, "raise")]) == ""


def test_operations_at_the_same_time_have_any_order() -> None:
    """Only what had ended before an operation began is behind it."""
    advance = operation("advance", 1, 1.0, 4.0, 1)
    assert find_violation([advance, operation("read", 0, 2.0, 3.0, 0)]) == ""
    assert find_violation([advance, operation("read", 0, 2.0, 3.0, 1)]) == ""
    assert "stale" in find_violation([advance, operation("read", 0, 5.0, 6.0, 0)])
    assert "stale" in find_violation([advance, operation("read", 0, 0.2, 0.5, 1)])
    assert find_violation([advance, operation("wait", 1, 2.0, 3.0, 1), operation("wait", 0, 5.0, 6.0, 0)]) == ""
    assert "stale" in find_violation([advance, operation("wait", 1, 2.0, 2.5, 1), operation("read", 0, 3.0, 3.5, 0)])


def test_a_raise_and_a_reset_set_the_step() -> None:
    """A raise leads from any lower step to its own, or changes nothing; a reset begins the next epoch."""
    first = operation("advance", 1, 1.0, 2.0, 1)
    assert find_violation([first, operation("raise", 7, 3.0, 4.0, 7), operation("raise", 2, 5.0, 6.0, 7)]) == ""
    assert "did not raise" in find_violation([first, operation("raise", 7, 3.0, 4.0, 6)])
    reset = Operation(0, "reset", 4, 3.0, 4.0, Position(2, 4))
    assert find_violation([first, reset, Operation(0, "advance", 1, 5.0, 6.0, Position(2, 5))]) == ""
    assert "stale" in find_violation([first, reset, operation("read", 0, 5.0, 6.0, 1)])
    assert "no reset has begun" in find_violation([first, Operation(0, "read", 0, 3.0, 4.0, Position(2, 4))])
    assert "not the next one" in find_violation([first, Operation(0, "reset", 4, 3.0, 4.0, Position(3, 4))])


def test_sums_after_a_loss() -> None:
    """All that was acknowledged is in the last read, nothing is in it twice, and no process sees the step fall."""
    first, second = operation("advance", 2, 1.0, 2.0, 2), operation("advance", 1, 3.0, 4.0, 3, process=1)
    assert find_miscount([first, second, operation("read", 0, 5.0, 6.0, 3)]) == ""
    assert "last read" in find_miscount([first, second, operation("read", 0, 5.0, 6.0, 2, process=2)])
    assert "last read" in find_miscount([first, second, operation("read", 0, 5.0, 6.0, 4)])
    fallen = [operation("read", 0, 4.5, 4.6, 0, process=1), operation("read", 0, 5.0, 6.0, 3)]
    assert "had seen" in find_miscount([first, second, *fallen])
    assert find_miscount([first, second, unanswered(math.pi), operation("read", 0, 5.0, 6.0, 4)]) == ""
