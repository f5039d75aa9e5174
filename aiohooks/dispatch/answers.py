"""One answer of several hooks, for each kind of method (`lifecycle.Point.how`).

Target         what a method calls
answer         calls it, and returns the one answer: the only one, the first, or the last of a chain
call_wrapped   each wrapping hook calls the next one, and the last of them what is wrapped
answer_plain   methods that are plain functions
InTurn         the quickest way, where no hook can wait
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks._aio.clock import current_clock
from aiohooks._aio.observers import Observer, observing
from aiohooks._aio.run_scope import current_scope
from aiohooks.dispatch.calls import (
    HookCalls,
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
    call_groups,
    failed_in_turn,
    order_groups,
)
from aiohooks.dispatch.lifecycle import Point
from aiohooks.errors import HookCancelledError, InvalidHookError, hook_cancelled_error, raise_unchanged

Keywords = Mapping[str, Any]


class Target(NamedTuple):
    """What a method calls."""

    point: Point
    groups: tuple[OrderGroup, ...]
    singles: tuple[OrderGroup, ...]
    """The same calls one by one, for methods whose hooks are called in turn."""
    wrappers: tuple[OrderGroup, ...]
    """The hooks that wrap the calls of the others, one by one."""
    is_one_call: bool
    """Whether all hooks are called together."""


def make_target(
    each: Point, hooks: Sequence[RegisteredHook], grace_secs: float, bind: Callable[[RegisteredHook, str], Method]
) -> Target:
    """Return what a method calls; `hooks` are in their order, and `bind` queues background calls."""

    def singles(hooks: list[RegisteredHook], bind: Callable[[RegisteredHook, str], Method]) -> tuple[OrderGroup, ...]:
        return tuple(OrderGroup(each.name, [one], grace_secs, bind=bind) for one in hooks)

    if each.how == "wrap":
        return Target(each, (), (), singles([*hooks], bound_method), False)
    wrappers = [one for one in hooks if inspect.isasyncgenfunction(getattr(one.hook, each.name))]
    callees = [one for one in hooks if one not in wrappers]
    if not each.is_async:
        return Target(each, (), singles(callees, bound_method), (), False)
    groups = order_groups(each.name, callees, grace_secs, bind if each.how == "none" else bound_method)
    in_turn = each.how in ("first", "chain")
    return Target(
        each, groups, singles(callees, bound_method) if in_turn else (), singles(wrappers, wrapping), not wrappers and not in_turn
    )


Own = Callable[..., Any]
"""The method of the class itself."""


async def answer(target: Target, own: Own, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call the hooks, and return the one answer; where no hook has one, that of the class itself."""

    async def call_own(args: tuple[Any, ...], keywords: Keywords) -> Any:
        return await own(*args, **keywords)

    if target.point.how == "wrap":
        return await call_wrapped(target, call_own, args, keywords)
    return await call_wrapped(target, functools.partial(_answer_hooks, target, own), args, keywords)


