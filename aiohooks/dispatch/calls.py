"""Calls of one method of several hooks.

Hooks of one `order` are called together, and groups of hooks one after the other. A call that
cannot wait is made in the caller's task, and a call that may wait in a task of its own.

    RegisteredHook   a hook of one group or session, with its failures
    HookCall         the call of a method for one hook, as `hook_call` or a queue makes it
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
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from aiohooks._core.activity import Kind, Observer, logger, observed_call
from aiohooks._core.calls import Calls, RunWaits, can_wait, result_now
from aiohooks._core.queue import Queue
from aiohooks._core.validate import is_coroutine_function
from aiohooks.dispatch.hook import FunctionHook, HookRegistration
from aiohooks.dispatch.ways import NO_KEYWORDS, Args, Keywords
from aiohooks.errors import (
    HookTimeoutError,
    InvalidHookError,
    add_note,
    add_origin,
    hook_cancelled_error,
    printable,
    raise_failures,
    raise_unchanged,
    safe_repr,
)

F = TypeVar("F", bound=Callable[..., Any])

Method = Callable[..., Awaitable[Any]]
_CONDITION = "__aiohooks_only_if__"
"""The attribute that `only_if` sets on a method: the name of its condition."""


def only_if(condition: str) -> Callable[[F], F]:
    """Mark a method of a hook that is only called if the hook's plain method `condition` returns
    true for the same arguments.

    A hook that may wait needs no task then while it has nothing to do. The mark does not apply to a
    method that overrides the marked one.
    """

    def mark(method: F) -> F:
        setattr(method, _CONDITION, condition)
        return method

    return mark


class HookStatus(NamedTuple):
    """The status of the calls of one hook.

    Attributes:
        name: the name of the hook, with a number if several hooks have it.
        failures: the calls that failed. Their errors were raised or logged.
        last_error: the last error, as text.
        dropped: the calls that were not made, or were cancelled, because the group was left, and
            those that were not made because the hook was disabled.
        disabled_since: when the hook was disabled, in Unix time, or None if it is not disabled.
        pending: the background calls that wait or run.
    """

    name: str
    failures: int
    last_error: str | None
    dropped: int
    disabled_since: float | None
    pending: int

    @property
    def disabled(self) -> bool:
        """Whether the hook is left out of calls."""
        return self.disabled_since is not None


@dataclass(eq=False)
class RegisteredHook:
    """A hook in one group or session, with the counts of its failures."""

    name: str
    """The name of its class or function, with a number if several hooks have that name."""
    registration: HookRegistration
    dropped: int = 0
    """The calls that were not made. See `HookStatus`."""
    failures: int = 0
    failures_in_a_row: int = 0
    last_error: str | None = None
    disabled_since: float | None = None
    queue: Any = None
    """The queue of its background calls (a `CallQueue`), made when its methods are bound."""
    _logged: set[tuple[str, type]] = field(default_factory=set[tuple[str, type]])
    """The methods of which an error was logged, with its type."""

    @property
    def hook(self) -> Any:
        """The hook itself."""
        return self.registration.hook

    def call_name(self, method: str) -> str:
        """Return the name of a call of a method in messages; of a function, its own name."""
        if isinstance(self.hook, FunctionHook):
            return self.name
        return f"{self.name}.{method}"

    def status(self) -> HookStatus:
        """Return the status of its calls."""
        pending = 0 if self.queue is None else len(self.queue.items)
        return HookStatus(
            self.name,
            self.failures,
            self.last_error,
            self.dropped,
            self.disabled_since,
            pending,
        )

    def may_be_called(self) -> bool:
        """Return whether the hook is called. Count the call as dropped if it is disabled."""
        if self.disabled_since is None:
            return True
        self.dropped += 1
        return False

    def count_failure(self, error: BaseException) -> None:
        """Count an error of a call. Disable the hook if its `disable_after` says so."""
        if not isinstance(error, Exception):
            return
        self.failures += 1
        self.failures_in_a_row += 1
        self.last_error = printable(safe_repr(error))
        limit = self.registration.disable_after
        if limit is not None and self.disabled_since is None and self.failures_in_a_row >= limit:
            self.disabled_since = time.time()
            message = (
                "%s failed %s times in a row and is not called any more, as its disable_after says"
            )
            logger.warning(message, self.name, limit)

    def suppresses(self, who: str, error: BaseException) -> bool:
        """Count an error of a call. Return whether it is only logged, and not to be raised.

        The first error of each method and type is logged. The others are only counted.
        """
        self.count_failure(error)
        if self.registration.on_error != "log" or not isinstance(error, Exception):
            return False
        # A method of a session has the step in its name.
        kind_of_error = who.partition(" at step ")[0], type(error)
        if kind_of_error not in self._logged:
            self._logged.add(kind_of_error)
            # Only the first time: later errors may be the same object, which would collect notes.
            add_origin(error, who)
            message = '%s failed; continuing because on_error is "log": %s'
            logger.error(message, who, self.last_error, exc_info=error)
        return True


def _bound_method(registered: RegisteredHook, method: str) -> Method:
    """Return a method of a hook as a coroutine function. A plain one is wrapped."""
    function: Any = getattr(registered.hook, method)
    if is_coroutine_function(function):
        return cast("Method", function)
    return _plain_method(registered, method)


def _plain_method(registered: RegisteredHook, method: str) -> Method:
    """Return a plain method of a hook as a coroutine function."""
    function: Any = getattr(registered.hook, method)
    who = registered.call_name(method)

    async def call(*args: Any, **keywords: Any) -> Any:
        return _plain_result(function(*args, **keywords), who)

    return call


def _plain_result(result: Any, who: str) -> Any:
    """Return the result of a plain function. Raise if it is an awaitable."""
    if not inspect.isawaitable(result):
        return result
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    raise InvalidHookError(
        f"{who} is a plain function, and returned {result!r}; write it as `async def`"
    )


@dataclass(eq=False)
class HookCall:
    """The call of a method for one hook. `hook_call` makes it, or a background hook's queue."""

    name: str
    """The name of the hook and the method, for messages."""
    method: Method
    """The function that is called."""
    may_wait: bool = True
    """Whether the call gets a task of its own. Other calls are made in the caller's task."""
    secs: float | None = None
    """The time limit of the call."""
    condition: Callable[..., bool] | None = None
    """Returns whether the call is made. It gets the same arguments."""
    queue: Queue[Any] | None = None
    """The queue in which the call is put, if it is made in the background."""


