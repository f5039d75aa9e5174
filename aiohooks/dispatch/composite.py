"""The one object that stands for the hooks of a group: its hooks, methods, data, and class.

Composite        the hooks of a group, and the object that stands for them
CompositeMethod  a method of the object, which calls the hooks
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
from aiohooks.dispatch.calls import OrderGroup, RegisteredHook, failed_in_turn
from aiohooks.dispatch.hook import identity
from aiohooks.dispatch.interface import NO_VALUE, Interface
from aiohooks.dispatch.ways import Args, Keywords, Point
from aiohooks.errors import HookGroupClosedError, InvalidHookError, WrongLoopError, safe_repr

_COMPOSITE = "__aiohooks_composite__"
"""The attribute of the class of an object that stands for the hooks of a group."""


class Composite:
    """The hooks of a group, and the object that stands for them.

    `object` is an instance of the hook interface. A call of its method calls that method of the
    hooks.
    """

    def __init__(
        self,
        interface: Interface,
        init: Mapping[str, Any],
        grace_secs: float,
    ) -> None:
        """Make the object, without hooks.

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
        """The thread whose event loop was checked by the last call. A call in another thread is
        checked again.
        """
        self._loop: asyncio.AbstractEventLoop | None = None
        self.hooks: dict[RegisteredHook, Sequence[Point]] = {}
        """The hooks, in registration order, with the methods that they implement."""
        self._by_identity: dict[object, list[RegisteredHook]] = {}
        # The calls that have not ended, each with a future for its end. Only `ends_of_calls` makes
        # it, as few calls need it.
        self._active: dict[Coroutine[Any, Any, Any], asyncio.Future[None] | None] = {}
        self.object: Any = _composed(self, init)
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
        """Add a hook that implements these methods. This applies from the next call."""
        key = identity(registered.hook)
        self._by_identity.setdefault(key, []).append(registered)
        self.hooks[registered] = points
        for point in points:
            method = self.methods[point.name]
            method.hooks[registered] = None
            method.reset()

    def remove(self, registered: RegisteredHook) -> None:
        """Remove a hook. Calls that have begun are not changed."""
        key = identity(registered.hook)
        self._by_identity[key].remove(registered)
        if not self._by_identity[key]:
            del self._by_identity[key]
        for point in self.hooks.pop(registered):
            method = self.methods[point.name]
            del method.hooks[registered]
            method.reset()

    def find(self, hook: object) -> list[RegisteredHook]:
        """Return the registrations of a hook, or of a function, the earliest first."""
        return self._by_identity.get(identity(hook), [])

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
            args: the positions of the call.
            keywords: the keywords of the call.
        """
        hooks = method.sorted_hooks or method.sort_hooks()
        self.check_loop(may_wait=hooks.may_wait)
        # Before the call: another one that runs meanwhile must not call them again.
        for registered in hooks.once:
            self.remove(registered)
        call = hooks.call(instance, args, keywords)
        if not hooks.may_wait:
            return await call
        self._active[call] = None
        try:
            return await call
        finally:
            ended = self._active.pop(call)
            if ended is not None:
                wake(ended)

    def ends_of_calls(self) -> list[asyncio.Future[None]]:
        """Return a future for each call that has not ended, which is done when it has."""
        ends: list[asyncio.Future[None]] = []
        for call, ended in self._active.items():
            if ended is None:
                ended = self._active[call] = asyncio.get_running_loop().create_future()
            ends.append(ended)
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
        to the loop of its first call, and to another one only after that loop was closed.

        Raises:
            WrongLoopError: the group belongs to another loop, or none is running, which a call that
                may wait needs.
        """
        # Written out, for each call that may wait.
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


def is_context(hook: object) -> bool:
    """Return whether a hook is an async context manager."""
    kind = type(hook)
    return hasattr(kind, "__aenter__") and hasattr(kind, "__aexit__")


# -- methods