async def _answer_hooks(target: Target, own: Own, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Return the answer of the hooks that do not wrap: the only one, the first, or the last of a chain."""
    each, answer = target.point, None
    if each.how == "first":
        for single in target.singles:
            (answer,) = await call_groups((single,), args, keywords)
            if answer is not None:
                return answer
    elif each.how == "chain":
        given = args, keywords
        for single in target.singles:
            (answer,) = await call_groups((single,), *given)
            if answer is not None:
                given = _with_last(each, *given, answer)
        answer = _last(each, *given) if target.singles else None
    else:
        answer = only_answer(each, await call_groups(target.groups, args, keywords))
    if answer is None and each.how != "none" and not each.does_nothing:
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


class InTurn(NamedTuple):
    """Calls of hooks that cannot wait, beside which nothing is to be done."""

    point: Point
    calls: tuple[Method, ...]
    hooks: tuple[RegisteredHook, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, target: Target) -> InTurn | None:
        """Return the calls of a method, None if one of them may wait."""
        if not all(group.in_turn for group in target.groups):
            return None
        return cls(
            target.point,
            tuple(one for group in target.groups for one in group.methods),
            tuple(one for group in target.groups for one in group.hooks),
            tuple(one for group in target.groups for one in group.names),
        )

    def failed(self, left: Iterator[Method], error: BaseException) -> None:
        """Log the error of a call, or raise it; `left` are the calls behind it."""
        place = len(self.calls) - operator.length_hint(left) - 1
        try:
            failed_in_turn(self.hooks[place], self.names[place], error)
        finally:
            del error  # its traceback has this frame

    def only_answer(self, answers: Mapping[Method, Any]) -> Any:
        """Return the answer of the method."""
        return only_answer(self.point, [answers.get(call) for call in self.calls])


# -- hooks that wrap


async def call_wrapped(
    target: Target,
    innermost: Callable[[tuple[Any, ...], Keywords], Awaitable[Any]],
    args: tuple[Any, ...],
    keywords: Keywords,
    number: int = 0,
) -> Any:
    """Call a wrapping hook with a function that calls the next one, and so on; the last one calls `innermost`.

    What a hook wraps is not called again when the hook has failed and that is only logged: its answer or error counts.
    """
    if number == len(target.wrappers):
        return await innermost(args, keywords)
    group = target.wrappers[number]
    if group.hooks[0].disabled:
        return await call_wrapped(target, innermost, args, keywords, number + 1)
    wrapper = _WrapperCall(group, functools.partial(call_wrapped, target, innermost, number=number + 1))
    try:
        await wrapper.make(target.point, args, keywords)
        if not wrapper.is_logged:
            return wrapper.results[0]
        if wrapper.has_answer:
            return wrapper.answer
        if wrapper.errors:
            raise_unchanged(next(error for error in reversed(wrapper.errors) if not isinstance(error, CancelledError)))
    finally:
        wrapper.errors.clear()  # their tracebacks refer to it
    return await call_wrapped(target, innermost, args, keywords, number + 1)


class _WrapperCall(HookCalls):
    """The call of one hook that wraps others. Its time limit is for its own time: it does not count while they are active."""

    __slots__ = ("_active", "_rest", "_secs_left", "_since", "answer", "errors", "has_answer", "is_called", "is_logged")

    def __init__(self, group: OrderGroup, rest: Callable[[tuple[Any, ...], Keywords], Awaitable[Any]]) -> None:
        super().__init__(group, [None], None, None)
        self._rest = rest
        self._active = 0  # calls of the others that have not ended
        self._secs_left: float | None = None
        self._since = 0.0
        self.is_called: bool = False
        """Whether it has called the others."""
        self.has_answer: bool = False
        self.answer: Any = None
        """The last answer of the others."""
        self.errors: list[BaseException] = []
        """The errors of the others."""
        self.is_logged: bool = False
        """Whether it has failed, and that was only logged."""

    async def make(self, each: Point, args: tuple[Any, ...], keywords: Keywords) -> None:
        """Make the call."""
        group = self._group
        method, scope = group.methods[0], current_scope.get()
        if scope is not None and scope.observers:
            method = group.observed_calls(scope.observers)[0][0]
        if each.how == "wrap":
            args, keywords = _and_last(each, *_without_last(each, args, keywords), self._next_call(each, args, keywords))
        else:
            args = (functools.partial(self._call_rest, args, keywords), *args)
        if group.in_turn:
            try:
                self.results[0] = await method(*args, **keywords)
            except BaseException as error:
                self.failed(0, error)
        else:
            self.start(0, method, args, keywords, group.names[0], group.timeouts[0])
        await self.wait()

    def _next_call(self, each: Point, args: tuple[Any, ...], keywords: Keywords) -> Callable[..., Awaitable[Any]]:
        bare_args, bare_keywords = _without_last(each, args, keywords)
        last = _last(each, args, keywords)

        async def call_next(*changed: Any, **named: Any) -> Any:
            given = _changed(each, bare_args, bare_keywords, changed, named)
            return await self._call_rest(*_and_last(each, *given, last))

        return call_next

    async def _call_rest(self, args: tuple[Any, ...], keywords: Keywords) -> Any:
        if self.is_logged or self._left_behind is not None:
            raise HookCancelledError(f"{self.describe(0)} has failed before this: it cannot call the next hook any more")
        self.is_called = True
        self._stop_clock()
        try:
            self.answer = answer = await self._rest(args, keywords)
            self.has_answer = True
            return answer
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            self._start_clock()

    # -- its time limit

    def start_timer(self, number: int, secs: float) -> None:
        self._secs_left = secs
        self._run_timer()

    def _run_timer(self) -> None:
        if self._secs_left is not None and not self._active and not self._tasks[0].done():
            self._since = current_clock().now()
            super().start_timer(0, self._secs_left)

    def _stop_clock(self) -> None:
        self._active += 1
        if self._secs_left is not None and self._active == 1:
            self.stop_timer(0)
            self._secs_left = max(0.0, self._secs_left - (current_clock().now() - self._since))

    def _start_clock(self) -> None:
        self._active -= 1
        self._run_timer()

    # -- its errors

    def _passes(self, error: BaseException) -> bool:
        """Return whether an error is one of the others that passes through."""
        return any(error is one for one in self.errors)

    def suppresses(self, number: int, error: BaseException) -> bool:
        was_cut_off = self.is_called and not self.has_answer and all(isinstance(one, CancelledError) for one in self.errors)
        if was_cut_off or self._passes(error):
            return False
        self.is_logged = super().suppresses(number, error)
        return self.is_logged

    def add_origin(self, number: int, error: BaseException) -> None:
        if not self._passes(error):
            super().add_origin(number, error)

    def cancelled_error(self, number: int, cause: BaseException) -> HookCancelledError:
        if self._passes(cause):
            return hook_cancelled_error(f"what {self.describe(number)} wraps", cause)
        return super().cancelled_error(number, cause)


def wrapping(registered: RegisteredHook, method: str) -> Method:
    """Return a hook's async generator as a function that wraps what its first argument calls."""
    around = contextlib.asynccontextmanager(getattr(registered.hook, method))

    async def call(call_next: Callable[[], Awaitable[Any]], /, *args: Any, **keywords: Any) -> Any:
        async with around(*args, **keywords):
            return await call_next()
        return None  # it has swallowed the error

    return call


# -- plain functions


def answer_plain(target: Target, own: Own, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Call the hooks of a method that is a plain function, in turn, and return the one answer."""
    each, answers, scope = target.point, list[Any](), current_scope.get()
    given = args, keywords
    for single in target.singles:
        if single.hooks[0].disabled:
            continue
        answer = _call_plain(single, each.name, () if scope is None else scope.observers, *given)
        if each.how == "first" and answer is not None:
            return answer
        if each.how == "chain" and answer is not None:
            given = _with_last(each, *given, answer)
        answers.append(answer)
    answer = _last(each, *given) if each.how == "chain" else only_answer(each, answers)
    return own(*args, **keywords) if answer is None and each.how != "none" and not each.does_nothing else answer


def _call_plain(single: OrderGroup, name: str, observers: Sequence[Observer], args: tuple[Any, ...], keywords: Keywords) -> Any:
    registered = single.hooks[0]
    try:
        with observing(observers, "hook", single.names[0]):
            answer = getattr(registered.hook, name)(*args, **keywords)
    except BaseException as error:
        failed_in_turn(registered, single.names[0], error)
        return None
    registered.failures_in_a_row = 0
    return answer


# -- arguments


def positional_first(names: tuple[str, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], Keywords]:
    """Give by position what may be given so, as hooks may use other names."""
    given = [*args]
    for name in names[len(args) :]:
        if name not in keywords:
            break
        given.append(keywords.pop(name))
    return tuple(given), keywords


Arguments = tuple[tuple[Any, ...], Keywords]


def _last_name(each: Point) -> str | None:
    """Return the name of the last parameter; None if that takes any arguments by position."""
    return each.keywords[-1] if each.keywords else None if each.variadic[0] or not each.positional else each.positional[-1]


def _last(each: Point, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Return the last argument of a call, None if it is left out."""
    name = _last_name(each)
    if name is not None and name in keywords:
        return keywords[name]
    return args[-1] if args and _has_last(each, args) else None


def _has_last(each: Point, args: tuple[Any, ...]) -> bool:
    """Return whether the last argument is given by position."""
    return not each.keywords and (each.variadic[0] or len(args) == len(each.positional))


def _without_last(each: Point, args: tuple[Any, ...], keywords: Keywords) -> Arguments:
    name = _last_name(each)
    if name in keywords:
        return args, {key: value for key, value in keywords.items() if key != name}
    return (args[:-1] if _has_last(each, args) else args), keywords


def _and_last(each: Point, args: tuple[Any, ...], keywords: Keywords, last: Any) -> Arguments:
    """Add the last argument."""
    name = _last_name(each)
    if name is not None and (each.keywords or len(args) < len(each.positional) - 1):  # behind one that is left out
        return args, {**keywords, name: last}
    return (*args, last), keywords


def _with_last(each: Point, args: tuple[Any, ...], keywords: Keywords, last: Any) -> Arguments:
    """Replace the last argument."""
    return _and_last(each, *_without_last(each, args, keywords), last)


def _changed(each: Point, args: tuple[Any, ...], keywords: Keywords, new: Sequence[Any], named: Keywords) -> Arguments:
    """Return the arguments with those that a hook gives to the next one: by name, or in the place of the last of the others."""
    known = len(each.positional)
    places = [each.positional[place] if place < known else place for place in range(len(args))]
    values: dict[Any, Any] = {**dict(zip(places, args, strict=True)), **keywords, **named}
    by_position = [*places, *(name for name in each.positional[len(args) :] if name in keywords)]
    others = [one for one in by_position or each.keywords if one in values and one not in named]
    left = [*new]
    while left and others:
        values[others.pop()] = left.pop()
    return (*left, *(values.pop(place) for place in places)), values
