"""The calls of a method for all hooks that implement it, and the one result of them.

SortedHooks   calls the hooks of a method, and returns one result (`ways.Point.how`)
WrapperCall   the call of a hook that wraps others

A hook wraps others if it calls them itself: by an argument of the method (the way "wrap"), or as an
async generator, whose `yield` stands for their call. Wrapping hooks are called one inside the
other, and inside of the last one all other hooks, which is the wrapped call.

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, NoReturn, cast

from aiohooks.dispatch.calls import (
    HookCall,
    HookCalls,
    MakeCall,
    OrderGroup,
    RegisteredHook,
    call_groups,
    hook_call,
    order_groups,
    plain_call,
)
from aiohooks.dispatch.ways import NO_ARGUMENTS, Args, Arguments, ChainEnd, Keywords, Point, Values
from aiohooks.errors import (
    HookCancelledError,
    InvalidArgumentError,
    InvalidHookError,
    raise_unchanged,
    safe_repr,
)

_MERGEABLE: list[set[Any]] = [{list}, {tuple}, {dict}]


class SortedHooks:
    """The hooks that implement a method, sorted for its calls."""

    def __init__(
        self,
        point: Point,
        kind: type[Any],
        hooks: Collection[RegisteredHook],
        grace_secs: float,
        make_call: MakeCall,
    ) -> None:
        """Sort the hooks.

        Args:
            point: the method.
            kind: the class of the object that stands for the hooks.
            hooks: the hooks that implement the method, in registration order.
            grace_secs: how long cancelled calls may take to end.
            make_call: returns the call of a hook, which may queue it.
        """
        self._point = point
        self._kind = kind
        if not point.is_async:
            make_call = plain_call
        elif point.how != "none":
            # A call whose result counts is not queued.
            make_call = hook_call
        wrapping = [registered for registered in hooks if point.wraps(registered.hook)]
        self._wrappers = order_groups(
            point.name,
            wrapping,
            grace_secs,
            hook_call if point.how == "wrap" else generator_call,
            one_by_one=True,
        )
        self._groups = order_groups(
            point.name,
            [registered for registered in hooks if not point.wraps(registered.hook)],
            grace_secs,
            make_call,
            # A result decides whether the next hook is called, or with which argument.
            one_by_one=point.how in ("first", "chain"),
        )
        self.once: list[RegisteredHook] = [
            registered for registered in hooks if registered.registration.once
        ]
        """The hooks that are removed by this call."""
        groups = (*self._groups, *self._wrappers)
        self.may_wait: bool = not all(group.in_turn for group in groups)
        self.quick: OrderGroup | None = None
        """All calls, if none may wait and nothing else has to be done. This is the path that has to
        cost almost nothing.
        """
        is_simple = point.how == "none" or (
            point.how in ("any", "one", "together") and point.does_nothing
        )
        calls_more = wrapping or self.once or self.may_wait
        if self._groups and is_simple and not calls_more:
            in_order = [registered for group in self._groups for registered in group.hooks]
            self.quick = OrderGroup(point.name, in_order, grace_secs, make_call)

    def call(
        self,
        instance: object,
        args: Args,
        keywords: Keywords,
    ) -> Coroutine[Any, Any, Any]:
        """Return a call of the hooks, whose result is that of the method.

        Args:
            instance: the object that stands for the hooks.
            args: the positions of the call.
            keywords: the keywords of the call.
        """
        if self._wrappers or self._point.how == "wrap":
            values = self._point.parameters.values(args, keywords)
            return self._call_wrapper(0, instance, values, NO_ARGUMENTS)
        return self._call_wrapped(instance, args, keywords)

    # -- hooks that wrap

    async def _call_wrapper(
        self,
        place: int,
        instance: object,
        values: Values,
        passed: Arguments,
    ) -> Any:
        """Call the wrapping hook at a place. Behind the last one, make the wrapped call.

        The hook gets a function that calls this again for the next place. If its own error is only
        logged, the result is that of the next hook, which is called now if the hook has not called
        it.

        Args:
            place: the place of the hook among the wrapping hooks.
            instance: the object that stands for the hooks.
            values: the arguments of the call, with the changes of the hooks before.
            passed: the arguments that the hook before has passed as they are, for a function that
                the caller of the method has given. Empty if it has passed none.
        """
        point = self._point
        if place == len(self._wrappers):
            # The class's own method would need the arguments of the call, which were not passed.
            if point.how == "wrap" and point.does_nothing:
                return await _call_innermost(point, values, passed)
            args, keywords = point.parameters.for_hooks(values)
            return await self._call_wrapped(instance, args, keywords)
        group = self._wrappers[place]
        call_rest = functools.partial(self._call_wrapper, place + 1, instance)
        if not group.hooks[0].may_be_called():
            return await call_rest(values, passed)
        wrapper = WrapperCall(group, point, call_rest, values, passed)
        try:
            result = await wrapper.make()
        finally:
            wrapper.errors.clear()  # their tracebacks refer to it
        if not wrapper.is_logged:
            return point.value_of(result)
        if wrapper.answers:
            return wrapper.answers[0]
        return await call_rest(values, passed)

    # -- the others

    async def _call_wrapped(
        self,
        instance: object,
        args: Args,
        keywords: Keywords,
    ) -> Any:
        """Call the hooks that do not wrap, or the class's own method if they have no result."""
        point = self._point
        if not self._groups:
            return await self._call_own(instance, args, keywords)
        args_of_hooks: Arguments = args, keywords
        # Also for a chain, whose arguments are rejected before its first hook is called.
        if keywords or point.how == "chain":
            values = point.parameters.values(args, keywords)
            args_of_hooks = point.parameters.for_hooks(values)
        if point.how in ("first", "chain"):
            result = await self._call_one_by_one(args_of_hooks)
        else:
            results = await call_groups(self._groups, *args_of_hooks)
            result = combined(point, results)
        # None is a result, too, of a hook that calls the next one itself.
        is_answered = point.how == "none" or point.does_nothing or point.calls_next
        if result is None and (point.how in ("chain", "merge") or not is_answered):
            return await self._call_own(instance, args, keywords)
        return result

    async def _call_one_by_one(self, arguments: Arguments) -> Any:
        """Call the hooks one after another, and return the result that counts.

        It is the first one that is not None. In a chain, it is the last one: each result replaces
        an argument of the calls that follow.
        """
        parameters = self._point.parameters
        values: Values = {}
        last_result: Any = None
        for group in self._groups:
            (result,) = await call_groups((group,), *arguments)
            if result is None:
                continue
            if isinstance(result, ChainEnd) or self._point.how == "first":
                return self._point.value_of(result)
            values = values or parameters.values(*arguments)
            values[parameters.chosen] = result
            arguments = parameters.for_hooks(values)
            last_result = result
        return last_result

    async def _call_own(
        self,
        instance: object,
        args: Args,
        keywords: Keywords,
    ) -> Any:
        """Call the class's own method, as no hook has a result.

        If its body does nothing, a chain returns its argument, and a merge or a list of all results
        is empty.
        """
        point = self._point
        if point.does_nothing and point.how in ("chain", "merge", "all"):
            values = point.parameters.values(args, keywords)
            if point.how == "chain":
                return point.parameters.chosen_value(values)
            return point.empty()
        own_method = own_attribute(self._kind, instance, point.name)
        result = own_method(*args, **keywords)
        if point.is_async and inspect.isawaitable(result):
            return await result
        return result


