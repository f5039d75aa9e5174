"""Calling one method of several hooks as one: those that cannot wait in turn, those that may each in a task of its own.

RegisteredHook   a hook of one group or session, with its failures
OrderGroup       the calls of one method that start together: hooks of one `order`
order_groups     sorts the hooks that override a method into such groups
call_groups      calls them, group after group
HookCalls        the calls of one group, once one of them may wait or has failed
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import operator
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from aiohooks._aio.contexts import OwnContext
from aiohooks._aio.observers import Observer, observed_call
from aiohooks._aio.overlap import Overlap, RunWaits, can_wait, result_now
from aiohooks._aio.run_scope import current_scope
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import HookTimeoutError, add_note, add_origin, hook_cancelled_error, raise_unchanged

_logger = logging.getLogger("aiohooks")
F = TypeVar("F", bound=Callable[..., Any])

Method = Callable[..., Awaitable[Any]]
NO_KEYWORDS: Mapping[str, Any] = {}
CONDITION = "__aiohooks_only_if__"
"""The attribute of a method that seldom has to be called: the name of a plain method of its hook, or a function."""


def only_if(condition: str) -> Callable[[F], F]:
    """Mark a method of a hook that seldom has to be called: only if its plain method `condition`, given the same, says so.

    So a hook that may wait costs no task while it has nothing to do. It does not hold for a method that overrides this one.
    """

    def mark(method: F) -> F:
        setattr(method, CONDITION, condition)
        return method

    return mark


@dataclass(frozen=True, slots=True)
class HookCall:
    """What is called for one hook."""

    method: Method
    may_wait: bool
    """Whether it has a task; the others are made in the caller's."""
    condition: Callable[..., bool] | None
    """It is only made if this says so, given the same."""
    name: str
    secs: float | None
    """Its time limit."""


class RegisteredHook:
    """A hook in one group or session, with what has become of its calls."""

    __slots__ = ("__weakref__", "disabled", "failures", "failures_in_a_row", "name", "registration")

    def __init__(self, name: str, registration: HookRegistration) -> None:
        self.name: str = name
        """Its class, numbered where there are several."""
        self.registration: HookRegistration = registration
        self.failures: int = 0
        """Failures that were logged, with `on_error="log"`."""
        self.failures_in_a_row: int = 0
        self.disabled: bool = False
        """Whether it is out of the calls, as its `disable_after` says."""

    @property
    def hook(self) -> Any:
        return self.registration.hook

    def suppresses(self, who: str, error: BaseException) -> bool:
        """Log the error of a hook with `on_error="log"` and return true: the first with its traceback, then every tenfold."""
        if self.registration.on_error != "log" or not isinstance(error, Exception):
            return False
        self.failures += 1
        self.failures_in_a_row += 1
        number = self.failures
        if number == 1:
            add_origin(error, who)  # later ones are often the same error again, which would collect notes
            _logger.error("%s failed; continuing, as its on_error says", who, exc_info=error)
        elif number == 10 ** (len(str(number)) - 1):
            _logger.error("%s failed for the %sth time; continuing, as its on_error says: %r", who, number, error)
        limit = self.registration.disable_after
        if limit is not None and self.failures_in_a_row >= limit and not self.disabled:
            self.disabled = True
            _logger.warning("%s failed %s times in a row and is not called any more, as its disable_after says", self.name, limit)
        return True

    def __repr__(self) -> str:
        return f"<{self.name}{', disabled' if self.disabled else ''}>"


def bound_method(registered: RegisteredHook, method: str) -> Method:
    """Return the method of the hook itself."""
    bound: Method = getattr(registered.hook, method)
    return bound


