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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

from aiohooks._core.validate import check_mapping, is_coroutine_function
from aiohooks.dispatch.arguments import without_annotations
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import FunctionHook, HookRegistration, hook_name, registration_of
from aiohooks.dispatch.ways import (
    ASYNC_GENERATOR,
    PLAIN,
    Combination,
    How,
    Point,
    annotations_of,
    checked_how,
    function_kind,
    written_annotations,
)
from aiohooks.errors import InvalidArgumentError, InvalidHookError, did_you_mean

NO_VALUE: Any = object()
"""The default of data that a class only declares: by an annotation, or as a slot."""


# -- a class


class _Seen:
    """The properties of a class, read for its first group.

    Nothing in it refers to the class, which is freed like any other.
    """

    def __init__(self) -> None:
        self.points: dict[object, Point] = {}
        self.checked: WeakSet[type[Any]] = WeakSet()
        """The classes of hooks whose names were checked."""


_seen: WeakKeyDictionary[type[Any], _Seen] = WeakKeyDictionary()


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
            results: the ways of `point`, by the name of the method, or one for all methods that
                return something.
            in_group: whether hooks may implement a coroutine method as an async generator, which
                wraps it, and have further ones.
            hint: advice for a hook whose methods are plain functions.

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
        """Whether hooks need not derive from the class to have its data."""
        self._in_group = in_group
        self._hint = hint
        self.members: dict[str, Any] = _members(origin)
        """The attributes of the class and its bases."""
        self.points: dict[str, Point] = {}
        self.attributes: dict[str, Any] = {}
        """The public data of the class, and its properties."""
        self._unsupported: dict[str, str] = {}  # members that hooks cannot implement, and why
        self._seen = _seen.setdefault(origin, _Seen())
        self._read_members(results)
        if not self.points:
            raise InvalidHookError(
                f"{origin.__name__} has no public methods, so hooks cannot implement any"
            )

    def _read_members(self, results: Mapping[str, How] | How | None) -> None:
        by_name: dict[str, Combination] = {}
        common_way: Combination | None = None
        if isinstance(results, (str, Combination)):
            common_way = checked_how(results, "results")
        elif results is not None:
            check_mapping(results, "results")
            for name, how in results.items():
                by_name[name] = checked_how(how, f"results[{name!r}]")
        for name in sorted(self.members):
            if not name.startswith("_"):
                self._add(name, by_name.get(name), common_way)
        if inspect.isfunction(self.members.get("__call__")):
            if self.points:
                self._unsupported["__call__"] = f"{self.kind.__name__} has other methods"
            else:
                self._add("__call__", by_name.get("__call__"), common_way)
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {self.kind.__name__};"
                    f" {did_you_mean(name, self.points)}"
                )

    def _add(
        self,
        name: str,
        own_way: Combination | None,
        common_way: Combination | None,
    ) -> None:
        """Add a member to the methods, to the data, or to the members that hooks cannot implement.

        Nested classes are none of these, and neither are helpers such as factories.
        """
        member = self.members[name]
        if _is_method(member):
            points = self._seen.points
            key = name, own_way, common_way, self._in_group
            if key not in points:
                points[key] = Point(self.kind, name, member, own_way, common_way)
            self.points[name] = points[key]
        elif isinstance(member, _HELPERS):
            return
        elif callable(member) or isinstance(member, _NO_FUNCTIONS):
            member_kind: Any = type(cast("object", member))
            self._unsupported[name] = (
                f"{self.kind.__name__}.{name} is a {member_kind.__name__}, and no function"
            )
        elif inspect.ismemberdescriptor(member):
            self.attributes[name] = NO_VALUE
        elif getattr(member, "fset", None) is None:  # a property that is set is the object's own
            self.attributes[name] = member

    def has_data_of(self, hook: object) -> bool:
        """Return whether the public data of a hook is that of the class."""
        return self.is_protocol or self.kind in type(hook).__mro__

    def overrides(self, hook: object, name: str) -> bool:
        """Return whether `hook` has a method `name` of its own, and does not inherit it from the
        class.
        """
        function = _function_of(getattr(hook, name, None))
        if function is None:
            return False
        # A hook may derive from a base of the class, whose methods are not its own either.
        inherited = [vars(base).get(name) for base in self.kind.__mro__]
        return not any(function is _function_of(method) for method in inherited)

    def implemented(self, hook: object) -> list[Point]:
        """Return the methods that `hook` implements."""
        points = self.points.values()
        return [point for point in points if self.overrides(hook, point.name)]

    def check(self, registered: RegisteredHook) -> list[Point]:
        """Return the methods that a hook implements. Raise unless it can be called as the interface
        says.

        Raises:
            InvalidHookError: a method has another kind of function or another signature, or its
                name is nearly that of a method of the class.
        """
        hook: object = registered.hook
        if isinstance(hook, (types.FunctionType, types.MethodType)):
            raise InvalidHookError(
                f"{hook!r} is a function; give it to compose_functions, or add it to a HookGroup"
                " with `on`"
            )
        points = self.implemented(hook)
        for point in points:
            self._check_method(registered, point)
        if type(hook) not in self._seen.checked:
            self._check_names(registered)
            self._seen.checked.add(type(hook))
        return points

    def _check_method(self, registered: RegisteredHook, point: Point) -> None:
        method = getattr(registered.hook, point.name)
        function = method.__func__ if isinstance(method, types.MethodType) else None
        if function in point.fitting:
            return
        # A coroutine method may be a plain function where that is added by itself.
        plain = isinstance(registered.hook, FunctionHook)
        who = registered.call_name(point.name)
        problem = self._kind_problem(method, point, plain=plain)
        if problem:
            raise InvalidHookError(f"{who} {problem}")
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):
            return  # written in C
        problem = point.parameters.reject_call(signature)
        if problem:
            raise InvalidHookError(
                f"{who}{without_annotations(signature)} cannot take the call"
                f" {point.label}{point.parameters.signature}: {problem}"
            )
        if inspect.isfunction(function) and not plain:
            point.fitting.add(function)

    def _kind_problem(
        self,
        method: Any,
        point: Point,
        *,
        plain: bool,
    ) -> str:
        """Return why a function cannot be called for a method, as the end of a sentence about the
        function, or an empty text.
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
        ignores_result = point.how in ("none", "any")
        is_plain_call = plain or not point.is_async
        if kind == "a generator" and is_plain_call and ignores_result:
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
        if kind == ASYNC_GENERATOR and self._in_group and point.how != "wrap":
            if point.calls_next and point.does_nothing:
                return (
                    f"is an async generator, but an argument of {point.label} calls the next one;"
                    f' write it as `async def` that calls it, and give results={{"{point.name}":'
                    ' "wrap"}'
                )
            return ""
        if kind in PLAIN:
            is_wrapper = function_kind(inspect.unwrap(method)) == "a coroutine function"
            if is_wrapper:
                return (
                    "is a plain function that wraps a coroutine function; write its wrapper as"
                    " `async def`"
                )
            if plain or point.kind == "a plain function":
                return ""
        return f"is not a coroutine function; write it as `async def`{self._hint}"

    def _check_names(self, registered: RegisteredHook) -> None:
        """Raise if a method of a hook would never be called."""
        hook: object = registered.hook
        for name, reason in self._unsupported.items():
            own = inspect.getattr_static(hook, name, None)
            if own is not None and own is not self.members[name]:
                raise InvalidHookError(
                    f"{registered.name}.{name} would never be called: {reason}; write it as a"
                    " method"
                )
        for name, function in inspect.getmembers_static(type(hook), inspect.isfunction):
            # A plain method is likely to be a helper.
            is_helper = name.startswith("_") or not is_coroutine_function(function)
            if is_helper or name in self.points:
                continue
            for point_name in self.points:
                if _is_misspelt(name, point_name):
                    raise InvalidHookError(
                        f"{registered.name}.{name} is not a method of {self.kind.__name__} and"
                        f" would never be called; did you mean {point_name!r}? A helper's name"
                        " begins with an underscore"
                    )


_NO_FUNCTIONS = (functools.partialmethod, functools.singledispatchmethod)
_HELPERS = (type, classmethod, staticmethod)


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


def _is_method(member: Any) -> bool:
    """Return whether a member of an interface is a method that hooks can implement.

    A static method or a class method is one if it is a coroutine function or returns None: others
    are helpers.
    """
    function = inspect.unwrap(member)
    if isinstance(member, type) or not inspect.isfunction(function):
        return False
    if isinstance(member, (classmethod, staticmethod)):
        returns_none = annotations_of(function, {}).get("return") is types.NoneType
        return returns_none or inspect.iscoroutinefunction(function)
    return callable(member)  # not a property of a library, around a function


def _is_misspelt(name: str, meant: str) -> bool:
    """Return whether one edit makes `meant` of `name`: a letter more, less, changed or moved."""
    import difflib  # seldom needed

    if len(meant) <= 3 and name[0] != meant[0]:
        return False  # `send` is not a misspelt `end`
    blocks = difflib.SequenceMatcher(None, name, meant).get_matching_blocks()
    common = sum(block.size for block in blocks)
    return common >= max(len(name), len(meant)) - 1


# -- registrations


def registered_hooks(
    hooks: Iterable[object],
    numbers: Counter[str] | None = None,
) -> tuple[RegisteredHook, ...]:
    """Check the hooks, and name each by its class: `Name`, or `Name#2` if there are several.

    `numbers` has the number of hooks that have had each name, and is updated.

    Raises:
        InvalidHookError: a hook is a class, is listed twice, or has `once=True` and is not a
            function.
    """
    registrations = [registration_of(hook) for hook in hooks]
    occurrences = Counter(map(_name_of, registrations))
    if numbers is None:
        numbers = Counter()
    registered: dict[int, RegisteredHook] = {}
    for registration in registrations:
        hook = registration.hook
        if id(hook) in registered:
            raise InvalidHookError(
                f"hooks has {hook!r} twice; make two objects of it if both are meant"
            )
        if registration.once and not isinstance(hook, FunctionHook):
            raise InvalidHookError(
                f"{hook!r} has once=True, which is for functions; remove the hook"
            )
        name = _name_of(registration)
        numbers[name] += 1
        if occurrences[name] > 1 or numbers[name] > 1:
            name = f"{name}#{numbers[name]}"
        registered[id(hook)] = RegisteredHook(name, registration)
    return tuple(registered.values())


def _name_of(registration: HookRegistration) -> str:
    return registration.name or hook_name(registration.hook)


def check_options(registered: RegisteredHook, points: Sequence[Point]) -> None:
    """Raise unless the attributes of a registration hold for all of these methods.

    Raises:
        InvalidHookError: an attribute would have no effect.
    """
    options = registered.registration
    for point in points:
        problem = _option_problem(registered, point)
        if problem:
            raise InvalidHookError(f"{registered.call_name(point.name)} {problem}")
    queued = [point for point in points if point.is_async and point.how == "none"]
    if options.background and not queued:
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )


def _option_problem(registered: RegisteredHook, point: Point) -> str:
    """Return why an option cannot hold for a method, as the end of a sentence about the method, or
    an empty text.
    """
    options = registered.registration
    kind = function_kind(getattr(registered.hook, point.name))
    if options.background and kind == ASYNC_GENERATOR:
        return "is an async generator, which wraps other calls; give no background=True"
    if options.timeout and point.wraps(registered.hook):
        return (
            "wraps other calls, whose time would count; give no timeout, and use asyncio.timeout"
            " around its own waits"
        )
    if options.timeout and kind in PLAIN:
        return "is a plain function, which no time limit can end; give no timeout"
    return ""
