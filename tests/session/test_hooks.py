"""The hooks of one session together: which requests and results belong to which, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import refused
from tests.support.hooks import RequestingHook
from tests.support.sessions import double

pytestmark = pytest.mark.every_python


class Silent(ah.SessionRunHook):
    """Asks for nothing, and keeps what it got all the same."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self.results.append(run_values.results)


@pytest.mark.parametrize("requests", [["loss"], ["loss", None], [None, "loss"], [None, "loss", ["loss"]], [None]], ids=repr)
async def test_each_hook_gets_what_it_asked_for(requests: list[Any]) -> None:
    """Also beside others; None if it asked for nothing, or has no `before_run`."""
    hooks = [RequestingHook(request) for request in requests]
    silent = Silent()
    async with ah.AsyncMonitoredSession(double, [silent, *hooks]) as session:
        loss = await session.run("loss")
    results = [hook.values[0].results for hook in hooks]
    assert results == [None if request is None else [loss] if isinstance(request, list) else loss for request in requests]
    assert silent.results == [None]


def test_a_name_that_is_not_text_is_refused() -> None:
    """It would be the key of the hook's state in a checkpoint."""
    hook = Silent()
    hook.name = 5  # type: ignore[assignment]
    with refused(ah.errors.InvalidHookError, "the name of", "is 5", "give a str"):
        ah.AsyncMonitoredSession(double, [hook])
