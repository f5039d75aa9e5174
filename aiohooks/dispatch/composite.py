"""The one object that stands for the hooks of a group: its hooks, methods, data, and class.

Composite        the hooks of a group, and the object that stands for them
CompositeMethod  a method of that object, which calls the hooks

The class of the object is made for it: a subclass of the hook interface, on which the methods that
hooks implement are set. A point is a method of the hook interface (`points.Point`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal

from aiohooks._core.calls import result_now
from aiohooks._core.clock import wake
from aiohooks.dispatch.answers import SortedHooks, combined, own_attribute
from aiohooks.dispatch.background import BackgroundCalls
from aiohooks.dispatch.calls import OrderGroup, RegisteredHook, log_or_raise
from aiohooks.dispatch.hook import FunctionHook, identity
from aiohooks.dispatch.interface import NO_VALUE, Interface
from aiohooks.dispatch.points import Args, Keywords, Point
from aiohooks.errors import HookGroupClosedError, InvalidHookError, WrongLoopError, safe_repr

COMPOSITE = "__aiohooks_composite__"
"""The attribute of the class of the object that stands for the hooks, and of a function that
`compose_functions` returns: the `Composite`.
"""


class Composite:
    """The hooks of a group, and the object that stands for them.

    `object` is an instance of a subclass of the hook interface. A call of a method of `object`
    calls this method of the hooks.
    """

    def __init__(
        self,
        interface: Interface,
        init: Mapping[str, Any],
        grace_secs: float,
    ) -> None:
        """Make the object that stands for the hooks. There are no hooks yet.

        Args:
            interface: the interface of the hooks.
            init: the arguments of its `__init__`.
            grace_secs: how long cancelled calls and background calls may take to end.
        """
        self.interface: Interface = interface
        self.grace_secs: float = grace_secs
        self.background: BackgroundCalls = BackgroundCalls(grace_secs)
        self.state: Literal["new", "entered", "closed"] = "new"
        self.thread: int | None = None
        """The id of the thread in which `check_loop` was called last. A call that cannot wait calls
        it again only in another thread.
        """
        self._loop: asyncio.AbstractEventLoop | None = None
        self.hooks: dict[RegisteredHook, Sequence[Point]] = {}
        """The hooks, in registration order, with the methods that they implement."""
        self.by_identity: dict[object, list[RegisteredHook]] = {}
        """The registrations of each hook, by its `identity`. Only a function can have several."""
        # The calls that may wait and have not ended. Usually their value is None. `ends_of_calls`
        # gives each of them a future for its end, for which a group waits that is left, or a hook
        # that is removed.
        self._active: dict[Coroutine[Any, Any, Any], asyncio.Future[None] | None] = {}
        self.object: Any = _composed(self, init)
        # A class of this object alone, which gets attributes below.
        self.kind: type[Any] = type(self.object)
        self.methods: dict[str, CompositeMethod] = {}
        for name, point in interface.points.items():
            self.methods[name] = CompositeMethod(self, point)
        for name, default in interface.attributes.items():
            attribute = _Attribute(self, name, default)
            setattr(self.kind, name, attribute)

    # -- the hooks

    def insert(
        self,
        registered: RegisteredHook,
        points: Sequence[Point],
    ) -> None:
        """Add a hook that implements the methods `points`. This applies from the next call."""
        if registered.registration.once:
            registered.remove_once = functools.partial(self._remove_called, registered)
        key = identity(registered.hook)
        self.by_identity.setdefault(key, []).append(registered)
        self.hooks[registered] = points
        for point in points:
            method = self.methods[point.name]
            method.hooks[registered] = None  # a dict as an ordered set
            method.reset()

    def remove(self, registered: RegisteredHook) -> None:
        """Remove a hook. Calls that have begun are not changed."""
        key = identity(registered.hook)
        self.by_identity[key].remove(registered)
        if not self.by_identity[key]:
            del self.by_identity[key]
        for point in self.hooks.pop(registered):
            method = self.methods[point.name]
            del method.hooks[registered]
            method.reset()

    def _remove_called(self, registered: RegisteredHook) -> None:
        """Remove a hook with `once=True`, unless it was removed since its call was decided."""
        if registered in self.hooks:
            self.remove(registered)

    def find(self, hook: object) -> list[RegisteredHook]:
        """Return the registrations of a hook, or of a function, the earliest first."""
        return self.by_identity.get(identity(hook), [])

    def reaches(self, other: Composite) -> bool:
        """Return whether this is the other group, or has a hook that leads to it."""
        # Groups may be nested deeper than functions can call each other, so this is a loop.
        remaining: list[Composite] = [self]
        seen: set[Composite] = set()
        while remaining:
            composite = remaining.pop()
            if composite is other:
                return True
            seen.add(composite)
            for registered in composite.hooks:
                nested = composite_of(registered.hook)
                if nested is not None and nested not in seen:
                    remaining.append(nested)
        return False

    def close(self) -> None:
        """Accept no more calls."""
        self.state = "closed"
        for method in self.methods.values():
            method.reset()

    def __repr__(self) -> str:
        names = ", ".join(registered.name for registered in self.hooks)
        return f"<HookGroup {self.interface.kind.__name__}: {names or 'no hooks'}>"

    # -- calls

    async def call(
        self,
        method: CompositeMethod,
        instance: object,
        args: Args,
        keywords: Keywords,
    ) -> Any:
        """Call the hooks of a method.

        Args:
            method: the method.
            instance: the object that stands for the hooks.
            args: the positional arguments of the call.
            keywords: the keyword arguments of the call.
        """
        hooks = method.sorted_hooks or method.sort_hooks()
        self.check_loop(may_wait=hooks.may_wait)
        call = hooks.call(instance, args, keywords)
        # A call that cannot wait has ended before anything could wait for its end.
        if not hooks.may_wait:
            return await call
        self._active[call] = None
        try:
            return await call
        finally:
            end_waiter = self._active.pop(call)
            if end_waiter is not None:
                wake(end_waiter)

    def ends_of_calls(self) -> list[asyncio.Future[None]]:
        """Return a future for each call that has not ended, which is done when it has."""
        ends: list[asyncio.Future[None]] = []
        for call, end_waiter in self._active.items():
            if end_waiter is None:
                end_waiter = self._active[call] = asyncio.get_running_loop().create_future()
            ends.append(end_waiter)
        return ends

    def check_usable(self) -> None:
        """Raise unless hooks can be called.

        Raises:
            HookGroupClosedError: the group is not entered yet and has to be, or has been left.
        """
        if self.state == "closed":
            raise HookGroupClosedError(f"{self!r} has been left; make a new one")
        if self.state == "entered":
            return
        for registered in self.hooks:
            reason = ""
            if is_context(registered.hook):
                reason = "is an async context manager"
            elif registered.registration.background:
                reason = "has background=True"
            if reason:
                raise HookGroupClosedError(
                    f"{self!r} has to be entered, as {registered.name} {reason}: `async with"
                    " HookGroup(...) as group:`"
                )

    def check_loop(self, *, may_wait: bool = False) -> None:
        """Bind the group to the running event loop and thread, or raise.

        A group that was entered stays with the loop of its block. A group without a block belongs
        to the loop of its first call, and to another loop only after that one was closed.

        Args:
            may_wait: whether the group is checked for a call that may wait, which needs a running
                event loop.

        Raises:
            WrongLoopError: the group belongs to another loop, or no loop is running and `may_wait`
                is true.
        """
        # Hot path: `running_loop()`, written out for each call that may wait.
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None and may_wait:
            raise WrongLoopError(
                f"{self!r} is called where no asyncio event loop is running; its hooks may wait,"
                " which needs asyncio (and not trio)"
            )
        if loop is not self._loop:
            may_change = self._loop is None
            if self._loop is not None and self.state == "new":
                may_change = self._loop.is_closed()
            if not may_change:
                raise WrongLoopError(
                    f"{self!r} is called from another event loop or thread than its own; in a"
                    " thread, use loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe"
                )
            self._loop = loop
        self.thread = get_ident()


def composite_of(hook: object) -> Composite | None:
    """Return the `Composite` of an object that stands for the hooks of a group, or None.

    A function stands for them, too, if it is a method of that object, or if `compose_functions` has
    returned it.
    """
    owner: Any = type(hook)
    if isinstance(hook, FunctionHook):
        function = hook.__aiohooks_function__
        # The class of a bound method's object, or else the function itself.
        owner = type(function.__self__) if inspect.ismethod(function) else function
    # Not `getattr`, which would ask a `__getattr__` of the user. Some functions have no `__dict__`.
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    return attributes.get(COMPOSITE)


def is_context(hook: object) -> bool:
    """Return whether a hook is an async context manager."""
    kind = type(hook)
    return hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__")


# -- methods


class CompositeMethod:
    """A method of the object that stands for the hooks of a group.

    Some frameworks look whether the class of an object overrides a method, and call it only then.
    So the class of the object overrides the method only while a hook implements it: its attribute
    is then the function that calls the hooks. Otherwise, the attribute is this descriptor. The
    class then seems to have the method of the hook interface, and the object still has the
    function.
    """

    def __init__(self, composite: Composite, point: Point) -> None:
        """Make the method of the object that stands for the hooks. It calls no hook yet."""
        self.composite: Composite = composite
        self.point: Point = point
        self.hooks: dict[RegisteredHook, None] = {}
        """The hooks that implement the method, in registration order."""
        self.sorted_hooks: SortedHooks | None = None
        """The hooks, sorted for the next call, or None if they have changed since."""
        self.fast_path: OrderGroup | None = None
        """The fast path of `sorted_hooks`, kept here because each call needs it."""
        declared = composite.interface.members[point.name]
        # The function reads the attributes of this object at each call.
        self._function = _make_caller(self)
        functools.update_wrapper(self._function, inspect.unwrap(declared))
        # This sets the attribute of the object's class for the first time.
        self.reset()

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        """Return the function that calls the hooks, bound to the object.

        For an access through the class, return the method of the hook interface, as if the class
        did not override it.
        """
        if instance is None:
            return own_attribute(self.composite.kind, owner, self.point.name)
        return types.MethodType(self._function, instance)

    def reset(self) -> None:
        """Note that the hooks have changed: the next call sorts them, and the class of the object
        overrides the method if there are any.
        """
        self.sorted_hooks = None
        self.fast_path = None
        attribute = self._function if self.hooks else self
        setattr(self.composite.kind, self.point.name, attribute)

    def sort_hooks(self) -> SortedHooks:
        """Sort the hooks for the next calls. Raise if the group cannot be used."""
        self.composite.check_usable()
        self.sorted_hooks = SortedHooks(
            self.point,
            self.composite.kind,
            self.hooks,
            self.composite.grace_secs,
            self.composite.background.make_call,
        )
        self.fast_path = self.sorted_hooks.fast_path
        return self.sorted_hooks

    def check_results(self, added: RegisteredHook) -> None:
        """Raise if several hooks would return a result, and nothing says which result counts.

        Args:
            added: a hook that is about to be added.

        Raises:
            InvalidHookError: several hooks return a result.
        """
        # In the mode "one", only one hook may return a result, apart from hooks that wrap its call.
        if self.point.mode != "one":
            return
        if self.point.wraps(added.hook):
            return
        for registered in self.hooks:
            if not self.point.wraps(registered.hook):
                raise InvalidHookError(
                    f"{registered.call_name(self.point.name)} and"
                    f" {added.call_name(self.point.name)} both return a result;"
                    f" {self.point.advice}"
                )


def _make_caller(method: CompositeMethod) -> Callable[..., Any]:
    """Return the function that calls the hooks of a method: a coroutine function, or a plain one
    for a plain method.
    """
    composite = method.composite
    point = method.point

    async def call_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        group = method.fast_path
        if group is None or keywords or get_ident() != composite.thread:
            return await composite.call(method, self, args, keywords)
        # Hot path: no function waits, so no other event loop matters, and only the thread is
        # checked. The iterator is kept, so that the loop continues behind a function whose error is
        # only logged.
        remaining = iter(group.functions)
        # The results that are not None, by the place of their calls. Usually there are none, so
        # that no dict is made.
        results: dict[int, Any] | None = None
        while True:
            try:
                for function in remaining:
                    result = await function(*args)
                    if result is not None:
                        results = results or {}
                        results[_current_place(group, remaining)] = result
                break
            except BaseException as error:
                # Wrong arguments are no failure of the hook. Other calls check them first. Here a
                # check would cost as much as the call of a hook, so they are checked only now: this
                # raises another TypeError for them.
                if isinstance(error, TypeError):
                    point.parameters.values(args, keywords)
                log_or_raise(group, _current_place(group, remaining), None, error)
        if results is None:
            return None
        places = range(len(group.functions))
        return combined(point, [results.get(place) for place in places])

    def call_plain_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        return result_now(call_method(self, *args, **keywords))

    return call_method if point.is_async else call_plain_method


def _current_place(group: OrderGroup, remaining: Any) -> int:
    """Return the place of the call that was made last, from 0.

    It is derived from the length of the iterator `remaining`. A counter would cost more than the
    calls themselves, and is seldom needed.
    """
    return len(group.functions) - operator.length_hint(remaining) - 1


# -- data


@dataclass(frozen=True)
class _Attribute:
    """The descriptor of public data of a hook interface, on the class of the object.

    The value is read from the first hook that has the data of the interface and sets it, or else
    from the object itself.
    """

    composite: Composite
    name: str
    default: Any

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return own_attribute(self.composite.kind, owner, self.name)
        for registered in self.composite.hooks:
            if self._is_set_by(registered.hook):
                return getattr(registered.hook, self.name)
        return own_attribute(self.composite.kind, instance, self.name)

    def _is_set_by(self, hook: object) -> bool:
        """Return whether a hook has another value than the class.

        Properties are compared as objects, and their values are not read, which may be costly. The
        comparison is `is`, as some values, such as arrays, cannot be compared with `==`.
        """
        value = inspect.getattr_static(hook, self.name, NO_VALUE)
        if value is NO_VALUE or value is self.default:
            return False
        return self.composite.interface.has_data_of(hook)


def _setting_function(composite: Composite) -> Callable[[Any, str, Any], None]:
    """Return the `__setattr__` of the object that stands for the hooks.

    Public data is also set on the hooks that share the data of the interface (`has_data_of`).
    """
    interface = composite.interface
    kind: Any = interface.kind

    def set_attribute(self: Any, name: str, value: Any) -> None:
        # The interface may have a `__setattr__` of its own.
        kind.__setattr__(self, name, value)
        # Private data is of this object alone. A method that is set replaces the calls of hooks.
        if name.startswith("_") or name in interface.points:
            return
        for registered in composite.hooks:
            if interface.has_data_of(registered.hook):
                setattr(registered.hook, name, value)

    return set_attribute


# -- the class


class _NoRegistration:
    """The first base of the class of the object that stands for the hooks.

    Its `__init_subclass__` is called in place of that of the interface. A framework may register
    each subclass there, but this class is not a plugin.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _Unlisted(abc.ABCMeta):
    """The metaclass of a class that derives from the interface, but is not listed in its
    `__subclasses__()`, where some frameworks look for plugins.

    The interface is only in the method resolution order of the class, and not in its `__bases__`.
    """

    def mro(cls) -> list[type[Any]]:
        """Return the classes in which attributes are looked up, with those of the interface."""
        composite: Composite = cls.__dict__[COMPOSITE]
        return [cls, _NoRegistration, *composite.interface.kind.__mro__]


