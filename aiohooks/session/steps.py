"""Two ways to make runs: the loop `async for values in session.steps(...)`, and a function that makes one step of runs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypedDict, TypeVar

from aiohooks._aio.cancel import current_task
from aiohooks._aio.observers import observing
from aiohooks._validate import check_callable, check_int
from aiohooks.errors import InvalidArgumentError, SessionClosedError, StopRequestedError, safe_repr
from aiohooks.graph.graph import T_co
from aiohooks.graph.session import Session
from aiohooks.session._run_lock import FifoLock
from aiohooks.session.feeds import FeedsAhead, FeedWait
from aiohooks.session.hook import SessionRunArgs
from aiohooks.session.producers import Producer, Producers, checked_producers
from aiohooks.session.recovery import SessionSupervisor

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
        producer: Producer | None = None,
        *,
        prefetch: int = 0,
        thread: bool = False,
    ) -> None:
        self._session = session
        self._supervisor = supervisor
        self._run_lock = run_lock
        self._fetches: object = fetches
        operation = session.graph.step_operation
        self._parameter = operation.inputs[0] if operation is not None and len(operation.inputs) == 1 else None
        self._feeds: Iterator[Any] | None = None
        self._queue: asyncio.Queue[Any] | None = None
        self._ahead: FeedsAhead | None = None
        self._got: deque[Any] = deque()  # out of the queue, for a caller that was cancelled meanwhile
        self._own_loop: AsyncIterator[T_co] | None = None
        self._producers = checked_producers(producer)
        check_int(prefetch, "prefetch")
        if (prefetch or thread) and (
            not isinstance(feeds, (AsyncIterable, Iterable)) or (thread and isinstance(feeds, AsyncIterable))
        ):
            raise InvalidArgumentError(
                f"prefetch is {prefetch}, thread is {thread}, and feeds is {feeds!r}; prefetch is for feeds to iterate over, "
                "thread=True for those that block, and a queue holds what its producer puts in ahead of the runs already"
            )
        if producer is not None and not isinstance(feeds, asyncio.Queue):
            # What a generator does besides waiting for its producer, with an element that it has taken, must not be cut off.
            raise InvalidArgumentError(
                f"producer is for feeds out of an asyncio.Queue, and feeds is {feeds!r}; in an async generator, wait for the "
                "producer with `await session.until(queue.get(), producer=...)`"
            )
        if isinstance(feeds, asyncio.Queue):
            self._queue = feeds
        elif isinstance(feeds, AsyncIterable) or (isinstance(feeds, Iterable) and (prefetch or thread)):
            self._ahead = FeedsAhead(feeds, prefetch, thread=thread, supervisor=supervisor)
        elif isinstance(feeds, Iterable):
            self._feeds = iter(feeds)
        elif feeds is not None:
            raise InvalidArgumentError(f"feeds is {feeds!r}; give something to iterate over, sync or async, or an asyncio.Queue")

    def __aiter__(self) -> AsyncIterator[T_co]:
        return Loop(self, self._supervisor)

    async def __anext__(self) -> T_co:
        if self._own_loop is None:  # without an `async for`
            self._own_loop = aiter(self)
        return await anext(self._own_loop)

    async def next_values(self) -> T_co:
        """Internal: make the next run, and return what it fetched."""
        lock = self._run_lock
        if lock.now() > lock.turn_due:
            await lock.give_turn()  # before the next feed, which a stop would lose
        if self._session.should_stop():
            raise StopAsyncIteration
        feed = await self._next_feed()
        waits = self._supervisor.state.waits
        before = waits.scope
        try:
            values: T_co = await self._session.run(self._fetches, feed)
            return values
        except BaseException as error:
            if isinstance(error, StopAsyncIteration):  # the `async for` ends as if the feeds had
                self._supervisor.state.record_end(f"a run ended with {safe_repr(error)}")
                _logger.info("%s: a run ended with %s, and with it the loop", self._supervisor.state.label, safe_repr(error))
            scope = waits.scope
            committed = scope is not None and scope is not before and scope.runner == id(current_task()) and scope.committed
            if self._ahead is not None and not committed:
                self._ahead.put_back()  # the run has changed nothing
            raise

    @property
    def unused(self) -> list[Any]:
        """The elements that were taken ahead and not used, in order; another loop over this object gets them first."""
        return [*self._got] if self._ahead is None else self._ahead.unused

    async def _wait_for_queue(self, queue: asyncio.Queue[Any]) -> Any:
        """Wait for the next element. Without its producers, a queue ends in a drain when it is empty."""
        root = self._supervisor.root
        while not self._got:
            drains = self._producers is None and root.drain_reason is None
            producers = self._producers or (() if root.should_drain() else None)
            try:
                await self._wait_for_feed(self._get(queue), producers, drain=drains)
            except StopRequestedError:
                if not drains or root.should_stop():
                    raise
        return self._got.popleft()

    async def _get(self, queue: asyncio.Queue[Any]) -> None:
        self._got.append(await queue.get())  # here it stays if the caller is cancelled before it has it

    async def _wait_for_feed(self, wait: Awaitable[Any], producers: Producers | None = None, *, drain: bool = False) -> None:
        """Wait for the next feed. A recovery may run beside the wait, as cancelling it would end a generator of feeds."""
        state = self._supervisor.state
        with observing(state.observers, "feed", "next feed"):
            feed_wait = FeedWait(state, self._start_recovery)
            await self._run_lock.wait_between_runs(state.current.until(feed_wait, wait, producers, drain=drain))

    def _start_recovery(self) -> None:
        """Start a task that does what the next run would do before it begins."""
        if self._supervisor.state.phase == "open":
            self._supervisor.root.start_soon(self._session.run_step_fn, _do_nothing, name="recovery")

    async def _next_feed(self) -> Any:
        state, feed = self._supervisor.state, None
        if self._ahead is None and self._queue is None:
            if state.drain_reason is not None:
                raise StopAsyncIteration  # nothing was taken that is not used
            if self._feeds is None:
                return None
            try:
                with observing(state.observers, "feed", "next feed"):
                    feed = next(self._feeds)
            except StopIteration:
                raise StopAsyncIteration from None
        elif state.current.errors and state.recovers(state.current.errors[0]):
            await self._session.run_step_fn(_do_nothing)
        if self._ahead is not None:
            while not self._ahead.is_ready:
                await self._wait_for_feed(self._ahead.wait_ready())
            feed = self._ahead.take()
        elif self._queue is not None:
            feed = await self._wait_for_queue(self._queue)
        return feed if self._parameter is None else {self._parameter: feed}


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
