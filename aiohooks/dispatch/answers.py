"""One result of several hooks, for each kind of method (`interface.Point.how`).

Target      what a method calls
wrapped     each wrapping hook calls the next one, and the last of them the wrapped call
observe     calls the hooks that only observe, before the others
answer      calls the others, and returns the one result: the only one, the first, the last of a
            chain, or all as one
own_method  the method of the class itself, which is called where no hook has a result

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

import functools
import inspect
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from aiohooks._core.clock import current_clock
from aiohooks._core.reports import logger
from aiohooks.dispatch.arguments import (
    Keywords,
    Values,
    by_position,
    for_function,
    for_hooks,
    key_of,
    spread,
    value_of,
    values_of,
    with_changes,
)
from aiohooks.dispatch.calls import (
    HookCalls,
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
    call_groups,
    order_groups,
)
from aiohooks.dispatch.interface import ChainEnd, Point, wraps_others
from aiohooks.errors import (
    HookCancelledError,
    InvalidArgumentError,
    InvalidHookError,
    hook_cancelled_error,
    raise_unchanged,
    safe_repr,
)

Bind = Callable[[RegisteredHook, str], Method]


class Target(NamedTuple):
    """What a method calls; nothing, if no hook implements it."""

    point: Point
    groups: tuple[OrderGroup, ...]
    until_answered: tuple[OrderGroup, ...]
    """The same calls, where a result decides what is called next: separate, or those that race."""
    wrappers: tuple[OrderGroup, ...]
    """The hooks that wrap the calls of the others, a group for each."""
    observers: tuple[OrderGroup, ...]
    """The calls of hooks whose results do not count."""
    once: tuple[RegisteredHook, ...]
    """The hooks that take part in one call only."""
    quick: OrderGroup | None
    """All calls, if nothing else is to be done than to make them, and none may wait."""

    @property
    def may_wait(self) -> bool:
        """Whether a call may wait."""
        return not all(group.in_turn for group in (*self.groups, *self.wrappers, *self.observers))


def make_target(
    point: Point,
    hooks: Iterable[RegisteredHook],
    grace_secs: float,
    bind: Bind,
    *,
    is_reverse: bool = False,
) -> Target:
    """Return what a method calls.

    Args:
        point: the method.
        hooks: the hooks that implement it, in registration order.
        grace_secs: how long cancelled calls may take to end.
        bind: returns the function that is called for a hook, which may queue the call.
        is_reverse: whether the last hook is the first.
    """
    step = -1 if is_reverse else 1
    hooks = sorted(hooks, key=lambda registered: registered.registration.order)[::step]
    if not point.is_async:
        bind = _plain
    elif point.how != "none":
        bind = bound_method
    wrappers: list[RegisteredHook] = []
    observers: list[RegisteredHook] = []
    callees: list[RegisteredHook] = []
    for registered in hooks:
        if point.how == "wrap" or wraps_others(getattr(registered.hook, point.name)):
            wrappers.append(registered)
        elif registered.registration.observer and point.how != "none":
            observers.append(registered)
        else:
            callees.append(registered)
    groups = order_groups(point.name, callees, grace_secs, bind)[::step]
    until_answered: tuple[OrderGroup, ...] = ()
    if point.how in ("first", "chain"):
        until_answered = tuple(
            OrderGroup(point.name, [registered], grace_secs, bind=bind) for registered in callees
        )
    elif point.how == "race":
        until_answered = groups
        for group in groups:
            group.in_turn = False  # a call that has a result ends the others
    bind_wrapper = bound_method if point.how == "wrap" else _generator_call
    once = tuple(registered for registered in hooks if registered.registration.once)
    all_calls = OrderGroup(point.name, callees, grace_secs, bind=bind)
    is_simple = point.how == "none" or (
        point.how in ("any", "one", "together") and point.does_nothing
    )
    is_quick = is_simple and all_calls.in_turn and bool(callees)
    return Target(
        point,
        groups,
        until_answered,
        tuple(
            OrderGroup(point.name, [registered], grace_secs, bind=bind_wrapper, wraps=True)
            for registered in wrappers
        ),
        order_groups(point.name, observers, grace_secs, bind)[::step],
        once,
        all_calls if is_quick and not (wrappers or observers or once) else None,
    )


def as_coroutine_function(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function, which cannot wait."""

    async def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


def _plain(registered: RegisteredHook, method: str) -> Method:
    return as_coroutine_function(getattr(registered.hook, method))


# -- results