def own_attribute(kind: type[Any], owner: Any, name: str) -> Any:
    """Return an attribute of the hook interface itself, as if there was no hook.

    Args:
        kind: the class of the object that stands for the hooks.
        owner: the object or its class, of which the attribute is.
        name: the name of the attribute.
    """
    own = cast("Any", super(kind, owner))
    return getattr(own, name)


# -- results


def combined(point: Point, results: Iterable[Any]) -> Any:
    """Return the result of a call of a method whose hooks have all been called.

    Args:
        point: the method.
        results: the results of the hooks.

    Raises:
        InvalidHookError: several hooks were called, there is a result, and nothing says which one
            counts; or the results cannot be merged.
    """
    if point.how == "none":
        return None
    values = [point.value_of(result) for result in results]
    if point.how == "all":
        return values
    if point.how == "merge":
        return _merged(point, values)
    first = next((value for value in values if value is not None), None)
    # Only where the interface does not say whether the method returns something.
    is_ambiguous = point.how != "together" and len(values) > 1
    if is_ambiguous and first is not None:
        raise InvalidHookError(
            f"{point.label} got the results {safe_repr(values)}; say which one counts:"
            f" {point.advice}"
        )
    return first


def _merged(point: Point, results: list[Any]) -> Any:
    """Join the results of hooks in a new list, tuple or dict; return None if there are none.

    Raises:
        InvalidHookError: the results have different types, or a key comes from two hooks.
    """
    given = [result for result in results if result is not None]
    if not given:
        return None
    kinds: set[Any] = {type(result) for result in given}
    if kinds in _MERGEABLE:
        (kind,) = kinds
        merged: Any = kind()
        for result in given:
            if kind is dict:
                merged.update(result)
            else:
                merged += result
        # It is shorter if two dicts have a key.
        if len(merged) == sum(map(len, given)):
            return merged
    raise InvalidHookError(
        f"{point.label} got the results {safe_repr(results)}, which cannot be merged; let all hooks"
        " return lists, tuples, or dicts of different keys; or None"
    )


