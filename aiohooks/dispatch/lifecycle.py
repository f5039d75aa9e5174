"""A lifecycle: a class whose public methods are what hooks can implement; and the checks of hooks against it."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

from aiohooks._validate import check_choice, check_mapping, is_coroutine_function
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import HookRegistration, registration_of
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
    check_choice(how, "the argument of @point", *typing.get_args(How))

    def mark(method: F) -> F:
        setattr(method, _MARK, how)
        return method

    return mark


class Point(NamedTuple):
    """A method of a lifecycle."""

    name: str
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
    does_nothing: bool
    """Whether its own body is empty."""
    fitting: WeakSet[Any]
    """Functions of classes of hooks that can be called so."""


# What is known of a class since its first group. Nothing in it refers to the class, which is freed like any other.
_points: WeakKeyDictionary[type[Any], dict[Any, tuple[ref[Any], Point]]] = WeakKeyDictionary()
"""Its points, each with the function that it describes."""
_hook_classes: WeakKeyDictionary[type[Any], WeakSet[type[Any]]] = WeakKeyDictionary()
"""The classes of hooks without a method whose name is nearly that of a point."""


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
            check_choice(default, "results", *typing.get_args(How))
        else:
            check_mapping(results, "results")
        by_name: Mapping[str, How] = results if isinstance(results, Mapping) else {}
        for name, how in by_name.items():
            check_choice(how, f"results[{name!r}]", *typing.get_args(How))
        self.members: dict[str, Any] = {}
        """What the class and its bases have."""
        for base in reversed(origin.__mro__):
            self.members.update(vars(base))
        self.points: dict[str, Point] = {}
        self.attributes: dict[str, Any] = {}
        """The public data of the class, and its properties."""
        points = _points.setdefault(origin, {})
        for name in sorted(name for name in self.members if not name.startswith("_")):
            member = self.members[name]
            if inspect.isfunction(member):
                key = name, by_name.get(name), default, generators
                known = points.get(key)
                if known is None or known[0]() is not member:
                    known = points[key] = ref(member), _point(origin, name, member, by_name.get(name), default)
                self.points[name] = known[1]
            elif not callable(member) and not isinstance(member, (classmethod, staticmethod)):
                self.attributes[name] = member
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {origin.__name__}; {did_you_mean(name, self.points)}"
                )
        if not self.points:
            raise InvalidHookError(f"{origin.__name__} has no public methods, so hooks cannot implement any")

    def has_member(self, hook: object) -> bool:
        """Return whether `hook` is an object of the class."""
        try:
            return isinstance(hook, self.kind)
        except TypeError:  # a protocol that cannot be checked at runtime
            return self.kind in type(hook).__mro__

    def overrides(self, hook: object, name: str) -> bool:
        """Return whether `hook` has a method `name` of its own, and not the one of the class."""
        # The object that stands for a group has methods of its own that no hook implements; its class does not show them.
        method = None if name in getattr(hook, "__dict__", ()) else getattr(type(hook), name, None)
        if method is None:
            method = getattr(hook, name, None)
        function = getattr(method, "__func__", method)
        return method is not None and all(function is not vars(base).get(name) for base in self.kind.__mro__)

    def implemented(self, hook: object) -> list[Point]:
        """Return the methods that `hook` implements."""
        return [each for each in self.points.values() if self.overrides(hook, each.name)]

    def check(self, hook: object) -> list[Point]:
        """Return the methods that `hook` implements; raise unless it can be called as the lifecycle says.

        Raises:
            InvalidHookError: a method has another kind of function or another signature; or its name is nearly that of one.
        """
        points = self.implemented(hook)
        for each in points:
            method = getattr(hook, each.name)
            function = method.__func__ if isinstance(method, types.MethodType) else None
            if function not in each.fitting:
                self._check_method(hook_name(hook), method, each)
                if inspect.isfunction(function):
                    each.fitting.add(function)
        if "__call__" in self.members and callable(hook) and self.overrides(hook, "__call__"):
            raise InvalidHookError(
                f"{hook_name(hook)}.__call__ decides which of its methods are called, so a group cannot call them"
            )
        checked = _hook_classes.setdefault(self.kind, WeakSet())
        if type(hook) not in checked:
            self._check_names(hook)
            checked.add(type(hook))
        return points

    def _check_method(self, who: str, method: Any, each: Point) -> None:
        kind = self.kind.__name__
        is_generator = inspect.isasyncgenfunction(method)
        wraps = self._generators and each.how != "wrap" and is_generator
        if each.is_async and not is_coroutine_function(method) and not wraps:
            raise InvalidHookError(f"{who}.{each.name} is not a coroutine function; write it as `async def`{self._hint}")
        if not each.is_async and (is_generator or is_coroutine_function(method)):
            raise InvalidHookError(
                f"{who}.{each.name} is {'an async generator' if is_generator else 'a coroutine function'}, "
                f"but {kind}.{each.name} is a plain one; write it as `def`"
            )
        if each.answers_hook:
            raise InvalidHookError(
                f"{who}.{each.name} returns a hook, which would take the place of the group; use this hook beside the group"
            )
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            return  # written in C
        positional = [None] * (len(each.positional) + each.variadic[0])
        keywords = dict.fromkeys((*each.keywords, *(("any_other",) if each.variadic[1] else ())))
        try:
            signature.bind(*positional, **keywords)
        except TypeError as error:
            given, wanted = _without_annotations(signature), _without_annotations(inspect.signature(self.members[each.name]))
            raise InvalidHookError(f"{who}.{each.name}{given} cannot take the call {kind}.{each.name}{wanted}: {error}") from None

    def _check_names(self, hook: object) -> None:
        names = {name for base in type(hook).__mro__ for name, value in vars(base).items() if inspect.isfunction(value)}
        for name in sorted(names.difference(self.points)):
            if not name.startswith("_") and is_coroutine_function(getattr(hook, name)):
                for known in self.points:
                    if _one_edit_apart(name, known):
                        raise InvalidHookError(
                            f"{hook_name(hook)}.{name} is not a method of {self.kind.__name__} and would never be called; "
                            f"did you mean {known!r}? A helper's name begins with an underscore"
                        )


def registered_hooks(
    hooks: Iterable[object], numbers: Counter[str] | None = None, known: Container[int] = ()
) -> tuple[RegisteredHook, ...]:
    """Check registrations and name the hooks: by their class, numbered where there are several.

    Args:
        hooks: hooks and registrations.
        numbers: how many hooks have had each name before; counts these.
        known: the ids of hooks that there are already.

    Raises:
        InvalidHookError: one is a class, or is listed twice.
    """
    registrations: dict[int, HookRegistration] = {}
    for one in hooks:
        registration = registration_of(one)
        if id(registration.hook) in registrations or id(registration.hook) in known:
            raise InvalidHookError(f"hooks has {registration.hook!r} twice; make two objects of it if both are meant")
        registrations[id(registration.hook)] = registration
    count = Counter(hook_name(one.hook) for one in registrations.values())
    numbers = Counter() if numbers is None else numbers
    registered: list[RegisteredHook] = []
    for one in registrations.values():
        name = hook_name(one.hook)
        numbers[name] += 1
        is_one = count[name] == numbers[name] == 1
        registered.append(RegisteredHook(name if is_one else f"{name}#{numbers[name]}", one))
    return tuple(registered)


def check_options(registered: RegisteredHook, points: Iterable[Point]) -> None:
    """Raise unless the attributes of a registration hold for all of these methods.

    Raises:
        InvalidHookError: one of them would have no effect.
    """
    registration, queued = registered.registration, False
    for each in points:
        who = f"{registered.name}.{each.name}"
        if registration.timeout is not None and not each.is_async:
            raise InvalidHookError(f"{who} is a plain function, which no time limit can end; give its hook no timeout")
        queued |= each.is_async and each.how == "none"
        if registration.background and inspect.isasyncgenfunction(getattr(registered.hook, each.name)):
            raise InvalidHookError(f"{who} is an async generator: it wraps the calls of others, and cannot run in the background")
    if registration.background and not queued:
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )


def hook_name(hook: object) -> str:
    """Return the name of a hook in messages: that of its class, or of the function that it was made of."""
    return getattr(hook, "__aiohooks_name__", None) or type(hook).__name__


def _point(kind: type[Any], name: str, method: Any, given: How | None, default: How | None) -> Point:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    is_async = inspect.iscoroutinefunction(method)
    lacks: dict[How, str] = {}
    if not parameters:
        lacks["chain"] = "it has no argument whose place an answer could take"
    if not parameters or not is_async:
        lacks["wrap"] = "only a coroutine method can whose last argument calls the next"
    annotation = _evaluated(method.__annotations__.get("return", Any), method)
    how: Any = given or getattr(method, _MARK, None)
    if how is None:
        if annotation in (None, type(None), "None"):
            how = "none"
        elif default is not None and default not in lacks:
            how = default
        else:
            how = "any" if annotation in (Any, "Any") and not _takes_next(parameters) else "one"
    if how in lacks:
        raise InvalidHookError(f"{kind.__name__}.{name} cannot {how}: {lacks[how]}")
    names = {parameter.kind: [one.name for one in parameters if one.kind is parameter.kind] for parameter in parameters}
    Kind = inspect.Parameter
    return Point(
        name,
        is_async,
        how,
        (*names.get(Kind.POSITIONAL_ONLY, ()), *names.get(Kind.POSITIONAL_OR_KEYWORD, ())),
        tuple(names.get(Kind.KEYWORD_ONLY, ())),
        (Kind.VAR_POSITIONAL in names, Kind.VAR_KEYWORD in names),
        _is_hook(annotation, kind),
        _instructions(method.__code__) in _EMPTY_BODIES,
        WeakSet(),
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
    bases = kind.__mro__[:-1]
    if isinstance(annotation, str):
        return annotation.split("[")[0].strip("'\" ") in {"Self", *(base.__name__ for base in bases)}
    return str(annotation) == "typing.Self" or (typing.get_origin(annotation) or annotation) in bases


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    return [(one.opname, one.argval) for one in dis.get_instructions(code)]


async def _waits_for_nothing() -> None: ...


def _does_nothing() -> None: ...


_EMPTY_BODIES = [_instructions(one.__code__) for one in (_waits_for_nothing, _does_nothing)]


def _without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """Shorten a signature for a message: those of agent frameworks are hundreds of characters long."""
    parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return inspect.Signature(parameters)


def _one_edit_apart(a: str, b: str) -> bool:
    """Return whether one letter more, less, changed or exchanged with its neighbour makes `a` of `b`."""
    at = next((number for number, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
    a, b = a[at:], b[at:]
    return a[1:] == b or a == b[1:] or a[1:] == b[1:] or a[1::-1] + a[2:] == b
