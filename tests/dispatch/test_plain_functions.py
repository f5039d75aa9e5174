"""Plain functions: where a method may return an awaitable, in worker threads, and several called as
one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType
from typing import Annotated, Any, TypeVar, Union

import pytest

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from tests.support.checks import refused

T = TypeVar("T")
MaybeAwaitable = Union[T, Awaitable[T]]  # noqa: UP007

# -- methods that may return an awaitable


class Broker:
    """Plain methods, annotated in the ways that frameworks use; their hooks may be of both
    kinds.
    """

    def send(self, text: str) -> str | Awaitable[str]:
        return text

    def text(self, text: str) -> "Union[str, Coroutine[Any, Any, str]]":  # noqa: UP007, UP037
        return text

    def alias(self, text: str) -> MaybeAwaitable[str]:
        return text

    def noted(self, text: str) -> Annotated[str | Coroutine[Any, Any, str], "a note"]:
        return text

    # Before Python 3.13 `CoroutineType` takes no parameters, which such texts have.
    def coroutine(self, text: str) -> "str | CoroutineType[Any, Any, str]":  # noqa: UP037
        return text

    def for_checkers(
        self,
        text: str,
    ) -> "str | Awaitable[Missing]":  # type: ignore[name-defined]  # noqa: F821, UP037
        return text


class Plain:
    def __init__(self, letter: str) -> None:
        self.letter = letter

    def answer(self, text: str) -> str:
        return text + self.letter

    send = text = alias = noted = coroutine = for_checkers = answer


class Waiting(Plain):
    async def wait(self, text: str) -> str:
        await asyncio.sleep(0)
        return text + self.letter

    send = text = alias = noted = coroutine = for_checkers = wait  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["send", "text", "alias", "noted", "coroutine", "for_checkers"])
async def test_a_method_that_may_return_an_awaitable_takes_both_kinds(name: str) -> None:
    """It returns an awaitable, whichever hooks there are."""
    plain: Any = ah.compose(Broker, [Plain("a"), Plain("b")], results="chain")
    assert await getattr(plain, name)("x") == "xab"
    mixed = ah.compose(Broker, [Plain("a"), Waiting("b"), Plain("c")], results="chain")
    answer = getattr(mixed, name)("x")
    assert inspect.isawaitable(answer)
    assert await answer == "xabc"
    assert await getattr(ah.compose(Broker, []), name)("x") == "x"


Next: TypeAlias = "Callable[[], Awaitable[ForCheckersOnly]]"  # type: ignore[name-defined] # noqa: F821


class Layers:
    async def around(self, context: Any, *, proceed: Next) -> Any:
        raise NotImplementedError


async def test_an_alias_may_name_what_only_checkers_import() -> None:
    """Its argument is found to call the next hook."""

    class Layer:
        async def around(self, context: Any, *, proceed: Next) -> Any:
            return [context, await proceed()]

    async def innermost() -> str:
        return "end"

    hooks = ah.compose(Layers, [Layer(), Layer()], results={"around": "wrap"})
    assert await hooks.around(1, proceed=innermost) == [1, [1, "end"]]


async def test_a_plain_hook_that_returns_an_awaitable_is_an_error() -> None:
    """The call fails, and nothing is left unawaited."""

    class Plain:
        def send(self, text: str) -> str | Awaitable[str]:
            return self._send(text)

        async def _send(self, text: str) -> str:
            await asyncio.sleep(0)
            return text + "!"

    answer: Any = ah.compose(Broker, [Plain()]).send("x")
    with refused(
        InvalidHookError,
        "Plain.send is a plain function, and returned <coroutine",
        "write it as `async def`",
    ):
        await answer


async def test_the_own_answer_of_a_class_may_be_an_awaitable() -> None:
    """It is awaited where no hook has an answer."""

    class Own:
        def always(self) -> Awaitable[str]:
            return self._own()

        def perhaps(self) -> str | Awaitable[str | None] | None:
            return self._own()

        async def _own(self) -> str:
            await asyncio.sleep(0)
            return "own"

    class Silent:
        def perhaps(self) -> None: ...

    class Waits:
        async def always(self) -> str:
            return "hook"

        async def perhaps(self) -> None:
            await asyncio.sleep(0)

    for hooks in ([], [Silent()], [Waits()], [Silent(), Waits()]):
        composite = ah.compose(Own, hooks, results="first")
        answer = composite.perhaps()
        assert inspect.isawaitable(answer)
        assert await answer == "own"
        assert await composite.always() == (
            "hook" if any(isinstance(hook, Waits) for hook in hooks) else "own"
        )

    class Unknown:
        def send(self, text: str) -> Awaitable[Missing]:  # type: ignore[name-defined]  # noqa: F821
            raise NotImplementedError

    assert await ah.compose(Unknown, [Plain("a")]).send("x") == "xa"


# -- hooks in threads


def test_a_hook_of_a_group_is_none_of_a_session() -> None:
    """An object with methods of another lifecycle is refused."""
    with refused(InvalidHookError, "has none of the methods of a hook: begin"):
        ah.hooks.BlockingHook(object())


# -- functions


async def test_the_argument_that_is_special_is_that_of_the_functions() -> None:
    """What calls the next, or takes an answer, is found in the first function, or named, and
    refused where it is unclear.
    """

    async def around(call_next: Callable[[], Awaitable[str]], context: str) -> str:
        return f"{context}<{await call_next()}>"

    async def job() -> str:
        return "done"

    async def rewrite(message: str, recipient: str) -> str:
        return message + "!"

    wrapped = ah.compose_functions([around, around], results="wrap")
    assert await wrapped(job, "a") == await wrapped(context="a", call_next=job) == "a<a<done>>"
    assert (
        await ah.compose_functions([rewrite, rewrite], results=ah.chain(argument="message"))(
            "hello", "Ada"
        )
        == "hello!!"
    )
    with refused(InvalidHookError, "which argument takes the result", "message, recipient"):
        ah.compose_functions([rewrite, rewrite], results="chain")
    with refused(InvalidHookError, "job", "cannot take the call", "call_next, context"):
        ah.compose_functions([around, job], results="wrap")
    with refused(InvalidHookError, "which argument calls the next", "message, recipient"):
        ah.compose_functions([rewrite, rewrite], results="wrap")


def test_a_function_takes_every_number_and_every_name_that_the_first_one_takes() -> None:
    """Otherwise it is rejected when it is added, and not by a call."""

    async def many(event: str, *rest: int) -> None: ...

    async def two(event: str, rest: int = 0) -> None: ...

    async def named(event: str, **fields: int) -> None: ...

    async def other(name: str, **fields: int) -> None: ...

    with refused(InvalidHookError, "two(event, rest=0) cannot take the call", "too many"):
        ah.compose_functions([many, two])
    misfits: list[Any] = [named, other]
    with refused(InvalidHookError, "other(name, **fields) cannot take the call", "'name'"):
        ah.compose_functions(misfits)

    async def positional(name: str, /, **fields: int) -> None: ...

    async def of_the_fields(event: str, name: int = 0, **fields: int) -> None: ...

    ah.compose_functions([named, positional, of_the_fields])
