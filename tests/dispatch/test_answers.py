"""How several answers become one: where the arguments come by keyword, and where methods are plain
functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

import aiohooks as ah

pytestmark = pytest.mark.every_python


class Texts:
    @ah.point("wrap")
    async def call(
        self, text: str, *, extra: str = "", call_next: Callable[..., Awaitable[str]]
    ) -> str:
        return await call_next(text, extra=extra)

    @ah.point("chain")
    def rewrite(self, number: int, text: str) -> str:
        return text

    @ah.point("first")
    def choose(self, text: str) -> str | None:
        return f"own {text}"

    @ah.point(ah.chain(argument="language"))
    async def translate(self, *, text: str, language: str) -> str:
        return language


class Adding:
    """Adds its letter to what it gets, under other names of the positional arguments."""

    def __init__(self, letter: str | None) -> None:
        self.letter = letter

    async def call(
        self, what: str, *, extra: str = "", call_next: Callable[..., Awaitable[str]]
    ) -> str:
        if self.letter is None:
            return await call_next()  # as the caller gave it
        return f"{self.letter}({await call_next(what, extra=f'{extra}{self.letter}')})"

    def rewrite(self, times: int, what: str) -> str | None:
        return None if self.letter is None else what + times * self.letter

    def choose(self, what: str) -> str | None:
        return None if self.letter is None else f"{self.letter} of {what}"

    async def translate(self, *, text: str, language: str) -> str:
        return f"{language}{self.letter}"


async def own(text: str, *, extra: str = "") -> str:
    return f"{text} {extra}"


async def test_the_keyword_of_a_chain() -> None:
    """`chain`: the answer takes the place of a keyword-only argument, and the others stay."""
    assert (
        await ah.compose(Texts, [Adding("a"), Adding("b")]).translate(text="x", language="l")
        == "lab"
    )
