"""Hooks made of functions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

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
from aiohooks.session.coordinator import Coordinator
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
        """Create the hook with fetches, nested at will (None: nothing), and what to feed them, as
        `feed_dict`.
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
        """Run the operations. They must not read input: the end of input is raised as an error
        here.
        """
        if self._final_ops is None:
            return
        try:
            self.final_ops_values = await session.run(self._final_ops, feed_dict=self._feed_dict)
        except Exception as error:
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


class LambdaHook(SessionRunHook):
    """Calls a function in place of each method that is given. The others cost nothing, as with any
    hook.
    """

    _numbered_state: ClassVar[bool] = True

    def __init__(
        self,
        *,
        fetches: Any = None,
        every: Every | None = None,
        name: str | None = None,
        **functions: Function,
    ) -> None:
        """Create a hook of the functions.

        Args:
            fetches: what `after_run` gets as `run_values.results`, instead of a `before_run` that
                requests it.
            every: for which runs `after_run` is called and fetches. Without it, for all.
            name: the hook's name.
            functions: `begin()`, `after_create_session(session, coord)`, `before_run(run_context)`,
                which may return `SessionRunArgs`, `after_run(run_context, run_values)`,
                `end(session)` and `close(exc)`.

        Raises:
            InvalidHookError: the name is not a method of a hook, or a function does not take the
                method's arguments.
            InvalidArgumentError: no function, or options that do not go with the given functions.
        """
        if not functions:
            raise InvalidArgumentError(
                f"no function was given; give one or more of {', '.join(HOOK_METHODS)}",
            )
        for method, fn in functions.items():
            _check_function(method, fn)
        check_instance(every, Every, "every", optional=True)
        has_options = every is not None or fetches is not None
        if has_options and ("before_run" in functions or "after_run" not in functions):
            raise InvalidArgumentError(
                f"fetches is {fetches!r} and every is {every!r}; they go with after_run and without"
                " before_run, which requests its own fetches in every run",
            )
        self.name: str = name or ""
        self._described = ", ".join(f"{method}={fn!r}" for method, fn in functions.items())
        self._args = SessionRunArgs(fetches)
        calls = {method: _as_coroutine_function(fn) for method, fn in functions.items()}
        if every is not None:
            calls |= _DueRuns(calls, fetches, every).methods()
        elif fetches is not None:
            calls["before_run"] = self._request
        # Set on the instance, so that missing methods are not overridden: a session never calls
        # those.
        for method, call in calls.items():
            setattr(self, method, call)

    async def _request(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self._args

    def __repr__(self) -> str:
        return f"LambdaHook({self._described})"


def hook(
    method: str,
    *,
    fetches: Any = None,
    every: Every | None = None,
    name: str | None = None,
) -> Callable[[Function], LambdaHook]:
    """Make a hook of the decorated function: `@hook("after_run", every=Every(steps=100),
    fetches="loss")`.

    Args:
        method: which method of a hook the function is.
        fetches: see `LambdaHook`.
        every: see `LambdaHook`.
        name: the hook's name, by default the function's.

    Returns:
        A decorator. Its result goes into `hooks=[...]`.

    Raises:
        InvalidHookError: the name is not a method of a hook; from the decorator, the function does
            not take its arguments.
        InvalidArgumentError: options that do not go with the method.
    """
    if not isinstance(method, str):
        raise InvalidHookError(
            f'hook got {method!r}; give the name of a method: @hook("after_run")',
        )
    _check_method(method)

    def decorate(fn: Function) -> LambdaHook:
        functions = {method: fn}
        own_name: str | None = getattr(fn, "__name__", None)
        return LambdaHook(fetches=fetches, every=every, name=name or own_name, **functions)

    return decorate


def _check_method(name: str) -> None:
    if name not in HOOK_METHODS:
        raise InvalidHookError(
            f"{name!r} is not a method of a hook; {did_you_mean(name, HOOK_METHODS)}",
        )


def _check_function(method: str, fn: Function) -> None:
    _check_method(method)
    check_callable(fn, method)
    parameters = _PARAMETERS[method]
    error = call_error(fn, *parameters)
    if error is not None:
        takes = inspect.signature(fn)
        raise InvalidHookError(
            f"{method} is {fn!r}, which takes {takes} and is called with ({', '.join(parameters)}):"
            f" {error}",
        )


def _as_coroutine_function(fn: Function) -> Function:
    if is_coroutine_function(fn):
        return fn

    async def call(*args: Any) -> Any:
        answer = fn(*args)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer

    return call


class _DueRuns(FetchingHook):
    """Limits `after_run` of a hook, and its fetches, to the runs that are due."""

    _timer: Sampling

    def __init__(
        self,
        calls: Mapping[str, Function],
        fetches: Any,
        every: Every,
    ) -> None:
        self._calls = dict(calls)
        super().__init__(fetches, every)

    def methods(self) -> dict[str, Function]:
        """Return the methods that replace the hook's own, and the condition of `after_run`."""
        names = ["begin", "after_create_session", "before_run", "after_run", "is_due"]
        names += ["state_dict", "load_state_dict"]
        return {name: getattr(self, name) for name in names}

    async def begin(self) -> None:
        await super().begin()
        if "begin" in self._calls:
            await self._calls["begin"]()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        await super().after_create_session(session, coord)
        if "after_create_session" in self._calls:
            await self._calls["after_create_session"](session, coord)

    @only_if("is_due")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self._timer.mark_if_due(run_context.global_step):
            await self._calls["after_run"](run_context, run_values)

    def is_due(self, run_context: SessionRunContext, run_values: SessionRunValues) -> bool:
        self._timer.note_step(run_context.global_step)
        return self._timer.is_due(run_context.global_step)