# -- hooks that wrap


async def _call_innermost(
    point: Point,
    values: Values,
    passed: Arguments,
) -> Any:
    """Call the function that the caller of the method has passed as the next one.

    It gets the positions that the last hook passes, or else the positions of the call, as many as
    it takes, and the keywords of the call.

    Raises:
        InvalidArgumentError: it cannot be called.
    """
    innermost = point.parameters.chosen_value(values)
    if not callable(innermost):
        raise InvalidArgumentError(
            f"{point.name} got {safe_repr(innermost)} as the next; give what the last hook calls"
        )
    args, keywords = point.parameters.for_function(values, innermost)
    passed_args, passed_keywords = passed
    if passed_args:
        args = passed_args
        keywords = {**keywords, **passed_keywords}
    result = innermost(*args, **keywords)
    return await result if inspect.isawaitable(result) else result


class WrapperCall(HookCalls):
    """The call of one hook that wraps others.

    The rest is the call of the next wrapping hook, or behind the last one the wrapped call.
    """

    def __init__(
        self,
        group: OrderGroup,
        point: Point,
        rest: Callable[[Values, Arguments], Awaitable[Any]],
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
        methods = self._group.methods_with((), keywords)
        self.start_all(methods, [args])
        await self.wait()
        return self.results[0]

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
        """Return whether this is an error of the rest, which only passes through the hook."""
        return any(error is passed for passed in self.errors)

    def suppresses(self, number: int, error: BaseException) -> bool:
        if self._passes(error):
            return False
        if self._calls_rest and not self.answers:
            # The rest must not be called twice, so that the call would have no result.
            self._group.hooks[0].count_failure(error)
            return False
        self.is_logged = super().suppresses(number, error)
        return self.is_logged

    def add_origin(self, number: int, error: BaseException) -> None:
        if not self._passes(error):
            super().add_origin(number, error)


def generator_call(registered: RegisteredHook, method: str) -> HookCall:
    """Return the call of a hook's method, an async generator, as a function that gets `call_next`.

    The part before the `yield` runs before `call_next` is called, the rest afterwards.

    `contextlib.asynccontextmanager` would set attributes of exceptions that pass through, which
    some exceptions do not allow, and drop the result of the wrapped call.
    """
    function = getattr(registered.hook, method)
    who = registered.call_name(method)

    async def call(
        call_next: Callable[[], Awaitable[Any]],
        /,
        *args: Any,
        **keywords: Any,
    ) -> Any:
        generator = function(*args, **keywords)
        has_yielded = True
        try:
            await anext(generator)
        except StopAsyncIteration:
            has_yielded = False
        if not has_yielded:
            # It wraps nothing. Not in the `except`: an error would have the other as its context.
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

    return hook_call(registered, method, call)


async def _throw(
    generator: AsyncGenerator[Any, Any],
    error: BaseException,
    who: str,
) -> None:
    """Raise the error of a wrapped call at the `yield`. Return if the generator swallows it."""
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


async def _reject_second_yield(
    generator: AsyncGenerator[Any, Any],
    who: str,
) -> NoReturn:
    await generator.aclose()
    raise InvalidHookError(f"{who} has yielded twice; a generator that wraps has one `yield`")