class OrderGroup:
    """The calls of one method that start together: hooks of one `order`, in registration order."""

    __slots__ = ("_observed", "calls", "grace_secs", "hooks", "in_turn", "keeps_context", "methods")

    def __init__(
        self,
        method: str,
        hooks: Sequence[RegisteredHook],
        grace_secs: float,
        timeout: float | None = None,
        bind: Callable[[RegisteredHook, str], Method] = bound_method,
    ) -> None:
        """Take the hooks that override `method`.

        Args:
            method: the name of the method.
            hooks: the hooks.
            grace_secs: how long cancelled calls may take to end.
            timeout: for hooks without a time limit of their own.
            bind: returns what is called for a hook.
        """
        self.grace_secs: float = grace_secs
        self.hooks: tuple[RegisteredHook, ...] = tuple(hooks)
        calls: list[HookCall] = []
        for one in hooks:
            call, secs = bind(one, method), one.registration.timeout
            made, condition = call, getattr(call, CONDITION, None)
            if condition is not None and not isinstance(condition, str):  # a queued call has its time limit when it is made
                secs = None
            else:
                condition = None if condition is None else getattr(one.hook, condition)
                secs = timeout if secs is None else secs
                made = call if one.registration.disable_after is None else _unless_disabled(call, one)
            calls.append(HookCall(made, can_wait(call), condition, f"{one.name}.{method}", secs))
        self.calls: Sequence[HookCall] = calls
        self.methods: tuple[Method, ...] = tuple(call.method for call in calls)
        self.in_turn: bool = not any(call.may_wait for call in calls)
        """Whether none may wait."""
        self.keeps_context: tuple[bool, ...] | None = None
        """Whether a hook has one context for several methods, in which a token is valid; None if none has."""
        self._observed: tuple[tuple[Observer, ...], Sequence[HookCall]] = (), self.calls

    def observed_calls(self, observers: Sequence[Observer]) -> Sequence[HookCall]:
        """Return the calls, with `observers` that are notified of each: mostly those of the call before."""
        notified = tuple(observers)
        known, calls = self._observed
        if known != notified:
            calls = [
                replace(call, method=functools.partial(observed_call, call.method, "hook", call.name, notified))
                for call in self.calls
            ]
            self._observed = notified, calls
        return calls


def order_groups(
    method: str, hooks: Iterable[RegisteredHook], grace_secs: float, bind: Callable[[RegisteredHook, str], Method] = bound_method
) -> tuple[OrderGroup, ...]:
    """Sort the hooks that override `method` into groups of one `order`, the lowest first."""
    order = operator.attrgetter("registration.order")
    by_order = itertools.groupby(sorted(hooks, key=order), order)
    return tuple(OrderGroup(method, [*group], grace_secs, bind=bind) for _, group in by_order)


