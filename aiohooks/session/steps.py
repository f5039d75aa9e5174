"""Two ways to make runs: the loop `async for values in session.steps(...)`, and a function that makes one step of runs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypedDict, TypeVar

from aiohooks._aio.cancel import current_task
from aiohooks._aio.clock import current_clock
from aiohooks._aio.observers import observing
from aiohooks._aio.overlap import Overlap, close_unawaited
from aiohooks._validate import check_callable, check_secs, checked_int
from aiohooks.checkpoint.stateful import is_stateful
from aiohooks.errors import InvalidArgumentError, SessionClosedError, StopRequestedError, safe_repr
from aiohooks.graph.graph import Placeholder, T_co
from aiohooks.graph.session import Session
from aiohooks.session._run_lock import FifoLock
from aiohooks.session.feeds import FeedsAhead, FeedWait, PlainFeeds, QueueFeeds
from aiohooks.session.hook import SessionRunArgs
from aiohooks.session.producers import Producer, Producers, checked_producers
from aiohooks.session.recovery import FeedsSetBack, SessionSupervisor

if TYPE_CHECKING:
    from aiohooks.session._run_lock import RunLock
    from aiohooks.session.monitored import AsyncMonitoredSession

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")
Feeds: TypeAlias = AsyncIterable[Any] | Iterable[Any] | asyncio.Queue[Any]
"""What the runs of a loop are fed with, one element each."""


class StepsOptions(TypedDict, total=False):
    """The options of `AsyncMonitoredSession.steps`, which are explained there."""

    feeds: Feeds | None
    producer: Producer | None
    prefetch: int
    thread: bool
    batch: int | None
    max_wait_secs: float | None


class StepContext:
    """Control over one step: the argument of the function given to `run_step_fn`.

    Created by `AsyncMonitoredSession.run_step_fn`.
    """

    def __init__(
        self, supervisor: SessionSupervisor, run_lock: RunLock, run_attempt: Callable[..., Awaitable[Any]], attempt: int
    ) -> None:
        """Made by the monitored session; `run_attempt` makes one run with hooks and does not recover."""
        self._supervisor = supervisor
        self._run_lock = run_lock
        self._run_attempt = run_attempt
        self._attempt = attempt
        self._turns = FifoLock()

    @property
    def session(self) -> Session:
        """The raw session, the new one after a recovery; runs through it call no hooks."""
        session = self._supervisor.state.session
        if session is None:
            raise SessionClosedError("the session is closed")
        return session

    async def run_with_hooks(
        self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> Any:
        """Make a run with all hooks around it; any number of times, and several of them take turns.

        A recoverable error repeats the whole step function.
        """
        root, lock = self._supervisor.root, self._run_lock
        if lock.now() > lock.turn_due:
            await lock.give_turn()
        if root.should_stop():
            raise StopRequestedError(root.stop_reason)
        if self._turns.taken:
            await self._turns.wait()
        self._turns.taken = True
        try:
            return await self._run_attempt(SessionRunArgs(fetches, feed_dict, options), self._attempt)
        finally:
            self._turns.release()

    def request_stop(self, reason: str | None = None) -> NoReturn:
        """Request a stop and end the step function.

        Raises:
            StopRequestedError: always; it leaves the session's block cleanly.
        """
        self._supervisor.root.request_stop(reason or "the step function requested a stop")
        raise StopRequestedError(self._supervisor.root.stop_reason)

    async def call(self, fn: Callable[[StepContext], Awaitable[T]]) -> T:
        """Internal: call a step function with this context."""
        check_callable(fn, "the step function")
        try:
            inspect.signature(fn).bind(self)
        except TypeError as error:
            raise InvalidArgumentError(
                f"the step function {fn!r} cannot be called with one argument, the step context: {error}; "
                "write it as `async def step_fn(step_context):`"
            ) from None
        except ValueError:
            pass  # it has no signature
        result = fn(self)
        if not inspect.isawaitable(result):  # pyright: ignore[reportUnnecessaryComparison]
            raise InvalidArgumentError(f"step function {fn!r} returned {result!r} and not an awaitable; write it as `async def`")
        return await result


class Steps(Generic[T_co]):
    """Run the session once for each turn of the loop; made by `AsyncMonitoredSession.steps`."""

    def __init__(
        self,
        session: AsyncMonitoredSession,
        supervisor: SessionSupervisor,
        run_lock: RunLock,
        fetches: Any,
        feeds: Feeds | None,
        producer: Producer | None,
        prefetch: int,
        thread: bool,
        batch: int | None,
        max_wait_secs: float | None,
    ) -> None:
        self._session = session
        self._supervisor = supervisor
        self._run_lock = run_lock
        self._fetches: object = fetches
        graph = session.graph
        inputs = () if graph.step_operation is None else graph.step_operation.inputs
        placeholders = [name for name in inputs if isinstance(graph.nodes[name], Placeholder)]
        self._parameter = placeholders[0] if len(placeholders) == 1 else None
        self._takes_mappings = len(inputs) != 1
        self._own_loop: AsyncIterator[T_co] | None = None
        self._source: PlainFeeds | QueueFeeds | FeedsAhead | None = None
        producers = checked_producers(producer)
        prefetch = checked_int(prefetch, "prefetch")
        batch = checked_int(batch, "batch", 1, optional=True)
        check_secs(max_wait_secs, "max_wait_secs", optional=True)
        what: Any = feeds
        is_iterable = isinstance(feeds, (AsyncIterable, Iterable)) and not isinstance(feeds, (Mapping, str, bytes))
        if prefetch or thread:
            if not is_iterable or (thread and isinstance(feeds, AsyncIterable)):
                raise InvalidArgumentError(
                    f"prefetch is {prefetch}, thread is {thread}, and feeds is {safe_repr(what)}; prefetch is for feeds to "
                    "iterate over, thread=True for those that block; a queue holds what its producer puts in ahead of the runs"
                )
        elif isinstance(feeds, asyncio.Queue):
            if max_wait_secs is not None and batch is None:
                raise InvalidArgumentError(f"max_wait_secs is {max_wait_secs}, the wait for a whole batch; give batch= as well")
            self._source = QueueFeeds(feeds, producers, batch, max_wait_secs, supervisor)
            return
        for name, given in (("producer", producer), ("batch", batch), ("max_wait_secs", max_wait_secs)):
            if given is not None:
                # What a generator does besides waiting for its producer, with an element that it has taken, must not be cut off.
                raise InvalidArgumentError(
                    f"{name} is {safe_repr(given)}, and feeds is {safe_repr(what)}; it is for an asyncio.Queue: an async "
                    "generator gives batches itself, and waits with `await session.until(queue.get(), producer=...)`"
                )
        if feeds is None:
            return
        if not is_iterable:
            close_unawaited(what)
            raise InvalidArgumentError(
                f"feeds is {safe_repr(what)}; give something to iterate over, sync or async, that has an element for each step, "
                "or an asyncio.Queue"
            )
        if getattr(what, "gi_frame", what) is None or getattr(what, "ag_frame", what) is None:
            raise InvalidArgumentError(f"feeds is {what!r}, which has ended; a generator gives its elements once: make a new one")
        if isinstance(feeds, AsyncIterable) or prefetch or thread or is_stateful(what):
            self._source = FeedsAhead(what, prefetch, thread=thread, supervisor=supervisor)
        else:
            self._source = PlainFeeds(what, supervisor)

    def __aiter__(self) -> AsyncIterator[T_co]:
        return Loop(self, self._supervisor)

    async def __anext__(self) -> T_co:
        if self._own_loop is None:  # without an `async for`
            self._own_loop = aiter(self)
        return await anext(self._own_loop)

    def __iter__(self) -> NoReturn:
        raise TypeError("the steps of a session are awaited: write `async for`, not `for`")

    async def next_values(self) -> T_co:
        """Internal: make the next run, and return what it fetched."""
        lock, supervisor, source = self._run_lock, self._supervisor, self._source
        state = supervisor.state
        while True:
            if lock.now() > lock.turn_due:
                await lock.give_turn()  # before the next feed, which a stop would lose
            if self._session.should_stop():
                raise StopAsyncIteration
            element = fed = None
            if source is not None:
                if not isinstance(source, PlainFeeds):
                    if state.current.errors and state.recovers(state.current.errors[0]):
                        await self._session.run_step_fn(_do_nothing)
                    await source.wait_ready(self._wait_for_feed)
                element = source.take()
                fed = self._feed_dict(element)
            elif state.drain_reason is not None:
                raise StopAsyncIteration
            before = state.waits.scope
            try:
                values: T_co = await self._session.run(self._fetches, fed)
            except BaseException as error:
                if isinstance(error, StopAsyncIteration):  # the `async for` ends as if the feeds had
                    state.record_end(f"a run ended with {safe_repr(error)}")
                    _logger.info("%s: a run ended with %s, and with it the loop", state.label, safe_repr(error))
                if source is not None:
                    scope = state.waits.scope
                    made = scope is not None and scope is not before and scope.runner == id(current_task()) and scope.committed
                    (source.use if made else source.put_back)(element)
                if isinstance(error, FeedsSetBack):
                    continue
                raise
            finally:
                if supervisor.set_back:
                    supervisor.set_back.discard(current_task())
            if source is not None:
                source.use(element)
            return values

    def _feed_dict(self, element: Any) -> Any:
        """Return what a run is fed with: the argument of a step function, or a mapping."""
        name = self._parameter
        if name is None or (self._takes_mappings and issubclass(type(element), Mapping) and name in element):
            return element
        return {name: element}

    @property
    def unused(self) -> list[Any]:
        """The elements that were taken and not used, in order; another loop over this object gets them first."""
        return [] if self._source is None else self._source.unused

    async def _wait_for_feed(
        self, wait: Awaitable[Any], producers: Producers | None = None, *, drain: bool = False, secs: float | None = None
    ) -> None:
        """Wait for the next feed. A recovery may run beside the wait, as cancelling it would end a generator of feeds."""
        state = self._supervisor.state
        feed_wait = FeedWait(state, self._start_recovery)
        timer = None
        if secs is not None:
            late = StopRequestedError(f"the rest of the batch did not come in {secs} s")
            timer = current_clock().call_later(secs, lambda: Overlap.end(feed_wait, late))
        try:
            with observing(state.observers, "feed", "next feed"):
                await self._run_lock.wait_between_runs(state.current.until(feed_wait, wait, producers, drain=drain))
        finally:
            if timer is not None:
                timer.cancel()

    def _start_recovery(self) -> None:
        """Start a task that does what the next run would do before it begins."""
        if self._supervisor.state.phase == "open":
            self._supervisor.root.start_soon(self._session.run_step_fn, _do_nothing, name="recovery")


class Loop(AsyncIterator[T_co]):
    """One `async for` statement over steps, which alone refers to it: a loop that was left by `break` is gone."""

    def __init__(self, steps: Steps[T_co], supervisor: SessionSupervisor) -> None:
        self._steps = steps
        self._supervisor = supervisor
        supervisor.loops.add(self)

    async def __anext__(self) -> T_co:
        try:
            return await self._steps.next_values()
        except (StopAsyncIteration, StopRequestedError) as error:
            root, loops = self._supervisor.root, self._supervisor.loops
            loops.discard(self)
            if root.drain_reason is not None and not loops:  # no other loop has something under way
                root.request_stop(root.drain_reason)
            if isinstance(error, StopAsyncIteration):
                raise
            raise StopAsyncIteration from None


async def _do_nothing(context: StepContext) -> None:
    pass
