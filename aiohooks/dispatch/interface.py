"""A hook interface: the methods that a class offers to hooks, and the checks of hooks.

Interface            the methods and the public data of a class, and the checks of hooks
registered_hooks     names hooks and checks their registrations
check_options        checks the options of a registration against the methods of its hook
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet, ref

from aiohooks._core.reports import logger
from aiohooks._core.validate import check_mapping, is_coroutine_function
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import FunctionHook, HookRegistration, hook_name, registration_of
from aiohooks.dispatch.plain import (
    annotations_of,
    function_kind,
    returns_awaitable,
    written_annotations,
)
from aiohooks.dispatch.ways import Combination, How, Point, checked_how
from aiohooks.errors import InvalidArgumentError, InvalidHookError, did_you_mean

NO_VALUE: Any = object()
"""The default of data that a class only declares: by an annotation, or as a slot."""


# -- a class

_known: WeakKeyDictionary[
    type[Any], tuple[dict[Any, tuple[ref[Any], Point]], WeakSet[type[Any]]]
] = WeakKeyDictionary()
"""The points of a class since its first group, each with its function, and the checked classes of
hooks. Nothing in it refers to the class, which is freed like any other.
"""


class Interface:
    """The methods of a class that hooks can implement, and its public data."""

    def __init__(
        self,
        kind: Callable[..., Any],
        results: Mapping[str, How] | How | None = None,
        *,
        in_group: bool = True,
        hint: str = "",
    ) -> None:
        """Read the public methods of `kind`.

        Args:
            kind: a class, or a typing alias of one.
            results: the ways of `point`, by the name of the method; or one for all methods that
                return something.
            in_group: whether hooks may implement a coroutine method as an async generator, which
                wraps it, and have further ones.
            hint: what to do with a hook whose methods are plain functions.

        Raises:
            InvalidHookError: `kind` is not a class, or has no public methods.
            InvalidArgumentError: `results` has an unknown method or way.
        """
        origin: object = typing.get_origin(kind) or kind
        if not isinstance(origin, type):
            raise InvalidHookError(
                f"{kind!r} is not a class; give the class whose methods the hooks implement"
            )
        self.kind: type[Any] = origin
        self.is_protocol: bool = getattr(origin, "_is_protocol", False)
        self._in_group = in_group
        self._hint = hint
        self.members: dict[str, Any] = _members(origin)
        """The attributes of the class and its bases."""
        self.points: dict[str, Point] = {}
        self.attributes: dict[str, Any] = {}
        """The public data of the class, and its properties."""
        self._unsupported: dict[str, str] = {}  # members that hooks cannot implement, and why
        self._checked: WeakSet[type[Any]] = _known.setdefault(origin, ({}, WeakSet()))[1]
        self._read_members(results)
        if not self.points:
            raise InvalidHookError(
                f"{origin.__name__} has no public methods, so hooks cannot implement any"
            )

    def _read_members(self, results: Mapping[str, How] | How | None) -> None:
        by_name: dict[str, Combination] = {}
        default: Combination | None = None
        if isinstance(results, (str, Combination)):
            default = checked_how(results, "results")
        elif results is not None:
            check_mapping(results, "results")
            for name, how in results.items():
                by_name[name] = checked_how(how, f"results[{name!r}]")
        for name in sorted(self.members):
            if not name.startswith("_"):
                self._add(name, by_name.get(name), default)
        if inspect.isfunction(self.members.get("__call__")):
            if self.points:
                self._unsupported["__call__"] = f"{self.kind.__name__} has other methods"
            else:
                self._add("__call__", by_name.get("__call__"), default)
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {self.kind.__name__};"
                    f" {did_you_mean(name, self.points)}"
                )

    def _add(
        self,
        name: str,
        given: Combination | None,
        default: Combination | None,
    ) -> None:
        """Add a member to the methods, to the data, or to the members that hooks cannot implement.

        Nested classes are none of these, and neither are helpers such as factories.
        """
        member = self.members[name]
        function = _method_function(member)
        if function is not None:
            points = _known[self.kind][0]
            key = name, given, default, self._in_group
            known = points.get(key)
            if known is None or known[0]() is not function:
                known = ref(function), Point(self.kind, name, member, given, default)
                points[key] = known
            self.points[name] = known[1]
        elif isinstance(member, _HELPERS):
            return
        elif callable(member) or isinstance(member, _NO_FUNCTIONS):
            member_kind: Any = type(cast("object", member))
            self._unsupported[name] = (
                f"{self.kind.__name__}.{name} is a {member_kind.__name__}, and no function"
            )
        else:
            self.attributes[name] = NO_VALUE if inspect.ismemberdescriptor(member) else member

    def has_member(self, hook: object) -> bool:
        """Return whether `hook` is an object of the class; read no value of it."""
        if not self.is_protocol:
            return isinstance(hook, self.kind)
        return self.kind in type(hook).__mro__ or all(
            inspect.getattr_static(hook, name, NO_VALUE) is not NO_VALUE
            for name in (*self.points, *self.attributes)
        )

    def overrides(self, hook: object, name: str) -> bool:
        """Return whether `hook` has a method `name` of its own, and not the one of the class."""
        # First in the class: the object that stands for a group has methods that none of its hooks
        # implements, and only its class says so.
        owner = hook if name in getattr(hook, "__dict__", ()) else type(hook)
        if name == "__call__" and owner is not hook and not callable(hook):
            return False  # what is found would be the call of the class, which makes objects
        # The method may be made by `__getattr__`.
        method = getattr(owner, name, None) or getattr(hook, name, None)
        inherited = [None, *(vars(base).get(name) for base in self.kind.__mro__)]
        return not any(_function_of(method) is _function_of(own) for own in inherited)

    def implemented(self, hook: object) -> list[Point]:
        """Return the methods that `hook` implements."""
        return [point for point in self.points.values() if self.overrides(hook, point.name)]

    def check(self, hook: object, *, plain: bool = False) -> list[Point]:
        """Return the methods that `hook` implements; raise unless it can be called as the interface
        says.

        With `plain`, coroutine methods may be plain functions.

        Raises:
            InvalidHookError: a method has another kind of function or another signature; or its
                name is nearly that of a method of the class.
        """
        if isinstance(hook, (types.FunctionType, types.MethodType)):
            raise InvalidHookError(
                f"{hook!r} is a function; give it to compose_functions, or add it to a HookGroup"
                " with `on`"
            )
        points = self.implemented(hook)
        for point in points:
            method = getattr(hook, point.name)
            function = method.__func__ if isinstance(method, types.MethodType) else None
            if function not in point.fitting:
                who = f"{hook_name(hook)}.{point.name}"
                if isinstance(hook, FunctionHook) and hook.__aiohooks_is_function__:
                    who = hook_name(hook)
                self._check_method(who, method, point, plain=plain)
                if inspect.isfunction(function) and not plain:
                    point.fitting.add(function)
        if type(hook) not in self._checked:
            self._check_names(hook, plain=plain)
            self._checked.add(type(hook))
        return points

    def _check_method(
        self,
        who: str,
        method: Any,
        point: Point,
        *,
        plain: bool,
    ) -> None:
        problem = self._kind_problem(method, point, plain=plain)
        if problem:
            raise InvalidHookError(f"{who} {problem}")
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            return  # written in C
        problem = point.parameters.reject_call(signature)
        if problem:
            # Annotations of agent frameworks are hundreds of characters long.
            parameters = [
                parameter.replace(annotation=parameter.empty)
                for parameter in signature.parameters.values()
            ]
            raise InvalidHookError(
                f"{who}{inspect.Signature(parameters)} cannot take the call"
                f" {point.label}{point.parameters.signature}: {problem}"
            )

    def _kind_problem(
        self,
        method: Any,
        point: Point,
        *,
        plain: bool,
    ) -> str:
        """Return why a function cannot be called for a method, as the end of a sentence about the
        function; or an empty text.
        """
        kind = function_kind(method)
        if point.returns_hook:
            return (
                "returns a hook, which would take the place of the group; use this hook beside the"
                " group"
            )
        if "generator" in point.kind:
            return (
                f"is a generator in {self.kind.__name__}, which a group cannot stand for; use this"
                " hook beside the group"
            )
        if kind == "a generator" and (plain or not point.is_async) and point.how in ("none", "any"):
            return "is a generator, and no one would iterate over it; write it without `yield`"
        if point.is_async:
            return self._coroutine_problem(method, point, plain=plain)
        if kind in PLAIN:
            return ""
        return (
            f"is {kind}, but {point.label} is a plain one; write it as `def`; or, if what it"
            " returns is awaited, derive a class in which it is annotated so, as in `->"
            " Awaitable[None] | None`"
        )

    def _coroutine_problem(
        self,
        method: Any,
        point: Point,
        *,
        plain: bool,
    ) -> str:
        """Return why a function cannot be called for a coroutine method, or an empty text."""
        kind = function_kind(method)
        if kind == "a coroutine function":
            return ""
        if kind == "an async generator" and self._in_group and point.how != "wrap":
            if point.calls_next and point.does_nothing:
                return (
                    f"is an async generator, but an argument of {point.label} calls the next one;"
                    f' write it as `async def` that calls it, and give results={{"{point.name}":'
                    ' "wrap"}'
                )
            return ""
        if kind in PLAIN:
            is_wrapper = function_kind(inspect.unwrap(method)) == "a coroutine function"
            if is_wrapper and not returns_awaitable(method):
                return (
                    "is a plain function that wraps a coroutine function; write its wrapper as"
                    " `async def`"
                )
            if is_wrapper or plain or point.kind == "a plain function":
                return ""
        return f"is not a coroutine function; write it as `async def`{self._hint}"

    def _check_names(self, hook: object, *, plain: bool) -> None:
        """Raise, or warn, if methods of a hook would never be called."""
        for name, reason in self._unsupported.items():
            own = inspect.getattr_static(hook, name, None)
            if own is not None and own is not self.members[name]:
                raise InvalidHookError(
                    f"{hook_name(hook)}.{name} would never be called: {reason}; write it as a"
                    " method"
                )
        others = [
            name
            for name, _ in inspect.getmembers_static(type(hook), inspect.isfunction)
            if name not in self.points and not name.startswith("_")
        ]
        coroutines = [name for name in others if is_coroutine_function(getattr(hook, name))]
        likely_misspelt = coroutines
        if plain:  # otherwise a plain method is likely to be a helper
            likely_misspelt = others
        for name in likely_misspelt:
            for known in self.points:
                if _is_misspelt(name, known):
                    raise InvalidHookError(
                        f"{hook_name(hook)}.{name} is not a method of {self.kind.__name__} and"
                        f" would never be called; did you mean {known!r}? A helper's name begins"
                        " with an underscore"
                    )
        if coroutines and self._in_group and self.has_member(hook):
            logger.warning(
                "%s does not have %s of %s, so a group does not call them; if something calls"
                " them, derive a class that has them, and give that",
                self.kind.__name__,
                ", ".join(coroutines),
                hook_name(hook),
            )


_NO_FUNCTIONS = (functools.partialmethod, functools.singledispatchmethod)
_HELPERS = (type, classmethod, staticmethod)
PLAIN = ("a plain function", "a generator")
"""The kinds of functions that are called and not awaited."""


def _members(kind: type[Any]) -> dict[str, Any]:
    """Return the members of a class and of its bases, by name.

    Data that is only annotated, as in `x: int`, is there with `NO_VALUE`.
    """
    members: dict[str, Any] = {}
    for base in kind.__mro__:
        members.update(dict.fromkeys(written_annotations(base), NO_VALUE))
    # Bases first: the members of a class replace those of its bases.
    for base in reversed(kind.__mro__):
        members.update(vars(base))
    return members


def _function_of(method: Any) -> Any:
    return getattr(method, "__func__", method)


def _method_function(member: Any) -> types.FunctionType | None:
    """Return the function of a method of an interface, None if the member is something else.

    A static method or a class method is one if it is a coroutine function or returns None: others
    are helpers.
    """
    function = inspect.unwrap(member)
    if isinstance(member, type) or not inspect.isfunction(function):
        return None
    if isinstance(member, (classmethod, staticmethod)):
        returns_none = annotations_of(function, {}).get("return") is types.NoneType
        is_method = returns_none or inspect.iscoroutinefunction(function)
    else:
        is_method = callable(member)  # not a property of a library, around a function
    return function if is_method else None


def _is_misspelt(name: str, known: str) -> bool:
    """Return whether one edit makes `known` of `name`, but not at the beginning of a short name.

    An edit is a letter more, less, changed, or exchanged with its neighbor.
    """
    if len(known) <= 3 and name[0] != known[0]:
        return False  # `send` is not a misspelt `end`
    same = 0
    while name[same : same + 1] == known[same : same + 1]:
        same += 1
    rest = name[same:]
    known_rest = known[same:]
    exchanged = rest[1::-1] + rest[2:]
    return known_rest in (rest[1:], exchanged) or known_rest[1:] in (rest, rest[1:])


# -- registrations


def registered_hooks(
    hooks: Iterable[object], numbers: Counter[str] | None = None
) -> tuple[RegisteredHook, ...]:
    """Check registrations and name the hooks: by their class, numbered where there are several.

    `numbers` says how many hooks have had each name, and counts these.

    Raises:
        InvalidHookError: a hook is a class, or is listed twice.
    """
    registrations: dict[int, HookRegistration] = {}
    for hook in hooks:
        registration = registration_of(hook)
        if id(registration.hook) in registrations:
            raise InvalidHookError(
                f"hooks has {registration.hook!r} twice; make two objects of it if both are meant"
            )
        if registration.once and not isinstance(registration.hook, FunctionHook):
            raise InvalidHookError(
                f"{registration.hook!r} has once=True, which is for functions; remove the hook"
            )
        registrations[id(registration.hook)] = registration
    count = Counter(base_name(registration) for registration in registrations.values())
    numbers = Counter() if numbers is None else numbers
    registered: list[RegisteredHook] = []
    for registration in registrations.values():
        name = base_name(registration)
        numbers[name] += 1
        if not count[name] == numbers[name] == 1:
            name = f"{name}#{numbers[name]}"
        registered.append(RegisteredHook(name, registration))
    return tuple(registered)


def base_name(registration: HookRegistration) -> str:
    """Return the name of a hook without a number."""
    return registration.name or hook_name(registration.hook)


def check_options(registered: RegisteredHook, points: Iterable[Point]) -> None:
    """Raise unless the attributes of a registration hold for all of these methods.

    Raises:
        InvalidHookError: an attribute would have no effect.
    """
    options = registered.registration
    has_plain = False
    has_queue = False
    for point in points:
        method = getattr(registered.hook, point.name)
        kind = function_kind(method)
        problem = ""
        if options.thread and not point.is_async:
            problem = "is called as a plain method, which cannot wait for a thread; give no thread"
        elif kind in PLAIN:
            has_plain = True
            if options.timeout and not (options.thread or returns_awaitable(method)):
                problem = "is a plain function, which no time limit can end; give no timeout"
        elif options.background and kind == "an async generator":
            problem = "is an async generator, which wraps other calls; give no background=True"
        if problem:
            raise InvalidHookError(f"{registered.call_name(point.name)} {problem}")
        has_queue = has_queue or (point.is_async and point.how == "none")
    if options.thread and not has_plain:
        raise InvalidHookError(
            f"{registered.name} is to be called in a thread, but has no plain method for a"
            " coroutine method"
        )
    if options.background and not has_queue:
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )
