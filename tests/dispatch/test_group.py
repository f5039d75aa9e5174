"""A group of hooks is called as if it were one hook of its class."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import invalid, refused
from tests.support.waiting import forever, parked

pytestmark = pytest.mark.every_python


class AgentHooks:
    """A lifecycle as a user writes it."""

    async def on_tool_start(self, call: str) -> None: ...

    @ah.point("first")
    async def before_model(self, request: str) -> str | None:
        return f"own {request}"

    async def count(self) -> int:
        return 0

    def describe(self) -> None: ...


class Answering:
    """Answers every question with its own text, after a while."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def before_model(self, request: str) -> str:
        await asyncio.sleep(0)
        return self.answer


# -- methods that return something


async def test_several_answers_need_a_way_to_become_one() -> None:
    """A method that returns something takes one hook; several are refused, unless `results` says
    how; `call` gives all.
    """

    class Counting:
        def __init__(self, number: int) -> None:
            self.number = number

        async def count(self) -> int:
            await asyncio.sleep(0)
            return self.number

    assert await ah.compose(AgentHooks, [Counting(1)]).count() == 1
    with refused(
        ah.errors.InvalidHookError,
        "Counting.count and Counting#2.count",
        'results={"count": "first"}',
    ):
        ah.compose(AgentHooks, [Counting(1), Counting(2)])
    hooks = [Counting(1), Counting(2)]
    assert await ah.compose(AgentHooks, hooks, results={"count": "first"}).count() == 1
    ordered = [ah.configure(Counting(number), order=number // 3) for number in range(9)]
    composite: Any = ah.compose(AgentHooks, ordered, results={"count": "all"})
    assert await composite.count() == list(range(9))


# -- hooks that come and go


async def test_hooks_are_added_and_removed() -> None:
    """What is no hook of the group cannot be removed; without a hook the class's own method is
    called.
    """
    a = Answering("a")
    b = Answering("b")
    group = ah.HookGroup(AgentHooks, [a])
    group.add(b)
    group.remove(a)
    assert await group.hooks.before_model("x") == "b"
    with invalid("is not a hook of <HookGroup AgentHooks: Answering#2>"):
        group.remove(a)
    group.remove(b)
    assert type(group.hooks).before_model is AgentHooks.before_model


# -- entering and leaving


class Resource:
    """A hook that is opened and closed."""

    def __init__(self, name: str, events: list[str], fails: str = "") -> None:
        self.name = name
        self.events = events
        self.fails = fails

    async def _do(self, what: str) -> None:
        self.events.append(f"{what} {self.name}")
        await asyncio.sleep(0)
        if self.fails == what:
            raise OSError(f"{what} {self.name}")

    async def __aenter__(self) -> None:
        await self._do("enter")

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        await self._do("leave")
        return True

    async def on_tool_start(self, call: str) -> None: ...

    def describe(self) -> None: ...


async def test_hooks_are_entered_in_order_and_left_in_reverse() -> None:
    """Context managers among the hooks are entered with the group; none of them swallows the error
    of the block.
    """
    events: list[str] = []
    group = ah.HookGroup(AgentHooks, [Resource("a", events), Resource("b", events)])
    with refused(
        ah.errors.HookGroupClosedError,
        "has to be entered, as Resource is an async context manager",
    ):
        await group.hooks.on_tool_start("x")
    with refused(ah.errors.HookGroupClosedError, "has to be entered"):
        group.hooks.describe()
    with pytest.raises(ValueError, match="of the block"):  # noqa: PT012 - the block is what raises
        async with group:
            await group.hooks.on_tool_start("x")
            raise ValueError("of the block")
    assert events == ["enter a", "enter b", "leave b", "leave a"]
    for use in (
        group.__aenter__,
        lambda: group.hooks.on_tool_start("x"),
    ):
        with refused(ah.errors.HookGroupClosedError, "make a new one"):
            await use()
    with refused(ah.errors.HookGroupClosedError, "make a new one"):
        group.hooks.describe()


async def test_a_hook_that_cannot_be_entered_and_need_not_be(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_error="log"` the group removes it and continues, also after a time limit; it is
    neither called nor exited.
    """

    class Hangs:
        async def __aenter__(self) -> None:
            await forever()

        async def __aexit__(self, *_: object) -> None:
            raise AssertionError("it was not entered")

        async def on_tool_start(self, call: str) -> None:
            raise AssertionError("it was not entered")

    events: list[str] = []
    hooks = [
        Resource("a", events),
        ah.configure(Resource("b", events, "enter"), on_error="log"),
        ah.configure(Hangs(), on_error="log", timeout=1.0),
        Resource("d", events),
    ]
    group = ah.HookGroup(AgentHooks, hooks)
    entering = await parked(group.__aenter__(), 20)
    clock.advance(1.0)
    await entering
    await group.hooks.on_tool_start("x")
    assert [status.name for status in group.status()] == ["Resource", "Resource#3"]
    await group.__aexit__(None, None, None)
    assert events == ["enter a", "enter b", "enter d", "leave d", "leave a"]
    for name in ("Resource#2", "Hangs"):
        assert f"{name} is removed from" in caplog.text
        assert f'{name}.__aenter__ failed; continuing because on_error is "log"' in caplog.text


async def test_contexts_cannot_be_added_to_an_open_group() -> None:
    """Other hooks can; one that has to be entered is refused, and the group stays as it was."""
    async with ah.HookGroup(AgentHooks) as group:
        group.add(Answering("a"))
        with refused(
            ah.errors.InvalidHookError, "is a context manager; add it before the group is entered"
        ):
            group.add(Resource("a", []))
        assert await group.hooks.before_model("x") == "a"
    with refused(ah.errors.HookGroupClosedError, "has been left"):
        group.add(Answering("b"))


# -- many calls


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

    group = ah.HookGroup(Life, [Deeper()])
    reached = list[int]()
    await group.hooks.on(1000)
    assert reached == [0]
