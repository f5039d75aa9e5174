"""One answer of several hooks, for each kind of method (`lifecycle.Point.how`).

Target    what a method calls
wrapped   each wrapping hook calls the next one, and the last of them what is wrapped
answer    calls the others, and returns the one answer: the only one, the first, or the last of a chain

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks._aio.clock import current_clock
from aiohooks._aio.run_scope import current_scope
from aiohooks.dispatch.calls import HookCalls, Method, OrderGroup, RegisteredHook, bound_method, call_groups, order_groups
from aiohooks.dispatch.lifecycle import Point
from aiohooks.errors import HookCancelledError, InvalidHookError, hook_cancelled_error, raise_unchanged

Keywords = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], Keywords]


class Target(NamedTuple):
    """What a method calls; nothing, if no hook implements it."""

    point: Point
    groups: tuple[OrderGroup, ...]
    singles: tuple[OrderGroup, ...]
    """The same calls one by one, for methods whose hooks are called in turn."""
    wrappers: tuple[OrderGroup, ...]
    """The hooks that wrap the calls of the others, one by one."""
    quick: OrderGroup | None
    """All calls, if nothing else is to be done than to make them, and none may wait."""


def make_target(
    each: Point, hooks: Sequence[RegisteredHook], grace_secs: float, bind: Callable[[RegisteredHook, str], Method]
) -> Target:
    """Return what a method calls; `bind` queues background calls."""

    def singles(hooks: list[RegisteredHook], bind: Callable[[RegisteredHook, str], Method]) -> tuple[OrderGroup, ...]:
        return tuple(OrderGroup(each.name, [one], grace_secs, bind=bind) for one in hooks)

    hooks = sorted(hooks, key=lambda one: one.registration.order)
    wraps, in_turn = each.how == "wrap", each.how in ("first", "chain")
    wrappers = [one for one in hooks if wraps or inspect.isasyncgenfunction(getattr(one.hook, each.name))]
    callees = [one for one in hooks if one not in wrappers]
    if not each.is_async:
        bind = _plain
    elif each.how != "none":
        bind = bound_method
    together = OrderGroup(each.name, callees, grace_secs, bind=bind)
    is_quick = callees and together.in_turn and not wrappers and (each.how == "none" or (each.does_nothing and not in_turn))
    return Target(
        each,
        order_groups(each.name, callees, grace_secs, bind),
        singles(callees, bind) if in_turn else (),
        singles(wrappers, bound_method if wraps else _wrapping),
        together if is_quick else None,
    )


def as_coroutine_function(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """Return a plain function as a coroutine function, which cannot wait."""

    @functools.wraps(function)
    async def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return call


def _plain(registered: RegisteredHook, method: str) -> Method:
    return as_coroutine_function(getattr(registered.hook, method))


async def answer(target: Target, own: Method, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call the hooks that do not wrap, and return the one answer; where no hook has one, that of `own`, of the class itself."""
    each, given = target.point, (args, keywords)
    if target.singles:
        for single in target.singles:
            (answer,) = await call_groups((single,), *given)
            if answer is not None:
                if each.how == "first":
                    return answer
                given = _with_last(each, *given, answer)
        answer = _last(each, *given) if each.how == "chain" else None
    else:
        answer = only_answer(each, await call_groups(target.groups, args, keywords))
    if answer is None and each.how != "none" and not (each.does_nothing and each.how != "wrap"):
        return await own(*args, **keywords)
    return answer


def only_answer(each: Point, answers: Sequence[Any]) -> Any:
    """Return the answer of a method of which nothing says whether it returns something.

    Raises:
        InvalidHookError: one of several hooks has answered.
    """
    if each.how == "none" or not answers:
        return None
    if len(answers) > 1 and any(answer is not None for answer in answers):
        raise InvalidHookError(
            f"several hooks implement {each.name}, and it returned {answers!r}; say what is its result: "
            f'results={{"{each.name}": "first"}}'
        )
    return answers[0]


# -- hooks that wrap

Rest = Callable[[tuple[Any, ...], Keywords], Awaitable[Any]]


def wrapped(target: Target, innermost: Rest) -> Rest:
    """Return what calls the first wrapping hook with what calls the next one, and so on; the last one calls `innermost`."""
    for group in reversed(target.wrappers):
        innermost = functools.partial(_call_wrapper, target.point, group, innermost)
    return innermost


