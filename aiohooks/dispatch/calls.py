"""Calls of one method of several hooks.

An order group has the calls of one method for the hooks of one `order`: they start together, and
the next order group starts when all of them have ended. A call may wait if the code of its function
has an `await` (`can_wait`). It then gets a task of its own. A call that cannot wait is made in the
caller's task, which costs much less.

    RegisteredHook   a hook of one group or session, with its failures
    HookCall         the call of a method for one hook, as `hook_call` or a queue makes it
    OrderGroup       the calls of one method that start together: those of hooks of one `order`
    order_groups     sorts the calls of a method into order groups
    call_groups      makes the calls of order groups, group after group
    HookCalls        the calls of one order group of which some may wait, while they run
    log_or_raise     handles the error of a call that was made in the caller's task
    only_if          marks a method of a hook that is called only while a condition is true
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
from aiohooks._core.waits import LEFT_BEHIND, current_task
from aiohooks.dispatch.hook import FunctionHook, HookRegistration
from aiohooks.dispatch.points import COROUTINE, NO_KEYWORDS, Args, Keywords, function_kind
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

# The function that a call awaits: a hook's method, or a function around it.
AsyncFunction = Callable[..., Awaitable[Any]]
_CONDITION = "__aiohooks_only_if__"
"""The attribute that `only_if` sets on a method: the name of its condition."""


def only_if(condition: str) -> Callable[[F], F]:
    """Mark a method of a hook that is only called if the hook's plain method `condition` returns
    true for the same arguments.

    While the condition is false, a method that may wait costs no task. The mark does not apply to a
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
    """A hook in one group or session, with the counts of its failures.

    `HookStatus` explains the fields that it has, too.
    """

    name: str
    """The name of its class or function, with a number if several hooks have that name."""
    registration: HookRegistration
    dropped: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    last_error: str | None = None
    disabled_since: float | None = None
    queue: Any = None
    """The queue of its background calls: a `CallQueue`, which `BackgroundCalls.make_call` makes, or
    None if there is none.
    """
    remove_once: Callable[[], object] | None = None
    """Removes a hook with `once=True` from its group. None when that call has begun."""
    _logged: set[tuple[str, type]] = field(default_factory=set[tuple[str, type]])
    """The errors that were logged: the name of the call, without its step, and the error's type."""

    @property
    def hook(self) -> Any:
        """The hook itself."""
        return self.registration.hook

    def call_name(self, method: str) -> str:
        """Return the name of a call of a method in messages: `Hook.method`.

        For a hook that is a function (`FunctionHook`), it is the name of the function.
        """
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

    def begin_call(self) -> bool:
        """Begin a call of the hook, unless it is to be skipped. Return whether it has begun.

        The call of a disabled hook is skipped, and counts as dropped. So is each call of a hook
        with `once=True` but the first, which removes the hook: others may have been decided before
        that.
        """
        if self.disabled_since is not None:
            self.dropped += 1
            return False
        if not self.registration.once:
            return True
        if self.remove_once is None:
            return False
        remove = self.remove_once
        self.remove_once = None
        remove()
        return True

    def count_failure(self, error: BaseException) -> None:
        """Count an error of a call. Disable the hook if its `disable_after` says so."""
        # KeyboardInterrupt and SystemExit end the program, and are no fault of the hook.
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
        """Count an error of a call. Return whether the error is suppressed: logged, not raised.

        The first error of each method and type is logged. Later ones are only counted.

        Args:
            who: the name of the call in messages, perhaps with its step.
            error: the error of the call.
        """
        self.count_failure(error)
        if self.registration.on_error != "log" or not isinstance(error, Exception):
            return False
        # The name of a call in a session ends with the step (`_at_step`). Without the step, the
        # errors of all steps are of one kind, which is logged once.
        call_name, _, _ = who.partition(" at step ")
        kind_of_error = call_name, type(error)
        if kind_of_error not in self._logged:
            self._logged.add(kind_of_error)
            # Only the logged error gets a note of its origin: later errors may be the same object,
            # which would collect a note at each call.
            add_origin(error, who)
            message = '%s failed; continuing because on_error is "log": %s'
            logger.error(message, who, self.last_error, exc_info=error)
        return True


