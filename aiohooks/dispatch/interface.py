"""A hook interface: the methods that a class offers to hooks, and the checks of hooks.

Interface            the methods and the public data of a class, and the checks of hooks
checked_and_named    checks that a hook may be registered, and names it
check_options        checks the options of a registration against the methods of its hook

A point is a method of the class that hooks can implement, and its mode is how the results of
several hooks become one (`points.Point`).
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

from aiohooks._core.validate import is_coroutine_function
from aiohooks.dispatch.calls import RegisteredHook
from aiohooks.dispatch.hook import FunctionHook, HookRegistration, hook_name
from aiohooks.dispatch.points import (
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
    """The cache of a hook interface: further groups of the same class are made quickly.

    It must not refer to the class, which could not be freed then: `_seen` keeps the cache for as
    long as the class lives.
    """

    def __init__(self) -> None:
        self.points: dict[object, Point] = {}
        """The points, by their names and the modes that a group gives (see `Interface._add`)."""
        self.checked: WeakSet[type[Any]] = WeakSet()
        """The classes of hooks that were checked: no name of a method is misspelt."""


_seen: WeakKeyDictionary[type[Any], _Seen] = WeakKeyDictionary()
"""The cache of each hook interface."""


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
            results: the modes of `point`, by the name of the method, or one for all methods that
                return something.
            in_group: whether hooks may implement a coroutine method as an async generator, which
                wraps the calls of the other hooks. A `HookGroup` allows this, a session does not.
            hint: advice, at the end of a message, for a hook whose methods are plain functions.

        Raises:
            InvalidHookError: `kind` is not a class, or has no public methods.
            InvalidArgumentError: `results` has an unknown method or mode.
        """
        origin: object = typing.get_origin(kind) or kind
        if not isinstance(origin, type):
            raise InvalidHookError(
                f"{kind!r} is not a class; give the class whose methods the hooks implement"
            )
        self.kind: type[Any] = origin
        self.is_protocol: bool = getattr(origin, "_is_protocol", False)
        """Whether the class is a protocol: hooks then need not derive from it to have its data."""
        self._in_group = in_group
        self._hint = hint
        self.members: dict[str, Any] = _members(origin)
        """All attributes of the class and its bases, by name."""
        self.points: dict[str, Point] = {}
        """The methods that hooks can implement, by name."""
        self.attributes: dict[str, Any] = {}
        """The public data of the class and its properties, by name: the default, or the property
        itself.
        """
        # Why hooks cannot implement a member, by its name.
        self._unsupported: dict[str, str] = {}
        self._seen = _seen.setdefault(origin, _Seen())
        self._read_members(results)
        if not self.points:
            raise InvalidHookError(
                f"{origin.__name__} has no public methods, so hooks cannot implement any"
            )

    def _read_members(self, results: Mapping[str, How] | How | None) -> None:
        """Sort the public members of the class into points, data and unsupported members.

        Args:
            results: the modes that the group gives, as in `__init__`.
        """
        by_name: dict[str, Combination] = {}
        common_mode: Combination | None = None
        if isinstance(results, Mapping):
            for name, how in results.items():
                by_name[name] = checked_how(how, f"results[{name!r}]")
        elif results is not None:
            common_mode = checked_how(results, "results")
        for name in sorted(self.members):
            if not name.startswith("_") or name == "__call__":
                self._add(name, by_name.get(name), common_mode)
        for name in by_name:
            if name not in self.points:
                raise InvalidArgumentError(
                    f"results has {name!r}, which is no method of {self.kind.__name__};"
                    f" {did_you_mean(name, self.points)}"
                )

    def _add(
        self,
        name: str,
        own_mode: Combination | None,
        common_mode: Combination | None,
    ) -> None:
        """Add a member to the points, to the data, or to the unsupported members.

        Nested classes are left out, and so are static and class methods that are no coroutine
        functions, such as factories.

        Args:
            name: the name of the member.
            own_mode: the mode that `results` gives for this method, or None.
            common_mode: the mode that `results` gives for all methods, or None.
        """
        member = self.members[name]
        member_kind: Any = type(cast("object", member))
        function = inspect.unwrap(member)
        if isinstance(member, _NO_METHODS):
            # A coroutine function looks like a method that hooks may implement, so it is reported.
            if inspect.iscoroutinefunction(function):
                self._unsupported[name] = f"is a {member_kind.__name__}"
        elif callable(member) and inspect.isfunction(function):
            # A method. Its point is made once for all groups that give the same modes.
            points = self._seen.points
            key = name, own_mode, common_mode, self._in_group
            if key not in points:
                points[key] = Point(self.kind, name, member, own_mode, common_mode)
            if points[key].problem:
                self._unsupported[name] = points[key].problem
            else:
                self.points[name] = points[key]
        elif callable(member) or isinstance(member, _NO_FUNCTIONS):
            self._unsupported[name] = f"is a {member_kind.__name__}, and no function"
        elif inspect.ismemberdescriptor(member):
            # A slot declares data without a value.
            self.attributes[name] = NO_VALUE
        # A property with a setter is left out: its value belongs to the object that has it.
        elif getattr(member, "fset", None) is None:
            self.attributes[name] = member

    def has_data_of(self, hook: object) -> bool:
        """Return whether a hook has the public data of the class.

        Attributes of an unrelated class may have the same names, and mean something else.
        """
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
        """Check that the methods of a hook can be called, and return the points that it implements.

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
        # A hook that overrides an unsupported member, such as a generator, expects to be called.
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
        # This is done once for each class of hooks, as it looks at all members of the class.
        if type(hook) not in self._seen.checked:
            self._check_spelling(registered)
            self._seen.checked.add(type(hook))
        return points

    def _check_method(
        self,
        registered: RegisteredHook,
        point: Point,
    ) -> None:
        """Raise unless the method of a hook fits the point: it is a function of a fitting kind, and
        takes every call that the point takes.
        """
        method = getattr(registered.hook, point.name)
        function = method.__func__ if isinstance(method, types.MethodType) else None
        # The checks are slow, so functions that fit are remembered.
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
            # A function that is written in C may have no signature, and cannot be checked.
            return
        problem = point.parameters.find_call_problem(signature)
        if problem:
            raise InvalidHookError(
                f"{who}{without_annotations(signature)} cannot take the call"
                f" {point.label}{point.parameters.signature}: {problem}"
            )
        # The function of a `FunctionHook` is not remembered: it may be of a kind that does not fit
        # as a method of a class.
        if inspect.isfunction(function) and not is_function:
            point.fitting.add(function)

    def _fitting_kinds(
        self,
        point: Point,
        *,
        is_function: bool,
    ) -> list[str]:
        """Return the kinds of functions with which a hook can implement a method.

        Args:
            point: the method.
            is_function: whether the hook is a `FunctionHook`, whose function may be a plain one.
        """
        kinds = [point.kind]
        if is_function:
            kinds.append(PLAIN)
        if point.is_async:
            kinds.append(COROUTINE)
            # An async generator calls the other hooks by its `yield`. It does not fit a method with
            # an argument for that purpose, which the generator would never call. Only a group makes
            # such calls: a session calls its hooks itself.
            calls_next = point.mode == "wrap" or (point.nexts and point.has_empty_body)
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


# Members that become methods of an object, but are no functions.
_NO_FUNCTIONS = (functools.partialmethod, functools.singledispatchmethod)
# Members that are not called for an object of the class.
_NO_METHODS = (type, classmethod, staticmethod)


def _members(kind: type[Any]) -> dict[str, Any]:
    """Return the members of a class and of its bases, by name.

    The value of data that is only annotated, as in `x: int`, is `NO_VALUE`.
    """
    members: dict[str, Any] = {}
    # Annotations first: a value that a class has replaces `NO_VALUE`.
    for base in kind.__mro__:
        members.update(dict.fromkeys(written_annotations(base), NO_VALUE))
    # `reversed`, so that the members of a class replace those of its bases.
    for base in reversed(kind.__mro__):
        members.update(vars(base))
    return members


def _function_of(method: Any) -> Any:
    """Return the function of a bound method, or anything else unchanged."""
    return getattr(method, "__func__", method)


def _is_misspelt(name: str, meant: str) -> bool:
    """Return whether one edit turns `name` into `meant`: a letter more, less, changed or moved."""
    # Imported here, as it is seldom needed.
    import difflib

    # In a short name, a letter makes another word: `send` is not a misspelt `end`.
    if len(meant) <= 3 and name[0] != meant[0]:
        return False
    blocks = difflib.SequenceMatcher(None, name, meant).get_matching_blocks()
    common = sum(block.size for block in blocks)
    return common >= max(len(name), len(meant)) - 1


# -- registrations


def checked_and_named(
    registration: HookRegistration,
    known: Container[object],
    name_counts: Counter[str],
) -> RegisteredHook:
    """Check that a hook may be registered, and give it a unique name.

    - `Name`: that of its registration, or else of its class, if no hook has had it.
    - `module.Name`: for the first hook of a class whose name a class of another module has had.
    - `Name#2`, `Name#3`: otherwise. The number counts all hooks of this name.

    Args:
        registration: the hook with its options.
        known: the ids of the hooks that were registered before. The hook must not be one of them.
        name_counts: how many hooks have had each name, and each name with its module. This counts
            the hook.

    Raises:
        InvalidHookError: the hook is known, or has `once=True` and is not a function.
    """
    hook = registration.hook
    if id(hook) in known:
        raise InvalidHookError(
            f"hooks contains {hook!r} twice; make two objects of it if both are meant"
        )
    if registration.once and not isinstance(hook, FunctionHook):
        raise InvalidHookError(
            f"{hook!r} has once=True, which is for functions; leave it out, and remove the hook"
            " yourself"
        )
    name = registration.name or hook_name(hook)
    name_with_module = f"{type(hook).__module__}.{name}"
    name_counts.update([name, name_with_module])
    if name_counts[name] > 1:
        is_of_class = registration.name is None and not isinstance(hook, FunctionHook)
        is_of_another_module = is_of_class and name_counts[name_with_module] == 1
        name = name_with_module if is_of_another_module else f"{name}#{name_counts[name]}"
    return RegisteredHook(name, registration)


def check_options(
    registered: RegisteredHook,
    points: Sequence[Point],
) -> None:
    """Raise unless the options of a registration can have an effect.

    Args:
        registered: the hook.
        points: the methods that it implements.

    Raises:
        InvalidHookError: an option would have no effect.
    """
    options = registered.registration
    may_have_no_result = options.on_error == "log" or options.disable_after is not None
    can_queue = False
    for point in points:
        kind = function_kind(getattr(registered.hook, point.name))
        if options.timeout and (kind != COROUTINE or point.mode == "wrap"):
            raise InvalidHookError(
                f"{registered.call_name(point.name)} wraps other calls, whose time would count, or"
                " is a plain function, which no time limit can end; give no timeout, and use"
                " asyncio.timeout around its own waits"
            )
        if point.mode == "one" and point.nexts and may_have_no_result:
            raise InvalidHookError(
                f'{registered.call_name(point.name)} has on_error="log" or disable_after, but only'
                f" it calls {point.nexts[0]!r}: without it, that call would be lost; {point.advice}"
            )
        if point.is_async and point.mode == "none" and kind != ASYNC_GENERATOR:
            can_queue = True
    if options.background and not can_queue:
        raise InvalidHookError(
            f"{registered.name} has background=True, but none of its methods can be queued: "
            "only coroutine methods can that are annotated to return None"
        )
