"""The calls of a method for all hooks that implement it, and the one result of them.

SortedHooks     calls the hooks of a method, and makes one result of theirs, in the method's mode
combined        makes one result of the results of hooks that have all been called
WrapperCall     the call of a hook that wraps other hooks
generator_call  lets an async generator wrap other hooks

The mode of a method (`points.Point.mode`) is how the results of several hooks become one.

A wrapping hook calls other hooks itself: by an argument of the method, which is a function (mode
"wrap"), or as an async generator, whose `yield` stands for their call. Wrapping hooks are called
inside each other, like middleware. The innermost call is the wrapped call: that of all hooks that
do not wrap. The rest, for a wrapping hook, is the call of the next wrapping hook, and for the
last one the wrapped call.

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, NoReturn, cast

from aiohooks.dispatch.calls import (
    AsyncFunction,
    HookCall,
    HookCalls,
    MakeCall,
    OrderGroup,
    RegisteredHook,
    call_groups,
    hook_call,
    order_groups,
)
from aiohooks.dispatch.points import (
    NO_ARGUMENTS,
    Args,
    Arguments,
    ChainEnd,
    Keywords,
    Point,
    Values,
)
from aiohooks.errors import (
    HookCancelledError,
    InvalidArgumentError,
    InvalidHookError,
    raise_unchanged,
    safe_repr,
)

NO_RESULT: Any = object()
"""Stands for the result of a hook that has none, where None is a result."""
# The types of results that can be merged, each as a set: all results must have the same type.
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
            make_call: returns the call of a hook that does not wrap. For a background hook, this
                call queues the call of the hook.
        """
        self._point = point
        self._kind = kind
        make_wrapper = wrapper_call if point.mode == "wrap" else generator_call
        # A call may be queued only if its caller needs no result, and awaits it.
        can_queue = point.is_async and point.mode == "none"
        wrappers: list[HookCall] = []
        calls: list[HookCall] = []
        for registered in hooks:
            if point.wraps(registered.hook):
                wrappers.append(make_wrapper(registered, point.name))
            elif can_queue:
                calls.append(make_call(registered, point.name))
            else:
                calls.append(hook_call(registered, point.name))
        # Each wrapping hook is called by the one before, so each is a group of its own.
        self._wrappers = order_groups(wrappers, grace_secs, one_by_one=True)
        # In these modes, a result decides whether the next hook is called, or with which argument.
        one_by_one = point.mode in ("first", "chain")
        self._groups = order_groups(calls, grace_secs, one_by_one=one_by_one)
        groups = (*self._groups, *self._wrappers)
        self.may_wait: bool = any(group.may_wait for group in groups)
        self.fast_path: OrderGroup | None = self._make_fast_path(grace_secs)
        """The calls of all hooks as one group, which `CompositeMethod` makes itself, or None if it
        cannot. Calls that do nothing have to cost almost nothing.
        """

    def _make_fast_path(self, grace_secs: float) -> OrderGroup | None:
        """Return the calls of all hooks as one group, if they need nothing but to be called one
        after another.
        """
        point = self._point
        calls = [call for group in self._groups for call in group.calls]
        if not calls or self._wrappers or self.may_wait:
            return None
        # If all results are None, the fast path returns None. It neither calls the class's own
        # method then, nor returns a list of the results.
        if not point.none_is_result or point.mode == "all":
            return None
        # It does not stop at the first result.
        if point.mode == "first":
            return None
        # It checks the arguments only after an error. A function with `once=True` would be removed
        # by then.
        if any(call.registered.registration.once for call in calls):
            return None
        return OrderGroup(calls, grace_secs)

    def call(
        self,
        instance: object,
        args: Args,
        keywords: Keywords,
    ) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that calls the hooks, and returns what the method returns.

        Args:
            instance: the object that stands for the hooks: `self` of the class's own method.
            args: the positional arguments of the call.
            keywords: the keyword arguments of the call.
        """
        # In the mode "wrap", without a wrapping hook, this calls the function of the caller, or the
        # class's own method.
        if self._wrappers or self._point.mode == "wrap":
            values = self._point.parameters.values(args, keywords)
            return self._call_from_wrapper(0, instance, values, passed=NO_ARGUMENTS)
        return self._call_inner_hooks(instance, args, keywords)

    # -- hooks that wrap

    async def _call_from_wrapper(
        self,
        place: int,
        instance: object,
        values: Values,
        passed: Arguments,
    ) -> Any:
        """Call the wrapping hook at a place. Behind the last one, make the wrapped call.

        The hook gets a function that calls the rest: this method again, for the next place. If the
        hook is disabled, or fails and its error is only logged, the result is that of the rest. The
        rest is called now if the hook has not called it.

        Args:
            place: the place of the hook among the wrapping hooks.
            instance: the object that stands for the hooks.
            values: the arguments of the call, with the changes of the wrapping hooks before.
            passed: the arguments that the wrapping hook before gave to its function, unchanged.
                Empty if it gave none. Only the function that the caller of the method has passed,
                which ends the chain of wrapping hooks, may get them.
        """
        point = self._point
        if place == len(self._wrappers):
            # A method that does nothing stands for the function that its caller has passed.
            if point.mode == "wrap" and point.has_empty_body:
                return await _call_innermost(point, values, passed)
            args, keywords = point.parameters.for_hooks(values)
            return await self._call_inner_hooks(instance, args, keywords)
        # The group of this hook alone.
        group = self._wrappers[place]
        call_rest = functools.partial(self._call_from_wrapper, place + 1, instance)
        wrapper = WrapperCall(group, point, call_rest, values, passed)
        try:
            result = await wrapper.make()
        finally:
            # The tracebacks of these errors refer to the wrapper, which would be kept alive.
            wrapper.rest_errors.clear()
        if result is not NO_RESULT:
            return point.value_of(result)
        if wrapper.rest_results:
            return wrapper.rest_results[0]
        return await call_rest(values, passed)

    # -- hooks that do not wrap

    async def _call_inner_hooks(
        self,
        instance: object,
        args: Args,
        keywords: Keywords,
    ) -> Any:
        """Call the hooks that do not wrap. If they have no result, call the class's own method."""
        point = self._point
        if not self._groups:
            return await self._call_own(instance, args, keywords)
        hook_arguments: Arguments = args, keywords
        # Hooks may have other names for their parameters, so keyword arguments are turned into
        # positional ones. This also rejects wrong arguments before any hook is called: they are the
        # fault of the caller, and no failure of a hook.
        parameters = point.parameters
        is_complete = parameters.fewest <= len(args) <= parameters.most
        if keywords or point.mode == "chain" or not is_complete:
            values = parameters.values(args, keywords)
            hook_arguments = parameters.for_hooks(values)
        if point.mode in ("first", "chain"):
            result = await self._call_one_by_one(hook_arguments)
            if result is not None:
                # The end of a chain may have None as its value, which is the result, too.
                return point.value_of(result)
        else:
            results = await call_groups(self._groups, *hook_arguments)
            result = combined(point, results)
        if result is not None or point.none_is_result:
            return result
        return await self._call_own(instance, args, keywords)

    async def _call_one_by_one(self, arguments: Arguments) -> Any:
        """Call the hooks one after another, and return the result that counts.

        In the mode "first", this is the first result that is not None. In a chain, it is the last
        such result: each one replaces an argument of the calls that follow. A `ChainEnd` is
        returned as it is.
        """
        parameters = self._point.parameters
        values: Values = {}
        last_result: Any = None
        for group in self._groups:
            # Each hook is a group of its own here (`one_by_one`), so there is one result.
            (result,) = await call_groups((group,), *arguments)
            if result is None:
                continue
            if isinstance(result, ChainEnd) or self._point.mode == "first":
                return result
            # Read at the first result of a chain. From then on, they change with each result.
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
        """Return the result of a call if no hook has one: that of the class's own method.

        If the body of that method is empty, a chain returns its argument as it was given, and the
        modes "merge" and "all" return an empty result.
        """
        point = self._point
        if point.has_empty_body and point.mode in ("chain", "merge", "all"):
            # This also rejects wrong arguments, as the method itself would.
            values = point.parameters.values(args, keywords)
            if point.mode == "chain":
                return point.parameters.chosen_value(values)
            return point.empty()
        own_method = own_attribute(self._kind, instance, point.name)
        result = own_method(*args, **keywords)
        if point.is_async and inspect.isawaitable(result):
            return await result
        return result


