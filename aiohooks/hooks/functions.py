"""Hooks made of functions: of the feeds of a run, of the last operations, or of any method."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohooks._core.validate import (
    call_error,
    check_callable,
    check_instance,
    check_mapping,
    is_coroutine_function,
)
from aiohooks.dispatch.calls import only_if
from aiohooks.errors import (
    InvalidArgumentError,
    InvalidHookError,
    did_you_mean,
    is_clean_end,
    next_feed,
    safe_repr,
)
from aiohooks.graph.session import Session
from aiohooks.hooks._observing import FetchingHook, Sampling, logger
from aiohooks.hooks.every import Every
from aiohooks.session.hook import (
    HOOK_METHODS,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

Feeds = Mapping[Any, Any] | None


class FeedFnHook(SessionRunHook):
    """Feeds the result of `feed_fn()`, called for each attempt of each run. None or an empty
    mapping feeds nothing.

    `StopIteration` of a plain `feed_fn`, such as `lambda: next(batches)`, is the end of the input.
    """

    def __init__(self, feed_fn: Callable[[], Feeds | Awaitable[Feeds]]) -> None:
        """Create the hook with a function without arguments, plain or async.

        Raises:
            InvalidArgumentError: not callable.
        """
        check_callable(feed_fn, "feed_fn")
        self._feed_fn = feed_fn

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Call the function, and feed its result."""
        # `next_feed` converts a `StopIteration` of the function to the end of the input.
        feeds = next_feed(self._feed_fn)
        if inspect.isawaitable(feeds):
            feeds = await feeds
        return SessionRunArgs(None, feeds)


class FinalOpsHook(SessionRunHook):
    """Runs `final_ops` when the session ends cleanly, and keeps the values in
    `final_ops_values`.
    """

    def __init__(
        self,
        final_ops: Any,
        *,
        feed_dict: Mapping[Any, Any] | None = None,
    ) -> None:
        """Create the hook.

        Args:
            final_ops: the fetches, nested as you like, or None to run nothing.
            feed_dict: values to feed to them, by node or name.
        """
        check_mapping(feed_dict, "feed_dict")
        self._final_ops = final_ops
        self._feed_dict = feed_dict
        self.final_ops_values: Any = None
        """The values in the shape of the fetches, or None before the end."""

    async def begin(self) -> None:
        """Clear the values of an earlier session."""
        self.final_ops_values = None

    async def end(self, session: Session) -> None:
        """Run the operations, and keep their values.

        The operations must not read input. Its end is raised here, as an error of the session.
        """
        if self._final_ops is None:
            return
        try:
            self.final_ops_values = await session.run(self._final_ops, feed_dict=self._feed_dict)
        except Exception as error:
            # The error says only that the input has ended, so the log adds what caused it.
            if is_clean_end(error):
                logger.warning(
                    "final ops %r ended with %s: they must not read input, which has ended",
                    self._final_ops,
                    safe_repr(error),
                )
            raise


_PARAMETERS = {
    name: tuple(inspect.signature(getattr(SessionRunHook, name)).parameters)[1:]
    for name in HOOK_METHODS
}
"""The parameters with which the session calls each method of a hook."""

Function = Callable[..., Any]
"""A method of a hook without `self`, plain or async. A plain one is called in the event loop and
must not block.
"""


def hook(
    method: str,
    *,
    fetches: Any = None,
    every: Every | None = None,
    name: str | None = None,
) -> Callable[[Function], SessionRunHook]:
    """Make a hook of the decorated function: `@hook("after_run", every=Every(steps=100),
    fetches="loss")`.

    Args:
        method: which method of a hook the function is: `begin()`, `after_create_session(session,
            coord)`, `before_run(run_context)`, which may return `SessionRunArgs`,
            `after_run(run_context, run_values)`, `end(session)` or `close(exc)`.
        fetches: the values that `after_run` gets as `run_values.results`.
        every: for which runs `after_run` is called and fetches. Without it, for all.
        name: the hook's name, by default the function's.

    Returns:
        A decorator. Its result goes into `hooks=[...]`.

    Raises:
        InvalidHookError: there is no such method; from the decorator, the function does not take
            its arguments.
        InvalidArgumentError: `fetches` or `every` is given for another method than `after_run`.
    """
    if method not in HOOK_METHODS:
        raise InvalidHookError(
            f"{method!r} is not a method of a hook; {did_you_mean(str(method), HOOK_METHODS)}"
        )
    check_instance(every, Every, "every", optional=True)
    if method != "after_run" and (every is not None or fetches is not None):
        raise InvalidArgumentError(
            f"fetches is {fetches!r} and every is {every!r}; they go with after_run, and this is"
            f" {method}"
        )

    def decorate(function: Function) -> SessionRunHook:
        _check_parameters(method, function)
        call = _as_coroutine_function(function)
        function_hook: SessionRunHook = LambdaHook(method, call, fetches)
        if every is not None:
            function_hook = DueLambdaHook(call, fetches, every)
        # A `functools.partial`, for example, has no name.
        function_name: str = getattr(function, "__name__", "")
        function_hook.name = name or function_name
        return function_hook

    return decorate


def _check_parameters(method: str, function: Function) -> None:
    """Check that the function can be called with the arguments of the method.

    Raises:
        InvalidHookError: it takes other arguments.
    """
    check_callable(function, method)
    parameters = _PARAMETERS[method]
    error = call_error(function, *parameters)
    if error is not None:
        takes = inspect.signature(function)
        raise InvalidHookError(
            f"{method} is {function!r}, which takes {takes} and is called with"
            f" ({', '.join(parameters)}): {error}"
        )


def _as_coroutine_function(function: Function) -> Function:
    """Return the function, or a coroutine function that calls a plain one."""
    if is_coroutine_function(function):
        return function

    async def call(*args: Any) -> Any:
        answer = function(*args)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer

    return call


class LambdaHook(SessionRunHook):
    """Calls a coroutine function in place of a method."""

    def __init__(
        self,
        method: str,
        call: Function,
        fetches: Any,
    ) -> None:
        self._args = SessionRunArgs(fetches)
        # The function is set on the instance. A session calls only methods that a hook has
        # overridden, so the other methods of this hook cost nothing.
        vars(self)[method] = call
        if fetches is not None:
            vars(self)["before_run"] = self._request_fetches

    async def _request_fetches(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self._args


class DueLambdaHook(FetchingHook):
    """Calls a coroutine function in place of `after_run`, in the runs that are due."""

    _timer: Sampling

    def __init__(
        self,
        call: Function,
        fetches: Any,
        every: Every,
    ) -> None:
        super().__init__(fetches, every)
        self._call = call

    @only_if("_note_run")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._timer.mark_if_due(run_context.global_step):
            await self._call(run_context, run_values)

    def _note_run(
        self,
        run_context: SessionRunContext,
        run_values: SessionRunValues,
    ) -> bool:
        """Note the step of a run, and return whether the run is due.

        This is the condition of `after_run`: the session first calls this. Only if it returns true,
        the session starts the task that `after_run` needs.
        """
        self._timer.note_step(run_context.global_step)
        return self._timer.is_due(run_context.global_step)
