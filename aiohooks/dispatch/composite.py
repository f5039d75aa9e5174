"""The one object that stands for the hooks of a group: its class, its methods, and its data.

Composite        the hooks of a group and the object that stands for them
CompositeMethod  a method of the object, which calls the hooks
LoopBinding      the event loop in which a group is used
ActiveCalls      counts calls that have not ended
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import Any, Generic, Protocol, cast
from weakref import WeakKeyDictionary

from aiohooks._core.clock import wake
from aiohooks._core.coroutines import result_now
from aiohooks._core.scope import current_scope
from aiohooks.dispatch.answers import (
    Target,
    answer,
    as_coroutine_function,
    combined,
)
from aiohooks.dispatch.arguments import NO_ARGUMENTS
from aiohooks.dispatch.calls import Method, RegisteredHook, failed_in_turn
from aiohooks.dispatch.hook import FunctionHook, hook_name, identity
from aiohooks.dispatch.interface import NO_VALUE, Interface
from aiohooks.dispatch.plain import wraps_others
from aiohooks.dispatch.ways import Point
from aiohooks.dispatch.wrapping import Innermost, call_given, wrapped
from aiohooks.errors import (
    InvalidHookError,
    WrongLoopError,
    add_note,
    safe_repr,
)

_COMPOSITE = "__aiohooks_composite__"
_NO_BASES = (object, abc.ABC, Generic, Protocol)
"""Classes that say nothing of the objects of their subclasses."""


class LoopBinding:
    """The event loop in which a group is used.

    That is the one of its block, or of its first call until that loop is closed.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        """Bind to no loop yet.

        Args:
            describe: returns the name of the group for messages.
        """
        self._describe = describe
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: int | None = None
        """The thread of the last call."""
        self.in_block: bool = False
        """Whether the group is entered, so that its loop cannot change."""

    def check(self, *, may_wait: bool = False) -> None:
        """Bind to the running loop, or raise.

        Raises:
            WrongLoopError: the group is bound to another loop; or none is running, which a call
                that may wait needs.
        """
        loop: asyncio.AbstractEventLoop | None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None and may_wait:
            raise WrongLoopError(
                f"{self._describe()} is called where no asyncio event loop is running; its hooks"
                " may wait, which needs asyncio (and not trio)"
            )
        if loop is not self.loop:
            is_free = self.loop is None or (self.loop.is_closed() and not self.in_block)
            if not is_free:
                raise WrongLoopError(
                    f"{self._describe()} is called from another event loop or thread than its own;"
                    " in a thread, use loop.call_soon_threadsafe or"
                    " asyncio.run_coroutine_threadsafe"
                )
            self.loop = loop
        self.thread = get_ident()


class ActiveCalls:
    """Counts the calls that have not ended."""

    def __init__(self) -> None:
        self.count: int = 0
        # Made when something waits for the end of the calls.
        self._idle: asyncio.Future[None] | None = None

    def ended(self) -> None:
        """Note that a call has ended."""
        self.count -= 1
        if not self.count and self._idle is not None:
            wake(self._idle)

    def idle(self) -> asyncio.Future[None]:
        """Return a future that is done when all calls have ended; no more calls may begin."""
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
            if not self.count:
                wake(self._idle)
        return self._idle