def _composed(composite: Composite, init: Mapping[str, Any]) -> Any:
    """Return an object of a new subclass of the interface, made with the arguments `init`.

    Raises:
        InvalidHookError: the interface has no subclass, or the subclass no object.
    """
    kind = composite.interface.kind
    try:
        composed = _composite_class(composite, kind)
        instance = composed(**init)
    except Exception as error:
        raise InvalidHookError(
            f"{kind.__name__} cannot be a hook interface: no object of a class derived from it can"
            f" be made, failed with init={safe_repr(init)}: {safe_repr(error)}; give what it needs"
            " as init={...}, or derive one that can, and give that"
        ) from error
    if type(instance) is not composed:
        raise InvalidHookError(
            f"{kind.__name__} cannot be a hook interface: its __new__ returns"
            f" {safe_repr(instance)}, and no new object, which could stand for the hooks"
        )
    return instance


def _composite_class(composite: Composite, kind: type[Any]) -> type[Any]:
    """Return a subclass of the interface, on which the methods that hooks implement are set later.

    If possible, `__subclasses__()` of the interface does not list the class (`_Unlisted`).
    """
    namespace: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__setattr__": _setting_function(composite),
        COMPOSITE: composite,
    }
    # `_Unlisted` takes the place of the interface's metaclass, which must not be a special one.
    if type(kind) in (type, abc.ABCMeta):
        # This raises a TypeError for an interface with slots, or one that is written in C: it
        # decides the memory layout of its objects, and must be a real base of their class.
        with contextlib.suppress(TypeError):
            return _Unlisted(kind.__name__, (_NoRegistration,), namespace)
    if composite.interface.is_protocol:
        # No object can be made of a protocol.
        namespace["_is_protocol"] = False
    fill = operator.methodcaller("update", namespace)
    composed = types.new_class(kind.__name__, (_NoRegistration, kind), {}, fill)
    if inspect.isabstract(composed):
        # No object can be made of an abstract class. Hooks implement its methods later.
        composed.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return composed
