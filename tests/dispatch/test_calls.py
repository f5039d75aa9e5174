"""Hooks of one phase and operations of one run overlap, in a defined order and with defined
results.
"""

from __future__ import annotations

import asyncio
import sys

import pytest

import aiohooks as ah
from aiohooks.dispatch.calls import OrderGroup, RegisteredHook, call_groups, hook_call
from tests.support.sessions import run_once

pytestmark = pytest.mark.every_python

# -- overlapping


async def test_what_cannot_wait_is_called_in_the_callers_task_and_everything_else_has_a_task() -> (
    None
):
    """Hooks start in registration order; one whose code has an `await` has a task of its own from
    its first instruction.
    """
    seen: list[tuple[str, bool]] = []
    caller = asyncio.current_task()

    class Plain(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            seen.append(("plain", asyncio.current_task() is caller))

    class Waits(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            seen.append(("waits", asyncio.current_task() is caller))
            if len(seen) > 10:
                await asyncio.sleep(0)

    await run_once([Plain(), Waits(), Waits(), Plain()])
    assert sorted(seen) == [("plain", True)] * 2 + [("waits", False)] * 2
    if sys.version_info >= (3, 12):
        assert [name for name, _ in seen] == ["plain", "waits", "waits", "plain"]


# -- an argument of its own for each hook


@pytest.mark.parametrize("waits", [False, True])
async def test_too_few_arguments_are_an_error(waits: bool) -> None:
    """Of hooks that cannot wait, and of others: no call waits for an argument that never comes."""

    class Returns:
        async def on(self, first: int, second: int) -> None: ...

    class Waits:
        async def on(self, first: int, second: int) -> None:
            await asyncio.sleep(0)

    hook = Waits() if waits else Returns()
    hooks = [RegisteredHook(f"hook {number}", ah.configure(hook)) for number in range(2)]
    group = OrderGroup([hook_call(registered, "on") for registered in hooks], grace_secs=1.0)
    with pytest.raises((ValueError, IndexError)):
        await call_groups((group,), (1,), second_args=iter([[2]]))
