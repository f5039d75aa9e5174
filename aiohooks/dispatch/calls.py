"""Calling one method of several hooks as one: in turn while none suspends, overlapping from then on.

RegisteredHook   a hook of one group or session, with its failures
OrderGroup       the calls of one method that start together: hooks of one `order`
order_groups     sorts the hooks that override a method into such groups
call_groups      calls them, group after group
HookCalls        the calls of one group, once one of them has suspended or failed
"""

from __future__ import annotations

import asyncio
import functools
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

from aiohooks._aio.cancel_watch import current_task
from aiohooks._aio.gather import ENDED, LazyGather, Overlap, raise_failure, run_overlapping
from aiohooks._aio.observers import Observer, observed_call
from aiohooks._aio.run_scope import current_scope
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import HookCancelledError, HookTimeoutError, add_note

_logger = logging.getLogger("aiohooks")

Method = Callable[..., Awaitable[Any]]


class RegisteredHook:
    """A hook in one group or session, with what has become of its calls."""

    __slots__ = ("disabled", "failures", "failures_in_a_row", "name", "registration")

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

    def log_failure(self, who: str, error: BaseException) -> None:
        """Log the first failure with its traceback, then only every tenth, hundredth and so on."""
        self.failures += 1
        self.failures_in_a_row += 1
        number = self.failures
        if number == 1:
            _logger.error("%s failed; continuing, as its on_error says", who, exc_info=error)
        elif number == 10 ** (len(str(number)) - 1):
            _logger.error("%s failed for the %sth time; continuing, as its on_error says: %r", who, number, error)
        limit = self.registration.disable_after
        if limit is not None and self.failures_in_a_row >= limit and not self.disabled:
            self.disabled = True
            _logger.warning("%s failed %s times in a row and is not called any more, as its disable_after says", self.name, limit)

    def __repr__(self) -> str:
        return f"<{self.name}{', disabled' if self.disabled else ''}>"


def bound_method(registered: RegisteredHook, method: str) -> Method:
    """Return the method of the hook itself."""
    bound: Method = getattr(registered.hook, method)
    return bound


class OrderGroup:
    """The calls of one method that start together: hooks of one `order`, in registration order."""

    __slots__ = (
        "_observed", "grace_secs", "has_timeouts", "hooks", "methods", "names", "number", "size", "suspended", "timeouts",
    )  # fmt: skip

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
        self.number: int = 0
        """Its place among the groups of the method."""
        self.grace_secs: float = grace_secs
        self.size: int = len(hooks)
        self.hooks: tuple[RegisteredHook, ...] = tuple(hooks)
        queued = [bind is not bound_method and one.registration.background for one in hooks]
        self.timeouts: tuple[float | None, ...] = tuple(  # a queued call has its time limit when it runs
            None if is_queued else timeout if one.registration.timeout is None else one.registration.timeout
            for one, is_queued in zip(hooks, queued, strict=True)
        )
        self.has_timeouts: bool = any(secs is not None for secs in self.timeouts)
        self.names: tuple[str, ...] = tuple(f"{one.name}.{method}" for one in hooks)
        self.suspended: dict[asyncio.Task[Any], _Detachable] = {}
        """The calls with a time limit that run in their caller's task."""
        methods: list[Method] = []
        for one, secs, is_queued in zip(hooks, self.timeouts, queued, strict=True):
            call = bind(one, method)
            if one.registration.disable_after is not None and not is_queued:
                call = _unless_disabled(call, one)
            methods.append(call if secs is None else _detachable(call, self.suspended, f"{one.name}.{method}"))
        self.methods: tuple[Method, ...] = tuple(methods)
        self._observed: tuple[tuple[Observer, ...], list[Method]] = (), methods

    def observed_methods(self, observers: Sequence[Observer]) -> list[Method]:
        """Return the methods, with `observers` that are notified of each call: mostly those of the call before."""
        notified = tuple(observers)
        known, methods = self._observed
        if known != notified:
            methods = [
                functools.partial(observed_call, method, "hook", name, notified)
                for method, name in zip(self.methods, self.names, strict=True)
            ]
            self._observed = notified, methods
        return methods


