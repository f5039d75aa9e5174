"""The one object that stands for the hooks of a group: its class, its methods, and its data.

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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from threading import get_ident
from typing import Any, Generic, Literal, Protocol, cast
from weakref import WeakKeyDictionary

from aiohooks._core.cancel import running_loop
from aiohooks._core.clock import wake
from aiohooks._core.coroutines import result_now
from aiohooks._core.scope import current_scope
from aiohooks.dispatch.answers import Target, answer, combined, make_target, wraps
from aiohooks.dispatch.arguments import NO_ARGUMENTS
from aiohooks.dispatch.background import BackgroundCalls
from aiohooks.dispatch.calls import (
    HookStatus,
    OrderGroup,
    RegisteredHook,
    failed_in_turn,
)
from aiohooks.dispatch.hook import hook_name, identity
from aiohooks.dispatch.interface import NO_VALUE, Interface
from aiohooks.dispatch.ways import Point
from aiohooks.dispatch.wrapping import Innermost, call_given, wrapped
from aiohooks.errors import (
    HookGroupClosedError,
    InvalidHookError,
    WrongLoopError,
    add_note,
    safe_repr,
)

_COMPOSITE = "__aiohooks_composite__"
_NO_BASES = (object, abc.ABC, Generic, Protocol)
"""Classes that say nothing of the objects of their subclasses."""


class Composite:
    """The hooks of a group, and all that a call of them needs.

    `object` is an instance of the hook interface, and a call of its method calls that method of the
    hooks.
    """

    def __init__(
        self,
        interface: Interface,
        init: Mapping[str, Any],
        name: str,
        grace_secs: float,
    ) -> None:
        """Make the object, without hooks.

        Args:
            interface: the interface of the hooks.
            init: the arguments of its `__init__`; data of these names is not read from hooks.
            name: the name of the group in messages.
            grace_secs: how long cancelled calls and background calls may take to end.
        """
        self.interface: Interface = interface
        self.name: str = name
        self.grace_secs: float = grace_secs
        self.background: BackgroundCalls = BackgroundCalls(grace_secs)
        self.state: Literal["new", "entered", "closed"] = "new"
        self.thread: int | None = None
        """The thread of the last call."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.hooks: dict[RegisteredHook, Collection[str]] = {}
        """The hooks, in registration order, with the names of the methods that they implement."""
        self.implemented: Counter[str] = Counter()
        """How many hooks implement each method."""
        self._by_identity: dict[object, list[RegisteredHook]] = {}
        # The groups that have this object as a hook, so that they notice when it changes.
        self._outer: WeakKeyDictionary[Composite, RegisteredHook] = WeakKeyDictionary()
        self.active: set[asyncio.Future[None]] = set()
        """Futures of the calls that have not ended."""
        self._shared: dict[str, Any] = {}  # the attributes that were set on the object
        self._shares = False  # whether an attribute that is set now is set on the hooks, too
        self.kind: type[Any] = _composite_class(self)
        self.methods: dict[str, CompositeMethod] = {
            name: CompositeMethod(self, point) for name, point in interface.points.items()
        }
        for name, default in interface.attributes.items():
            if name not in init:
                setattr(self.kind, name, _Attribute(self, name, default))
        self.object: Any = _instance_of(self.kind, interface, init)
        self._shares = True

    # -- the hooks

    def insert(self, registered: RegisteredHook, points: Iterable[Point]) -> None:
        """Add a hook that implements these methods."""
        for name, value in self._shared.items():
            self._share(registered.hook, name, value)
        self._by_identity.setdefault(identity(registered.hook), []).append(registered)
        inner = composite_of(registered.hook)
        if inner is not None:
            inner._outer[self] = registered
        self._set_methods(registered, points)

    def remove(self, registered: RegisteredHook) -> None:
        """Remove a hook; calls that have begun are not changed."""
        key = identity(registered.hook)
        self._by_identity[key].remove(registered)
        if not self._by_identity[key]:
            del self._by_identity[key]
        inner = composite_of(registered.hook)
        if inner is not None:
            del inner._outer[self]
        self._set_methods(registered, ())
        del self.hooks[registered]

    def find(self, hook: object) -> list[RegisteredHook]:
        """Return the registrations of a hook, or of a function, the earliest first."""
        return self._by_identity.get(identity(hook), [])

    def has(self, other: Composite) -> bool:
        """Return whether `other` is this object, or one of the hooks stands for it, at any
        depth.
        """
        inner = [composite_of(registered.hook) for registered in self.hooks]
        return self is other or any(hook is not None and hook.has(other) for hook in inner)

    def _set_methods(self, registered: RegisteredHook, points: Iterable[Point]) -> None:
        """Note which methods a hook implements; this applies from the next call."""
        before = self.hooks.get(registered, ())
        names = [point.name for point in points]
        # Counted, as a look at all hooks would make the cost of n changes quadratic.
        self.implemented.update(names)
        self.implemented.subtract(before)
        self.hooks[registered] = names
        for name in {*before, *names}:
            self.methods[name].reset()
        # Where this object is a hook itself, it may have more or fewer methods now.
        for outer, as_hook in self._outer.items():
            outer._set_methods(as_hook, outer.interface.implemented(self.object))

    def status(self) -> list[HookStatus]:
        """Return the status of each hook."""
        for method in self.methods.values():
            method.count_calls()
        return self.background.status(self.hooks)

    def __repr__(self) -> str:
        names = ", ".join(registered.name for registered in self.hooks)
        return f"<HookGroup {self.name}: {names or 'no hooks'}>"

    # -- calls

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
                    " group:`"
                )

    def check_loop(self, *, may_wait: bool = False) -> None:
        """Bind the group to the running event loop, or raise.

        In its block a group belongs to the loop of the block. Without a block it belongs to the
        loop of its first call, and to another one only after that loop was closed.

        Raises:
            WrongLoopError: the group belongs to another loop; or none is running, which a call that
                may wait needs.
        """
        loop = running_loop()
        if loop is None and may_wait:
            raise WrongLoopError(
                f"{self!r} is called where no asyncio event loop is running; its hooks may wait,"
                " which needs asyncio (and not trio)"
            )
        if loop is not self._loop:
            is_free = self._loop is None or (self._loop.is_closed() and self.state == "new")
            if not is_free:
                raise WrongLoopError(
                    f"{self!r} is called from another event loop or thread than its own; in a"
                    " thread, use loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe"
                )
            self._loop = loop
        self.thread = get_ident()

    async def call(
        self,
        target: Target,
        innermost: Innermost,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Call the wrappers of a method, and `innermost`, which calls the other hooks."""
        self.check_loop(may_wait=target.may_wait)
        # Before the call: another one that runs meanwhile must not call them again.
        for registered in target.once:
            self.remove(registered)
        ended: asyncio.Future[None] | None = None
        # Leaving the group waits for active calls. One that cannot wait has ended by then.
        if target.may_wait:
            ended = asyncio.get_running_loop().create_future()
            self.active.add(ended)
        try:
            if target.wrappers:
                values = target.point.parameters.values(args, keywords)
                call_wrapped = wrapped(target.point, target.wrappers, innermost)
                return await call_wrapped(values, NO_ARGUMENTS)
            return await innermost(args, keywords)
        finally:
            if ended is not None:
                self.active.remove(ended)
                wake(ended)

    def close(self) -> None:
        """Accept no more calls."""
        self.state = "closed"
        for method in self.methods.values():
            method.reset()

    # -- data

    def set_data(self, instance: object, name: str, value: Any) -> None:
        """Set an attribute of an object of the class.

        If that object stands for the hooks, the attribute is set on the hooks, too.
        """
        kind: Any = self.interface.kind
        own: Any = self.interface.members.get(name)
        setter: Any = getattr(own, "__set__", None)
        shares = self._shares
        self._shares = False  # what a property sets in turn is set by that of the hook
        try:
            if setter is not None and not inspect.ismemberdescriptor(own):
                setter(instance, value)
            else:
                kind.__setattr__(instance, name, value)
        finally:
            self._shares = shares
        is_public = name not in self.interface.points and not name.startswith("__")
        if shares and instance is self.object and is_public:
            self._shared[name] = value
            for registered in self.hooks:
                self._share(registered.hook, name, value)

    def _share(self, hook: object, name: str, value: Any) -> None:
        """Set an attribute of the object on a hook of its class, or of a base of its class."""
        bases = {*self.interface.kind.__mro__}.intersection(type(hook).__mro__)
        if bases.issubset(_NO_BASES):
            return
        try:
            setattr(hook, name, value)
        except Exception as error:
            if self.interface.kind in bases:  # a base need not have the attribute
                add_note(error, f"set on {hook_name(hook)}, as it was set on the hooks of {self!r}")
                raise


def composite_of(hook: object) -> Composite | None:
    """Return the `Composite` of which a hook is the object."""
    return getattr(type(hook), _COMPOSITE, None)


def is_context(hook: object) -> bool:
    """Return whether a hook is an async context manager."""
    return hasattr(type(hook), "__aenter__") and hasattr(type(hook), "__aexit__")


class _Attribute:
    """Public data of a hook interface: of the object that stands for the hooks, or of the first
    hook that sets it.
    """

    def __init__(self, composite: Composite, name: str, default: Any) -> None:
        self._composite = composite
        self._name = name
        self._default = default

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is not None:
            for registered in self._composite.hooks:
                if self._is_set_by(registered.hook):
                    return self._value_of(registered.hook)
        own = owner if instance is None else instance
        return _of_class(self._composite, own, self._name)

    def _is_set_by(self, hook: object) -> bool:
        """Return whether a hook has another value than the class.

        No value is read: properties of hooks may be costly, and arrays cannot be compared.
        """
        interface = self._composite.interface
        value = inspect.getattr_static(hook, self._name, NO_VALUE)
        if value is NO_VALUE or value is self._default:
            return False
        return interface.is_protocol or interface.has_member(hook)

    def _value_of(self, hook: object) -> Any:
        try:
            return getattr(hook, self._name)
        except Exception as error:
            add_note(error, f"read from {hook_name(hook)}")
            raise


# -- methods


class CompositeMethod:
    """A method of the object that stands for the hooks of a group.

    While no hook implements the method, this is the attribute of the object's class, so that a
    group which has the object as a hook finds the interface's own method there, and does not call
    it. Otherwise the attribute is the function that calls the hooks.
    """

    def __init__(self, composite: Composite, point: Point) -> None:
        """Make the method of the object, which calls no hook yet."""
        self._composite = composite
        self._point = point
        self.current: Target | None = None
        """The target of the next call; None if the hooks have changed since it was made."""
        declared = composite.interface.members[point.name]
        function = _calling(self, composite, point)
        self._function = functools.update_wrapper(function, inspect.unwrap(declared))
        self.reset()

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        """Return the method of the object, or the method of the class."""
        if instance is None:
            return _of_class(self._composite, owner, self._point.name)
        return types.MethodType(self._function, instance)

    def reset(self) -> None:
        """Find the hooks anew at the next call."""
        self.count_calls()
        self.current = None
        is_implemented = self._composite.implemented[self._point.name]
        attribute = self._function if is_implemented else self
        setattr(self._composite.kind, self._point.name, attribute)

    def count_calls(self) -> None:
        """Add the number of quick calls to the counts of the hooks."""
        if self.current is not None and self.current.quick is not None:
            self.current.quick.count_calls()

    def target(self) -> Target:
        """Return what a call calls; raise if the group cannot be used."""
        if self.current is None:
            composite = self._composite
            composite.check_usable()
            # A group that is a hook of this one may have changed.
            self.check_results()
            self.current = make_target(
                self._point, self._hooks(), composite.grace_secs, composite.background.bind
            )
        return self.current

    def _hooks(self) -> list[RegisteredHook]:
        """Return the hooks that implement the method, in registration order."""
        name = self._point.name
        return [registered for registered, names in self._composite.hooks.items() if name in names]

    def check_results(self, *added: RegisteredHook) -> None:
        """Raise if several hooks return a result, and nothing says which result counts.

        Args:
            added: a hook that is about to be added, which counts as one of them.

        Raises:
            InvalidHookError: several hooks return a result.
        """
        if self._point.how != "one" or any(wraps(self._point, registered) for registered in added):
            return
        names = [
            registered.call_name(self._point.name)
            for registered in (*self._hooks(), *added)
            if not wraps(self._point, registered)
        ]
        if len(names) > 1:
            raise InvalidHookError(
                f"{' and '.join(names)} both return a result; {self._point.advice}"
            )


def _calling(method: CompositeMethod, composite: Composite, point: Point) -> Callable[..., Any]:
    """Return the function that calls the hooks of a method."""

    async def call_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        target = method.current or method.target()
        if get_ident() != composite.thread:
            composite.check_loop()
        quick = target.quick
        scope = current_scope.get()
        if quick is None or keywords or (scope is not None and scope.observers):
            own = functools.partial(_call_own, composite, point, self)
            innermost = functools.partial(answer, target, own)
            return await composite.call(target, innermost, args, keywords)
        # Now: a hook may change the group, which counts the calls that have begun.
        quick.uncounted += 1
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
        return combined(target, [results.get(place) for place in range(len(quick.methods))])

    def call_plain_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        if point.is_either and method.target().may_wait:
            return call_and_wait(self, *args, **keywords)
        return result_now(call_method(self, *args, **keywords))

    async def call_and_wait(self: Any, /, *args: Any, **keywords: Any) -> Any:
        result = await call_method(self, *args, **keywords)
        # The result of the class's own method may be an awaitable.
        return await result if inspect.isawaitable(result) else result

    if point.is_async and not point.is_either:
        return call_method
    return call_plain_method


def _place(group: OrderGroup, remaining: Any) -> int:
    """Return the place of the call that is being made.

    A counter would cost more than the calls themselves, and is seldom needed.
    """
    return len(group.methods) - operator.length_hint(remaining) - 1


async def _call_own(
    composite: Composite,
    point: Point,
    instance: object,
    /,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Call the interface's own method, as no hook has a result.

    If its body does nothing, a chain returns its argument, a merge or a list of all results is
    empty, and a wrapping method calls the function that its caller has given as the next.
    """
    if point.does_nothing and point.how in ("wrap", "chain", "merge", "all"):
        values = point.parameters.values(args, keywords)
        if point.how == "wrap":
            return await call_given(point, values, NO_ARGUMENTS)
        if point.how == "chain":
            return point.parameters.chosen_value(values)
        return point.empty()
    result = _of_class(composite, instance, point.name)(*args, **keywords)
    # The caller of a method that may be plain or not awaits the result itself.
    if point.is_async and not point.is_either and inspect.isawaitable(result):
        return await result
    return result


def _of_class(composite: Composite, owner: Any, name: str) -> Any:
    """Return an attribute of the object, or of its class, as the interface has it."""
    return getattr(cast("Any", super(composite.kind, owner)), name)


# -- the class


class _NoRegistration:
    """Keeps `__init_subclass__` of a hook interface from running for a composed object."""

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


def _composite_class(composite: Composite) -> type[Any]:
    """Return a subclass of the interface, on which the methods that hooks implement are set.

    `__subclasses__` of the interface, where plugins are found, does not list it where that is
    possible.
    """
    kind = composite.interface.kind
    _check_can_be_derived_from(kind)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        composite.set_data(self, name, value)

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
    try:
        made = types.new_class(kind.__name__, (_NoRegistration, kind), {}, fill)
    except Exception as error:
        raise InvalidHookError(
            f"{kind.__name__} cannot be a hook interface, as no class can be derived from it"
            f" without arguments: {error}; derive one that can, and give that"
        ) from error
    if inspect.isabstract(made):  # its methods are set later
        made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made


def _check_can_be_derived_from(kind: type[Any]) -> None:
    if getattr(kind, "__final__", False):
        raise InvalidHookError(
            f"{kind.__name__} is final, so that no object can stand for several hooks of it"
        )
    for base in kind.__mro__[:-1]:
        if base.__module__ in ("builtins", "enum"):
            raise InvalidHookError(
                f"{kind.__name__} cannot be a hook interface: it derives from {base.__name__}, and"
                " no value can stand for several; give a class that has its methods only"
            )


def _instance_of(made: type[Any], interface: Interface, init: Mapping[str, Any]) -> Any:
    """Return an object of the class, made with these arguments."""
    try:
        instance = made(**init)
    except Exception as error:
        raise InvalidHookError(
            f"{made.__name__} cannot be a hook interface: its __init__ failed with"
            f" init={safe_repr(init)}: {safe_repr(error)}; give what it needs as init={{...}}"
        ) from error
    if type(instance) is not made:
        raise InvalidHookError(
            f"{made.__name__} cannot be a hook interface: its __new__ returns"
            f" {safe_repr(instance)}, and no new object, which could stand for the hooks"
        )
    own = getattr(instance, "__dict__", {})
    for name, default in interface.attributes.items():
        if name not in init and own.get(name, NO_VALUE) is default is not NO_VALUE:
            del own[name]  # a dataclass sets its defaults, which would hide those of the hooks
    return instance