async def call_groups(
    groups: tuple[OrderGroup, ...],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any] = NO_KEYWORDS,
    *,
    seconds: Iterator[Sequence[Any]] | None = None,
    step: int | None = None,
    waits: RunWaits | None = None,
    observers: Sequence[Observer] = (),
    own: OwnContext | None = None,
) -> list[Any]:
    """Call the methods of `groups`, and return the results in their order. A group is complete before the next starts.

    Calls start in order. Those that cannot wait are made in the caller's task; the others overlap, as `Overlap` says.

    Args:
        groups: the groups.
        args: the arguments of each method.
        keywords: further ones.
        seconds: a second argument of its own for each method, by group; `args` is the first one then.
        step: for the notes of errors.
        waits: of the run that the calls are part of.
        observers: notified of the calls; by default those of the run.
        own: the context of the calls, which others have had.

    Raises:
        BaseException: the failure of a hook; several as one group; or the cancel of the caller.
    """
    answers: list[Any] = []
    scope = current_scope.get() if waits is None else waits.scope
    for group in groups:
        notified = observers or (() if scope is None else scope.observers)  # a hook of the group before may have added some
        calls = group.observed_calls(notified) if notified else group.calls
        others = None if seconds is None else next(seconds)
        keeps = None if waits is None else group.keeps_context
        if group.in_turn and own is None and keeps is None:
            methods = [call.method for call in calls] if notified else group.methods
            if keywords:
                methods = [functools.partial(method, **keywords) for method in methods]
            left: Iterator[Any] = iter(methods) if others is None else zip(methods, others)  # noqa: B905 - of one length
            before = len(answers)
            while True:
                try:
                    if others is None:
                        for method in left:
                            answers.append(await method(*args))  # noqa: PERF401 - see `number` # pyright: ignore[reportCallIssue]
                    else:
                        for method, other in left:
                            answers.append(await method(args[0], other))
                    break
                except BaseException as error:
                    number = len(answers) - before
                    failed_in_turn(group.hooks[number], _at_step(group.calls[number].name, step), error)
                    answers.append(None)
            continue
        results: list[Any] = [None] * len(calls)
        overlap: HookCalls | None = None
        for number, call in enumerate(calls):
            try:
                given = args if others is None else (*args, others[number])
                context = own
                if keeps is not None and waits is not None and keeps[number]:
                    context = waits.own_context(group.hooks[number])
                if call.may_wait:
                    if call.condition is not None and not call.condition(*given, **keywords):
                        continue
                    overlap = overlap or HookCalls(group, results, step, waits)
                    overlap.start(number, call.method, given, keywords, call.name, call.secs, context)
                    if overlap.failing:
                        break
                    continue
                if context is None:
                    results[number] = await call.method(*given, **keywords)
                else:
                    try:
                        results[number] = context.update().run(result_now, call.method(*given, **keywords))
                    finally:
                        context.copy_back()
                if overlap is not None:
                    overlap.in_turn()
            except BaseException as error:
                overlap = overlap or HookCalls(group, results, step, waits)
                overlap.failed(number, error)
                if overlap.failing:
                    break
        if overlap is not None:
            await overlap.wait()
        answers += results
    return answers


def _at_step(name: str, step: int | None) -> str:
    return name if step is None else f"{name} at step {step}"


class HookCalls(Overlap):
    """The calls of one order group, of which one may wait or has failed."""

    __slots__ = ("_group", "_step")

    def __init__(self, group: OrderGroup, results: list[Any], step: int | None, waits: RunWaits | None) -> None:
        """Put the answers into `results`; `step` is for the notes of errors."""
        super().__init__(results, group.grace_secs, waits)
        self._group = group
        self._step = step

    def describe(self, number: int) -> str:
        return _at_step(self._group.calls[number].name, self._step)

    def hook(self, number: int) -> Any:
        """Return the hook itself."""
        return self._group.hooks[number].hook

    def timeout_error(self, number: int, waited_at: str) -> HookTimeoutError:
        return hook_timeout_error(self.describe(number), self._group.calls[number].secs, waited_at)

    def suppresses(self, number: int, error: BaseException) -> bool:
        return self._group.hooks[number].suppresses(self.describe(number), error)


def failed_in_turn(registered: RegisteredHook, who: str, error: BaseException) -> None:
    """Log the error of a call that was made in the caller's task, and beside no other; or raise it."""
    failure = hook_cancelled_error(who, error) if isinstance(error, asyncio.CancelledError) else error
    try:
        if not registered.suppresses(who, failure):
            add_origin(failure, who)
            raise_unchanged(failure)
    finally:
        del failure, error  # the traceback has this frame


def hook_timeout_error(
    who: str, secs: float | None, waited_at: str, advice: str = "give it more with configure(hook, timeout=...)"
) -> HookTimeoutError:
    """Return the error for a call that took longer than its time limit, with a note that says where it was suspended."""
    error = HookTimeoutError(f"{who} took longer than its timeout of {secs} s; {advice}")
    add_note(error, waited_at)
    return error


def _unless_disabled(method: Method, registered: RegisteredHook) -> Method:
    async def call(*args: Any, **keywords: Any) -> Any:
        if registered.disabled:
            return None
        result = await method(*args, **keywords)
        registered.failures_in_a_row = 0
        return result

    return call
