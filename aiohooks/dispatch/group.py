"""A group of hooks that is called as if it were one hook.

    HookGroup    the group: its hooks, its calls, its block
    compose      the one object that stands for several hooks, where nothing has to be entered

How a call is made depends on the method (`lifecycle.Point.how`): `answers.py` has a function for
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
    get_args,
    overload,
)

from aiohooks._core.cancel import DEFAULT_GRACE_SECS, shielded, wait_done
from aiohooks._core.clock import wake
from aiohooks._core.contexts import OwnContext
from aiohooks._core.diagnostics import logger
from aiohooks._core.overlap import keep_errors
from aiohooks._core.validate import (
    check_choice,
    check_instance,
    check_mapping,
    check_secs,
    is_coroutine_function,
)
from aiohooks.dispatch.answers import Target, make_target, observe, positional_first, wrapped
from aiohooks.dispatch.background import BackgroundCalls, raise_failures
from aiohooks.dispatch.calls import HookStatus, Method, OrderGroup, RegisteredHook, call_groups
from aiohooks.dispatch.composite import Composite, composite_of
from aiohooks.dispatch.hook import (
    HookOptions,
    HookRegistration,
    OnError,
    configure,
    for_group,
    registration_of,
    with_defaults,
)
from aiohooks.dispatch.lifecycle import (
    NO_VALUE,
    How,
    Lifecycle,
    Point,
    check_options,
    registered_hooks,
)
from aiohooks.errors import (
    HookGroupClosedError,
    InvalidArgumentError,
    InvalidHookError,
    add_note,
    did_you_mean,
    hook_cancelled_error,
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
        methods: Iterable[str] = (),
        exit_reverse: Iterable[str] = (),
        timeout: float | None = None,
        on_error: OnError = "raise",
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
                are there, so that what it calls is its own; for a protocol, which has none, the
                values of its data.
            methods: the names of methods that a framework looks for and its class leaves out; each
                is as the first hook has it.
            exit_reverse: the names of methods that undo what others have done: their hooks are
                called in reverse, those of the highest `order` first, and of one order the last
                first.
            timeout: the time limit of hooks that have none of their own, where they can have one;
                see `configure`.
            on_error: for hooks that do not say it themselves.

        Raises:
            InvalidHookError: `kind` is not a class, or no object of it can be made; a hook does not
                fit it; several hooks implement a method that returns something, and nothing says
                how their results become one.
            InvalidArgumentError: `results` or `exit_reverse` names a method that `kind` does not
                have, `methods` one that it has or no hook has, or another argument is invalid.
        """
        check_secs(grace_secs, "grace_secs")
        check_secs(timeout, "timeout", optional=True, positive=True)
        check_choice(on_error, "on_error", "raise", "log")
        check_mapping(init, "init")
        if isinstance(hooks, HookRegistration) or not isinstance(hooks, Iterable):
            raise InvalidHookError(f"hooks is {hooks!r}; give a list of hooks")
        hooks = [for_group(one, kind) for one in hooks]
        self._lifecycle = Lifecycle(
            kind, results, methods=_left_out(methods, hooks), hint=_BLOCKING_HINT
        )
        self._name = name or self._lifecycle.kind.__name__
        self._grace_secs = grace_secs
        self._defaults = (
            {"timeout": timeout, "on_error": on_error}
            if timeout is not None or on_error != "raise"
            else {}
        )
        self._exit_reverse = _names(exit_reverse, "exit_reverse")
        for each in self._exit_reverse:
            if each not in self._lifecycle.points:
                known = (
                    f"{self._lifecycle.kind.__name__}; {did_you_mean(each, self._lifecycle.points)}"
                )
                raise InvalidArgumentError(
                    f"exit_reverse has {each!r}, which is no method of {known}"
                )
        self._background = BackgroundCalls(grace_secs)
        self._numbers: Counter[str] = Counter()  # of the names that hooks have had
        self._entered: list[RegisteredHook] = []
        self._context = OwnContext()  # of entering and leaving
        self._state = "new"
        self._left: asyncio.Future[None] | None = None
        self._registered: dict[int, RegisteredHook] = {}  # by the id of the hook
        self._composite = Composite(
            self._lifecycle, init or {}, self._registered, self._make_target, self._name
        )
        self.hooks: K = cast("K", self._composite.object)
        """The one object that stands for all hooks: pass it wherever a hook of the class is wanted.

        What is set on it is set on the hooks that are objects of the class, or of a base of it, as
        well, and on those that are added later.
        """
        for one in registered_hooks(hooks, self._numbers):
            self._insert(one)
        self._composite.take_data()
        for each, default in (
            self._lifecycle.attributes.items()
            if self._registered and self._lifecycle.is_protocol
            else ()
        ):
            if default is NO_VALUE and not hasattr(self.hooks, each):
                known = self._lifecycle.kind.__name__
                raise InvalidHookError(
                    f"no hook has all of {known} with {each}; give init={{{each!r}: ...}}"
                )

    def _make_target(self, each: Point, hooks: Iterable[RegisteredHook]) -> Target:
        self.check_usable()
        is_reverse = each.name in self._exit_reverse
        return make_target(
            each, hooks, self._grace_secs, self._background.bind, is_reverse=is_reverse
        )

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
            InvalidArgumentError: `method` is not a coroutine method of the class, or one that
                wraps.
            HookGroupClosedError: the group is not entered yet and has to be, or has been left.
            BaseException: the failure of a hook; several as one group.
        """
        each = self._point_of(method)
        if not each.is_async or each.how == "wrap":
            raise InvalidArgumentError(
                f"{each.name} has no list of results; call group.hooks.{each.name}(...)"
            )
        called = self._composite.methods[each.name]
        target = called.usable or called.target()
        given = positional_first(each.positional, args, keywords) if keywords else (args, keywords)
        if target.observers:
            await observe(target, *given)
        call = wrapped(target, functools.partial(call_groups, target.groups))
        return await call(*given) or []  # a wrapper has swallowed the error

    def _point_of(self, method: Callable[..., Any]) -> Point:
        kind = self._lifecycle.kind.__name__
        if not callable(method):
            known = next(iter(self._lifecycle.points))
            raise InvalidArgumentError(
                f"{method!r} is given for a method of {kind}; give the method itself, as in"
                f" {kind}.{known}"
            )
        name = getattr(method, "__name__", repr(method))
        each = self._lifecycle.points.get(name)
        if each is None:
            raise InvalidArgumentError(
                f"{name} is not a method of {kind}; {did_you_mean(name, self._lifecycle.points)}"
            )
        return each

    # -- the hooks

    def add(self, hook: object) -> None:
        """Add a hook, or a registration; this applies from the next call.

        Raises:
            InvalidHookError: it does not fit, is a hook of the group already, or would have to be
                entered now.
            HookGroupClosedError: the group has been left.
        """
        if self._state == "closed":
            self.check_usable()
        numbers = self._numbers.copy()
        (one,) = registered_hooks(
            [for_group(hook, self._lifecycle.kind)], numbers, self._registered
        )
        self._insert(one, is_added=True)
        self._numbers = numbers  # not before: a hook that is refused has had no name

    def remove(self, hook: object) -> None:
        """Remove a hook, or a function that was added with `on`; this applies from the next call.

        Raises:
            InvalidArgumentError: it is not a hook of the group.
        """
        called = for_group(hook, self._lifecycle.kind)
        known = self._registered.get(id(hook if called is hook else called.hook))
        functions = (
            one
            for one in self._registered.values()
            if isinstance(one.hook, _FunctionHook) and one.hook.fn is hook
        )
        found = [*functions] if known is None else [known]
        if not found:
            raise InvalidArgumentError(f"{hook!r} is not a hook of {self!r}")
        for one in found:
            self._composite.remove(one)

    @overload
    def on(
        self, method: Callable[Concatenate[K, ...], Any], fn: F, **options: Unpack[HookOptions]
    ) -> F: ...
    @overload
    def on(
        self,
        method: Callable[Concatenate[K, ...], Any],
        fn: None = None,
        **options: Unpack[HookOptions],
    ) -> Callable[[F], F]: ...
    def on(self, method: Callable[..., Any], fn: Any = None, **options: Unpack[HookOptions]) -> Any:
        """Add a function as a hook with one method: `group.on(AgentHooks.on_tool_start, log)`; also
        as a decorator.

        `method` is the method of the class, `fn` a coroutine function, or a plain function, which
        must not block unless it has `thread=True`; it is returned. The options are those of
        `configure`.
        """
        name, kind = self._point_of(method).name, self._lifecycle.kind
        if fn is not None:
            self.add(configure(_FunctionHook(name, fn), **options))
            return fn
        if isinstance(method, types.FunctionType) and all(
            getattr(base, name, None) is not method for base in kind.__mro__
        ):
            # A function below `@group.on` without a method, which the decorator that is returned
            # would drop.
            raise InvalidArgumentError(
                f"{method!r} is not a method of {kind.__name__}; write"
                f" @group.on({kind.__name__}.{name})"
            )
        return functools.partial(self.on, method, **options)

    def _insert(self, one: RegisteredHook, *, is_added: bool = False) -> None:
        """Check a hook and take it from the next call on; calls that are active keep theirs."""
        hook = one.hook
        if isinstance(hook, HookGroup):
            raise InvalidHookError(f"{hook!r} is a group; give its `hooks`, and enter it yourself")
        points = self._lifecycle.check(
            hook, plain=one.registration.thread or isinstance(hook, _FunctionHook)
        )
        is_alone = (
            not points and composite_of(hook) is None and type(hook) is not self._lifecycle.kind
        )
        if is_alone and not (self._lifecycle.has_member(hook) and _is_context(hook)):
            names = ", ".join(self._lifecycle.points)
            raise InvalidHookError(
                f"{hook!r} has none of the methods of {self._lifecycle.kind.__name__}: {names}"
            )
        check_options(one, points)
        if self._state == "entered" and _is_context(hook):
            raise InvalidHookError(
                f"{hook!r} is a context manager; add it before the group is entered"
            )
        for each in points:
            self._composite.methods[each.name].check_answers(one)
        if self._defaults:
            one.registration = with_defaults(one.registration, **self._defaults)
        if is_added:
            self._composite.take_data(hook)
        self._composite.insert(one, points)

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
                    reason = (
                        "is an async context manager"
                        if _is_context(one.hook)
                        else "has background=True"
                    )
                    raise HookGroupClosedError(
                        f"{self!r} has to be entered, as {one.name} {reason}: `async with group:`"
                    )

    async def __aenter__(self) -> Self:
        """Enter the hooks that are async context managers, in order; if one fails, leave those
        before it.

        Raises:
            HookGroupClosedError: the group was entered before.
        """
        if self._state != "new":
            raise HookGroupClosedError(
                f"{self!r} was entered before; groups are single-use: make a new one"
            )
        self._state = "entered"
        try:
            for one in [*self._registered.values()]:
                if _is_context(one.hook):
                    # Its error is never only logged.
                    raising = RegisteredHook(
                        one.name, HookRegistration(one.hook, timeout=one.registration.timeout)
                    )
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Wait for the background calls and leave the hooks: shielded from cancels, within the
        grace period for each of them.

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
        failures: list[BaseException] = []
        before = self._context.state()
        try:
            await shielded(
                self._leave_hooks(error, failures),
                grace_secs=self._grace_secs,
                what=f"the end of {self!r}",
            )
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
                    logger.error(
                        "leaving %r failed after %s", self, type(error).__name__, exc_info=failure
                    )
        finally:
            error = None
            failures.clear()

    async def _leave_hooks(
        self, error: BaseException | None, failures: list[BaseException]
    ) -> None:
        failures += await self._background.end(self._grace_secs)
        args = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        while self._entered:
            one = self._entered.pop()
            limit = max(self._grace_secs, 1e-9)
            group = OrderGroup(
                "__aexit__",
                [one],
                self._grace_secs,
                limit,
                bind=lambda one, name: getattr(one.hook, name),
            )
            try:
                await call_groups((group,), args, own=self._context)
            except asyncio.CancelledError as cancelled:
                # The end itself was cancelled: after the grace period, or by a third party. The
                # others are left all the same.
                failures.append(hook_cancelled_error(f"{one.name}.__aexit__", cancelled))
            except Exception as failure:
                failures.append(failure)

    def _enter(self, registered: RegisteredHook, method: str) -> Method:
        async def enter() -> None:
            await registered.hook.__aenter__()
            self._entered.append(
                registered
            )  # here: it may have left a cancel of the caller for the next await

        return enter

    def status(self) -> list[HookStatus]:
        """Return what has become of the calls of each hook."""
        return self._background.status(self._registered.values())

    def __repr__(self) -> str:
        return (
            f"<HookGroup {self._name}:"
            f" {', '.join(one.name for one in self._registered.values()) or 'no hooks'}>"
        )


def compose(
    kind: Callable[..., K],
    hooks: Iterable[object],
    *,
    results: Mapping[str, How] | How | None = None,
    init: Mapping[str, Any] | None = None,
    methods: Iterable[str] = (),
    exit_reverse: Iterable[str] = (),
    timeout: float | None = None,
    on_error: OnError = "raise",
) -> K:
    """Return one object of the class `kind` that stands for several hooks; a framework's runner
    takes it like a single one.

    It is the `hooks` of a `HookGroup`, with its `results`, `init`, `methods`, `exit_reverse`,
    `timeout`, `on_error` and errors.

    Raises:
        InvalidHookError: a hook is a context manager or has background calls, so that it must be
            entered: use a `HookGroup`.
    """
    group = HookGroup(
        kind,
        hooks,
        results=results,
        init=init,
        methods=methods,
        exit_reverse=exit_reverse,
        timeout=timeout,
        on_error=on_error,
    )
    try:
        group.check_usable()
    except HookGroupClosedError as error:
        raise InvalidHookError(f"{error}; compose cannot do it, use HookGroup") from None
    return group.hooks


class ComposedFunctions(Protocol):
    """What `compose_functions` returns."""

    async def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the functions."""

    def add(self, function: object, /) -> None:
        """Add a function, or a registration; this applies from the next call."""

    def remove(self, function: object, /) -> None:
        """Remove a function; this applies from the next call."""


