"""The blocks of the documentation that need a framework, which begin with its extra, run and print what their page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import python_blocks, run_blocks
from tests.support.source import ROOT

PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if any(block.framework for block in python_blocks(page))]
PORTED = {"from-keras": 1e-4, "from-lightning": 0, "from-ignite": 0, "from-hugging-face": 1e-5}
"""The pages with a program in a framework and the same one here, and by how much their losses may differ."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, sharing their names."""
    run_blocks(page, [block for block in python_blocks(page) if block.framework], capsys)


def test_each_framework_has_a_page() -> None:
    """Those that this environment is for."""
    found = {block.framework for page in PAGES for block in python_blocks(page)} - {None}
    assert found == {"keras", "lightning", "ignite", "transformers"}


@pytest.mark.parametrize("page", PORTED)
def test_a_ported_program_is_the_same_program(page: str) -> None:
    """Run from the same seeds, a framework's program and the one that replaces it have the same losses, and as many."""
    path = ROOT / f"docs/migrating/{page}.md"
    start = path.read_text(encoding="utf-8").split("## The same program")[0].count("\n")
    theirs, ours = map(losses_of, [block.text for block in python_blocks(path) if block.line > start][:2])
    assert len(theirs) == len(ours) > 8
    assert ours == pytest.approx(theirs, rel=PORTED[page], abs=PORTED[page] / 1000)


def losses_of(program: str) -> list[float]:
    """Run a program, and return its losses."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)
    return names["losses"] if "losses" in names else names["watch"].losses  # type: ignore[no-any-return]
