"""Calls of one method of several hooks.

Hooks of one `order` are called together, and groups of hooks one after the other. A call that
cannot wait is made in the caller's task, and a call that may wait in a task of its own.

    RegisteredHook   a hook of one group or session, with its failures
    OrderGroup       the calls of one method that start together: hooks of one `order`
    order_groups     sorts the hooks that override a method into such groups
    call_groups      calls them, group after group
    HookCalls        the calls of one group of which some may wait
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
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

from aiohooks._core.activity import Awaited
from aiohooks._core.calls import Calls, OwnContext, RunWaits
from aiohooks._core.coroutines import can_wait, result_now
from aiohooks._core.observers import Observer, observed_call
from aiohooks._core.reports import logger
from aiohooks._core.scope import current_scope
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
"""The attribute of a method that need not always be called.

Its value is the name of a plain method of the hook, or a function.
"""


def only_if(condition: str) -> Callable[[F], F]:
    """Mark a method of a hook that is only called if the hook's plain method `condition` returns
    true for the same arguments.

    A hook that may wait needs no task then while it has nothing to do. The mark does not apply to a
    method that overrides the marked one.
    """

    def mark(method: F) -> F:
        setattr(method, CONDITION, condition)
        return method

    return mark


@dataclass(frozen=True, slots=True)
class HookCall:
    """The call of a method for one hook."""

    method: Method
    may_wait: bool
    """Whether the call gets a task of its own. Other calls are made in the caller's task."""
    queued: bool
    """Whether the call is put into a queue, which counts it."""
    condition: Callable[..., bool] | None
    """Returns whether the call is made; it gets the same arguments."""
    name: str
    """The name of the hook and the method, for messages."""
    secs: float | None
    """The time limit of the call."""


