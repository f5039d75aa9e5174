"""The monitored session: a loop of steps with hooks around each, recovery, and an end that is
always complete.

`run` and `_run_once` are one run from top to bottom. The docstring of the package lists the parts
that they use. `StepContext` and `Steps` are two other ways to make runs.
"""

from __future__ import annotations

import asyncio
import copy
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

from aiohooks._core.activity import RunScope, active, logger
from aiohooks._core.calls import Wait, close_unawaited
from aiohooks._core.validate import (
    check_instance,
    check_mapping,
    check_secs,
)
from aiohooks._core.waits import DEFAULT_GRACE_SECS, current_task
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
    Variables,
)
from aiohooks.graph.session import RunRequest, Session
from aiohooks.session.coordinator import (
    Coordinator,
    Producer,
    Producers,
    RequestMethods,
    Requests,
    note_own_end_in_drain,
)
from aiohooks.session.creators import NEVER, RecoveryPolicy, Source, creator_of
from aiohooks.session.feeds import Element, Feeds, FeedSource, FeedsWentBack
from aiohooks.session.hook import SessionRunContext, SessionRunHook
from aiohooks.session.lifecycle import DEFAULT_YIELD_SECS, Lifecycle
from aiohooks.session.signals import SignalPolicy, StopOnSignal
from aiohooks.session.status import WHY_VARIABLE, SessionStatus
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
    """The options of `AsyncMonitoredSession` without `recovery`, which are explained there."""

    global_step: StepStore | None
    variables: Variables | None
    stop_grace_period_secs: float
    handle_signals: bool | SignalPolicy
    yield_secs: float | None
    name: str | None


