"""Hooks that overlap and have one answer: `"together"`, `"merge"`."""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from aiohooks.errors import HookTimeoutError, InvalidHookError
from tests.support.checks import refused
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


class Asked:
    """A class with a method for each way to have one answer of several hooks."""

    @ah.point("together")
    async def together(self, text: str) -> Any: ...

    @ah.point("merge")
    async def merge(self, text: str) -> Any: ...

    @ah.point("first")
    async def first(self, text: str) -> Any: ...


class Waits:
    """Answers after some turns of the loop."""

    def __init__(self, turns: int, answer: object) -> None:
        self.turns = turns
        self.answer = answer

    async def together(self, text: str) -> Any:
        await ticks(self.turns)
        return self.answer

    merge = first = together


class Immediate:
    """Answers in a method that cannot wait."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    async def merge(self, text: str) -> Any:
        return self.answer


@pytest.mark.parametrize("how", ["first", "together", "merge"])
async def test_a_guard_that_is_cut_off_refuses(how: str) -> None:
    """Its time limit is an error of the call in every way to answer; with `on_error="log"` it has
    no answer.
    """
    guard, other = (
        Waits(10**6, ["no"]),
        Waits(0, ["yes"] if how == "first" else None),
    )
    with pytest.raises(
        HookTimeoutError, match=rf"^Waits\.{how} took longer than its timeout of 0.001 s"
    ):
        await getattr(ah.compose(Asked, [ah.configure(guard, timeout=0.001), other]), how)("x")
    logged = ah.configure(guard, timeout=0.001, on_error="log")
    expected = [] if how == "merge" else other.answer
    assert await getattr(ah.compose(Asked, [logged, other]), how)("x") == expected


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([[1], "text"], ("[[1], 'text']", "lists, tuples, or dicts")),
        ([(1,), [2]], ("[(1,), [2]]", "cannot be merged")),
        ([7, None], ("[7, None]", "or None")),
        ([{"a": 1}, {"a": 1}], ("[{'a': 1}, {'a': 1}]", "different keys")),
    ],
)
async def test_what_cannot_be_merged_is_an_error(answers: list[Any], says: tuple[str, ...]) -> None:
    """It names the method and the results."""
    with refused(InvalidHookError, "Asked.merge got the results", *says):
        await ah.compose(Asked, [Immediate(one) for one in answers]).merge("x")
