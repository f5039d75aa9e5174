"""Hooks that use tools which cancel their task, in every order of the tasks, with a cancel of the caller at any time."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.hook_interleavings import LOST, SCENARIOS, BesideAFailure, HookScenario, InASession, loses_cancels
from tests.support.interleavings import Violation, explore
from tests.support.tools_of_hooks import TOOLS, Tool, expired_timeout, failed_session, no_tool

pytestmark = pytest.mark.every_python


def check(scenario: type[HookScenario], tool: Tool, limit: int) -> None:
    explored = explore(lambda: scenario(tool, may_lose_cancels=loses_cancels(tool)), limit=limit)
    assert explored.exhausted or explored.schedules == limit
    assert explored.schedules >= 10


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("tool", [no_tool, *TOOLS], ids=lambda tool: tool.__name__)
def test_no_order_loses_or_invents_a_cancel(tool: Tool, scenario: type[HookScenario]) -> None:
    """The caller gets its cancel, or else the hook's error; no hook is left active. Only what a plain `await` loses is lost."""
    check(scenario, tool, limit=20 if tool is failed_session or issubclass(scenario, InASession) else 100)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_nor_does_any_of_many_orders(tool: Tool, scenario: type[HookScenario]) -> None:
    """The same for many more orders."""
    check(scenario, tool, limit=80 if tool is failed_session or issubclass(scenario, InASession) else 500)


class LeavesSiblings(BesideAFailure):
    """Calls hooks with `asyncio.gather`, which leaves the others running when one fails."""

    async def call(self) -> None:
        await asyncio.gather(*(hook.on() for hook in self.hooks))


class InventsACancel(HookScenario):
    """Ends with a cancel that no one has made."""

    async def call(self) -> None:
        raise asyncio.CancelledError


class LosesACancel(HookScenario):
    """Goes through in spite of a cancel."""

    async def call(self) -> None:
        try:
            await self.hooks[0].on()
        except asyncio.CancelledError:
            return


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (LeavesSiblings, "a hook is still active"),
        (InventsACancel, "is cancelled, and not by the canceller"),
        (LosesACancel, LOST),
    ],
)
def test_seeded_faults_are_found(scenario: type[HookScenario], message: str) -> None:
    """Code that calls hooks with a fault fails soon."""
    with pytest.raises(Violation, match=message):
        explore(lambda: scenario(expired_timeout), limit=100)