def compose_functions(
    functions: Iterable[object],
    *,
    results: How | None = None,
    timeout: float | None = None,
    on_error: OnError = "raise",
    name: str | None = None,
) -> ComposedFunctions:
    """Return one coroutine function that calls several functions, for a framework that takes a
    plain callable.

    Example: `httpx.AsyncClient(event_hooks={"request": [compose_functions([sign, audit])]})`.

    They are called as the methods of hooks are: concurrently, and the first failure ends the call.
    What this returns has `add` and `remove`, which hold from the next call on.

    Args:
        functions: coroutine functions and plain ones, or registrations made by `configure`.
        results: how the results of several become one, if they return any; see `point`.
        timeout: the time limit of coroutine functions that have none of their own.
        on_error: for functions that do not say it themselves.
        name: its name, and that of the group in messages.

    Raises:
        InvalidHookError: one is not a function, has an option that cannot hold, or its arguments in
            another order than the first.
        InvalidArgumentError: an argument is invalid.
    """
    if callable(functions) or not isinstance(functions, Iterable):
        raise InvalidArgumentError(f"functions is {safe_repr(functions)}; give a list of functions")
    if results is not None:
        check_choice(results, "results", *get_args(How))

    def hook(one: Any) -> HookRegistration:
        known = registration_of(one)
        if known.timeout is not None and not known.thread and not is_coroutine_function(known.hook):
            raise InvalidHookError(
                f"{known.hook!r} is a plain function, which no time limit can end; give it no"
                " timeout"
            )
        return known._replace(
            hook=_FunctionHook("call", known.hook, any_call=not takes_one, is_alone=True)
        )

    takes_one = results in ("chain", "wrap")  # so one argument of all functions is special
    hooks = [hook(one) for one in functions]
    first: Callable[..., Any] = hooks[0].hook.fn if hooks and takes_one else _anything
    for one in hooks:
        _check_order(first, one.hook.fn, results)
    kind: Any = type("functions", (), {"call": _method_of(first)})
    ways: dict[str, How] | None = None if results is None else {"call": results}
    name = name or "functions"
    group: HookGroup[Any] = HookGroup(
        kind, hooks, results=ways, timeout=timeout, on_error=on_error, name=name
    )

    async def call(*args: Any, **keywords: Any) -> Any:
        return await group.hooks.call(*args, **keywords)

    def add(function: object, /) -> None:
        added = hook(function)
        _check_order(first, added.hook.fn, results)
        group.add(added)

    call.__name__ = call.__qualname__ = name
    made: Any = call
    made.add, made.remove = add, group.remove
    with contextlib.suppress(
        TypeError, ValueError, IndexError
    ):  # there is none, or it is written in C
        made.__signature__ = inspect.signature(hooks[0].hook.fn)
    return cast("ComposedFunctions", made)


