"""A hook interface: the methods that a class offers to hooks, and the checks of hooks.

Interface            the methods and the public data of a class, and the checks of hooks
registered_hook      names a hook and checks its registration
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

from aiohooks._core.validate import is_coroutine_function
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import FunctionHook, HookRegistration, hook_name
from aiohooks.dispatch.ways import (
    ASYNC_GENERATOR,
    COROUTINE,
    PLAIN,
    Combination,
    How,
    Point,
    checked_how,
    function_kind,
    without_annotations,
    written_annotations,
)
from aiohooks.errors import InvalidArgumentError, InvalidHookError, did_you_mean

NO_VALUE: Any = object()
"""The default of data that a class only declares: by an annotation, or as a slot."""


# -- a class


class _Seen:
    """What the groups of a class have found out about it, so that each group is made quickly.

    Nothing in it refers to the class, which is freed like any other.
    """

    def __init__(self) -> None:
        self.points: dict[object, Point] = {}
        """The methods, by their names and the ways of their groups."""
        self.checked: WeakSet[type[Any]] = WeakSet()
        """The classes of hooks in which no method is misspelt."""


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
        """Sort the members of the class into methods, data, and what hooks cannot implement."""
        by_name: dict[str, Combination] = {}
        common_way: Combination | None = None
        if isinstance(results, Mapping):
            for name, how in results.items():
                by_name[name] = checked_how(how, f"results[{name!r}]")
        elif results is not None:
            common_way = checked_how(results, "results")
        for name in sorted(self.members):
            if not name.startswith("_") or name == "__call__":
                self._add(name, by_name.get(name), common_way)
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

        Nested classes, and static and class methods that are no coroutine functions, such as
        factories, are none of these.

        Args:
            name: the name of the member.
            own_way: how the results of this method become one, as `results` says by name.
            common_way: how those of all methods become one, as `results` says for the class.
        """
        member = self.members[name]
        member_kind: Any = type(cast("object", member))
        function = inspect.unwrap(member)
        if isinstance(member, _NO_METHODS):
            if inspect.iscoroutinefunction(function):
                self._unsupported[name] = f"is a {member_kind.__name__}"
        elif callable(member) and inspect.isfunction(function):
            points = self._seen.points
            key = name, own_way, common_way, self._in_group
            if key not in points:
                points[key] = Point(self.kind, name, member, own_way, common_way)
            if points[key].problem:
                self._unsupported[name] = points[key].problem
            else:
                self.points[name] = points[key]
        elif callable(member) or isinstance(member, _NO_FUNCTIONS):
            self._unsupported[name] = f"is a {member_kind.__name__}, and no function"
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

    def check(self, registered: RegisteredHook) -> list[Point]:
        """Check that all methods of a hook can be called, and return those of the interface.

        Raises:
            InvalidHookError: a method is of another kind of function, does not take the arguments,
                or has a misspelt name, under which it would never be called.
        """
        hook: object = registered.hook
        if isinstance(hook, (types.FunctionType, types.MethodType)):
            raise InvalidHookError(
                f"{hook!r} is a function; give it to compose_functions, or add it to a HookGroup"
                " with `on`"
            )
        # Members of the class that hooks cannot implement, such as generators.
        for name, reason in self._unsupported.items():
            own = inspect.getattr_static(hook, name, None)
            if own is not None and own is not self.members[name]:
                raise InvalidHookError(
                    f"{registered.name}.{name} cannot be called: {self.kind.__name__}.{name}"
                    f" {reason}; use this hook beside the others"
                )
        points = [point for point in self.points.values() if self.overrides(hook, point.name)]
        for point in points:
            self._check_method(registered, point)
        # Once for each class, as this looks at all its members.
        if type(hook) not in self._seen.checked:
            self._check_spelling(registered)
            self._seen.checked.add(type(hook))
        return points

    def _check_method(
        self,
        registered: RegisteredHook,
        point: Point,
    ) -> None:
        """Raise unless the hook's function for a method is of a kind that can be called as it, and
        takes its arguments.
        """
        method = getattr(registered.hook, point.name)
        function = method.__func__ if isinstance(method, types.MethodType) else None
        if function in point.fitting:
            return
        who = registered.call_name(point.name)
        is_function = isinstance(registered.hook, FunctionHook)
        kind = function_kind(method)
        if kind not in self._fitting_kinds(point, is_function=is_function):
            keyword = "async def" if point.is_async else "def"
            raise InvalidHookError(
                f"{who} is {kind}, but {point.label} is {point.kind}; write it as `{keyword}`"
                f"{self._hint}"
            )
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
        if inspect.isfunction(function) and not is_function:
            point.fitting.add(function)

    def _fitting_kinds(
        self,
        point: Point,
        *,
        is_function: bool,
    ) -> list[str]:
        """Return the kinds of functions of hooks that can be called for a method.

        Args:
            point: the method.
            is_function: whether the hook is a function, which may be a plain one.
        """
        kinds = [point.kind]
        if is_function:
            kinds.append(PLAIN)
        if point.is_async:
            kinds.append(COROUTINE)
            # A generator would not call the argument that calls the next hook.
            calls_next = point.how == "wrap" or (point.nexts and point.does_nothing)
            if self._in_group and not calls_next:
                kinds.append(ASYNC_GENERATOR)
        return kinds

    def _check_spelling(self, registered: RegisteredHook) -> None:
        """Raise if the name of a coroutine method is nearly that of a method of the class."""
        hook: object = registered.hook
        for name, _ in inspect.getmembers_static(type(hook), is_coroutine_function):
            if name.startswith("_") or name in self.points:
                continue
            for meant in self.points:
                if _is_misspelt(name, meant):
                    raise InvalidHookError(
                        f"{registered.name}.{name} is not a method of {self.kind.__name__} and"
                        f" would never be called; did you mean {meant!r}? A helper's name begins"
                        " with an underscore"
                    )


