"""A group of hooks that is called as if it were one hook.

    HookGroup          the group: its hooks, its calls, its block
    compose            the one object that stands for several hooks, where nothing has to be entered
    compose_functions  the one function that stands for several functions

How a call is made depends on the method (`interface.Point.how`): `answers.py` has a function for
each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import Context
from typing import (
    Any,
    Concatenate,
    Generic,
    Never,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from aiohooks._core.calls import OwnContext
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, current_task, new_task, shielded, wait_done
from aiohooks._core.clock import wake
from aiohooks._core.reports import logger
from aiohooks._core.validate import (
    check_mapping,
    check_secs,
    is_coroutine_function,
)
from aiohooks.dispatch.answers import Target, all_results, make_target
from aiohooks.dispatch.background import BackgroundCalls
from aiohooks.dispatch.calls import HookStatus, Method, OrderGroup, RegisteredHook, call_groups
from aiohooks.dispatch.composite import (
    ActiveCalls,
    Composite,
    LoopBinding,
    call_target,
    composite_of,
)
from aiohooks.dispatch.hook import (
    FunctionHook,
    HookOptions,
    HookRegistration,
    configure,
    registration_of,
)
from aiohooks.dispatch.interface import (
    Interface,
    base_name,
    check_options,
    registered_hooks,
)
from aiohooks.dispatch.plain import wraps_others
from aiohooks.dispatch.ways import How, Point, checked_how, point
from aiohooks.errors import (
    HookGroupClosedError,
    InvalidArgumentError,
    InvalidHookError,
    add_note,
    did_you_mean,
    hook_cancelled_error,
    keep_errors,
    raise_failures,
    safe_repr,
)

K = TypeVar("K")
P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class HookGroup(Generic[K]):
    """Several hooks of one interface, called as one: `async with HookGroup(AgentHooks, [Audit(),
    Metrics()]) as group:`.

    A hook interface is any class: its public methods are what hooks can implement. `group.hooks` is
    an object of that class; a call of its method calls the hooks that implement it. Calls start in
    registration order: a method whose code has no `await` is called in the caller's task, every
    other one has a task and a context of its own, and these are concurrent. What they leave set in
    their contexts is set for the caller. The first failure cancels the others and waits for them;
    one failure is raised as it is, several as one flat group, each with a note that names the hook.
    A cancel of the caller wins over both.

    Any number of tasks may call a group at the same time; `group.hooks` and its methods, also those
    taken before, call the hooks of the group at that time. Hooks that are async context managers
    are entered with the block, in order, and left in reverse; background calls end with it. A group
    with neither can be used without a block.
    """

    def __init__(
        self,
        kind: Callable[..., K],
        hooks: Iterable[object] = (),
        *,
        results: Mapping[str, How] | How | None = None,
        name: str | None = None,
        grace_secs: float = DEFAULT_GRACE_SECS,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the hooks.

        Args:
            kind: the hook interface: a class of one's own, or of a framework. (Type checkers refuse
                an abstract one as a `type`.)
            hooks: objects with methods of `kind`, or registrations made by `configure`. They need
                not derive from it.
            results: how the results of several hooks become one, by the name of the method, for a
                class that is not one's own; or one way for all methods that return something. See
                `point`.
            name: the name of the group in messages; by default that of `kind`.
            grace_secs: how long cancelled calls, background calls and the end of the hooks may
                take.
            init: the arguments of the `__init__` of `kind`, by name, which runs before the hooks
                are there, so that what it calls is its own.

        Raises:
            InvalidHookError: `kind` is not a class, or no object of it can be made; a hook does not
                fit it; several hooks implement a method that returns something, and nothing says
                how their results become one.
            InvalidArgumentError: `results` names a method that `kind` does not have, or another
                argument is invalid.
        """
        check_secs(grace_secs, "grace_secs")
        check_mapping(init, "init")
        if isinstance(hooks, HookRegistration) or not isinstance(hooks, Iterable):
            raise InvalidHookError(f"hooks is {hooks!r}; give a list of hooks")
        self._interface = Interface(kind, results, hint=_BLOCKING_HINT)
        self._name = name or self._interface.kind.__name__
        self._grace_secs = grace_secs
        self._background = BackgroundCalls(grace_secs)
        # Of the names that hooks have had: a removed hook's name is not given again.
        self._numbers: Counter[str] = Counter()
        self._entered: list[RegisteredHook] = []
        self._exits: dict[asyncio.Task[None], RegisteredHook] = {}  # of hooks that were removed
        self._exit_failures: list[BaseException] = []
        self._before_exits: Context | None = None  # the context before the first of them
        self._context = OwnContext()  # of entering and leaving
        self._state = "new"
        self._left: asyncio.Future[None] | None = None
        self._binding = LoopBinding(self.__repr__)
        self._hooks: dict[RegisteredHook, None] = {}
        self._composite = Composite(
            self._interface, init or {}, self._hooks, self._binding, self._make_target, self._name
        )
        self.hooks: K = cast("K", self._composite.object)
        """The one object that stands for all hooks: pass it wherever a hook of the class is wanted.

        What is set on it is set on the hooks that are objects of the class, or of a base of it, as
        well, and on those that are added later.
        """
        for registered in registered_hooks(hooks, self._numbers):
            self._insert(registered)

    def _make_target(self, point: Point, hooks: Iterable[RegisteredHook]) -> Target:
        self.check_usable()
        return make_target(point, hooks, self._grace_secs, self._background.bind)

    # -- calling

    async def call(
        self,
        method: Callable[Concatenate[K, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **keywords: P.kwargs,
    ) -> list[T]:
        """Call a method of all hooks that implement it, and return every result, in order of the
        hooks.

        Example: `results = await group.call(AgentHooks.before_model, request)`.

        Raises:
            InvalidArgumentError: `method` is not a coroutine method of the class, or it wraps.
            HookGroupClosedError: the group is not entered yet and has to be, or has been left.
            BaseException: the failure of a hook; several as one group.
        """
        point = self._point_of(method)
        if not point.is_async or point.how == "wrap":
            raise InvalidArgumentError(
                f"{point.name} has no list of results; call group.hooks.{point.name}(...)"
            )
        called = self._composite.methods[point.name]
        target = called.usable or called.target()
        innermost = functools.partial(all_results, target)
        results: list[Any] = await call_target(self._composite, target, innermost, args, keywords)
        # A generator hook that has suppressed the error returns None.
        return [point.value_of(result) for result in results or ()]

    # -- the hooks

    def _point_of(self, method: Callable[..., Any]) -> Point:
        kind = self._interface.kind.__name__
        if not callable(method):
            known = next(iter(self._interface.points))
            raise InvalidArgumentError(
                f"{method!r} is given for a method of {kind}; give the method itself, as in"
                f" {kind}.{known}"
            )
        name = getattr(method, "__name__", repr(method))
        point = self._interface.points.get(name)
        if point is None:
            raise InvalidArgumentError(
                f"{name} is not a method of {kind}; {did_you_mean(name, self._interface.points)}"
            )
        return point

    def add(self, hook: object) -> None:
        """Add a hook, or a registration; this applies from the next call.

        Raises:
            InvalidHookError: it does not fit, is a hook of the group already, or would have to be
                entered now.
            HookGroupClosedError: the group has been left.
        """
        if self._state == "closed":
            self.check_usable()
        (registered,) = registered_hooks([hook], self._numbers)
        try:
            for known in self._composite.find(registered.hook):
                if known.hook is registered.hook:
                    raise InvalidHookError(
                        f"hooks has {registered.hook!r} twice; make two objects of it if both are"
                        " meant"
                    )
            self._insert(registered)
        except BaseException:
            # The next hook of this class gets the number.
            self._numbers[base_name(registered.registration)] -= 1
            raise

    def remove(self, hook: object, method: Callable[..., Any] | None = None) -> None:
        """Remove a hook, or a function that was added with `on`; this applies from the next call.

        A hook that was entered is exited when the calls that have begun by now have ended.

        Args:
            hook: a hook, a function or a registration. If a function was added several times, its
                earliest registration is removed.
            method: the method that the function was added for, if there are several.

        Raises:
            InvalidArgumentError: it is not a hook of the group.
            WrongLoopError: a hook that was entered is removed outside of the group's event loop.
        """
        given = hook.hook if isinstance(hook, HookRegistration) else hook
        found = self._composite.find(given)
        if method is not None:
            name = self._point_of(method).name
            found = tuple(registered for registered in found if _is_function_for(registered, name))
        if not found:
            raise InvalidArgumentError(f"{safe_repr(hook)} is not a hook of {self!r}")
        removed = found[0]
        has_to_exit = removed in self._entered and self._state == "entered"
        if has_to_exit:
            self._binding.check()
        self._composite.remove(removed)
        if has_to_exit:
            self._begin_exit(removed)

    def _begin_exit(self, removed: RegisteredHook) -> None:
        """Start the task that exits a removed hook."""
        if not self._exits:
            # What exits leave set in the context is set for the caller at the end of the block.
            self._before_exits = self._context.state()
        calls = self._composite.separate_calls()
        task = new_task(
            self._exit_removed(removed, calls),
            f"exit of {removed.name}, which was removed",
        )
        self._exits[task] = removed

    @overload
    def on(
        self,
        method: Callable[Concatenate[K, ...], Any],
        fn: F,
        **options: Unpack[HookOptions],
    ) -> F: ...
    @overload
    def on(
        self,
        method: Callable[Concatenate[K, ...], Any],
        fn: None = None,
        **options: Unpack[HookOptions],
    ) -> Callable[[F], F]: ...
    def on(
        self,
        method: Callable[..., Any],
        fn: Any = None,
        **options: Unpack[HookOptions],
    ) -> Any:
        """Add a function as a hook with one method: `group.on(AgentHooks.on_tool_start, log)`; also
        as a decorator.

        `method` is the method of the class, `fn` a coroutine function, or a plain function, which
        must not block unless it has `thread=True`; it is returned. The options are those of
        `configure`.
        """
        name = self._point_of(method).name
        kind = self._interface.kind
        if fn is not None:
            self.add(configure(FunctionHook(name, fn), **options))
            return fn
        if isinstance(method, types.FunctionType) and method is not getattr(kind, name):
            # The function is decorated with `@group.on` alone; it would be replaced by a decorator.
            raise InvalidArgumentError(
                f"{method!r} is not a method of {kind.__name__}; write"
                f" @group.on({kind.__name__}.{name})"
            )
        return functools.partial(self.on, method, **options)

    def _insert(self, registered: RegisteredHook) -> None:
        """Check a hook and add it; active calls do not call it."""
        hook = registered.hook
        if isinstance(hook, HookGroup):
            raise InvalidHookError(f"{hook!r} is a group; give its `hooks`, and enter it yourself")
        inner = composite_of(hook)
        if inner is not None and inner.has(self._composite):
            raise InvalidHookError(
                f"{hook!r} stands for {self!r} itself, or for a group that has it as a hook, so"
                " that a call would never end"
            )
        is_plain = registered.registration.thread or isinstance(hook, FunctionHook)
        points = self._interface.check(hook, plain=is_plain)
        if not points and not self._may_lack_methods(hook):
            names = ", ".join(self._interface.points)
            raise InvalidHookError(
                f"{hook!r} has none of the methods of {self._interface.kind.__name__}: {names}"
            )
        check_options(registered, points)
        if self._state == "entered":
            _check_plain_context(hook)
            if _is_context(hook):
                raise InvalidHookError(
                    f"{hook!r} is a context manager; add it before the group is entered"
                )
        for implemented in points:
            self._composite.methods[implemented.name].check_results(registered)
        self._composite.insert(registered, points)

    def _may_lack_methods(self, hook: object) -> bool:
        """Return whether a hook without methods is accepted.

        An object that stands for a group may get methods later, and a context manager of the class
        is entered.
        """
        if composite_of(hook) is not None or type(hook) is self._interface.kind:
            return True
        return _is_context(hook) and self._interface.has_member(hook)

    # -- entering and leaving

    def check_usable(self) -> None:
        """Raise unless hooks can be called.

        Raises:
            HookGroupClosedError: the group is not entered yet and has to be, or has been left.
        """
        if self._state == "closed":
            raise HookGroupClosedError(f"{self!r} has been left; make a new one")
        if self._state == "entered":
            return
        for registered in self._hooks:
            reason = ""
            if _is_context(registered.hook):
                reason = "is an async context manager"
            elif registered.registration.background:
                reason = "has background=True"
            if reason:
                raise HookGroupClosedError(
                    f"{self!r} has to be entered, as {registered.name} {reason}: `async with"
                    " group:`"
                )

    async def __aenter__(self) -> Self:
        """Enter the hooks that are async context managers, in order; if one fails, leave those
        before it.

        Raises:
            HookGroupClosedError: the group was entered before.
            InvalidHookError: a hook is a plain context manager, which might block.
        """
        if self._state != "new":
            raise HookGroupClosedError(
                f"{self!r} was entered before; groups are single-use: make a new one"
            )
        for registered in self._hooks:
            _check_plain_context(registered.hook)
        self._binding.check()
        self._binding.in_block = True
        self._state = "entered"
        try:
            for registered in [*self._hooks]:
                if _is_context(registered.hook):
                    await self._enter(registered)
        except BaseException as error:
            try:
                await self.__aexit__(type(error), error, error.__traceback__)
            except asyncio.CancelledError as cancelled:
                keep_errors(cancelled, [error])
                raise
            raise
        return self

    async def _enter(self, registered: RegisteredHook) -> None:
        """Enter a hook, within its time limit."""
        # A registration of its own: an error of entering is never only logged.
        registration = HookRegistration(registered.hook, timeout=registered.registration.timeout)
        raising = RegisteredHook(registered.name, registration)

        async def enter() -> None:
            await registered.hook.__aenter__()
            # Now: a cancel at the next await must not make the group forget to exit the hook.
            self._entered.append(registered)

        def bind(_hook: RegisteredHook, _name: str) -> Method:
            return enter

        group = OrderGroup("__aenter__", [raising], self._grace_secs, bind=bind)
        await call_groups((group,), args=(), own=self._context)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Wait for active and background calls and leave the hooks: shielded from cancels, within
        the grace period for each of these.

        Hooks are left in another task than they were entered in, in the same context, and cannot
        swallow the error of the block. A second call waits for the end of the first.

        Raises:
            BaseException: the failure of a background call or of a hook, if the block has none;
                otherwise it is logged.
        """
        if self._left is not None:
            await wait_done([self._left], None)
            return
        self._left = asyncio.get_running_loop().create_future()
        self._state = "closed"
        for method in self._composite.methods.values():
            method.usable = None
        failures = self._exit_failures
        before = self._before_exits if self._exits else self._context.state()
        try:
            await shielded(
                self._exit_hooks(error, failures),
                grace_secs=self._grace_secs,
                what=f"the end of {self!r}",
            )
        except asyncio.CancelledError as cancelled:
            keep_errors(cancelled, failures)
            raise
        finally:
            # Hooks are exited in another task, and what they leave set is set for the caller.
            self._context.copy_back(before)
            wake(self._left)
        try:
            if error is None:
                raise_failures(failures, f"failures at the end of {self!r}")
            else:
                for failure in failures:
                    add_note(error, f"and then: {failure!r}")
                    logger.error(
                        "leaving %r failed after %s", self, type(error).__name__, exc_info=failure
                    )
        finally:
            error = None
            failures.clear()

    async def _exit_hooks(self, error: BaseException | None, failures: list[BaseException]) -> None:
        """Wait for active calls and background calls, and exit the hooks that were entered.

        Args:
            error: the error of the block.
            failures: the list to which failures are added.
        """
        calls = self._composite.separate_calls()
        if not await wait_done([active.idle() for active in calls], self._grace_secs):
            logger.warning(
                "%r is left, but %s of its calls still run after %s s",
                self,
                sum(active.count for active in calls),
                self._grace_secs,
            )
        failures += await self._background.end(self._grace_secs)
        for task, registered in self._exits.items():
            if registered in self._entered:
                task.cancel()  # the calls that it waits for have not ended in time
        await wait_done(self._exits, None)
        while self._entered:
            await self._exit(self._entered.pop(), error, failures)

    async def _exit_removed(self, registered: RegisteredHook, calls: list[ActiveCalls]) -> None:
        """Exit a removed hook, when the calls that began before it was removed have ended."""
        await wait_done([active.idle() for active in calls], None)
        await self._background.drain([registered])
        # One hook after another, in order of removal: all exits run in one context.
        exits = [*self._exits]
        earlier_exits = exits[: exits.index(current_task())]
        await wait_done(earlier_exits, None)
        self._entered.remove(registered)
        await self._exit(registered, error=None, failures=self._exit_failures)

    async def _exit(
        self,
        registered: RegisteredHook,
        error: BaseException | None,
        failures: list[BaseException],
    ) -> None:
        """Call `__aexit__` of a hook.

        Args:
            registered: the hook.
            error: the error of the block, which the hook cannot swallow.
            failures: the list to which a failure of the hook is added.
        """
        args: tuple[Any, ...] = (None, None, None)
        if error is not None:
            args = (type(error), error, error.__traceback__)
        group = OrderGroup(
            "__aexit__",
            [registered],
            self._grace_secs,
            max(self._grace_secs, 1e-9),
            bind=lambda registered, name: getattr(registered.hook, name),
        )
        try:
            await call_groups((group,), args, own=self._context)
        except asyncio.CancelledError as cancelled:
            # The end itself was cancelled: after the grace period, or by other code. The other
            # hooks are exited all the same.
            failures.append(hook_cancelled_error(f"{registered.name}.__aexit__", cancelled))
        except Exception as failure:
            failures.append(failure)

    def status(self) -> list[HookStatus]:
        """Return the status of each hook: its calls, failures and dropped calls."""
        return self._background.status(self._hooks)

    def __repr__(self) -> str:
        names = ", ".join(registered.name for registered in self._hooks)
        return f"<HookGroup {self._name}: {names or 'no hooks'}>"


def compose(
    kind: Callable[..., K],
    hooks: Iterable[object],
    *,
    results: Mapping[str, How] | How | None = None,
    init: Mapping[str, Any] | None = None,
) -> K:
    """Return one object of the class `kind` that stands for several hooks; a framework's runner
    takes it like a single one.

    It is the `hooks` of a `HookGroup`, with its `results`, `init` and errors.

    Raises:
        InvalidHookError: a hook is a context manager or has background calls, so that it must be
            entered: use a `HookGroup`.
    """
    group = HookGroup(kind, hooks, results=results, init=init)
    try:
        group.check_usable()
    except HookGroupClosedError as error:
        raise InvalidHookError(f"{error}; compose cannot do it, use HookGroup") from None
    return group.hooks


# -- functions


class ComposedFunctions(Protocol[P]):
    """What `compose_functions` returns."""

    async def __call__(self, *args: P.args, **keywords: P.kwargs) -> Any:
        """Call the functions."""

    def add(self, function: object, /) -> None:
        """Add a function, or a registration; this applies from the next call."""

    def remove(self, function: object, /) -> None:
        """Remove a function, of several registrations the earliest; this applies from the next
        call.
        """


@overload
def compose_functions(
    functions: list[Never],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[...]: ...
@overload
def compose_functions(  # type: ignore[overload-overlap]
    functions: Iterable[Callable[P, object]],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[P]: ...
@overload
def compose_functions(
    functions: Iterable[object],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[...]: ...
def compose_functions(
    functions: Iterable[object],
    *,
    results: How | None = None,
    name: str | None = None,
) -> ComposedFunctions[...]:
    """Return one coroutine function that calls several functions, for a framework that takes a
    plain callable.

    Example: `httpx.AsyncClient(event_hooks={"request": [compose_functions([sign, audit])]})`.

    They are called as the methods of hooks are: concurrently, and the first failure ends the call.
    What this returns has `add` and `remove`, which hold from the next call on. Each function must
    take every call that the first one takes, whatever its parameters are named.

    Args:
        functions: coroutine functions and plain ones, or registrations made by `configure`.
        results: how the results of several become one, if they return any; see `point`.
        name: its name, and that of the group in messages.

    Raises:
        InvalidHookError: one is not a function, cannot be called as the first one is, has an option
            that cannot hold, or its arguments in another order than the first.
        InvalidArgumentError: an argument is invalid.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise InvalidArgumentError(f"functions is {safe_repr(functions)}; give a list of functions")
    if results is not None:
        checked_how(results, "results")
    composed = _FunctionGroup(name or "functions", results)
    composed.fill([_function_hook(function) for function in functions])

    async def call(*args: Any, **keywords: Any) -> Any:
        return await composed.group.hooks(*args, **keywords)

    call.__name__ = call.__qualname__ = name or "functions"
    made: Any = call
    made.add = composed.add
    made.remove = composed.remove
    with contextlib.suppress(TypeError, ValueError):  # it is written in C
        made.__signature__ = inspect.signature(composed.pattern)
    return cast("ComposedFunctions[...]", made)


class _FunctionGroup:
    """A group of functions, which are called as the first one of them is."""

    def __init__(
        self,
        name: str,
        results: How | None,
    ) -> None:
        self._name = name
        self._results: How | None = results

    def fill(self, hooks: list[HookRegistration]) -> None:
        """Make the group, of which the hooks are functions."""
        pattern = _pattern(hooks)
        for hook in hooks:
            self._check_order(hook.hook.function, pattern)
        kind: Any = type(self._name, (), {"__call__": self._method_like(pattern)})
        self.group: HookGroup[Any] = HookGroup(kind, hooks, name=self._name)
        # Last: if functions do not fit, nothing has changed.
        self.pattern: Callable[..., Any] = pattern

    def add(self, function: object, /) -> None:
        hook = _function_hook(function)
        if self.pattern is _anything:
            self.fill([hook])
            return
        self._check_order(hook.hook.function, self.pattern)
        self.group.add(hook)

    def remove(self, function: object, /) -> None:
        self.group.remove(function)

    def _method_like(self, function: Callable[..., Any]) -> Any:
        """Return the method of a hook interface of functions that are called as this one is."""
        method = _empty_method(function)
        if self._results is not None:
            return point(self._results)(method)
        # What this one returns says nothing of the others.
        method.__annotations__ = {}
        return method

    def _check_order(self, function: Callable[..., Any], pattern: Callable[..., Any]) -> None:
        """Raise if a parameter has another place in a function than in `pattern`, the first one."""
        if self._results is None:
            return
        places = _places(pattern)
        for name, place in _places(function).items():
            if places.get(name, place) != place:
                raise InvalidHookError(
                    f"{function!r} has its arguments in another order than {pattern!r}, which would"
                    " mix up what calls the next, or takes a result; give functions with the same"
                    " arguments in the same order"
                )


def _function_hook(function: object) -> HookRegistration:
    """Return the registration of a hook whose only method is a function.

    Raises:
        InvalidHookError: it is no function, or a plain one with a time limit.
    """
    registration = registration_of(function)
    called = registration.hook
    is_async = is_coroutine_function(called) or wraps_others(called)
    can_be_ended = is_async or registration.thread
    if registration.timeout is not None and not can_be_ended:
        raise InvalidHookError(
            f"{called!r} is a plain function, which no time limit can end; give it no timeout"
        )
    return registration._replace(hook=FunctionHook("__call__", called, is_alone=True))


def _pattern(hooks: Iterable[HookRegistration]) -> Callable[..., Any]:
    """Return the function that says how all are called: the first that names its parameters."""
    functions: list[Callable[..., Any]] = [hook.hook.function for hook in hooks]
    # One of `*args` alone would accept any call, and the functions behind it would not.
    named = [function for function in functions if _places(function)]
    return [*named, *functions, _anything][0]


def _places(function: Callable[..., Any]) -> dict[str, int]:
    """Return the places of the named parameters of a function; -1 is passed by name only."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is written in C
        return {}
    places: dict[str, int] = {}
    for place, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY:
            places[parameter.name] = -1
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            places[parameter.name] = place
    return places


def _anything(*args: Any, **keywords: Any) -> Any: ...


# -- what is given for methods and hooks

_BLOCKING_HINT = ", or, if it has to block, give configure(hook, thread=True)"


def interface_of(group: HookGroup[Any]) -> Interface:
    """Return the interface of a group, for the checks of hooks."""
    return group._interface  # pyright: ignore[reportPrivateUsage] - of this module


def _empty_method(like: Callable[..., Any]) -> Any:
    """Return a method that looks like a function, with an empty body."""

    async def call(self: Any, *args: Any, **keywords: Any) -> Any: ...

    made: Any = functools.update_wrapper(call, like)
    del made.__wrapped__  # its signature may not be known: it may be written in C
    with contextlib.suppress(TypeError, ValueError):
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        made.__signature__ = inspect.Signature([own, *inspect.signature(like).parameters.values()])
    return made


def _is_function_for(registered: RegisteredHook, name: str) -> bool:
    return isinstance(registered.hook, FunctionHook) and hasattr(registered.hook, name)


def _is_context(hook: object) -> bool:
    return hasattr(type(hook), "__aenter__") and hasattr(type(hook), "__aexit__")


def _check_plain_context(hook: object) -> None:
    """Raise if a hook is a plain context manager, which a group does not enter."""
    if hasattr(type(hook), "__enter__") and not _is_context(hook):
        raise InvalidHookError(
            f"{hook!r} is a plain context manager, which a group does not enter: it might block;"
            " give it `__aenter__` and `__aexit__`"
        )
