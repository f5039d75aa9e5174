"""Calling one method of several hooks as one: those that cannot wait in turn, those that may each
in a task of its own.

RegisteredHook   a hook of one group or session, with its failures
OrderGroup       the calls of one method that start together: hooks of one `order`
order_groups     sorts the hooks that override a method into such groups
call_groups      calls them, group after group
HookCalls        the calls of one group, once one of them may wait or has failed
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import operator
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from aiohooks._core.clock import monotonic_now
from aiohooks._core.contexts import OwnContext, current_scope
from aiohooks._core.diagnostics import Awaited, logger
from aiohooks._core.observers import Observer, observed_call
from aiohooks._core.overlap import Overlap, RunWaits, can_wait, result_now
from aiohooks._core.validate import is_coroutine_function
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.dispatch.plain import plain_call, threaded
from aiohooks.errors import (
    HookTimeoutError,
    add_note,
    add_origin,
    hook_cancelled_error,
    printable,
    raise_unchanged,
    safe_repr,
)

F = TypeVar("F", bound=Callable[..., Any])

Method = Callable[..., Awaitable[Any]]
NO_KEYWORDS: Mapping[str, Any] = {}
CONDITION = "__aiohooks_only_if__"
"""The attribute of a method that seldom has to be called: the name of a plain method of its hook,
or a function.
"""


def only_if(condition: str) -> Callable[[F], F]:
    """Mark a method of a hook that seldom has to be called: only if its plain method `condition`,
    given the same, says so.

    So a hook that may wait costs no task while it has nothing to do. It does not hold for a method
    that overrides this one.
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
    queued: bool
    """Whether it is put into a queue, which counts it."""
    condition: Callable[..., bool] | None
    """It is only made if this says so, given the same."""
    name: str
    secs: float | None
    """Its time limit."""


class HookStatus(NamedTuple):
    """What has become of the calls of one hook, whose `name` has a number where there are several;
    `last_error` as text.

    `calls` are all, also those that are queued or were dropped, and `failures` those that failed,
    which was raised or logged. `dropped` are calls that it did not get, as its queue was full or
    had to end, or as it was disabled: since `disabled_since`, in Unix time. `pending` are
    background calls that wait or run.
    """

    name: str
    calls: int
    failures: int
    last_error: str | None
    dropped: int
    disabled_since: float | None
    pending: int

    @property
    def disabled(self) -> bool:
        """Whether it is out of the calls."""
        return self.disabled_since is not None