class Composite:
    """Stands for the hooks of a group: `object` is an instance of the hook interface, and a call of
    its method calls that method of the hooks.
    """

    def __init__(
        self,
        interface: Interface,
        init: Mapping[str, Any],
        hooks: dict[RegisteredHook, None],
        binding: LoopBinding,
        make_target: Callable[[Point, Iterable[RegisteredHook]], Target],
        group_name: str,
    ) -> None:
        """Make the object, without hooks.

        Args:
            interface: the interface of the hooks.
            init: the arguments of its `__init__`; data of these names is not read from hooks.
            hooks: the dict in which the group keeps its hooks, in registration order.
            binding: the event loop of the group.
            make_target: returns what a call of a method calls; raises if the group cannot be used.
            group_name: the name of the group in messages.
        """
        # Here and below, a dict of keys only is a set that keeps its order.
        self.interface: Interface = interface
        self.hooks: dict[RegisteredHook, None] = hooks
        self._by_identity: dict[object, dict[RegisteredHook, None]] = {}
        self.binding: LoopBinding = binding
        self.make_target: Callable[[Point, Iterable[RegisteredHook]], Target] = make_target
        self.active: ActiveCalls = ActiveCalls()
        """The calls that have begun since an entered hook was last removed."""
        self._earlier: list[ActiveCalls] = []  # the calls that had begun before such removals
        self._group_name = group_name
        self._shared: dict[str, Any] = {}  # the attributes that were set on the object
        self._shares = False  # whether an attribute that is set now is set on the hooks, too
        # The groups that have this object as a hook, so that they notice when it changes.
        self._outer: WeakKeyDictionary[Composite, RegisteredHook] = WeakKeyDictionary()
        self.kind: type[Any] = _composite_class(interface.kind, self)
        self.methods: dict[str, CompositeMethod] = {
            name: CompositeMethod(self, point) for name, point in interface.points.items()
        }
        for name, default in interface.attributes.items():
            if name not in init:
                setattr(self.kind, name, _Attribute(self, name, default))
        self.object: Any = _instance_of(self.kind, interface, init)
        self._shares = True

    def insert(self, registered: RegisteredHook, points: Iterable[Point]) -> None:
        """Add a hook that implements these methods."""
        if self._shared:
            self._share(registered.hook, *self._shared)
        self.hooks[registered] = None
        self._by_identity.setdefault(_identity(registered), {})[registered] = None
        inner = composite_of(registered.hook)
        if inner is not None:
            inner._outer[self] = registered
        self._place(registered, points)

    def remove(self, registered: RegisteredHook) -> None:
        """Remove a hook; calls that have begun are not changed."""
        del self.hooks[registered]
        key = _identity(registered)
        del self._by_identity[key][registered]
        if not self._by_identity[key]:
            del self._by_identity[key]
        self._place(registered, ())
        inner = composite_of(registered.hook)
        if inner is not None:
            del inner._outer[self]

    def find(self, hook: object) -> tuple[RegisteredHook, ...]:
        """Return the registrations of a hook, or of a function."""
        return tuple(self._by_identity.get(identity(hook), ()))

    def has(self, other: Composite) -> bool:
        """Return whether `other` is this object, or one of the hooks stands for it, at any
        depth.
        """
        if self is other:
            return True
        for registered in self.hooks:
            inner = composite_of(registered.hook)
            if inner is not None and inner.has(other):
                return True
        return False

    def separate_calls(self) -> list[ActiveCalls]:
        """Count later calls separately, and return the counts of the calls that are active now."""
        calls = [active for active in (*self._earlier, self.active) if active.count]
        self._earlier = calls
        self.active = ActiveCalls()
        return calls

    def _place(self, registered: RegisteredHook, points: Iterable[Point]) -> None:
        """Note that a hook implements these methods, and no others."""
        names = {point.name for point in points}
        for name, method in self.methods.items():
            if name in names or registered in method.hooks:
                method.place(registered, implements=name in names)
        if not self._outer:
            return
        # Where this object is a hook itself, it may have more or fewer methods now.
        for outer, as_hook in self._outer.items():
            outer._place(as_hook, outer.interface.implemented(self.object))

    # -- data

    def hook_overriding(self, name: str, default: Any) -> Any:
        """Return the first hook with another value than the class for this public data, or None.

        No value is read: properties of hooks may be costly, and arrays cannot be compared.
        """
        for registered in self.hooks:
            if self._overrides_data(registered.hook, name, default):
                return registered.hook
        return None

    def _overrides_data(
        self,
        hook: object,
        name: str,
        default: Any,
    ) -> bool:
        found = inspect.getattr_static(hook, name, NO_VALUE)
        inner = composite_of(hook)
        if inner is not None and isinstance(found, _Attribute):
            # The hook stands for a group, and has the value of one of the hooks there.
            return inner.hook_overriding(name, default) is not None
        if found is NO_VALUE or found is default:
            return False
        return self.interface.is_protocol or self.interface.has_member(hook)

    def set_data(
        self,
        instance: object,
        name: str,
        value: Any,
    ) -> None:
        """Set an attribute of an object of the class.

        If that object stands for the hooks, the attribute is set on the hooks, too.
        """
        kind: Any = self.interface.kind
        shares = self._shares
        self._shares = False  # what a property sets in turn is set by that of the hook
        try:
            kind.__setattr__(instance, name, value)
        finally:
            self._shares = shares
        is_public = name not in self.interface.points and not name.startswith("__")
        if shares and instance is self.object and is_public:
            self._shared[name] = value
            for registered in self.hooks:
                self._share(registered.hook, name)

    def _share(self, hook: object, *names: str) -> None:
        """Set attributes of the object on a hook that is of its class, or shares a base with it."""
        is_member = self.interface.has_member(hook)
        bases = {*self.interface.kind.__mro__}.intersection(type(hook).__mro__)
        shares_base = not bases.issubset(_NO_BASES)
        if not (is_member or shares_base):
            return
        for name in names:
            try:
                setattr(hook, name, self._shared[name])
            except Exception as error:
                if not is_member:
                    continue  # the base need not have the attribute
                add_note(
                    error,
                    f"set on {hook_name(hook)}, as it was set on the hooks of group"
                    f" {self._group_name}",
                )
                raise


