"""Many tasks that call one group at the same time: nothing of one call is seen in another; and what
changes while it is used.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

import aiohooks as ah
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

TASKS = 500
whose: contextvars.ContextVar[int] = contextvars.ContextVar("whose")
"""The number of the task that calls; each has its own."""


class Lifecycle:
    """What the hooks of these tests implement."""

    @ah.point("first")
    async def answer(self, number: int) -> str: ...  # type: ignore[empty-body]


class Hook:
    """Answers after so many ticks, and looks at the context of the call before and after them."""

    def __init__(self, name: str, waits: int) -> None:
        self.name = name
        self.waits = waits
        self.mark: contextvars.ContextVar[int] = contextvars.ContextVar(name)

    async def answer(self, number: int) -> str:
        await ticks((number + self.waits) % 4 if self.waits else 0)
        assert whose.get() == number
        self.mark.set(number)  # the caller sees it, and only this one
        return f"{self.name} for {number}"


def hooks_of(count: int, name: str = "hook") -> list[Hook]:
    """Make hooks, the first of which does not suspend."""
    return [Hook(f"{name}-{number}", number) for number in range(count)]


async def of_all(call: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Call from many tasks at the same time, each with its own context variable; return results and
    errors, in order.
    """

    async def caller(number: int) -> Any:
        whose.set(number)
        return await call(number)

    results: list[Any] = await asyncio.gather(
        *[caller(number) for number in range(TASKS)], return_exceptions=True
    )
    return results


async def test_each_call_has_the_hooks_the_answers_and_the_context_of_its_own() -> None:
    """The hooks are those that the group had when it began, whatever is added and removed while it
    waits.
    """
    fixed, others, rng = hooks_of(3), hooks_of(5, "other"), random.Random(11)
    group = ah.HookGroup(Lifecycle, fixed, results={"answer": "all"})
    members, sizes = [*fixed], set[int]()

    async def call(number: int) -> bool:
        await ticks(number % 20)
        if number % 5 == 0:
            other = rng.choice(others)
            change, note = (
                (group.remove, members.remove) if other in members else (group.add, members.append)
            )
            change(other)
            note(other)
        expected = [*members]
        sizes.add(len(expected))
        assert await cast("Any", group.hooks).answer(number) == [
            f"{hook.name} for {number}" for hook in expected
        ]
        return {hook.mark.get() for hook in expected} == {number}

    assert await of_all(call) == [True] * TASKS
    assert len(sizes) > 3  # there were fewer hooks, and more


# -- what changes while it is used


class Life:
    async def on(self, depth: int) -> None: ...

    @ah.point("first")
    async def ask(self) -> str | None: ...


class Answers:
    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def ask(self) -> str | None:
        return self.answer


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
