"""Scenarios of hook groups that the random programs do not have: each kind of method, generators
that wrap, hooks that are disabled, a group that changes, background calls that are compared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import aiohooks as ah
from tests.fuzz.explored.fixture import Broken, Fixture, fails, scenario, soon

Next = Callable[[int], Awaitable[int]]


class Calls:
    """The lifecycle: a method of each kind."""

    async def call(self, number: int) -> None: ...

    @ah.point("first")
    async def ask(self, number: int) -> int | None: ...

    @ah.point("all")
    async def every(self, number: int) -> Any: ...

    @ah.point("chain")
    async def change(self, number: int) -> int:
        return number

    @ah.point("wrap")
    async def around(self, number: int, call_next: Next) -> int:
        return await call_next(number)


class Member:
    """A hook with all methods, each of which performs the fixture's action."""

    def __init__(self, fixture: Fixture, name: str) -> None:
        self.fixture = fixture
        self.name = name
        self.numbers: list[int] = []

    async def _perform(self, method: str) -> Any:
        return await self.fixture.perform(f"{self.name}.{method}")

    async def call(self, number: int) -> None:
        await self._perform("call")
        self.numbers.append(number)

    async def ask(self, number: int) -> int | None:
        await self._perform("ask")
        return number if self.name == "m1" else None

    async def every(self, number: int) -> Any:
        await self._perform("every")
        return number + 1

    async def change(self, number: int) -> int:
        await self._perform("change")
        return number + 1

    async def around(self, number: int, call_next: Next) -> int:
        await self._perform("before")
        try:
            return await call_next(number + 1)
        finally:
            await self._perform("after")


class Context(Member):
    """A hook that is entered and left: `closed` follows every `begun`."""

    async def __aenter__(self) -> None:
        await self._perform("enter")
        self.fixture.begun.append(self.name)

    async def __aexit__(self, *exc: object) -> None:
        self.fixture.closed.append(self.name)
        await self._perform("leave")


class Around(Member):
    """A hook whose `call` wraps the calls of the others."""

    async def call(self, number: int) -> AsyncGenerator[None]:  # type: ignore[override]
        self.fixture.begun.append(self.name)
        try:
            await self._perform("before")
            yield
            await self._perform("after")
        finally:
            self.fixture.closed.append(self.name)


def members(
    fixture: Fixture, made: type[Member] = Member, count: int = 3, **attributes: Any
) -> Sequence[Any]:
    return [ah.configure(made(fixture, f"m{number}"), **attributes) for number in range(count)]


async def call(fixture: Fixture, method: Callable[[], Awaitable[Any]]) -> Any:
    """Call a method, and check that no call of it is active afterwards."""
    try:
        return await method()
    finally:
        methods = (".call", ".ask", ".every", ".change", ".before", ".after")
        if busy := [label for label in fixture.inside if label.endswith(methods)]:
            fixture.add_violation(
                f"siblings: {', '.join(busy)} still active after the call had ended"
            )


@scenario("a hook group of each kind of method", hooks=0)
async def each_kind(fixture: Fixture) -> None:
    hooks = ah.compose(Calls, members(fixture))

    async def own(number: int) -> int:
        await soon()
        return number

    await call(fixture, lambda: hooks.call(1))
    assert await call(fixture, lambda: hooks.ask(1)) == 1
    assert await call(fixture, lambda: hooks.change(1)) == 4
    assert await call(fixture, lambda: hooks.around(1, own)) == 4
    assert await call(fixture, lambda: hooks.every(1)) == [2, 2, 2]


@scenario("a hook group with wrapping generators", hooks=0)
async def generators(fixture: Fixture) -> None:
    hooks = ah.compose(Calls, [Around(fixture, "a0"), *members(fixture), Around(fixture, "a1")])
    await call(fixture, lambda: hooks.call(1))