def _identity(registered: RegisteredHook) -> object:
    hook = registered.hook
    return identity(hook.function if isinstance(hook, FunctionHook) else hook)


def composite_of(hook: object) -> Composite | None:
    """Return the `Composite` of which a hook is the object."""
    return getattr(type(hook), _COMPOSITE, None)


class _Attribute:
    """Public data of a hook interface: of the object that stands for the hooks, or of the first
    hook that sets it.
    """

    def __init__(
        self,
        composite: Composite,
        name: str,
        default: Any,
    ) -> None:
        self._composite = composite
        self._name = name
        self._default = default

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return _of_class(self._composite, owner, self._name)
        # A descriptor that can set comes before the values of the object, so it looks for them.
        values: dict[str, Any] = instance.__dict__
        if self._name in values:
            return values[self._name]
        if self._default is NO_VALUE:
            with contextlib.suppress(AttributeError):
                return _of_class(self._composite, instance, self._name)
        hook = self._composite.hook_overriding(self._name, self._default)
        if hook is None:
            return _of_class(self._composite, instance, self._name)
        try:
            return getattr(hook, self._name)
        except Exception as error:
            add_note(error, f"read from {hook_name(hook)}")
            raise

    def __set__(self, instance: Any, value: Any) -> None:
        own: Any = self._composite.interface.members[self._name]
        kind = cast("Any", type(own))
        if hasattr(kind, "__set__"):  # a property, or a slot
            own.__set__(instance, value)
        else:
            instance.__dict__[self._name] = value


# -- methods