MakeCall = Callable[[RegisteredHook, str], HookCall]
"""Returns the call of a hook's method, which it gets by name."""


def hook_call(
    registered: RegisteredHook,
    name: str,
    method: Method | None = None,
    timeout: float | None = None,
) -> HookCall:
    """Return the call of a hook's method.

    Args:
        registered: the hook.
        name: the name of the method.
        method: the function that is called, by default the method itself.
        timeout: the time limit if the hook has none of its own.
    """
    if method is None:
        method = _bound_method(registered, name)
    may_wait = can_wait(method)
    condition = getattr(method, _CONDITION, None)
    if condition is not None:
        condition = getattr(registered.hook, condition)
    if registered.registration.disable_after is not None:
        method = _unless_disabled(method, registered)
    return HookCall(
        registered.call_name(name),
        method,
        may_wait,
        registered.registration.timeout or timeout,
        condition,
    )


def plain_call(registered: RegisteredHook, name: str) -> HookCall:
    """Return the call of a hook's plain method."""
    return hook_call(registered, name, _plain_method(registered, name))


class OrderGroup:
    """The calls of one method that start together: hooks of one `order`, in registration order."""

    def __init__(
        self,
        method: str,
        hooks: Sequence[RegisteredHook],
        grace_secs: float,
        make_call: MakeCall = hook_call,
        *,
        kind: Kind = "hook",
    ) -> None:
        """Make a group of the hooks that override `method`.

        Args:
            method: the name of the method.
            hooks: the hooks.
            grace_secs: how long cancelled calls may take to end.
            make_call: returns the call of a hook.
            kind: the kind of the calls for observers.
        """
        self.kind: Kind = kind
        self.grace_secs: float = grace_secs
        self.hooks: tuple[RegisteredHook, ...] = tuple(hooks)
        self.calls: list[HookCall] = [make_call(registered, method) for registered in self.hooks]
        self.methods: Sequence[Method] = [call.method for call in self.calls]
        self.in_turn: bool = not any(call.may_wait for call in self.calls)
        """Whether no call may wait, so that they are made one after the other."""
        queues = [call.queue for call in self.calls]
        self.queues: list[Queue[Any]] = [queue for queue in queues if queue is not None]
        """The queues of the background hooks."""
        self.condition: Callable[..., bool] | None = None
        """The condition of the only call, unless a queue makes it."""
        if len(self.calls) == 1 and self.calls[0].queue is None:
            self.condition = self.calls[0].condition

    def is_idle(
        self,
        args: Args,
        keywords: Keywords,
        step: int | None,
    ) -> bool:
        """Return whether the only call is not made, as its condition is false.

        This costs a third of `HookCalls`, which checks the conditions of several calls.
        """
        if self.condition is None:
            return False
        try:
            return not self.condition(*args, **keywords)
        except BaseException as error:
            failed_in_turn(self, 0, step, error)
            return True

    def methods_with(
        self,
        observers: Sequence[Observer],
        keywords: Keywords,
    ) -> Sequence[Method]:
        """Return the methods of the calls, each wrapped as this call of the group needs it.

        Args:
            observers: notified of each call.
            keywords: bound to each method.
        """
        methods: list[Method] = []
        for call in self.calls:
            method: Method = call.method
            if observers:
                method = functools.partial(observed_call, method, self.kind, call.name, observers)
            if keywords:
                method = functools.partial(method, **keywords)
            methods.append(method)
        return methods