_NO_FUNCTIONS = (functools.partialmethod, functools.singledispatchmethod)
_NO_METHODS = (type, classmethod, staticmethod)


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


def _is_misspelt(name: str, meant: str) -> bool:
    """Return whether one edit makes `meant` of `name`: a letter more, less, changed or moved."""
    import difflib  # seldom needed

    if len(meant) <= 3 and name[0] != meant[0]:
        return False  # `send` is not a misspelt `end`
    blocks = difflib.SequenceMatcher(None, name, meant).get_matching_blocks()
    common = sum(block.size for block in blocks)
    return common >= max(len(name), len(meant)) - 1


# -- registrations


def registered_hook(
    registration: HookRegistration,
    others: Iterable[RegisteredHook],
    numbers: Counter[str],
) -> RegisteredHook:
    """Check a hook, and name it by its class: `Name`, and further ones `Name#2`, `Name#3`, or the
    first one of a class in another module `module.Name`.

    Args:
        registration: the hook with its options.
        others: the hooks before it, which it must not be among.
        numbers: how many hooks have had each name. It is updated.

    Raises:
        InvalidHookError: the hook is among the others, or has `once=True` and is not a function.
    """
    hook = registration.hook
    if any(other.hook is hook for other in others):
        raise InvalidHookError(
            f"hooks has {hook!r} twice; make two objects of it if both are meant"
        )
    if registration.once and not isinstance(hook, FunctionHook):
        raise InvalidHookError(f"{hook!r} has once=True, which is for functions; remove the hook")
    name = registration.name or hook_name(hook)
    name_with_module = f"{type(hook).__module__}.{name}"
    numbers.update([name, name_with_module])
    if numbers[name] > 1:
        is_of_class = registration.name is None and not isinstance(hook, FunctionHook)
        is_of_another_module = is_of_class and numbers[name_with_module] == 1
        name = name_with_module if is_of_another_module else f"{name}#{numbers[name]}"
    return RegisteredHook(name, registration)


def check_options(
    registered: RegisteredHook,
    points: Sequence[Point],
) -> None:
    """Raise unless the attributes of a registration hold for these methods.

    Raises:
        InvalidHookError: an attribute would have no effect.
    """
    options = registered.registration
    can_queue = False
    for point in points:
        kind = function_kind(getattr(registered.hook, point.name))
        if options.timeout and (kind != COROUTINE or point.how == "wrap"):
            raise InvalidHookError(
                f"{registered.call_name(point.name)} wraps other calls, whose time would count, or"
                " is a plain function, which no time limit can end; give no timeout, and use"
                " asyncio.timeout around its own waits"
            )
        if point.is_async and point.how == "none" and kind != ASYNC_GENERATOR:
            can_queue = True
    if options.background and not can_queue:
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )
