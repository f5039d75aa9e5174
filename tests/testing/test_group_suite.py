"""The conformance suite for hooks of any class: good hooks pass all checks, in groups of that class, and bad ones fail."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import InvalidArgumentError
from aiohooks.testing import check_hook, hook_checks

pytestmark = pytest.mark.every_python
current: contextvars.ContextVar[str] = contextvars.ContextVar("current", default="none")


class AgentHooks:
    """A lifecycle with a method of each kind."""

    async def on_start(self, agent: str) -> None: ...
    async def on_tool(self, tool: str, *, depth: int = 0) -> None: ...
    @ah.point("first")
    async def decide(self, call: Any) -> str | None: ...
    @ah.point("chain")
    async def rewrite(self, prompt: str) -> str:
        return prompt

    @ah.point("wrap")
    async def call_tool(self, call: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        return await call_next(call)

    def on_log(self, line: str) -> None: ...


async def call_next(call: Any) -> Any:
    await asyncio.sleep(0)
    return call


GIVEN: dict[str, Any] = {"call_tool": ("call", call_next)}


class Good(AgentHooks):
    """Implements all of them, and waits in each; it has a task, a context variable and a block of its own."""

    async def __aenter__(self) -> None:
        self.seen: list[Any] = []

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)

    async def on_start(self, agent: str) -> None:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)

    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        token = current.set(tool)
        try:
            await asyncio.sleep(0)
        finally:
            current.reset(token)

    async def decide(self, call: Any) -> str | None:
        self.seen.append(call)
        await asyncio.sleep(0)
        return "no"

    async def rewrite(self, prompt: str) -> str:
        return f"{prompt}!"

    async def call_tool(self, call: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
        return await call_next(call)

    def on_log(self, line: str) -> None:
        self.seen.append(line)


class InSlots:
    """Derives from nothing and has no `__dict__`."""

    __slots__ = ("count",)
    count: int

    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        await asyncio.sleep(0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Cannot be changed."""

    async def on_start(self, agent: str) -> None:
        await asyncio.sleep(0)


class Around:
    """An async generator."""

    async def on_start(self, agent: str) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        yield
        await asyncio.sleep(0)


@pytest.mark.parametrize("check", hook_checks(kind=AgentHooks))
@pytest.mark.parametrize("make", [Good, InSlots, Frozen, Around, lambda: ah.configure(InSlots(), timeout=60, on_error="log")])
async def test_good_hooks_pass(make: Callable[[], Any], check: str) -> None:
    """A hook of whatever class passes each check; a method is called with what is given, or with None."""
    calls = GIVEN | {"decide": {"call": 3}} if make is Good else None
    await check_hook(make, check, kind=AgentHooks, calls=calls, errors=[ah.errors.HookTimeoutError("late")])


class SwallowsCancels(InSlots):
    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


class AnswersCancels(InSlots):
    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise RuntimeError("instead") from None


class WorksOnce(Good):
    async def __aenter__(self) -> None:
        assert not hasattr(self, "seen"), "used before"
        await super().__aenter__()


class SetsAVariable(Frozen):
    async def on_start(self, agent: str) -> None:
        current.set("left behind")


class NeedsATool(InSlots):
    async def on_tool(self, tool: str, *, depth: int = 0) -> None:
        tool.upper()


class HasNoName(InSlots):
    def __repr__(self) -> str:
        return str(self.count)


@pytest.mark.parametrize(
    ("make", "check", "calls", "why"),
    [
        (SwallowsCancels, "passes_on_cancels", {}, r"cancelled at wait \d, in its on_tool: it has swallowed the cancel"),
        (SwallowsCancels, "ends_at_a_time_limit", {}, "cut off by its time limit at wait 1, in its on_tool: it has swallowed"),
        (AnswersCancels, "leaves_errors_alone", {}, "'of another hook, in on_tool'. was to be raised alone, and ExceptionGroup"),
        (WorksOnce, "works_again", GIVEN, "used before"),
        (SetsAVariable, "restores_context_variables", {}, "'current' was 'none', and is 'left behind'"),
        (NeedsATool, "ends_cleanly", {}, "'NoneType' object has no attribute 'upper'"),
        (HasNoName, "has_a_repr", {}, "fails before its calls: AttributeError"),
    ],
)
async def test_a_bad_hook_fails(make: Callable[[], Any], check: str, calls: dict[str, Any], why: str) -> None:
    """The check for what the hook gets wrong fails, and says what it was; also in a wait of one turn of the loop."""
    with pytest.raises((AssertionError, AttributeError), match=why) as caught:
        await check_hook(make, check, kind=AgentHooks, calls=calls)
    notes = " ".join(caught.value.__notes__)
    assert f"this fails the check {check}:" in notes
    assert ('on_tool was called with None; for other arguments: calls={"on_tool": (...)}' in notes) is (make is NeedsATool)


@pytest.mark.may_leak
@pytest.mark.parametrize("check", ["passes_on_cancels", "ends_at_a_time_limit", "leaves_nothing_when_it_fails"])
async def test_a_task_that_is_left_behind_is_named_with_its_line(check: str) -> None:
    """What a hook leaves behind when it is cut off is found, with the line of the hook that started it."""
    tasks: list[asyncio.Task[Any]] = []

    class Leaves:
        async def on_start(self, agent: str) -> None:
            tasks.append(asyncio.create_task(asyncio.Event().wait(), name="forgotten"))
            await asyncio.sleep(0)
            tasks[-1].cancel()
            await asyncio.wait(tasks[-1:])

    line = Leaves.on_start.__code__.co_firstlineno + 1
    place = rf"at wait \d, .*: task 'forgotten' still runs, started at .*Leaves\.on_start \({__file__}:{line}\)"
    with pytest.raises(AssertionError, match=place):
        await check_hook(Leaves, check, kind=AgentHooks)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (
            None,
            r'call_tool\(call.* cannot be called with .*: one of them calls the next hook; .* calls=\{"call_tool": \(\.\.\.\)\}',
        ),
        (GIVEN | {"on_start": (1, 2)}, r"on_start\(agent.* cannot be called with \(1, 2\): too many"),
        (GIVEN | {"on_begin": ()}, "calls has 'on_begin', which is no method of .*Good"),
    ],
)
async def test_calls_that_cannot_be_made_are_refused(calls: Any, why: str) -> None:
    """The error names the method, what is missing, and where to give it."""
    with pytest.raises(InvalidArgumentError, match=why):
        await check_hook(Good, "ends_cleanly", kind=AgentHooks, calls=calls)
