"""Step stores of real processes under faults: some trials of each engine, and what the laws find.

More trials: `python -m tests.fuzz.store_faults --engine redis --count 1000`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aiohooks.stores import Position
from tests.fuzz import killed_advances
from tests.fuzz.histories import make_histories
from tests.fuzz.store_faults.__main__ import run_trials
from tests.fuzz.store_faults.engines import ENGINES, GROUPS
from tests.fuzz.store_faults.plans import CLIENT_FAULTS, LINK_FAULTS
from tests.support.step_laws import Kind, Operation, find_second_leader, find_violation

COUNT, SEED = 18, 26
"""With this seed so many trials have each fault of each engine, and each of a process."""


# Ray's trials take seconds each: some are in tests/integration/test_ray.py.
@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ray"])
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


def call(kind: Kind, amount: int, began: float, step: int, epoch: int = 1) -> Operation:
    return Operation(0, kind, amount, began, began + 1, Position(epoch, step))


ADVANCE = call("advance", 1, 0.0, 1)


@pytest.mark.parametrize(
    ("history", "found"),
    [
        ([ADVANCE, call("raise", 4, 2.0, 4), call("read", 0, 4.0, 4)], ""),
        ([ADVANCE, call("wait", 1, 0.5, 1), call("reset", 0, 2.0, 0, epoch=2)], ""),
        ([ADVANCE, call("advance", 1, 2.0, 1)], "a write was lost"),
        ([ADVANCE, call("advance", 1, 2.0, 3)], "1 steps up to there were counted twice"),
        ([ADVANCE, call("read", 0, 2.0, 0)], "is stale"),
        ([ADVANCE, call("wait", 2, 2.0, 1)], "ended before its step"),
        ([ADVANCE, call("wait", 1, -1.0, 1)], "with a step that was not reached yet"),
        ([ADVANCE, call("reset", 0, 2.0, 0, epoch=3)], "an epoch that is not the next one"),
    ],
)
def test_what_is_not_linearizable_is_found(history: list[Operation], found: str) -> None:
    """A lost write, whose answer another one got; a double count; a stale read; an early wake; an
    epoch too many.
    """
    assert found in find_violation(history)
    assert bool(find_violation(history)) is bool(found)
