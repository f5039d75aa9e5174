"""The one object that stands for the hooks of a group: its class, its methods, and the data that it
has in common with them.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol
from weakref import WeakSet

from aiohooks._core.contexts import current_scope
from aiohooks._core.overlap import result_now
from aiohooks.dispatch.answers import (
    Target,
    answer,
    as_coroutine_function,
    observe,
    only_answer,
    own_body,
    positional_first,
    wrapped,
)
from aiohooks.dispatch.calls import RegisteredHook, call_groups, failed_in_turn
from aiohooks.dispatch.hook import hook_name
from aiohooks.dispatch.lifecycle import NO_VALUE, Lifecycle, Point
from aiohooks.errors import (
    InvalidArgumentError,
    InvalidHookError,
    add_note,
    did_you_mean,
    safe_repr,
)

_COMPOSITE = "__aiohooks_composite__"
_NO_BASES = (object, abc.ABC, Generic, Protocol)
"""Classes that say nothing of the objects of their subclasses."""


class Composite:
    """What stands for the hooks of a group: `object` is one of the class of the hooks; calling its
    methods calls theirs.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        init: Mapping[str, Any],
        hooks: dict[int, RegisteredHook],
        make_target: Callable[[Point, Iterable[RegisteredHook]], Target],
        group_name: str,
    ) -> None:
        """Make the object, without hooks.

        Args:
            lifecycle: the interface of the hooks.
            init: the arguments of `__init__`; what has these names is not decided by the hooks.
            hooks: a dict to put the hooks into, by their id.
            make_target: returns what a method of these hooks calls; it raises unless they can be
                called.
            group_name: for messages.
        """
        self.lifecycle: Lifecycle = lifecycle
        self.hooks: dict[int, RegisteredHook] = hooks
        self.make_target: Callable[[Point, Iterable[RegisteredHook]], Target] = make_target
        self._init = init
        self._group_name = group_name
        self._taken: dict[str, Any] = {}  # the data that hooks of the class have set
        self._shared: dict[str, Any] = {}  # what was set on the object
        self._shares = False  # whether what is set on it is set on the hooks, too
        self._outer: WeakSet[Composite] = WeakSet()  # in which this object is a hook
        self.kind: type[Any] = _composite_class(lifecycle.kind, self)
        self.methods: dict[str, CompositeMethod] = {
            name: CompositeMethod(self, each) for name, each in lifecycle.points.items()
        }
        self.object: Any = _instance_of(self.kind, lifecycle, init)
        self._shares = True

    def insert(self, one: RegisteredHook, points: Iterable[Point]) -> None:
        """Take a hook that implements these methods."""
        if self._shared:
            self._share(one.hook, *self._shared)
        self.hooks[id(one.hook)] = one
        if (inner := composite_of(one.hook)) is not None:
            inner._outer.add(self)
        self._place(one, points)

    def remove(self, one: RegisteredHook) -> None:
        """Forget a hook."""
        del self.hooks[id(one.hook)]
        self._place(one, ())
        if (inner := composite_of(one.hook)) is not None:
            inner._outer.discard(self)
        self.take_data()

    def _place(self, one: RegisteredHook, points: Iterable[Point]) -> None:
        """Make a hook one of those of these methods, and of no others."""
        names = {each.name for each in points}
        for name, method in self.methods.items():
            method.place(one, implements=name in names)
        for outer in self._outer:
            outer._place(outer.hooks[id(self.object)], outer.lifecycle.implemented(self.object))

    # -- data

    def take_data(self, *added: object) -> None:
        """Take over the public data that hooks of the class, and those `added`, set otherwise than
        the class.

        Raises:
            InvalidHookError: they do not agree.
        """
        if not self.lifecycle.attributes:
            return
        members = [
            hook
            for hook in (*(one.hook for one in self.hooks.values()), *added)
            if self.lifecycle.has_member(hook)
        ]
        taken: dict[str, Any] = {}
        for name, default in self.lifecycle.attributes.items():
            setting = (hook for hook in members if self._is_set(hook, name, default))
            if name in self._init or name in self._shared or (first := next(setting, None)) is None:
                continue
            value = taken[name] = getattr(first, name)
            for hook in members:
                other = getattr(hook, name, value)
                if other is not value and other != value:
                    raise InvalidHookError(
                        f"{type(first).__name__}.{name} is {value!r} and"
                        f" {type(hook).__name__}.{name} is {other!r}; "
                        "a group has one: set the same on all, or where the class takes it give"
                        f' init={{"{name}": ...}}'
                    )
        for name in self._taken.keys() - taken.keys():
            delattr(self.kind, name)
        for name, value in taken.items():
            setattr(self.kind, name, value)
        self._taken = taken

    def _is_set(self, hook: object, name: str, default: Any) -> bool:
        if default is NO_VALUE:
            return hasattr(hook, name) and (name in self._taken or not hasattr(self.object, name))
        return inspect.getattr_static(hook, name) is not default

    def set_data(self, one: object, name: str, value: Any) -> None:
        """Set an attribute of an object of the class; of the one that stands for the hooks, on
        those of the class, too.
        """
        kind: Any = self.lifecycle.kind
        shares, self._shares = (
            self._shares,
            False,
        )  # what a property sets in turn is set by that of the hook
        try:
            kind.__setattr__(one, name, value)
        finally:
            self._shares = shares
        if (
            shares
            and one is self.object
            and name not in self.lifecycle.points
            and not name.startswith("__")
        ):
            self._shared[name] = value
            for registered in self.hooks.values():
                self._share(registered.hook, name)

    def _share(self, hook: object, *names: str) -> None:
        """Set on a hook what was set on the object that stands for it."""
        is_member = self.lifecycle.has_member(hook)
        bases = {*self.lifecycle.kind.__mro__}.intersection(type(hook).__mro__).difference(
            _NO_BASES
        )
        for name in names if is_member or bases else ():
            try:
                setattr(hook, name, self._shared[name])
            except Exception as error:
                if is_member:  # one that only has a base of the class need not have the attribute
                    add_note(
                        error,
                        f"set on {hook_name(hook)}, as it was set on the hooks of group"
                        f" {self._group_name}",
                    )
                    raise


