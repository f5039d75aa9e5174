"""Injected bugs: each changes the library for a while, and the model must find it, as a violation
of the law that it breaks.

Most are placed at the edge of what is tested - `run`, the methods of a hook, the store - so that
they stay what they are while the library changes inside; the last ones in what all calls of users'
code go through.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import Any

import aiohooks as ah
from aiohooks._core.calls import Calls
from aiohooks._core.clock import wake
from aiohooks.dispatch.answers import SortedHooks, WrapperCall
from aiohooks.errors import raise_unchanged
from aiohooks.graph.graph import Values
from aiohooks.graph.session import Session
from aiohooks.session.coordinator import TasksOwner
from aiohooks.session.hook import HookSet
from aiohooks.session.lifecycle import Lifecycle
from tests.fuzz._harness import Bug, Bugs, Method
from tests.fuzz.random_programs import model
from tests.support.waiting import forever

BUGS = Bugs()
"""Each with the law that is broken."""
bug = BUGS.add


async def run_with(bug: Bug) -> None:
    """Run a program while the library has a bug."""
    with bug.injected():
        await model.run()


def _in_the_library(statement: str) -> None:
    exec(statement, {"__name__": "aiohooks.bug", "task": asyncio.current_task()})


@bug(ah.AsyncMonitoredSession, "run", "cancel lost")
async def run_swallows_a_cancel(run: Method, *args: Any) -> Any:
    try:
        return await run(*args)
    except asyncio.CancelledError:
        return None


@bug(ah.AsyncMonitoredSession, "run", "cancel count")
async def count_is_reset(run: Method, *args: Any) -> Any:
    try:
        return await run(*args)
    except asyncio.CancelledError:
        _in_the_library("task.uncancel()")
        raise


@bug(ah.AsyncMonitoredSession, "run", "cancel count")
async def own_cancel_is_left(run: Method, self: Any, *args: Any) -> Any:
    _in_the_library("task.cancel()")
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    return await run(self, *args)


@bug(ah.AsyncMonitoredSession, "run", "error replaced")
async def single_error_is_grouped(run: Method, *args: Any) -> Any:
    try:
        return await run(*args)
    except Exception as error:
        raise ExceptionGroup("one", [error]) from None


@bug(ah.AsyncMonitoredSession, "run", "error invented")
async def failure_of_the_librarys_own(run: Method, *args: Any) -> Any:
    await run(*args)
    raise RuntimeError("nothing has failed")


@bug(ah.AsyncMonitoredSession, "run", "values")
async def values_of_another_shape(run: Method, *args: Any) -> Any:
    return [await run(*args)]


@bug(ah.AsyncMonitoredSession, "run", "task left")
async def task_is_left(run: Method, *args: Any) -> Any:
    keep.append(asyncio.get_running_loop().create_task(forever()))
    return await run(*args)


keep: list[Any] = []


@bug(ah.AsyncMonitoredSession, "run", "an error was lost")
async def error_is_never_retrieved(run: Method, *args: Any) -> Any:
    asyncio.get_running_loop().create_future().set_exception(ValueError())
    return await run(*args)


@bug(ah.AsyncMonitoredSession, "run", "a deadlock")
async def wake_up_is_lost(run: Method, *args: Any) -> Any:
    await run(*args)
    await asyncio.get_running_loop().create_future()


@bug(ah.AsyncMonitoredSession, "until", "error lost")
async def until_loses_the_error(until: Method, *args: Any, **options: Any) -> Any:
    with contextlib.suppress(Exception):
        return await until(*args, **options)


@bug(ah.AsyncMonitoredSession, "request_stop", "values")
def stop_is_forgotten(request_stop: Method, *args: Any) -> None:
    pass


@bug(Values, "prepare", "values")
def variables_are_committed_twice(prepare: Method, *args: Any) -> dict[str, Any]:
    return {name: value + 1 for name, value in prepare(*args).items()}


@bug(Session, "run", "values")
async def raw_run_is_repeated(run: Method, *args: Any, **options: Any) -> Any:
    await run(*args, **options)
    self, step = args[0], args[0].global_step.latest.step
    self.variables.assign({"v": step + 1})
    return await run(*args, **options)


@bug(ah.AsyncMonitoredSession, "__aexit__", "error replaced")
async def error_of_the_body_is_swallowed(leave: Method, *args: Any) -> bool:
    await leave(*args)
    return True


@bug(ah.AsyncMonitoredSession, "__aexit__", "close")
async def hooks_are_not_closed(leave: Method, self: Any, *args: Any) -> bool:
    self._lifecycle.hooks.begun.clear()
    return await leave(self, *args)  # type: ignore[no-any-return]


@bug(HookSet, "close", "close")
async def hooks_are_closed_twice(close: Method, self: HookSet, *args: Any) -> None:
    begun = list(self.begun)
    await close(self, *args)
    self.begun.extend(begun)
    await close(self, *args)


@bug(ah.AsyncMonitoredSession, "__aexit__", "end")
async def end_after_an_error(
    leave: Method, self: Any, kind: Any, error: Any, traceback: Any
) -> bool:
    result = await leave(self, None, None, None)
    return bool(result)


@bug(TasksOwner, "take_owed", "failure kept")
def failure_of_a_task_is_dropped_at_the_end(*args: Any) -> list[BaseException]:
    return []


@bug(Lifecycle, "begin_run", "turns")
def runs_overlap(begin_run: Method, self: Lifecycle) -> Any:
    scope = begin_run(self)
    self.turns.taken = False
    return scope


# -- in the calls of users' code


@bug(Calls, "wait", "caller cancelled")
async def caller_is_cancelled_to_wake_it(wait: Method, self: Calls) -> None:
    if self.pending:
        _in_the_library("task.cancel()")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        _in_the_library("task.uncancel()")
    await wait(self)


@bug(Calls, "_raise", "cancel lost")
def outer_cancel_is_dropped_beside_a_failure(raise_: Method, self: Calls, ending: Any) -> None:
    if ending.errors:
        ending.caller_cancel = None
    raise_(self, ending)


@bug(Calls, "_raise", "cancel invented")
def own_cancel_is_taken_for_the_callers(raise_: Method, self: Calls, ending: Any) -> None:
    if self.cancelling and ending.errors and ending.caller_cancel is None:
        raise_unchanged(asyncio.CancelledError())
    raise_(self, ending)


@bug(Calls, "_call_failed", "error lost")
def cancel_by_a_third_party_is_swallowed(
    call_failed: Method, self: Calls, number: int, error: BaseException
) -> None:
    if isinstance(error, asyncio.CancelledError):
        self._call_ended(number)
    else:
        call_failed(self, number, error)


@bug(Calls, "_cancel_calls", "task left")
def cancelled_calls_are_not_awaited(cancel_calls: Method, self: Calls) -> None:
    cancel_calls(self)
    self.pending = 0
    if self._idle is not None:
        wake(self._idle)


@bug(Calls, "start", "context")
def calls_share_a_context(start: Method, self: Calls, *args: Any, **options: Any) -> None:
    if self._caller is None:
        self._caller = contextvars.copy_context()
    start(self, *args[:5], context=self._caller)


@bug(Calls, "finish", "context")
def contexts_are_not_given_back(finish: Method, self: Calls) -> None:
    self.contexts.clear()
    finish(self)


@bug(Calls, "end", "error lost")
def result_is_kept_after_the_end(end: Method, self: Calls, cause: BaseException) -> None:
    end(self, cause)
    if self._ending is not None:
        self._ending.cause = None


@bug(WrapperCall, "call_next", "error lost")
async def wrapped_error_is_swallowed(call: Method, *args: Any, **keywords: Any) -> Any:
    try:
        return await call(*args, **keywords)
    except Exception:
        return []


@bug(WrapperCall, "call_next", "values")
async def wrapped_call_is_made_twice(call: Method, *args: Any, **keywords: Any) -> Any:
    return [*await call(*args, **keywords), *await call(*args, **keywords)]


@bug(SortedHooks, "_call_one_by_one", "values")
async def chained_result_is_dropped(call: Method, *args: Any) -> Any:
    found = await call(*args)
    return found[:1] if isinstance(found, list) else found
