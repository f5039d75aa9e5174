"""Many tasks that call one group at the same time: nothing of one call is seen in another; and what
changes while it is used.
"""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah

pytestmark = pytest.mark.every_python


# -- what changes while it is used


class Life:
    async def on(self, depth: int) -> None: ...

    @ah.point("first")
    async def ask(self) -> str | None: ...


@pytest.mark.parametrize("waits", [False, True])
async def test_a_thousand_calls_inside_each_other(waits: bool) -> None:
    """A level costs few frames of the stack."""

    class Deeper:
        async def on(self, depth: int) -> None:
            if waits:
                await asyncio.sleep(0)
            if depth:
                await group.hooks.on(depth - 1)
            else:
                reached.append(depth)

    group, reached = ah.HookGroup(Life, [Deeper()]), list[int]()
    await group.hooks.on(1000)
    assert reached == [0]