def _unless_disabled(method: Method, registered: RegisteredHook) -> Method:
    """Return a method that is not called while its hook is disabled.

    A success begins the count of failures in a row again.
    """

    async def call(*args: Any, **keywords: Any) -> Any:
        if not registered.may_be_called():
            return None
        result = await method(*args, **keywords)
        registered.failures_in_a_row = 0
        return result

    return call


def order_groups(
    method: str,
    hooks: Iterable[RegisteredHook],
    grace_secs: float,
    make_call: MakeCall = hook_call,
    *,
    one_by_one: bool = False,
) -> tuple[OrderGroup, ...]:
    """Sort the hooks that override `method` into groups of one `order`, the lowest first.

    With `one_by_one`, each hook is a group.
    """
    order = operator.attrgetter("registration.order")
    in_order = sorted(hooks, key=order)
    key = id if one_by_one else order
    groups: list[OrderGroup] = []
    for _, batch in itertools.groupby(in_order, key):
        groups.append(OrderGroup(method, [*batch], grace_secs, make_call))
    return tuple(groups)


# What a session gives in addition is given by name: each call would make an object for it.
async def call_groups(
    groups: tuple[OrderGroup, ...],
    args: Args,
    keywords: Keywords = NO_KEYWORDS,
    *,
    second_args: Iterator[Sequence[Any]] | None = None,
    step: int | None = None,
    waits: RunWaits | None = None,
    observers: Sequence[Observer] = (),
) -> list[Any]:
    """Call the methods of `groups`, and return the results in their order.

    A group is complete before the next one starts. Calls of a group start in order. Calls that
    cannot wait are made in the caller's task. The others run concurrently, as in `Calls`.

    Failures of background calls from before this call are raised after the last group, so that each
    hook gets the call. If the call fails itself, they are left for the next call.

    Args:
        groups: the groups.
        args: the arguments of each method.
        keywords: the keyword arguments of each method.
        second_args: the second arguments of the calls, in a sequence for each group. `args` has the
            first one then.
        step: the step for the notes of errors.
        waits: the waits of the run that the calls are part of.
        observers: the observers of the calls, by default the observers of the waiting run.

    Raises:
        BaseException: the failure of a hook, several as one group, or the cancel of the caller.
    """
    results: list[Any] = []
    failed_queues: list[tuple[Queue[Any], int]] = []
    scope = None if waits is None else waits.scope
    for group in groups:
        notified = observers
        if scope is not None and not observers:
            # A hook of the group before may have added observers of the run.
            notified = scope.observers
        methods = group.methods
        if notified or keywords:
            methods = group.methods_with(notified, keywords)
        group_second_args = None if second_args is None else next(second_args)
        if not group.in_turn:
            arguments = [args] * len(methods)
            if group_second_args is not None:
                arguments = [(*args, second) for second in group_second_args]
            failed_queues += [
                (queue, len(queue.failures)) for queue in group.queues if queue.failures
            ]
            if group.is_idle(arguments[0], keywords, step):
                results.append(None)
                continue
            calls = HookCalls(group, step, waits)
            calls.start_all(methods, arguments, keywords)
            await calls.wait()
            results += calls.results
            continue
        first = len(results)
        remaining: Any = iter(methods)
        if group_second_args is not None:
            remaining = zip(remaining, group_second_args, strict=True)
        while True:  # the loop continues behind a call whose error is only logged
            try:
                # Two loops: a tuple of arguments for each call would cost a sixth of a run.
                if group_second_args is None:
                    for method in remaining:
                        results.append(await method(*args))
                else:
                    for method, second in remaining:
                        results.append(await method(args[0], second))
                break
            except BaseException as error:
                failed_in_turn(group, len(results) - first, step, error)
                results.append(None)
    if failed_queues:
        failures: list[BaseException] = []
        for queue, count in failed_queues:
            failures += queue.take_failures(count)
        raise_failures(failures, "background calls failed")
    return results


