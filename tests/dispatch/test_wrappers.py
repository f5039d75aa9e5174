"""Middleware classes: which argument calls the next hook, and what the last hook calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import invalid

pytestmark = pytest.mark.every_python

Write = Callable[[str], Awaitable[None]]


class Abstract(ABC):
    @abstractmethod
    async def __call__(
        self, handler: Callable[[str, int], Awaitable[str]], event: str, number: int
    ) -> str:
        return await handler(event, number)


class Adds(Abstract):
    async def __call__(
        self, handler: Callable[..., Awaitable[str]], event: str, number: int
    ) -> str:
        return f"({await handler(event + '+', number + 1)})"


class Passes(Abstract):
    async def __call__(
        self, handler: Callable[..., Awaitable[str]], event: str, number: int
    ) -> str:
        return await handler()


class Fails(Abstract):
    async def __call__(self, handler: Any, event: str, number: int) -> str:
        raise OSError


async def handle(event: str, number: int) -> str:
    return f"{event}{number}"


def short(number: int, *, more: str = "") -> str:
    return f"{number}{more}"


async def test_what_the_caller_gave_gets_the_arguments_that_it_wants() -> None:
    """Of a hook that gives none, of one that has failed before it could, of no hook; and of any
    callable.
    """
    fails = ah.configure(Fails(), on_error="log")
    inner = ah.compose(Abstract, [Passes()], results="wrap")
    cases: list[tuple[list[object], str]] = [
        ([], "x1"),
        ([Passes()], "x1"),
        ([Adds(), Passes()], "(x+2)"),
        ([Passes(), Adds()], "(x+2)"),
        ([Adds(), fails], "(x+2)"),
        ([fails, Adds()], "(x+2)"),
        ([fails], "x1"),
        ([inner], "x1"),
        ([Adds(), inner], "(x+2)"),
        ([inner, Adds()], "(x+2)"),
    ]
    for hooks, expected in cases:
        composite = ah.compose(Abstract, hooks, results="wrap")
        assert (
            await composite(handle, "x", 1)
            == await composite(handler=handle, event="x", number=1)
            == expected
        )
    passes: Any = ah.compose(Abstract, [Passes()], results="wrap")
    assert await passes(short, "x", 1) == "1"
    assert await passes(min, "x", "a") == "a"  # its signature is not known
    with invalid("__call__ got None as the next"):
        await passes(None, "x", 1)


async def test_a_class_with_a_call_alone_is_a_lifecycle() -> None:
    """The composite is called like a hook of the class, also after changes."""
    group = ah.HookGroup(Abstract, [Adds()], results="wrap")
    called = group.hooks
    assert await called(handle, "x", 1) == "(x+2)"

    @group.on(Abstract.__call__)
    async def twice(handler: Callable[..., Awaitable[str]], event: str, number: int) -> str:
        return 2 * await handler(event, number)

    assert await called(handle, "x", 1) == "(x+2x+2)"
    group.remove(twice)
    assert await called(handle, "x", 1) == "(x+2)"

    class Listener:
        def __call__(self, text: str) -> None: ...

    class Notes:
        def __call__(self, text: str) -> None:
            noted.append(text)

    noted: list[str] = []
    ah.compose(Listener, [Notes(), Notes()])("x")
    assert noted == ["x", "x"]


class Unclear:
    async def two(self, first: Write, second: Write) -> None: ...

    async def no(self, request: str) -> str:
        raise NotImplementedError

    async def maybe(self, request: Any, then: Callable[..., Any]) -> Any: ...

    async def single(self, call: Any) -> Any: ...


async def test_the_named_argument_calls_the_next_one() -> None:
    """Also where another one looks like it, in `@point`, and where no annotation says that it is
    awaited.
    """

    class Lifecycle:
        @ah.point(ah.wrap(argument="base"))
        async def go(self, base: Any, call_next: Any) -> list[Any]:
            raise NotImplementedError

    class Hook:
        async def go(self, base: Any, call_next: Any) -> list[Any]:
            return [*await base(f"{call_next}+")]

    class Other:
        async def single(self, call: Any) -> list[Any]:
            return [*await call("y"), "+"]

        async def maybe(self, request: Any, then: Any) -> list[Any]:
            return [*await then(f"{request}+")]

    async def tool(text: str) -> list[str]:
        return [text]

    assert await ah.compose(Lifecycle, [Hook(), Hook()]).go(tool, "x") == ["x++"]
    names = {"single": "call", "maybe": "then"}
    ways = {name: ah.wrap(argument=argument) for name, argument in names.items()}
    composite: Any = ah.compose(Unclear, [Other()], results=ways)
    assert await composite.single(tool) == ["y", "+"]
    composite = ah.compose(Unclear, [Other(), Other()], results=ways)
    assert await composite.maybe("x", tool) == ["x++"]
