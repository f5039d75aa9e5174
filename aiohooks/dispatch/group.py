"""A group of hooks that is called as if it were one hook.

    HookGroup    the group: its hooks, its calls, its block
    compose      the one object that stands for several hooks, where nothing has to be entered

How a call is made depends on the method (`lifecycle.Point.how`): `answers.py` has a function for each way.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import operator
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast, overload
from weakref import WeakSet

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, shielded, wait_done
from aiohooks._aio.clock import wake
from aiohooks._aio.contexts import OwnContext
from aiohooks._aio.overlap import keep_errors, result_now
from aiohooks._aio.run_scope import current_scope
from aiohooks._validate import check_secs, is_coroutine_function
from aiohooks.dispatch.answers import Target, answer, as_coroutine_function, make_target, only_answer, positional_first, wrapped
from aiohooks.dispatch.background import BackgroundCalls, raise_failures
from aiohooks.dispatch.calls import Method, OrderGroup, RegisteredHook, call_groups, failed_in_turn
from aiohooks.dispatch.hook import HookRegistration, configure
from aiohooks.dispatch.lifecycle import How, Lifecycle, Point, check_options, registered_hooks
from aiohooks.errors import (
    HookGroupClosedError,
    InvalidArgumentError,
    InvalidHookError,
    add_note,
    did_you_mean,
    hook_cancelled_error,
)

_logger = logging.getLogger("aiohooks")
K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class HookStatus(NamedTuple):
    """What has become of the calls of one hook: failures that were logged, background calls that wait or run."""

    name: str
    failures: int
    pending: int
    disabled: bool


class HookGroup(Generic[K]):
    """Several hooks of one lifecycle, called as one: `async with HookGroup(AgentHooks, [Audit(), Metrics()]) as group:`.

    A lifecycle is any class: its public methods are what hooks can implement. `group.hooks` is an object of that class; calling a
    method of it calls the hooks that implement the method. Calls start in registration order: a method whose code has no `await`
    is called in the caller's task, every other one has a task and a context of its own, and these overlap. What they leave set
    in their contexts is set for the caller. The first failure cancels the others and waits for them; one failure is raised as it
    is, several as one flat group, each with a note that names the hook. A cancel of the caller wins over both.

    Any number of tasks may call a group at the same time; `group.hooks` and its methods, also those taken before, call the hooks
    of the group at that time. Hooks that are async context managers are entered with the block, in
    order, and left in reverse; background calls end with it. A group with neither can be used without a block.
    """

    def __init__(
        self,
        kind: Callable[..., K],
        hooks: Iterable[object] = (),
        *,
        results: Mapping[str, How] | How | None = None,
        name: str | None = None,
        grace_secs: float = DEFAULT_GRACE_SECS,
    ) -> None:
        """Check the hooks.

        Args:
            kind: the lifecycle: a class of one's own, or of a framework. (Type checkers refuse an abstract one as a `type`.)
            hooks: objects with methods of `kind`, or registrations made by `configure`. They need not derive from it.
            results: how the answers of several hooks become one, by the name of the method, for a class that is not one's own;
                or one way for all methods that return something. See `point`.
            name: the name of the group in messages; by default that of `kind`.
            grace_secs: how long cancelled calls, background calls and the end of the hooks may take.

        Raises:
            InvalidHookError: `kind` is not a class; a hook does not fit it; several hooks implement a method that returns
                something, and nothing says how their answers become one.
            InvalidArgumentError: `results` names a method that `kind` does not have.
        """
        check_secs(grace_secs, "grace_secs")
        if isinstance(hooks, HookRegistration) or not isinstance(hooks, Iterable):
            raise InvalidHookError(f"hooks is {hooks!r}; give a list of hooks")
        self._lifecycle = Lifecycle(kind, results)
        self._name = name or self._lifecycle.kind.__name__
        self._grace_secs = grace_secs
        self._background = BackgroundCalls(grace_secs)
        self._registered: dict[int, RegisteredHook] = {}  # by the id of the hook
        self._numbers: Counter[str] = Counter()  # of the names that hooks have had
        self._taken: dict[str, tuple[object, Any]] = {}  # the attributes that hooks have set, and the first that did
        self._outer: WeakSet[HookGroup[Any]] = WeakSet()  # groups in which this one is a hook
        self._entered: list[RegisteredHook] = []
        self._context = OwnContext()  # of entering and leaving
        self._state = "new"
        self._left: asyncio.Future[None] | None = None
        self._class = _composite_class(self._lifecycle.kind, self)
        self._given = dict(vars(self._class))
        self._methods = {each.name: _Method(self, each) for each in self._lifecycle.points.values()}
        for one in registered_hooks(hooks, self._numbers):
            self._insert(one)
        self.hooks: K = cast("K", _instance_of(self._class))
        """The one object that stands for all hooks: pass it wherever a hook of the class is wanted."""

    # -- calling

    async def call(
        self, method: Callable[Concatenate[K, P], Coroutine[Any, Any, T]], /, *args: P.args, **keywords: P.kwargs
    ) -> list[T]:
        """Call a method of all hooks that implement it, and return every answer, in order of the hooks.

        Example: `answers = await group.call(AgentHooks.before_model, request)`.

        Raises:
            InvalidArgumentError: `method` is not a coroutine method of the class, or one that wraps.
            HookGroupClosedError: the group is not entered yet and has to be, or has been left.
            BaseException: the failure of a hook; several as one group.
        """
        each = self._point_of(method)
        if not each.is_async or each.how == "wrap":
            raise InvalidArgumentError(f"{each.name} has no list of answers; call group.hooks.{each.name}(...)")
        called = self._methods[each.name]
        target = called.usable or called.target()
        given = positional_first(each.positional, args, keywords) if keywords else (args, keywords)
        call = wrapped(target, functools.partial(call_groups, target.groups))
        return await call(*given) or []  # a wrapper has swallowed the error

    def _point_of(self, method: Callable[..., Any]) -> Point:
        kind = self._lifecycle.kind.__name__
        if not callable(method):
            known = next(iter(self._lifecycle.points))
            raise InvalidArgumentError(
                f"{method!r} is given for a method of {kind}; give the method itself, as in {kind}.{known}"
            )
        name = getattr(method, "__name__", repr(method))
        each = self._lifecycle.points.get(name)
        if each is None:
            raise InvalidArgumentError(f"{name} is not a method of {kind}; {did_you_mean(name, self._lifecycle.points)}")
        return each

    # -- the hooks

    def add(self, hook: object) -> None:
        """Add a hook, or a registration; it takes part from the next call on.

        Raises:
            InvalidHookError: it does not fit, is a hook of the group already, or would have to be entered now.
            HookGroupClosedError: the group has been left.
        """
        if self._state == "closed":
            self.check_usable()
        numbers = self._numbers.copy()
        (one,) = registered_hooks([hook], numbers, self._registered)
        self._insert(one)
        self._numbers = numbers

    def remove(self, hook: object) -> None:
        """Remove a hook, or a function that was added with `on`; it takes no part from the next call on.

        Raises:
            InvalidArgumentError: it is not a hook of the group.
        """
        known = self._registered.get(id(hook))
        functions = (one for one in self._registered.values() if isinstance(one.hook, _FunctionHook) and one.hook.fn is hook)
        found = [*functions] if known is None else [known]
        if not found:
            raise InvalidArgumentError(f"{hook!r} is not a hook of {self!r}")
        for one in found:
            del self._registered[id(one.hook)]
            self._place(one, ())
            if (inner := _group_of(one.hook)) is not None:
                inner._outer.discard(self)
        for name in self._taken:
            if name in self._given:
                setattr(self._class, name, self._given[name])
            else:
                delattr(self._class, name)
        if self._taken:
            self._taken = {}
            for one in self._registered.values():
                self._take_attributes(one.hook)

    @overload
    def on(self, method: Callable[..., Any], fn: F, **attributes: Any) -> F: ...
    @overload
    def on(self, method: Callable[..., Any], fn: None = None, **attributes: Any) -> Callable[[F], F]: ...
    def on(self, method: Callable[..., Any], fn: Any = None, **attributes: Any) -> Any:
        """Add a function as a hook with one method: `group.on(AgentHooks.on_tool_start, log)`; also as a decorator.

        Args:
            method: the method of the class.
            fn: a coroutine function, or a plain function, which must not block.
            attributes: those of `configure`.

        Returns:
            The function.
        """
        if fn is None:
            return functools.partial(self.on, method, **attributes)
        self.add(configure(_FunctionHook(self._point_of(method), fn), **attributes))
        return fn

    def _insert(self, one: RegisteredHook) -> None:
        """Check a hook and take it from the next call on; calls that are active keep theirs."""
        hook = one.hook
        if isinstance(hook, HookGroup):
            raise InvalidHookError(f"{hook!r} is a group; give its `hooks`, and enter it yourself")
        points = self._lifecycle.check(hook)
        inner = _group_of(hook)
        if not points and inner is None and not self._lifecycle.has_member(hook):
            names = ", ".join(self._lifecycle.points)
            raise InvalidHookError(f"{hook!r} has none of the methods of {self._lifecycle.kind.__name__}: {names}")
        check_options(one, points)
        if self._state == "entered" and _is_context(hook):
            raise InvalidHookError(f"{hook!r} is a context manager; add it before the group is entered")
        for each in points:
            self._methods[each.name].check_answers(one)
        self._take_attributes(hook)
        self._registered[id(hook)] = one
        if inner is not None:
            inner._outer.add(self)
        self._place(one, points)

    def _place(self, one: RegisteredHook, points: Iterable[Point]) -> None:
        """Make a hook one of those of these methods, and of no others."""
        names = {each.name for each in points}
        for name, method in self._methods.items():
            method.place(one, implements=name in names)
        for outer in self._outer:
            outer._place(outer._registered[id(self.hooks)], outer._lifecycle.implemented(self.hooks))

    def _take_attributes(self, hook: object) -> None:
        """Take over the public data attributes that a hook of the class sets otherwise than the class."""
        if not self._lifecycle.attributes or not self._lifecycle.has_member(hook):
            return
        new: dict[str, tuple[object, Any]] = {}
        for name, default in self._lifecycle.attributes.items():
            if name in self._taken:
                _check_equal(name, *self._taken[name], hook)
            elif inspect.getattr_static(hook, name) is not default:
                new[name] = hook, getattr(hook, name)
                for one in self._registered.values():
                    if self._lifecycle.has_member(one.hook):
                        _check_equal(name, *new[name], one.hook)
        self._taken |= new
        for name, (_, value) in new.items():
            setattr(self._class, name, value)

    # -- entering and leaving

    def check_usable(self) -> None:
        """Raise unless hooks can be called.

        Raises:
            HookGroupClosedError: the group is not entered yet and has to be, or has been left.
        """
        if self._state == "closed":
            raise HookGroupClosedError(f"{self!r} has been left; make a new one")
        if self._state == "new":
            for one in self._registered.values():
                if _is_context(one.hook) or one.registration.background:
                    reason = "is an async context manager" if _is_context(one.hook) else "has background=True"
                    raise HookGroupClosedError(f"{self!r} has to be entered, as {one.name} {reason}: `async with group:`")

    async def __aenter__(self) -> Self:
        """Enter the hooks that are async context managers, in order; if one fails, leave those before it.

        Raises:
            HookGroupClosedError: the group was entered before.
        """
        if self._state != "new":
            raise HookGroupClosedError(f"{self!r} is entered once; make a new one")
        self._state = "entered"
        try:
            for one in [*self._registered.values()]:
                if _is_context(one.hook):
                    # Its error is never only logged.
                    raising = RegisteredHook(one.name, HookRegistration(one.hook, timeout=one.registration.timeout))
                    group = OrderGroup("__aenter__", [raising], self._grace_secs, bind=self._enter)
                    await call_groups((group,), (), own=self._context)
        except BaseException as error:
            try:
                await self.__aexit__(type(error), error, error.__traceback__)
            except asyncio.CancelledError as cancelled:
                keep_errors(cancelled, [error])
                raise
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        """Wait for the background calls and leave the hooks: shielded from cancels, within the grace period for each of them.

        Hooks are left in another task than they were entered in, in the same context, and cannot swallow the error of the
        block. A second call waits for the end of the first.

        Raises:
            BaseException: the failure of a background call or of a hook, if the block has none; otherwise it is logged.
        """
        if self._left is not None:
            await wait_done([self._left], None)
            return
        self._left = asyncio.get_running_loop().create_future()
        self._state = "closed"
        for method in self._methods.values():
            method.usable = None
        failures: list[BaseException] = []
        before = self._context.state()
        try:
            await shielded(self._leave_hooks(error, failures), grace_secs=self._grace_secs, what=f"the end of {self!r}")
        except asyncio.CancelledError as cancelled:
            keep_errors(cancelled, failures)
            raise
        finally:
            self._context.copy_back(before)  # the hooks are left in another task
            wake(self._left)
        try:
            if error is None:
                raise_failures(failures, f"failures at the end of {self!r}")
            else:
                for failure in failures:
                    add_note(error, f"and then: {failure!r}")
                    _logger.error("leaving %r failed after %s", self, type(error).__name__, exc_info=failure)
        finally:
            error = None
            failures.clear()

    async def _leave_hooks(self, error: BaseException | None, failures: list[BaseException]) -> None:
        failures += await self._background.end(self._grace_secs)
        args = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        while self._entered:
            one = self._entered.pop()
            group = OrderGroup("__aexit__", [one], self._grace_secs, max(self._grace_secs, 1e-9))
            try:
                await call_groups((group,), args, own=self._context)
            except asyncio.CancelledError as cancelled:
                # The end itself was cancelled: after the grace period, or by a third party. The others are left all the same.
                failures.append(hook_cancelled_error(f"{one.name}.__aexit__", cancelled))
            except Exception as failure:
                failures.append(failure)

    def _enter(self, registered: RegisteredHook, method: str) -> Method:
        async def enter() -> None:
            await registered.hook.__aenter__()
            self._entered.append(registered)  # here: it may have left a cancel of the caller for the next await

        return enter

    def status(self) -> list[HookStatus]:
        """Return what has become of the calls of each hook."""
        hooks = self._registered.values()
        return [HookStatus(one.name, one.failures, self._background.pending(one), one.disabled) for one in hooks]

    def __repr__(self) -> str:
        return f"<HookGroup {self._name}: {', '.join(one.name for one in self._registered.values()) or 'no hooks'}>"


def compose(kind: Callable[..., K], hooks: Iterable[object], *, results: Mapping[str, How] | How | None = None) -> K:
    """Return one object of the class `kind` that stands for several hooks; a framework's runner takes it like a single one.

    It is the `hooks` of a `HookGroup`; see there for the arguments and the errors.

    Raises:
        InvalidHookError: a hook is a context manager or has background calls, so that it must be entered: use a `HookGroup`.
    """
    group = HookGroup(kind, hooks, results=results)
    try:
        group.check_usable()
    except HookGroupClosedError as error:
        raise InvalidHookError(f"{error}; compose cannot do it, use HookGroup") from None
    return group.hooks


# -- the object that stands for the hooks


class _Method:
    """A method of the object that stands for the hooks of a group: it looks up what it calls at each call.

    While no hook implements it, it is an attribute of the class, on which it looks like the method of the lifecycle.
    """

    __slots__ = ("_function", "_group", "_hooks", "_own", "_point", "usable")

    def __init__(self, group: HookGroup[Any], point: Point) -> None:
        self._group = group
        self._point = point
        self._own: Callable[..., Any] = group._lifecycle.members[point.name]  # pyright: ignore[reportPrivateUsage]
        self._hooks: dict[RegisteredHook, None] = {}
        self.usable: Target | None = None
        """What is called, None if that is to be looked up at the next call."""
        self._function = functools.wraps(self._own)(_calling(self, point, self._own))
        setattr(group._class, point.name, self)  # pyright: ignore[reportPrivateUsage]

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        """Return the method of the object, or the function of the class."""
        return self._own if instance is None else types.MethodType(self._function, instance)

    def place(self, one: RegisteredHook, *, implements: bool) -> None:
        """Note whether a hook implements the method."""
        self.usable = None
        if implements != (one in self._hooks):
            if implements:
                self._hooks[one] = None
            else:
                del self._hooks[one]
            setattr(self._group._class, self._point.name, self._function if self._hooks else self)  # pyright: ignore[reportPrivateUsage]

    def check_answers(self, *added: RegisteredHook) -> None:
        """Raise if several hooks answer and nothing says which answer counts."""
        if self._point.how == "one":
            name = self._point.name
            callees = [one for one in (*self._hooks, *added) if not inspect.isasyncgenfunction(getattr(one.hook, name))]
            if len(callees) > 1:
                names = " and ".join(f"{one.name}.{name}" for one in callees)
                advice = f'give results={{"{name}": "first"}}, or "chain" or "wrap", or put @point on the method'
                raise InvalidHookError(f"{names} both answer; {advice}")

    def target(self) -> Target:
        """Return what is called; raise if the group cannot be used."""
        group = self._group
        group.check_usable()
        self.check_answers()  # a group in this one may have changed
        hooks = [one for one in group._registered.values() if one in self._hooks]  # pyright: ignore[reportPrivateUsage]
        self.usable = make_target(self._point, hooks, group._grace_secs, group._background.bind)  # pyright: ignore[reportPrivateUsage]
        return self.usable


def _calling(method: _Method, each: Point, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that calls the hooks, or, while none implements the method, `own` of the class itself."""
    call_own = own if each.is_async else as_coroutine_function(own)

    async def call_method(self: Any, *args: Any, **keywords: Any) -> Any:
        target = method.usable
        if target is None:
            target = method.target()
        quick = target.quick
        if quick is None or keywords or ((scope := current_scope.get()) is not None and scope.observers):
            if not target.groups and not target.wrappers:
                return await call_own(self, *args, **keywords)
            if keywords:
                args, keywords = positional_first(each.positional, args, keywords)
            if each.how == "none" and not target.wrappers:
                await call_groups(target.groups, args, keywords)
                return None
            return await wrapped(target, functools.partial(answer, target, functools.partial(call_own, self)))(args, keywords)
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
                failed_in_turn(quick.hooks[place], quick.calls[place].name, error)
        return None if answers is None else only_answer(each, [*map(answers.get, quick.methods)])

    def call_plain_method(self: Any, *args: Any, **keywords: Any) -> Any:
        return result_now(call_method(self, *args, **keywords))

    return call_method if each.is_async else call_plain_method


