"""Step stores of real processes under faults: some trials of each engine, the laws, and the bugs
that these find.

More trials: `python -m tests.fuzz.store_faults --engine redis --count 1000`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from aiohooks.stores import Position
from tests.fuzz import killed_advances
from tests.fuzz.histories import make_histories
from tests.fuzz.store_faults.__main__ import run_trials
from tests.fuzz.store_faults.engines import ENGINES, GROUPS
from tests.fuzz.store_faults.plans import CLIENT_FAULTS, LINK_FAULTS
from tests.support.step_laws import (
    Operation,
    find_second_leader,
    find_violation,
)

COUNT, SEED = 18, 26
"""With this seed so many trials have each fault of each engine, and each of a process."""

RECORDED_TRIAL = 7
"""One of calls at random, on the local store, in which no process is killed."""


# Ray's trials take seconds each: some are in tests/integration/test_ray.py.
@pytest.mark.slow
@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "ray"])
def test_no_law_is_broken(engine: str, tmp_path: Path) -> None:
    """Nothing is stuck, counted twice, written by two leaders, ended wrongly or left over, whatever
    fails.
    """
    outcome = asyncio.run(run_trials(engine, COUNT, SEED, tmp_path, parallel=3))
    assert outcome.texts == []
    assert outcome.calls > 1000
    faults = {(plan.group, plan.engine_fault) for plan in outcome.plans}
    assert faults == {
        (group, fault) for group in GROUPS for fault in ENGINES[engine].strikes[group]
    }
    assert {plan.client_fault for plan in outcome.plans} == {
        *CLIENT_FAULTS,
        *(LINK_FAULTS if engine != "local" else ()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "every"), [("local", 97), ("redis", 997)])
def test_killed_advances(engine: str, every: int) -> None:
    """Wherever a process is killed, its acknowledged advances count, and the waits of others
    end.
    """
    assert killed_advances.main(["--engine", engine, "--every", f"{every}"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ray"])
def test_calls_without_faults_are_linearizable(engine: str, tmp_path: Path) -> None:
    """Calls of three processes on one run have an order that agrees with the order in time."""
    calls, wrong = asyncio.run(make_histories(engine, range(60), tmp_path, parallel=3))
    assert wrong == []
    assert calls > 1000


# What the laws find.


def term(number: int, began: float, process: int) -> Operation:
    return Operation(process, "advance", 1, began, began + 1, Position(1, int(began)), number)


@pytest.mark.parametrize(
    ("writes", "found"),
    [
        ([term(1, 1.0, 0), term(1, 3.0, 0), term(2, 5.0, 1)], ""),
        ([term(1, 1.0, 0), term(2, 3.0, 1), term(1, 3.5, 0)], ""),
        ([term(1, 1.0, 0), term(2, 3.0, 1), term(1, 5.0, 0)], "after a write of a newer term"),
        ([term(1, 1.0, 0), term(1, 3.0, 1)], "two processes"),
    ],
)
def test_terms(writes: list[Operation], found: str) -> None:
    """A term is one process's, and no write is accepted after one of a newer term."""
    assert found in find_second_leader(writes)
    assert bool(find_second_leader(writes)) is bool(found)


# Injected bugs: what the check must find. Each takes the number of an advance, in their order.

Injected = Callable[[Sequence[Operation], int], list[Operation]]


def lose_write(history: Sequence[Operation], at: int) -> list[Operation]:
    """One advance was acknowledged and lost: all that is later is lower by its amount."""
    lost = _advances(history)[at]
    return [_shift(one, lost, -lost.amount) for one in history]


def count_twice(history: Sequence[Operation], at: int) -> list[Operation]:
    """One advance was applied twice, and answered once: all that is later is higher by its
    amount.
    """
    doubled = _advances(history)[at]
    return [_shift(one, doubled, doubled.amount) for one in history]


def read_stale(history: Sequence[Operation], at: int) -> list[Operation]:
    """A read that began after an advance had ended does not see it."""
    advance = _advances(history)[at]
    last = max(
        (one for one in history if one.kind == "read" and one.is_known), key=lambda one: one.began
    )
    stale = dataclasses.replace(
        last, position=Position(advance.position.epoch, advance.position.step - advance.amount)
    )
    return [stale if one is last else one for one in history]


def answer_twice(history: Sequence[Operation], at: int) -> list[Operation]:
    """Two processes get the same answer to their advances."""
    first = _advances(history)[at]
    other = next(one for one in _advances(history) if one.position > first.position)
    return [
        dataclasses.replace(other, position=first.position) if one is other else one
        for one in history
    ]


def wake_early(history: Sequence[Operation], at: int) -> list[Operation]:
    """A wait ends with a step that is reached only later."""
    advance = _advances(history)[at]
    early = Operation(
        9,
        "wait",
        advance.position.step,
        advance.began - 2e-6,
        advance.began - 1e-6,
        advance.position,
    )
    return [*(one for one in history if one.is_known), early]


BUGS: tuple[Injected, ...] = (lose_write, count_twice, read_stale, answer_twice, wake_early)


def _advances(history: Sequence[Operation]) -> list[Operation]:
    return sorted(
        (one for one in history if one.kind == "advance" and one.is_known),
        key=lambda one: one.position,
    )


def _shift(one: Operation, after: Operation, by: int) -> Operation:
    if (
        not one.is_known
        or one.position <= after.position
        or one.position.epoch != after.position.epoch
    ):
        return one
    return dataclasses.replace(one, position=Position(one.position.epoch, one.position.step + by))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Operation]:
    """Real calls of three processes of which none is killed: advances, reads, waits and raises or
    resets.
    """
    outcome = asyncio.run(
        run_trials("local", 1, SEED, tmp_path_factory.mktemp("calls"), only=[RECORDED_TRIAL])
    )
    assert outcome.texts == []
    assert find_violation(outcome.last_calls) == ""
    return outcome.last_calls


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_an_injected_bug_is_found(recorded: Sequence[Operation], bug: Injected) -> None:
    """A lost write, a double count, a stale read, two writers with one answer, an early wake:
    wherever it is put.
    """
    places = [-1] if bug is wake_early else range(0, len(_advances(recorded)) - 1, 7)
    answered = [one for one in recorded if one.is_known or one.kind in ("read", "wait")]
    wrong = {at: bug(answered, at) for at in places}
    # The last advance of an epoch can be lost, or count twice, without anyone seeing it.
    seen = {at: history for at, history in wrong.items() if history != answered}
    assert seen
    assert [at for at, history in seen.items() if not find_violation(history)] == []
