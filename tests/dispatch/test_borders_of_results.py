"""How results are combined, decided per method; which calls hooks have to take; functions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import pytest

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from tests.support.checks import invalid, refused

pytestmark = pytest.mark.every_python


def hook(**methods: Any) -> Any:
    """Return an object of a class with these methods."""
    return type("Observer", (), methods)()


class Unequal:
    """A value that has no truth and cannot be compared, as an array."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


# -- ways that cannot hold


class Job:
    """As interceptors that hold what they wrap themselves."""

    async def execute(self, job, attempt):  # type: ignore[no-untyped-def]
        ran.append(job)

    async def named(self, job: str, attempt: int) -> str:
        return job

    async def send(self, message: str, *, recipient: str) -> str:
        return message

    async def two(
        self, first: Callable[[], Awaitable[str]], second: Callable[[], Awaitable[str]]
    ) -> str:
        return await first()


ran: list[str] = []


async def executes(self: object, *args: Any, **keywords: Any) -> Any:
    ran.append("hook")


@pytest.mark.parametrize("name", ["execute", "named", "send", "two"])
@pytest.mark.parametrize("way", ["wrap", "chain"])
def test_a_way_without_a_clear_argument_is_refused(
    name: str, way: Literal["wrap", "chain"]
) -> None:
    """Where the way is given for the method, and where several hooks would need the way of all
    methods; the message says what to write.
    """
    if (way, name) in (("chain", "two"), ("chain", "named")):
        pytest.skip("this chain is clear, or has no argument of the result")
    says = "clear which argument", f"ah.{way}(argument=...)"
    with refused(InvalidHookError, f"Job.{name} cannot {way}", *says):
        ah.compose(Job, [hook(**{name: executes})], results={name: way})
    with refused(InvalidHookError, f".{name} and Observer#2.{name}", *says):
        ah.compose(Job, [hook(**{name: executes}), hook(**{name: executes})], results=way)
    ah.compose(Job, [hook(**{name: executes})], results=way)


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

    @ah.point("chain")
    def plain_chain(self, text: str) -> str:
        raise NotImplementedError

    @ah.point("wrap")
    async def wrap(self, text: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        raise NotImplementedError

    @ah.point("merge")
    async def any(self) -> Any: ...

    @ah.point("merge")
    async def mapping(self) -> Mapping[str, int]:
        raise NotImplementedError

    @ah.point("merge")
    def pair(self) -> tuple[int, ...]:
        raise NotImplementedError

    @ah.point("merge")
    async def perhaps(self) -> list[int] | None: ...

    @ah.point("all")
    async def all(self) -> list[int]:
        raise NotImplementedError


async def nothing(self: object, *args: Any, **keywords: Any) -> None: ...


@pytest.mark.parametrize("count", [0, 2])
async def test_nothing_is_what_the_way_says(count: int) -> None:
    """An empty chain returns its argument, an empty wrap calls through, an empty merge is of the
    annotated class; also where all hooks return None.
    """
    names = ("chain", "any", "mapping", "perhaps")
    group = ah.HookGroup(Ways, [hook(**dict.fromkeys(names, nothing)) for _ in range(count)])
    hooks = group.hooks

    async def tool(text: str) -> str:
        return f"tool {text}"

    assert await hooks.chain("x") == await hooks.chain(text="x") == "x"
    assert await hooks.chain() == "default"
    assert hooks.plain_chain("x") == "x"
    assert await hooks.wrap("x", tool) == await hooks.wrap("x", call_next=tool) == "tool x"
    assert await hooks.any() == []
    assert await hooks.mapping() == {}
    assert hooks.pair() == ()
    assert await hooks.perhaps() == []
    assert await hooks.all() == []


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


async def test_all_results() -> None:
    """A list in order of the hooks, with None where a hook has no result; also of plain methods and
    functions.
    """

    async def late(text: str) -> str:
        await asyncio.sleep(0)
        return f"late {text}"

    def silent(_: str) -> None: ...

    def quick(text: str) -> str:
        return f"quick {text}"

    composed = ah.compose_functions([late, silent, quick], results="all")
    assert await composed("x") == ["late x", None, "quick x"]
    group = ah.HookGroup(Ways, [hook(all=nothing), hook(all=nothing)])
    assert await group.hooks.all() == [None, None]


async def test_a_chain_knows_classes_that_exist_for_checkers_alone() -> None:
    """The argument of the class that is returned is replaced, and none of another class."""

    class Text:
        async def clean(
            self,
            limit: Limit,  # type: ignore[name-defined]  # noqa: F821
            text: Words | None,  # type: ignore[name-defined]  # noqa: F821
        ) -> Words | None: ...  # type: ignore[name-defined]  # noqa: F821

        async def limit(
            self,
            limit: Limit,  # type: ignore[name-defined]  # noqa: F821
            text: str,
        ) -> Limits: ...  # type: ignore[name-defined]  # noqa: F821

    async def clean(self: object, limit: int, text: str) -> str:
        return f"{text}{limit}"

    hooks = [hook(clean=clean), hook(clean=clean)]
    composite: Any = ah.compose(Text, hooks, results={"clean": "chain"})
    assert await composite.clean(1, "x") == "x11"
    with refused(InvalidHookError, "Text.limit cannot chain", "not clear which argument"):
        ah.compose(Text, hooks, results={"limit": "chain"})


async def test_a_chain_without_results_has_that_of_the_class() -> None:
    """Its own body runs if all hooks return None."""

    class Own:
        @ah.point("chain")
        async def clean(self, text: str) -> str:
            return f"own {text}"

    async def changes_nothing(self: object, text: str) -> None: ...

    hooks = [hook(clean=changes_nothing), hook(clean=changes_nothing)]
    assert await ah.compose(Own, hooks).clean("x") == "own x"


async def test_a_chain_ends_early() -> None:
    """With the value of `end_chain`, which is that of the call; the hooks behind are not called."""
    called: list[str] = []

    async def ends(text: str = "") -> str:
        return ah.dispatch.end_chain(f"{text} at the end")

    async def behind(text: str) -> str:
        called.append(f"behind {text}")
        return text

    composed = ah.compose_functions([behind, ends, behind], results="chain")
    assert await composed("x") == "x at the end"
    assert called == ["behind x"]
    group = ah.HookGroup(Ways, [])
    group.on(Ways.plain_chain)(lambda text: ah.dispatch.end_chain(None))
    group.on(Ways.chain)(ends)
    assert group.hooks.plain_chain("x") is None
    assert await group.hooks.chain("x") == await ah.compose(Ways, [group.hooks]).chain("x")
    assert await group.hooks.chain("x") == "x at the end"


@pytest.mark.parametrize("way", ["first", "together", "all", "wrap"])
@pytest.mark.parametrize("waits", [True, False])
async def test_only_a_chain_can_be_ended(way: ah.dispatch.ways.Way, waits: bool) -> None:
    """In every other way it is an error, and no value for the caller."""

    async def ends(text: str, call_next: Any) -> Any:
        if waits:
            await asyncio.sleep(0)
        return ah.dispatch.end_chain(text)

    composed = ah.compose_functions([ends], results=way)
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


async def test_a_method_without_a_body_is_not_called_after_hooks_without_a_result() -> None:
    """Its hooks have answered with None, and what it raises says only that it has no body."""

    class Asks:
        @ah.point("first")
        async def ask(self) -> str | None:
            raise NotImplementedError

    group = ah.HookGroup(Asks, [hook(ask=nothing), hook(ask=nothing)])
    assert await group.hooks.ask() is None
    with pytest.raises(NotImplementedError):
        await ah.HookGroup(Asks).hooks.ask()


@pytest.mark.parametrize("name", ["chain", "wrap", "any", "all"])
async def test_a_call_that_does_not_fit_is_an_error_without_hooks_too(name: str) -> None:
    """As if the class's own method were called."""
    with pytest.raises(TypeError, match="too many"):
        await getattr(ah.HookGroup(Ways).hooks, name)(1, 2, 3, 4)


async def test_more_arguments_for_the_next_hook_than_it_has_are_an_error() -> None:
    """Of the next hook, or of the class if its body is what is wrapped."""

    class Own:
        async def call(self, request: str, call_next: Callable[[str], Awaitable[str]]) -> str:
            return request

    async def call(self: object, request: str, call_next: Any) -> Any:
        return await call_next(request, request)

    composed: Any = ah.compose(Own, [hook(call=call)], results="wrap")
    with pytest.raises(TypeError, match="positional arguments"):
        await composed.call("x", nothing)


async def test_results_are_not_compared() -> None:
    """Of a method that returns None, of the first of several, alone or beside others that wait."""

    class Events:
        async def on(self) -> None: ...

        @ah.point("together")
        async def pick(self) -> Any: ...

        @ah.point("chain")
        async def chain(self, value: Any) -> Any: ...

    value = Unequal()

    async def returns(self: object, *_: object) -> Any:
        return value

    async def waits(self: object, *_: object) -> Any:
        await asyncio.sleep(0)

    for hooks in ([], [hook(on=waits, pick=waits, chain=waits)]):
        composite = ah.compose(Events, [*hooks, hook(on=returns, pick=returns, chain=returns)])
        assert await composite.on() is None
        assert await composite.pick() is value
        assert await composite.chain(value) is value


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
async def takes_fields(self: object, name: str, detail: str = "", /, **fields: Any) -> None:
    seen.append((name, detail, fields))


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


async def test_keywords_become_positions() -> None:
    """With the defaults of the interface for what is left out before them; but not the names of
    positional-only parameters, nor `self`.
    """
    hooks: Any = ah.compose(Calls, [hook(on=other_names, fields=takes_fields)])
    seen.clear()
    await hooks.on([1], reason="r")
    await hooks.on(reason="r", items=[2])
    await hooks.on([3])
    await hooks.fields("login", detail="x", self=1, args=2, keywords=3)
    assert seen == [
        ([1], "r"),
        ([2], "r"),
        ([3], "own"),
        ("login", "", {"detail": "x", "self": 1, "args": 2, "keywords": 3}),
    ]
    with pytest.raises(TypeError, match="missing a required argument: 'items'"):
        await hooks.on(reason="r")


# -- functions


def test_functions_whose_signatures_do_not_fit() -> None:
    """They are refused when they are composed or added, by their names and without any method."""

    async def one(a: object) -> None: ...
    async def two(a: object, b: object) -> None: ...
    async def key(a: object, *, c: object) -> None: ...
    async def default(a: object, b: object = 0) -> None: ...
    async def anything(*args: object, **keywords: object) -> None: ...

    for first, second in ((one, two), (two, one), (one, key), (key, one), (two, default)):
        if second is default:
            ah.compose_functions([first, second])
        else:
            with refused(InvalidHookError, second.__name__, "cannot take the call functions("):
                ah.compose_functions([first, second])
            composed: Any = ah.compose_functions([first])
            with refused(
                InvalidHookError, second.__name__, "cannot take the call functions("
            ) as caught:
                composed.add(second)
            assert "method" not in str(caught)
    ah.compose_functions([one, default, anything])
    with refused(InvalidHookError, "one(a)", "cannot take the call functions(*args, **keywords)"):
        ah.compose_functions([anything, one])


async def test_messages_about_functions_have_no_methods() -> None:
    """Their names stand alone."""

    async def gives(text: str) -> str:
        return text

    cases: list[Callable[[], object]] = [
        lambda: ah.compose_functions([lambda a, b: a, gives]),
        lambda: ah.compose_functions([lambda a, b: a], results="chain"),
        lambda: ah.compose_functions([gives], results="wrap"),
    ]
    for case in cases:
        with pytest.raises(InvalidHookError) as caught:
            case()
        assert "call." not in str(caught.value)
        assert "method" not in str(caught.value)
    with pytest.raises(InvalidHookError, match="functions got the results") as caught:
        await ah.compose_functions([gives, gives])("x")
    assert "method" not in str(caught.value)


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
