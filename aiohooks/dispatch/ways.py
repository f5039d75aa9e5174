"""A method of a hook interface, and the ways in which the results of several hooks become one.

point, chain, wrap   mark how the results of several hooks become one
Point                a method of an interface
"""

from __future__ import annotations

import collections.abc
import dis
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import WeakSet

from aiohooks._core.validate import check_choice, check_instance
from aiohooks.dispatch.arguments import Parameters
from aiohooks.dispatch.plain import (
    annotations_of,
    returns_awaitable,
    union_parts,
    without_awaitables,
)
from aiohooks.errors import InvalidHookError, did_you_mean, safe_repr

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

Way = Literal["first", "together", "merge", "all", "chain", "wrap"]
WAYS: tuple[str, ...] = typing.get_args(Way)


@dataclass(frozen=True)
class NamedArgument:
    """`"chain"` or `"wrap"`, with the argument that it is about."""

    how: Literal["chain", "wrap"]
    argument: str


How: TypeAlias = Way | NamedArgument
"""How the results of several hooks become one; see `point`."""
_MARK = "__aiohooks_point__"


def point(how: How) -> Callable[[F], F]:
    """Mark a method of a hook interface that returns something: how the results of several hooks
    become one.

    In all ways a failing hook ends the call with its error, and a hook that exceeds its `timeout`
    with a `HookTimeoutError`: a guard that does not work allows nothing. With `on_error="log"`, and
    while it is disabled, a hook has no result, and the others decide.

    Args:
        how: a way, or what `chain` or `wrap` returns.

            `"first"`: the hooks are called one after another, and the first result that is not None
            wins; the rest are not called.

            `"together"`: they run concurrently, and the first result in registration order that is
            not None wins.

            `"merge"`: they run concurrently, and their results are joined in registration order:
            lists, tuples, or dicts of different keys.

            `"all"`: they run concurrently, and a list has every result in order of the hooks.

            `"chain"`: they are called one after another, and each result replaces an argument: the
            only one, or the one with the annotation of the result. None leaves it as it is, and
            `return aiohooks.dispatch.end_chain(value)` ends the chain with a value.

            `"wrap"`: an argument calls the next hook: the one that is annotated as a callable which
            returns an awaitable; or, if it has no annotation, the only one, or the last one of a
            method that is marked with `@point`. The arguments that it is given replace the last
            ones of the call. The one of the last hook calls the class's own method; or, where that
            is abstract or does nothing, what the caller gave, with what this hook passes by
            position, or else with the arguments of the call.

    Raises:
        InvalidArgumentError: `how` is something else.
    """
    check_how(how, "the argument of @point")

    def mark(method: F) -> F:
        setattr(method, _MARK, how)
        return method

    return mark


def chain(*, argument: str) -> How:
    """Return the way `"chain"` with the name of the argument that each result replaces.

    Example: `results={"on_send": ah.chain(argument="message")}`.

    Raises:
        InvalidArgumentError: `argument` is not a string.
    """
    check_instance(argument, str, "argument")
    return NamedArgument("chain", argument)


def wrap(*, argument: str) -> How:
    """Return the way `"wrap"` with the name of the argument that calls the next hook.

    Example: `results={"handle": ah.wrap(argument="app")}`.

    Raises:
        InvalidArgumentError: `argument` is not a string.
    """
    check_instance(argument, str, "argument")
    return NamedArgument("wrap", argument)


class ChainEnd:
    """The last result of a chain, as `end_chain` returns it."""

    def __init__(self, value: object) -> None:
        self.value: object = value


def end_chain(value: T) -> T:
    """Return what a hook of a chain returns to end it: `value` is the result of the call, and the
    hooks behind this one are not called.
    """
    return typing.cast("T", ChainEnd(value))


def check_how(how: object, what: str) -> None:
    """Raise unless `how` is a way of `point`."""
    if not isinstance(how, NamedArgument):
        check_choice(how, what, *WAYS)


# -- a method