@scenario("failures in a hook group are only logged, and a hook disabled", hooks=0, vanishing=True)
async def logged(fixture: Fixture) -> None:
    for number in range(3):
        fixture.actions[f"m{number}.call"] = fails(Broken, at=number + 1, until=number + 2)
    hooks = ah.compose(Calls, members(fixture, on_error="log", disable_after=2))
    for number in range(4):
        await call(fixture, lambda number=number: hooks.call(number))  # type: ignore[misc]


# -- background calls


class Quiet(Member):
    """A background hook: its calls run beside others, and their cancels are not reported to the
    run.
    """

    calls: int = 0

    async def call(self, number: int) -> None:
        self.calls += 1
        await self._perform("work")
        self.numbers.append(number)


def check_order(fixture: Fixture, hook: Quiet, numbers: Sequence[int]) -> None:
    """Check that the calls ran in order; all of them unless one was cancelled."""
    if hook.numbers != sorted(hook.numbers) or not set(hook.numbers) <= set(numbers):
        fixture.add_violation(f"background: the calls ran as {hook.numbers}")
    if not fixture.probe.delivered and hook.numbers != list(numbers):
        fixture.add_violation(f"background: of {list(numbers)} only {hook.numbers} have run")


@scenario("background calls of a hook group, with a full queue", hooks=0)
async def background(fixture: Fixture) -> None:
    hook = Quiet(fixture, "b0")
    fixture.actions["b0.work"] = lambda _: soon()
    try:
        async with ah.HookGroup(
            Calls, [*members(fixture), ah.configure(hook, background=True, max_pending=1)]
        ) as group:
            for number in range(3):
                await fixture.probe.watch(
                    "caller", call, fixture, lambda number=number: group.hooks.call(number)
                )
    finally:
        check_order(fixture, hook, range(3))


@scenario("a background call fails", hooks=0, expect=(Broken, ExceptionGroup))
async def background_failure(fixture: Fixture) -> None:
    await calls_after_failures(fixture, Quiet(fixture, "b0"))


async def calls_after_failures(fixture: Fixture, hook: Quiet) -> None:
    """Call a group whose background hook fails, and check that no call of the hook is lost: a call
    that raises the failure of an earlier one is made as well.
    """
    fixture.actions["b0.work"] = fails(Broken, at=1, until=3)
    try:
        async with ah.HookGroup(
            Calls, [*members(fixture, count=1), ah.configure(hook, background=True)]
        ) as group:
            for number in range(3):
                with contextlib.suppress(Broken, ExceptionGroup):
                    await call(fixture, functools.partial(group.hooks.call, number))
                await fixture.pause("between", 1)
    finally:
        if not fixture.probe.delivered and hook.calls != 3:
            fixture.add_violation(f"background: of 3 calls {hook.calls} were made")


# -- groups inside groups, several callers, changes while calls are active


@scenario("two tasks call a hook group that changes", hooks=0, parallel=True)
async def two_callers(fixture: Fixture) -> None:
    async with ah.HookGroup(Calls, members(fixture, Context, 2)) as group:

        async def calls() -> None:
            await group.hooks.call(1)
            await group.hooks.change(1)

        async def changes() -> None:
            hook = Member(fixture, "m2")
            group.add(hook)
            await fixture.pause("changes", 2)
            group.remove(hook)

        await fixture.run_together(one=calls, two=calls, helper=changes)


@scenario("a hook group is left while a task calls it", hooks=0, parallel=True)
async def left_while_called(fixture: Fixture) -> None:
    group = ah.HookGroup(
        Calls, [*members(fixture, Context, 2), ah.configure(Quiet(fixture, "b0"), background=True)]
    )

    async def calls() -> None:
        with contextlib.suppress(ah.errors.HookGroupClosedError):
            while True:
                await group.hooks.call(1)
                await fixture.pause("calls", 1)

    async def leaves() -> None:
        async with group:
            await fixture.pause("leaves", 2)

    async def waits_and_calls() -> None:
        await soon()
        await calls()

    await fixture.run_together(one=leaves, two=waits_and_calls)
