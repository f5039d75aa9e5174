"""The blocks of the documentation that need a framework, which begin with its extra, run and print what their page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import python_blocks, run_blocks
from tests.support.source import ROOT

PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if any(block.framework for block in python_blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, sharing their names."""
    run_blocks(page, [block for block in python_blocks(page) if block.framework], capsys)


def test_each_framework_has_a_page() -> None:
    """Those that this environment is for."""
    found = {block.framework for page in PAGES for block in python_blocks(page)} - {None}
    assert found == {"keras", "lightning", "ignite", "transformers"}