class AsyncMonitoredSession(RequestMethods):
    """A loop of steps, run by one object: `async with AsyncMonitoredSession(step_or_graph, hooks)
    as session:`.

    When you enter the block, the session calls the hooks' `begin`, creates its raw session, and
    calls each hook's `after_create_session`. `run` runs one step with all hooks around it. After an
    error of the recovery policy, the session replaces its raw session and repeats the run. The
    session ends cleanly if you leave the block normally or with a clean-end error
    (`OutOfRangeError`, `StopAsyncIteration`, `StopIteration`, `StopRequestedError`): it calls `end`
    of every hook and suppresses the error. You get any other error as the same object, and `end` is
    not called. In any case the session calls `close` of every hook once, ends background tasks and
    closes the raw session.

    Several tasks may call `run`, but their runs take turns. A cancellation is never swallowed.
    Cleanup is shielded from cancellation, for at most the grace period.
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
            source: a graph, a `SessionCreator`, or the step: a coroutine function. You feed its
                parameters by name, and fetch the keys of the mapping that it returns. Each run
                calls it once.
            hooks: `SessionRunHook` objects, or registrations made by `configure`.
            global_step: the store of the global step, by default a new one.
            variables: the values of the variables, by default new ones.
            recovery: from which errors the session recovers, and how often.
            stop_grace_period_secs: how long background tasks may continue after a clean end, and
                cleanup after a cancellation.
            handle_signals: whether SIGINT and SIGTERM end the session while it is open: the first
                signal by a stop, the second like a cancellation, the third immediately. Use a
                `SignalPolicy` to choose the signals and time limits.
            yield_secs: if the event loop had no turn for this long, a run first lets signals,
                timers and other tasks proceed, so that steps that never wait do not starve them. 0
                or None turns this off.
            name: the name of the session in logs, messages and step stores, by default the name of
                the task that enters it.

        Raises:
            InvalidArgumentError: an invalid source, store or number.
            InvalidHookError: something in `hooks` is not a hook.
        """
        check_secs(stop_grace_period_secs, "stop_grace_period_secs")
        check_secs(yield_secs, "yield_secs", optional=True)
        check_instance(recovery, RecoveryPolicy, "recovery")
        creator = creator_of(source, global_step, variables)
        self._lifecycle = Lifecycle(
            creator, hooks, recovery, stop_grace_period_secs, yield_secs, name
        )
        self.requests: Requests = self._lifecycle.requests
        self._signals: StopOnSignal | None = None
        """Handles signals while the session is open."""
        if handle_signals is True:
            handle_signals = SignalPolicy()
        if isinstance(handle_signals, SignalPolicy):
            self._signals = StopOnSignal(handle_signals, self._lifecycle.coordinator)
        elif handle_signals is not False:
            raise InvalidArgumentError(
                f"handle_signals is {handle_signals!r}; give True, False or a SignalPolicy"
            )

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
        """Run once with all hooks around it, and again after each recovery until the run succeeds.

        If the session has a step function, each run calls it, even if you fetch nothing of it.

        Args:
            fetches: nodes or names, nested as you like. The result has the same shape.
            feed_dict: values by node or name.
            options: options for the raw session and the hooks, merged with those of the hooks.

        Raises:
            StopRequestedError: a stop was requested before. It ends the block cleanly.
            FeedConflictError: a hook feeds what another hook or the caller feeds.
            FetchError: a name is not in the graph, a placeholder is not fed, or neither you nor a
                hook fetches anything from a graph.
            NestedRunError: called from inside a hook. Use `run_context.session` there.
            SessionClosedError: the session is not open.
            BaseException: the error of a hook, an operation or a background task, or a group of
                several.

        If `yield_secs` have passed without a turn of the event loop, `run` yields first. If a stop
        or a cancellation arrives there, nothing has been done yet.
        """
        lifecycle = self._lifecycle
        turns = lifecycle.turns
        # Hot path: most runs can begin now. `wait_for_turn` would check the same, but it is
        # another coroutine in each run.
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
                    # This raises the error, unless the session has recovered from it.
                    is_complete = await lifecycle.handle_failure(scope, error)
                if is_complete:
                    # The attempt has failed after its commit, and the recovery has kept the commit.
                    result = scope.result
                    # Tasks that were started in the run keep its scope, which must not keep the
                    # result in memory.
                    scope.result = None
                    return result
                attempt += 1
                scope = turns.begin_attempt(scope)
        finally:
            turns.end_run(scope)

    async def _run_once(self, scope: RunScope, request: RunRequest, attempt: int) -> Any:
        """Make one attempt of a run: `before_run`, the operations, `after_run`.

        Hooks and operations that may wait run concurrently. The end of `run_waits` ends them all.

        Args:
            scope: the scope of the attempt.
            request: the fetches, feeds and options of the caller.
            attempt: the number of the attempt, from 1.

        Returns:
            The values of the caller's fetches.
        """
        lifecycle = self._lifecycle
        hooks = lifecycle.hooks
        waits = lifecycle.run_waits
        if request.options is not None:
            check_mapping(request.options, "options")
        session = lifecycle.session
        if session is None or lifecycle.failures:
            # This raises the failure of a background task, or creates a raw session.
            session = await lifecycle.session_for_run()
        if lifecycle.feeds.in_use:
            # While the run waited for its turn, another task may have recovered.
            lifecycle.feeds.raise_if_element_went_back()
        step = session.global_step.latest.step + 1
        if not hooks.in_runs:
            # Hot path: no hook takes part, so the run of the raw session is the whole attempt.
            result = await lifecycle.run_raw(waits, request)
            scope.committed = True
            if lifecycle.recoveries:
                lifecycle.note_progress(step)
            return result
        context = scope.attempt = SessionRunContext(
            request,
            session,
            lifecycle.raw_coordinator,
            global_step=step,
            attempt=attempt,
            effect_recorder=lifecycle.effects,
        )
        # Each hook of `before_run` has a request here, or None if it asks for nothing.
        requests = await call_groups(hooks.before_run, (context,), step=step, waits=waits)
        merged = hooks.merger.merge(request, requests)
        if context.effects:
            context.effects_before_run = len(context.effects)
        # This commits at its end: it changes all variables and the step, or fails and changes none.
        values = await lifecycle.run_raw(waits, merged)
        scope.committed = context.committed = True
        result, hook_values = hooks.merger.split(merged, values)
        context.global_step = session.committed_step
        try:
            await call_groups(
                hooks.after_run,
                (context,),
                second_args=iter(hook_values),
                step=context.global_step,
                waits=waits,
            )
        except BaseException:
            # If the recovery from this keeps the commit, `run` returns the result.
            scope.result = result
            raise
        if lifecycle.recoveries:
            lifecycle.note_progress(step)
        return result

    async def run_step_fn(self, fn: StepFn[T]) -> T:
        """Call `fn(step_context)`, which may run the raw session, and runs with hooks. A recovery
        repeats all of it. A run that it completes counts as progress of the recovery policy.

        Args:
            fn: a coroutine function with one parameter. See `StepContext`.

        Returns:
            The result of `fn`. Raises the same errors as `run`.
        """
        lifecycle = self._lifecycle
        attempts = itertools.count(1)

        async def call(scope: RunScope) -> T:
            context = StepContext(lifecycle, self._run_once, scope, next(attempts))
            await lifecycle.session_for_run()
            step = fn(context)
            return await Wait[T]("a step function", waits=lifecycle.run_waits).result_of(step)

        return await lifecycle.repeat(call)

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

        The loop ends at a stop, when the feeds end, or in a drain when all prefetched elements are
        used. A stop or a failed background task also ends the wait for the next element. A failure
        from which the session recovers does not end it. A drain only ends the wait for an empty
        queue, because an iterator may already hold an element.

        Args:
            fetches: the values to fetch in each run. Each turn of the loop gets them.
            feeds: an iterable, or a queue, with one element for each run. The element is the
                argument of a step function with one parameter (besides the global step), otherwise
                a mapping of feeds. Without `feeds` the loop only ends at a stop. The loop over a
                queue also ends at its shutdown (Python 3.13), and calls `task_done` for each
                element whose step is complete.
            producer: the task, or the tasks, that put elements into the queue. The loop ends when
                they have ended and the queue is empty.
            prefetch: how many elements to read ahead while steps run. An error of the feeds is
                raised at the step that needed the element. At the end the iterator is closed. Feeds
                with `state_dict` and `load_state_dict` count used elements: checkpoints save this
                state, recoveries restore it, and a stop sets the feeds back to it. For other feeds,
                `unused` of the returned object has the elements that were read and not used.
                Another loop over the same iterator gets them first.
            thread: whether a worker thread reads the elements, because the iterable blocks. A stop
                waits for the thread, for at most the grace period.

        Raises:
            InvalidArgumentError: you cannot iterate over the feeds, or not prefetch them, or there
                is a producer without a queue. In an async generator, wait with
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
        enable_why_if_asked()
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
        """End the session as if you left the block without an error. You may call it twice.

        A second call waits until the first is complete, as does the end of the block.

        Raises:
            NestedRunError: called from a hook, a run or a background task of the session, so it
                would wait for itself. Use `request_stop` there.
            BaseException: the error of a background task, or of the `end` or `close` of a hook,
                from the first call. If code that the session has started makes this call, the block
                also raises the error of the task.
        """
        await self._lifecycle.close(None)

    # -- stopping

    def should_stop(self) -> bool:
        """Return whether the loop should end: a stop was requested, or the session is not open.
        This never waits or raises.
        """
        return self._lifecycle.should_stop()

    def request_stop(self, reason: str | None = None) -> None:
        """Request a stop, from any thread. It takes effect immediately and is never lost. The first
        reason is kept.
        """
        self.requests.request_stop(reason)

    @property
    def stop_signal(self) -> Signals | None:
        """The signal that requested the stop or the drain, or None: `sys.exit(128 +
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
        """Await something. A stop, the failure of a background task, the end of its producer or,
        with `drain=True`, a drain ends the wait early.

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
        """The coordinator of the raw session. A recovery replaces it.

        Code that outlives recoveries should keep the session instead.
        """
        return self._lifecycle.raw_coordinator

    @property
    def graph(self) -> Graph:
        """The graph that is run."""
        return self._lifecycle.graph

    @property
    def global_step(self) -> StepStore:
        """The store of the global step, from the first raw session on, and after the end.

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
        """Return the current activities of the session, without waiting."""
        return self._lifecycle.status()

    def why(self) -> WaitGraph:
        """Return what the session waits for, and what that waits for: `print(session.why())`. You
        may call this from any thread.

        The result contains all tasks of the session's event loop, the steps and publishers of its
        step stores, and the threads and locks that they wait for. The call does not wait and
        changes nothing.
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