class Point:
    """A method of a hook interface."""

    def __init__(
        self,
        kind: type[Any],
        name: str,
        member: Any,
        given: How | None,
        default: How | None,
    ) -> None:
        """Read a method of `kind`.

        Args:
            kind: the class.
            name: the name of the method.
            member: the method, as it stands in the class.
            given: how its results become one.
            default: the same, for all methods that return something.

        Raises:
            InvalidHookError: the way that is given for the method, or marked on it, cannot hold.
        """
        function = inspect.unwrap(member)
        annotations = annotations_of(function, {base.__name__: base for base in kind.__mro__})
        result, awaits = without_awaitables(annotations.get("return", Any))
        if inspect.iscoroutinefunction(function):
            awaits = "always"
        self.name: str = name
        self.label: str = kind.__name__ if name == "__call__" else f"{kind.__name__}.{name}"
        """Its name in messages; the class that has only `__call__` stands for functions."""
        self.is_async: bool = awaits != "never"
        self.is_either: bool = awaits == "perhaps"
        """Whether it is a plain method that returns a result, or an awaitable of it if a hook may
        wait.
        """
        self.parameters: Parameters = Parameters(member)
        self.fitting: WeakSet[Any] = WeakSet()
        """Functions of classes of hooks that can be called so."""
        self.does_nothing: bool = does_nothing(function)
        """Whether its own body is empty, or raises `NotImplementedError`."""
        self.answers_hook: bool = _is_hook(result, kind)
        """Whether it returns a hook, which would take the place of the group."""
        arguments = {name: annotations.get(name, Any) for name in self.parameters.names}
        returns_none = result in (None, type(None))
        nexts = [name for name, annotation in arguments.items() if calls_next(annotation)]
        marked = getattr(member, _MARK, None) or getattr(function, _MARK, None)
        asked = given or marked or default
        guess: Guess = "last"
        if asked is not marked:
            # A way for all methods says nothing of a single one.
            guess = "only" if given else "none"
        problem = self._choose_argument(asked, arguments, result, guess)
        if problem and (given or marked):
            raise InvalidHookError(f"{self.label} cannot {_way_of(asked)}: {problem}")
        self.how: Way | Literal["none", "any", "one"] = "one"
        """How results become one. Without a way: `"none"`, nothing is returned; `"any"`, that is
        not known; `"one"`, only one hook may return a result.
        """
        way = _way_of(asked)
        is_named = isinstance(asked, NamedArgument) and asked.argument in arguments
        is_meant = given or marked or (way == "wrap" and (nexts or is_named))
        if way is not None and not problem and (is_meant or not (nexts or returns_none)):
            self.how = way
        elif returns_none and not nexts:
            self.how = "none"
        elif result is Any and self.does_nothing and not (nexts or problem):
            self.how = "any"
        self.empty: Callable[[], Any] = list if self.how == "all" else _container(result)
        """Makes the result of a merge of nothing, or of all results of no hook."""
        self.calls_next: bool = self.how == "wrap" or (self.how == "one" and bool(nexts))
        """Whether an argument calls the next hook: the result of a hook counts, also None."""
        if self.how == "wrap" and getattr(member, "__isabstractmethod__", False):
            # Python demands a body, and that of an abstract method is no hook.
            self.does_nothing = True
        self.advice: str = self._advice(nexts)
        """What to do where several hooks return a result."""
        if problem:
            self.advice += f'; "{_way_of(asked)}" cannot hold: {problem}'

    def value_of(self, result: Any) -> Any:
        """Return the result of a hook, without the mark that it ends a chain.

        Raises:
            InvalidHookError: the result has this mark, and the method is no chain.
        """
        if not isinstance(result, ChainEnd):
            return result
        if self.how != "chain":
            raise InvalidHookError(
                f"a hook returned end_chain({safe_repr(result.value)}), but {self.label} is no"
                ' chain; return the value, or give results="chain"'
            )
        return result.value

    def _choose_argument(
        self,
        asked: How | None,
        arguments: Mapping[str, Any],
        result: Any,
        guess: Guess,
    ) -> str:
        """Choose the argument that a way is about.

        Args:
            asked: the way.
            arguments: the annotations of the arguments, by name.
            result: the annotation of the result.
            guess: which argument calls the next hook if none is annotated so.

        Returns:
            Why the way cannot hold, or an empty text.
        """
        way = _way_of(asked)
        if not self.is_async and way == "wrap":
            return "only a coroutine method can, with an argument that calls the next hook"
        if isinstance(asked, NamedArgument):
            return self._take_argument(asked.argument)
        if way in ("chain", "wrap"):
            return self._find_argument(way, arguments, result, guess)
        return ""

    def _take_argument(self, name: str) -> str:
        """Choose the argument of this name; return why it cannot be, or an empty text."""
        parameters = self.parameters
        parameters.chosen = name
        names = parameters.names
        if name in names or (not names and parameters.takes_more_keywords):
            return ""
        return f"it has no argument {name!r}; {did_you_mean(name, names)}"

    def _find_argument(
        self,
        way: str,
        arguments: Mapping[str, Any],
        result: Any,
        guess: Guess,
    ) -> str:
        """Choose the argument that a way is about; return why it is not clear, or an empty text."""
        if not arguments and self.parameters.takes_more_positions:
            return ""
        if way == "wrap":
            does = "calls the next hook"
            found = _arguments_that_call(arguments, guess)
        else:
            does = "takes the result"
            found = [*arguments]
            if len(arguments) > 1:
                found = [name for name in arguments if _is_same_type(arguments[name], result)]
        if len(found) == 1:
            self.parameters.chosen = found[0]
            return ""
        return (
            f"it is not clear which argument {does}; annotate it, or name it with"
            f" ah.{way}(argument=...): {', '.join(arguments) or 'it has none'}"
        )

    def _advice(self, nexts: list[str]) -> str:
        """Return what to do if several hooks return a result.

        Args:
            nexts: the arguments that call the next hook, by their annotations.
        """
        if nexts:
            return (
                f"{' or '.join(map(repr, nexts))} calls the next one, so the wrapped call would run"
                f' several times; give results={{"{self.name}": "wrap"}}, or "together" if it does'
                " not"
            )
        if self.name == "__call__":
            # Of functions, which have no method that could be marked.
            return 'give results="first", or "together", "all", "chain" or "wrap"'
        return (
            f'give results={{"{self.name}": "first"}}, or "together", "all", "chain" or "wrap", or'
            " put @point on the method"
        )


