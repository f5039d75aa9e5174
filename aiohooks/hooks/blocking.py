"""Objects with plain methods as hooks: each call in a worker thread, with a session whose methods
are plain too.

view          an object in place of the session or coordinator: its methods block in the thread, and
              the event loop does the work
thread call   one call of a method of the object, with the waits that its thread makes
own threads   threads that the object has started itself, which may use the views as well
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from aiohooks._core.calls import copy_back
from aiohooks._core.validate import check_secs, is_coroutine_function
from aiohooks._core.waits import DEFAULT_GRACE_SECS, current_task, to_thread, wait_done
from aiohooks.errors import InvalidHookError, SessionClosedError, WrongLoopError, next_feed
from aiohooks.graph.graph import Variables
from aiohooks.graph.session import Session
from aiohooks.session.coordinator import Coordinator
from aiohooks.session.hook import HOOK_METHODS, SessionRunHook
from aiohooks.stores.base import StepStore


class BlockingHook(SessionRunHook):
    """Calls the plain methods of any object as a hook, each in a worker thread, so that they may
    block.

    The object may have any of a hook's methods. Missing methods cost nothing. A hook written for
    TensorFlow runs unchanged: its arguments have the same methods, all of them plain.
    `session.run("loss")`, `run_context.session.run("loss")`, `session.variables.assign({"rate":
    0.1})` and `coord.wait_for_stop(5)` wait in the thread, while the event loop does the work.
    `request_stop` and `should_stop` are called directly. The object may keep its arguments for
    later methods, and for threads of its own. The session's graph is the default graph in each
    method. `StopIteration` of `before_run` is the end of the input, of any other method a failure.

    If you cancel the session, a wait of the thread raises `concurrent.futures.CancelledError`, as
    does each later call. The session waits for the thread, which cannot be stopped, for at most the
    grace period. When the hook is closed, waits of the object's own threads end in the same way,
    and later calls raise `SessionClosedError`. A call in the thread of the event loop raises
    `WrongLoopError`, because it would wait for itself.
    """

    def __init__(
        self,
        obj: Any,
        *,
        grace_secs: float = DEFAULT_GRACE_SECS,
    ) -> None:
        """Create a hook of `obj`. `grace_secs` is the grace period.

        Raises:
            InvalidHookError: it has none of the methods, or one of them is a coroutine function.
        """
        check_secs(grace_secs, "grace_secs")
        if isinstance(obj, type):
            raise InvalidHookError(
                f"BlockingHook got the class {obj.__name__}; give an object of it:"
                f" {obj.__name__}(...)"
            )
        methods = {
            name: getattr(obj, name) for name in HOOK_METHODS if callable(getattr(obj, name, None))
        }
        self._obj = obj
        if not methods:
            raise InvalidHookError(
                f"{obj!r} has none of the methods of a hook: {', '.join(HOOK_METHODS)}"
            )
        self._grace_secs = grace_secs
        self._calls: _LoopCalls | None = None
        for name, method in methods.items():
            if inspect.iscoroutinefunction(method):
                raise InvalidHookError(
                    f"{type(obj).__name__}.{name} is a coroutine function; register the hook as"
                    " it is"
                )
        self._close_method: Callable[..., Any] | None = methods.pop("close", None)
        for name, method in methods.items():
            # Methods are set on the instance. A session calls only methods that a hook has
            # overridden, so methods that the object does not have cost nothing.
            setattr(self, name, functools.partial(self._call, name, method))
        for option in ("order", "timeout", "on_error"):
            if hasattr(obj, option):
                setattr(self, option, getattr(obj, option))

    async def close(self, exc: BaseException | None) -> None:
        """Call `close` of the object, if it has that. Then end the waits of its own threads."""
        try:
            if self._close_method is not None:
                await self._call("close", self._close_method, exc)
        finally:
            calls = self._calls
            self._calls = None
            if calls is not None:
                await calls.end(self._grace_secs)

    async def _call(
        self,
        name: str,
        method: Callable[..., Any],
        *args: Any,
    ) -> Any:
        """Call a method of the object in a thread, with views in place of the arguments.

        A view is a `PlainView`: in the thread, its methods are plain, and wait for the event loop.
        """
        calls = self._calls
        # An earlier session that was never closed may have left an object for another event loop.
        if calls is None or not calls.is_of_running_loop():
            calls = self._calls = _LoopCalls()
        # The first argument of all other methods is a session or a context, of which the object
        # gets a view. `begin` has no arguments, and `close` gets an exception.
        if name not in ("begin", "close"):
            first, *others = args
            view = PlainView(first, calls)
            if name in ("before_run", "after_run"):
                # The context has a session, which needs a view as well.
                view = PlainView(first, calls, session=PlainView(first.session, calls))
            args = (view, *map(calls.view_of, others))
        if name == "before_run":
            # A coroutine cannot raise the `StopIteration` of the method. `next_feed` calls the
            # method, and raises the end of the input as `OutOfRangeError`.
            args = (method, *args)
            method = next_feed
        # The thread gets a copy of this context, so its waits belong to this call: a cancellation
        # of the call ends them.
        thread_call = _ThreadCall()
        token = _thread_call.set(thread_call)
        try:
            return await _call_in_thread(method, args, self._grace_secs, thread_call.cancel)
        finally:
            _thread_call.reset(token)

    def __repr__(self) -> str:
        return f"BlockingHook({self._obj!r})"


async def _call_in_thread(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    grace_secs: float,
    on_cancel: Callable[[], object],
) -> Any:
    """Call a function in a worker thread and return its result.

    Context variables that the function has set are set for the caller as well. A cancellation calls
    `on_cancel` and waits for the thread, which cannot be stopped, for at most `grace_secs`.
    """
    context = contextvars.copy_context()
    before = context.copy()
    call = functools.partial(function, *args)
    try:
        return await to_thread(
            context.run,
            call,
            grace_secs=grace_secs,
            on_cancel=on_cancel,
            what=f"thread of {function!r}",
        )
    finally:
        # This sets the variables whose values differ from those before the call.
        copy_back([(before, context)])


class _ThreadCall:
    """The waits of one call of a method, or of all own threads of the object.

    Each wait of a thread is a task in the event loop, so the event loop can end it.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.tasks: set[asyncio.Task[Any]] = set()

    def cancel(self) -> None:
        """End the current waits of the thread. Each later wait ends immediately."""
        self.cancelled = True
        for task in tuple(self.tasks):
            task.cancel()