def composite_of(hook: object) -> Composite | None:
    """Return the `Composite` of which a hook is the object."""
    return getattr(type(hook), _COMPOSITE, None)


class CompositeMethod:
    """A method of the object that stands for the hooks of a group: it looks up what it calls at
    each call.

    While no hook implements it, it is an attribute of the class, on which it looks like the method
    of the hook interface.
    """

    __slots__ = ("_composite", "_function", "_hooks", "_own", "_point", "usable")

    def __init__(self, composite: Composite, point: Point) -> None:
        self._composite = composite
        self._point = point
        self._own: Callable[..., Any] = composite.lifecycle.members[point.name]
        self._hooks: dict[RegisteredHook, None] = {}
        self.usable: Target | None = None
        """What is called, None if that is to be looked up at the next call."""
        function = _calling(self, point, self._own)
        self._function = functools.wraps(self._own)(function)
        setattr(composite.kind, point.name, self)

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        """Return the method of the object, or the function of the class."""
        return self._own if instance is None else types.MethodType(self._function, instance)

    def place(self, one: RegisteredHook, *, implements: bool) -> None:
        """Note whether a hook implements the method."""
        self.usable = None
        called = bool(self._hooks)
        if implements:
            self._hooks[one] = None
        else:
            self._hooks.pop(one, None)
        if called != bool(self._hooks):
            setattr(self._composite.kind, self._point.name, self._function if self._hooks else self)

    def check_answers(self, *added: RegisteredHook) -> None:
        """Raise if several hooks return a result and nothing says which one counts."""
        if self._point.how == "one":
            name = self._point.name
            answering = (one for one in (*self._hooks, *added) if not one.registration.observer)
            names = [
                f"{one.name}.{name}"
                for one in answering
                if not inspect.isasyncgenfunction(getattr(one.hook, name))
            ]
            if len(names) > 1:
                raise InvalidHookError(
                    f"{' and '.join(names)} both return a result; {self._point.advice}"
                )

    def target(self) -> Target:
        """Return what is called; raise if the group cannot be used."""
        self.check_answers()  # a group in this one may have changed
        composite = self._composite
        # In the order of the group: a hook may have come to implement the method later.
        self.usable = composite.make_target(
            self._point, [one for one in composite.hooks.values() if one in self._hooks]
        )
        return self.usable


