"""Hooks made of functions, plain or async."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Never

from aiohooks._aio.clock import Clock, current_clock
from aiohooks._validate import check_callable, check_instance, check_mapping
from aiohooks.errors import InvalidArgumentError, InvalidHookError, did_you_mean, is_clean_end
from aiohooks.graph.graph import is_coroutine_function
from aiohooks.hooks.every import Every, EveryTimer
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator


Feeds = Mapping[Any, Any] | None


class FeedFnHook(SessionRunHook):
    """Feeds what `feed_fn()` returns, called anew for each attempt of each run; None or an empty mapping feeds nothing."""

    def __init__(self, feed_fn: Callable[[], Feeds | Awaitable[Feeds]]) -> None:
        """Takes a function without arguments, plain or async.

        Raises:
            InvalidArgumentError: it cannot be called.
        """
        check_callable(feed_fn, "feed_fn")
        self._feed_fn = feed_fn

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks the function."""
        feeds = self._feed_fn()
        if inspect.isawaitable(feeds):
            feeds = await feeds
        return SessionRunArgs(None, feeds)


_logger = logging.getLogger("aiohooks.hooks")


class FinalOpsHook(SessionRunHook):
    """Runs `final_ops` when the session ends cleanly, and keeps the values in `final_ops_values`."""

    def __init__(self, final_ops: Any, *, feed_dict: Mapping[Any, Any] | None = None) -> None:
        """Takes fetches, nested at will (None: nothing), and what to feed them."""
        check_mapping(feed_dict, "feed_dict")
        self._final_ops = final_ops
        self._feed_dict = feed_dict
        self.final_ops_values: Any = None
        """The values in the shape of the fetches; None before the end."""

    async def begin(self) -> None:
        """Forgets the values of an earlier session."""
        self.final_ops_values = None

    async def end(self, session: Session) -> None:
        """Runs the operations. An end-of-input error is an error here: final operations must not read input."""
        if self._final_ops is None:
            return
        try:
            self.final_ops_values = await session.run(self._final_ops, feed_dict=self._feed_dict)
        except Exception as error:
            if is_clean_end(error):
                _logger.warning("final ops %r ended with %r: they must not read input, which has ended", self._final_ops, error)
            raise


# What the session calls each method with.
_PARAMETERS = {
    "begin": (),
    "after_create_session": ("session", "coord"),
    "before_run": ("run_context",),
    "after_run": ("run_context", "run_values"),
    "end": ("session",),
    "close": ("exc",),
}

Function = Callable[..., Any]
"""A method of a hook without `self`, plain or async. A plain one is called in the event loop and must not block."""


class LambdaHook(SessionRunHook):
    """Calls a function in the place of each method that is given; the others cost nothing, as with any hook."""

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
        """Takes the functions.

        Args:
            begin: `begin()`.
            after_create_session: `after_create_session(session, coord)`.
            before_run: `before_run(run_context)`; may return `SessionRunArgs`.
            after_run: `after_run(run_context, run_values)`.
            end: `end(session)`.
            close: `close(exc)`.
            fetches: what `after_run` gets as `run_values.results`; instead of a `before_run` that asks for it.
            every: for which runs `before_run` and `after_run` are called; without it, for all. Where the hook has a
                `before_run` or fetches, it goes by the step about to run, otherwise by the committed step.
            name: what the hook is called.
            unknown: nothing else.

        Raises:
            InvalidHookError: a name that is no method, or a function that cannot be called with the method's arguments.
            InvalidArgumentError: no function, or options that do not go with those given.
        """
        for wrong in unknown:
            raise InvalidHookError(f"{wrong!r} is no method of a hook; {did_you_mean(wrong, _PARAMETERS)}")
        given: dict[str, Function | None] = {
            "begin": begin,
            "after_create_session": after_create_session,
            "before_run": before_run,
            "after_run": after_run,
            "end": end,
            "close": close,
        }
        functions = {method: fn for method, fn in given.items() if fn is not None}
        if not functions:
            raise InvalidArgumentError(f"no function was given; give one or more of {', '.join(_PARAMETERS)}")
        for method, fn in functions.items():
            _check_function(method, fn)
        check_instance(every, Every, "every", optional=True)
        if every is not None and not {"before_run", "after_run"} & functions.keys():
            raise InvalidArgumentError(f"every is {every!r}, and there is neither before_run nor after_run; leave it out")
        if fetches is not None:
            if before_run is not None or after_run is None:
                raise InvalidArgumentError(
                    f"fetches is {fetches!r}; it goes with after_run and without before_run, which asks by itself"
                )
            functions["before_run"] = functools.partial(_ask, SessionRunArgs(fetches))
        self._described = ", ".join(f"{method}={fn!r}" for method, fn in given.items() if fn is not None)
        calls = {method: _as_coroutine_function(fn) for method, fn in functions.items()}
        if every is not None:
            calls = calls | _WhenDue(every, calls).methods()
        # On the object, so that the methods which are not given are not overridden: a session never calls those.
        for method, call in calls.items():
            setattr(self, method, call)
        self.name: str = name or ""

    def __repr__(self) -> str:
        return f"LambdaHook({self._described})"


