"""Calling one method of several hooks as one: in turn while none suspends, overlapping from then on.

OrderGroup     the calls of one method that start together: hooks of one `order`
order_groups   sorts the hooks that override a method into such groups
HookCaller     calls them, group after group; it is the batch that the lazy gather sees
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from aiohooks._aio.cancel import cancel_count, current_task
from aiohooks._aio.gather import Batch, LazyGather, Overlap
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import HookCancelledError, HookTimeoutError

_logger = logging.getLogger("aiohooks")

Method = Callable[..., Coroutine[Any, Any, Any]]


class OrderGroup:
    """The calls of one method that start together: hooks of one `order`, in registration order."""

    __slots__ = ("grace_secs", "has_timeouts", "methods", "names", "number", "registrations", "size", "timeouts")

    def __init__(
        self,
        method: str,
        registered: Sequence[tuple[str, HookRegistration]],
        grace_secs: float,
        timeout: float | None = None,
        *,
        without_argument: bool = False,
    ) -> None:
        """Take the named hooks that override `method`; `timeout` is for those without a time limit of their own."""
        self.number: int = 0
        """Its place among the groups of the method."""
        self.grace_secs: float = grace_secs
        self.size: int = len(registered)
        self.registrations: tuple[HookRegistration, ...] = tuple(registration for _, registration in registered)
        self.timeouts: tuple[float | None, ...] = tuple(
            timeout if one.timeout is None else one.timeout for one in self.registrations
        )
        self.has_timeouts: bool = any(secs is not None for secs in self.timeouts)
        self.names: tuple[str, ...] = tuple(f"{name}.{method}" for name, _ in registered)
        methods: list[Method] = [getattr(one.hook, method) for one in self.registrations]
        if without_argument:
            methods = [_without_argument(each) for each in methods]
        self.methods: tuple[Method, ...] = tuple(
            _log_errors(each, name) if one.on_error == "log" else each
            for each, one, name in zip(methods, self.registrations, self.names, strict=True)
        )


def order_groups(method: str, registered: Iterable[tuple[str, HookRegistration]], grace_secs: float) -> tuple[OrderGroup, ...]:
    """Sort the hooks that override `method` into groups of one `order`, the lowest first."""
    registered = tuple(registered)
    groups: list[OrderGroup] = []
    for order in sorted({one.order for _, one in registered}):
        groups.append(OrderGroup(method, [pair for pair in registered if pair[1].order == order], grace_secs))
        groups[-1].number = len(groups) - 1
    return tuple(groups)


class HookCaller(LazyGather, Batch):
    """Calls order groups, and is the batch of the calls that it awaits: one group at a time, so it can be used again.

    `await drive(coro, caller)`, and inside `coro`: `await caller.call(groups, ...)`, any number of times.
    """

    __slots__ = ("_before", "_first", "_group", "_late_results", "_results", "_seconds", "_step")

    has_dependencies = False
    batch: Batch | None
    overlap: Overlap | None

    async def call(
        self, groups: tuple[OrderGroup, ...], first: Any, seconds: Sequence[Sequence[Any]] | None = None, step: int | None = None
    ) -> list[Any]:
        """Call the methods with `first` and, if given, each with its own of `seconds`; return the results in order of the groups.

        A group is complete before the next one starts. Errors are raised as `aiohooks._aio.gather` says; `step` is for their
        notes.
        """
        results: list[Any] = []
        self._results, self._first, self._step = results, first, step
        for group in groups:
            self._group, self._before = group, len(results)
            self._seconds = own = None if seconds is None else seconds[group.number]
            self.batch = self
            try:
                # Two loops, as a call with `*args` costs twice as much: this is on the path of every run.
                if own is None:
                    for method in group.methods:
                        results.append(await method(first))
                        if self.overlap is not None:
                            break
                else:
                    for method, second in zip(group.methods, own):  # noqa: B905 - of one length
                        results.append(await method(first, second))
                        if self.overlap is not None:
                            break
            except BaseException as error:
                await self.fail(error)
            else:
                if self.overlap is not None:
                    await self.join()
            finally:
                self.batch = self.overlap = None
        return results

    # -- the batch

    @property
    def grace_secs(self) -> float:
        return self._group.grace_secs

    @property
    def has_timeouts(self) -> bool:
        return self._group.has_timeouts

    def ready(self) -> Iterable[int]:
        self._late_results: dict[int, Any] = {}
        return range(self.current() + 1, self._group.size)

    def start(self, number: int) -> Coroutine[Any, Any, Any]:
        method, seconds = self._group.methods[number], self._seconds
        return method(self._first) if seconds is None else method(self._first, seconds[number])

    def current(self) -> int:
        return len(self._results) - self._before

    def store(self, number: int, result: Any) -> None:
        """Keep the result until those before it are there."""
        self._late_results[number] = result

    def complete(self) -> None:
        self._results.extend(self._late_results.get(number) for number in range(self.current(), self._group.size))

    def name(self, number: int) -> str:
        return self._group.names[number]

    def describe(self, number: int) -> str:
        name = self._group.names[number]
        return name if self._step is None else f"{name} at step {self._step}"

    def hook(self, number: int) -> Any:
        """Return the hook itself."""
        return self._group.registrations[number].hook

    def timeout_secs(self, number: int) -> float | None:
        return self._group.timeouts[number]

    def timeout_error(self, number: int, suspended_at: str) -> HookTimeoutError:
        return hook_timeout_error(self.describe(number), self._group.timeouts[number], suspended_at)

    def cancelled_error(self, number: int, cause: BaseException) -> HookCancelledError:
        return hook_cancelled_error(self.describe(number), cause)

    def suppresses(self, number: int, error: BaseException) -> bool:
        """Log the error of a hook with `on_error="log"`: one of the time limit, or of a task that was cancelled."""
        if self._group.registrations[number].on_error != "log" or not isinstance(error, Exception):
            return False
        _log(self.describe(number), error)
        return True


def hook_timeout_error(
    who: str, secs: float | None, suspended_at: str, advice: str = "give it more with configure(hook, timeout=...)"
) -> HookTimeoutError:
    """Return the error for a call that took longer than its time limit, with a note that says where it was suspended."""
    error = HookTimeoutError(f"{who} took longer than its timeout of {secs} s; {advice}")
    error.add_note(suspended_at)
    return error


def hook_cancelled_error(who: str, cause: BaseException) -> HookCancelledError:
    """Return the error for a call that was cancelled by a third party: it must not vanish, nor look like the caller's."""
    error = HookCancelledError(
        f"{who} was cancelled, and not by its session; to end the session, request a stop or raise an error"
    )
    error.__cause__ = cause
    return error


def _without_argument(method: Method) -> Method:
    def call(_: Any) -> Coroutine[Any, Any, Any]:
        return method()

    return call


def _log_errors(method: Method, name: str) -> Method:
    async def call(*args: Any) -> Any:
        base = cancel_count(current_task())
        try:
            return await method(*args)
        except asyncio.CancelledError as error:
            if current_task().cancelling() > base:
                raise
            _log(name, error)
        except Exception as error:
            _log(name, error)

    return call


def _log(name: str, error: BaseException) -> None:
    _logger.error("%s failed; continuing, as its on_error says", name, exc_info=error)
