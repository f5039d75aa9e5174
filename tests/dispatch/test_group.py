"""A group of hooks is called as if it were one hook of its class."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import invalid, refused
from tests.support.waiting import fail, forever, parked

pytestmark = pytest.mark.every_python


class AgentHooks:
    """A lifecycle as a user writes it."""

    async def on_tool_start(self, call: str) -> None: ...

    @ah.point("first")
    async def before_model(self, request: str) -> str | None:
        return f"own {request}"

    @ah.point("chain")
    async def rewrite(self, about: int, prompt: str) -> str:
        return prompt

    @ah.point("wrap")
    async def call_tool(self, call: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        return await call_next(call)

    async def count(self) -> int:
        return 0

    def describe(self) -> None: ...


class Recording:
    """Does what a function says in `on_tool_start`."""

    def __init__(self, call: Callable[[str], Awaitable[None]]) -> None:
        self._call = call

    async def on_tool_start(self, call: str) -> None:
        await self._call(call)


class Answering:
    """Answers every question with its own text, after a while."""

    def __init__(self, answer: str | None, calls: list[str] | None = None) -> None:
        self.answer = answer
        self.calls = [] if calls is None else calls

    async def before_model(self, request: str) -> str | None:
        await asyncio.sleep(0)
        self.calls.append(f"{self.answer} of {request}")
        return self.answer

    async def rewrite(self, number: int, text: str) -> str | None:
        await asyncio.sleep(0)
        return None if self.answer is None else f"{text}{self.answer}{number}"

    async def call_tool(self, call: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        return f"{self.answer}({await call_next(call + '!')})"


async def tool(call: str) -> str:
    return f"tool {call}"


def test_in_order_keeps_the_other_attributes() -> None:
    """`in_order` changes the order alone, and begins with 0."""
    a, b = Answering("a"), Answering("b")
    registrations = ah.in_order([ah.configure(a, timeout=5, order=99), b])
    assert [(one.hook, one.order, one.timeout) for one in registrations] == [
        (a, 0, 5),
        (b, 1, None),
    ]


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


async def test_answers_where_nothing_says_whether_there_are_any() -> None:
    """A method without a return annotation, or with `Any`, notifies; an answer of one of several
    hooks is an error.
    """

    class Unknown:
        async def on(self, text):  # type: ignore[no-untyped-def]
            ...

        async def any(self, text: str) -> typing.Any: ...

    class Says:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        async def on(self, text: str) -> Any:
            return self.answer

        any = on

    for name in ("on", "any"):
        for answers, expected in (([None, None], None), ([5], 5)):
            assert await getattr(ah.compose(Unknown, map(Says, answers)), name)("x") == expected
        with refused(
            ah.errors.InvalidHookError,
            f"Unknown.{name} got the results",
            "[None, 5]",
            f'{{"{name}": "first"}}',
        ):
            await getattr(ah.compose(Unknown, [Says(None), Says(5)]), name)("x")


async def test_generators_wrap_the_calls_of_the_others() -> None:
    """A hook's async generator runs up to its `yield` before the other hooks and after them behind
    it; errors come out of it.
    """
    events: list[str] = []

    class Events(AgentHooks):
        async def on_tool_start(self, call: str) -> None:
            events.append("of the class, as there is no hook")

    class Around:
        async def on_tool_start(self, call: str) -> AsyncGenerator[None]:
            events.append("before")
            try:
                yield
            except ValueError:
                events.append("failed")
                raise
            events.append("after")

    async def records(call: str) -> None:
        events.append(call)

    await ah.compose(Events, [Recording(records), Around()]).on_tool_start("x")
    with pytest.raises(ValueError, match="no"):
        await ah.compose(
            Events, [Around(), Recording(lambda _: fail(ValueError("no")))]
        ).on_tool_start("x")
    assert events == ["before", "x", "after", "before", "failed"]


# -- the object


async def test_the_object_is_one_of_its_class() -> None:
    """It is an instance, overrides what hooks implement and nothing else, and its methods are
    coroutine functions.
    """
    hooks = ah.compose(AgentHooks, [Answering("a")])
    assert isinstance(hooks, AgentHooks)
    assert type(hooks).__name__ == "AgentHooks"
    assert inspect.iscoroutinefunction(hooks.before_model)
    assert type(hooks).on_tool_start is AgentHooks.on_tool_start
    assert type(hooks).before_model is not AgentHooks.before_model
    assert inspect.signature(hooks.before_model) == inspect.signature(AgentHooks().before_model)


# -- hooks that come and go


async def test_hooks_are_added_and_removed() -> None:
    """What is no hook of the group cannot be removed; without a hook the class's own method is
    called.
    """
    a, b = Answering("a"), Answering("b")
    group = ah.HookGroup(AgentHooks, [a])
    group.add(b)
    group.remove(a)
    assert await group.hooks.before_model("x") == "b"
    with invalid("is not a hook of <HookGroup AgentHooks: Answering#2>"):
        group.remove(a)
    group.remove(b)
    assert type(group.hooks).before_model is AgentHooks.before_model


async def test_functions_are_hooks() -> None:
    """`on` takes a coroutine function or a plain one, also as a decorator, and returns it; `remove`
    takes it out again.
    """
    events: list[str] = []
    group = ah.HookGroup(AgentHooks)

    @group.on(AgentHooks.on_tool_start)
    async def first(call: str) -> None:
        await asyncio.sleep(0)
        events.append(f"first {call}")

    @group.on(AgentHooks.on_tool_start, order=-1)
    def second(call: str) -> None:
        events.append(f"second {call}")

    await group.hooks.on_tool_start("x")
    group.remove(second)
    await group.hooks.on_tool_start("y")
    assert events == ["second x", "first x", "first y"]
    assert repr(group) == "<HookGroup AgentHooks: first>"
    with invalid("on_tool_begin", "is not a method of AgentHooks"):
        group.on(on_tool_begin, first)  # type: ignore[arg-type]
    undecorated: list[Any] = [on_tool_begin, of_the_same_name()]
    for fn in undecorated:
        with invalid(f"{fn.__name__}", "is not a method of AgentHooks"):
            group.on(fn)  # a decorator without a method: what it returned would be no hook
    with invalid(
        "'on_tool_start' is not a method of AgentHooks",
        "give it as AgentHooks.name",
        "did you mean 'on_tool_start'",
    ):
        group.on("on_tool_start", first)  # type: ignore[call-overload]
    with refused(
        ah.errors.InvalidHookError,
        "without_arguments()",
        "cannot take the call",
        "too many",
    ):
        group.on(AgentHooks.on_tool_start)(without_arguments)


async def on_tool_begin(call: str) -> None: ...


def of_the_same_name() -> Any:
    async def on_tool_start(call: str) -> None: ...

    return on_tool_start


def without_arguments() -> None: ...


# -- observers


async def test_failures_of_an_observer_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The first failure is logged with its traceback, the 10th and the 100th without; the status
    has the number.
    """
    hook = Recording(lambda _: fail(ValueError("no")))
    group = ah.HookGroup(AgentHooks, [ah.configure(hook, on_error="log")])
    for _ in range(120):
        await group.hooks.on_tool_start("x")
    assert [
        (record.exc_info is not None, record.getMessage()[:45]) for record in caplog.records
    ] == [
        (True, "Recording.on_tool_start failed; continuing, a"),
        (False, "Recording.on_tool_start failed for the 10th t"),
        (False, "Recording.on_tool_start failed for the 100th "),
    ]
    (status,) = group.status()
    assert status == ("Recording", 120, "ValueError('no')", 0, None, 0)