def _calling(method: CompositeMethod, each: Point, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that calls the hooks, or, while none implements the method, `own` of the
    class itself.
    """
    is_coroutine = inspect.iscoroutinefunction(own)
    call_own = own_body(each, own if is_coroutine else as_coroutine_function(own))

    async def call_method(self: Any, *args: Any, **keywords: Any) -> Any:
        target = method.usable
        if target is None:
            target = method.target()
        quick = target.quick
        if (
            quick is None
            or keywords
            or ((scope := current_scope.get()) is not None and scope.observers)
        ):
            if keywords:
                args, keywords = positional_first(each.positional, args, keywords)
            if target.observers:
                await observe(target, args, keywords)
            if not target.groups and not target.wrappers:
                return await call_own(self, *args, **keywords)
            if each.how == "none" and not target.wrappers:
                return only_answer(target, await call_groups(target.groups, args, keywords))
            return await wrapped(
                target, functools.partial(answer, target, functools.partial(call_own, self))
            )(args, keywords)
        answers: dict[Any, Any] | None = None
        calls = iter(quick.methods)
        while True:
            try:
                for call in calls:
                    if (result := await call(*args)) is not None:
                        answers = {**(answers or {}), call: result}
                break
            except BaseException as error:
                place = len(quick.methods) - operator.length_hint(calls) - 1
                failed_in_turn(quick, place, None, error)
        quick.made += 1
        return None if answers is None else only_answer(target, [*map(answers.get, quick.methods)])

    async def call_and_wait(self: Any, *args: Any, **keywords: Any) -> Any:
        answer = await call_method(self, *args, **keywords)
        return (
            await answer if inspect.isawaitable(answer) else answer
        )  # that of a plain method of the class

    def call_plain_method(self: Any, *args: Any, **keywords: Any) -> Any:
        if each.is_either and (method.usable or method.target()).may_wait:
            return call_and_wait(self, *args, **keywords)
        return result_now(call_method(self, *args, **keywords))

    return (
        call_method
        if is_coroutine
        else call_and_wait
        if each.is_async and not each.is_either
        else call_plain_method
    )


def _composite_class(kind: type[Any], composite: Composite) -> type[Any]:
    """Return a subclass of `kind`; the methods that hooks implement are set on it."""
    if getattr(kind, "__final__", False):
        raise InvalidHookError(
            f"{kind.__name__} is final, so that no object can stand for several hooks of it"
        )
    if value := next(
        (base for base in kind.__mro__[:-1] if base.__module__ in ("builtins", "enum")), None
    ):
        raise InvalidHookError(
            f"{kind.__name__} cannot be a hook interface: it derives from {value.__name__}, and no"
            " value can stand for several; give a class that has its methods only"
        )

    def set_attribute(self: Any, name: str, value: Any) -> None:
        composite.set_data(self, name, value)

    place: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _COMPOSITE: composite,
    }
    place["__setattr__"] = set_attribute
    try:
        made = types.new_class(
            kind.__name__, (kind,), {}, lambda namespace: namespace.update(place)
        )
    except Exception as error:
        raise InvalidHookError(
            f"{kind.__name__} cannot be a hook interface, as no class can be derived from it"
            f" without arguments: {error}; derive one that can, and give that"
        ) from error
    if inspect.isabstract(made):
        made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made


def _instance_of(made: type[Any], lifecycle: Lifecycle, init: Mapping[str, Any]) -> Any:
    """Return an object of the class, made with these arguments; of a protocol, with these values of
    its data.
    """
    data: Mapping[str, Any] = {}
    if lifecycle.is_protocol:
        init, data = data, init
    for name in data:
        if name not in lifecycle.attributes:
            known = did_you_mean(name, lifecycle.attributes)
            raise InvalidArgumentError(
                f"init has {name!r}, which is no data of {made.__name__}; {known}"
            )
    try:
        one = made(**init)
        for name, value in data.items():
            setattr(one, name, value)
    except Exception as error:
        raise InvalidHookError(
            f"{made.__name__} cannot be a hook interface: {_init_advice(made, init, error)}"
        ) from error
    own = getattr(one, "__dict__", {})
    for name, default in lifecycle.attributes.items():
        if name not in init and own.get(name, NO_VALUE) is default is not NO_VALUE:
            del own[name]  # as that of a dataclass: its class has it, too, where hooks replace it
    return one


def _init_advice(made: type[Any], init: Mapping[str, Any], error: Exception) -> str:
    missing: list[str] = []
    with contextlib.suppress(TypeError, ValueError):
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        wanted = (
            one
            for one in inspect.signature(made).parameters.values()
            if one.default is one.empty and one.kind in named
        )
        missing = [one.name for one in wanted if one.name not in init]
    if missing:
        return (
            f"its __init__ wants {', '.join(missing)}; give"
            f" init={{{', '.join(f'{name!r}: ...' for name in missing)}}}"
        )
    return f"its __init__ failed with init={safe_repr(init)}: {safe_repr(error)}"