async def answer(target: Target, own: Method, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call the hooks that do not wrap, and return the one result; where no hook has one, that of
    `own`, of the class itself.
    """
    point = target.point
    if not target.groups:
        return await own(*args, **keywords)
    args, keywords = by_position(point, args, keywords)
    if point.how == "chain":
        result = await _chained(target, args, keywords)
    elif target.until_answered:
        result = await _first_result(target, args, keywords)
    else:
        result = only_answer(target, await call_groups(target.groups, args, keywords))
    # A hook that calls the next one itself may return None.
    is_answered = point.how == "none" or point.does_nothing or point.calls_next
    if result is None and not is_answered:
        return await own(*args, **keywords)
    return result


async def all_results(target: Target, args: tuple[Any, ...], keywords: Keywords) -> list[Any]:
    """Call the hooks that do not wrap, and return all their results."""
    return await call_groups(target.groups, *by_position(target.point, args, keywords))


async def _chained(target: Target, args: tuple[Any, ...], keywords: Keywords) -> Any:
    values = values_of(target.point, args, keywords)
    for group in target.until_answered:
        (result,) = await call_groups((group,), *for_hooks(target.point, values))
        if isinstance(result, ChainEnd):
            return result.value
        if result is not None:
            values[key_of(target.point, values)] = result
    return value_of(target.point, values)


async def _first_result(target: Target, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call the groups in order, and return the first result that is not None."""
    for group in target.until_answered:
        if target.point.how == "race":
            race = _Race(group)
            results = await race.call_together(group.current_calls(), args, keywords=keywords)
        else:
            results = await call_groups((group,), args, keywords)
        result = _first(results)
        if result is not None:
            return result
    return None


def only_answer(target: Target, answers: Sequence[Any]) -> Any:
    """Return the one result of hooks that were called together.

    Raises:
        InvalidHookError: one of several hooks returned a result, and nothing says what that means;
            or results cannot be merged.
    """
    point = target.point
    if point.how == "none":
        if _first(answers) is not None:
            _log_dropped(target.groups, answers, "the method returns None")
        return None
    if point.how == "together":
        return _first(answers)
    if point.how == "all":
        return [*answers]
    if point.how == "merge":
        names = [call.name for group in target.groups for call in group.calls]
        return _merged(point, names, answers)
    if len(answers) > 1 and _first(answers) is not None:
        raise InvalidHookError(
            f"several hooks returned a result of {point.label}: {safe_repr(answers)}; say which one"
            f" counts: {point.advice}"
        )
    return answers[0] if answers else None


def _first(answers: Sequence[Any]) -> Any:
    for answer in answers:
        if answer is not None:
            return answer
    return None


def _log_dropped(groups: Sequence[OrderGroup], answers: Sequence[Any], reason: str) -> None:
    remaining = iter(answers)
    for group in groups:
        for registered, call in zip(group.hooks, group.calls, strict=True):
            registered.log_dropped(call.name, next(remaining), reason)


def _merged(point: Point, names: Sequence[str], answers: Sequence[Any]) -> Any:
    """Join results in a new list, tuple or dict."""
    given = [pair for pair in zip(names, answers, strict=True) if pair[1] is not None]
    if not given:
        return point.empty() if point.does_nothing else None
    first, like = given[0]
    for name, result in given:
        if type(result) not in (list, tuple, dict) or type(result) is not type(like):
            wanted = f"a {type(like).__name__} as {first} does"
            if result is like:
                wanted = "a list, tuple or dict"
            raise InvalidHookError(
                f"{name} returned {safe_repr(result)}, which cannot be merged; return {wanted}, or"
                " None"
            )
    if type(like) is not dict:
        return type(like)(item for _, result in given for item in result)
    merged: dict[Any, Any] = {}
    origins: dict[Any, str] = {}
    for name, result in given:
        for key, value in result.items():
            if key in merged:
                raise InvalidHookError(
                    f"{origins[key]} and {name} both returned {key!r}; each key may come from one"
                    " hook only"
                )
            merged[key] = value
            origins[key] = name
    return merged


class _Race(HookCalls):
    """The calls of hooks of one order, of which the first result ends the others; only that one is
    kept.
    """

    __slots__ = ()

    keeps_result = True  # only a result ends it

    def _winner(self) -> str | None:
        for number, result in enumerate(self.results):
            if result is not None:
                return self.describe(number)
        return None

    def succeeded(self, number: int) -> None:
        result = self.results[number]
        self.results[number] = None
        if result is not None and self._winner() is None and not self.cancelling:
            self.results[number] = result
            self.end(CancelledError())

    def suppresses(self, number: int, error: BaseException) -> bool:
        if super().suppresses(number, error):
            return True
        winner = self._winner()
        if winner is None or not isinstance(error, Exception):
            return False
        logger.error(
            "%s failed, but %s has returned a result",
            self.describe(number),
            winner,
            exc_info=error,
        )
        return True


async def observe(target: Target, args: tuple[Any, ...], keywords: Keywords) -> None:
    """Call the hooks whose results do not count."""
    results = await call_groups(target.observers, *by_position(target.point, args, keywords))
    _log_dropped(target.observers, results, "it is an observer")


# -- hooks that wrap

Innermost = Callable[[tuple[Any, ...], Keywords], Awaitable[Any]]
Rest = Callable[[Values], Awaitable[Any]]


def wrapped(target: Target, innermost: Innermost) -> Rest:
    """Return what calls the first wrapping hook with what calls the next one, and so on; the last
    one calls `innermost`.
    """

    def call_innermost(values: Values) -> Awaitable[Any]:
        return innermost(*spread(target.point, values))

    rest: Rest = call_innermost
    for group in reversed(target.wrappers):
        rest = functools.partial(_call_wrapper, target.point, group, rest)
    return rest


async def _call_wrapper(point: Point, group: OrderGroup, rest: Rest, values: Values) -> Any:
    """Call a wrapping hook with a function that calls the rest.

    What a hook wraps is not called again when the hook has failed and that is only logged: its
    result or error counts.
    """
    registered = group.hooks[0]
    registered.counted += 1
    if registered.is_left_out():
        return await rest(values)
    wrapper = _WrapperCall(group, point, rest, values)
    try:
        await wrapper.make()
        if not wrapper.is_logged:
            registered.succeeded()
            return wrapper.results[0]
        if wrapper.answers:
            return wrapper.answers[0]
        if wrapper.errors:
            raise_unchanged(wrapper.last_error())
    finally:
        registered.retry_later()
        wrapper.errors.clear()  # their tracebacks refer to it
    return await rest(values)


class _AsGiven(NamedTuple):
    """What the caller gave as the next, and how a hook called it."""

    call_next: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: Keywords


def own_method(point: Point, own: Method) -> Method:
    """Return the method of the class itself, `own`, or what stands for it if its body does nothing.

    That is the argument of a chain, an empty merge, or for a wrapping method a call of what the
    caller gave as the next.
    """

    async def call_given(self: Any, /, *given: Any, **named: Any) -> Any:
        values = values_of(point, given, named)
        call_next = value_of(point, values)
        if isinstance(call_next, _AsGiven):
            call_next, args, keywords = call_next
        elif callable(call_next):
            values.pop(key_of(point, values), None)
            if isinstance(getattr(call_next, "__self__", None), _WrapperCall):
                values = {}  # of a group that has this one as a hook: it takes what is changed
            args, keywords = for_function(point, values, call_next)
        if not callable(call_next):
            raise InvalidArgumentError(
                f"{point.name} got {safe_repr(call_next)} as the next; give what the last hook"
                " calls"
            )
        result = call_next(*args, **keywords)
        return await result if inspect.isawaitable(result) else result

    async def argument(self: Any, /, *given: Any, **named: Any) -> Any:
        return value_of(point, values_of(point, given, named))

    async def empty(self: Any, /, *given: Any, **named: Any) -> Any:
        return point.empty()

    if not point.does_nothing:
        return own
    instead = {"wrap": call_given, "chain": argument, "merge": empty, "all": empty}
    return instead.get(point.how, own)


class _WrapperCall(HookCalls):
    """The call of one hook that wraps others. Its time limit is for its own time: it does not count
    while they are active.
    """

    __slots__ = (
        "_active",
        "_point",
        "_rest",
        "_secs_left",
        "_since",
        "_values",
        "answers",
        "errors",
        "is_logged",
    )

    def __init__(self, group: OrderGroup, point: Point, rest: Rest, values: Values) -> None:
        super().__init__(group)
        self._point = point
        self._rest = rest
        self._values = values
        self._active = 0  # calls of the others that have not ended
        self._secs_left: float | None = None
        self._since = 0.0
        self.answers: list[Any] = []
        """The last result of the others, if they have returned."""
        self.errors: list[BaseException] = []
        """The errors of the others."""
        self.is_logged: bool = False
        """Whether it has failed, and that was only logged."""

    async def make(self) -> None:
        """Make the call."""
        call = self._group.current_calls()[0]
        if self._point.how == "wrap":
            key = key_of(self._point, self._values)
            args, keywords = for_hooks(self._point, {**self._values, key: self.call_next})
        else:
            args, keywords = for_hooks(self._point, self._values)
            args = (functools.partial(self._call_rest, self._values), *args)
        if call.may_wait:
            method = functools.partial(call.method, **keywords) if keywords else call.method
            self.start(0, method, args, call.name, call.secs)
        else:
            try:
                self.results[0] = await call.method(*args, **keywords)
            except BaseException as error:
                self.failed(0, error)
        await self.wait()

    async def call_next(self, /, *changed: Any, **named: Any) -> Any:
        """Call the next hook with the arguments of the call, of which some may be changed."""
        point = self._point
        values = with_changes(point, self._values, changed, named)
        if point.does_nothing and (changed or named):
            call_next = value_of(point, self._values)
            if isinstance(call_next, _AsGiven):
                call_next = call_next.call_next
            values[key_of(point, values)] = _AsGiven(call_next, changed, named)
        return await self._call_rest(values)

    async def _call_rest(self, values: Values) -> Any:
        if self.is_logged or self.is_left_behind(0):
            raise HookCancelledError(
                f"{self.describe(0)} has failed before this: it cannot call the next hook any more"
            )
        self._active += 1
        if self._secs_left is not None and self._active == 1:
            self.stop_timer(0)
            self._secs_left = max(0.0, self._secs_left - (current_clock().now() - self._since))
        try:
            answer = await self._rest(values)
            self.answers = [answer]
            return answer
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self._active -= 1
            if self._secs_left is not None:
                self.start_timer(0, self._secs_left)

    def start_timer(self, number: int, secs: float) -> None:
        self._secs_left = secs
        if not self._active and self.is_running(0):
            self._since = current_clock().now()
            super().start_timer(0, secs)

    def last_error(self) -> BaseException:
        """Return the last error of the others that is no cancel."""
        errors = [error for error in self.errors if not isinstance(error, CancelledError)]
        return errors[-1]

    def _passes(self, error: BaseException) -> bool:
        """Return whether an error is one of the others that passes through."""
        return any(error is passed for passed in self.errors)

    def suppresses(self, number: int, error: BaseException) -> bool:
        was_cut_off = (
            (self._active or self.errors)
            and not self.answers
            and all(isinstance(error, CancelledError) for error in self.errors)
        )
        self.is_logged = (
            not was_cut_off and not self._passes(error) and super().suppresses(number, error)
        )
        return self.is_logged

    def add_origin(self, number: int, error: BaseException) -> None:
        if not self._passes(error):
            super().add_origin(number, error)

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        if self._passes(cause):
            return hook_cancelled_error(f"what {self.describe(number)} wraps", cause)
        return super().cancelled_error(number, cause)


def _generator_call(registered: RegisteredHook, method: str) -> Method:
    """Return a hook's async generator as a function that wraps what its first argument calls.

    `contextlib.asynccontextmanager` would set attributes of exceptions that pass through, which
    some exceptions do not allow, and drop the result of the wrapped call.
    """
    function = getattr(registered.hook, method)

    async def call(call_next: Callable[[], Awaitable[Any]], /, *args: Any, **keywords: Any) -> Any:
        generator = function(*args, **keywords)
        if not await _reaches_yield(generator):
            return await call_next()
        try:
            result = await call_next()
        except BaseException as error:
            try:
                await generator.athrow(error)
            except StopAsyncIteration:
                return None  # it has swallowed the error
            except RuntimeError as raised:
                # Python replaces these where they leave a generator.
                if isinstance(error, StopAsyncIteration) and raised.__cause__ is error:
                    raise_unchanged(error)
                raise
            await _reject_second_yield(generator, registered.call_name(method))
        try:
            await generator.asend(result)
        except StopAsyncIteration:
            return result
        return await _reject_second_yield(generator, registered.call_name(method))

    return call


async def _reaches_yield(generator: AsyncGenerator[Any, Any]) -> bool:
    """Return whether a generator reaches its `yield`; one that returns before wraps nothing."""
    try:
        await anext(generator)
    except StopAsyncIteration:
        return False
    return True


async def _reject_second_yield(generator: AsyncGenerator[Any, Any], who: str) -> NoReturn:
    await generator.aclose()
    raise InvalidHookError(f"{who} has yielded twice; a generator that wraps has one `yield`")
