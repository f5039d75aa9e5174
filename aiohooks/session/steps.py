"""The loop over runs: `async for values in session.steps(...)`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from aiohooks._aio.cancel import cancel_count, current_task
from aiohooks._validate import check_callable
from aiohooks.errors import InvalidArgumentError, SessionClosedError, StopRequestedError
from aiohooks.graph.graph import Graph
from aiohooks.graph.session import Session
from aiohooks.session._hooked_run import HookedRun
from aiohooks.session.recovery import Recoverable

T = TypeVar("T")


class StepContext:
    """Control over one step: the argument of the function given to `run_step_fn`."""

    def __init__(self, life: Recoverable, hooked_run: HookedRun, attempt: int) -> None:
        """Made by the monitored session."""
        self._life = life
        self._hooked_run = hooked_run
        self._attempt = attempt

    @property
    def session(self) -> Session:
        """The raw session of the moment, after a recovery the new one; runs through it call no hooks."""
        session = self._life.session
        if session is None:
            raise SessionClosedError("the session is closed")
        return session

    async def run_with_hooks(
        self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> Any:
        """Makes a run with all hooks around it; any number of times. A recoverable error repeats the whole step function."""
        root = self._life.root
        if root.should_stop():
            raise StopRequestedError(root.stop_reason)
        session = self.session
        step = session.global_step.latest.step + 1
        base = cancel_count(current_task())
        return await self._hooked_run(session, self._life.coord, step, self._attempt, fetches, feed_dict, options, base)

    def request_stop(self, reason: str | None = None) -> NoReturn:
        """Asks for a stop and ends the step function at once.

        Raises:
            StopRequestedError: always; it leaves the session's block cleanly.
        """
        self._life.root.request_stop(reason or "the step function requested a stop")
        raise StopRequestedError(self._life.root.stop_reason)

    async def call(self, fn: Callable[[StepContext], Awaitable[T]]) -> T:
        """Calls a step function with this context."""
        check_callable(fn, "the step function")
        try:
            inspect.signature(fn).bind(self)
        except TypeError as error:
            raise InvalidArgumentError(
                f"the step function {fn!r} cannot be called with one argument, the step context: {error}; "
                "write it as `async def step_fn(step_context):`"
            ) from None
        except ValueError:
            pass  # it has no signature to look at
        result = fn(self)
        if not inspect.isawaitable(result):  # pyright: ignore[reportUnnecessaryComparison]
            raise InvalidArgumentError(f"step function {fn!r} returned {result!r} and not an awaitable; write it as `async def`")
        return await result


class Steps:
    """Runs the session once for each turn of the loop; made by `AsyncMonitoredSession.steps`."""

    def __init__(
        self,
        run: Callable[..., Awaitable[Any]],
        until: Callable[[Awaitable[Any]], Awaitable[Any]],
        should_stop: Callable[[], bool],
        graph: Graph,
        fetches: Any,
        feeds: AsyncIterable[Any] | Iterable[Any] | None,
    ) -> None:
        """Opens the feeds."""
        self._run = run
        self._until = until
        self._should_stop = should_stop
        self._fetches = fetches
        operation = graph.step_operation
        self._parameter = operation.inputs[0] if operation is not None and len(operation.inputs) == 1 else None
        self._async_feeds: AsyncIterator[Any] | None = None
        self._feeds: Iterator[Any] | None = None
        if isinstance(feeds, AsyncIterable):
            self._async_feeds = aiter(feeds)
        elif isinstance(feeds, Iterable):
            self._feeds = iter(feeds)
        elif feeds is not None:
            raise InvalidArgumentError(f"feeds is {feeds!r}; give something to iterate over, sync or async")

    def __aiter__(self) -> Steps:
        return self

    async def __anext__(self) -> Any:
        if self._should_stop():
            raise StopAsyncIteration
        try:
            return await self._run(self._fetches, await self._feed())
        except StopRequestedError:
            raise StopAsyncIteration from None

    async def _feed(self) -> Any:
        if self._async_feeds is not None:
            feed = await self._until(anext(self._async_feeds))
        elif self._feeds is not None:
            try:
                feed = next(self._feeds)
            except StopIteration:
                raise StopAsyncIteration from None
        else:
            return None
        return feed if self._parameter is None else {self._parameter: feed}