def own_attribute(
    kind: type[Any],
    owner: Any,
    name: str,
) -> Any:
    """Return an attribute of the hook interface itself, as if there was no hook.

    Args:
        kind: the class of the object that stands for the hooks, in which hooks set attributes.
        owner: the object that stands for the hooks, or its class.
        name: the name of the attribute.
    """
    # `super` looks the name up behind `kind`: in the hook interface and its bases.
    own = cast("Any", super(kind, owner))
    return getattr(own, name)


# -- results


def combined(point: Point, results: Iterable[Any]) -> Any:
    """Return the one result of a method, in its mode, after all hooks have been called.

    Args:
        point: the method.
        results: the results of the hooks, in the order of their calls.

    Raises:
        InvalidHookError: several hooks were called, there is a result, and nothing says which one
            counts; or the results cannot be merged.
    """
    if point.mode == "none":
        return None
    values = [point.value_of(result) for result in results]
    if point.mode == "all":
        return values
    if point.mode == "merge":
        return _merged(point, values)
    first = next((value for value in values if value is not None), None)
    # In the mode "together", the first result counts. Without a mode, nothing says which result of
    # several hooks counts.
    is_ambiguous = point.mode != "together" and len(values) > 1
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
    parts = [result for result in results if result is not None]
    if not parts:
        return None
    kinds: set[Any] = {type(part) for part in parts}
    if kinds in _MERGEABLE:
        (kind,) = kinds
        merged: Any = kind()
        for part in parts:
            if kind is dict:
                merged.update(part)
            else:
                merged += part
        # The merged dict is shorter than its parts together if two of them have the same key.
        if len(merged) == sum(map(len, parts)):
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
    """Call the function that the caller of the method has passed as an argument: the innermost of
    the wrapped calls, as `app` in `handle(request, app)`.

    Its positional arguments are those that the last wrapping hook has passed, or else those of the
    call, as many as it takes. It also gets the keyword arguments of the call. Those that the hook
    has passed alone are among `values`.

    Args:
        point: the method.
        values: the arguments of the call, with the changes of the wrapping hooks.
        passed: the arguments that the last wrapping hook has passed, empty if it has passed none.

    Raises:
        InvalidArgumentError: the argument is not callable.
    """
    innermost = point.parameters.chosen_value(values)
    if not callable(innermost):
        raise InvalidArgumentError(
            f"{point.name} got {safe_repr(innermost)} as the next; give what the last hook calls"
        )
    args, keywords = point.parameters.for_function(values, innermost)
    passed_args, passed_keywords = passed
    if passed_args:
        # The hook has chosen the positional arguments. `args` might repeat some that the hook has
        # passed by name.
        args = passed_args
        keywords = {**keywords, **passed_keywords}
    result = innermost(*args, **keywords)
    return await result if inspect.isawaitable(result) else result


