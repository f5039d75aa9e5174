"""Fixtures for the tests of several hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aiohooks._why.tasks import BlockedLoopWatch


@pytest.fixture
def start_watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Keep the watch of the event loop from starting with the session, and return a function that
    starts it.

    On a busy machine what comes before, such as opening the session, may take longer than the block
    that a test is about.
    """
    watches: list[BlockedLoopWatch] = []
    start = BlockedLoopWatch.start
    monkeypatch.setattr(BlockedLoopWatch, "start", lambda watch: watches.append(watch))
    return lambda: start(watches.pop(0))  # the session has one of its own, after those of hooks