def _method_of(function: Callable[..., Any]) -> Any:
    """Return the method of a hook interface of functions that are called as this one is."""
    method = _empty_method(function)
    method.__annotations__ = {}  # what it returns says nothing of the others
    return method


def _check_order(
    first: Callable[..., Any], function: Callable[..., Any], results: How | None
) -> None:
    """Raise if the argument that calls the next, or takes a result, has another place in a function
    than in the first one.
    """
    places: set[int | str | None] = set()
    for one in (first, function) if results in ("chain", "wrap") else ():
        with contextlib.suppress(
            InvalidHookError
        ):  # not clear: what holds for the first is said elsewhere
            point = Point(object, "call", _method_of(one), results, None)
            places.add(
                point.positional.index(point.argument)
                if point.argument in point.positional
                else point.argument
            )
    if len(places) > 1:
        raise InvalidHookError(
            f"{function!r} has its arguments in another order than {first!r}, which would mix up"
            " what calls the next, or takes a result; give functions with the same arguments in"
            " the same order"
        )


# -- what is given for methods and hooks

_BLOCKING_HINT = ", or, if it has to block, give configure(hook, thread=True)"


def lifecycle_of(group: HookGroup[Any]) -> Lifecycle:
    """Return what a group knows of its class, for the checks of hooks."""
    return group._lifecycle  # pyright: ignore[reportPrivateUsage] - of this module


