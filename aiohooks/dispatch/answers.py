"""One result of several hooks, for each kind of method (`lifecycle.Point.how`).

Target    what a method calls
wrapped   each wrapping hook calls the next one, and the last of them what is wrapped
observe   calls the hooks that only observe, before the others
answer    calls the others, and returns the one result: the only one, the first, the last of a
          chain, or all as one

A plain function is called as a coroutine function that cannot wait.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohooks._core.clock import current_clock
from aiohooks._core.diagnostics import logger
from aiohooks.dispatch.calls import (
    HookCalls,
    Method,
    OrderGroup,
    RegisteredHook,
    bound_method,
    call_groups,
    order_groups,
)
from aiohooks.dispatch.lifecycle import Point
from aiohooks.errors import (
    HookCancelledError,
    InvalidArgumentError,
    InvalidHookError,
    hook_cancelled_error,
    raise_unchanged,
    safe_repr,
)

Keywords = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], Keywords]


class Target(NamedTuple):
    """What a method calls; nothing, if no hook implements it."""

    point: Point
    groups: tuple[OrderGroup, ...]
    until_answered: tuple[OrderGroup, ...]
    """The same calls, one by one or those that race, where a result decides what is called next."""
    wrappers: tuple[OrderGroup, ...]
    """The hooks that wrap the calls of the others, one by one."""
    observers: tuple[OrderGroup, ...]
    """The calls of hooks whose results do not count."""
    quick: OrderGroup | None
    """All calls, if nothing else is to be done than to make them, and none may wait."""

    @property
    def may_wait(self) -> bool:
        """Whether one of the calls may wait."""
        return not all(group.in_turn for group in (*self.groups, *self.wrappers, *self.observers))


def make_target(
    each: Point,
    hooks: Iterable[RegisteredHook],
    grace_secs: float,
    bind: Callable[[RegisteredHook, str], Method],
    *,
    is_reverse: bool = False,
) -> Target:
    """Return what a method calls; `bind` queues background calls. With `is_reverse` the last hook
    is the first.
    """
    step = -1 if is_reverse else 1

    def singles(
        hooks: list[RegisteredHook], bind: Callable[[RegisteredHook, str], Method]
    ) -> tuple[OrderGroup, ...]:
        return tuple(
            OrderGroup(each.name, [one], grace_secs, bind=bind, wraps=hooks is wrappers)
            for one in hooks
        )

    hooks = sorted(hooks, key=lambda one: one.registration.order)[::step]
    wraps, in_turn, races = each.how == "wrap", each.how in ("first", "chain"), each.how == "race"
    wrappers = [
        one for one in hooks if wraps or inspect.isasyncgenfunction(getattr(one.hook, each.name))
    ]
    observers = [one for one in hooks if each.how != "none" and one.registration.observer]
    callees = [one for one in hooks if one not in wrappers and one not in observers]
    if not each.is_async:
        bind = _plain
    elif each.how != "none":
        bind = bound_method
    together = OrderGroup(each.name, callees, grace_secs, bind=bind)
    is_one_call = each.how == "none" or (each.does_nothing and not in_turn and not races)
    is_quick = callees and together.in_turn and not wrappers and not observers and is_one_call
    groups = order_groups(each.name, callees, grace_secs, bind)[::step]
    for group in groups if races else ():
        group.in_turn = False  # one that has a result ends the others
    return Target(
        each,
        groups,
        singles(callees, bind) if in_turn else groups if races else (),
        singles(wrappers, bound_method if wraps else _wrapping),
        order_groups(each.name, observers, grace_secs, bind)[::step],
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
    """Call the hooks that do not wrap, and return the one result; where no hook has one, that of
    `own`, of the class itself.
    """
    each, given = target.point, (args, keywords)
    if target.until_answered:
        for group in target.until_answered:
            answer = _first(
                await call_groups((group,), *given, calls_as=_Race if each.how == "race" else None)
            )
            if answer is not None:
                if each.how != "chain":
                    return answer
                given = _with_argument(each, *given, answer)
        answer = _argument(each, *given) if each.how == "chain" else None
    else:
        answer = only_answer(target, await call_groups(target.groups, args, keywords))
    is_answered = (
        bool(target.groups) if each.calls_next else each.how == "none" or each.does_nothing
    )
    if answer is None and not is_answered:
        return await own(*args, **keywords)
    return answer


def only_answer(target: Target, answers: Sequence[Any]) -> Any:
    """Return the one result of hooks that were called together.

    Raises:
        InvalidHookError: one of several hooks returned a result, and nothing says what that means;
            or results cannot be merged.
    """
    each = target.point
    if each.how == "none":
        if answers.count(None) < len(answers):
            _log_dropped(target.groups, answers, "the method returns None")
        return None
    if each.how == "together":
        return _first(answers)
    if each.how == "merge":
        names = (call.name for group in target.groups for call in group.calls)
        return _merged(
            [
                (name, answer)
                for name, answer in zip(names, answers, strict=True)
                if answer is not None
            ]
        )
    if len(answers) > 1 and _first(answers) is not None:
        raise InvalidHookError(
            f"several hooks implement {each.name}, and it returned {answers!r}; say what is its"
            " result: "
            f'results="first", or {{"{each.name}": "first"}}'
        )
    return answers[0] if answers else None


def _first(answers: Sequence[Any]) -> Any:
    return next((answer for answer in answers if answer is not None), None)


def _log_dropped(groups: Sequence[OrderGroup], answers: Sequence[Any], reason: str) -> None:
    calls = (
        (one, call.name)
        for group in groups
        for one, call in zip(group.hooks, group.calls, strict=True)
    )
    for (one, who), answer in zip(calls, answers, strict=True):
        one.log_dropped(who, answer, reason)


def _merged(answers: list[tuple[str, Any]]) -> Any:
    for name, answer in answers:
        first, like = answers[0]
        if type(answer) not in (list, tuple, dict) or type(answer) is not type(like):
            wanted = (
                "a list, tuple or dict"
                if answer is like
                else f"a {type(like).__name__} as {first} does"
            )
            raise InvalidHookError(
                f"{name} returned {safe_repr(answer)}, which cannot be merged; return {wanted}, or"
                " None"
            )
    if not answers or type(answers[0][1]) is not dict:
        return (
            functools.reduce(operator.add, [answer for _, answer in answers]) if answers else None
        )
    merged: dict[Any, tuple[str, Any]] = {}
    for name, answer in answers:
        for key, value in answer.items():
            if key in merged:
                raise InvalidHookError(
                    f"{merged[key][0]} and {name} both returned {key!r}; each key may come from one"
                    " hook only"
                )
            merged[key] = name, value
    return {key: value for key, (_, value) in merged.items()}


class _Race(HookCalls):
    """The calls of hooks of one order, of which the first result ends the others; only that one is
    kept.
    """

    __slots__ = ()

    keeps_result = True  # only a result ends it

    def _winner(self) -> str | None:
        return next(
            (
                self.describe(number)
                for number, answer in enumerate(self.results)
                if answer is not None
            ),
            None,
        )

    def succeeded(self, number: int) -> None:
        answer, self.results[number] = self.results[number], None
        if answer is not None and self._winner() is None and not self.failing:
            self.results[number] = answer
            self.end(CancelledError())

    def suppresses(self, number: int, error: BaseException) -> bool:
        is_logged, winner = super().suppresses(number, error), self._winner()
        if not is_logged and winner is not None and isinstance(error, Exception):
            logger.error(
                "%s failed, but %s has returned a result",
                self.describe(number),
                winner,
                exc_info=error,
            )
            is_logged = True
        return is_logged


async def observe(target: Target, args: tuple[Any, ...], keywords: Keywords) -> None:
    """Call the hooks whose results do not count."""
    _log_dropped(
        target.observers, await call_groups(target.observers, args, keywords), "it is an observer"
    )


# -- hooks that wrap

Rest = Callable[[tuple[Any, ...], Keywords], Awaitable[Any]]


def wrapped(target: Target, innermost: Rest) -> Rest:
    """Return what calls the first wrapping hook with what calls the next one, and so on; the last
    one calls `innermost`.
    """
    for group in reversed(target.wrappers):
        innermost = functools.partial(_call_wrapper, target.point, group, innermost)
    return innermost


async def _call_wrapper(
    each: Point, group: OrderGroup, rest: Rest, args: tuple[Any, ...], keywords: Keywords
) -> Any:
    """Call a wrapping hook with a function that calls the rest.

    What a hook wraps is not called again when the hook has failed and that is only logged: its
    result or error counts.
    """
    registered = group.hooks[0]
    registered.counted += 1
    if registered.is_left_out():
        return await rest(args, keywords)
    wrapper = _WrapperCall(group, rest)
    try:
        await wrapper.make(each, args, keywords)
        if not wrapper.is_logged:
            registered.succeeded()
            return wrapper.results[0]
        if wrapper.answers:
            return wrapper.answers[0]
        if wrapper.errors:
            raise_unchanged(
                next(
                    error
                    for error in reversed(wrapper.errors)
                    if not isinstance(error, CancelledError)
                )
            )
    finally:
        registered.retry_later()
        wrapper.errors.clear()  # their tracebacks refer to it
    return await rest(args, keywords)


class _AsGiven(NamedTuple):
    """What the caller gave as the next, and how a hook called it."""

    call_next: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: Keywords


def own_body(each: Point, own: Method) -> Method:
    """Return what a wrapping method does itself: if its body does nothing, it calls what the caller
    gave as the next.

    It does so as the last hook did that gave arguments; or with the last arguments of the call, as
    many as are wanted.
    """
    if each.how != "wrap" or not each.does_nothing:
        return own

    async def call_given(self: Any, *given: Any, **named: Any) -> Any:
        args: tuple[Any, ...]
        keywords: Keywords
        args, keywords = positional_first(each.positional, given, named)
        key, call_next = _key(each, args, keywords), _argument(each, args, keywords)
        if isinstance(call_next, _AsGiven):
            call_next, args, keywords = call_next
        else:
            values = {
                place: one
                for place, one in {**dict[Any, Any](enumerate(args)), **keywords}.items()
                if place != key
            }
            others = {*keywords}.difference(each.positional, each.keywords)
            keywords = {name: values.pop(name) for name in keywords if name in others}
            args = _last_wanted(call_next, [*values.values()])
        if not callable(call_next):
            raise InvalidArgumentError(
                f"{each.name} got {safe_repr(call_next)} as the next; give what the last hook calls"
            )
        answer = call_next(*args, **keywords)
        return await answer if inspect.isawaitable(answer) else answer

    return call_given


def _last_wanted(function: Callable[..., Any], values: list[Any]) -> tuple[Any, ...]:
    """Return the last values, as many as the function wants by position; all if it takes any, or if
    that is not known.
    """
    if isinstance(getattr(function, "__self__", None), _WrapperCall):
        return ()  # of a group that has this one as a hook: it takes what is changed
    try:
        wanted = [
            one.kind
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty
        ]
    except (TypeError, ValueError):
        return tuple(values)
    Kind = inspect.Parameter
    count = sum(kind in (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD) for kind in wanted)
    return tuple(values if Kind.VAR_POSITIONAL in wanted else values[max(len(values) - count, 0) :])


class _WrapperCall(HookCalls):
    """The call of one hook that wraps others. Its time limit is for its own time: it does not count
    while they are active.
    """

    __slots__ = (
        "_active",
        "_given",
        "_rest",
        "_secs_left",
        "_since",
        "answers",
        "errors",
        "is_logged",
    )

    def __init__(self, group: OrderGroup, rest: Rest) -> None:
        super().__init__(group, [None], None, None)
        self._rest = rest
        self._given: tuple[Point, tuple[Any, ...], Keywords]
        self._active = 0  # calls of the others that have not ended
        self._secs_left: float | None = None
        self._since = 0.0
        self.answers: list[Any] = []
        """The last result of the others, if they have returned."""
        self.errors: list[BaseException] = []
        """The errors of the others."""
        self.is_logged: bool = False
        """Whether it has failed, and that was only logged."""

    async def make(self, each: Point, args: tuple[Any, ...], keywords: Keywords) -> None:
        """Make the call."""
        call = self._group.current_calls()[0]
        if each.how == "wrap":
            self._given = (
                each,
                *_with_argument(each, args, keywords, _argument(each, args, keywords)),
            )
            args, keywords = _with_argument(each, args, keywords, self.call_next)
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

    async def call_next(self, /, *changed: Any, **named: Any) -> Any:
        """Call the next hook with the arguments of the call, of which some may be changed."""
        each, args, keywords = self._given
        new = _changed(each, args, keywords, changed, named)
        if each.does_nothing and (changed or named):
            given = _argument(each, args, keywords)
            given = given.call_next if isinstance(given, _AsGiven) else given
            new = _with_argument(each, *new, _AsGiven(given, changed, named))
        return await self._call_rest(*new)

    async def _call_rest(self, args: tuple[Any, ...], keywords: Keywords) -> Any:
        if self.is_logged or self._left_behind is not None:
            raise HookCancelledError(
                f"{self.describe(0)} has failed before this: it cannot call the next hook any more"
            )
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
            (self._active or self.errors)
            and not self.answers
            and all(isinstance(one, CancelledError) for one in self.errors)
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


def _key(each: Point, args: tuple[Any, ...], keywords: Keywords) -> str | int:
    """Return the name of the argument of a method that counts, or its place where it is given by
    position; also if left out.
    """
    name = each.argument
    if name is None:
        return max(len(args) - 1, 0)
    if name in keywords or name not in each.positional:
        return name
    place = each.positional.index(name)
    return name if len(args) < place else place


def _argument(each: Point, args: tuple[Any, ...], keywords: Keywords) -> Any:
    """Return this argument of a call, None if it is left out."""
    key = _key(each, args, keywords)
    return keywords.get(key) if isinstance(key, str) else args[key] if key < len(args) else None


def _with_argument(each: Point, args: tuple[Any, ...], keywords: Keywords, value: Any) -> Arguments:
    """Replace or add this argument."""
    key = _key(each, args, keywords)
    return (
        (args, {**keywords, key: value})
        if isinstance(key, str)
        else ((*args[:key], value, *args[key + 1 :]), keywords)
    )


def _changed(
    each: Point, args: tuple[Any, ...], keywords: Keywords, new: Sequence[Any], named: Keywords
) -> Arguments:
    """Return the arguments with those that a hook gives to the next one: by name, or in the place
    of the last ones.
    """
    own = _key(each, args, keywords)
    keys: dict[str, str | int] = {
        name: place for place, name in enumerate(each.positional[: len(args)]) if place != own
    }
    changed = {keys.get(name, name): value for name, value in named.items()}
    values: dict[Any, Any] = {**dict(enumerate(args)), **keywords, **changed}
    named_later = (name for name in each.positional[len(args) :] if name in keywords)
    by_position = [one for one in (*range(len(args)), *named_later) if one != own]
    left, others = (
        [*new],
        [
            one
            for one in by_position or each.keywords
            if one in values and one not in changed and one != own
        ],
    )
    while left and others:
        values[others.pop()] = left.pop()
    if each.does_nothing and not each.variadic[0]:
        left = []  # more than the method has: they are for what the caller gave
    return positional_first(
        each.positional, (*left, *(values.pop(place) for place in range(len(args)))), values
    )