# -- entering and leaving


class Resource:
    """A hook that is opened and closed."""

    def __init__(self, name: str, events: list[str], fails: str = "") -> None:
        self.name, self.events, self.fails = name, events, fails

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


async def test_a_hook_that_cannot_be_entered() -> None:
    """Those before it are left, those after it are never entered."""
    events: list[str] = []
    hooks = [Resource("a", events), Resource("b", events, "enter"), Resource("c", events)]
    with pytest.raises(OSError, match="enter b") as raised:
        async with ah.HookGroup(AgentHooks, hooks):
            raise AssertionError("not reached")
    assert events == ["enter a", "enter b", "leave a"]
    assert raised.value.__notes__ == ["raised by Resource#2.__aenter__"]


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
        assert f"{name}.__aenter__ failed; continuing, as its on_error says" in caplog.text


@pytest.mark.parametrize("block_fails", [False, True])
async def test_hooks_that_cannot_be_left(
    block_fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are left all the same; their errors are raised, or noted at the error of the
    block.
    """
    events: list[str] = []
    hooks = [Resource("a", events, "leave"), Resource("b", events), Resource("c", events, "leave")]
    # The block itself raises.
    with pytest.raises(ValueError if block_fails else ExceptionGroup) as raised:  # noqa: PT012
        async with ah.HookGroup(AgentHooks, hooks):
            if block_fails:
                raise ValueError("of the block")
    assert events[3:] == ["leave c", "leave b", "leave a"]
    hidden = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert hidden == (["leave c", "leave a"] if block_fails else [])
    if block_fails:
        assert raised.value.__notes__ == [
            "and then: OSError('leave c')",
            "and then: OSError('leave a')",
        ]
    else:
        failures = raised.value.exceptions  # type: ignore[attr-defined]
        assert [str(failure) for failure in failures] == ["leave c", "leave a"]


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
