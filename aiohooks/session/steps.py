"""Two ways to make runs: the loop `async for values in session.steps(...)`, and a function that
makes one step of runs.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from aiohooks._core.activity import active
from aiohooks._core.cancel import current_task
from aiohooks._core.reports import logger
from aiohooks._core.scope import RunScope
from aiohooks._core.validate import call_error, check_callable
from aiohooks.errors import InvalidArgumentError, SessionClosedError, StopRequestedError, safe_repr
from aiohooks.graph.graph import Placeholder, T_co
from aiohooks.graph.session import RunRequest, Session
from aiohooks.session.coordinator import Producers, note_own_end_in_drain
from aiohooks.session.feeds import Element, FeedsWentBack, Source
from aiohooks.session.lifecycle import Lifecycle

T = TypeVar("T")
StepFn = Callable[["StepContext"], Awaitable[T]]


class StepContext:
    """Control over one step: the argument of the function given to `run_step_fn`.

    Created by `AsyncMonitoredSession.run_step_fn`.
    """

    def __init__(self, lifecycle: Lifecycle, run: Callable[[RunRequest], Awaitable[Any]]) -> None:
        """Made by the monitored session; `run` makes one run with hooks and does not recover."""
        self._lifecycle = lifecycle
        self._run = run
        self._turns = asyncio.Lock()

    @property
    def session(self) -> Session:
        """The raw session, the new one after a recovery; runs through it call no hooks."""
        session = self._lifecycle.session
        if session is None:
            raise SessionClosedError("the session is closed")
        return session

    async def run_with_hooks(
        self,
        fetches: Any,
        feed_dict: Mapping[Any, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make a run with all hooks around it; any number of times, and several of them take turns.

        A recoverable error repeats the whole step function.
        """
        lifecycle = self._lifecycle
        if lifecycle.is_loop_turn_due:
            await lifecycle.give_loop_turn()
        if lifecycle.requests.stopped:
            raise lifecycle.requests.stop_error()
        async with self._turns:
            return await self._run(RunRequest(fetches, feed_dict, options))

    def request_stop(self, reason: str | None = None) -> NoReturn:
        """Request a stop and end the step function.

        Raises:
            StopRequestedError: always; it leaves the session's block cleanly.
        """
        requests = self._lifecycle.requests
        requests.request_stop(reason or "the step function requested a stop")
        raise StopRequestedError(requests.stop_reason)


async def call_step_fn(fn: StepFn[T], context: StepContext) -> T:
    """Call a step function."""
    check_callable(fn, "the step function")
    if (error := call_error(fn, context)) is not None:
        raise InvalidArgumentError(
            f"the step function {fn!r} cannot be called with one argument, the step context:"
            f" {error}; write it as `async def step_fn(step_context):`"
        )
    result = fn(context)
    if not inspect.isawaitable(result):  # pyright: ignore[reportUnnecessaryComparison]
        raise InvalidArgumentError(
            f"step function {fn!r} returned {result!r} and not an awaitable; write it as `async"
            " def`"
        )
    return await result


