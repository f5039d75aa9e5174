"""Hooks made of functions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Never

from aiohooks._core.clock import Clock, current_clock
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
from aiohooks.hooks._observing import logger
from aiohooks.hooks.every import Every, EveryTimer, ScheduledHook
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
    """Feeds the result of `feed_fn()`, called for each attempt of each run; None or an empty
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

    def __init__(self, final_ops: Any, *, feed_dict: Mapping[Any, Any] | None = None) -> None:
        """Create the hook with fetches, nested at will (None: nothing), and what to feed them, as
        `feed_dict`.
        """
        check_mapping(feed_dict, "feed_dict")
        self._final_ops = final_ops
        self._feed_dict = feed_dict
        self.final_ops_values: Any = None
        """The values in the shape of the fetches; None before the end."""

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
    """Calls a function in place of each method that is given; the others cost nothing, as with any
    hook.
    """

    _numbered_state: ClassVar[bool] = True

    # A parameter for each method of a hook, so that a misspelled one is found.
    def __init__(
        self,
        *,
        begin: Function | None = None,
        after_create_session: Function | None = None,
        before_run: Function | None = None,
        after_run: Function | None = None,
        end: Function | None = None,
        close: Function | None = None,
        fetches: Any = None,
        every: Every | None = None,
        name: str | None = None,
        **unknown: Never,
    ) -> None:
        """Create a hook of the functions.

        Args:
            begin: `begin()`.
            after_create_session: `after_create_session(session, coord)`.
            before_run: `before_run(run_context)`; may return `SessionRunArgs`.
            after_run: `after_run(run_context, run_values)`.
            end: `end(session)`.
            close: `close(exc)`.
            fetches: what `after_run` gets as `run_values.results`; instead of a `before_run` that
                requests it.
            every: for which runs `after_run` is called, and fetches; without it, for all. With
                fetches the step about to run counts, otherwise the committed step.
            name: the hook's name.
            unknown: not accepted.

        Raises:
            InvalidHookError: the name is not a method of a hook, or a function does not take the
                method's arguments.
            InvalidArgumentError: no function, or options that do not go with those given.
        """
        for name_of_method in unknown:
            raise _no_such_method(name_of_method)
        given = dict(
            begin=begin,
            after_create_session=after_create_session,
            before_run=before_run,
            after_run=after_run,
            end=end,
            close=close,
        )
        functions = {method: fn for method, fn in given.items() if fn is not None}
        if not functions:
            raise InvalidArgumentError(
                f"no function was given; give one or more of {', '.join(HOOK_METHODS)}"
            )
        for method, fn in functions.items():
            _check_function(method, fn)
        check_instance(every, Every, "every", optional=True)
        options = {"every": every, "fetches": fetches}
        for option, value in options.items():
            if value is not None and (before_run is not None or after_run is None):
                raise InvalidArgumentError(
                    f"{option} is {value!r}; it goes with after_run and without before_run, which"
                    " requests its own fetches in every run"
                )
        self.name: str = name or ""
        self._described = ", ".join(f"{method}={fn!r}" for method, fn in functions.items())
        self._args = SessionRunArgs(fetches)
        calls = {method: _as_coroutine_function(fn) for method, fn in functions.items()}
        if fetches is not None:
            calls["before_run"] = self._request
        if every is not None:
            calls |= _DueRuns(every, calls).methods()
        # Set on the instance, so that missing methods are not overridden: a session never calls
        # those.
        for method, call in calls.items():
            setattr(self, method, call)

    async def _request(self, run_context: SessionRunContext) -> SessionRunArgs:
        return self._args

    def __repr__(self) -> str:
        return f"LambdaHook({self._described})"


def hook(
    method: str, *, fetches: Any = None, every: Every | None = None, name: str | None = None
) -> Callable[[Function], LambdaHook]:
    """Make a hook of the decorated function: `@hook("after_run", every=Every(steps=100),
    fetches="loss")`.

    Args:
        method: which method of a hook the function is.
        fetches: see `LambdaHook`.
        every: see `LambdaHook`.
        name: the hook's name; by default the function's.

    Returns:
        A decorator; its result goes into `hooks=[...]`.

    Raises:
        InvalidHookError: the name is not a method of a hook; from the decorator, the function does
            not take its arguments.
        InvalidArgumentError: options that do not go with the method.
    """
    if not isinstance(method, str):
        raise InvalidHookError(
            f'hook got {method!r}; give the name of a method: @hook("after_run")'
        )
    if method not in HOOK_METHODS:
        raise _no_such_method(method)

    def decorate(fn: Function) -> LambdaHook:
        check_callable(fn, f"the function of @hook({method!r})")
        chosen: dict[str, Any] = {method: fn}
        own_name: str | None = getattr(fn, "__name__", None)
        return LambdaHook(
            **chosen,
            fetches=fetches,
            every=every,
            name=name or own_name,
        )

    return decorate


def _no_such_method(name: str) -> InvalidHookError:
    return InvalidHookError(
        f"{name!r} is not a method of a hook; {did_you_mean(name, HOOK_METHODS)}"
    )


def _check_function(method: str, fn: Function) -> None:
    check_callable(fn, method)
    parameters = _PARAMETERS[method]
    error = call_error(fn, *parameters)
    if error is not None:
        takes = inspect.signature(fn)
        raise InvalidHookError(
            f"{method} is {fn!r}, which takes {takes} and is called with ({', '.join(parameters)}):"
            f" {error}"
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


class _DueRuns(ScheduledHook):
    """Limits `after_run` of a hook, and its fetches, to the runs that are due."""

    def __init__(self, every: Every, calls: Mapping[str, Function]) -> None:
        self._every = every
        self._calls = dict(calls)
        self._has_fetches = "before_run" in calls
        self._reset()

    def _reset(self) -> None:
        self._clock: Clock = current_clock()
        self._timer: EveryTimer = self._every.timer()
        self._is_due = False

    def methods(self) -> dict[str, Function]:
        """Return the methods that replace those of the hook, and the conditions of their calls."""
        names = ["begin", "after_create_session", "after_run", "after_run_is_due"]
        names += ["state_dict", "load_state_dict"]
        if self._has_fetches:
            names += ["before_run", "before_run_is_due"]
        return {name: getattr(self, name) for name in names}

    async def begin(self) -> None:
        self._reset()
        await self._call("begin")

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        self._timer.resume(session.global_step.latest.step, self._clock.now())
        await self._call("after_create_session", session, coord)

    @only_if("before_run_is_due")
    async def before_run(self, run_context: SessionRunContext) -> Any:
        if self.before_run_is_due(run_context):
            return await self._call("before_run", run_context)
        return None

    def before_run_is_due(self, run_context: SessionRunContext) -> bool:
        self._is_due = self._timer.due(run_context.global_step, self._clock.now())
        return self._is_due

    @only_if("after_run_is_due")
    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if self.after_run_is_due(run_context, run_values):
            self._timer.mark(run_context.global_step, self._clock.now())
            await self._call("after_run", run_context, run_values)

    def after_run_is_due(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> bool:
        if self._has_fetches:
            return self._is_due
        return self._timer.due(run_context.global_step, self._clock.now())

    async def _call(self, method: str, *args: Any) -> Any:
        if method in self._calls:
            return await self._calls[method](*args)
        return None