def enable_why_if_asked() -> None:
    """Let other programs ask this process why it waits, if its environment variable
    `AIOHOOKS_WHY` is set.
    """
    if os.environ.get(WHY_VARIABLE, "") not in ("", "0"):
        from aiohooks.session.why import enable_why  # seldom needed

        enable_why()


class AsyncSingularMonitoredSession(AsyncMonitoredSession):
    """A monitored session that never recovers: you get every error. `options` are the same, without
    `recovery`.
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

    def __init__(
        self,
        lifecycle: Lifecycle,
        run_once: Callable[[RunScope, RunRequest, int], Awaitable[Any]],
        scope: RunScope,
        attempt: int,
    ) -> None:
        """Make the context of one attempt of the step function.

        Args:
            lifecycle: the session.
            run_once: makes one run with all hooks around it, and does not recover. It gets the
                scope, the request and the number of the attempt.
            scope: the scope of the attempt, which all its runs share.
            attempt: the number of the attempt, from 1.
        """
        self._lifecycle = lifecycle
        self._run_once = run_once
        self._scope = scope
        self._attempt_number = attempt
        self._run_lock = asyncio.Lock()
        """Orders the runs of concurrent calls. The session's own turn is that of the step function
        as a whole.
        """

    @property
    def session(self) -> Session:
        """The current raw session. Its runs call no hooks."""
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
        """Run with all hooks around it. You may call this any number of times. Concurrent calls
        take turns.

        A recoverable error is raised here, and the session then repeats the whole step function.
        """
        lifecycle = self._lifecycle
        requests = lifecycle.requests
        turns = lifecycle.turns
        # Hot path: `give_loop_turn` would check the same, and cost each run a call.
        if requests.pause_reason or turns.now() > turns.loop_turn_due:
            await lifecycle.give_loop_turn()
        if requests.stopped:
            raise requests.stop_error()
        async with self._run_lock:
            # Observers and effects are those of a single run, although the attempt continues.
            try:
                request = RunRequest(fetches, feed_dict, options)
                result = await self._run_once(self._scope, request, self._attempt_number)
            except BaseException as error:
                self._scope.end_attempt(error)
                raise
            self._scope.end_attempt()
            return result

    def request_stop(self, reason: str | None = None) -> NoReturn:
        """Request a stop and end the step function.

        Raises:
            StopRequestedError: always. It leaves the session's block cleanly.
        """
        requests = self._lifecycle.requests
        requests.request_stop(reason or "the step function requested a stop")
        raise StopRequestedError(requests.stop_reason)


class Steps(Generic[T_co]):
    """Runs the session once for each turn of a loop. Created by `AsyncMonitoredSession.steps`."""

    def __init__(
        self,
        run: Callable[[Any, Any], Awaitable[Any]],
        lifecycle: Lifecycle,
        source: FeedSource | None,
        producers: Producers | None,
        fetches: Any,
    ) -> None:
        """Prepare the loop.

        Args:
            run: makes a run with `fetches` and feeds.
            lifecycle: the parts of the session that the loop uses.
            source: the feeds of the loop, or None.
            producers: the tasks that put elements into the queue of the feeds, if they were named.
            fetches: the values to fetch in each run.
        """
        self._run = run
        self._lifecycle = lifecycle
        self._source = source
        self._producers = producers
        self._fetches: object = fetches
        graph = lifecycle.graph
        inputs = () if graph.step_operation is None else graph.step_operation.inputs
        placeholders = [name for name in inputs if isinstance(graph.nodes[name], Placeholder)]
        # The name of the only placeholder, to which each element is fed. With several placeholders
        # or none, it is None, and an element is a mapping of feeds.
        self._parameter = placeholders[0] if len(placeholders) == 1 else None
        self._has_begun = False

    def __aiter__(self) -> Steps[T_co]:
        # Each `async for` gets a copy, to which only that loop refers. So a loop that is left by
        # `break` disappears from `feeds.loops`, and a drain does not wait for its end.
        loop = copy.copy(self)
        loop._has_begun = False
        return loop

    async def __anext__(self) -> T_co:
        """Take the next element of the feeds, make a run with it, and return the fetched values."""
        feeds = self._lifecycle.feeds
        if not self._has_begun:
            self._has_begun = True
            feeds.loops.add(self)
        while True:
            try:
                element = await self._next_element()
                return await self._run_with(element)
            except FeedsWentBack:
                # The element is used later, after those that come before it.
                continue
            except (StopAsyncIteration, StopRequestedError):
                # A later loop over the same feeds begins with the elements that are not used, so
                # their source must outlive this loop.
                feeds.keep_sources()
                feeds.end_loop(self)
                raise StopAsyncIteration from None
            except BaseException:
                feeds.keep_sources()
                # An `async for` ends here. `loops` has weak references, but the traceback of the
                # error refers to this loop. If the user keeps the error, a drain would wait for the
                # loop. Code that calls `anext` itself, as with a time limit, begins it again.
                feeds.loops.discard(self)
                self._has_begun = False
                raise

    async def _next_element(self) -> Element | None:
        """Wait for the next element of the feeds, and take it.

        A loop without feeds gets None immediately.

        Raises:
            StopAsyncIteration: the loop has ended by a stop, a drain or the end of the feeds.
            StopRequestedError: the same, if this was waiting.
        """
        lifecycle = self._lifecycle
        requests = lifecycle.requests
        turns = lifecycle.turns
        # Hot path: these are the checks of `give_loop_turn` and `should_stop`, without the calls.
        if requests.pause_reason or turns.now() > turns.loop_turn_due:
            # The loop turn comes before an element is taken: a stop during it would otherwise lose
            # the element.
            await lifecycle.give_loop_turn()
        if requests.stopped or lifecycle.phase != "open" or lifecycle.gave_up is not None:
            raise StopAsyncIteration
        source = self._source
        if source is None:
            if requests.drain_reason is not None:
                raise StopAsyncIteration
            return None
        element = source.take(self._producers)
        while element is None:
            # After the wait, another loop may have been faster, and have taken the element.
            await self._wait_for_feed(source)
            element = source.take(self._producers)
        return element

    async def _run_with(self, element: Element | None) -> T_co:
        """Make a run with an element, and return the fetched values.

        If the run fails before its commit, the element goes back to its source, for another run.
        """
        lifecycle = self._lifecycle
        feed_dict: Any = None
        if element is not None:
            feed_dict = element.value
            if self._parameter is not None:
                feed_dict = {self._parameter: element.value}
        earlier_scope = lifecycle.run_waits.scope
        try:
            values: T_co = await self._run(self._fetches, feed_dict)
        except BaseException as error:
            if element is not None:
                element.source.settle(element, is_used=self._is_committed(earlier_scope))
            if isinstance(error, StopAsyncIteration):
                # The step function or a hook has ended the loop, as the end of the feeds does.
                what = f"a run ended with {safe_repr(error)}"
                lifecycle.requests.record_end(what)
                logger.info("%s: %s, and with it the loop", lifecycle.requests.label, what)
            raise
        if element is not None:
            element.source.settle(element, is_used=True)
        return values

    @property
    def unused(self) -> list[Any]:
        """The elements that were read and not used, in order. Another loop over the same feeds gets
        them first.
        """
        return [] if self._source is None else self._source.unused

    def _is_committed(self, earlier_scope: RunScope | None) -> bool:
        """Return whether the run of this task that has just raised an error is committed.

        `earlier_scope` was the latest scope before the call of `run`. If the run did not begin, the
        latest scope is still this one, or that of a run of another task.
        """
        scope = self._lifecycle.run_waits.scope
        if scope is None or scope is earlier_scope or scope.runner != id(current_task()):
            return False
        return scope.committed

    async def _wait_for_feed(self, source: FeedSource) -> None:
        """Wait until the source may have an element.

        The wait is lasting: a recovery during it does not end it, because to cancel a generator of
        feeds would end the generator. If a drain ends the wait for a queue, this returns normally,
        and `take` gives the elements that are left.
        """
        lifecycle = self._lifecycle
        coordinator = lifecycle.coordinator
        requests = lifecycle.requests
        note_own_end_in_drain()
        # Without a raw session nothing reads feeds, and a failure or a cancelled recovery may have
        # left none.
        await lifecycle.recover_if_needed()
        producers = self._producers
        is_draining = requests.drain_reason is not None
        if is_draining and source.ends_at_drain:
            # In a drain the feeds end when the queue is empty. If no producers are named, wait as
            # if all had ended: for a few iterations of the event loop.
            producers = producers or ()
        try:
            with active("feed", "next feed", observers=lifecycle.observers):
                await coordinator.wait_until_ended(
                    "next feed",
                    source.wait(),
                    producers,
                    drain=source.ends_at_drain and not is_draining,
                    is_lasting=True,
                )
        except StopRequestedError:
            # Swallow the error only if a drain has ended this wait: `take` then gives the elements
            # that are left in the queue.
            if is_draining or requests.stopped or requests.drain_reason is None:
                raise
