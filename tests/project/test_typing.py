"""The public API as type checkers see it."""

from __future__ import annotations

import sys

import pytest

from tests.support import processes
from tests.support.needs import program

OPTIONS = {"mypy": [], "pyright": ["--pythonpath", sys.executable]}


@pytest.mark.slow
@pytest.mark.parametrize("checker", OPTIONS)
def test_checkers_agree_with_the_file_of_types(checker: str) -> None:
    """Both checkers see the types that tests/typing/api.py asserts, and refuse the wrong uses in
    it.
    """
    command = [program(checker), *OPTIONS[checker], "tests/typing"]
    done = processes.run(command, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