class HookStatus(NamedTuple):
    """The status of the calls of one hook.

    Attributes:
        name: the name of the hook, with a number if several hooks have it.
        calls: all calls, including those that are queued or were dropped.
        failures: the calls that failed. Their errors were raised or logged.
        last_error: the last error, as text.
        dropped: the calls that the hook did not get, because its queue was full or ended, or
            because the hook was disabled.
        disabled_since: when the hook was disabled, in Unix time; None if it is not disabled.
        pending: the background calls that wait or run.
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
        """Whether the hook is left out of calls."""
        return self.disabled_since is not None


class RegisteredHook:
    """A hook in one group or session, with the counts of its calls and failures."""

    __slots__ = (
        "__weakref__",
        "_logged_errors",
        "_logged_results",
        "counted",
        "disabled_since",
        "dropped",
        "failures",
        "failures_in_a_row",
        "groups",
        "hook",
        "last_error",
        "name",
        "overflows",
        "registration",
    )

    def __init__(self, name: str, registration: HookRegistration) -> None:
        self.name: str = name
        """The name of its class, with a number if several hooks have that name."""
        self.registration: HookRegistration = registration
        self.hook: Any = registration.hook
        self.groups: list[ref[OrderGroup]] = []
        """The groups that call the hook. Calls of a group that are made one after another are
        counted there, once for all of its hooks.
        """
        self.counted: int = 0
        """The number of its other calls."""
        self.dropped: int = 0
        """The calls that the hook did not get; see `HookStatus`."""
        self.overflows: int = 0
        """The calls that were dropped because its queue was full."""
        self.failures: int = 0
        self.failures_in_a_row: int = 0
        self.last_error: str | None = None
        self.disabled_since: float | None = None
        self._logged_results: set[str] = set()  # the calls whose dropped result was logged
        self._logged_errors: set[tuple[str, type]] = set()  # of a call, with the type of the error

    def call_name(self, method: str) -> str:
        """Return the name of a call of a method in messages.

        A function that is a hook by itself has its own name.
        """
        if getattr(self.hook, "__aiohooks_is_function__", False):
            return self.name
        return f"{self.name}.{method}"

    def status(self, pending: int) -> HookStatus:
        """Return the status of its calls, of which `pending` are queued."""
        # All groups first: one that dies meanwhile leaves the list, and is in `counted` then.
        groups = [group_ref() for group_ref in tuple(self.groups)]
        calls = self.counted + sum(group.made for group in groups if group is not None)
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
        """Count a call that is dropped because the queue is full; log the 1st, 10th, 100th, ..."""
        self.counted += 1
        self.dropped += 1
        self.overflows += 1
        if is_logged(self.overflows):
            text = (
                "%s: background call dropped, as its on_full says: max_pending=%s are pending;"
                " dropped so far: %s"
            )
            logger.warning(text, who, self.registration.max_pending, self.overflows)

    def log_dropped(self, who: str, result: object) -> None:
        """Log that a result is dropped, once for each method."""
        if result is not None and who not in self._logged_results:
            self._logged_results.add(who)
            message = "%s returned %s, which is dropped: the method returns None"
            logger.warning(message, who, safe_repr(result))

    def may_be_called(self) -> bool:
        """Return whether the hook is called; count the call as dropped if it is disabled."""
        if self.disabled_since is None:
            return True
        self.dropped += 1
        return False

    def count_failure(self, error: Exception) -> None:
        """Count an error of a call."""
        self.failures += 1
        self.failures_in_a_row += 1
        self.last_error = printable(safe_repr(error))

    def disable_if_due(self) -> None:
        """Disable the hook if it has failed as often in a row as its `disable_after` says."""
        limit = self.registration.disable_after
        if limit is None or self.failures_in_a_row < limit or self.disabled_since is not None:
            return
        self.disabled_since = time.time()
        message = (
            "%s failed %s times in a row and is not called any more, as its disable_after says"
        )
        logger.warning(message, self.name, limit)

    def suppresses(self, who: str, error: BaseException) -> bool:
        """Count an error of a call; return whether it is only logged, and not to be raised.

        An error that is only logged may disable the hook. The log has the first error of each
        method and type with its traceback, and otherwise the 10th, the 100th, ... error of the
        hook.
        """
        if not isinstance(error, Exception):
            return False
        self.count_failure(error)
        if self.registration.on_error != "log":
            return False
        # A method of a session has the step in its name.
        kind_of_error = who.partition(" at step ")[0], type(error)
        if kind_of_error not in self._logged_errors:
            self._logged_errors.add(kind_of_error)
            # Only the first time: later errors may be the same object, which would collect notes.
            add_origin(error, who)
            message = "%s failed; continuing, as its on_error says: %s"
            logger.error(message, who, self.last_error, exc_info=error)
        elif is_logged(self.failures):
            message = "%s failed for the %sth time; continuing, as its on_error says: %s"
            logger.error(message, who, self.failures, self.last_error)
        self.disable_if_due()
        return True

    def __repr__(self) -> str:
        disabled = "" if self.disabled_since is None else ", disabled"
        return f"<{self.name}{disabled}>"


def is_logged(count: int, more: int = 1) -> bool:
    """Return whether to log that there are `count` failures, of which `more` are new.

    The log has the first failure, the 10th, the 100th, ...
    """
    return count == more or len(str(count - more)) < len(str(count))


def bound_method(registered: RegisteredHook, method: str) -> Method:
    """Return a method of a hook as a coroutine function: a plain one is wrapped, and called in a
    worker thread if the registration says so.
    """
    bound: Any = getattr(registered.hook, method)
    if is_coroutine_function(bound) or inspect.isasyncgenfunction(bound):
        return cast("Method", bound)
    if registered.registration.thread:
        return threaded(bound, registered.call_name(method))
    return plain_call(bound, registered.call_name(method))


class OrderGroup:
    """The calls of one method that start together: hooks of one `order`, in registration order."""

    __slots__ = (
        "__weakref__",
        "_observed_calls",
        "_observers",
        "calls",
        "grace_secs",
        "hooks",
        "in_turn",
        "keeps_context",
        "made",
        "methods",
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
        """Make a group of the hooks that override `method`.

        Args:
            method: the name of the method.
            hooks: the hooks.
            grace_secs: how long cancelled calls may take to end.
            timeout: the time limit of hooks without a limit of their own.
            bind: returns the function that is called for a hook.
            wraps: whether the method wraps other hooks. The caller then leaves out disabled hooks.
        """
        self.made: int = 0
        """How often all hooks were called one after the other."""
        self.grace_secs: float = grace_secs
        self.hooks: tuple[RegisteredHook, ...] = tuple(hooks)
        self.calls: Sequence[HookCall] = [
            _hook_call(registered, method, bind(registered, method), timeout, wraps)
            for registered in hooks
        ]
        for registered in hooks:
            registered.groups.append(ref(self, registered.groups.remove))
        self.methods: tuple[Method, ...] = tuple(call.method for call in self.calls)
        self.in_turn: bool = not any(call.may_wait for call in self.calls)
        """Whether no call may wait, so that they are made one after the other."""
        self.keeps_context: tuple[bool, ...] | None = None
        """Whether a hook has one context for several methods, so that its tokens stay valid.

        None if no hook has.
        """
        self._observers: tuple[Observer, ...] = ()
        self._observed_calls: Sequence[HookCall] = self.calls

    def __del__(self) -> None:
        for registered in self.hooks:
            registered.counted += self.made

    def observed_calls(self, observers: Sequence[Observer]) -> Sequence[HookCall]:
        """Return the calls, which notify `observers`.

        They are kept for the next call, which usually has the same observers.
        """
        notified = tuple(observers)
        if self._observers != notified:
            self._observed_calls = [_observed(call, notified) for call in self.calls]
            self._observers = notified
        return self._observed_calls

    def current_calls(self) -> Sequence[HookCall]:
        """Return the calls, which notify the observers of the run that they are part of."""
        scope = current_scope.get()
        if scope is None or not scope.observers:
            return self.calls
        return self.observed_calls(scope.observers)


def _hook_call(
    registered: RegisteredHook,
    name: str,
    method: Method,
    timeout: float | None,
    wraps: bool,
) -> HookCall:
    """Return the call of a method for one hook.

    Args:
        registered: the hook.
        name: the name of the method.
        method: the function that is called.
        timeout: the time limit if the hook has none of its own.
        wraps: whether the method wraps other hooks.
    """
    marked: Any = getattr(method, CONDITION, None)
    call_name = registered.call_name(name)
    if callable(marked):
        # A queued call has its time limit, and is left out, when the queue makes it.
        queued_if: Callable[..., Any] = marked
        return HookCall(method, can_wait(method), True, queued_if, call_name, None)
    condition = None if marked is None else getattr(registered.hook, marked)
    secs = registered.registration.timeout
    if secs is None:
        secs = timeout
    may_wait = can_wait(method)
    if not wraps and registered.registration.disable_after is not None:
        method = _unless_disabled(method, registered)
    return HookCall(method, may_wait, False, condition, call_name, secs)


def _unless_disabled(method: Method, registered: RegisteredHook) -> Method:
    async def call(*args: Any, **keywords: Any) -> Any:
        if not registered.may_be_called():
            return None
        result = await method(*args, **keywords)
        registered.failures_in_a_row = 0
        return result

    return call


def _observed(call: HookCall, observers: tuple[Observer, ...]) -> HookCall:
    method = functools.partial(observed_call, call.method, "hook", call.name, observers)
    return replace(call, method=method)


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


# What a session gives in addition is given by name: each call would make an object for it.
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
    """Call the methods of `groups`, and return the results in their order.

    A group is complete before the next one starts. Calls of a group start in order. Calls that
    cannot wait are made in the caller's task. The others run concurrently, as in `Calls`.

    Args:
        groups: the groups.
        args: the arguments of each method.
        keywords: the keyword arguments of each method.
        seconds: a second argument of its own for each method, by group; `args` has the first one.
        step: the step for the notes of errors.
        waits: the waits of the run that the calls are part of.
        observers: the observers of the calls; by default those of the run.
        own: the context of the calls, shared with other calls.

    Raises:
        BaseException: the failure of a hook, several as one group, or the cancel of the caller.
    """
    results: list[Any] = []
    scope = current_scope.get() if waits is None else waits.scope
    for group in groups:
        calls = group.calls
        # A hook of the group before may have added observers of the run.
        notified = scope.observers if scope is not None and not observers else observers
        if notified:
            calls = group.observed_calls(notified)
        contexts = None
        if own is not None or (waits is not None and group.keeps_context is not None):
            contexts = _shared_contexts(group, waits, own)
        second_args = None if seconds is None else next(seconds)
        if not group.in_turn:
            hook_calls = HookCalls(group, step, waits)
            given = (args, second_args, keywords, contexts)
            results += await hook_calls.call_together(calls, *given)
            continue
        methods = group.methods
        if notified or keywords or contexts is not None:
            methods = _bound_methods(calls, keywords, contexts)
        number_before = len(results)
        remaining: Any = iter(methods)
        if second_args is not None:
            remaining = zip(methods, second_args)  # noqa: B905 - of one length
        # The loop continues behind a call whose error is only logged.
        while len(results) - number_before < len(methods):
            try:
                if second_args is None:
                    for method in remaining:
                        results.append(await method(*args))
                else:
                    for method, second in remaining:
                        results.append(await method(args[0], second))
            except BaseException as error:
                failed_in_turn(group, len(results) - number_before, step, error)
                results.append(None)
        group.made += 1
    return results


def _shared_contexts(
    group: OrderGroup,
    waits: RunWaits | None,
    own: OwnContext | None,
) -> list[OwnContext | None]:
    """Return, for each hook, the context that it shares with other calls, if there is one."""
    contexts = [own] * len(group.hooks)
    if waits is not None and group.keeps_context is not None:
        for number, keeps_context in enumerate(group.keeps_context):
            if keeps_context:
                contexts[number] = waits.own_context(group.hooks[number])
    return contexts


async def _call_in_context(context: OwnContext, method: Method, *args: Any) -> Any:
    """Make a call that cannot wait in the caller's task, in a context of its own."""
    try:
        return context.update().run(result_now, method(*args))
    finally:
        context.copy_back()


