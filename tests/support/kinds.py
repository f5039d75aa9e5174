"""A lifecycle with a method of each kind, and hooks that do the same in all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohooks as ah

Next = Callable[[Any], Awaitable[Any]]


class Kinds:
    """A method of each kind."""

    async def none(self, value: Any) -> None: ...

    async def unknown(self, value: Any) -> Any: ...

    @ah.point("first")
    async def first(self, value: Any) -> Any: ...

    @ah.point("merge")
    async def merge(self, value: Any) -> Any: ...

    @ah.point("chain")
    async def chain(self, value: Any) -> Any: ...

    @ah.point("wrap")
    async def wrap(self, value: Any, call_next: Next) -> Any:
        return await call_next(value)

    async def around(self, value: Any) -> None: ...

    def plain(self, value: Any) -> None: ...


class Does:
    """Does the same in every method that may wait, before it passes on a call that it wraps."""

    def __init__(self, act: Callable[[], Awaitable[Any]]) -> None:
        self.calls = 0
        self.act = act

    async def none(self, value: Any) -> None:
        self.calls += 1
        await self.act()

    unknown = first = merge = chain = none

    async def wrap(self, value: Any, call_next: Next) -> Any:
        await self.none(value)
        return await call_next(value)

    async def around(self, value: Any) -> AsyncGenerator[None]:
        await self.none(value)
        yield


def hook(*bases: type, **methods: Any) -> Any:
    """Return an object of a class with these methods."""
    return type("Observer", bases, methods)()


async def tail(value: Any) -> Any:
    """Return what it is given: what a wrapped call ends with."""
    return value


async def call(hooks: Kinds, kind: str) -> Any:
    """Call the method of this kind, also the plain one."""
    answer = getattr(hooks, kind)(*([1, tail] if kind == "wrap" else [1]))
    return answer if kind == "plain" else await answer