class RegisteredHook:
    """A hook in one group or session, with what has become of its calls."""

    __slots__ = (
        *(
            "__weakref__",
            "_logged",
            "_retry_at",
            "counted",
            "disabled_since",
            "dropped",
            "failures",
            "failures_in_a_row",
        ),
        *("groups", "hook", "last_error", "name", "overflows", "registration"),
    )

    def __init__(self, name: str, registration: HookRegistration) -> None:
        self.name: str = name
        """Its class, numbered where there are several."""
        self.registration: HookRegistration = registration
        self.hook: Any = registration.hook
        self.groups: list[ref[OrderGroup]] = []
        """Those that it is called by: what may not wait is counted there, once for all hooks."""
        self.counted: int = 0
        """Its other calls."""
        self.dropped: int = 0
        self.overflows: int = 0
        """Calls that were dropped because its queue was full."""
        self.failures: int = 0
        self.failures_in_a_row: int = 0
        self.last_error: str | None = None
        self.disabled_since: float | None = None
        self._retry_at: float | None = (
            None  # on the clock; None while a call tries it again, or none ever will
        )
        self._logged: set[object] = set()  # dropped results, and errors, that were logged

    def call_name(self, method: str) -> str:
        """Return the name of a call of a method in messages: of a function that is a hook by
        itself, its own.
        """
        return (
            self.name
            if getattr(self.hook, "__aiohooks_is_function__", False)
            else f"{self.name}.{method}"
        )

    def status(self, pending: int) -> HookStatus:
        """Return what has become of its calls, of which `pending` are queued."""
        calls = self.counted + sum(
            group.made for one in self.groups if (group := one()) is not None
        )
        return HookStatus(
            self.name,
            calls,
            self.failures,
            self.last_error,
            self.dropped,
            self.disabled_since,
            pending,
        )

    def overflowed(self, who: str) -> None:
        """Count a call that is dropped because the queue is full, and log the first and then every
        tenfold.
        """
        self.counted += 1
        self.dropped += 1
        self.overflows += 1
        if is_logged(self.overflows):
            text = (
                "%s: background call dropped, as its on_full says: max_pending=%s are pending;"
                " dropped so far: %s"
            )
            logger.warning(text, who, self.registration.max_pending, self.overflows)

    def log_dropped(self, who: str, answer: object, reason: str) -> None:
        """Log that a result does not count, once for each method."""
        if answer is not None and who not in self._logged:
            self._logged.add(who)
            logger.warning("%s returned %s, which is dropped: %s", who, safe_repr(answer), reason)

    def is_left_out(self) -> bool:
        """Return whether a call does without the hook, as it is disabled; the first one after its
        `retry_secs` does not.
        """
        if self.disabled_since is None:
            return False
        if self._retry_at is None or monotonic_now()() < self._retry_at:
            self.dropped += 1
            return True
        self._retry_at = None
        return False

    def succeeded(self) -> None:
        """Note the success of a call; if it has tried a disabled hook again, that takes part from
        now on.
        """
        self.failures_in_a_row = 0
        if (
            self.disabled_since is not None
            and self._retry_at is None
            and self.registration.retry_secs is not None
        ):
            self.disabled_since = None
            logger.warning(
                "%s has succeeded and is called again, as its retry_secs says", self.name
            )

    def retry_later(self) -> None:
        """Let a call try a disabled hook again after its `retry_secs`, if it has any."""
        secs = self.registration.retry_secs
        if self.disabled_since is not None and secs is not None:
            self._retry_at = monotonic_now()() + secs

    def suppresses(self, who: str, error: BaseException) -> bool:
        """Count an error. With `on_error="log"` return true, and log the first with its traceback,
        then every tenfold.
        """
        if not isinstance(error, Exception):
            return False
        self.failures += 1
        self.last_error = printable(safe_repr(error))
        if self.registration.on_error != "log":
            return False
        self.failures_in_a_row += 1
        kind_of_error = who.partition(" at step ")[0], type(error)
        if kind_of_error not in self._logged:
            self._logged.add(kind_of_error)
            add_origin(
                error, who
            )  # later ones are often the same error again, which would collect notes
            logger.error(
                "%s failed; continuing, as its on_error says: %s",
                who,
                self.last_error,
                exc_info=error,
            )
        elif is_logged(self.failures):
            logger.error(
                "%s failed for the %sth time; continuing, as its on_error says: %s",
                who,
                self.failures,
                self.last_error,
            )
        limit, retry = self.registration.disable_after, self.registration.retry_secs
        if limit is not None and self.failures_in_a_row >= limit and self.disabled_since is None:
            self.disabled_since = time.time()
            self.retry_later()
            ends = "any more" if retry is None else f"for {retry:g} s"
            logger.warning(
                "%s failed %s times in a row and is not called %s, as its disable_after says",
                self.name,
                limit,
                ends,
            )
        return True

    def __repr__(self) -> str:
        return f"<{self.name}{'' if self.disabled_since is None else ', disabled'}>"


def is_logged(count: int, more: int = 1) -> bool:
    """Return whether to log that there are `count` failures, `more` of them new: the first is, the
    tenth, the hundredth, ...
    """
    return count == more or len(str(count - more)) < len(str(count))


def bound_method(registered: RegisteredHook, method: str) -> Method:
    """Return the method of the hook itself; a plain one as a coroutine function."""
    bound: Any = getattr(registered.hook, method)
    if is_coroutine_function(bound) or inspect.isasyncgenfunction(bound):
        found: Method = bound
        return found
    if registered.registration.thread:
        return threaded(bound)
    return plain_call(bound, registered.call_name(method))


