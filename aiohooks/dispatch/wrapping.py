"""Hooks that wrap: each calls the next one, and the last one what is wrapped.

wrapped         calls the hooks that wrap
call_given      calls what the caller has given as the next
generator_call  an async generator as a function that wraps
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

from aiohooks.dispatch.arguments import Arguments, Keywords, Values
from aiohooks.dispatch.calls import (
    HookCalls,
    Method,
    OrderGroup,
    RegisteredHook,
    run_observers,
)
from aiohooks.dispatch.ways import Point
from aiohooks.errors import (
    HookCancelledError,
    InvalidArgumentError,
    InvalidHookError,
    raise_unchanged,
    safe_repr,
)

Innermost = Callable[[tuple[Any, ...], Keywords], Awaitable[Any]]
Rest = Callable[[Values, Arguments], Awaitable[Any]]
"""Calls the next hook, or what is wrapped. The arguments are the values of the call, and what the
last hook before has passed.
"""


def wrapped(point: Point, wrappers: Sequence[OrderGroup], innermost: Innermost) -> Rest:
    """Return a function that calls the first wrapping hook.

    Each hook gets a function that calls the next hook; the last one gets one that calls
    `innermost`, or, if that would do nothing, what the caller has given as the next.
    """

    def call_innermost(values: Values, passed: Arguments) -> Awaitable[Any]:
        # With the method of the class, what the last hook passes would have to be its arguments.
        if point.how == "wrap" and point.does_nothing:
            return call_given(point, values, passed)
        return innermost(*point.parameters.for_hooks(values))

    rest: Rest = call_innermost
    for group in reversed(wrappers):
        rest = functools.partial(_call_wrapper, point, group, rest)
    return rest


async def _call_wrapper(
    point: Point,
    group: OrderGroup,
    rest: Rest,
    values: Values,
    passed: Arguments,
) -> Any:
    """Call a wrapping hook, which gets a function that calls the rest.

    If its error is only logged, the result of the rest is that of the call. The rest is called now
    if the hook has not called it.
    """
    registered = group.hooks[0]
    if not registered.may_be_called():
        return await rest(values, passed)
    wrapper = WrapperCall(group, point, rest, values, passed)
    try:
        result = await wrapper.make()
    finally:
        wrapper.errors.clear()  # their tracebacks refer to it
    if not wrapper.is_logged:
        return point.value_of(result)
    if wrapper.answers:
        return wrapper.answers[0]
    return await rest(values, passed)


async def call_given(point: Point, values: Values, passed: Arguments) -> Any:
    """Call what the caller has given as the next.

    It gets the positions that the last hook passes, or else those of the call, as many as it takes;
    and the keywords of the call.

    Raises:
        InvalidArgumentError: it cannot be called.
    """
    given = point.parameters.chosen_value(values)
    if not callable(given):
        raise InvalidArgumentError(
            f"{point.name} got {safe_repr(given)} as the next; give what the last hook calls"
        )
    args, keywords = point.parameters.for_function(values, given)
    passed_args, passed_keywords = passed
    if passed_args:
        args = passed_args
        keywords = {**keywords, **passed_keywords}
    result = given(*args, **keywords)
    return await result if inspect.isawaitable(result) else result


class WrapperCall(HookCalls):
    """The call of a hook that wraps others, which are called the rest here."""

    def __init__(
        self,
        group: OrderGroup,
        point: Point,
        rest: Rest,
        values: Values,
        passed: Arguments,
    ) -> None:
        super().__init__(group)
        self._point = point
        self._rest = rest
        self._values = values
        self._passed = passed
        self._calls_rest = False  # whether the hook has called the rest
        self.answers: list[Any] = []
        """The last result of the rest, if there is any."""
        self.errors: list[BaseException] = []
        """The errors of the rest."""
        self.is_logged: bool = False
        """Whether the hook has failed with an error that is only logged."""

    async def make(self) -> Any:
        """Make the call, and return the result of the hook."""
        parameters = self._point.parameters
        if self._point.how == "wrap":
            values = {**self._values, parameters.chosen: self.call_next}
            args, keywords = parameters.for_hooks(values)
        else:
            args, keywords = parameters.for_hooks(self._values)
            args = (self.call_next, *args)
        methods = self._group.methods_with(run_observers(), keywords)
        (result,) = await self.call_together(methods, args)
        return result

    async def call_next(self, /, *args: Any, **keywords: Any) -> Any:
        """Call the rest with the arguments of the call, of which some may be changed."""
        if self.is_logged or self.is_left_behind(0):
            raise HookCancelledError(
                f"{self.describe(0)} has failed before this: it cannot call the next hook any more"
            )
        # Without changes, what the hook before has passed stands.
        values = self._values
        passed = self._passed
        if args or keywords:
            values = self._point.parameters.changed(values, args, keywords)
            passed = args, keywords
        self._calls_rest = True
        try:
            result = await self._rest(values, passed)
        except BaseException as error:
            self.errors.append(error)
            raise
        self.answers = [result]
        return result

    def _passes(self, error: BaseException) -> bool:
        """Return whether an error of the rest passes through the hook."""
        return any(error is passed for passed in self.errors)

    def suppresses(self, number: int, error: BaseException) -> bool:
        if self._passes(error):
            return False
        if self._calls_rest and not self.answers:
            self._group.hooks[0].count_failure(error)
            return False  # there would be no result
        self.is_logged = super().suppresses(number, error)
        return self.is_logged

    def add_origin(self, number: int, error: BaseException) -> None:
        if not self._passes(error):
            super().add_origin(number, error)


def generator_call(registered: RegisteredHook, method: str) -> Method:
    """Return a method of a hook, an async generator, as a function that gets `call_next`.

    The part before the `yield` runs before `call_next` is called, the rest afterwards.

    `contextlib.asynccontextmanager` would set attributes of exceptions that pass through, which
    some exceptions do not allow, and drop the result of the wrapped call.
    """
    function = getattr(registered.hook, method)
    who = registered.call_name(method)

    async def call(call_next: Callable[[], Awaitable[Any]], /, *args: Any, **keywords: Any) -> Any:
        generator = function(*args, **keywords)
        if not await _reaches_yield(generator):
            return await call_next()
        try:
            result = await call_next()
        except BaseException as error:
            await _throw(generator, error, who)
            return None
        try:
            await generator.asend(result)
        except StopAsyncIteration:
            return result
        return await _reject_second_yield(generator, who)

    return call


async def _reaches_yield(generator: AsyncGenerator[Any, Any]) -> bool:
    """Return whether a generator reaches its `yield`; one that returns before wraps nothing."""
    try:
        await anext(generator)
    except StopAsyncIteration:
        return False
    return True


async def _throw(generator: AsyncGenerator[Any, Any], error: BaseException, who: str) -> None:
    """Raise the error of a wrapped call at the `yield`; return if the generator swallows it."""
    try:
        await generator.athrow(error)
    except StopAsyncIteration:
        return
    except RuntimeError as raised:
        # Python makes a RuntimeError of a StopAsyncIteration that leaves a generator.
        if isinstance(error, StopAsyncIteration) and raised.__cause__ is error:
            raise_unchanged(error)
        raise
    await _reject_second_yield(generator, who)


async def _reject_second_yield(generator: AsyncGenerator[Any, Any], who: str) -> NoReturn:
    await generator.aclose()
    raise InvalidHookError(f"{who} has yielded twice; a generator that wraps has one `yield`")