class WrapperCall(HookCalls):
    """The call of one wrapping hook.

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
        # A failure that is only logged leaves this.
        self.results[0] = NO_RESULT
        self._point = point
        # The function that calls the rest, with the values and the passed arguments for it.
        self._rest = rest
        self._values = values
        self._passed = passed
        self._has_called_rest = False
        # A list, as None is a result, too.
        self.rest_results: list[Any] = []
        """The result of the last call of the rest, or empty if there is none."""
        self.rest_errors: list[BaseException] = []
        """The errors of the rest, which pass through the hook and are not its own."""
        self.has_logged_failure: bool = False
        """Whether the hook has failed with an error that is only logged."""

    async def make(self) -> Any:
        """Call the hook, and return its result, or `NO_RESULT` if it has none."""
        parameters = self._point.parameters
        if self._point.mode == "wrap":
            # The chosen argument of the method is the function that calls the rest.
            values = {**self._values, parameters.chosen: self.call_next}
            args, keywords = parameters.for_hooks(values)
        else:
            # The function of `generator_call` takes `call_next` as an additional first argument.
            args, keywords = parameters.for_hooks(self._values)
            args = (self.call_next, *args)
        functions = self._group.functions_with((), keywords)
        self.start_all(functions, [args])
        await self.wait()
        return self.results[0]

    async def call_next(self, /, *args: Any, **keywords: Any) -> Any:
        """Call the rest: the other hooks and the method itself. Return their result.

        The wrapping hook gets this function, and may pass it changed arguments.
        """
        # A task that the hook has started may call this too late: after the failure of the hook was
        # logged and the rest was called without it, or after the hook itself was left behind.
        if self.has_logged_failure or self.is_left_behind(0):
            raise HookCancelledError(
                f"{self.describe(0)} has failed before this: it cannot call the next hook any more"
            )
        # If the hook changes nothing, the rest gets the arguments that the hook has got.
        values = self._values
        passed = self._passed
        if args or keywords:
            values = self._point.parameters.changed(values, args, keywords)
            passed = args, keywords
        self._has_called_rest = True
        try:
            result = await self._rest(values, passed)
        except BaseException as error:
            self.rest_errors.append(error)
            raise
        # The hook may call the rest several times. Then the last result counts.
        self.rest_results = [result]
        return result

    def _is_of_rest(self, error: BaseException) -> bool:
        """Return whether this is an error of the rest, which only passes through the hook."""
        return any(error is rest_error for rest_error in self.rest_errors)

    def suppresses(self, number: int, error: BaseException) -> bool:
        if self._is_of_rest(error):
            # The error is no failure of this hook: it is neither counted nor logged here.
            return False
        if self._has_called_rest and not self.rest_results:
            # The error must be raised, even with `on_error="log"`: the call has no result, and the
            # rest, which may have had effects, must not be called again to get one.
            self._group.hooks[0].count_failure(error)
            return False
        self.has_logged_failure = super().suppresses(number, error)
        return self.has_logged_failure

    def add_origin(self, number: int, error: BaseException) -> None:
        # An error of the rest has its origin already.
        if not self._is_of_rest(error):
            super().add_origin(number, error)


def wrapper_call(
    registered: RegisteredHook,
    method: str,
    function: AsyncFunction | None = None,
) -> HookCall:
    """Return the call of a wrapping hook: of its method, or of `function`, which calls the method.

    The result of a skipped call is `NO_RESULT`, because None may be the result of the method.
    """
    return hook_call(registered, method, function, no_result=NO_RESULT)


def generator_call(registered: RegisteredHook, method: str) -> HookCall:
    """Return the call of a hook's method that is an async generator.

    The function of this call gets `call_next` as its first argument. The part of the generator
    before the `yield` runs before `call_next` is called, the part behind it afterwards.

    This does not use `contextlib.asynccontextmanager`, which sets attributes of exceptions that
    pass through (some exceptions do not allow this), and has no place for the result of the
    wrapped call, which the `yield` returns.
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
            # The generator has returned before a `yield`, and wraps nothing. This is not called in
            # the `except`: errors would have the StopAsyncIteration as their context.
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

    return wrapper_call(registered, method, call)


async def _throw(
    generator: AsyncGenerator[Any, Any],
    error: BaseException,
    who: str,
) -> None:
    """Raise the error of a wrapped call at the `yield` of a generator.

    Return if the generator swallows the error. Raise if the generator raises an error, the same or
    another one.

    Args:
        generator: the generator, which is suspended at its `yield`.
        error: the error of the wrapped call.
        who: the name of the call in messages.
    """
    try:
        await generator.athrow(error)
    except StopAsyncIteration:
        # The generator has ended without an error: it has swallowed this one.
        return
    except RuntimeError as raised:
        # Python replaces a StopAsyncIteration that leaves a generator by a RuntimeError. If it was
        # the error of the wrapped call, the caller gets that one.
        if isinstance(error, StopAsyncIteration) and raised.__cause__ is error:
            raise_unchanged(error)
        raise
    # `athrow` has returned, so the generator has yielded again.
    await _reject_second_yield(generator, who)


async def _reject_second_yield(
    generator: AsyncGenerator[Any, Any],
    who: str,
) -> NoReturn:
    """Close a generator that is suspended at a second `yield`, and raise."""
    await generator.aclose()
    raise InvalidHookError(f"{who} has yielded twice; a generator that wraps has one `yield`")
