"""The laws of composed hooks, for the frameworks of this environment."""

from __future__ import annotations

from typing import cast

import pytest

from tests.frameworks.laws import (
    test_a_cancel_from_outside_ends_the_hooks,
    test_a_time_limit_holds,
    test_an_error_is_reported,
    test_hooks_overlap,
)
from tests.frameworks.runners import RUNNERS, Runner
from tests.frameworks.services import servers  # noqa: F401 - it fills RUNNERS

__all__ = [
    "test_a_cancel_from_outside_ends_the_hooks",
    "test_a_time_limit_holds",
    "test_an_error_is_reported",
    "test_hooks_overlap",
]


@pytest.fixture(params=list(RUNNERS.values()), ids=list(RUNNERS))
def framework(request: pytest.FixtureRequest) -> Runner:
    """Each framework."""
    return cast("Runner", request.param)