def hook(
    method: str, *, fetches: Any = None, every: Every | None = None, name: str | None = None
) -> Callable[[Function], LambdaHook]:
    """Makes a hook of the function below it: `@hook("after_run", every=Every(steps=100), fetches="loss")`.

    Args:
        method: which method of a hook the function is.
        fetches: see `LambdaHook`.
        every: see `LambdaHook`.
        name: what the hook is called; by default as the function.

    Returns:
        A decorator; what it makes goes into `hooks=[...]`.

    Raises:
        InvalidHookError: a name that is no method; from the decorator, a function that cannot be called like it.
        InvalidArgumentError: options that do not go with the method.
    """
    given: object = method
    if not isinstance(given, str):
        raise InvalidHookError(f'hook got {given!r}; give the name of a method: @hook("after_run")')
    if method not in _PARAMETERS:
        raise InvalidHookError(f"{method!r} is no method of a hook; {did_you_mean(method, _PARAMETERS)}")

    def decorate(fn: Function) -> LambdaHook:
        check_callable(fn, f"the function of @hook({method!r})")
        chosen: dict[str, Any] = {method: fn}
        own_name: str | None = getattr(fn, "__name__", None)
        return LambdaHook(**chosen, fetches=fetches, every=every, name=own_name if name is None else name)

    return decorate


async def _ask(args: SessionRunArgs, run_context: SessionRunContext) -> SessionRunArgs:
    return args


def _check_function(method: str, fn: object) -> None:
    check_callable(fn, method)
    try:
        signature = inspect.signature(fn)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    except ValueError:  # written in C, and silent about its parameters
        return
    parameters = _PARAMETERS[method]
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise InvalidHookError(
            f"{method} is {fn!r}, which takes {signature} and is called with ({', '.join(parameters)}): {error}"
        ) from None


def _as_coroutine_function(fn: Function) -> Function:
    if is_coroutine_function(fn):
        return fn

    async def call(*args: Any) -> Any:
        answer = fn(*args)
        return await answer if inspect.isawaitable(answer) else answer

    return call


class _WhenDue:
    """Keeps track of which runs are due, around the functions of one hook."""

    def __init__(self, every: Every, calls: dict[str, Function]) -> None:
        self._every = every
        self._calls = calls
        self._asks = "before_run" in calls
        self._clock: Clock = current_clock()
        self._timer: EveryTimer | None = None
        self._last = 0, 0.0
        self._due = False

    def methods(self) -> dict[str, Function]:
        """The methods of the hook that are not simply the function."""
        wrapped: dict[str, Function] = {
            "begin": self.begin,
            "after_create_session": self.after_create_session,
            "after_run": self.after_run,
        }
        return wrapped | ({"before_run": self.before_run} if self._asks else {})

    async def begin(self) -> None:
        self._clock = current_clock()
        self._timer = None
        self._due = False
        if "begin" in self._calls:
            await self._calls["begin"]()

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        step = session.global_step.latest.step
        if self._timer is None:
            self._timer = self._every.timer()
            self._last = step, self._clock.now()
        self._last = min(step, self._last[0]), self._last[1]  # a recovery may have taken the step back
        self._timer.start(*self._last)
        if "after_create_session" in self._calls:
            await self._calls["after_create_session"](session, coord)

    async def before_run(self, run_context: SessionRunContext) -> Any:
        self._due = self._is_due(run_context)
        return await self._calls["before_run"](run_context) if self._due else None

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        if not (self._due if self._asks else self._is_due(run_context)):
            return
        self._last = run_context.global_step, self._clock.now()
        assert self._timer is not None
        self._timer.mark(*self._last)
        if "after_run" in self._calls:
            await self._calls["after_run"](run_context, run_values)

    def _is_due(self, run_context: SessionRunContext) -> bool:
        return self._timer is not None and self._timer.due(run_context.global_step, self._clock.now())