class OrderGroup:
    """The calls of one method that start together: hooks of one `order`, in registration order."""

    __slots__ = (
        *("__weakref__", "_observed", "calls", "grace_secs", "hooks"),
        *("in_turn", "keeps_context", "made", "methods"),
    )

    def __init__(
        self,
        method: str,
        hooks: Sequence[RegisteredHook],
        grace_secs: float,
        timeout: float | None = None,
        bind: Callable[[RegisteredHook, str], Method] = bound_method,
        *,
        wraps: bool = False,
    ) -> None:
        """Take the hooks that override `method`.

        Args:
            method: the name of the method.
            hooks: the hooks.
            grace_secs: how long cancelled calls may take to end.
            timeout: for hooks without a time limit of their own.
            bind: returns what is called for a hook.
            wraps: whether the method wraps others, which are called without it while it is
                disabled: its caller sees to that.
        """
        self.made: int = 0
        """How often all of its hooks were called in turn."""
        self.grace_secs: float = grace_secs
        self.hooks: tuple[RegisteredHook, ...] = tuple(hooks)
        calls: list[HookCall] = []
        for one in hooks:
            call, secs = bind(one, method), one.registration.timeout
            made, condition = call, getattr(call, CONDITION, None)
            queued = callable(condition)
            if queued:  # it has its time limit when it is made
                secs = None
            else:
                condition = None if condition is None else getattr(one.hook, condition)
                secs = timeout if secs is None else secs
                made = (
                    call
                    if wraps or one.registration.disable_after is None
                    else _unless_disabled(call, one)
                )
            calls.append(
                HookCall(made, can_wait(call), queued, condition, one.call_name(method), secs)
            )
            one.groups.append(ref(self, one.groups.remove))
        self.calls: Sequence[HookCall] = calls
        self.methods: tuple[Method, ...] = tuple(call.method for call in calls)
        self.in_turn: bool = not any(call.may_wait for call in calls)
        """Whether none may wait."""
        self.keeps_context: tuple[bool, ...] | None = None
        """Whether a hook has one context for several methods, in which a token is valid; None if
        none has.
        """
        self._observed: tuple[tuple[Observer, ...], Sequence[HookCall]] = (), self.calls

    def __del__(self) -> None:
        for one in self.hooks:
            one.counted += self.made

    def observed_calls(self, observers: Sequence[Observer]) -> Sequence[HookCall]:
        """Return the calls, with `observers` that are notified of each: mostly those of the call
        before.
        """
        notified = tuple(observers)
        known, calls = self._observed
        if known != notified:
            calls = [
                replace(
                    call,
                    method=functools.partial(
                        observed_call, call.method, "hook", call.name, notified
                    ),
                )
                for call in self.calls
            ]
            self._observed = notified, calls
        return calls

    def current_calls(self) -> Sequence[HookCall]:
        """Return the calls, with the observers of the run that they are part of."""
        scope = current_scope.get()
        return (
            self.observed_calls(scope.observers)
            if scope is not None and scope.observers
            else self.calls
        )


def order_groups(
    method: str,
    hooks: Iterable[RegisteredHook],
    grace_secs: float,
    bind: Callable[[RegisteredHook, str], Method] = bound_method,
) -> tuple[OrderGroup, ...]:
    """Sort the hooks that override `method` into groups of one `order`, the lowest first."""
    order = operator.attrgetter("registration.order")
    by_order = itertools.groupby(sorted(hooks, key=order), order)
    return tuple(OrderGroup(method, [*group], grace_secs, bind=bind) for _, group in by_order)


