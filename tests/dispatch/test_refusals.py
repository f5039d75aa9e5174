"""What is refused when a group is made or changed, and what the message says: hooks, methods,
options, functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Self

import pytest

import aiohooks as ah
from aiohooks.dispatch import HookRegistration
from aiohooks.errors import AiohooksError, InvalidArgumentError, InvalidHookError
from tests.support.checks import refused
from tests.support.kinds import Does, Kinds, hook
from tests.support.sessions import do_nothing

pytestmark = pytest.mark.every_python


# -- methods of hooks


async def coroutine(self: object, *arguments: Any) -> Any: ...
async def no_arguments(self: object) -> None: ...
async def two_arguments(self: object, call: str, more: str) -> None: ...
async def name_only(self: object, name: str) -> None: ...
async def any_arguments(self: object, name: str, *items: int, **fields: int) -> None: ...
def function(self: object, *arguments: Any) -> Any: ...
def generator(self: object) -> Iterator[int]:
    yield 1


async def around(self: object, *arguments: Any) -> AsyncIterator[None]:
    yield


def generates(call: str) -> Iterator[int]:
    yield 1


# -- classes


class Calls:
    async def on(self, call: str) -> None: ...

    async def count(self) -> int:
        return 0

    def plain(self) -> None: ...

    @ah.point("together")
    def answers(self, text: str) -> str | None: ...

    @ah.point("first")
    async def first(self, text: str) -> str | None: ...

    @ah.point("wrap")
    async def wrap(self, text: str, call_next: Callable[[str], Awaitable[str]]) -> str:
        return await call_next(text)


class Steps:
    def generator(self) -> Iterator[None]:
        yield

    async def asynchronous(self) -> Any:
        yield

    def plain(self) -> None: ...

    def untyped(self):  # type: ignore[no-untyped-def]
        ...

    def numbers(self) -> Iterator[int]:
        return iter(())


class Base:
    async def inherited(self) -> Base | None: ...


class Builder(Base):
    """Methods that return a hook of the class, in all the ways this can be written; and two that do
    not.
    """

    async def itself(self) -> Self:
        raise NotImplementedError

    async def text(self) -> "Builder":  # noqa: UP037 - a text within the text
        raise NotImplementedError

    async def base(self) -> Base:
        raise NotImplementedError

    async def anything(self) -> object:
        raise NotImplementedError

    async def other(self) -> "Missing":  # type: ignore[name-defined] # noqa: F821, UP037
        raise NotImplementedError


class Events:
    """A method that takes any positional arguments, and one that takes any keywords."""

    async def on_items(self, name: str, *items: int) -> None: ...

    async def on_fields(self, name: str, **fields: int) -> None: ...


class Handler:
    """A class that is called as a whole, and calls its own methods."""

    async def __call__(self, event: str) -> None:
        await self.on_event(event)

    async def on_event(self, event: str) -> None: ...


class Layers:
    async def empty(self, context: str, call_next: Callable[[], Awaitable[None]]) -> None: ...

    async def two(
        self, first: Callable[[], Awaitable[None]], second: Callable[[], Awaitable[None]]
    ) -> None: ...

    async def no(self, request: str) -> str:
        raise NotImplementedError

    async def different(self, message: str, ctx: int) -> Any: ...

    def get(self, request: str, get_response: Callable[[str], str]) -> str:
        raise NotImplementedError


Make = Callable[[], object]
ON = hook(on=coroutine)
NO_LISTS: list[Any] = [ON, ah.configure(ON), ah.NanHook("loss")]
DIFFERENT = hook(different=coroutine)
UNCLEAR = "not clear which argument takes the result", "ah.chain(argument=...)", "message, ctx"


def made(kind: Any, *hooks: object, **options: Any) -> Make:
    return lambda: ah.compose(kind, hooks, **options)


def said(kind: Any, hook_object: object, **options: Any) -> Make:
    return lambda: ah.HookGroup(kind, [ah.configure(hook_object, **options)])


def given(**options: Any) -> Make:
    return lambda: ah.HookGroup(Calls, **options)


HOOKS: list[Any] = [
    (
        made(Calls, hook(on=no_arguments)),
        "Observer.on()",
        "cannot take the call Calls.on(call): too many",
    ),
    (
        made(Calls, hook(on=two_arguments)),
        "Observer.on(call",
        "missing a required argument: 'more'",
    ),
    *[
        (
            made(Events, hook(**{name: name_only})),
            f"Observer.{name}(",
            "cannot take the call",
            f"Events.{name}(name",
            "*",
        )
        for name in ("on_items", "on_fields")
    ],
    (
        made(Calls, hook(on=function)),
        "Observer.on is a plain function, but",
        "async def",
    ),
    (
        made(Calls, hook(plain=coroutine)),
        "Observer.plain is a coroutine function",
        "Calls.plain is a plain function; write it as",
    ),
    (made(Calls, object()), "<object object", "has none of the methods of Calls: answers"),
    (made(Calls, hook(Calls)), "has none of the methods of Calls: answers"),
    (made(Calls, Does), "the class Does", "give an object of it"),
    (made(Calls, ah.dispatch.HookRegistration(Does)), "the class Does", "give an object of it"),
    (made(Calls, do_nothing), "do_nothing", "is a function", "`on`"),
    (
        made(Events, ah.HookGroup(Calls)),
        "<HookGroup Calls: no hooks> has none of the methods",
        "give its `hooks`",
    ),
    (made(Calls, ON, ah.configure(ON, order=1)), "twice", "make two objects"),
    (lambda: ah.compose(Calls, ON), "hooks is <", "Observer object", "give a list of hooks"),
    (
        lambda: ah.compose([ON], Calls),  # type: ignore[arg-type]
        "hooks is <class",
        "give the class first, then the hooks",
    ),
    (
        lambda: ah.compose(Calls, ah.configure(ON)),
        "hooks is HookRegistration(",
        "give a list of hooks",
    ),
    *[
        (made(Steps, hook(**{name: method})), f"Observer.{name} cannot be called", "generator")
        for name in ("generator", "asynchronous")
        for method in (generator, around)
    ],
    *[
        (made(Steps, hook(**{name: method})), f"Observer.{name} is a")
        for name in ("plain", "untyped")
        for method in (generator, around)
    ],
    (made(Steps, hook(numbers=generator)), "Observer.numbers is a generator", "write it as `def`"),
    (
        made(Layers, hook(empty=around)),
        "Observer.empty is an async generator, but",
        "write it as `async def`",
    ),
    *[
        (
            made(Builder, hook(**{name: coroutine})),
            f"Observer.{name} cannot be called: Builder.{name} returns a hook",
            "use this hook beside the others",
        )
        for name in ("itself", "text", "base")
    ],
    # options that would have no effect, or contradict each other
    (
        said(Kinds, hook(first=Does.first), background=True),
        "Observer has background=True, but none of its methods can be",
    ),
    (
        said(Kinds, hook(around=Does.around), background=True),
        "Observer has background=True, but none of its methods can be",
    ),
    (
        said(Calls, hook(plain=function), timeout=5),
        "Observer.plain wraps other calls, whose time would count, or is a plain function",
    ),
    *[
        (
            said(Layers, hook(empty=coroutine), **options),
            "Observer.empty has on_error=\"log\" or disable_after, but only it calls 'call_next'",
            'results={"empty": "wrap"}',
        )
        for options in ({"on_error": "log"}, {"disable_after": 1})
    ],
    # which argument takes the result, or calls the next
    *[
        (
            made(Layers, hook(**{name: coroutine}), results={name: "wrap"}),
            f"Layers.{name} cannot wrap",
            "not clear",
            choices,
        )
        for name, choices in (
            ("two", "wrap(argument=...): first, second"),
            ("no", "wrap(argument=...): request"),
        )
    ],
    *[
        (
            made(Layers, hook(no=coroutine), results={"no": way(argument="x")}),
            "Layers.no cannot",
            "it has no argument 'x'",
        )
        for way in (ah.wrap, ah.chain)
    ],
    (
        made(Events, hook(on_fields=any_arguments), results={"on_fields": ah.wrap(argument="x")}),
        "it has no argument 'x'",
    ),
    (
        made(Layers, hook(two=coroutine), hook(two=coroutine), results="wrap"),
        "clear which argument is meant, ah.chain(argument=...) or ah.wrap(argument=...)",
    ),
    (
        made(Layers, DIFFERENT, results={"different": "chain"}),
        "Layers.different cannot chain",
        *UNCLEAR,
    ),
    (
        made(Layers, DIFFERENT, hook(different=coroutine), results="chain"),
        ".different and",
        "both return a result",
        "clear which argument is meant, ah.chain(argument=...)",
    ),
    (
        made(Layers, hook(get=function), hook(get=function), results="wrap"),
        "both return a result",
        'give results={"get": "first"}',
    ),
    (
        made(Calls, hook(count=coroutine), hook(count=coroutine)),
        ".count and",
        'results={"count": "first"}',
    ),
    # functions
    (lambda: ah.compose_functions([ah.configure(do_nothing, background=True)]), "background=True"),
    *[
        (add, "is a generator, but")
        for function in (generates, hook(__call__=generator))
        for add in (
            partial(ah.compose_functions, [function]),
            partial(ah.HookGroup(Calls).on(Calls.on), function),
        )
    ],
    (
        lambda: ah.compose_functions([ah.configure(lambda: None, timeout=1.0)]),
        "which no time limit can end",
    ),
    # what is no list of hooks
    *[
        (partial(make, given), "hooks is ", "; give a list of hooks")
        for make in (ah.in_order, partial(ah.HookGroup, Calls))
        for given in NO_LISTS
    ],
]
ARGUMENTS: list[Any] = [
    (given(results={"frst": "first"}), "results has 'frst'", "did you mean 'first'"),
    (
        given(results={"count": "last"}),
        "results['count'] is 'last'",
        '"together", "merge", "all", "chain" or "wrap"',
    ),
    (given(results="last"), "results is 'last'", '"wrap"'),
    (given(results={"count"}), "results is {'count'}", 'give "first"'),
    (given(grace_secs=-1), "grace_secs is -1"),
    (lambda: ah.point("last"), "the argument of @point is 'last'"),  # type: ignore[arg-type]
    (lambda: ah.compose_functions([5]), "the function of a hook is 5; give a function"),
    (lambda: ah.configure(do_nothing, timeout=0), "timeout of do_nothing is 0"),
    (
        lambda: ah.compose_functions(do_nothing),  # type: ignore[call-overload]
        "functions is <function",
        "give a list of functions",
    ),
    (
        lambda: ah.compose_functions([do_nothing], results="last"),  # type: ignore[call-overload]
        "results is 'last'",
        '"chain" or "wrap"',
    ),
    # options of a hook
    *[
        (make, f"{name} of Observer is {options[name]!r}")
        for name, options in (
            ("order", {"order": 1.5}),
            ("order", {"order": True}),
            ("timeout", {"timeout": 0}),
            ("on_error", {"on_error": ""}),
            ("background", {"background": 1}),
            ("max_pending", {"max_pending": 0}),
            ("max_pending", {"max_pending": None}),
            ("disable_after", {"disable_after": 0, "on_error": "log"}),
        )
        for make in (
            said(Calls, ON, **options),
            lambda options=options: ah.HookGroup(Calls, [HookRegistration(ON, **options)]),
        )
    ],
]


@pytest.mark.parametrize(
    ("error", "make", "says"),
    [
        *((InvalidHookError, make, says) for make, *says in HOOKS),
        *((InvalidArgumentError, make, says) for make, *says in ARGUMENTS),
    ],
    ids=[says[0] for _, *says in (*HOOKS, *ARGUMENTS)],
)
def test_what_cannot_hold_is_refused(
    error: type[AiohooksError], make: Make, says: list[str]
) -> None:
    """The message names the hook, the method or the option, with its value, and says what to
    write.
    """
    with refused(error, *says):
        make()


class Tools:
    async def on_tool_start(self) -> None: ...

    async def on_tool_end(self) -> None: ...


class Job:
    """A method with a short name: a hook that sends something has a `send` beside it, which is not
    misspelt.
    """

    async def end(self) -> None: ...

    async def stop(self) -> None: ...


NEAR = (
    "n_tool_start on_tol_start on_tool_star on_tool_starts xon_tool_start on_ttool_start"
    " in_tool_start on_toolxstart "
)
NEAR += "on_tool_starx no_tool_start on_tool_satrt on_tool_statr"
FAR = (
    "on_tool on_tool_started tool_start no_tool_satrt on_tool_sxyrt xn_tool_starx on_tool_sratt"
    " ontool_starx _on_tool_start"
)
NAMES = [(Tools, "on_tool_start", NEAR, FAR), (Job, "end", "ends edn en", "send and")]
NAMES += [(Job, "stop", "atop", "send")]


@pytest.mark.parametrize(
    ("kind", "right", "name", "near"),
    [
        (*case, name, names is near)
        for *case, near, far in NAMES
        for names in (near, far)
        for name in names.split()
    ],
)
def test_a_name_that_is_one_edit_away_is_refused(
    kind: type, right: str, name: str, near: bool
) -> None:
    """One letter more, less, changed, or exchanged with its neighbour, anywhere in the name, but
    not the first of a short one.

    Two edits are another word.
    """
    misspelt = hook(**{name: no_arguments, right: no_arguments})
    says = f"Observer.{name} is not a method of {kind.__name__}", f"did you mean '{right}'"
    with refused(InvalidHookError, *says) if near else contextlib.nullcontext():
        ah.compose(kind, [misspelt])


@pytest.mark.parametrize(
    "make",
    [
        *(made(Builder, hook(**{name: coroutine})) for name in ("anything", "other")),
        *(made(Events, hook(**{name: any_arguments})) for name in ("on_items", "on_fields")),
        made(Handler, hook(Handler, on_event=coroutine)),
        given(results="merge"),
        *(
            made(
                Layers,
                hook(**{name: coroutine}),
                hook(**{name: coroutine}),
                results={name: ah.wrap(argument=argument)},
            )
            for name, argument in (("two", "first"), ("two", "second"), ("no", "request"))
        ),
    ],
)
def test_what_fits_is_not(make: Make) -> None:
    """Every object is an `object`, what cannot be evaluated is compared by name, a hook may take
    more, an argument is named.
    """
    make()


def test_a_hook_that_is_added_and_refused_leaves_the_group_as_it_was() -> None:
    """Also the methods that it has."""
    group = ah.HookGroup(Kinds)
    with refused(InvalidHookError, "none of its methods can be queued"):
        group.add(ah.configure(hook(first=Does.first), background=True))
    assert group.status() == []
    group.add(hook(first=Does.first))
    assert len(group.status()) == 1