class _FunctionHook:
    """A function as a hook with one method."""

    def __init__(self, each: Point, fn: Any) -> None:
        if not callable(fn):
            raise InvalidHookError(f"on got {fn!r}; give a function")
        self.fn = fn
        self.__aiohooks_name__ = getattr(fn, "__name__", type(fn).__name__)
        setattr(self, each.name, as_coroutine_function(fn) if each.is_async and not is_coroutine_function(fn) else fn)

    def __repr__(self) -> str:
        return f"<hook {self.__aiohooks_name__}>"


_GROUP = "__aiohooks_group__"


def _composite_class(kind: type[Any], group: HookGroup[Any]) -> type[Any]:
    """Return a subclass of `kind`; the methods that hooks implement are set on it."""
    if getattr(kind, "__final__", False):
        raise InvalidHookError(f"{kind.__name__} is final, so that no object can stand for several hooks of it")
    try:
        place = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, _GROUP: group}
        made = types.new_class(kind.__name__, (kind,), {}, lambda namespace: namespace.update(place))
    except TypeError as error:
        raise InvalidHookError(f"{kind.__name__} cannot be a lifecycle: {error}") from None
    if inspect.isabstract(made):
        made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made


def _group_of(hook: object) -> HookGroup[Any] | None:
    """Return the group for which a hook stands."""
    return getattr(type(hook), _GROUP, None)


def _instance_of(made: type[Any]) -> Any:
    """Return an object of the class, made without its `__init__` if that wants arguments."""
    if any("__init__" in vars(base) or "__new__" in vars(base) for base in made.__mro__[:-1]):
        try:
            inspect.signature(made).bind()
        except (TypeError, ValueError):
            try:
                return object.__new__(made)
            except TypeError as error:  # it derives from a builtin class
                raise InvalidHookError(f"{made.__name__} cannot be a lifecycle, as its objects need arguments: {error}") from None
    return made()


def _check_equal(name: str, first: object, value: Any, hook: object) -> None:
    """Raise unless two hooks of the class agree on an attribute."""
    other = getattr(hook, name)
    if other is not value and other != value:
        raise InvalidHookError(
            f"{type(first).__name__}.{name} is {value!r} and {type(hook).__name__}.{name} is {other!r}; "
            "a group has one: set the same on all"
        )


def _is_context(hook: object) -> bool:
    return hasattr(type(hook), "__aenter__") and hasattr(type(hook), "__aexit__")
