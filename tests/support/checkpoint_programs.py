"""How tests run the checkpoint programs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from tests.fuzz._checkpoint_harness import Outcome, Program, UnsupportedError, run


def skip_unsupported(error: UnsupportedError) -> NoReturn:
    """Skip a test that this machine cannot run. Fail it if the environment variable CI is set."""
    if os.environ.get("CI"):
        pytest.fail(f"not run, though in CI: {error}")
    pytest.skip(str(error))


def run_here(program: Program, points: int) -> Outcome:
    """Run so many points of a program, or skip the test if this machine cannot."""
    try:
        return run(program, points)
    except UnsupportedError as error:
        skip_unsupported(error)
