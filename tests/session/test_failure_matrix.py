"""Five hooks, seven phases, four kinds of failure: each cell does what its rule says."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.conformance.report import installed_loops, loop_factory
from tests.support.failure_cells import HOOKS, Cell, Event, Outcome, run_cell
from tests.support.failure_rules import (
    CANCELLED,
    ITS_ERROR,
    KINDS,
    NOTHING,
    PHASES,
    RULES,
    cells,
    expected_events,
    page,
)

pytestmark = pytest.mark.every_python

PAGE = Path(__file__).with_name("FAILURE_MATRIX.md")


def assert_calls(got: list[Event], expected: list[tuple[Event, bool]]) -> None:
    """Compare the whole record; a call that is not required may be missing."""
    wanted: list[Event] = []
    rest = iter(got)
    following = next(rest, None)
    for event, required in expected:
        if required or event == following:
            wanted.append(event)
            if event == following:
                following = next(rest, None)
    assert got == wanted


def check(cell: Cell, outcome: Outcome) -> None:
    """Compare the calls, their order, what reached the caller and what `close` got with the
    rule.
    """
    rule = RULES[cell.phase, cell.kind]
    assert_calls([event for event in outcome.events if event[0] != "aclose"], expected_events(cell))
    assert outcome.events.count(("aclose", 0)) == (1 if rule.create else 0)
    closes = Counter(number for phase, number in outcome.events if phase == "close")
    begun = {number for phase, number in outcome.events if phase == "begin"}
    assert closes == dict.fromkeys(begun, 1)
    failed_to_close = cell.phase == "close" and cell.raises is not None
    assert set(outcome.closed) == begun - ({cell.hook} if failed_to_close else set())
    assert sorted(outcome.cancelled) == [n for n in HOOKS if n != cell.hook and cell.others_wait]

    if rule.caller_gets == NOTHING:
        assert outcome.reached is None
    elif rule.caller_gets == ITS_ERROR:
        assert outcome.reached is outcome.raised is not None
    else:
        assert rule.caller_gets == CANCELLED
        assert isinstance(outcome.reached, asyncio.CancelledError)
    got_by_close = outcome.reached if rule.close_gets != NOTHING else None
    assert all(exc is got_by_close for exc in outcome.closed_with), outcome.closed_with

    assert outcome.entered is rule.enters
    assert outcome.results == ["trained"] * rule.runs
    assert outcome.step == rule.step
    assert outcome.cancelling == (cell.kind == "cancel")
    assert outcome.left_running == 0


@pytest.mark.parametrize("loop", installed_loops())
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_cell(cell: Cell, loop: str) -> None:
    """The calls, their order, what reaches the caller and what `close` gets are as the rule
    says.
    """
    check(cell, run_cell(cell, loop_factory(loop)))


def test_the_matrix_is_whole() -> None:
    """There is a rule and a cell for each phase and kind, for each hook, suspending and not."""
    assert list(RULES) == [(phase, kind) for phase in PHASES for kind in KINDS]
    tried = {(cell.phase, cell.kind, cell.hook, cell.suspends) for cell in cells()}
    assert len(tried) == len(HOOKS) * len(PHASES) * len(KINDS) * 2


def test_the_page_is_what_the_rules_say() -> None:
    """FAILURE_MATRIX.md is generated from the data that the tests use."""
    command = "python -m tests.support.failure_rules --write tests/session/FAILURE_MATRIX.md"
    assert PAGE.read_text(encoding="utf-8") == page(), f"run {command}"
