"""A lifecycle: a class whose public methods are what hooks can implement; and the checks of hooks against it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from aiohooks._validate import check_choice, check_mapping, is_coroutine_function
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import registration_of
from aiohooks.errors import InvalidArgumentError, InvalidHookError, did_you_mean

How = Literal["first", "chain", "wrap"]
"""How the answers of several hooks become one; see `point`."""
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__aiohooks_point__"


def point(how: How) -> Callable[[F], F]:
    """Mark a method of a lifecycle that returns something: how the answers of several hooks become one.

    Args:
        how: `"first"`: the hooks are called in turn, and the first answer that is not None wins; the rest are not called.
            `"chain"`: the hooks are called in turn, and each answer takes the place of the last argument; None leaves it as it
            is. `"wrap"`: the last argument calls the next hook, and the one of the last hook is the caller's own; the arguments
            that it is given replace the last ones.

    Raises:
        InvalidArgumentError: `how` is something else.
    """
    check_choice(how, "the argument of @point", "first", "chain", "wrap")

    def mark(method: F) -> F:
        setattr(method, _MARK, how)
        return method

    return mark


class Point(NamedTuple):
    """A method of a lifecycle."""

    name: str
    own: Callable[..., Any]
    """The function of the class itself."""
    is_async: bool
    how: Literal["first", "chain", "wrap", "none", "any", "one"]
    """How answers become one. Where it is not marked: `"none"`, nothing is returned; `"any"`, that is not known; `"one"`, only
    one hook may answer."""
    positional: tuple[str, ...]
    """The names of the parameters that may be given by position, without `self`."""
    keywords: tuple[str, ...]
    """The names of those that are given by keyword only."""
    variadic: tuple[bool, bool]
    """Whether it takes any positional arguments, and any keywords."""
    answers_hook: bool
    """Whether it returns a hook, which would take the place of the group."""


class Lifecycle:
    """The methods of a class that hooks can implement."""

    def __init__(
        self, kind: Callable[..., Any], results: Mapping[str, How] | How | None = None, *, generators: bool = True, hint: str = ""
    ) -> None:
        """Read the public methods of `kind`.

        Args:
            kind: a class, or a typing alias of one.
            results: how the answers of several hooks become one, by the name of the method; or one way for all methods that
                return something.
            generators: whether a hook may implement a coroutine method as an async generator, which wraps it.
            hint: what to do with a hook whose methods are plain functions.

        Raises:
            InvalidHookError: `kind` is not a class, or has no public methods.
            InvalidArgumentError: `results` names a method that `kind` does not have, or an unknown way.
        """
        origin: object = typing.get_origin(kind) or kind
        if not isinstance(origin, type):
            raise InvalidHookError(f"{kind!r} is not a class; give the class whose methods the hooks implement")
        self.kind: type[Any] = origin
        self._generators = generators
        self._hint = hint
        default = results if isinstance(results, str) else None
        if default is not None:
            check_choice(default, "results", "first", "chain", "wrap")
        else:
            check_mapping(results, "results")
        by_name: Mapping[str, How] = results if isinstance(results, Mapping) else {}
        for name, how in by_name.items():
            check_choice(how, f"results[{name!r}]", "first", "chain", "wrap")
        self.points: dict[str, Point] = {}
        for name in dir(origin):
            method = inspect.getattr_static(origin, name)
            if not name.startswith("_") and inspect.isfunction(method):
                self.points[name] = _point(origin, name, method, by_name.get(name), default)
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {origin.__name__}; {did_you_mean(name, self.points)}"
                )
        if not self.points:
            raise InvalidHookError(f"{origin.__name__} has no public methods, so hooks cannot implement any")

    def overrides(self, hook: object, name: str) -> bool:
        """Return whether `hook` has a method `name` of its own, and not the one of the class."""
        method = getattr(hook, name, None)
        if method is None:
            return False
        function = getattr(method, "__func__", method)
        return all(function is not vars(base).get(name) for base in self.kind.__mro__)

    def implemented(self, hook: object) -> list[Point]:
        """Return the methods that `hook` implements."""
        return [each for each in self.points.values() if self.overrides(hook, each.name)]

    def check(self, hook: object) -> None:
        """Raise unless `hook` can be called as the lifecycle says.

        Raises:
            InvalidHookError: a method has another kind of function or another signature; or its name is nearly that of one.
        """
        who, kind = hook_name(hook), self.kind.__name__
        for each in self.implemented(hook):
            method = getattr(hook, each.name)
            wraps = self._generators and each.how != "wrap" and inspect.isasyncgenfunction(method)
            if each.is_async and not is_coroutine_function(method) and not wraps:
                raise InvalidHookError(f"{who}.{each.name} is not a coroutine function; write it as `async def`{self._hint}")
            if not each.is_async and is_coroutine_function(method):
                raise InvalidHookError(
                    f"{who}.{each.name} is a coroutine function, but {kind}.{each.name} is a plain one; write it as `def`"
                )
            if each.answers_hook:
                raise InvalidHookError(
                    f"{who}.{each.name} returns a hook, which would take the place of the group; use this hook beside the group"
                )
            _check_signature(f"{who}.{each.name}", method, each, kind)
        if "__call__" in dir(self.kind) and self.overrides(hook, "__call__"):
            raise InvalidHookError(f"{who}.__call__ decides which of its methods are called, so a group cannot call them")
        for name in _public_functions(hook):
            if name not in self.points and is_coroutine_function(getattr(hook, name)):
                for known in self.points:
                    if _one_edit_apart(name, known):
                        raise InvalidHookError(
                            f"{who}.{name} is not a method of {kind} and would never be called; did you mean {known!r}? "
                            "A helper's name begins with an underscore"
                        )


def registered_hooks(lifecycle: Lifecycle, hooks: Iterable[object]) -> tuple[RegisteredHook, ...]:
    """Check hooks and registrations and name them: by their class, numbered where there are several.

    Raises:
        InvalidHookError: one is a class, is listed twice, or does not fit the lifecycle.
    """
    registrations = [registration_of(one) for one in hooks]
    for number, registration in enumerate(registrations):
        if any(registration.hook is other.hook for other in registrations[:number]):
            raise InvalidHookError(f"hooks has {registration.hook!r} twice; make two objects of it if both are meant")
        lifecycle.check(registration.hook)
    classes = [hook_name(one.hook) for one in registrations]
    return tuple(
        RegisteredHook(name if classes.count(name) == 1 else f"{name}#{classes[: number + 1].count(name)}", registrations[number])
        for number, name in enumerate(classes)
    )


def hook_name(hook: object) -> str:
    """Return the name of a hook in messages: that of its class, or of the function that it was made of."""
    return getattr(hook, "__aiohooks_name__", None) or type(hook).__name__


def _point(kind: type[Any], name: str, method: Any, given: How | None, default: How | None) -> Point:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    is_async = inspect.iscoroutinefunction(method)
    annotation = _evaluated(method.__annotations__.get("return", Any), method)
    how: Any = given or getattr(method, _MARK, None)
    if how is None:
        if annotation in (None, type(None), "None"):
            how = "none"
        elif default is not None and (default == "first" or (parameters and (is_async or default == "chain"))):
            how = default
        else:
            how = "any" if annotation in (Any, "Any") and not _takes_next(parameters) else "one"
    if how == "wrap" and (not is_async or not parameters):
        raise InvalidHookError(
            f"{kind.__name__}.{name} cannot wrap: only a coroutine method can whose last argument calls the next"
        )
    if how == "chain" and not parameters:
        raise InvalidHookError(f"{kind.__name__}.{name} cannot chain: it has no argument whose place an answer could take")
    names = {parameter.kind: [one.name for one in parameters if one.kind is parameter.kind] for parameter in parameters}
    Kind = inspect.Parameter
    return Point(
        name,
        method,
        is_async,
        how,
        (*names.get(Kind.POSITIONAL_ONLY, ()), *names.get(Kind.POSITIONAL_OR_KEYWORD, ())),
        tuple(names.get(Kind.KEYWORD_ONLY, ())),
        (Kind.VAR_POSITIONAL in names, Kind.VAR_KEYWORD in names),
        _is_hook(annotation, kind),
    )


def _evaluated(annotation: Any, method: Any) -> Any:
    """Return an annotation, as its text if it has names that exist for type checkers only."""
    if isinstance(annotation, str):
        module = sys.modules.get(method.__module__)
        with contextlib.suppress(Exception):
            owner = types.SimpleNamespace(__annotations__={"return": annotation})
            return typing.get_type_hints(owner, None if module is None else vars(module))["return"]
    return annotation


def _takes_next(parameters: list[inspect.Parameter]) -> bool:
    """Return whether the last argument looks like one that calls the next hook."""
    return bool(parameters) and (
        parameters[-1].name in ("call_next", "handler", "next") or "Callable" in str(parameters[-1].annotation)
    )


def _is_hook(annotation: Any, kind: type[Any]) -> bool:
    if isinstance(annotation, str):
        return annotation.split("[")[0].strip("'\" ") in {"Self", *(base.__name__ for base in kind.__mro__ if base is not object)}
    annotation = typing.get_origin(annotation) or annotation
    return str(annotation) == "typing.Self" or (
        isinstance(annotation, type) and annotation is not object and issubclass(kind, annotation)
    )


def _check_signature(who: str, method: Any, each: Point, kind: str) -> None:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return  # written in C
    positional = [None] * (len(each.positional) + each.variadic[0])
    keywords = dict.fromkeys((*each.keywords, *(("any_other",) if each.variadic[1] else ())))
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        given, wanted = _without_annotations(signature), _without_annotations(inspect.signature(each.own))
        raise InvalidHookError(f"{who}{given} cannot take the call {kind}.{each.name}{wanted}: {error}") from None


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """Shorten a signature for a message: those of agent frameworks are hundreds of characters long."""
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return inspect.Signature(parameters)


def _public_functions(hook: object) -> list[str]:
    names = {name for base in type(hook).__mro__ for name, value in vars(base).items() if inspect.isfunction(value)}
    return sorted(name for name in names if not name.startswith("_"))


def _one_edit_apart(a: str, b: str) -> bool:
    """Return whether one letter more, less, changed or exchanged with its neighbour makes `a` of `b`."""
    if len(a) < len(b):
        a, b = b, a
    at = next((number for number, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), len(b))
    if len(a) > len(b):
        return a[at + 1 :] == b[at:]
    return a[at + 1 :] == b[at + 1 :] or (a[at : at + 2] == b[at : at + 2][::-1] and a[at + 2 :] == b[at + 2 :])