class CompositeMethod:
    """A method of the object that stands for the hooks of a group.

    While no hook implements the method, this is the attribute of the object's class, so that a
    group which has the object as a hook finds the interface's own method there, and does not call
    it. Otherwise the attribute is the function that calls the hooks.
    """

    __slots__ = ("_composite", "_function", "_point", "_returning", "hooks", "usable")

    def __init__(self, composite: Composite, point: Point) -> None:
        """Make the method of the object, which calls no hook yet."""
        self._composite = composite
        self._point = point
        self.hooks: dict[RegisteredHook, None] = {}
        """The hooks that implement the method."""
        self._returning: dict[RegisteredHook, None] = {}  # those whose result would be the result
        self.usable: Target | None = None
        """The target of the next call; None if the hooks have changed since it was made."""
        function = _calling(self, composite, point)
        declared = composite.interface.members[point.name]
        self._function = functools.update_wrapper(function, inspect.unwrap(declared))
        setattr(composite.kind, point.name, self)

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        """Return the method of the object, or the method of the class."""
        if instance is None:
            return _of_class(self._composite, owner, self._point.name)
        return types.MethodType(self._function, instance)

    def place(self, registered: RegisteredHook, *, implements: bool) -> None:
        """Note whether a hook implements the method."""
        self.usable = None
        had_hooks = bool(self.hooks)
        self._returning.pop(registered, None)
        if implements:
            self.hooks[registered] = None
            if self._returns_result(registered):
                self._returning[registered] = None
        else:
            self.hooks.pop(registered, None)
        if had_hooks != bool(self.hooks):
            # See above: a group that has the object as a hook looks at the class.
            attribute = self._function if self.hooks else self
            setattr(self._composite.kind, self._point.name, attribute)

    def _returns_result(self, registered: RegisteredHook) -> bool:
        """Return whether the result of a hook is the result of the call, so that only one hook may
        return any.
        """
        if self._point.how != "one":
            return False
        return not wraps_others(getattr(registered.hook, self._point.name))

    def check_results(self, added: RegisteredHook | None = None) -> None:
        """Raise if several hooks return a result, and nothing says which result counts.

        Args:
            added: a hook that is about to be added, which counts as one of them.

        Raises:
            InvalidHookError: several hooks return a result.
        """
        returning = [*self._returning]
        if added is not None and self._returns_result(added):
            returning.append(added)
        if len(returning) > 1:
            names = [registered.call_name(self._point.name) for registered in returning]
            raise InvalidHookError(
                f"{' and '.join(names)} both return a result; {self._point.advice}"
            )

    def target(self) -> Target:
        """Return what a call calls; raise if the group cannot be used."""
        # A group that is a hook of this one may have changed.
        self.check_results()
        # A hook may have come to implement the method later than those behind it.
        hooks = [registered for registered in self._composite.hooks if registered in self.hooks]
        self.usable = self._composite.make_target(self._point, hooks)
        return self.usable


def _calling(
    method: CompositeMethod,
    composite: Composite,
    point: Point,
) -> Callable[..., Any]:
    """Return the function that calls the hooks of a method."""
    call_own = _own_method(composite, point)
    binding = composite.binding

    async def call_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        target = method.usable
        if target is None:
            target = method.target()
        if get_ident() != binding.thread:
            binding.check()
        quick = target.quick
        scope = current_scope.get()
        if quick is None or keywords or (scope is not None and scope.observers):
            innermost = functools.partial(answer, target, functools.partial(call_own, self))
            return await call_target(composite, target, innermost, args, keywords)
        # The results that are not None, by the place of their calls; usually there are none.
        answers: dict[int, Any] | None = None
        calls = iter(quick.methods)
        while True:  # the loop continues behind a call whose error is only logged
            try:
                for call in calls:
                    result = await call(*args)
                    if result is not None:
                        answers = answers or {}
                        answers[_place(quick, calls)] = result
                break
            except BaseException as error:
                failed_in_turn(quick, _place(quick, calls), None, error)
        quick.made += 1
        if answers is None:
            return None
        return combined(target, [*map(answers.get, range(len(quick.methods)))])

    def call_plain_method(self: Any, /, *args: Any, **keywords: Any) -> Any:
        if point.is_either and (method.usable or method.target()).may_wait:
            return call_and_wait(self, *args, **keywords)
        return result_now(call_method(self, *args, **keywords))

    async def call_and_wait(self: Any, /, *args: Any, **keywords: Any) -> Any:
        result = await call_method(self, *args, **keywords)
        # The result of the class's own method may be an awaitable.
        return await result if inspect.isawaitable(result) else result

    if point.is_async and not point.is_either:
        return call_method
    return call_plain_method


