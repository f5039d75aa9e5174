"""A group of hooks that is called as if it were one hook.

    HookGroup          the group: its hooks, its calls, its block
    compose            the one object that stands for several hooks, where nothing has to be entered
    compose_functions  one coroutine function in the place of several functions

A point is a method of the hook interface (`points.Point`). How it is called depends on its mode:
how the results of several hooks become one. `answers.py` makes the calls. Leaving a group calls
`__aexit__` of the hooks that were entered: these calls are the exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from aiohooks._core.activity import logger
from aiohooks._core.calls import OwnContext
from aiohooks._core.validate import InitRequired, check_secs
from aiohooks._core.waits import DEFAULT_GRACE_SECS, new_task, shielded, wait_done
from aiohooks.dispatch.calls import (
    AsyncFunction,
    HookCalls,
    HookStatus,
    OrderGroup,
    RegisteredHook,
    hook_call,
)
from aiohooks.dispatch.composite import COMPOSITE, Composite, composite_of, is_context
from aiohooks.dispatch.hook import (
    FunctionHook,
    HookOptions,
    HookRegistration,
    check_hooks,
    configure,
    registration_of,
)
from aiohooks.dispatch.interface import Interface, check_options, checked_and_named
from aiohooks.dispatch.points import Args, How, Point, checked_how, point
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
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class HookGroup(InitRequired, Generic[K]):
    """Several hooks of one interface, called as one: `async with HookGroup(AgentHooks, [Audit(),
    Metrics()]) as group:`.

    A hook interface is any class. Hooks implement some of its public methods. `group.hooks` is an
    object of that class: if you call a method of it, the hooks that implement the method are
    called, by their `order` and then in registration order. A method whose code has no `await` runs
    in your task. Every other method runs in its own task and context, concurrently with the others.
    Context variables that hooks set are set for you afterwards. The first failure cancels the other
    hooks and waits for them. You get a single failure as it is, and several as one flat group. Each
    has a note that names the hook. If you are cancelled, you get your cancellation instead.

    Any number of tasks may call a group at the same time. A call always uses the current hooks of
    the group. The `async with` block enters hooks that are async context managers in order, and
    exits them in reverse. It also ends background calls. If a group has neither, you can use it
    without a block.
    """

    def __init__(
        self,
        kind: Callable[..., K],
        hooks: Iterable[object] = (),
        *,
        results: Mapping[str, How] | How | None = None,
        grace_secs: float = DEFAULT_GRACE_SECS,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the hooks.

        Args:
            kind: the hook interface: your own class, or a framework's.
            hooks: objects with some methods of `kind`, or registrations made by `configure`. They
                need not derive from `kind`.
            results: how to combine the results of several hooks, as a mapping of method names, or
                for all methods that return something. Use it for a class that you cannot mark with
                `point`, which lists the modes.
            grace_secs: how long cancelled calls, background calls and the exits of hooks may take.
            init: the arguments of the `__init__` of `kind`, by name. It runs before the hooks are
                added, so it calls no hooks.

        Raises:
            InvalidHookError: `kind` is not a class, or cannot be instantiated; a hook does not fit
                it; or several hooks return a result from a method that does not define how to
                combine them.
            InvalidArgumentError: `results` names a method that `kind` does not have, or another
                argument is invalid.
        """
        check_secs(grace_secs, "grace_secs")
        if isinstance(hooks, type):
            raise InvalidHookError(f"hooks is {hooks!r}; give the class first, then the hooks")
        check_hooks(hooks)
        self._composite = Composite(Interface(kind, results), init or {}, grace_secs)
        # How many hooks have had each name. A removed hook still counts, so that no other hook gets
        # its name.
        self._name_counts: Counter[str] = Counter()
        # The hooks that have to be exited, in the order in which they were entered.
        self._entered: dict[RegisteredHook, None] = {}
        # All hooks are entered and exited in this context, though not in one task: a token of a
        # context variable that `__aenter__` sets is valid in `__aexit__`.
        self._own_context = OwnContext()
        # A copy of that context from after the last hook was entered, or None before.
        self._before_exits: Context | None = None
        # The tasks that exit removed hooks, each with its hook.
        self._exit_tasks: dict[asyncio.Task[None], RegisteredHook] = {}
        # The failures of exits and of background calls, which the end of the block raises or logs.
        self._exit_failures: list[BaseException] = []
        self.hooks: K = cast("K", self._composite.object)
        """The one object that stands for all hooks: pass it wherever a hook of the class is wanted.

        Public data that is set on it is set on the hooks of the class, too, but not on hooks that
        are added later.
        """
        for hook in hooks:
            self.add(hook)

    # -- the hooks

    def add(self, hook: object) -> None:
        """Add a hook, or a registration. This applies from the next call.

        Raises:
            InvalidHookError: the hook does not fit, is in the group already, or is a context
                manager and the group is already entered.
            HookGroupClosedError: the group has been left.
        """
        if self._composite.state == "closed":
            self._composite.check_usable()
        registration = registration_of(hook)
        hook = registration.hook
        known = self._composite.by_identity
        registered = checked_and_named(registration, known, self._name_counts)
        nested = composite_of(hook)
        if nested is not None and nested.reaches(self._composite):
            raise InvalidHookError(
                f"{hook!r} stands for {self!r}, or for a group with it; a call would never end"
            )
        interface = self._composite.interface
        points = interface.check(registered)
        if not points:
            names = ", ".join(interface.points)
            advice = "; give its `hooks`" if isinstance(hook, HookGroup) else ""
            raise InvalidHookError(
                f"{hook!r} has none of the methods of {interface.kind.__name__}: {names}{advice}"
            )
        check_options(registered, points)
        if self._composite.state == "entered":
            _check_plain_context(hook)
            if is_context(hook):
                raise InvalidHookError(
                    f"{hook!r} is a context manager; add it before the group is entered"
                )
        for implemented in points:
            self._composite.methods[implemented.name].check_results(registered)
        self._composite.insert(registered, points)

    def remove(self, hook: object) -> None:
        """Remove a hook, or a function that was added with `on`. This applies from the next call.

        A hook that is an async context manager is exited when its current calls have ended.

        Args:
            hook: a hook, a function or a registration. If a function was added several times, its
                earliest registration is removed.

        Raises:
            InvalidArgumentError: the hook is not in the group.
            WrongLoopError: the hook was entered, and this is not the event loop of the group.
        """
        if isinstance(hook, HookRegistration):
            hook = hook.hook
        registrations = self._composite.find(hook)
        if not registrations:
            raise InvalidArgumentError(f"{safe_repr(hook)} is not a hook of {self!r}")
        registered = registrations[0]
        if registered in self._entered and self._composite.state == "entered":
            self._exit_later(registered)
        self._composite.remove(registered)

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
        """Add a function as a hook with one method: `group.on(AgentHooks.on_tool_start, log)`, also
        as a decorator.

        `method` is a method of the hook interface. `fn` is a coroutine function, or a plain
        function that does not block, and is returned. The options are those of `configure`.
        """
        name = self._point_of(method).name
        if fn is None:
            return functools.partial(self.on, method, **options)
        self.add(configure(FunctionHook(name, fn), **options))
        return fn

    def _point_of(self, method: Callable[..., Any]) -> Point:
        """Return the point of a method of the class. Raise if `method` is something else."""
        interface = self._composite.interface
        name = getattr(method, "__name__", repr(method))
        point = interface.points.get(name)
        # The name alone is not enough: `@group.on` without a method gets the decorated function
        # here, which may have the name of a method.
        if point is None or method != getattr(interface.kind, name):
            raise InvalidArgumentError(
                f"{safe_repr(method)} is not a method of {interface.kind.__name__}; give it as"
                f" {interface.kind.__name__}.name; {did_you_mean(name, interface.points)}"
            )
        return point

    # -- entering and leaving

    async def __aenter__(self) -> Self:
        """Enter the hooks that are async context managers, in order.

        If a hook fails, exit the hooks that were entered before it. A hook whose `on_error` is
        "log" is removed instead.

        Raises:
            HookGroupClosedError: the group was entered before.
            InvalidHookError: a hook is a plain context manager, which might block.
        """
        if self._composite.state != "new":
            raise HookGroupClosedError(
                f"{self!r} was entered before; groups are single-use: make a new one"
            )
        for registered in self._composite.hooks:
            _check_plain_context(registered.hook)
        self._composite.check_loop()
        self._composite.state = "entered"
        try:
            for registered in [*self._composite.hooks]:
                if is_context(registered.hook):
                    await self._enter(registered)
        except BaseException as error:
            try:
                await self.__aexit__(type(error), error, error.__traceback__)
            except asyncio.CancelledError as cancelled:
                # The cancel of the caller takes precedence, and keeps the error as its context.
                keep_errors(cancelled, [error])
                raise
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Wait for active calls and background calls, then exit the hooks, the last entered first.

        Each of these steps is shielded from cancels, and gets the grace period. Hooks are exited in
        the context in which they were entered, but in another task. They cannot swallow the error
        of the block.

        Raises:
            CancelledError: the caller was cancelled. The failures are in its context or its notes.
            BaseException: a background call or a hook failed, and the block did not. If the block
                failed, these failures are logged, and are notes of its error.
        """
        self._composite.close()
        try:
            # `_exit_all` raises nothing: it collects all failures in `_exit_failures`.
            await shielded(
                self._exit_all(kind, error, traceback),
                # No limit: each of the steps has its own.
                grace_secs=None,
                what=f"the end of {self!r}",
            )
        except asyncio.CancelledError as cancelled:
            keep_errors(cancelled, self._exit_failures)
            raise
        finally:
            # The hooks were exited in another task. Context variables that they have changed there
            # are changed for the caller, too.
            self._own_context.copy_back(self._before_exits)
        if error is None:
            raise_failures(self._exit_failures, f"failures at the end of {self!r}")
            return
        for failure in self._exit_failures:
            add_note(error, f"and then: {failure!r}")
            logger.error("leaving %r failed after %s", self, type(error).__name__, exc_info=failure)

    async def _enter(self, registered: RegisteredHook) -> None:
        """Enter a hook, within its time limit."""

        async def enter_and_note() -> None:
            await registered.hook.__aenter__()
            # In the same task, and not after `_call_hook`: if that is cancelled when the hook has
            # been entered, the group still has to exit the hook.
            self._entered[registered] = None

        await self._call_hook(registered, "__aenter__", enter_and_note)
        # The call has not raised, so an error was only logged (`on_error="log"`).
        if registered not in self._entered:
            logger.error("%s is removed from %r: it could not be entered", registered.name, self)
            self._composite.remove(registered)
        # The end of the block applies what exits change from this state on to the caller's context.
        self._before_exits = self._own_context.state()

    async def _exit_all(self, *details: Any) -> None:
        """Wait for active calls and background calls, then exit the hooks.

        Args:
            details: the arguments of `__aexit__`.
        """
        grace_secs = self._composite.grace_secs
        if not await wait_done(self._composite.ends_of_calls(), grace_secs):
            active = self._composite.ends_of_calls()
            message = "%r is left, but %s of its calls still run after %s s"
            logger.warning(message, self, len(active), grace_secs)
        self._exit_failures += await self._composite.background.end(grace_secs)
        # A task whose hook is still entered waits for calls, which had the grace period to end. It
        # is cancelled, and its hook is exited with the other hooks, below.
        for task, registered in self._exit_tasks.items():
            if registered in self._entered:
                task.cancel()
        await wait_done(self._exit_tasks, None)
        while self._entered:
            registered, _ = self._entered.popitem()
            await self._exit(registered, *details)

    def _exit_later(self, registered: RegisteredHook) -> None:
        """Start a task that exits a hook, which is being removed.

        The task first waits for all calls of the group that have begun by now, which may use the
        hook.

        Raises:
            WrongLoopError: this is not called in the group's event loop.
        """
        self._composite.check_loop()
        earlier_ends: list[asyncio.Future[None]] = self._composite.ends_of_calls()
        # All exits run in one context, and so one after another: each waits for the one before.
        if self._exit_tasks:
            earlier_ends.append(next(reversed(self._exit_tasks)))

        async def exit_removed() -> None:
            await wait_done(earlier_ends, secs=None)
            # Also if a background call of the hook has removed it, which `background.drain` would
            # not wait for: this task is not part of that call.
            if registered.queue is not None:
                await registered.queue.drain()
            del self._entered[registered]
            await self._exit(registered, None, None, None)

        name = f"exit of {registered.name}, which was removed"
        self._exit_tasks[new_task(exit_removed(), name)] = registered

    async def _exit(
        self,
        registered: RegisteredHook,
        *details: Any,
    ) -> None:
        """Call `__aexit__` of a hook. Its result is ignored: it cannot swallow the error of the
        block.

        This raises nothing. A failure, also a cancel, is added to `_exit_failures`, as the other
        hooks have to be exited all the same.

        Args:
            registered: the hook.
            details: the arguments of its `__aexit__`.
        """
        try:
            await self._call_hook(
                registered,
                "__aexit__",
                registered.hook.__aexit__,
                details,
                # `grace_secs` may be 0, but a time limit is positive.
                max(self._composite.grace_secs, 1e-9),
            )
        except asyncio.CancelledError as cancelled:
            # The task that exits hooks was cancelled: after the grace period, or by other code.
            failure = hook_cancelled_error(f"{registered.name}.__aexit__", cancelled)
            self._exit_failures.append(failure)
        except Exception as failure:
            self._exit_failures.append(failure)

    async def _call_hook(
        self,
        registered: RegisteredHook,
        method: str,
        function: AsyncFunction,
        args: Args = (),
        secs: float | None = None,
    ) -> None:
        """Call a function that enters or exits a hook, in the context that all of them share.

        The time limit and the `on_error` of the hook apply. Its `disable_after` does not, as a
        disabled hook has to be exited, too.

        Args:
            registered: the hook.
            method: the name of the method, for messages.
            function: the function to call.
            args: its arguments.
            secs: the time limit if the hook has none of its own.
        """
        registration = registered.registration._replace(disable_after=None)
        # The group has another `RegisteredHook`, so that failures here are not counted as failures
        # of the hook's calls.
        call = hook_call(RegisteredHook(registered.name, registration), method, function, secs)
        calls = HookCalls(OrderGroup([call], self._composite.grace_secs))
        context = self._own_context.update()
        # `start_all` would give the call a context of its own.
        calls.start(0, function, args, call.name, call.timeout, context)
        try:
            await calls.wait()
        finally:
            # If the call is pending, this coroutine was closed, perhaps by the garbage collector in
            # the context of other code, which must not get the changes.
            if not calls.pending:
                self._own_context.copy_back()

    def status(self) -> list[HookStatus]:
        """Return the status of each hook: its failures and dropped calls."""
        return [registered.status() for registered in self._composite.hooks]

    def __repr__(self) -> str:
        return repr(self._composite)


def compose(
    kind: Callable[..., K],
    hooks: Iterable[object],
    *,
    results: Mapping[str, How] | How | None = None,
    init: Mapping[str, Any] | None = None,
) -> K:
    """Return an object of the class `kind` that calls several hooks. Pass it wherever a single hook
    is expected.

    This is the attribute `hooks` of a `HookGroup`, and raises the same errors.

    Args:
        kind: the hook interface: a class whose methods the hooks may implement.
        hooks: objects with methods of `kind`, or registrations made by `configure`.
        results: how to combine the results of several hooks, as a mapping of method names, or for
            all methods that return something. See `point`.
        init: the arguments of the `__init__` of `kind`, by name.

    Raises:
        HookGroupClosedError: a hook is a context manager or has background calls. Use a `HookGroup`
            as a context manager.
    """
    group = HookGroup(kind, hooks, results=results, init=init)
    group._composite.check_usable()  # pyright: ignore[reportPrivateUsage] - of this module
    return group.hooks


# -- functions


class ComposedFunctions(Protocol[P]):
    """The coroutine function that `compose_functions` returns."""

    async def __call__(self, *args: P.args, **keywords: P.kwargs) -> Any:
        """Call the functions."""

    def add(self, function: object, /) -> None:
        """Add a function, or a registration. This applies from the next call."""

    def remove(self, function: object, /) -> None:
        """Remove a function, or its earliest registration. This applies from the next call."""


@overload
def compose_functions(  # type: ignore[overload-overlap]
    functions: Iterable[Callable[P, object]],
    *,
    results: How | None = None,
) -> ComposedFunctions[P]: ...
@overload
def compose_functions(
    functions: Iterable[object],
    *,
    results: How | None = None,
) -> ComposedFunctions[...]: ...
def compose_functions(
    functions: Iterable[object],
    *,
    results: How | None = None,
) -> ComposedFunctions[...]:
    """Return a coroutine function that calls several functions, for a framework that accepts a
    plain callable.

    Example: `httpx.AsyncClient(event_hooks={"request": [compose_functions([sign, audit])]})`.

    The functions are called like the methods of hooks: concurrently, and the first failure ends the
    call. The returned function has `add` and `remove`, which apply from the next call. Arguments
    are passed by position if possible. Each function must accept the same calls as the first
    function, but may name its parameters differently.

    Args:
        functions: coroutine functions, plain functions, or registrations made by `configure`. Give
            at least one.
        results: how to combine the results, if the functions return any. See `point`.

    Raises:
        InvalidHookError: a function cannot be called like the first function, or has an option that
            is impossible for it.
        InvalidArgumentError: an argument is invalid.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise InvalidArgumentError(f"functions is {safe_repr(functions)}; give a list of functions")
    hooks = [_function_registration(function) for function in functions]
    if not hooks:
        raise InvalidArgumentError("functions is empty; give at least one function")
    first_function = hooks[0].hook.__aiohooks_function__
    namespace = {"__call__": _method_like(first_function, results)}
    kind: Any = type("functions", (), namespace)
    group: HookGroup[Any] = HookGroup(kind, hooks)

    async def call(*args: Any, **keywords: Any) -> Any:
        return await group.hooks(*args, **keywords)

    def add(function: object, /) -> None:
        group.add(_function_registration(function))

    call.__name__ = kind.__name__
    call.__qualname__ = kind.__name__
    attributes: Any = call
    attributes.add = add
    attributes.remove = group.remove
    setattr(attributes, COMPOSITE, group._composite)  # pyright: ignore[reportPrivateUsage] - of this module
    attributes.__signature__ = _signature(first_function)
    return cast("ComposedFunctions[...]", call)