_thread_call: contextvars.ContextVar[_ThreadCall | None] = contextvars.ContextVar(
    "aiohooks_thread_call",
    default=None,
)
"""The call of a method to which the current code belongs, or None in an own thread of the object.
"""


class _LoopCalls:
    """Calls functions in the event loop for the threads of one hook in one session, which wait for
    the results.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._own = _ThreadCall()
        """The waits of all own threads of the object together."""
        self._ended = False

    def is_of_running_loop(self) -> bool:
        """Return whether the running event loop is the one that makes the calls."""
        return self._loop is asyncio.get_running_loop()

    def view_of(self, value: Any) -> Any:
        """Return a view of an object whose methods need the event loop, or another value itself."""
        if isinstance(value, (Session, Coordinator, Variables, StepStore)):
            return PlainView(value, self)
        return value

    def call(
        self,
        what: str,
        fn: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Return the result of `fn(*args, **options)`, called in the event loop, and awaited if it
        is a coroutine.
        """
        if threading.get_ident() == self._thread:
            raise WrongLoopError(
                f"{what} was called in the event loop's own thread, which would wait for itself;"
                " call it in the methods of the object of a BlockingHook, or in a thread, or write"
                " a SessionRunHook and await the session"
            )
        thread_call = _thread_call.get() or self._own
        # The same check follows in the event loop, where nothing can end between check and call.
        # This one answers immediately if the event loop is closed or busy.
        self._check_open(what, thread_call)

        async def run() -> Any:
            self._check_open(what, thread_call)
            task = current_task()
            task.set_name(f"{what} of a BlockingHook")
            thread_call.tasks.add(task)
            try:
                answer = fn(*args, **options)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                return answer
            finally:
                thread_call.tasks.discard(task)

        # The task gets a copy of the thread's context, so `fn` has the thread's context variables.
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def end(self, grace_secs: float) -> None:
        """Reject further calls, and cancel the waits of the object's own threads."""
        self._ended = True
        self._own.cancel()
        await wait_done(self._own.tasks, grace_secs)

    def _check_open(self, what: str, thread_call: _ThreadCall) -> None:
        """Raise `SessionClosedError` if the hook was closed, and `CancelledError` of
        `concurrent.futures` if the call of the thread was cancelled.
        """
        if self._ended:
            raise SessionClosedError(
                f"{what} was called after its BlockingHook was closed; end your threads in close()"
            )
        if thread_call.cancelled:
            raise concurrent.futures.CancelledError


_CALLED_DIRECTLY = (
    "request_stop",
    "should_stop",
    "request_drain",
    "should_drain",
    "stop_on_exception",
)
"""Methods that are safe in any thread. They work even while the event loop is busy, so that a stop
is not delayed.
"""


class PlainView:
    """An object as plain code in a worker thread sees it: its methods are called in the event loop,
    and waited for.
    """

    def __init__(
        self,
        target: Any,
        calls: _LoopCalls,
        **replaced: Any,
    ) -> None:
        """Create a view of `target`, whose coroutines `calls` runs in the event loop.

        `replaced` are attributes that the view has itself. All others are looked up in the target.
        """
        self._target = target
        self._calls = calls
        # Python finds these before it calls `__getattr__`.
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that the view itself does not have.
        value = getattr(self._target, name)
        is_method = inspect.ismethod(value) or is_coroutine_function(value)
        if is_method and name not in _CALLED_DIRECTLY:
            what = f"{type(self._target).__name__}.{name}"
            return functools.partial(self._calls.call, what, value)
        return self._calls.view_of(value)

    def __repr__(self) -> str:
        return repr(self._target)
