"""Fixtures of the tests of step stores."""

from __future__ import annotations

import pytest

from aiohooks.testing import ManualClock
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def engine(clock: ManualClock) -> FakeEngine:
    """An engine whose leases and timers the test moves by `clock`."""
    return FakeEngine()