# what a session gives besides a group is given by name: an object for it would be made in each call
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
    calls_as: type[HookCalls] | None = None,
) -> list[Any]:
    """Call the methods of `groups`, and return the results in their order. A group is complete
    before the next starts.

    Calls start in order. Those that cannot wait are made in the caller's task; the others run
    concurrently, as `Overlap` says.

    Args:
        groups: the groups.
        args: the arguments of each method.
        keywords: further ones.
        seconds: a second argument of its own for each method, by group; `args` is the first one
            then.
        step: for the notes of errors.
        waits: of the run that the calls are part of.
        observers: notified of the calls; by default those of the run.
        own: the context of the calls, which others have had.
        calls_as: what calls are that end each other, of groups that are not `in_turn`.

    Raises:
        BaseException: the failure of a hook; several as one group; or the cancel of the caller.
    """
    answers: list[Any] = []
    scope = current_scope.get() if waits is None else waits.scope
    for group in groups:
        notified = observers or (
            () if scope is None else scope.observers
        )  # a hook of the group before may have added some
        calls = group.observed_calls(notified) if notified else group.calls
        others = None if seconds is None else next(seconds)
        keeps = None if waits is None else group.keeps_context
        if group.in_turn and own is None and keeps is None:
            methods = [call.method for call in calls] if notified else group.methods
            if keywords:
                methods = [functools.partial(method, **keywords) for method in methods]
            left = iter(methods)
            left_pairs = None if others is None else zip(left, others)  # noqa: B905 - of one length
            before = len(answers)
            while True:
                try:
                    if left_pairs is None:
                        for method in left:
                            answers.append(await method(*args))  # noqa: PERF401 - see `number`
                    else:
                        for method, other in left_pairs:
                            answers.append(await method(args[0], other))
                    break
                except BaseException as error:
                    number = len(answers) - before
                    failed_in_turn(group, number, step, error)
                    answers.append(None)
            group.made += 1
            continue
        results: list[Any] = [None] * len(calls)
        overlap = None if calls_as is None else calls_as(group, results, step, waits)
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
                    group.hooks[number].counted += not call.queued
                    overlap.start(
                        number, call.method, given, keywords, call.name, call.secs, context
                    )
                else:
                    group.hooks[number].counted += 1
                    if context is None:
                        results[number] = await call.method(*given, **keywords)
                    else:
                        try:
                            results[number] = context.update().run(
                                result_now, call.method(*given, **keywords)
                            )
                        finally:
                            context.copy_back()
                    if overlap is not None:
                        overlap.in_turn()
                        overlap.succeeded(number)
            except BaseException as error:
                overlap = overlap or HookCalls(group, results, step, waits)
                overlap.failed(number, error)
            if overlap is not None and overlap.failing:
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

    kind = "hook"

    def __init__(
        self, group: OrderGroup, results: list[Any], step: int | None, waits: RunWaits | None
    ) -> None:
        """Put what they return into `results`; `step` is for the notes of errors."""
        super().__init__(results, group.grace_secs, waits)
        self._group = group
        self._step = step

    def describe(self, number: int) -> str:
        return _at_step(self._group.calls[number].name, self._step)

    def hook(self, number: int) -> Any:
        """Return the hook itself."""
        return self._group.hooks[number].hook

    def describe_suspension(self, number: int, task: asyncio.Task[Any]) -> str:
        from aiohooks._why.builder import why  # seldom needed

        chain = why(Awaited(self.kind, self.describe(number), key=task))
        place = super().describe_suspension(number, task)
        return f"{place}; {chain}" if chain else place

    def timeout_error(self, number: int, waited_at: str) -> HookTimeoutError:
        return hook_timeout_error(self.describe(number), self._group.calls[number].secs, waited_at)

    def add_origin(self, number: int, error: BaseException) -> None:
        if not self._group.calls[number].queued:  # an error of an earlier call has its origin
            super().add_origin(number, error)

    def suppresses(self, number: int, error: BaseException) -> bool:
        registered = self._group.hooks[number]
        if (
            self._group.calls[number].queued and registered.registration.on_error != "log"
        ):  # it was counted when it occurred
            return False
        return registered.suppresses(self.describe(number), error)


def failed_in_turn(group: OrderGroup, number: int, step: int | None, error: BaseException) -> None:
    """Log the error of a call that was made in the caller's task, and beside no other; or raise
    it.
    """
    who = _at_step(group.calls[number].name, step)
    failure = (
        hook_cancelled_error(who, error) if isinstance(error, asyncio.CancelledError) else error
    )
    try:
        if not group.hooks[number].suppresses(who, failure):
            for one in group.hooks[: number + 1]:  # the others are not called
                one.counted += 1
            add_origin(failure, who)
            raise_unchanged(failure)
    finally:
        del failure, error  # the traceback has this frame


def hook_timeout_error(
    who: str,
    secs: float | None,
    waited_at: str,
    advice: str = "give it more with configure(hook, timeout=...)",
) -> HookTimeoutError:
    """Return the error for a call that took longer than its time limit, with a note that says where
    it was suspended.
    """
    error = HookTimeoutError(f"{who} took longer than its timeout of {secs} s; {advice}")
    add_note(error, waited_at)
    return error


def _unless_disabled(method: Method, registered: RegisteredHook) -> Method:
    async def call(*args: Any, **keywords: Any) -> Any:
        if registered.is_left_out():
            return None
        try:
            result = await method(*args, **keywords)
        except BaseException:
            registered.retry_later()
            raise
        registered.succeeded()
        return result

    return call
