"""A group of hooks that is called as if it were one hook.

    HookGroup    the group: its hooks, its calls, its block
    compose      the one object that stands for several hooks, where nothing has to be entered

How a call is made depends on the method (`lifecycle.Point.how`): `answers.py` has a function for each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, cast, overload

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, shielded
from aiohooks._aio.gather import keep_errors
from aiohooks._validate import check_secs, is_coroutine_function
from aiohooks.dispatch.answers import ANSWERS, Target, answer_plain, answer_wrap, positional_first
from aiohooks.dispatch.background import BackgroundCalls
from aiohooks.dispatch.calls import (
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
    call_groups,
    hook_cancelled_error,
    order_groups,
)
from aiohooks.dispatch.hook import HookRegistration, configure
from aiohooks.dispatch.lifecycle import How, Lifecycle, Point, registered_hooks
from aiohooks.errors import HookGroupClosedError, InvalidArgumentError, InvalidHookError, add_note, did_you_mean, flattened

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
    method of it calls the hooks that implement the method. Calls start in registration order; while none suspends, they run one
    after the other, and from the moment one does, the others overlap with it, in the context of the caller. The first failure
    cancels the others and waits for them; one failure is raised as it is, several as one flat group, each with a note that names
    the hook. A cancel of the caller wins over both.

    Any number of tasks may call a group at the same time. Hooks that are async context managers are entered with the block, in
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
        self._registered: tuple[RegisteredHook, ...] = ()
        self._entered: list[RegisteredHook] = []
        self._state = "new"
        self._class = _composite_class(self._lifecycle.kind)
        self._targets: dict[str, Target] = {}
        self._set_hooks([*hooks])
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
        self._check_usable()
        target = self._targets.get(each.name)
        return [] if target is None else await call_groups(target.groups, args, keywords)

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
            self._check_usable()
        before = self._registered
        self._set_hooks([*(one.registration for one in before), hook])
        new = self._registered[-1]
        if self._state == "entered" and _is_context(new.hook):
            self._set_hooks([one.registration for one in before])
            raise InvalidHookError(f"{new.hook!r} is a context manager; add it before the group is entered")

    def remove(self, hook: object) -> None:
        """Remove a hook, or a function that was added with `on`; it takes no part from the next call on.

        Raises:
            InvalidArgumentError: it is not a hook of the group.
        """
        left = [one.registration for one in self._registered if one.hook is not hook and getattr(one.hook, "fn", one) is not hook]
        if len(left) == len(self._registered):
            raise InvalidArgumentError(f"{hook!r} is not a hook of {self!r}")
        self._set_hooks(left)

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

    def _set_hooks(self, hooks: list[Any]) -> None:
        """Take these hooks from the next call on; calls that are active keep theirs."""
        for one in hooks:
            hook = one.hook if isinstance(one, HookRegistration) else one
            if isinstance(hook, HookGroup):
                raise InvalidHookError(f"{hook!r} is a group; give its `hooks`, and enter it yourself")
        known = {id(one.hook): one for one in self._registered}
        registered = tuple(known.get(id(one.hook), one) for one in registered_hooks(self._lifecycle, hooks))
        for one in registered:
            kind = self._lifecycle.kind
            if not self._lifecycle.implemented(one.hook) and not isinstance(one.hook, kind):
                names = ", ".join(self._lifecycle.points)
                raise InvalidHookError(f"{one.hook!r} has none of the methods of {kind.__name__}: {names}")
        targets: dict[str, Target] = {}
        for each in self._lifecycle.points.values():
            hooks_of = [one for one in registered if self._lifecycle.overrides(one.hook, each.name)]
            if hooks_of:
                targets[each.name] = self._target(each, hooks_of)
        attributes = _attributes(self._lifecycle, [one.hook for one in registered])
        self._registered, self._targets = registered, targets
        for name in [name for name in vars(self._class) if not name.startswith("_")]:
            if name not in targets:
                delattr(self._class, name)
        for name, target in targets.items():
            setattr(self._class, name, _method(self, target))
        for name, value in attributes.items():
            setattr(self._class, name, value)

    def _target(self, each: Point, hooks: list[RegisteredHook]) -> Target:
        wrappers = [one for one in hooks if inspect.isasyncgenfunction(getattr(one.hook, each.name))]
        callees = [one for one in hooks if one not in wrappers]
        if each.how == "one" and len(callees) > 1:
            names = " and ".join(f"{one.name}.{each.name}" for one in callees)
            advice = f'give results={{"{each.name}": "first"}}, or "chain" or "wrap", or put @point on the method'
            raise InvalidHookError(f"{names} both answer; {advice}")
        bind = self._background.bind if each.how == "none" else None
        groups = order_groups(each.name, callees, self._grace_secs, *(() if bind is None else (bind,)))
        singles = tuple(OrderGroup(each.name, [one], self._grace_secs) for group in groups for one in group.hooks)
        return Target(each, groups, singles, tuple(wrappers))

    # -- entering and leaving

    def _check_usable(self) -> None:
        if self._state == "closed":
            raise HookGroupClosedError(f"{self!r} has been left; make a new one")
        if self._state != "entered":
            for one in self._registered:
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
            for one in self._registered:
                if _is_context(one.hook):
                    await call_groups((self._context_group(one, "__aenter__", bind=self._enter),), (), {})
        except BaseException as error:
            try:
                await self._leave(error)
            except asyncio.CancelledError as cancelled:
                keep_errors(cancelled, [error])
                raise
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        """Wait for the background calls and leave the hooks: shielded from cancels, within the grace period for each of them.

        Hooks are left in another task than they were entered in, and cannot swallow the error of the block.

        Raises:
            BaseException: the failure of a background call or of a hook, if the block has none; otherwise it is logged.
        """
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        self._state = "closed"
        failures: list[BaseException] = []
        try:
            await shielded(self._leave_hooks(error, failures), grace_secs=self._grace_secs, what=f"the end of {self!r}")
        except asyncio.CancelledError as cancelled:
            keep_errors(cancelled, failures)
            raise
        try:
            if error is not None:
                for failure in failures:
                    add_note(error, f"and then: {failure!r}")
                    _logger.error("leaving %r failed after %s", self, type(error).__name__, exc_info=failure)
            elif len(failures) == 1:
                raise failures[0]
            elif failures:
                raise BaseExceptionGroup(f"{len(failures)} failures at the end of {self!r}", flattened(failures))
        finally:
            error = None
            failures.clear()

    async def _leave_hooks(self, error: BaseException | None, failures: list[BaseException]) -> None:
        failures += await self._background.end(self._grace_secs)
        args = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        limit = max(self._grace_secs, 1e-9)
        while self._entered:
            one = self._entered.pop()
            try:
                await call_groups((self._context_group(one, "__aexit__", limit),), args, {})
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

    def _context_group(
        self,
        registered: RegisteredHook,
        method: str,
        limit: float | None = None,
        bind: Callable[[RegisteredHook, str], Method] = bound_method,
    ) -> OrderGroup:
        """Return the call that enters or leaves a hook, whose error is never only logged."""
        plain = registered.registration._replace(on_error="raise", disable_after=None, background=False)
        return OrderGroup(method, [RegisteredHook(registered.name, plain)], self._grace_secs, limit, bind)

    def status(self) -> list[HookStatus]:
        """Return what has become of the calls of each hook."""
        return [HookStatus(one.name, one.failures, self._background.pending(one), one.disabled) for one in self._registered]

    def __repr__(self) -> str:
        return f"<HookGroup {self._name}: {', '.join(one.name for one in self._registered) or 'no hooks'}>"


def compose(kind: Callable[..., K], hooks: Iterable[object], *, results: Mapping[str, How] | How | None = None) -> K:
    """Return one object of the class `kind` that stands for several hooks; a framework's runner takes it like a single one.

    It is the `hooks` of a `HookGroup`; see there for the arguments and the errors.

    Raises:
        InvalidHookError: a hook is a context manager or has background calls, so that it must be entered: use a `HookGroup`.
    """
    group = HookGroup(kind, hooks, results=results)
    try:
        group._check_usable()  # pyright: ignore[reportPrivateUsage]
    except HookGroupClosedError as error:
        raise InvalidHookError(f"{error}; compose cannot do it, use HookGroup") from None
    return group.hooks


# -- the object that stands for the hooks


def _method(group: HookGroup[Any], target: Target) -> Callable[..., Any]:
    """Return the method of the object that stands for the hooks of a group."""
    each, name = target.point, target.point.name
    check, positional = group._check_usable, each.positional  # pyright: ignore[reportPrivateUsage]
    ready = not any(_is_context(one.hook) or one.registration.background for one in group._registered)  # pyright: ignore[reportPrivateUsage]
    answer = ANSWERS.get(each.how)
    is_silent = each.how == "none" and not target.wrappers

    async def method(self: Any, *args: Any, **keywords: Any) -> Any:
        if not ready or group._state == "closed":  # pyright: ignore[reportPrivateUsage]
            check()
        if keywords:
            args, keywords = positional_first(positional, args, keywords)
        if is_silent:
            await call_groups(target.groups, args, keywords)
            return None
        own = functools.partial(each.own, self)
        async with contextlib.AsyncExitStack() as stack:
            for one in target.wrappers:
                await stack.enter_async_context(contextlib.asynccontextmanager(getattr(one.hook, name))(*args, **keywords))
            if answer is None:
                return await answer_wrap(target, args, keywords, own)
            result = await answer(target, args, keywords) if target.groups else None
            if result is None and each.how != "none":
                result = await own(*args, **keywords)  # as if there were no hooks
            return result
        return None  # a wrapper has swallowed the error

    def plain_method(self: Any, *args: Any, **keywords: Any) -> Any:
        check()
        if keywords:
            args, keywords = positional_first(positional, args, keywords)
        return answer_plain(target, args, keywords)

    return functools.wraps(each.own)(method if each.is_async else plain_method)


class _FunctionHook:
    """A function as a hook with one method."""

    def __init__(self, each: Point, fn: Any) -> None:
        if not callable(fn):
            raise InvalidHookError(f"on got {fn!r}; give a function")
        self.fn = fn
        self.__aiohooks_name__ = getattr(fn, "__name__", type(fn).__name__)
        setattr(self, each.name, _as_coroutine_function(fn) if each.is_async and not is_coroutine_function(fn) else fn)

    def __repr__(self) -> str:
        return f"<hook {self.__aiohooks_name__}>"


def _as_coroutine_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def call(*args: Any, **keywords: Any) -> Any:
        return fn(*args, **keywords)

    return call


def _composite_class(kind: type[Any]) -> type[Any]:
    """Return a subclass of `kind`; the methods that hooks implement are set on it."""
    if getattr(kind, "__final__", False):
        raise InvalidHookError(f"{kind.__name__} is final, so that no object can stand for several hooks of it")
    try:
        place = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        made = types.new_class(kind.__name__, (kind,), {}, lambda namespace: namespace.update(place))
    except TypeError as error:
        raise InvalidHookError(f"{kind.__name__} cannot be a lifecycle: {error}") from None
    if inspect.isabstract(made):
        made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made


def _instance_of(made: type[Any]) -> Any:
    """Return an object of the class, made without its `__init__` if that wants arguments."""
    try:
        inspect.signature(made).bind()
    except (TypeError, ValueError):
        return object.__new__(made)
    return made()


def _attributes(lifecycle: Lifecycle, hooks: list[Any]) -> dict[str, Any]:
    """Return the public data attributes that hooks of the class set otherwise than the class: the group takes them over."""
    found: dict[str, Any] = {}
    for name in dir(lifecycle.kind):
        default = inspect.getattr_static(lifecycle.kind, name)
        if name.startswith("_") or callable(default) or isinstance(default, (classmethod, staticmethod)):
            continue
        members = [hook for hook in hooks if isinstance(hook, lifecycle.kind)]
        changed = [hook for hook in members if inspect.getattr_static(hook, name) is not default]
        if not changed:
            continue
        first_hook, first = changed[0], getattr(changed[0], name)
        for hook in members:
            value = getattr(hook, name)
            if value is not first and value != first:
                raise InvalidHookError(
                    f"{type(first_hook).__name__}.{name} is {first!r} and {type(hook).__name__}.{name} is {value!r}; "
                    "a group has one: set the same on all"
                )
        found[name] = first
    return found


def _is_context(hook: object) -> bool:
    return hasattr(type(hook), "__aenter__") and hasattr(type(hook), "__aexit__")
