"""What a class says about the hooks of it."""

from __future__ import annotations

from typing import Any, Self

import pytest

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from tests.support.checks import refused

NAME = "on_tool_start"


class Calls:
    async def on_tool_start(self) -> None: ...


def with_method(name: str) -> object:
    """Return a hook with a coroutine method of this name, beside one that fits and a helper."""

    async def method(self: object) -> None: ...

    return type("Observer", (), {name: method, NAME: method, "_on_tool_start": method})()


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        ("n_tool_start on_tol_start on_tool_star on_tool_starts xon_tool_start on_ttool_start in_tool_start", True),
        ("on_toolxstart on_tool_starx no_tool_start on_tool_satrt on_tool_statr", True),
        ("on_tool on_tool_started tool_start no_tool_satrt on_tool_sxyrt xn_tool_starx on_tool_sratt ontool_starx", False),
    ],
)
def test_a_name_that_is_one_edit_away_is_refused(names: str, is_refused: bool) -> None:
    """One letter more, less, changed, or exchanged with its neighbour, anywhere in the name; two edits are another word."""
    for name in names.split():
        if is_refused:
            with refused(InvalidHookError, f"Observer.{name} is not a method of Calls", f"did you mean {NAME!r}"):
                ah.compose(Calls, [with_method(name)])
        else:
            ah.compose(Calls, [with_method(name)])


class Base:
    async def inherited(self) -> Base | None: ...


class Builder(Base):
    """Methods that return a hook of the class, in all the ways this can be written; and two that do not."""

    async def itself(self) -> Self:
        raise NotImplementedError

    async def text(self) -> "Builder":  # noqa: UP037 - a text within the text
        raise NotImplementedError

    async def base(self) -> Base:
        raise NotImplementedError

    async def anything(self) -> object:
        raise NotImplementedError

    async def number(self) -> int:
        raise NotImplementedError


class OnlyForTypeCheckers:
    async def text(self) -> "OnlyForTypeCheckers[Missing]":  # type: ignore[name-defined, type-arg] # noqa: F821, UP037
        raise NotImplementedError

    async def other(self) -> "Missing":  # type: ignore[name-defined] # noqa: F821, UP037
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "name", "is_hook"),
    [
        *((Builder, name, name not in ("anything", "number")) for name in ("itself", "text", "base", "anything", "number")),
        *((OnlyForTypeCheckers, name, name == "text") for name in ("text", "other")),
    ],
)
def test_methods_that_return_a_hook_are_refused(kind: type[Any], name: str, is_hook: bool) -> None:
    """It would be called in place of the group. Every object is an `object`; what cannot be evaluated is compared by name."""

    async def method(self: object) -> Any: ...

    hook = type("Observer", (), {name: method})()
    if is_hook:
        with refused(InvalidHookError, f"Observer.{name} returns a hook", "use this hook beside the group"):
            ah.compose(kind, [hook])
    else:
        ah.compose(kind, [hook])


class Events:
    """A method that takes any positional arguments, and one that takes any keywords."""

    async def on_items(self, name: str, *items: int) -> None: ...

    async def on_fields(self, name: str, **fields: int) -> None: ...


@pytest.mark.parametrize("name", ["on_items", "on_fields"])
def test_hooks_must_take_as_many_arguments_as_the_class(name: str) -> None:
    """Where it takes any, so must they."""

    async def fits(self: object, name: str, *items: int, **fields: int) -> None: ...

    async def too_few(self: object, name: str) -> None: ...

    ah.compose(Events, [type("Observer", (), {name: fits})()])
    with refused(InvalidHookError, f"Observer.{name}(", "cannot take the call", f"Events.{name}(self, name", "*"):
        ah.compose(Events, [type("Observer", (), {name: too_few})()])


def test_a_hook_that_decides_which_of_its_methods_are_called_is_refused() -> None:
    """A lifecycle that is called as a whole calls its own methods; a hook that overrides that would bypass the group."""

    class Handler:
        async def __call__(self, event: str) -> None:
            await self.on_event(event)

        async def on_event(self, event: str) -> None: ...

    class Own(Handler):
        async def __call__(self, event: str) -> None: ...

        async def on_event(self, event: str) -> None: ...

    class Listener(Handler):
        async def on_event(self, event: str) -> None: ...

    ah.compose(Handler, [Listener()])
    with refused(InvalidHookError, "Own.__call__ decides which of its methods are called"):
        ah.compose(Handler, [Own()])