def _bound_methods(
    calls: Sequence[HookCall],
    keywords: Mapping[str, Any],
    contexts: Sequence[OwnContext | None] | None,
) -> tuple[Method, ...]:
    """Return the methods of calls that cannot wait, bound to their keywords and contexts."""
    methods: list[Method] = []
    for number, call in enumerate(calls):
        method: Method = functools.partial(call.method, **keywords)
        context = None if contexts is None else contexts[number]
        if context is not None:
            method = functools.partial(_call_in_context, context, method)
        methods.append(method)
    return tuple(methods)


def failed_in_turn(
    group: OrderGroup,
    number: int,
    step: int | None,
    error: BaseException,
) -> None:
    """Log or raise the error of a call, while no other call of the group is active.

    Args:
        group: the group of the call.
        number: the place of the call in the group.
        step: the step for messages.
        error: the error that the call has raised.
    """
    who = _at_step(group.calls[number].name, step)
    failure = error
    if isinstance(error, asyncio.CancelledError):
        failure = hook_cancelled_error(who, error)
    try:
        if not group.hooks[number].suppresses(who, failure):
            # The hooks after this one are not called.
            for registered in group.hooks[: number + 1]:
                registered.counted += 1
            add_origin(failure, who)
            raise_unchanged(failure)
    finally:
        # The traceback of the error refers to this frame.
        del failure, error


