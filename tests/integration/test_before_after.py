"""The pairs of programs in examples/before_after: after the same fault the old one waits, ours
names the dead side.
"""

from __future__ import annotations

import pytest

from examples.before_after import compare
from examples.before_after.shape import Shape
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

BOUND_SECS = 0.2  # how long the old programs may run after the fault
STALE_SECS = 1.0  # the old heartbeat is stale after half of this
PERIOD_SECS = 0.05  # no old program polls more often

shapes = pytest.mark.parametrize("shape", compare.SHAPES, ids=lambda shape: shape.name)


@shapes
def test_ours_notices_and_names_the_dead_side(shape: Shape) -> None:
    """Ours ends with an error that names the dead side; without a death it continues (times:
    docs/guides/replace-polling.md).
    """
    outcome = compare.observe(shape.ours, HANG_SECS)
    assert not outcome.hangs, outcome
    assert bool(outcome.error) == bool(shape.names)
    assert shape.names in outcome.error


@shapes
def test_the_old_one_hangs_or_is_late(shape: Shape) -> None:
    """The same fault leaves the old program waiting, or late by its own period, and its error does
    not name the dead side.
    """
    outcome = compare.observe(
        shape.old, STALE_SECS if shape.name == "poll with a heartbeat" else BOUND_SECS
    )
    if not outcome.hangs:
        assert outcome.secs > PERIOD_SECS
        assert "RuntimeError: no heartbeat" in outcome.error or not shape.names


def test_the_page_has_all_rows() -> None:
    """The table of docs/guides/replace-polling.md has the code of every shape, as the programs have
    it.
    """
    page = (ROOT / "docs" / "guides" / "replace-polling.md").read_text(encoding="utf-8")
    for shape in compare.SHAPES:
        row = f"| {shape.name} | {shape.fault} | `{shape.old_code}` |"
        assert row in page
        assert f"| `{shape.our_code}` |" in page