def order_groups(
    method: str, hooks: Iterable[RegisteredHook], grace_secs: float, bind: Callable[[RegisteredHook, str], Method] = bound_method
) -> tuple[OrderGroup, ...]:
    """Sort the hooks that override `method` into groups of one `order`, the lowest first."""
    hooks = tuple(hooks)
    groups: list[OrderGroup] = []
    for order in sorted({one.registration.order for one in hooks}):
        groups.append(OrderGroup(method, [one for one in hooks if one.registration.order == order], grace_secs, bind=bind))
        groups[-1].number = len(groups) - 1
    return tuple(groups)


@types.coroutine
def call_groups(
    groups: tuple[OrderGroup, ...],
    args: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
    seconds: Sequence[Sequence[Any]] | None = None,
    step: int | None = None,
    gather: LazyGather | None = None,
    observers: Sequence[Observer] = (),
) -> Generator[Any, Any, list[Any]]:
    """Call the methods of `groups` as `aiohooks._aio.gather` says, and return the results in order of the groups.

    A group is complete before the next one starts. This is `lazily` for the calls of hooks, which continue after a failure that
    is only logged; nothing is made that a call which does not suspend can do without.

    Args:
        groups: the groups.
        args: the arguments of each method.
        keywords: further ones.
        seconds: a second argument of its own for each method, by group; `args` is the first one then.
        step: for the notes of errors.
        gather: of the run that the calls are part of.
        observers: notified of the calls; by default those of the run.

    Raises:
        BaseException: the failure of a hook; several as one group; or the cancel from outside.
    """
    results: list[Any] = []
    overlaps: list[Overlap] = []
    scope = current_scope.get() if gather is None else gather.scope
    failure: BaseException | None = None
    for group in groups:
        methods: Sequence[Method] = group.methods
        notified = observers or (() if scope is None else scope.observers)  # a hook of the group before may have added some
        if notified:
            methods = group.observed_methods(notified)
        if keywords:
            methods = [functools.partial(method, **keywords) for method in methods]
        # When one suspends, the rest is taken out of the iterator and started: so the coroutine ends with the one that did.
        calls: Iterator[Any] = iter(methods) if seconds is None else zip(methods, seconds[group.number])  # noqa: B905 - of one length
        before = len(results)
        while True:
            in_turn = _call_in_turn if seconds is None else _call_with_seconds
            coro = in_turn(calls, args, results, overlaps)
            waiting: Any = None
            try:
                waiting = next(coro.__await__(), ENDED)
            except BaseException as error:
                failure = error
            if waiting is ENDED:
                break
            overlapping = HookCalls(group, calls, args, results, before, step)
            try:
                if failure is None:
                    yield from run_overlapping(coro, waiting, overlapping, overlaps, gather, scope)
                    break
                raise_failure(overlapping, failure)
                results.append(None)
            finally:
                failure = None
    return results


async def _call_in_turn(methods: Iterator[Method], args: tuple[Any, ...], results: list[Any], overlaps: list[Overlap]) -> None:
    for method in methods:
        results.append(await method(*args))  # noqa: PERF401 - their number says which one suspends
    if overlaps:
        await overlaps[0].join()


async def _call_with_seconds(
    calls: Iterator[tuple[Method, Any]], args: tuple[Any, ...], results: list[Any], overlaps: list[Overlap]
) -> None:
    (first,) = args
    for method, second in calls:
        results.append(await method(first, second))
    if overlaps:
        await overlaps[0].join()


class HookCalls(Overlap):
    """The calls of one order group, of which one has suspended or failed."""

    __slots__ = ("_args", "_before", "_calls", "_group", "_own_results", "_step")

    def __init__(
        self, group: OrderGroup, calls: Iterator[Any], args: tuple[Any, ...], results: list[Any], before: int, step: int | None
    ) -> None:
        """Take the rest of the calls, and the results so far, of which those from `before` on are of this group."""
        self._group = group
        self._calls = calls
        self._args = args
        self._own_results = results
        self._before = before
        self._step = step
        self.number: int = len(results) - before
        self.results: list[Any] = [None] * group.size
        self.names: Sequence[str] | Mapping[int, str] = group.names
        self.has_timeouts: bool = group.has_timeouts
        self.grace_secs: float = group.grace_secs

    def ready(self) -> Iterable[tuple[int, Method, tuple[Any, ...]]]:
        numbers, args = range(self.number + 1, self._group.size), self._args
        if isinstance(self._calls, zip):
            return [(number, method, (*args, second)) for number, (method, second) in zip(numbers, self._calls, strict=True)]
        return zip(numbers, tuple(self._calls), repeat(args))

    def complete(self) -> None:
        self._own_results.extend(self.results[len(self._own_results) - self._before :])

    def describe(self, number: int) -> str:
        name = self._group.names[number]
        return name if self._step is None else f"{name} at step {self._step}"

    def hook(self, number: int) -> Any:
        """Return the hook itself."""
        return self._group.hooks[number].hook

    def timeout_secs(self, number: int) -> float | None:
        return self._group.timeouts[number]

    def timeout_error(self, number: int, suspended_at: str) -> HookTimeoutError:
        return hook_timeout_error(self.describe(number), self._group.timeouts[number], suspended_at)

    def cancelled_error(self, number: int, cause: BaseException) -> HookCancelledError:
        return hook_cancelled_error(self.describe(number), cause)

    def suppresses(self, number: int, error: BaseException) -> bool:
        """Log the error of a hook with `on_error="log"`."""
        registered = self._group.hooks[number]
        if registered.registration.on_error != "log" or not isinstance(error, Exception):
            return False
        registered.log_failure(self.describe(number), error)
        return True

    def leave_behind(self, number: int, task: asyncio.Task[Any]) -> bool:
        call = self._group.suspended.get(task)
        if call is None:
            return False
        call.left_behind = True
        return True


