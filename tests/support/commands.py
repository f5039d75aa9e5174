"""How a test runs one of the checkpoint programmes."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from tests.fuzz._disk import Outcome, Programme, UnsuitedError, run


def unsuited(why: UnsuitedError) -> NoReturn:
    """Skips a test that this machine cannot run; where the environment variable CI is set, that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"not run, though in CI: {why}")
    pytest.skip(str(why))


def run_here(programme: Programme, points: int) -> Outcome:
    """Runs so many points of a programme, if this machine can."""
    try:
        return run(programme, points)
    except UnsuitedError as error:
        unsuited(error)