def _function_registration(function: object) -> HookRegistration:
    """Return the registration of a function as a hook, whose only method is `__call__`.

    `function` may be the function, or its registration, which keeps its options.

    Raises:
        InvalidArgumentError: it is not a function; from `FunctionHook`.
    """
    registration = registration_of(function)
    # Until here, the hook of the registration is the function itself.
    hook = FunctionHook("__call__", registration.hook)
    return registration._replace(hook=hook)


def _method_like(function: Callable[..., Any], results: How | None) -> Any:
    """Return a method with the parameters of a function.

    `compose_functions` makes a hook interface for its functions, whose only method this is. Its
    body is empty, so calls of it only call the hooks.

    Args:
        function: the first of the functions.
        results: how the results of the functions become one. None rejects a call in which several
            functions return a result.
    """

    async def call(self: Any, /, *args: Any, **keywords: Any) -> Any: ...

    method: Any = functools.update_wrapper(call, function)
    # Whoever unwraps the method would get the function, which has no parameter for the object.
    del method.__wrapped__
    # In the signature, the first parameter is not named `self`: the function may have a parameter
    # of that name.
    self_parameter = inspect.Parameter("aiohooks_functions", inspect.Parameter.POSITIONAL_ONLY)
    signature = _signature(function)
    parameters = [self_parameter, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)
    if results is not None:
        return point(checked_how(results, "results"))(method)
    # Without `results`, the annotations decide how results become one. But those of the first
    # function say nothing about the results of the other functions.
    method.__annotations__ = {}
    return method


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or one that takes any arguments if it has none, as some
    functions written in C.
    """
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(function)
    return inspect.signature(lambda *args, **keywords: None)


# -- checks


def _check_plain_context(hook: object) -> None:
    """Raise if a hook is a plain context manager, which a group does not enter."""
    if hasattr(type(hook), "__enter__") and not is_context(hook):
        raise InvalidHookError(
            f"{hook!r} is a plain context manager, which a group does not enter: it might block;"
            " give it `__aenter__` and `__aexit__`"
        )