class Steps(Generic[T_co]):
    """Run the session once for each turn of a loop; made by `AsyncMonitoredSession.steps`."""

    def __init__(
        self,
        run: Callable[[Any, Any], Awaitable[Any]],
        lifecycle: Lifecycle,
        source: Source | None,
        producers: Producers | None,
        fetches: Any,
    ) -> None:
        self._run = run
        self._lifecycle = lifecycle
        self._source = source
        self._producers = producers
        self._fetches: object = fetches
        graph = lifecycle.graph
        inputs = () if graph.step_operation is None else graph.step_operation.inputs
        placeholders = [name for name in inputs if isinstance(graph.nodes[name], Placeholder)]
        self._parameter = placeholders[0] if len(placeholders) == 1 else None
        self._takes_mappings = len(inputs) != 1 or self._parameter is None
        self._has_begun = False

    def __aiter__(self) -> Steps[T_co]:
        # Only its `async for` refers to it: a loop that is left by `break` is gone.
        loop = copy.copy(self)
        loop._has_begun = False
        return loop

    async def __anext__(self) -> T_co:
        """Make the next run, and return what it fetched."""
        lifecycle = self._lifecycle
        requests = lifecycle.requests
        turns = lifecycle.turns
        source = self._source
        if not self._has_begun:
            self._has_begun = True
            lifecycle.feeds.loops.add(self)
        while True:
            element: Element | None = None
            before = None
            is_running = False
            try:
                # Not `is_loop_turn_due`, nor `should_stop`: each would cost a step a call.
                if requests.pause_reason or turns.now() > turns.loop_turn_due:
                    # Before the next feed, which a stop would lose.
                    await lifecycle.give_loop_turn()
                if requests.stopped or lifecycle.phase != "open" or lifecycle.gave_up is not None:
                    raise StopAsyncIteration
                fed = None
                if source is not None:
                    element = source.take(self._producers)
                    while element is None:  # another loop may be faster
                        await self._wait_for_feed(source)
                        element = source.take(self._producers)
                    fed = element.value
                    if not self._takes_mappings:
                        fed = {self._parameter: fed}
                    elif self._parameter is not None:
                        fed = self._mapping_of(fed)
                elif requests.drain_reason is not None:
                    raise StopAsyncIteration
                before = lifecycle.waits.scope
                is_running = True
                values: T_co = await self._run(self._fetches, fed)
            except BaseException as error:
                if element is not None:
                    element.source.settle(element, is_used=self._is_committed(before))
                if isinstance(error, FeedsWentBack):
                    continue
                if not self._is_end_of_loop(error, is_running=is_running):
                    raise
                raise StopAsyncIteration from None
            if element is not None:
                element.source.settle(element, is_used=True)
            return values

    @property
    def unused(self) -> list[Any]:
        """The elements that were taken and not used, in order; another loop over the same feeds
        gets them first.
        """
        return [] if self._source is None else self._source.unused

    def _mapping_of(self, value: Any) -> Any:
        """Return the mapping that a step with one parameter, besides the global step, is fed
        with.
        """
        if issubclass(type(value), Mapping) and self._parameter in value:
            return value
        return {self._parameter: value}

    def _is_committed(self, before: RunScope | None) -> bool:
        """Return whether the run of this task that has raised is committed; `before` it was the
        scope of the latest run.
        """
        scope = self._lifecycle.waits.scope
        if scope is None or scope is before or scope.runner != id(current_task()):
            return False
        return scope.committed

    def _is_end_of_loop(self, error: BaseException, *, is_running: bool) -> bool:
        """Return whether an error, of a run or before it, is a clean end of this loop, which is
        noted then; a `StopAsyncIteration` out of a run is, too, as if the feeds had ended.
        """
        feeds = self._lifecycle.feeds
        feeds.keep_sources()
        if not isinstance(error, (StopAsyncIteration, StopRequestedError)):
            return False
        if is_running and isinstance(error, StopAsyncIteration):
            requests = self._lifecycle.requests
            what = f"a run ended with {safe_repr(error)}"
            requests.record_end(what)
            logger.info("%s: %s, and with it the loop", requests.label, what)
        feeds.end_loop(self)
        return True

    async def _wait_for_feed(self, source: Source) -> None:
        """Wait for the next feed. A recovery may run beside the wait, as cancelling it would end a
        generator of feeds.
        """
        lifecycle = self._lifecycle
        coordinator = lifecycle.coordinator
        requests = lifecycle.requests
        note_own_end_in_drain()
        # Nothing reads feeds during a recovery, nor after one that was cancelled.
        await lifecycle.recover_if_needed()
        producers = self._producers
        is_draining = requests.drain_reason is not None
        if is_draining and source.ends_at_drain:
            producers = producers or ()  # whoever they are, the feeds end with the queue
        try:
            with active("feed", "next feed", observers=coordinator.observers):
                await coordinator.wait_until_ended(
                    "next feed",
                    source.wait(),
                    producers,
                    drain=source.ends_at_drain and not is_draining,
                    lasts=True,
                )
        except StopRequestedError:
            if is_draining or requests.stopped or requests.drain_reason is None:
                raise