class CompositeMethod:
    """A method of the object that stands for the hooks of a group.

    Frameworks look whether the class of an object overrides a method. The class of this one does
    while a hook implements the method.
    """

    def __init__(self, composite: Composite, point: Point) -> None:
        """Make the method of the object, which calls no hook yet."""
        self.composite: Composite = composite
        self.point: Point = point
        self.hooks: dict[RegisteredHook, None] = {}
        """The hooks that implement the method, in registration order."""
        self.sorted_hooks: SortedHooks | None = None
        """The hooks, sorted for the next call, or None if they have changed since."""
        self.quick: OrderGroup | None = None
        """The calls that the method makes itself, as in `SortedHooks.quick`."""
        declared = composite.interface.members[point.name]
        self._function = _calling(self)
        functools.update_wrapper(self._function, inspect.unwrap(declared))
        self.reset()

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        """Return the method of the object, or the method of the class."""
        if instance is None:
            return own_attribute(self.composite.kind, owner, self.point.name)
        return types.MethodType(self._function, instance)

    def reset(self) -> None:
        """Sort the hooks again at the next call."""
        self.sorted_hooks = None
        self.quick = None
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
        self.quick = self.sorted_hooks.quick
        return self.sorted_hooks

    def check_results(self, added: RegisteredHook) -> None:
        """Raise if several hooks would return a result, and nothing says which result counts.

        Args:
            added: a hook that is about to be added.

        Raises:
            InvalidHookError: several hooks return a result.
        """
        if self.point.how != "one":
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


def _calling(method: CompositeMethod) -> Callable[..., Any]:
    """Return the function that calls the hooks of a method."""
    composite = method.composite
    point = method.point

    async def call_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        quick = method.quick
        if quick is None or keywords or get_ident() != composite.thread:
            return await composite.call(method, self, args, keywords)
        # This is `call_groups` for the calls that have to cost almost nothing.
        # The results that are not None, by the place of their calls; usually there are none.
        results: dict[int, Any] | None = None
        calls = iter(quick.methods)
        while True:  # the loop continues behind a call whose error is only logged
            try:
                for call in calls:
                    result = await call(*args)
                    if result is not None:
                        results = results or {}
                        results[_place(quick, calls)] = result
                break
            except BaseException as error:
                failed_in_turn(quick, _place(quick, calls), None, error)
        if results is None:
            return None
        places = range(len(quick.methods))
        return combined(point, [results.get(place) for place in places])

    def call_plain_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        return result_now(call_method(self, *args, **keywords))

    return call_method if point.is_async else call_plain_method


def _place(group: OrderGroup, remaining: Any) -> int:
    """Return the place of the call that is being made.

    A counter would cost more than the calls themselves, and is seldom needed.
    """
    return len(group.methods) - operator.length_hint(remaining) - 1


# -- data


@dataclass(frozen=True)
class _Attribute:
    """Public data of a hook interface.

    It is read from the first hook of the class that sets it, or else from the object itself.
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

        No value is read: properties of hooks may be costly, and arrays cannot be compared.
        """
        value = inspect.getattr_static(hook, self.name, NO_VALUE)
        if value is NO_VALUE or value is self.default:
            return False
        return self.composite.interface.has_data_of(hook)


def _set_data(
    composite: Composite,
    instance: object,
    name: str,
    value: Any,
) -> None:
    """Set an attribute of the object. Set public data on the hooks that have it, too."""
    interface = composite.interface
    kind: Any = interface.kind
    kind.__setattr__(instance, name, value)
    if name.startswith("_") or name in interface.points:
        return
    for registered in composite.hooks:
        if interface.has_data_of(registered.hook):
            setattr(registered.hook, name, value)


# -- the class


class _NoRegistration:
    """The first base of a composed object's class. Its `__init_subclass__` is called in the place
    of that of the interface, which may register its subclasses.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _Unlisted(abc.ABCMeta):
    """The metaclass of a composed object: its class derives from the interface, but is not one of
    the `__subclasses__`, where plugins are found.
    """

    def mro(cls) -> list[type[Any]]:
        """Return the bases in which attributes are looked up."""
        composite: Composite = cls.__dict__[_COMPOSITE]
        return [cls, _NoRegistration, *composite.interface.kind.__mro__]


def _composed(composite: Composite, init: Mapping[str, Any]) -> Any:
    """Return an object of a subclass of the interface, made with these arguments."""
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
    """Return a subclass of the interface, on which the methods that hooks implement are set.

    `__subclasses__` of the interface, where plugins are found, does not list it where that is
    possible.
    """

    def set_attribute(self: Any, name: str, value: Any) -> None:
        _set_data(composite, self, name, value)

    namespace: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__setattr__": set_attribute,
        _COMPOSITE: composite,
    }
    if type(kind) in (type, abc.ABCMeta):
        # Fails for an interface with slots, or one that is written in C: the objects of a class
        # that has it only in its MRO have another layout.
        with contextlib.suppress(TypeError):
            return _Unlisted(kind.__name__, (_NoRegistration,), namespace)
    if composite.interface.is_protocol:
        namespace["_is_protocol"] = False
    fill = operator.methodcaller("update", namespace)
    composed = types.new_class(kind.__name__, (_NoRegistration, kind), {}, fill)
    if inspect.isabstract(composed):  # its methods are set later
        composed.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return composed
