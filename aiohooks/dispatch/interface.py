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
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from aiohooks._core.reports import logger
from aiohooks._core.validate import check_mapping, is_coroutine_function
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import FunctionHook, HookRegistration, hook_name, registration_of
from aiohooks.dispatch.plain import (
    annotations_of,
    function_kind,
    returns_awaitable,
    wraps_others,
)
from aiohooks.dispatch.ways import How, NamedArgument, Point, check_how, does_nothing
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
        by_name: Mapping[str, How] = {}
        default: How | None = None
        if isinstance(results, (str, NamedArgument)):
            default = results
            check_how(results, "results")
        elif results is not None:
            check_mapping(results, "results")
            by_name = results
        for name, way in by_name.items():
            check_how(way, f"results[{name!r}]")
        self.members: dict[str, Any] = _members(origin)
        """What the class and its bases have."""
        self.points: dict[str, Point] = {}
        self.attributes: dict[str, Any] = {}
        """The public data of the class, and its properties."""
        self._unsupported: list[str] = []
        points, self._checked = _known.setdefault(origin, ({}, WeakSet()))
        for name in self._member_names():
            member = self.members[name]
            function = _method_function(member)
            if function is None:
                self._add_other(name, member)
            elif not self._is_dispatcher(name, member):
                how = by_name.get(name)
                known = points.get((name, how, default))
                if known is None or known[0]() is not function:
                    known = ref(function), Point(origin, name, member, how, default)
                    points[name, how, default] = known
                self.points[name] = known[1]
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {origin.__name__};"
                    f" {did_you_mean(name, self.points)}"
                )
        if not self.points:
            raise InvalidHookError(
                f"{origin.__name__} has no public methods, so hooks cannot implement any"
            )

    def _member_names(self) -> list[str]:
        """Return the names of public members, and of a `__call__`, which is the last."""
        names = sorted(name for name in self.members if not name.startswith("_"))
        if inspect.isfunction(self.members.get("__call__")):
            names.append("__call__")
        return names

    def _is_dispatcher(self, name: str, member: Any) -> bool:
        """Return whether a member is a `__call__` that calls the other methods."""
        if name != "__call__" or not self.points:
            return False
        return not does_nothing(member) and not getattr(member, "__isabstractmethod__", False)

    def _add_other(self, name: str, member: Any) -> None:
        methods = (functools.partialmethod, functools.singledispatchmethod)
        if isinstance(member, methods):
            self._unsupported.append(name)
        elif isinstance(member, (type, classmethod, staticmethod)):
            pass  # nested classes, and helpers such as factories
        elif callable(member):
            self._unsupported.append(name)
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
            return False  # what is found is the call of the class, which makes objects
        method = getattr(owner, name, None)
        if method is None:
            method = getattr(hook, name, None)  # perhaps made by `__getattr__`
        function = getattr(method, "__func__", method)
        for base in self.kind.__mro__:
            own = vars(base).get(name)
            if function is getattr(own, "__func__", own):
                return False
        return True

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
        for implemented in points:
            method = getattr(hook, implemented.name)
            function = method.__func__ if isinstance(method, types.MethodType) else None
            if function not in implemented.fitting:
                self._check_method(hook, method, implemented, plain=plain)
                # A generator fits in a group, and not in a session, which has the same points.
                is_known = inspect.isfunction(function) and not wraps_others(function)
                if is_known and not plain:
                    implemented.fitting.add(function)
        if (
            "__call__" in self.members
            and "__call__" not in self.points
            and self.overrides(hook, "__call__")
        ):
            raise InvalidHookError(
                f"{hook_name(hook)}.__call__ decides which of its methods are called, so a group"
                " cannot call them"
            )
        if type(hook) not in self._checked:
            self._check_names(hook, plain=plain)
            self._checked.add(type(hook))
        return points

    def _check_method(
        self,
        hook: object,
        method: Any,
        point: Point,
        *,
        plain: bool,
    ) -> None:
        who = hook_name(hook)
        if not isinstance(hook, FunctionHook) or not hook.__aiohooks_is_function__:
            who = f"{who}.{point.name}"
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
        own_kind = function_kind(inspect.unwrap(self.members[point.name]))
        if point.answers_hook:
            return (
                "returns a hook, which would take the place of the group; use this hook beside the"
                " group"
            )
        if kind == "an async generator" and self._in_group and point.how != "wrap":
            if point.calls_next and point.does_nothing:
                return (
                    f"is an async generator, but an argument of {point.label} calls the next one;"
                    f' write it as `async def` that calls it, and give results={{"{point.name}":'
                    ' "wrap"}'
                )
            if point.is_async:
                return ""
        if kind == "a generator" and plain and point.how in ("none", "any"):
            return "is a generator, and no one would iterate over it; write it without `yield`"
        if point.is_async and kind != "a coroutine function":
            if function_kind(inspect.unwrap(method)) == "a coroutine function":
                if not returns_awaitable(method):
                    return (
                        "is a plain function that wraps a coroutine function; write its wrapper as"
                        " `async def`"
                    )
            elif kind == "an async generator" or not (plain or own_kind != "a coroutine function"):
                return f"is not a coroutine function; write it as `async def`{self._hint}"
        elif not point.is_async and "generator" in kind and "generator" in own_kind:
            return (
                f"is a generator as {point.label} is, which a group cannot stand for; use this hook"
                " beside the group"
            )
        elif not point.is_async and kind == "a generator" and point.how in ("none", "any"):
            return "is a generator, and no one would iterate over it; write it without `yield`"
        elif not point.is_async and kind in ("a coroutine function", "an async generator"):
            return (
                f"is {kind}, but {point.label} is a plain one; write it as `def`; or, if what it"
                " returns is awaited, derive a class in which it is annotated so, as in `->"
                " Awaitable[None] | None`"
            )
        return ""

    def _check_names(self, hook: object, *, plain: bool) -> None:
        """Raise, or warn, if methods of a hook would never be called."""
        self._reject_unsupported(hook)
        functions: set[str] = set()
        for base in type(hook).__mro__:
            functions.update(
                name for name, value in vars(base).items() if inspect.isfunction(value)
            )
        others = sorted(
            name for name in functions.difference(self.points) if not name.startswith("_")
        )
        coroutines = [name for name in others if is_coroutine_function(getattr(hook, name))]
        # A plain method is likely to be a helper, unless the methods of the hook may be plain.
        self._reject_misspelt(hook, others if plain else coroutines)
        if coroutines and self._in_group and self.has_member(hook):
            logger.warning(
                "%s does not have %s of %s, so a group does not call them; if something calls"
                " them, derive a class that has them, and give that",
                self.kind.__name__,
                ", ".join(coroutines),
                hook_name(hook),
            )

    def _reject_unsupported(self, hook: object) -> None:
        for name in self._unsupported:
            own = inspect.getattr_static(type(hook), name, None)
            if own is not None and own is not self.members[name]:
                raise InvalidHookError(
                    f"{hook_name(hook)}.{name} would never be called: {self.kind.__name__}.{name}"
                    f" is a {type(self.members[name]).__name__}, and no function; write it as a"
                    " method"
                )

    def _reject_misspelt(self, hook: object, names: Iterable[str]) -> None:
        for name in names:
            for known in self.points:
                if _is_misspelt(name, known):
                    raise InvalidHookError(
                        f"{hook_name(hook)}.{name} is not a method of {self.kind.__name__} and"
                        f" would never be called; did you mean {known!r}? A helper's name begins"
                        " with an underscore"
                    )