def hook_timeout_error(
    who: str, secs: float | None, suspended_at: str, advice: str = "give it more with configure(hook, timeout=...)"
) -> HookTimeoutError:
    """Return the error for a call that took longer than its time limit, with a note that says where it was suspended."""
    error = HookTimeoutError(f"{who} took longer than its timeout of {secs} s; {advice}")
    add_note(error, suspended_at)
    return error


def hook_cancelled_error(who: str, cause: BaseException) -> HookCancelledError:
    """Return the error for a call that was cancelled by a third party: it must not vanish, nor look like the caller's."""
    error = HookCancelledError(
        f"{who} was cancelled, and not by its caller; to end the session, request a stop or raise an error"
    )
    error.__cause__ = cause
    return error


def _unless_disabled(method: Method, registered: RegisteredHook) -> Method:
    async def call(*args: Any, **keywords: Any) -> Any:
        if registered.disabled:
            return None
        result = await method(*args, **keywords)
        registered.failures_in_a_row = 0
        return result

    return call


def _detachable(method: Method, suspended: dict[asyncio.Task[Any], _Detachable], name: str) -> Method:
    def call(*args: Any, **keywords: Any) -> Awaitable[Any]:
        return _Detachable(method(*args, **keywords), suspended, name)

    return call


class _Detachable:
    """Awaits a call that can be left behind in its caller's task: from then on it continues in a task of its own."""

    __slots__ = ("_coro", "_name", "_suspended", "left_behind")

    tasks: set[asyncio.Task[None]] = set()  # noqa: RUF012 - the loop alone does not keep them alive

    def __init__(self, coro: Any, suspended: dict[asyncio.Task[Any], _Detachable], name: str) -> None:
        self._coro: Coroutine[Any, Any, Any] = coro
        self._suspended = suspended
        self._name = name
        self.left_behind: bool = False
        """Whether the next cancel is for the caller alone."""

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps(None)

    def _steps(self, error: BaseException | None) -> Generator[Any, Any, Any]:
        coro = self._coro
        task: asyncio.Task[Any] | None = None
        outer: _Detachable | None = None
        try:
            while True:
                try:
                    waiting = coro.send(None) if error is None else coro.throw(error)
                except StopIteration as stop:
                    return stop.value
                finally:
                    error = None  # its traceback has this frame
                if task is None:
                    task = current_task()
                    outer = self._suspended.get(task)  # a hook may call its own group
                    self._suspended[task] = self
                try:
                    yield waiting
                except BaseException as thrown:
                    if self.left_behind:
                        rest = asyncio.get_running_loop().create_task(self._continue(thrown), name=self._name)
                        self.tasks.add(rest)
                        rest.add_done_callback(self.tasks.discard)
                        raise
                    error = thrown
        finally:
            if task is not None:
                if outer is None:
                    self._suspended.pop(task, None)
                else:
                    self._suspended[task] = outer

    async def _continue(self, error: BaseException) -> None:
        self.left_behind = False
        try:
            await _awaitable(self._steps(error))
        except asyncio.CancelledError:
            pass  # what it was asked for
        except Exception as late:
            _logger.error("%s failed after it had been left running", self._name, exc_info=late)


@types.coroutine
def _awaitable(steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    return (yield from steps)