def _left_out(names: Iterable[str], hooks: Iterable[object]) -> dict[str, Callable[..., Any]]:
    """Return methods that a class leaves out, as the first hook that has them: with the same
    signature, and an empty body.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name in _names(names, "methods"):
        having = (
            one for one in map(registration_of, hooks) if callable(getattr(one.hook, name, None))
        )
        one = next(having, None)
        if one is None or name.startswith("_"):
            raise InvalidArgumentError(
                f"methods has {name!r}, which is no public method of any hook; give one that hooks"
                " have"
            )
        method = getattr(one.hook, name)
        found[name] = _empty_method(method, is_async=one.thread or is_coroutine_function(method))
    return found


def _names(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return names that are given as a list, or one of them alone."""
    check_instance(names, Iterable, what)
    given = (names,) if isinstance(names, str) else tuple(names)
    for name in given:
        check_instance(name, str, f"a name in {what}")
    return given


def _empty_method(like: Callable[..., Any], *, is_async: bool = True) -> Any:
    """Return a method that looks like a function, with an empty body."""

    async def call(self: Any, *args: Any, **keywords: Any) -> Any: ...
    def call_plain(self: Any, *args: Any, **keywords: Any) -> Any: ...

    made: Any = functools.update_wrapper(call if is_async else call_plain, like)
    del made.__wrapped__  # its signature may not be known: it may be written in C
    with contextlib.suppress(TypeError, ValueError):
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        made.__signature__ = inspect.Signature([own, *inspect.signature(like).parameters.values()])
    return made


class _FunctionHook:
    """A function as a hook with one method."""

    def __init__(
        self, name: str, fn: Any, *, any_call: bool = False, is_alone: bool = False
    ) -> None:
        if not callable(fn):
            fault = (
                "; give the function, not the call"
                if inspect.iscoroutine(fn)
                else ", and cannot be called; give one"
            )
            raise InvalidHookError(f"{fn!r} is given as a function{fault}")
        self.fn = fn
        self.__aiohooks_name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__aiohooks_is_function__ = is_alone
        if any_call:  # its signature says nothing of how it is called
            fn = functools.partial(fn)
            fn.__signature__ = inspect.signature(_anything)
        setattr(self, name, fn)

    def __repr__(self) -> str:
        return f"<hook {self.__aiohooks_name__}>"


def _anything(*args: Any, **keywords: Any) -> None: ...


def _is_context(hook: object) -> bool:
    return hasattr(type(hook), "__aenter__") and hasattr(type(hook), "__aexit__")
