"""How results are combined, decided per method; which calls hooks have to take; functions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest

import aiohooks as ah
from aiohooks.errors import HookTimeoutError, InvalidHookError
from tests.support.checks import invalid, refused
from tests.support.kinds import hook
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python


# -- methods without annotations


async def executes(self: object, *args: Any, **keywords: Any) -> Any: ...


async def test_a_marked_method_may_leave_out_annotations() -> None:
    """Its last argument calls the next hook; in a chain the only one takes the result."""

    class Own:
        @ah.point("wrap")
        async def call(self, request, call_next):  # type: ignore[no-untyped-def]
            return await call_next(request)

        @ah.point("chain")
        async def rewrite(self, text):  # type: ignore[no-untyped-def]
            ...

    async def call(self: object, request: str, call_next: Any) -> str:
        return f"<{await call_next(request)}>"

    async def rewrite(self: object, text: str) -> str:
        return f"{text}!"

    async def tool(request: str) -> str:
        return request

    hooks: Any = ah.compose(Own, [hook(call=call, rewrite=rewrite) for _ in range(2)])
    assert await hooks.call("x", tool) == "<<x>>"
    assert await hooks.rewrite("x") == "x!!"
    with refused(InvalidHookError, "Unclear.rewrite cannot chain", "text, other"):

        class Unclear:
            @ah.point("chain")
            async def rewrite(self, text, other):  # type: ignore[no-untyped-def]
                ...

        ah.compose(Unclear, [])


async def test_a_method_with_a_body_needs_a_way_for_several_hooks() -> None:
    """Where its result is not annotated: it may be middleware, and would run several times."""

    class Middleware:
        async def call(self, request, call_next):  # type: ignore[no-untyped-def]
            return await call_next(request)

        async def notify(self, request):  # type: ignore[no-untyped-def]
            """Nothing."""

    ah.compose(Middleware, [hook(notify=executes), hook(notify=executes)])
    with refused(InvalidHookError, ".call and Observer#2.call both return a result"):
        ah.compose(Middleware, [hook(call=executes), hook(call=executes)])


# -- results of no hooks


class Ways:
    @ah.point("chain")
    async def chain(self, text: str = "default") -> str:
        raise NotImplementedError

    @ah.point("wrap")
    async def wrap(self, text: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        raise NotImplementedError

    @ah.point("merge")
    async def any(self) -> Any: ...

    @ah.point("all")
    async def all(self) -> list[int]:
        raise NotImplementedError


async def test_functions_that_are_none() -> None:
    """The same for functions, when the last one was removed; there has to be a first one."""

    async def tag(text: str) -> str:
        return f"{text}!"

    async def around(text, call_next):  # type: ignore[no-untyped-def]
        return f"<{await call_next(text)}>"

    async def tool(text: str) -> str:
        return f"tool {text}"

    chain: Any = ah.compose_functions([tag], results="chain")
    merge: Any = ah.compose_functions([tag], results="merge")
    chain.remove(tag)
    merge.remove(tag)
    assert await chain("page") == "page"
    assert await merge("page") == []
    chain.add(tag)
    assert await chain("page") == await chain(text="page") == "page!"
    wrap: Any = ah.compose_functions([around], results="wrap")
    wrap.remove(around)
    assert await wrap("q", tool) == "tool q"
    wrap.add(around)
    assert await wrap("q", tool) == "<tool q>"
    with invalid("functions is empty"):
        ah.compose_functions([])


@pytest.mark.parametrize("mode", ["first", "together", "all", "wrap"])
@pytest.mark.parametrize("waits", [True, False])
async def test_only_a_chain_can_be_ended(mode: ah.dispatch.points.Mode, waits: bool) -> None:
    """In every other mode it is an error, and no value for the caller."""

    async def ends(text: str, call_next: Any) -> Any:
        if waits:
            await asyncio.sleep(0)
        return ah.dispatch.end_chain(text)

    composed = ah.compose_functions([ends], results=mode)
    with refused(InvalidHookError, "end_chain('x')", "no chain"):
        await composed("x", ends)


async def test_a_way_for_all_methods_applies_where_its_argument_is() -> None:
    """Also to a method that returns None and has no annotation for it, and to no other one."""

    class App:
        async def handle(self, scope: str, next_app: Any) -> None: ...

        async def on_start(self, scope: str) -> None: ...

    async def handle(self: object, scope: str, next_app: Any) -> None:
        await next_app(f"{scope}+")

    async def on_start(self: object, scope: str) -> None:
        handled.append(scope)

    async def app(scope: str) -> None:
        handled.append(scope)

    handled: list[str] = []
    hooks = [hook(handle=handle, on_start=on_start) for _ in range(2)]
    composed = ah.compose(App, hooks, results=ah.wrap(argument="next_app"))
    await composed.handle("x", app)
    await composed.on_start("start")
    assert handled == ["x++", "start", "start"]


@pytest.mark.parametrize("name", ["chain", "wrap", "any", "all"])
async def test_a_call_that_does_not_fit_is_an_error_without_hooks_too(name: str) -> None:
    """As if the class's own method were called."""
    with pytest.raises(TypeError, match="too many"):
        await getattr(ah.HookGroup(Ways).hooks, name)(1, 2, 3, 4)