def _at_step(name: str, step: int | None) -> str:
    return name if step is None else f"{name} at step {step}"


class HookCalls(Calls):
    """The calls of one order group, of which some may wait."""

    __slots__ = ("_group", "_step")

    kind = "hook"

    def __init__(
        self,
        group: OrderGroup,
        step: int | None = None,
        waits: RunWaits | None = None,
    ) -> None:
        """Prepare the calls of a group.

        Args:
            group: the group.
            step: the step for the notes of errors.
            waits: the waits of the run that the calls are part of.
        """
        super().__init__([None] * len(group.calls), group.grace_secs, waits)
        self._group = group
        self._step = step

    async def call_together(
        self,
        calls: Sequence[HookCall],
        args: tuple[Any, ...],
        second_args: Sequence[Any] | None = None,
        keywords: Mapping[str, Any] = NO_KEYWORDS,
        contexts: Sequence[OwnContext | None] | None = None,
    ) -> list[Any]:
        """Make the calls, wait for them, and return their results."""
        context: OwnContext | None = None
        for number, call in enumerate(calls):
            try:
                method = functools.partial(call.method, **keywords) if keywords else call.method
                if contexts is not None:
                    context = contexts[number]
                given = args if second_args is None else (*args, second_args[number])
                if not call.may_wait:
                    await self._call_here(number, method, given, context)
                elif call.condition is None or call.condition(*given, **keywords):
                    if not call.queued:
                        self._group.hooks[number].counted += 1
                    self.start(number, method, given, call.name, call.secs, context)
            except BaseException as error:
                self.failed(number, error)
            if self.cancelling:
                break
        await self.wait()
        return self.results

    async def _call_here(
        self,
        number: int,
        method: Method,
        args: tuple[Any, ...],
        context: OwnContext | None,
    ) -> None:
        """Make a call that cannot wait in the caller's task."""
        self._group.hooks[number].counted += 1
        if context is not None:
            method = functools.partial(_call_in_context, context, method)
        # Before the call: one whose error is only logged may have changed the context, too.
        self.caller_context_changed()
        self.results[number] = await method(*args)
        self.succeeded(number)

    def describe(self, number: int) -> str:
        return _at_step(self._group.calls[number].name, self._step)

    def hook(self, number: int) -> Any:
        """Return the hook of a call."""
        return self._group.hooks[number].hook

    def timeout_error(self, number: int, task: asyncio.Task[Any]) -> HookTimeoutError:
        return hook_timeout_error(self.describe(number), self._group.calls[number].secs, task)

    def add_origin(self, number: int, error: BaseException) -> None:
        # What a full queue raises is the error of an earlier call, which names its origin already.
        if not self._group.calls[number].queued:
            super().add_origin(number, error)

    def suppresses(self, number: int, error: BaseException) -> bool:
        registered = self._group.hooks[number]
        if self._group.calls[number].queued and registered.registration.on_error != "log":
            # The error of an earlier call was counted when it occurred.
            return False
        return registered.suppresses(self.describe(number), error)


def hook_timeout_error(
    who: str,
    secs: float | None,
    task: asyncio.Task[Any],
    advice: str = "give it more with configure(hook, timeout=...)",
) -> HookTimeoutError:
    """Return the error for a call that took longer than its time limit.

    A note says where its task is suspended.
    """
    # Seldom needed, and slow to import.
    from aiohooks._why.builder import why
    from aiohooks._why.tasks import task_wait

    error = HookTimeoutError(f"{who} took longer than its timeout of {secs} s; {advice}")
    wait = why(Awaited("hook", who, key=task)) or f"at {task_wait(task).where or 'its beginning'}"
    add_note(error, f"when its time was up: {wait}")
    return error
