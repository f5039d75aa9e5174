"""The table is whole: every test and oddity of the original has a row, and every test that a row
names exists.
"""

from __future__ import annotations

import ast
import functools
import re
from typing import NamedTuple

import pytest

from tests.support.source import ROOT, tree

pytestmark = pytest.mark.every_python

PAGE = ROOT / "tests" / "tensorflow" / "ORIGINAL_TESTS.md"
NOT_APPLICABLE = "not applicable: "
AS_ABOVE = re.compile(r"as (\d+)")
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")

NUMBERS = [*range(1, 230), *range(246, 305)]
"""TensorFlow's tests: of hooks and timers (1-70), the monitored session (71-171), the coordinator
(172-189), the session manager (190-216), the training util (217-224), evaluation (225-229), fetches
and feeds (246-272) and the estimator's hooks (273-304).
"""
ODDITIES = range(1, 69)


class Row(NamedTuple):
    """One row of one of the tables."""

    number: str
    original: str
    ours: str
    differs: str


def rows(text: str) -> list[Row]:
    """Return all numbered rows of all tables of a page."""
    found = []
    for line in text.splitlines():
        if re.match(r"\| *O?\d+ *\|", line):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            assert len(cells) == 4, line
            found.append(Row(*cells))
    return found


ROWS = rows(PAGE.read_text(encoding="utf-8"))
GIVE_REASONS = {row.number for row in ROWS if row.ours.startswith(NOT_APPLICABLE)}


@functools.cache
def defined_in(file: str) -> frozenset[str]:
    """Return the names of the test functions that a file defines, outside of classes."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(
        node.name
        for node in tree(path).body
        if isinstance(node, functions) and node.name.startswith("test_")
    )


def wrong(row: Row) -> list[str]:
    """Describe what is wrong with a row: an empty cell, no reason and no test, or a test that does
    not exist.
    """
    if not all(row[:3]):
        return ["an empty cell"]
    if same := AS_ABOVE.fullmatch(row.ours):
        return [] if same[1] in GIVE_REASONS else [f"row {same[1]} gives no reason"]
    if row.ours.startswith(NOT_APPLICABLE):
        return [] if len(row.ours) > len(NOT_APPLICABLE) + 20 else ["no reason"]
    named = REFERENCE.findall(row.ours)
    if REFERENCE.sub("", row.ours).strip(" ,") or not named:
        return ["neither tests nor a reason"]
    return [f"{file} has no {name}" for file, name in named if name not in defined_in(file)]


def test_every_test_and_oddity_has_one_row() -> None:
    """The tables have these rows, in order, and no others."""
    numbers = [*map(str, NUMBERS), *(f"O{number}" for number in ODDITIES)]
    assert [row.number for row in ROWS] == numbers


def test_every_row_names_a_test_or_a_reason() -> None:
    """A row names tests that exist, or says why there can be none."""
    assert {row.number: found for row in ROWS if (found := wrong(row))} == {}
