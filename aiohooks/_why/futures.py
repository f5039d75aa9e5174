"""What sets a future: tasks, other futures, or a call in a thread.

asyncio and concurrent.futures have no public way to ask for that, so private attributes are read.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import threading
import types
from collections.abc import Iterable, Mapping
from typing import Any

from aiohooks._core.activity import Awaited
from aiohooks._why.tasks import Frame, frames_of, is_library, threads

Stacks = Mapping[int, Frame]
"""The innermost frame of each thread, by its ID."""
_VARIABLES = {
    "shield.<locals>._outer_done_callback": "inner",
    "_chain_future.<locals>._call_check_cancel": "source",
}
"""The callbacks of a future that is set by another one, and the variable that has the other."""


def sources_of(future: Any, stacks: Stacks) -> list[Any]:
    """Return the tasks, the futures, the thread or the call that set a future."""
    if future.done():
        return []
    if isinstance(future, concurrent.futures.Future):
        call: concurrent.futures.Future[Any] = future  # pyright: ignore[reportUnknownVariableType]
        return _sources_of_call(call, stacks)
    children = getattr(future, "_children", None) or ()  # of `asyncio.gather`
    callbacks = getattr(future, "_callbacks", None) or ()
    futures = _from_callbacks(callback for callback, _ in callbacks)
    return [*children, *futures]


def _sources_of_call(
    call: concurrent.futures.Future[Any],
    stacks: Stacks,
) -> list[Any]:
    """Return the task, the thread or the executor that makes a call."""
    tasks = _from_callbacks(getattr(call, "_done_callbacks", ()))
    if tasks:
        return tasks  # of `run_coroutine_threadsafe`
    name = "a call that has not begun"
    if call.running():
        thread = _thread_of_call(call, stacks)
        if thread is not None:
            return [thread]
        name = "a call that no thread of this process runs"
    return [Awaited("call", name, key=call)]


def _thread_of_call(
    call: object,
    stacks: Stacks,
) -> threading.Thread | None:
    """Return the thread that runs the call of an executor, given the frames of all threads."""
    for thread in threads():
        for frame in frames_of(stacks.get(thread.ident or 0)):
            if frame.f_code.co_name != "run" or not is_library(frame):
                continue
            # The work items of an executor have the futures of their calls, as private parts.
            work = frame.f_locals.get("self")
            if getattr(work, "future", None) is call:
                return thread
    return None


def _from_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Return the futures in the closures of the callbacks that `shield` and `wrap_future` add."""
    sources: list[Any] = []
    for callback in callbacks:
        if not isinstance(callback, types.FunctionType):
            continue
        variable = _VARIABLES.get(callback.__qualname__)
        if variable is not None:
            closure = inspect.getclosurevars(callback)
            sources.append(closure.nonlocals[variable])
    return sources
