"""Middleware classes: which argument calls the next hook, and what the last hook calls."""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import pytest

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from tests.support.checks import invalid, refused

pytestmark = pytest.mark.every_python

App = Callable[[str, "Read", "Write"], Coroutine[None, None, None]]
Read = Callable[[], Awaitable[str]]
Write = Callable[[str], Awaitable[None]]


class Forward(Protocol):
    def __call__(self, request: str) -> Awaitable[str]: ...


class Middlewares:
    """The next one is found by annotation, or named, at any position, whatever is returned."""

    async def last(self, context: list[str], call_next: Callable[[], Awaitable[None]]) -> None: ...

    @ah.point(ah.wrap(argument="continuation"))
    async def first(self, continuation, details, request) -> str:  # type: ignore[no-untyped-def]
        raise NotImplementedError("this is for the hooks to do")

    @ah.point(ah.wrap(argument="next_app"))
    async def alias(self, scope: str, receive: Read, send: Write, next_app: App) -> None:
        """Only a docstring."""

    async def protocol(self, forward: Forward, request: str) -> str:
        message = f"no hook for {request}"
        raise NotImplementedError(message)

    async def optional(
        self,
        request: str,
        go: "Callable[[str], Awaitable[str]] | None" = None,  # noqa: UP037
    ) -> Any:
        pass

    async def other(
        self, request: str, show: Callable[[str], str], go: Callable[[str], Awaitable[str]]
    ) -> Any: ...

    async def unknown(
        self,
        request: "missing.Request",  # type: ignore[name-defined] # noqa: F821, UP037
        handler: "Callable[[Missing], Awaitable[Missing]]",  # type: ignore # noqa: F821, UP037
    ) -> Any:
        return None

    @ah.point("wrap")
    async def keyword(self, request: str, *, nxt: Any) -> Any: ...


WRAPPED = {
    "last": ("call_next", 0),
    "first": ("continuation", 2),
    "alias": ("next_app", 3),
    "protocol": ("forward", 1),
    "optional": ("go", 1),
    "other": ("go", 2),
    "unknown": ("handler", 1),
    "keyword": ("nxt", 1),
}
"""The argument that calls the next one, and how many it is given."""
each_method = pytest.mark.parametrize("name", WRAPPED)


def hook_of(name: str, letter: str, notes: list[str]) -> object:
    """Return a hook that notes when it is called, and adds its letter to what it passes on and to
    the answer.
    """
    argument, count = WRAPPED[name]
    signature = inspect.signature(getattr(Middlewares, name))

    async def method(*args: Any, **keywords: Any) -> Any:
        given = dict(signature.bind(*args, **keywords).arguments)
        call_next = given.pop(argument)
        values = [*given.values()][1 : count + 1]
        notes.append(letter)
        await asyncio.sleep(0)
        answer = await call_next(*values[:-1], *(f"{value}{letter}" for value in values[-1:]))
        notes.append(f"/{letter}")
        return None if answer is None else f"{letter}({answer})"

    return type("Hook", (), {name: method})()


def calls_of(composite: Any, name: str, notes: list[str]) -> list[Callable[[], Awaitable[Any]]]:
    """Return the ways to call a method around a tool that takes what it is given and no more."""
    argument, count = WRAPPED[name]

    async def tool(*values: str) -> str | None:
        assert len(values) == count
        notes.append("tool")
        return "".join(values) or None

    kind = inspect.Parameter.POSITIONAL_ONLY
    parameters = [inspect.Parameter(f"_{number}", kind) for number in range(count)]
    tool.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    names = [*inspect.signature(getattr(Middlewares, name)).parameters][1:]
    given = {each: tool if each == argument else "x" for each in names}
    method = getattr(composite, name)
    by_name = functools.partial(method, **given)
    return [by_name] if name == "keyword" else [by_name, functools.partial(method, *given.values())]


@each_method
@pytest.mark.parametrize("letters", ["", "a", "abc"])
async def test_the_tool_runs_once(name: str, letters: str) -> None:
    """Whatever the class does itself is nothing, so what the caller gave is innermost, and gets
    what the last hook gives.
    """
    notes: list[str] = []
    composite = ah.compose(
        Middlewares, [hook_of(name, letter, notes) for letter in letters], results="wrap"
    )
    for call in calls_of(composite, name, notes):
        notes.clear()
        answer = await call()
        assert notes == [*letters, "tool", *(f"/{letter}" for letter in reversed(letters))]
        given = "x" * WRAPPED[name][1] + letters
        assert answer == (
            "".join(f"{letter}(" for letter in letters) + given + ")" * len(letters)
            if name != "last"
            else None
        )


async def test_a_body_of_the_class_is_innermost() -> None:
    """What it does is done once, also for a single hook that answers None."""
    notes: list[str] = []

    class Timed:
        async def optional(self, request: str, go: Callable[[str], Awaitable[None]]) -> None:
            notes.append("class")
            await go(request)

    class Around:
        async def optional(self, request: str, go: Any) -> Any:
            notes.append("before")
            yield
            notes.append("after")

    async def tool(request: str) -> None:
        notes.append(request)

    a, b = hook_of("optional", "a", notes), hook_of("optional", "b", notes)
    cases: list[tuple[list[object], str]] = [
        ([], "class x"),
        ([a], "a xa /a"),
        ([Around()], "before class x after"),
    ]
    for hooks, expected in cases:
        await ah.compose(Timed, hooks).optional("x", tool)
        assert " ".join(notes) == expected
        notes.clear()
    await ah.compose(Timed, [a, b], results="wrap").optional("x", tool)
    assert " ".join(notes) == "a b class xab /b /a"


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
    with refused(InvalidHookError, "handle", "is a function", "`on`"):
        ah.compose(Abstract, [handle])
    with refused(InvalidHookError, "has none of the methods of Abstract: __call__"):
        ah.compose(Abstract, [object()])


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
    for name in names:
        with refused(InvalidHookError, f"Unclear.{name} cannot wrap", "not clear which argument"):
            ah.compose(Unclear, [], results={name: "wrap"})
    ways = {name: ah.wrap(argument=argument) for name, argument in names.items()}
    composite: Any = ah.compose(Unclear, [Other()], results=ways)
    assert await composite.single(tool) == ["y", "+"]
    composite = ah.compose(Unclear, [Other(), Other()], results=ways)
    assert await composite.maybe("x", tool) == ["x++"]
