"""The monitored session: a loop of steps with hooks around each, recovery, and an end that is
always complete.

`run` and `_run_once` are one run from top to bottom. The docstring of the package lists the parts
that they use. `StepContext` and `Steps` are two other ways to make runs.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import os
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from signal import Signals
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NoReturn,
    Self,
    TypedDict,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

from aiohooks._core.activity import active
from aiohooks._core.calls import Wait
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, current_task
from aiohooks._core.coroutines import close_unawaited
from aiohooks._core.reports import logger
from aiohooks._core.scope import RunScope
from aiohooks._core.validate import (
    check_instance,
    check_mapping,
    check_secs,
)
from aiohooks.dispatch.calls import call_groups
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import (
    InvalidArgumentError,
    SessionClosedError,
    StopRequestedError,
    safe_repr,
)
from aiohooks.graph.graph import (
    A,
    FeedDict,
    Graph,
    Node,
    Options,
    Placeholder,
    T_co,
)
from aiohooks.graph.session import RunRequest, Session
from aiohooks.graph.variables import Variables
from aiohooks.session.coordinator import (
    WHY_VARIABLE,
    Coordinator,
    Producer,
    Producers,
    RequestMethods,
    Requests,
    note_own_end_in_drain,
)
from aiohooks.session.creators import NEVER, RecoveryPolicy, Source, creator_of
from aiohooks.session.feeds import Element, Feeds, FeedsWentBack
from aiohooks.session.feeds import Source as FeedSource
from aiohooks.session.hook import SessionRunContext, SessionRunHook
from aiohooks.session.lifecycle import DEFAULT_YIELD_SECS, Lifecycle
from aiohooks.session.signals import SignalPolicy, StopOnSignal
from aiohooks.session.status import SessionStatus
from aiohooks.stores.base import StepStore

if TYPE_CHECKING:
    from aiohooks._why.graph import WaitGraph

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
StepFn = Callable[["StepContext"], Awaitable[T]]


class StepsOptions(TypedDict, total=False):
    """The options of `AsyncMonitoredSession.steps`, which are explained there."""

    feeds: Feeds | None
    producer: Producer | None
    prefetch: int
    thread: bool


class SessionOptions(TypedDict, total=False):
    """The options of `AsyncMonitoredSession`, which are explained there, but `recovery`."""

    global_step: StepStore | None
    variables: Variables | None
    stop_grace_period_secs: float
    handle_signals: bool | SignalPolicy
    yield_secs: float | None
    name: str | None


class AsyncMonitoredSession(RequestMethods):
    """A loop of steps, run by one object: `async with AsyncMonitoredSession(step_or_graph, hooks)
    as session:`.

    On entering, the hooks' `begin` is called, then the raw session is created, and each hook's
    `after_create_session` is called. `run` makes one step with all hooks around it. An error of the
    recovery policy replaces the raw session and repeats the run. A block that is left without an
    error, or with an error that is a clean end (`OutOfRangeError`, `StopAsyncIteration`,
    `StopIteration`, `StopRequestedError`), ends cleanly: `end` of every hook is called and the
    error is swallowed. Any other error reaches the caller as the same object, without `end`. In any
    case `close` of every hook is called once, background tasks are ended and the raw session is
    closed.

    Runs are not concurrent: several tasks may call `run`, they take turns. A cancellation is never
    swallowed. Cleanup is shielded from it, for at most the grace period.
    """

    def __init__(
        self,
        source: Source,
        hooks: Iterable[SessionRunHook | HookRegistration] = (),
        *,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        recovery: RecoveryPolicy = RecoveryPolicy(),
        stop_grace_period_secs: float = DEFAULT_GRACE_SECS,
        handle_signals: bool | SignalPolicy = False,
        yield_secs: float | None = DEFAULT_YIELD_SECS,
        name: str | None = None,
    ) -> None:
        """Check the arguments. Nothing is started before the `async with` block is entered.

        Args:
            source: a graph, a `SessionCreator`, or a coroutine function that is the step. The
                parameters of such a function are fed by name, and keys of the mapping it returns
                can be fetched. It is called once by each run.
            hooks: `SessionRunHook` objects, or registrations made by `configure`.
            global_step: the store of the global step, by default a store of its own.
            variables: the values of the variables, by default the session's own.
            recovery: which errors are recovered from, and how often.
            stop_grace_period_secs: how long background tasks may continue after a clean end, and
                cleanup after a cancellation.
            handle_signals: whether SIGINT and SIGTERM end the session while it is open: the first
                one by a stop, the second one like a cancellation, the third one immediately, or a
                `SignalPolicy` that says which signals, and how fast.
            yield_secs: after how long without a turn of the event loop a run lets signals, timers
                and other tasks have one before it begins: steps that never wait do not starve them.
                0 or None: never.
            name: the session's name where it publishes steps, by default that of the task that
                enters it.

        Raises:
            InvalidArgumentError: an invalid source, store or number.
            InvalidHookError: something in `hooks` is not a hook.
        """
        check_secs(stop_grace_period_secs, "stop_grace_period_secs")
        check_secs(yield_secs, "yield_secs", optional=True)
        check_instance(recovery, RecoveryPolicy, "recovery")
        creator = creator_of(source, global_step, variables)
        if not isinstance(handle_signals, (bool, SignalPolicy)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"handle_signals is {handle_signals!r}; give True, False or a SignalPolicy"
            )
        signals = SignalPolicy() if handle_signals is True else handle_signals
        self._lifecycle = lifecycle = Lifecycle(
            creator, hooks, recovery, stop_grace_period_secs, yield_secs, name
        )
        self.requests: Requests = lifecycle.requests
        self._signals = StopOnSignal(signals, lifecycle.coordinator) if signals else None

    # -- running

    @overload
    async def run(
        self, fetches: Node[A], feed_dict: FeedDict = None, options: Options = None
    ) -> A: ...
    @overload
    async def run(
        self, fetches: Any, feed_dict: FeedDict = None, options: Options = None
    ) -> Any: ...
    async def run(self, fetches: Any, feed_dict: FeedDict = None, options: Options = None) -> Any:
        """Make one run with all hooks around it, and again after each recovery until it succeeds.

        In the session of a step function it runs the step, whatever is fetched.

        Args:
            fetches: nodes or names, nested at will. The result has the same shape.
            feed_dict: values by node or name.
            options: passed to the raw session and to the hooks, merged with theirs.

        Raises:
            StopRequestedError: a stop was requested before; leaves the block cleanly.
            FeedConflictError: a hook feeds what another hook or the caller feeds.
            FetchError: names that the graph does not know, a placeholder that is not fed, or
                neither the caller nor a hook fetches anything of a graph.
            NestedRunError: called from inside a hook. Use `run_context.session` there.
            SessionClosedError: the session is not open.
            BaseException: the error of a hook, an operation or a background task, several as one
                group.

        It lets the event loop have a turn before it begins if `yield_secs` have passed without one.
        Nothing of the run is done when a stop or a cancellation arrives there.
        """
        lifecycle = self._lifecycle
        turns = lifecycle.turns
        # Not `is_loop_turn_due`: most runs begin here without waiting.
        if turns.taken or self.requests.pause_reason or turns.now() > turns.loop_turn_due:
            scope = await lifecycle.wait_for_turn()
        else:
            scope = lifecycle.begin_run()
        attempt = 1
        try:
            request = RunRequest(fetches, feed_dict, options)
            while True:
                try:
                    return await self._run_once(scope, request, attempt)
                except BaseException as error:
                    is_complete = await lifecycle.handle_failure(error)
                if is_complete:
                    result = scope.result
                    # Tasks that were started in the run have its scope.
                    scope.result = None
                    return result
                attempt += 1
                scope = turns.begin_attempt(scope)
        finally:
            turns.end_run(scope)

    async def _run_once(self, scope: RunScope, request: RunRequest, attempt: int) -> Any:
        """Make one attempt of a run, which the run's `waits` can end: hooks and operations that may
        wait are concurrent.
        """
        lifecycle = self._lifecycle
        hooks = lifecycle.hooks
        waits = lifecycle.waits
        if request.options is not None:
            check_mapping(request.options, "options")
        session = lifecycle.session
        if session is None or lifecycle.raw_coordinator.errors:
            session = await lifecycle.session_for_run()
        if lifecycle.feeds.in_use:
            lifecycle.feeds.raise_if_element_went_back()
        step = session.global_step.latest.step + 1
        if not hooks.in_runs:
            result = await lifecycle.run_raw(waits, request)
            scope.committed = True
            if lifecycle.recoveries:
                lifecycle.history.completed(step)
            return result
        context = scope.attempt = SessionRunContext(
            request,
            session,
            lifecycle.raw_coordinator,
            global_step=step,
            attempt=attempt,
            effect_recorder=lifecycle.effects,
        )
        # Of all hooks, concurrently.
        requests = await call_groups(hooks.before_run, (context,), step=step, waits=waits)
        merged = hooks.merger.merge(request, requests)
        if context.effects:
            context.effects_before_run = len(context.effects)
        # All or nothing: it commits at its end.
        values = await lifecycle.run_raw(waits, merged)
        scope.committed = context.committed = True
        result, answers = hooks.merger.split(merged, values)
        context.global_step = session.committed_step
        try:
            await call_groups(
                hooks.after_run,
                (context,),
                second_args=iter(answers),
                step=context.global_step,
                waits=waits,
            )
        except BaseException:
            scope.result = result
            raise
        if lifecycle.recoveries:
            lifecycle.history.completed(step)
        return result

    async def run_step_fn(self, fn: StepFn[T]) -> T:
        """Call `fn(step_context)`, which may make raw runs and runs with hooks. A recovery repeats
        the whole of it.

        Args:
            fn: a coroutine function with one parameter. See `StepContext`.

        Returns:
            What `fn` returns. Raises like `run`.
        """
        lifecycle = self._lifecycle
        attempts = itertools.count(1)

        async def call(scope: RunScope) -> T:
            run = functools.partial(self._run_in_step_fn, scope, next(attempts))
            await lifecycle.session_for_run()
            step = fn(StepContext(lifecycle, run))
            return await Wait[T]("a step function", waits=lifecycle.waits).result_of(step)

        return await lifecycle.repeat(call)

    async def _run_in_step_fn(self, scope: RunScope, attempt: int, request: RunRequest) -> Any:
        """Make a run of a step function, which is repeated as a whole if the run fails."""
        try:
            return await self._run_once(scope, request, attempt)
        except BaseException as error:
            scope.end_attempt(error)
            raise
        finally:
            scope.end_attempt()
            self._lifecycle.waits.end_attempt()

    @overload
    def steps(self, fetches: Node[A], **options: Unpack[StepsOptions]) -> Steps[A]: ...
    @overload
    def steps(self, fetches: Any = (), **options: Unpack[StepsOptions]) -> Steps[Any]: ...
    def steps(
        self,
        fetches: Any = (),
        *,
        feeds: Feeds | None = None,
        producer: Producer | None = None,
        prefetch: int = 0,
        thread: bool = False,
    ) -> Steps[Any]:
        """Run again and again: `async for values in session.steps("loss", feeds=batches)`.

        Ends at a stop or when the feeds end, and in a drain when all prefetched elements are used.
        A stop or a failed background task also ends the wait for the next feed. A failure from
        which the session recovers does not, but is recovered from meanwhile. A drain ends only the
        wait for an empty queue: an iterator that was asked for an element may have taken it.

        Args:
            fetches: what each run fetches and each turn of the loop gets.
            feeds: one element a run: the argument of a step function that has one parameter,
                besides the global step, otherwise a feed mapping. Left out, runs are not fed and
                end at a stop only. A queue is waited for, until its shutdown (Python 3.13).
                `task_done` is called for each element whose step is complete.
            producer: the task, or the tasks, that put into the queue: the loop ends when they have
                ended and it is empty.
            prefetch: how many elements a task of the session takes while steps run, in order. A
                failure of the feeds comes out of the step that would have got the element. At the
                end the iterator is closed. Feeds with a `state_dict` and a `load_state_dict` count
                the used elements: a checkpoint that tracks them has that state, a recovery that
                restores it continues with them from there, and at a stop they are set back to it.
                Of others, `unused` of the returned object has the elements that were taken and not
                used. Another loop over the same iterator gets it first.
            thread: whether a worker thread takes the elements, of an iterable that blocks. A stop
                waits for the thread, for at most the grace period.

        Raises:
            InvalidArgumentError: feeds that cannot be iterated over, or taken ahead, or a producer
                without a queue. In an async generator, wait with
                `session.until(queue.get(), producer=...)`.
        """
        lifecycle = self._lifecycle
        if lifecycle.phase == "new":
            lifecycle.raise_if_not_entered()
        producers = lifecycle.coordinator.checked_producers(producer)
        source = lifecycle.feeds.source_for(feeds, producer, prefetch, thread=thread)
        return Steps(self.run, lifecycle, source, producers, fetches)

    # -- entering and leaving

    async def __aenter__(self) -> Self:
        """Call the hooks' `begin`, create the raw session, and pass it to the hooks.

        Raises:
            BaseException: the error of a hook or of the creation, even an error that would end the
                block cleanly.
        """
        if WHY_VARIABLE in os.environ:
            from aiohooks.session.why import enable_why  # seldom needed

            enable_why()
        await self._lifecycle.open(self._signals)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the session. Return whether `error` was a clean end and is swallowed."""
        return await self._lifecycle.close(error)

    async def aclose(self) -> None:
        """End the session like leaving the block without an error. Calling it twice is harmless.

        A second call, and leaving the block meanwhile, wait until the first one is complete.

        Raises:
            NestedRunError: called from a hook, a run or a background task of the session, which it
                would wait for. Use `request_stop` there.
            BaseException: the error of a background task, or of `end` or `close` of a hook, in the
                first call. If code that the session has started makes this call, the block raises
                the error of the task, too.
        """
        await self._lifecycle.close(None)

    # -- stopping

    def should_stop(self) -> bool:
        """Return whether the loop should end: a stop was requested, or the session is not open.
        Never waits, never raises.
        """
        return self._lifecycle.should_stop()

    def request_stop(self, reason: str | None = None) -> None:
        """Request a stop: recorded immediately, never lost, the first reason is kept; from any
        thread.
        """
        self.requests.request_stop(reason)

    @property
    def stop_signal(self) -> Signals | None:
        """The signal that requested the stop or the drain, if it was one: `sys.exit(128 +
        session.stop_signal)`.
        """
        return None if self._signals is None else self._signals.number

    # -- background work

    def start_soon(
        self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts, name: str | None = None
    ) -> asyncio.Task[T]:
        """Start `fn(*args)` as a task of this session. It lives through recoveries. See
        `Coordinator.start_soon`.
        """
        self._lifecycle.raise_if_not_entered()
        return self._lifecycle.coordinator.start_soon(fn, *args, name=name)

    async def until(
        self, awaitable: Awaitable[T], *, producer: Producer | None = None, drain: bool = False
    ) -> T:
        """Await something. A stop, the failure of a background task, the end of its producer or a
        `drain` ends the wait too.

        See `Coordinator.until`.
        """
        lifecycle = self._lifecycle
        if lifecycle.phase == "new":
            close_unawaited(awaitable)
            lifecycle.raise_if_not_entered()
        return await lifecycle.coordinator.until(awaitable, producer=producer, drain=drain)

    # -- its parts

    @property
    def coord(self) -> Coordinator:
        """The coordinator of the raw session, another one after a recovery.

        What lives through recoveries keeps the session itself, and not this.
        """
        return self._lifecycle.raw_coordinator

    @property
    def graph(self) -> Graph:
        """The graph that is run."""
        return self._lifecycle.graph

    @property
    def global_step(self) -> StepStore:
        """The store of the global step, known from the first raw session on, also after the end.

        Raises:
            SessionClosedError: the session was not entered yet.
        """
        store = self._lifecycle.store
        if store is None:
            raise SessionClosedError(
                "the step store is known once the session is open; use `async with`"
            )
        return store

    def status(self) -> SessionStatus:
        """Return the current activities of the session, for people and programs; waits for
        nothing.
        """
        return self._lifecycle.status()

    def why(self) -> WaitGraph:
        """Return the waits of the session, and the waits behind them, from any thread:
        `print(session.why())`.

        It has all tasks of the session's event loop, the steps and publishers that its step stores
        know, and the threads and locks that they wait for. Waits for nothing, and changes nothing.
        """
        from aiohooks.session.why import why_session  # seldom needed

        return why_session(self._lifecycle)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._lifecycle.phase}, {self._lifecycle.hooks!r}>"

    def __del__(self) -> None:
        lifecycle = getattr(self, "_lifecycle", None)
        if lifecycle is not None and lifecycle.phase in ("open", "opening"):
            warnings.warn(
                f"{self!r} was never closed; use `async with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


class AsyncSingularMonitoredSession(AsyncMonitoredSession):
    """A monitored session that never recovers: every error reaches the caller. `options` are the
    usual ones but `recovery`.
    """

    def __init__(
        self,
        source: Source,
        hooks: Iterable[SessionRunHook | HookRegistration] = (),
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(source, hooks, recovery=NEVER, **options)

    def raw_session(self) -> Session | None:
        """The session without hooks, or None when it is closed."""
        return self._lifecycle.session


# -- other ways to make runs: a function that makes one step of them, and the loop over steps


class StepContext:
    """Control over one step: the argument of the function given to `run_step_fn`.

    Created by `AsyncMonitoredSession.run_step_fn`.
    """

    def __init__(self, lifecycle: Lifecycle, run: Callable[[RunRequest], Awaitable[Any]]) -> None:
        """Made by the monitored session. `run` makes one run with hooks and does not recover."""
        self._lifecycle = lifecycle
        self._run = run
        self._turns = asyncio.Lock()

    @property
    def session(self) -> Session:
        """The raw session, the new one after a recovery. Runs through it call no hooks."""
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
        """Make a run with all hooks around it, any number of times, and several of them take turns.

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
            StopRequestedError: always. It leaves the session's block cleanly.
        """
        requests = self._lifecycle.requests
        requests.request_stop(reason or "the step function requested a stop")
        raise StopRequestedError(requests.stop_reason)


class Steps(Generic[T_co]):
    """Run the session once for each turn of a loop, made by `AsyncMonitoredSession.steps`."""

    def __init__(
        self,
        run: Callable[[Any, Any], Awaitable[Any]],
        lifecycle: Lifecycle,
        source: FeedSource | None,
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
        self._has_begun = False

    def __aiter__(self) -> Steps[T_co]:
        # Only its `async for` refers to it: a loop that is left by `break` is gone.
        loop = copy.copy(self)
        loop._has_begun = False
        return loop

    async def __anext__(self) -> T_co:
        """Make the next run, and return the fetched values."""
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
                    if self._parameter is not None:
                        fed = {self._parameter: fed}
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
        """The elements that were taken and not used, in order. Another loop over the same feeds
        gets them first.
        """
        return [] if self._source is None else self._source.unused

    def _is_committed(self, before: RunScope | None) -> bool:
        """Return whether the run of this task that has raised is committed. `before` it was the
        scope of the latest run.
        """
        scope = self._lifecycle.waits.scope
        if scope is None or scope is before or scope.runner != id(current_task()):
            return False
        return scope.committed

    def _is_end_of_loop(self, error: BaseException, *, is_running: bool) -> bool:
        """Return whether an error, of a run or before it, is a clean end of this loop, which is
        noted then. A `StopAsyncIteration` out of a run is, too, as if the feeds had ended.
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

    async def _wait_for_feed(self, source: FeedSource) -> None:
        """Wait for the next feed. A recovery may run during the wait, as cancelling it would end a
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
