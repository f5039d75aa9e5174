"""The monitored session that never recovers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import warnings
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from signal import Signals
from threading import get_ident
from types import TracebackType
from typing import Any, Self, TypeVar

from aiohooks._aio.cancel import DEFAULT_GRACE_SECS, current_task
from aiohooks._aio.clock import quick_now
from aiohooks._validate import check_instance, check_secs
from aiohooks.dispatch.hook import HookRegistration
from aiohooks.errors import (
    InvalidArgumentError,
    SessionClosedError,
    StopRequestedError,
)
from aiohooks.graph.graph import Graph
from aiohooks.graph.session import Session
from aiohooks.graph.variables import Variables
from aiohooks.session._hooked_run import HookedRun
from aiohooks.session._hooks import HookSet
from aiohooks.session._run_lock import RunGate
from aiohooks.session._shutdown import Ending
from aiohooks.session._snapshot import status_of
from aiohooks.session.coordinator import Coordinator, close_unawaited
from aiohooks.session.creators import Source, WorkerSessionCreator, creator_of
from aiohooks.session.hook import SessionRunHook
from aiohooks.session.recovery import NEVER, Recoverable, RecoveryPolicy
from aiohooks.session.signals import SignalPolicy, StopOnSignal, policy_of
from aiohooks.session.status import SessionStatus
from aiohooks.session.steps import StepContext, Steps
from aiohooks.stores.base import StepStore

_logger = logging.getLogger("aiohooks")
T = TypeVar("T")


class AsyncMonitoredSession:
    """Runs a graph, or a coroutine function, with hooks around each run; recovers from errors that mean "try again".

    Use it as `async with AsyncMonitoredSession(...) as session`. Leaving the block normally, or with an error that means the
    end of the work (`OutOfRangeError`, `StopAsyncIteration`, `StopIteration`, `StopRequestedError`), is a clean end: `end` of
    every hook is called and the error is swallowed. Any other error reaches the caller as the same object, without `end`.
    However it ends, `close` of every hook is called once, background tasks are over and the session is closed.

    Runs do not overlap: several tasks may call `run`, they take turns. A cancellation is never swallowed; cleanup runs
    shielded from it, for at most the grace period.
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
        name: str | None = None,
    ) -> None:
        """Checks and keeps the arguments; nothing is started before the `async with` block is entered.

        Args:
            source: a graph, a `SessionCreator`, or a coroutine function that is the step. Of such a function the parameters
                are fed by name, and keys of the mapping it returns can be fetched.
            hooks: `SessionRunHook` objects, or what `configure` made of them.
            global_step: where the global step is kept; the session's own, if left out.
            variables: the values of the variables; the session's own, if left out.
            recovery: which errors are recovered from, and how often.
            stop_grace_period_secs: how long background tasks may go on after a clean end, and cleanup after a cancellation.
            handle_signals: whether SIGINT and SIGTERM end the session while it is open: the first one by a stop, the second one
                as a cancellation does, the third one at once; or a `SignalPolicy` that says which signals, and how fast.
            name: what the session is called where it publishes steps; the name of the task that enters it, if left out.

        Raises:
            InvalidArgumentError: a source, store or number that cannot be meant.
            InvalidHookError: something in `hooks` is not a hook.
        """
        check_secs(stop_grace_period_secs, "stop_grace_period_secs")
        check_instance(recovery, RecoveryPolicy, "recovery")
        if name is not None and (not isinstance(name, str) or not name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"name is {name!r}; give a non-empty str, or leave it out")
        self._creator = creator_of(source, global_step, variables)
        self._graph = self._creator.graph
        self._hooks = HookSet(hooks, stop_grace_period_secs)
        self._life = Recoverable(self._creator, self._hooks, recovery, stop_grace_period_secs)
        self._hooked_run = HookedRun(self._hooks, self._graph)
        self._ending = Ending(self._life, self._hooks, stop_grace_period_secs)
        self._gate = RunGate(self._life)
        signals = policy_of(handle_signals)
        self._signals = None if signals is None else StopOnSignal(signals, self._life.root, self._gate.interrupt)
        self._name = name
        # Made of parts, so that the coordinator does not keep the session itself alive.
        self._look = partial(status_of, self._gate, self._life, self._hooks, self._hooked_run.fan, name)
        self._life.root.look = self._look
        self._grace_secs = stop_grace_period_secs

    # -- entering and leaving

    async def __aenter__(self) -> Self:
        """Begins the hooks, creates the session and tells the hooks of it.

        Raises:
            BaseException: whatever a hook or the creation raises, also an error that would end the block cleanly.
        """
        gate = self._gate
        if gate.state != "new":
            raise SessionClosedError(f"this session is {gate.state}: it is entered once; make a new one")
        gate.loop, gate.thread = self._life.root.bind(), get_ident()
        gate.become("opening")
        self._life.root.on_failure = lambda: gate.interrupt("a background task failed", None)
        self._hooked_run.fan.now = quick_now()
        ending = self._ending
        try:
            if self._signals is not None:
                ending.callback(self._signals.install())
            with self._graph.as_default():
                await self._hooks.begin()
            self._graph.hold()
            ending.callback(self._graph.release)
            store = getattr(self._creator, "global_step", None)
            if getattr(store, "inline", True) or not isinstance(self._creator, WorkerSessionCreator):
                self._publish(store)  # a worker that waits for its chief, elsewhere, is nobody to count on
            await self._life.create()
            self._publish(self._life.store)
        except BaseException as error:
            gate.become("closed")
            await ending.shut_down(error)
            raise
        gate.become("open")
        return self

    def _publish(self, store: StepStore | None) -> None:
        """From here on others may count on this session to advance the step; from before it is created, if the store is known."""
        if self._gate.publisher is None and isinstance(store, StepStore) and self._graph.trains:
            name = self._name or current_task().get_name()
            if self._name is None and not store.inline:
                name += f" of process {os.getpid()} on {socket.gethostname()}"  # there is a Task-1 in each
            self._gate.publisher = self._ending.publisher = store.publisher(name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ends the session; returns whether `error` was a clean end and is swallowed."""
        return await self._leave(error)

    async def aclose(self) -> None:
        """Ends the session as leaving the block without an error does; again is harmless."""
        await self._leave(None)

    async def _leave(self, error: BaseException | None) -> bool:
        gate = self._gate
        if gate.state in ("closed", "closing"):
            return self._ending.swallows(error)
        gate.check_entered()
        if gate.state != "open":
            raise SessionClosedError("this session is still opening; raise an error in the hook to end it")
        gate.check_caller("aclose")
        gate.become("closing")
        try:
            try:
                await gate.close(error is not None and not self._ending.swallows(error), self._grace_secs)
            except BaseException as raised:
                await self._ending.shut_down(raised)
                raise
            return await self._ending.end(error)
        finally:
            gate.become("closed")

    # -- running

    async def run(
        self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None, options: Mapping[str, Any] | None = None
    ) -> Any:
        """Makes one run with all hooks around it, and again after each recovery until it succeeds.

        Args:
            fetches: nodes or names, nested at will; the result has the same shape.
            feed_dict: values by node or name.
            options: handed to the session and to the hooks, merged with theirs.

        Raises:
            StopRequestedError: a stop was asked for before; leaves the block cleanly.
            FeedConflictError: a hook feeds what another hook or the caller feeds.
            FetchError: names that the graph does not know, or a placeholder that nobody feeds.
            NestedRunError: called from inside a hook; use `run_context.session` there.
            SessionClosedError: the session is not open.
            BaseException: what a hook or an operation raised, or a background task; several as one group.
        """
        gate = self._gate
        running = await gate.wait() if gate.turns.taken else gate.begin()
        try:
            life = self._life
            attempt = 1
            while True:
                try:
                    coord = life.coord
                    if coord.errors:
                        raise coord.errors[0]
                    session = life.session or await life.created_session()
                    step = session.global_step.latest.step + 1
                    result = await self._hooked_run(session, coord, step, attempt, fetches, feed_dict, options, gate.base)
                except BaseException as error:
                    await self._recover(error)
                    attempt += 1
                else:
                    if life.history.total:
                        life.history.completed(step)
                    return result
        finally:
            gate.end(running)

    async def run_step_fn(self, fn: Callable[[StepContext], Awaitable[T]]) -> T:
        """Calls `fn(step_context)`, which may make raw runs and runs with hooks; after a recovery the whole of it is repeated.

        Args:
            fn: a coroutine function with one parameter; see `StepContext`.

        Returns:
            What `fn` returns. Raises like `run`.
        """
        gate = self._gate
        running = await gate.wait() if gate.turns.taken else gate.begin()
        try:
            attempt = 1
            while True:
                try:
                    if self._life.coord.errors:
                        raise self._life.coord.errors[0]
                    return await StepContext(self._life, self._hooked_run, attempt).call(fn)
                except BaseException as error:
                    await self._recover(error)
                    attempt += 1
        finally:
            gate.end(running)

    def steps(self, fetches: Any, *, feeds: AsyncIterable[Any] | Iterable[Any] | None = None) -> Steps:
        """Runs again and again: `async for values in session.steps("loss", feeds=batches)`.

        Ends at a stop or when the feeds end. While it waits for the next feed, a stop or a failed background task ends that
        wait too.

        Args:
            fetches: what each run fetches and each turn of the loop gets.
            feeds: one element a run: the argument of a step function that has one parameter, otherwise a feed mapping. Left
                out, runs are not fed and end at a stop only.
        """
        if self._gate.loop is None:
            self._gate.check_entered()
        return Steps(self.run, self.until, self.should_stop, self._graph, fetches, feeds)

    async def _recover(self, error: BaseException) -> None:
        """Replaces the session if `error` is recovered from, and raises it otherwise."""
        interrupted, cause = self._gate.take_interrupt()
        if isinstance(error, asyncio.CancelledError):
            if not interrupted:
                raise error
            if cause is not None:
                raise cause from None
        life = self._life
        root_cause = life.root_cause(error)
        if not life.recovers(root_cause):
            for coord in (life.coord, life.root):
                coord.raised = coord.raised or root_cause in coord.errors
            if isinstance(root_cause, StopRequestedError):
                life.root.request_stop(str(root_cause))  # so that `stop_reason` says it too, if it is the first
            raise root_cause
        try:
            await life.recover(root_cause, None if life.session is None else life.session.global_step.latest.step + 1)
        except asyncio.CancelledError:
            # A task of the whole session may have failed meanwhile, which is not a cancellation of who called `run`.
            interrupted, cause = self._gate.take_interrupt()
            if not interrupted or not (cause or life.root.errors):
                raise
            life.root.raised = life.root.raised or cause is None
            raise cause or life.root.errors[0] from None

    # -- stopping

    def should_stop(self) -> bool:
        """Whether the loop should end: a stop was asked for, or the session is not open. Never waits, never raises."""
        return self._life.root.should_stop() or self._gate.state != "open" or self._life.given_up is not None

    def request_stop(self, reason: str | None = None) -> None:
        """Asks for a stop: recorded at once, never lost, the first reason is kept; from any thread."""
        self._life.root.request_stop(reason)

    @property
    def stop_reason(self) -> str | None:
        """Why a stop was asked for; None if it was not."""
        return self._life.root.stop_reason

    @property
    def stop_signal(self) -> Signals | None:
        """The signal that asked for the stop, if it was one: `sys.exit(128 + session.stop_signal)`."""
        return None if self._signals is None else self._signals.number

    # -- background work

    def start_soon(self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any, name: str | None = None) -> asyncio.Task[T]:
        """Starts `fn(*args)` as a task of this session; it lives through recoveries. See `Coordinator.start_soon`."""
        self._gate.check_entered()
        if self._gate.state not in ("open", "opening"):
            raise SessionClosedError(f"this session is {self._gate.state}; start tasks while it is open")
        return self._life.root.start_soon(fn, *args, name=name)

    async def until(self, awaitable: Awaitable[T]) -> T:
        """Awaits something that a stop, or the failure of a background task, ends too. See `Coordinator.until`."""
        if self._gate.loop is None:
            close_unawaited(awaitable)
            self._gate.check_entered()
        return await self._life.coord.until(awaitable)

    # -- looking

    @property
    def coord(self) -> Coordinator:
        """The coordinator of the session of the moment; another one after a recovery."""
        return self._life.coord

    @property
    def graph(self) -> Graph:
        """The graph that is run."""
        return self._graph

    @property
    def global_step(self) -> StepStore:
        """Where the global step is kept; known from the first session on, also when all is over.

        Raises:
            SessionClosedError: the session was not entered yet.
        """
        if self._life.store is None:
            raise SessionClosedError("the step store is known once the session is open; use `async with`")
        return self._life.store

    def status(self) -> SessionStatus:
        """What the session is doing, for people and programs; waits for nothing."""
        return self._look()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._gate.state}, {self._hooks!r}>"

    def __del__(self) -> None:
        gate = getattr(self, "_gate", None)
        if gate is not None and gate.state in ("open", "opening"):
            warnings.warn(f"{self!r} was never closed; use `async with`", ResourceWarning, stacklevel=2, source=self)


class AsyncSingularMonitoredSession(AsyncMonitoredSession):
    """A monitored session that never recovers: every error reaches the caller."""

    def __init__(
        self,
        source: Source,
        hooks: Iterable[SessionRunHook | HookRegistration] = (),
        *,
        global_step: StepStore | None = None,
        variables: Variables | None = None,
        stop_grace_period_secs: float = DEFAULT_GRACE_SECS,
        handle_signals: bool | SignalPolicy = False,
        name: str | None = None,
    ) -> None:
        """See `AsyncMonitoredSession`."""
        super().__init__(
            source,
            hooks,
            global_step=global_step,
            variables=variables,
            recovery=NEVER,
            stop_grace_period_secs=stop_grace_period_secs,
            handle_signals=handle_signals,
            name=name,
        )

    def raw_session(self) -> Session | None:
        """The session without hooks; None when it is closed."""
        return self._life.session
