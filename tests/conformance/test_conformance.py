"""The library does what TensorFlow's monitored session did, on 2,000 recorded scenarios.

The promises of every end (each session and each begun hook closed once, in reverse; nothing left
running; nothing hangs; what reaches the caller is the very error that was raised) are checked in
every replay, too.
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.conformance.records import Mode, Record, load
from tests.conformance.replay import Replay, differences, replay_record
from tests.conformance.report import installed_loops, replay_all

pytestmark = pytest.mark.every_python

RECORDS = load()
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("loop", installed_loops())
@pytest.mark.parametrize("mode", list(Mode))
def test_traces_agree(mode: Mode, loop: str, part: int) -> None:
    """Calls, their order and results, what the caller gets and what reaches it are the
    original's.
    """
    report = replay_all(RECORDS[part::PARTS], mode, loop)
    assert report.replayed == 2_000 // PARTS
    assert report.ok, report.details()


def test_the_file_is_whole() -> None:
    """All 2,000 scenarios are there, of both kinds of session, each under its own id."""
    assert len({record["id"] for record in RECORDS}) == 2_000
    assert {record["scenario"]["session"] for record in RECORDS} == {"monitored", "singular"}


async def test_a_wrong_expectation_is_seen() -> None:
    """The comparison fails for a call too many or too few, a wrong result, a wrong error and a
    wrong place.
    """
    record = RECORDS[1]
    outcome = await replay_record(record, Mode.PLAIN)
    assert differences(record, Mode.PLAIN, outcome) == []
    right = record["expected"]
    changes: dict[str, Any] = {
        "a call more": {"trace": [*right["trace"], ["A", "end", 2]]},
        "a call less": {"trace": right["trace"][:-1]},
        "another order": {"trace": right["trace"][::-1]},
        "another result": {"runs": [{"k": 9.0}, *right["runs"][1:]]},
        "another error": {"raised": "ValueError"},
        "another place": {"raised_by": "enter"},
    }
    for what, change in changes.items():
        wrong = {**record, "expected": {**right, **change}}
        assert len(differences(cast("Record", wrong), Mode.PLAIN, outcome)) == 1, what


async def test_a_forgotten_close_is_seen() -> None:
    """A hook or session that is not closed, or closed twice, is reported by every replay."""
    replay = Replay(RECORDS[1], Mode.PLAIN)
    await replay.run_scenario()
    replay.check_ends()
    assert replay.outcome.faults == []
    replay.closed.append("A")
    replay.closed_sessions[1] = 0
    replay.check_ends()
    assert replay.outcome.faults == [
        "session 1 was closed 0 times",
        "begun ['A'], but closed ['A', 'A']",
    ]