def _async_method(registered: RegisteredHook, method: str) -> AsyncFunction:
    """Return a method of a hook as a coroutine function.

    A plain method is wrapped in one, which cannot wait.
    """
    function: Any = getattr(registered.hook, method)
    if function_kind(function) == COROUTINE:
        return cast("AsyncFunction", function)
    who = registered.call_name(method)

    async def call(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        _check_plain_result(result, who)
        return result

    return call


def _check_plain_result(result: Any, who: str) -> None:
    """Raise if the result of a plain function is an awaitable, which would not be awaited.

    Args:
        result: the result.
        who: the name of the call in messages.
    """
    if not inspect.isawaitable(result):
        return
    if inspect.iscoroutine(result):
        # Without this, Python would also warn that the coroutine was never awaited.
        result.close()
    raise InvalidHookError(
        f"{who} is a plain function, and returned {result!r}; write it as `async def`"
    )


@dataclass(eq=False)
class HookCall:
    """How a method is called for one hook. The same object serves all calls of the method.

    `hook_call` makes it, or for a background hook `BackgroundCalls.make_call`.
    """

    registered: RegisteredHook
    name: str
    """The name of the hook and the method, for messages."""
    function: AsyncFunction
    """The function that is called: the hook's method, or a function around it."""
    may_wait: bool = True
    """Whether the call gets a task of its own. Other calls are made in the caller's task."""
    timeout: float | None = None
    """The time limit of the call in seconds. It has no effect on a call that cannot wait."""
    condition: Callable[..., bool] | None = None
    """Returns whether the call is made, given its arguments. It has no effect on a call that cannot
    wait.
    """
    queue: Queue[Any] | None = None
    """The queue in which the call is put, if it is made in the background."""


MakeCall = Callable[[RegisteredHook, str], HookCall]
"""Returns the call of a hook's method. Its arguments are the hook and the method's name."""


def hook_call(
    registered: RegisteredHook,
    method: str,
    function: AsyncFunction | None = None,
    timeout: float | None = None,
    *,
    may_be_disabled: bool = True,
    no_result: Any = None,
) -> HookCall:
    """Return the call of a hook's method.

    Args:
        registered: the hook.
        method: the name of the method.
        function: the function that is called, by default the method itself.
        timeout: the time limit if the hook has none of its own.
        may_be_disabled: whether the call is left out while the hook is disabled.
        no_result: the result of the call if it is skipped when it begins, as the hook is disabled,
            or has `once=True` and was called.
    """
    if function is None:
        function = _async_method(registered, method)
    # The code and the mark of the function are read here, as the wrapper below hides them.
    may_wait = can_wait(function)
    condition = getattr(function, _CONDITION, None)
    if condition is not None:
        # The mark is the name of the condition, which is a method of the hook.
        condition = getattr(registered.hook, condition)
    options = registered.registration
    may_be_skipped = options.once or (may_be_disabled and options.disable_after is not None)
    if may_be_skipped:
        function = _unless_skipped(function, registered, no_result, has_own_task=may_wait)
    return HookCall(
        registered,
        registered.call_name(method),
        function,
        may_wait,
        options.timeout or timeout,
        condition,
    )


class OrderGroup:
    """The calls of one method for the hooks of one `order`, in registration order.

    They start together. A group is made once, and used for each call of the method.
    """

    def __init__(
        self,
        calls: Iterable[HookCall],
        grace_secs: float,
        *,
        kind: Kind = "hook",
    ) -> None:
        """Make a group.

        Args:
            calls: the call of each hook.
            grace_secs: how long cancelled calls may take to end.
            kind: the kind of the calls for observers.
        """
        self.kind: Kind = kind
        self.grace_secs: float = grace_secs
        self.calls: list[HookCall] = [*calls]
        self.hooks: list[RegisteredHook] = [call.registered for call in self.calls]
        """The hooks. `hooks`, `calls` and `functions` have the same order."""
        # The functions of `calls`. Hot path: the loop over them needs no look-up in `calls`.
        self.functions: Sequence[AsyncFunction] = [call.function for call in self.calls]
        self.may_wait: bool = any(call.may_wait for call in self.calls)
        """Whether a call may wait. If none may, they are made one after another in the caller's
        task.
        """
        queues = [call.queue for call in self.calls]
        self.queues: list[Queue[Any]] = [queue for queue in queues if queue is not None]
        """The queues of the background hooks."""
        self.condition: Callable[..., bool] | None = None
        """The condition of the call, if it is the only one of the group and is not queued."""
        if len(self.calls) == 1 and self.calls[0].queue is None:
            self.condition = self.calls[0].condition

    def is_skipped(
        self,
        args: Args,
        keywords: Keywords,
        step: int | None,
    ) -> bool:
        """Return whether the only call of the group is skipped, as its condition is false.

        This costs a third of `HookCalls`, which checks the conditions of several calls. An error of
        the condition is handled like an error of the call, which is then skipped, too.
        """
        if self.condition is None:
            return False
        try:
            return not self.condition(*args, **keywords)
        except BaseException as error:
            log_or_raise(self, 0, step, error)
            return True

    def functions_with(
        self,
        observers: Sequence[Observer],
        keywords: Keywords,
    ) -> Sequence[AsyncFunction]:
        """Return the functions of the calls, wrapped for one call of the method.

        Args:
            observers: notified of each call of a function.
            keywords: the keyword arguments, which are bound to each function.
        """
        functions: list[AsyncFunction] = []
        for call in self.calls:
            function: AsyncFunction = call.function
            if observers:
                function = functools.partial(
                    observed_call, function, self.kind, call.name, observers
                )
            if keywords:
                function = functools.partial(function, **keywords)
            functions.append(function)
        return functions


def _unless_skipped(
    function: AsyncFunction,
    registered: RegisteredHook,
    no_result: Any,
    *,
    has_own_task: bool,
) -> AsyncFunction:
    """Return a function that calls another one, or returns `no_result` if the call is skipped.

    A success sets the count of failures in a row back to 0. A call that was left behind, as it has
    ignored its cancellation, has failed even if it returns later.
    """

    async def call(*args: Any, **keywords: Any) -> Any:
        # This is checked when the call begins: the hook may have been disabled, or called once,
        # since its caller decided to make the call.
        if not registered.begin_call():
            return no_result
        result = await function(*args, **keywords)
        # Only a task of its own can be left behind.
        if not has_own_task or current_task() not in LEFT_BEHIND:
            registered.failures_in_a_row = 0
        return result

    return call


def order_groups(
    calls: Iterable[HookCall],
    grace_secs: float,
    *,
    one_by_one: bool = False,
) -> tuple[OrderGroup, ...]:
    """Sort the calls of a method into groups of hooks of one `order`, the lowest first.

    With `one_by_one`, each hook is a group of its own, so that hooks of the same order are called
    one after another, too.
    """
    order = operator.attrgetter("registered.registration.order")
    in_order = sorted(calls, key=order)
    # The `id` of each call is another key, so that `groupby` puts each call into a group.
    key = id if one_by_one else order
    groups = [
        OrderGroup(calls_of_group, grace_secs)
        for _, calls_of_group in itertools.groupby(in_order, key)
    ]
    return tuple(groups)


# The options that only a session uses are separate keywords, and not fields of one object, which
# each call would have to make.
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
    """Make the calls of `groups`, and return their results, one for each hook, in that order.

    A group is complete before the next one starts. Calls of a group start in order. Calls that
    cannot wait are made in the caller's task. The others run concurrently, as in `Calls`. A call
    that is skipped, or whose error is only logged, has the result None.

    Failures of background calls that were queued before are raised after the last group, so that
    each hook still gets this call. If this call fails itself, they are left for the next call.

    Args:
        groups: the groups.
        args: the arguments of each call.
        keywords: the keyword arguments of each call.
        second_args: the second argument of each call, if it differs from hook to hook: a sequence
            for each group. `args` then has the first argument alone.
        step: the step for the notes of errors.
        waits: the waits of the run that the calls are part of.
        observers: the observers of the calls, by default the observers of the waiting run.

    Raises:
        BaseException: the failure of a hook, several as one group, or the cancel of the caller.
    """
    results: list[Any] = []
    # The queues with failures of background calls, each with the number of its failures so far. A
    # background call that fails from now on adds another one, which is left for the next call.
    failed_queues: list[tuple[Queue[Any], int]] = []
    scope = None if waits is None else waits.scope
    for group in groups:
        notified = observers
        if scope is not None and not observers:
            # Read for each group: a hook of the previous group may have added observers of the run.
            notified = scope.observers
        functions = group.functions
        if notified or keywords:
            functions = group.functions_with(notified, keywords)
        group_second_args = None if second_args is None else next(second_args)
        if group.may_wait:
            arguments = [args] * len(functions)
            if group_second_args is not None:
                arguments = [(*args, second) for second in group_second_args]
            failed_queues += [
                (queue, len(queue.failures)) for queue in group.queues if queue.failures
            ]
            if group.is_skipped(arguments[0], keywords, step):
                results.append(None)
                continue
            calls = HookCalls(group, step, waits)
            calls.start_all(functions, arguments, keywords)
            await calls.wait()
            results += calls.results
            continue
        # Hot path: no call of the group may wait, so each is made in the caller's task. The loops
        # share an iterator: after an error that is only logged, they continue with the next call.
        first_result = len(results)
        remaining: Any = iter(functions)
        if group_second_args is not None:
            remaining = zip(remaining, group_second_args, strict=True)
        while True:
            try:
                # Two loops: a tuple of arguments for each call would cost a sixth of a run.
                if group_second_args is None:
                    for function in remaining:
                        results.append(await function(*args))
                else:
                    for function, second in remaining:
                        results.append(await function(args[0], second))
                break
            except BaseException as error:
                # Each call before has a result, so the failed call has the place behind them.
                log_or_raise(group, len(results) - first_result, step, error)
                results.append(None)
    if failed_queues:
        failures: list[BaseException] = []
        for queue, count in failed_queues:
            failures += queue.take_failures(count)
        raise_failures(failures, "background calls failed")
    return results


def log_or_raise(
    group: OrderGroup,
    number: int,
    step: int | None,
    error: BaseException,
) -> None:
    """Log or raise the error of a call that was made in the caller's task.

    If the error is only logged (`on_error="log"`), this returns, and the next hook is called.

    Args:
        group: the group of the call.
        number: the place of the call in the group, from 0.
        step: the step for messages.
        error: the error that the call has raised.
    """
    who = _at_step(group.calls[number].name, step)
    failure = error
    if isinstance(error, asyncio.CancelledError):
        # The call could not wait, so no cancel of the caller reached it: the hook raised the error.
        failure = hook_cancelled_error(who, error)
    try:
        if not group.hooks[number].suppresses(who, failure):
            add_origin(failure, who)
            raise_unchanged(failure)
    finally:
        # The traceback of the error refers to this frame, whose variables would refer to the error:
        # only the garbage collector would free such a cycle.
        del failure, error


def _at_step(name: str, step: int | None) -> str:
    """Return the name of a call in messages, with its step if it has one."""
    return name if step is None else f"{name} at step {step}"


class HookCalls(Calls):
    """The calls of one order group of which some may wait, while they run.

    A call has the number of its place in the group, from 0.
    """

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
        functions: Sequence[AsyncFunction],
        arguments: Sequence[Args],
        keywords: Keywords = NO_KEYWORDS,
    ) -> None:
        """Start the calls that may wait, and make the calls that cannot wait, in their order.

        After a failure that is raised, no other call is started.

        Args:
            functions: the function of each call, bound to its keyword arguments.
            arguments: the positional arguments of each call.
            keywords: the keyword arguments, for the conditions of the calls. The functions have
                them already.
        """
        # The condition of a group is that of its only call, which `is_skipped` has checked.
        is_checked = self._group.condition is not None
        for number, call in enumerate(self._group.calls):
            function = functions[number]
            try:
                # Too few `arguments` are a failure of this call, which ends the other calls.
                args = arguments[number]
                if not call.may_wait:
                    # A condition is there to avoid a task. This call needs none, so it has no
                    # condition: it is made in the task and the context of the caller. It may change
                    # the context even if it fails, so the change is noted before.
                    self.note_context_change()
                    self.results[number] = result_now(function(*args))
                elif is_checked or call.condition is None or call.condition(*args, **keywords):
                    self.start(number, function, args, call.name, call.timeout)
            except BaseException as error:
                self.record_failure(number, error)
            # A failure that is raised, and not only logged, has cancelled the calls.
            if self.cancelling:
                break

    def describe(self, number: int) -> str:
        return _at_step(self._group.calls[number].name, self._step)

    def hook(self, number: int) -> Any:
        """Return the hook of a call."""
        return self._group.hooks[number].hook

    def timeout_error(self, number: int, task: asyncio.Task[Any]) -> HookTimeoutError:
        # Imported here, as it is seldom needed and slow to import.
        from aiohooks._why.tasks import describe_suspension

        who = self.describe(number)
        secs = self._group.calls[number].timeout
        error = HookTimeoutError(
            f"{who} took longer than its timeout of {secs} s; give it more with"
            " configure(hook, timeout=...)"
        )
        add_note(error, describe_suspension(task))
        return error

    def suppresses(self, number: int, error: BaseException) -> bool:
        if self._group.calls[number].queue is not None:
            # The call could not be queued, as the group was left or the session has failed. The
            # hook has not failed: neither its `on_error` nor its `disable_after` applies.
            return False
        return self._group.hooks[number].suppresses(self.describe(number), error)