def _way_of(how: How | None) -> Way | None:
    """Return a way without its argument."""
    return how.how if isinstance(how, NamedArgument) else how


Guess = Literal["none", "only", "last"]
"""Which argument without an annotation calls the next hook: none, one that is alone, or the last
one. A way for all methods of a class says nothing of a single one of them.
"""


def _arguments_that_call(arguments: Mapping[str, Any], guess: Guess) -> list[str]:
    """Return the arguments that may call the next hook, by their annotations or else by a guess."""
    found = [name for name in arguments if calls_next(arguments[name])]
    if not found:
        found = [name for name in arguments if calls_next(arguments[name], is_unsure=True)]
    if not found and (guess == "last" or (guess == "only" and len(arguments) == 1)):
        found = [name for name in [*arguments][-1:] if arguments[name] is Any]
    return found


_CALLABLE: Any = collections.abc.Callable


def calls_next(annotation: Any, *, is_unsure: bool = False) -> bool:
    """Return whether an annotation is of a callable that returns an awaitable, or, if `is_unsure`,
    of one whose result is not annotated.
    """
    for part in union_parts(annotation):
        kind = typing.get_origin(part) or part
        if kind is _CALLABLE:
            result = (typing.get_args(part) or [Any])[-1]
            if without_awaitables(result)[1] != "never" or (is_unsure and result is Any):
                return True
        if isinstance(kind, type) and _is_awaited(kind):
            return True
    return False


def _is_awaited(kind: type[Any]) -> bool:
    """Return whether the result of calling an object of a class is awaited."""
    for base in kind.__mro__:
        call = vars(base).get("__call__")
        if inspect.isfunction(call):
            return inspect.iscoroutinefunction(call) or returns_awaitable(call)
    return False


def _is_same_type(annotation: Any, answer: Any) -> bool:
    if Any in (annotation, answer):
        return False
    without_none = [
        {part for part in union_parts(union) if part is not type(None)}
        for union in (annotation, answer)
    ]
    return without_none[0] == without_none[1]


def _is_hook(answer: Any, kind: type[Any]) -> bool:
    itself: Any = typing.Self
    return answer is itself or (typing.get_origin(answer) or answer) in kind.__mro__[:-1]


def _nothing() -> None: ...


def _container(answer: Any) -> Callable[[], Any]:
    for part in union_parts(answer):
        if part is type(None):
            return _nothing
        kind = typing.get_origin(part) or part
        if isinstance(kind, type) and issubclass(kind, collections.abc.Mapping):
            return dict[Any, Any]
        if kind is tuple:
            return tuple[Any, ...]
    return list[Any]


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    return [(instruction.opname, instruction.argval) for instruction in dis.get_instructions(code)]


async def _empty_coroutine() -> None: ...
def _empty_function() -> None: ...


_EMPTY_BODIES = [_instructions(empty.__code__) for empty in (_empty_coroutine, _empty_function)]
_RETURNS = {"RETURN_VALUE", "RETURN_CONST"}


def does_nothing(function: types.FunctionType) -> bool:
    """Return whether the body is empty, or only raises `NotImplementedError`."""
    instructions = _instructions(function.__code__)
    if "NotImplementedError" in function.__code__.co_names:
        return _RETURNS.isdisjoint(name for name, _ in instructions)
    return instructions in _EMPTY_BODIES