async def _call_wrapper(each: Point, group: OrderGroup, rest: Rest, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call a wrapping hook with a function that calls the rest.

    What a hook wraps is not called again when the hook has failed and that is only logged: its answer or error counts.
    """
    if group.hooks[0].disabled:
        return await rest(args, keywords)
    wrapper = _WrapperCall(group, rest)
    try:
        await wrapper.make(each, args, keywords)
        if not wrapper.is_logged:
            return wrapper.results[0]
        if wrapper.answers:
            return wrapper.answers[0]
        if wrapper.errors:
            raise_unchanged(next(error for error in reversed(wrapper.errors) if not isinstance(error, CancelledError)))
    finally:
        wrapper.errors.clear()  # their tracebacks refer to it
    return await rest(args, keywords)


class _WrapperCall(HookCalls):
    """The call of one hook that wraps others. Its time limit is for its own time: it does not count while they are active."""

    __slots__ = ("_active", "_rest", "_secs_left", "_since", "answers", "errors", "is_logged")

    def __init__(self, group: OrderGroup, rest: Rest) -> None:
        super().__init__(group, [None], None, None)
        self._rest = rest
        self._active = 0  # calls of the others that have not ended
        self._secs_left: float | None = None
        self._since = 0.0
        self.answers: list[Any] = []
        """The last answer of the others, if they have answered."""
        self.errors: list[BaseException] = []
        """The errors of the others."""
        self.is_logged: bool = False
        """Whether it has failed, and that was only logged."""

    async def make(self, each: Point, args: tuple[Any, ...], keywords: Keywords) -> None:
        """Make the call."""
        scope = current_scope.get()
        calls = self._group.observed_calls(scope.observers) if scope is not None and scope.observers else self._group.calls
        call = calls[0]
        if each.how == "wrap":
            given = _with_last(each, args, keywords, _last(each, args, keywords))

            async def call_next(*changed: Any, **named: Any) -> Any:
                return await self._call_rest(*_changed(each, *given, changed, named))

            args, keywords = _with_last(each, args, keywords, call_next)
        else:
            args = (functools.partial(self._call_rest, args, keywords), *args)
        if call.may_wait:
            self.start(0, call.method, args, keywords, call.name, call.secs)
        else:
            try:
                self.results[0] = await call.method(*args, **keywords)
            except BaseException as error:
                self.failed(0, error)
        await self.wait()

    async def _call_rest(self, args: tuple[Any, ...], keywords: Keywords) -> Any:
        if self.is_logged or self._left_behind is not None:
            raise HookCancelledError(f"{self.describe(0)} has failed before this: it cannot call the next hook any more")
        self._active += 1
        if self._secs_left is not None and self._active == 1:
            self.stop_timer(0)
            self._secs_left = max(0.0, self._secs_left - (current_clock().now() - self._since))
        try:
            answer = await self._rest(args, keywords)
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
        if not self._active and not self._tasks[0].done():
            self._since = current_clock().now()
            super().start_timer(0, secs)

    def _passes(self, error: BaseException) -> bool:
        """Return whether an error is one of the others that passes through."""
        return any(error is one for one in self.errors)

    def suppresses(self, number: int, error: BaseException) -> bool:
        was_cut_off = (
            (self._active or self.errors) and not self.answers and all(isinstance(one, CancelledError) for one in self.errors)
        )
        self.is_logged = not was_cut_off and not self._passes(error) and super().suppresses(number, error)
        return self.is_logged

    def add_origin(self, number: int, error: BaseException) -> None:
        if not self._passes(error):
            super().add_origin(number, error)

    def cancelled_error(self, number: int, cause: BaseException) -> BaseException:
        if self._passes(cause):
            return hook_cancelled_error(f"what {self.describe(number)} wraps", cause)
        return super().cancelled_error(number, cause)


def _wrapping(registered: RegisteredHook, method: str) -> Method:
    """Return a hook's async generator as a function that wraps what its first argument calls."""
    around = contextlib.asynccontextmanager(getattr(registered.hook, method))

    async def call(call_next: Callable[[], Awaitable[Any]], /, *args: Any, **keywords: Any) -> Any:
        async with around(*args, **keywords):
            return await call_next()
        return None  # it has swallowed the error

    return call


# -- arguments


def positional_first(
    names: tuple[str, ...], args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give by position what may be given so, as hooks may use other names."""
    given = [*args]
    for name in names[len(args) :]:
        if name not in keywords:
            break
        given.append(keywords.pop(name))
    return tuple(given), keywords


def _last_key(each: Point, args: tuple[Any, ...], keywords: Keywords) -> str | int:
    """Return the name of the last argument, or its place where it is given by position; also of one that is left out."""
    if not each.keywords and (each.variadic[0] or not each.positional):
        return max(len(args) - 1, 0)
    name, place = (each.keywords or each.positional)[-1], len(each.positional) - 1
    return name if each.keywords or name in keywords or len(args) < place else place


def _last(each: Point, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Return the last argument of a call, None if it is left out."""
    key = _last_key(each, args, keywords)
    return keywords.get(key) if isinstance(key, str) else args[key] if key < len(args) else None


def _with_last(each: Point, args: tuple[Any, ...], keywords: Keywords, last: Any) -> Arguments:
    """Replace or add the last argument."""
    key = _last_key(each, args, keywords)
    return (args, {**keywords, key: last}) if isinstance(key, str) else ((*args[:key], last, *args[key + 1 :]), keywords)


def _changed(each: Point, args: tuple[Any, ...], keywords: Keywords, new: Sequence[Any], named: Keywords) -> Arguments:
    """Return the arguments with those that a hook gives to the next one: by name, or in the place of those before the last."""
    last = _last_key(each, args, keywords)
    keys: dict[str, str | int] = {name: place for place, name in enumerate(each.positional[: len(args)]) if place != last}
    changed = {keys.get(name, name): value for name, value in named.items()}
    values: dict[Any, Any] = {**dict(enumerate(args)), **keywords, **changed}
    named_later = (name for name in each.positional[len(args) :] if name in keywords)
    by_position = [one for one in (*range(len(args)), *named_later) if one != last]
    left, others = [*new], [one for one in by_position or each.keywords if one in values and one not in changed and one != last]
    while left and others:
        values[others.pop()] = left.pop()
    return positional_first(each.positional, (*left, *(values.pop(place) for place in range(len(args)))), values)
