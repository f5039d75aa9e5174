"""Plain functions: where a method may return an awaitable, in worker threads, and several called as
one.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from types import CoroutineType
from typing import Annotated, Any, ClassVar, TypeVar, Union

import pytest

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from aiohooks.testing import ManualClock
from tests.support.checks import invalid, refused
from tests.support.waiting import forever, parked

T = TypeVar("T")
MaybeAwaitable = Union[T, Awaitable[T]]  # noqa: UP007
variable: ContextVar[str] = ContextVar("variable", default="")

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

    send = text = alias = noted = for_checkers = answer


class Waiting(Plain):
    async def wait(self, text: str) -> str:
        await asyncio.sleep(0)
        return text + self.letter

    send = text = alias = noted = for_checkers = wait  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["send", "text", "alias", "noted", "for_checkers"])
async def test_a_method_that_may_return_an_awaitable_takes_both_kinds(name: str) -> None:
    """It returns an awaitable, whichever hooks there are."""
    plain: Any = ah.compose(Broker, [Plain("a"), Plain("b")], results="chain")
    assert await getattr(plain, name)("x") == "xab"
    mixed = ah.compose(Broker, [Plain("a"), Waiting("b"), Plain("c")], results="chain")
    answer = getattr(mixed, name)("x")
    assert inspect.isawaitable(answer)
    assert await answer == "xabc"
    assert await getattr(ah.compose(Broker, []), name)("x") == "x"


async def test_a_coroutine_type_in_a_text_is_an_awaitable() -> None:
    """Before Python 3.13 `types.CoroutineType` takes no parameters, which such texts have."""
    called: list[str] = []

    class Events:
        def on(
            self,
        ) -> "Coroutine[Any, Any, None] | CoroutineType[Any, Any, None] | None": ...  # noqa: UP037

    class Notes:
        async def on(self) -> None:
            called.append("on")

    result: Any = ah.compose(Events, [Notes(), Notes()]).on()
    assert await result is None
    assert called == ["on", "on"]


async def test_hooks_that_wait_overlap_there_too() -> None:
    """Methods that return None or an awaitable of it call all hooks, and those that wait meet."""
    barrier, called = asyncio.Barrier(2), list[str]()

    class Events:
        def on(self) -> Awaitable[None] | None: ...

    class Meets:
        async def on(self) -> None:
            await barrier.wait()
            called.append("meets")

    class Notes:
        def on(self) -> None:
            called.append("notes")

    class NotAnnotated:
        def on(self) -> None: ...

    with refused(
        InvalidHookError,
        "Meets.on is a coroutine function",
        "write it as `def`",
    ):
        ah.compose(NotAnnotated, [Meets()])
    answer = ah.compose(Events, [Meets(), Notes(), Meets()]).on()
    assert answer is not None
    await answer
    assert called == ["notes", "meets", "meets"]
    answer = ah.compose(Events, [Notes()]).on()
    assert answer is not None
    await answer
    with refused(InvalidHookError, "Notes.on wraps other calls", "or is a plain function"):
        ah.compose(Events, [ah.configure(Notes(), timeout=1.0)])


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
            "hook" if any(isinstance(one, Waits) for one in hooks) else "own"
        )

    class Unknown:
        def send(self, text: str) -> Awaitable[Missing]:  # type: ignore[name-defined]  # noqa: F821
            raise NotImplementedError

    assert await ah.compose(Unknown, [Plain("a")]).send("x") == "xa"


# -- hooks in threads


async def test_a_blocking_hook_of_a_session_in_a_group() -> None:
    """Where the lifecycle is that of a session, it is called as a session calls it."""
    group = ah.HookGroup(ah.SessionRunHook, [ah.hooks.BlockingHook(Ending())])
    await group.hooks.close(None)
    assert Ending.ended.pop() is None


class Ending:
    ended: ClassVar[list[BaseException | None]] = []

    def close(self, exc: BaseException | None) -> None:
        self.ended.append(exc)


def test_a_hook_of_a_group_is_none_of_a_session() -> None:
    """An object with methods of another lifecycle is refused."""
    with refused(InvalidHookError, "has none of the methods of a hook: begin"):
        ah.hooks.BlockingHook(object())


# -- functions


async def test_functions_are_called_as_one() -> None:
    """Coroutine functions overlap, plain ones are called in turn, others in threads; it has the
    name and signature of one.
    """
    barrier, called = asyncio.Barrier(2), list[str]()

    async def first(request: str) -> None:
        await barrier.wait()
        called.append(f"first {request}")

    async def second(request: str, extra: int = 0) -> None:
        await barrier.wait()
        called.append(f"second {request}")

    def plain(request: str) -> None:
        called.append(f"plain {request}")

    def blocking(request: str) -> None:
        assert threading.current_thread() is not threading.main_thread()

    functions = [first, second, plain, ah.in_thread(blocking)]
    hooks = ah.compose_functions(functions)
    assert inspect.iscoroutinefunction(hooks)
    assert inspect.signature(hooks) == inspect.signature(first)
    assert hooks.__name__ == "functions"  # type: ignore[attr-defined]
    await hooks("x")
    assert sorted(called) == ["first x", "plain x", "second x"]
    hooks.remove(first)
    hooks.remove(second)
    hooks.add(plain)
    called.clear()
    await hooks(request="y")
    assert called == ["plain y", "plain y"]
    with invalid("first", "is not a hook of <HookGroup functions"):
        hooks.remove(first)


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


async def test_a_function_in_a_thread_has_its_name_and_signature() -> None:
    """Messages name the function, and it must take every call, as any other function must."""

    def store(request: str) -> None:
        raise OSError(request)

    async def send(request: str, extra: int) -> None: ...

    with pytest.raises(OSError, match="full") as caught:
        await ah.compose_functions([ah.in_thread(store)])("full")
    assert caught.value.__notes__ == ["raised by store"]
    with refused(InvalidHookError, "store(request) cannot take the call"):
        ah.compose_functions([send, ah.in_thread(store)])


async def test_functions_fail_as_hooks_do(clock: ManualClock) -> None:
    """An error comes out with a note, or is logged; a time limit is that of each."""

    async def fails(_: object) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        await ah.compose_functions([fails, forever])(1)
    assert caught.value.__notes__ == ["raised by fails"]
    await ah.compose_functions([ah.configure(fails, on_error="log")])(1)
    call = await parked(ah.compose_functions([ah.configure(forever, timeout=1.0)])(1), 5)
    clock.advance(1.0)
    with refused(ah.errors.HookTimeoutError, "forever"):
        await call