def _members(kind: type[Any]) -> dict[str, Any]:
    """Return the members of a class and of its bases, by name.

    Public data that is only annotated, as in `x: int`, is there with `NO_VALUE`.
    """
    members: dict[str, Any] = {}
    for base in kind.__mro__:
        for name in _declared(base):
            if not name.startswith("_"):
                members[name] = NO_VALUE
    # Bases first: the members of a class replace those of its bases.
    for base in reversed(kind.__mro__):
        members.update(vars(base))
    return members


def _declared(base: type[Any]) -> Iterable[str]:
    try:
        return [*getattr(base, "__annotations__", ())]
    except NameError:
        # Python 3.14 evaluates annotations here, with names that exist for type checkers only.
        return annotations_of(base, {})


def _method_function(member: Any) -> types.FunctionType | None:
    """Return the function of a method of an interface, None if the member is something else.

    A static method or a class method is one if it is a coroutine function or returns None: others
    are helpers, such as factories.
    """
    if isinstance(member, type):
        return None
    function = inspect.unwrap(member)
    if not inspect.isfunction(function):
        return None
    if isinstance(member, (classmethod, staticmethod)):
        returns_none = annotations_of(function, {}).get("return", Any) in (None, type(None))
        if not inspect.iscoroutinefunction(function) and not returns_none:
            return None
    elif not callable(member):
        return None  # a property of a library, around a function
    return function


def _is_misspelt(name: str, known: str) -> bool:
    """Return whether one edit makes `known` of `name`, but not at the beginning of a short name.

    An edit is a letter more, less, changed, or exchanged with its neighbor.
    """
    if len(known) <= 3 and name[0] != known[0]:
        return False  # `send` is not a misspelt `end`
    same = 0
    while same < min(len(name), len(known)) and name[same] == known[same]:
        same += 1
    rest = name[same:]
    known_rest = known[same:]
    exchanged = rest[1::-1] + rest[2:]
    return (
        rest[1:] == known_rest
        or rest == known_rest[1:]
        or rest[1:] == known_rest[1:]
        or exchanged == known_rest
    )


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
    names = [base_name(registration) for registration in registrations.values()]
    count = Counter(names)
    numbers = Counter() if numbers is None else numbers
    registered: list[RegisteredHook] = []
    for name, registration in zip(names, registrations.values(), strict=True):
        numbers[name] += 1
        is_alone = count[name] == numbers[name] == 1
        full_name = name if is_alone else f"{name}#{numbers[name]}"
        registered.append(RegisteredHook(full_name, registration))
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
    if options.timeout is None and not (options.background or options.thread):
        return
    kinds = {point: function_kind(getattr(registered.hook, point.name)) for point in points}
    for point, kind in kinds.items():
        problem = _option_problem(options, point, kind)
        if problem:
            raise InvalidHookError(f"{registered.call_name(point.name)} {problem}")
    if options.thread and _PLAIN.isdisjoint(kinds.values()):
        raise InvalidHookError(
            f"{registered.name} is to be called in a thread, but has no plain method for a"
            " coroutine method"
        )
    if options.background and not any(point.is_async and point.how == "none" for point in kinds):
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )


_PLAIN = {"a plain function", "a generator"}


def _option_problem(options: HookRegistration, point: Point, kind: str) -> str:
    """Return why an option cannot hold for a method, as the end of a sentence about the method; or
    an empty text.
    """
    is_wrapper = kind == "an async generator"
    # A method that may return an awaitable is called plainly if the hook's own is a plain one.
    is_called_plainly = not point.is_async or (point.is_either and kind in _PLAIN)
    if options.thread and not point.is_async:
        return (
            "is called as a plain method, which cannot wait for a thread; give its hook no thread"
        )
    if options.timeout is not None and not options.thread and is_called_plainly:
        return "is a plain function, which no time limit can end; give its hook no timeout"
    if options.background and is_wrapper:
        return (
            "is an async generator, which wraps the calls of others; give its hook no"
            " background=True"
        )
    return ""
