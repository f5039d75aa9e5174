"""The public API as type checkers see it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.source import ROOT

CHECKERS = {"mypy": ["mypy", "tests/typing"], "pyright": ["pyright", "--pythonpath", sys.executable, "tests/typing"]}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_checkers_agree_with_the_file_of_types(checker: str) -> None:
    """Both checkers see the types that tests/typing/api.py asserts, and refuse the wrong uses in it."""
    pytest.importorskip(checker)
    done = subprocess.run(
        [sys.executable, "-m", *CHECKERS[checker]], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