def failed_in_turn(
    group: OrderGroup,
    number: int,
    step: int | None,
    error: BaseException,
) -> None:
    """Log or raise the error of a call of a group whose calls are made one after the other.

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
        results: list[Any] = [None] * len(group.calls)
        super().__init__(results, group.grace_secs, waits)
        self._group = group
        self._step = step

    def start_all(
        self,
        methods: Sequence[Method],
        arguments: Sequence[Args],
        keywords: Keywords = NO_KEYWORDS,
    ) -> None:
        """Start the calls in order, and make the calls that cannot wait.

        Args:
            methods: the method of each call, bound to its keyword arguments.
            arguments: the arguments of each call.
            keywords: the keyword arguments, for the conditions of calls.
        """
        is_checked = self._group.condition is not None
        for number, call in enumerate(self._group.calls):
            method = methods[number]
            try:
                call_args = arguments[number]
                if not call.may_wait:
                    # Now: one whose error is only logged may have changed the context, too.
                    self.caller_context_changed()
                    self.results[number] = result_now(method(*call_args))
                elif is_checked or call.condition is None or call.condition(*call_args, **keywords):
                    self.start(number, method, call_args, call.name, call.secs)
            except BaseException as error:
                self.failed(number, error)
            if self.cancelling:
                break

    def describe(self, number: int) -> str:
        return _at_step(self._group.calls[number].name, self._step)

    def hook(self, number: int) -> Any:
        """Return the hook of a call."""
        return self._group.hooks[number].hook

    def timeout_error(self, number: int, task: asyncio.Task[Any]) -> HookTimeoutError:
        from aiohooks._why.tasks import describe_suspension  # seldom needed, and slow to import

        who = self.describe(number)
        secs = self._group.calls[number].secs
        error = HookTimeoutError(
            f"{who} took longer than its timeout of {secs} s; give it more with"
            " configure(hook, timeout=...)"
        )
        add_note(error, describe_suspension(task))
        return error

    def suppresses(self, number: int, error: BaseException) -> bool:
        if self._group.calls[number].queue is not None:
            # The call could not be queued, which is not a failure of the hook.
            return False
        return self._group.hooks[number].suppresses(self.describe(number), error)