# -- signatures


class Calls:
    async def on(self, items: list[int], reason: str = "none given") -> None: ...

    async def fields(self, name: str, detail: str = "", /, **fields: Any) -> None: ...

    async def named(self, *, first: int = 1, second: int) -> None: ...


async def wants_reason(self: object, items: object, reason: object) -> None: ...
async def items_only(self: object, items: object) -> None: ...
async def other_names(self: object, a: object, b: object = "own") -> None:
    seen.append((a, b))


async def keywords_only(self: object, *, items: object, reason: object = "") -> None: ...
async def needs_first(self: object, *, first: int, second: int) -> None: ...


seen: list[Any] = []


@pytest.mark.parametrize(
    ("name", "function", "says"),
    [
        ("on", wants_reason, "missing a required argument: 'reason'"),
        ("on", items_only, "too many"),
        ("on", keywords_only, "too many"),
        ("named", needs_first, "'first'"),
        ("fields", other_names, "unexpected keyword"),
    ],
)
def test_a_hook_takes_every_call_that_the_interface_permits(
    name: str, function: Any, says: str
) -> None:
    """The longest one, and that in which each default is left out."""
    with refused(InvalidHookError, f"Observer.{name}(", "cannot take the call Calls", says):
        ah.compose(Calls, [hook(**{name: function})])


# -- functions


async def test_each_call_of_hooks_that_cannot_wait_has_its_result() -> None:
    """The first call looks for the hooks, and the others call the same ones."""

    class Asked:
        @ah.point("together")
        async def ask(self, prompt: str) -> str | None: ...

        async def on(self, prompt):  # type: ignore[no-untyped-def]
            """Nothing says what it returns."""

    class Silent:
        async def ask(self, prompt: str) -> None:
            pass

        async def on(self, prompt: str) -> None:
            pass

    class Answers:
        async def ask(self, prompt: str) -> str:
            return f"{prompt}!"

        async def on(self, prompt: str) -> str:
            return f"{prompt}?"

    group: Any = ah.compose(Asked, [Silent(), Answers()])
    only: Any = ah.compose(Asked, [Answers()])
    for prompt in ("a", "b", "c"):
        assert await group.ask(prompt) == f"{prompt}!"
        assert await only.on(prompt) == f"{prompt}?"
        with refused(InvalidHookError, f"got the results [None, '{prompt}?']"):
            await group.on(prompt)


async def test_the_arguments_of_a_chain_are_checked_first() -> None:
    """Not after a hook of it has run."""
    called: list[str] = []

    class Texts:
        @ah.point("chain")
        async def rewrite(self, text: str) -> str:
            return text

    async def rewrite(self: Any, text: str, *more: str) -> None:
        called.append(text)

    texts: Any = ah.compose(Texts, [hook(rewrite=rewrite)])
    with pytest.raises(TypeError, match="too many positional arguments"):
        await texts.rewrite("a", "b")
    assert called == []


async def test_a_result_may_have_any_annotation() -> None:
    """It need not be hashable."""

    class Odd:
        async def answer(self) -> Literal[{}]: ...  # type: ignore[valid-type]

    async def answer(self: Any) -> int:
        return 5

    assert await ah.compose(Odd, [hook(answer=answer)]).answer() == 5


# -- hooks that overlap and have one result


class Asked:
    """A class with a method for each mode of combining results."""

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
    """Its time limit is an error of the call in every mode; with `on_error="log"` it has
    no answer.
    """
    guard = Waits(10**6, ["no"])
    other = Waits(0, ["yes"] if how == "first" else None)
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
        await ah.compose(Asked, [Immediate(answer) for answer in answers]).merge("x")