def _place(quick: Any, calls: Any) -> int:
    """Return the place of the call that is being made.

    A counter would cost more than the calls themselves, and is seldom needed.
    """
    return len(quick.methods) - operator.length_hint(calls) - 1


async def call_target(
    composite: Composite,
    target: Target,
    innermost: Innermost,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """Call the wrappers of a method, and `innermost`, which calls the others."""
    binding = composite.binding
    binding.check(may_wait=target.point.is_async and target.may_wait)
    for registered in target.once:
        composite.remove(registered)
    active = composite.active
    active.count += 1
    try:
        if target.wrappers:
            values = target.point.parameters.values(args, keywords)
            return await wrapped(target.point, target.wrappers, innermost)(values, NO_ARGUMENTS)
        return await innermost(args, keywords)
    finally:
        active.ended()


def _own_method(composite: Composite, point: Point) -> Method:
    """Return the function that is called if no hook has a result.

    It is the method of the class itself. If the body of that does nothing, it is a function in its
    place: a chain returns its argument, a merge is empty, and a wrapping method calls what its
    caller has given as the next.
    """

    async def call_stand_in(self: Any, /, *args: Any, **keywords: Any) -> Any:
        values = point.parameters.values(args, keywords)
        if point.how == "wrap":
            return await call_given(point, values, NO_ARGUMENTS)
        if point.how == "chain":
            return point.parameters.chosen_value(values)
        return point.empty()

    def call(self: Any, /, *args: Any, **keywords: Any) -> Any:
        return _of_class(composite, self, point.name)(*args, **keywords)

    async def call_and_wait(self: Any, /, *args: Any, **keywords: Any) -> Any:
        result = call(self, *args, **keywords)
        return await result if inspect.isawaitable(result) else result

    if point.does_nothing and point.how in ("wrap", "chain", "merge", "all"):
        return call_stand_in
    return call_and_wait if point.is_async and not point.is_either else as_coroutine_function(call)


def _of_class(
    composite: Composite,
    owner: Any,
    name: str,
) -> Any:
    """Return an attribute of the object, or of its class, as the interface has it."""
    return getattr(cast("Any", super(composite.kind, owner)), name)


# -- the class


class _NoRegistration:
    """Keeps `__init_subclass__` of a hook interface from running for a composed object."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class _Unlisted(type):
    """The metaclass of a composed object: its class derives from the interface, but is not one of
    the `__subclasses__`, where plugins are found.
    """

    def mro(cls) -> list[type[Any]]:
        """Return the bases in which attributes are looked up."""
        composite: Composite = cls.__dict__[_COMPOSITE]
        return [cls, _NoRegistration, *composite.interface.kind.__mro__]


class _UnlistedABC(_Unlisted, abc.ABCMeta):
    """The same for an abstract class."""


def _composite_class(kind: type[Any], composite: Composite) -> type[Any]:
    """Return a subclass of `kind`; the methods that hooks implement are set on it."""
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

    def set_attribute(self: Any, name: str, value: Any) -> None:
        composite.set_data(self, name, value)

    place: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__setattr__": set_attribute,
        _COMPOSITE: composite,
    }
    unlisted = {type: _Unlisted, abc.ABCMeta: _UnlistedABC}.get(type(kind))
    if unlisted is not None:
        # The layout of a class with slots, or one that is written in C, does not allow it.
        with contextlib.suppress(TypeError):
            listed_nowhere: type[Any] = unlisted(kind.__name__, (_NoRegistration,), place)
            return listed_nowhere
    if composite.interface.is_protocol:
        place["_is_protocol"] = False

    def fill(namespace: dict[str, Any]) -> None:
        namespace.update(place)

    try:
        made = types.new_class(kind.__name__, (_NoRegistration, kind), {}, fill)
    except Exception as error:
        raise InvalidHookError(
            f"{kind.__name__} cannot be a hook interface, as no class can be derived from it"
            f" without arguments: {error}; derive one that can, and give that"
        ) from error
    if inspect.isabstract(made):
        made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made


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
