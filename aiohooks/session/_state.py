"""The state of a session, in one place: how far it is, its run, its tasks, and what is requested of
it.

`Coordinator` is the public view of it. Every part of a session reads it and writes what is the
part's to decide; it knows none of them, and they know each other in one direction only: the
docstring of the package has their order.

    SessionState   of a session, or of a coordinator that is used alone
    TaskOwner      the background tasks of the whole session, or of one raw session, and their
                   failures
    end_tasks      waits for tasks, and cancels them
    EndOfProducers ends a wait when the tasks that it depends on have ended
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

from aiohooks._core.calls import Calls, RunWaits, Wait
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, new_task, running_loop
from aiohooks._core.clock import (
    TimerHandle,
    current_clock,
    monotonic_now,
    secs_text,
    wait_woken,
    wake,
)
from aiohooks._core.coroutines import close_unawaited
from aiohooks._core.observers import Observer, observing
from aiohooks._core.reports import Awaited, logger
from aiohooks._core.scope import current_run, leave_run
from aiohooks._core.validate import check_instance, check_secs
from aiohooks._why.tasks import coroutine_of, is_task, links_of, task_wait
from aiohooks.errors import (
    InvalidArgumentError,
    ProducerFinishedError,
    SessionClosedError,
    StopRequestedError,
    WrongLoopError,
    add_note,
    add_origin,
    flattened,
    is_clean_end,
    notes_of,
    raise_unchanged,
    safe_repr,
)
from aiohooks.session._long_waits import LongWaitLog
from aiohooks.session.status import EffectRecorder, SessionStatus, background_activities

if TYPE_CHECKING:
    from aiohooks.graph.graph import Graph
    from aiohooks.graph.session import Session
    from aiohooks.stores.base import StepStore
    from aiohooks.stores.publishers import Publisher

T = TypeVar("T")
Producer: TypeAlias = asyncio.Task[Any] | Iterable[asyncio.Task[Any]]
"""The task that a wait depends on, or several."""
Producers: TypeAlias = tuple[asyncio.Task[Any], ...]

OPEN_SESSIONS: WeakSet[SessionState] = WeakSet()
"""The sessions of this process that are being opened, are open, or are being closed."""
RUN_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
"""The event loops of `aiohooks.run`, each with its thread."""
WHY_VARIABLE = "AIOHOOKS_WHY"
"""The environment variable that lets the processes of a program be asked why they wait."""
_background_of: contextvars.ContextVar[tuple[SessionState, ...]] = contextvars.ContextVar(
    "aiohooks_background", default=()
)
"""The sessions of whose background tasks the current code is part, also in a task of its own."""


class SessionState:
    """One session, as its parts and its coordinators see it; as a `RunOwner`, what is part of its
    runs sees it, too.
    """

    whole: TaskOwner
    """The owner of the tasks that live through recoveries."""
    current: TaskOwner
    """The owner of the raw session's tasks; without one, the same."""

    def __init__(self) -> None:
        self.label: str = "coordinator"
        """The name for messages."""
        self.name: str | None = None
        """The session's name, if it was given one."""
        self.graph: Graph | None = None
        """The default graph of what is part of a run."""
        self.grace_secs: float = DEFAULT_GRACE_SECS
        """How long cleanup may take, and what does not end immediately."""
        self.observers: list[Observer] = []
        """Notified of what happens outside of the runs."""
        self.get_status: Callable[[], SessionStatus] | None = None
        self.publisher: Publisher | None = None
        """The session's registration as a publisher of steps."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: int = 0
        """The loop's thread."""
        self.phase: str = "new"
        """"new", "opening", "open", "closing" or "closed", since the time `since`."""
        self.since: float | None = None
        self.entered_by: asyncio.Task[Any] | None = None
        # The raw session, and the step store that all of them have.
        self.session: Session | None = None
        self.store: StepStore | None = None
        self.is_recoverable: Callable[[BaseException], bool] = lambda error: False
        """What the policy says of an error."""
        self.recoveries: int = 0
        self.recovering_from: BaseException | None = None
        self.recovery_error: BaseException | None = None
        """The error with which recovery gave up; no run can begin any more."""
        # The runs begun, the task of the run in progress, and what it awaits.
        self.runs: int = 0
        self.runner: asyncio.Task[Any] | None = None
        self.waits: RunWaits = RunWaits()
        self.effects: EffectRecorder | None = None
        """The hook that records and delivers the effects of the runs."""
        # What is requested, and the waiters.
        self.stopped: bool = False
        """Whether a stop was requested, or the session has ended."""
        self.stop_reason: str | None = None
        self.drain_reason: str | None = None
        self.pause_reason: str | None = None
        self.run_began: Callable[[], float | None] = lambda: None
        """Returns when the latest run began, if that is known, to some milliseconds."""
        self.on_pause: Callable[[], None] = lambda: None
        """Called in the loop after a pause or its end."""
        self.stoppable: dict[Wait[Any], bool] = {}
        """The waits that a stop or a failure ends, and whether a drain ends them too."""
        self.waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        """Those that wait for something to be requested, or for the last task to end, and for
        what.
        """
        self._failures: list[BaseException] = []
        self._known: list[BaseException] = []  # of these, with which the session does not end
        self._drain_limits: list[float] = []  # in seconds; requested, and not begun yet
        self._drain_timers: list[TimerHandle] = []

    def set_phase(self, phase: str) -> None:
        """Begin a phase."""
        self.phase, self.since = phase, current_clock().now()
        (OPEN_SESSIONS.discard if phase == "closed" else OPEN_SESSIONS.add)(self)

    @property
    def owners(self) -> tuple[TaskOwner, ...]:
        """The owners of the session's tasks, first that of the raw session."""
        return (self.whole,) if self.current is self.whole else (self.current, self.whole)

    def failures(self) -> list[BaseException]:
        """Return the failures of the background tasks, in the order of their occurrence."""
        owners = self.owners
        return [
            error for error in self._failures if any(owner.failed_with(error) for owner in owners)
        ]

    def note_failure(self, error: BaseException) -> None:
        """Remember the order in which background tasks fail; those of replaced sessions go."""
        self._failures = [*self.failures(), error]
        self._known = [one for one in self._known if any(one is each for each in self._failures)]

    def owns(self, task: asyncio.Task[Any]) -> bool:
        """Return whether `task` is a background task of the session."""
        return any(task in owner.tasks for owner in self.owners)

    def recovers(self, error: BaseException) -> bool:
        """Return whether a new raw session can help: a failed task of the whole session cannot be
        started again.
        """
        return self.is_recoverable(error) and not self.whole.failed_with(error)

    def mark_raised(self, error: BaseException) -> None:
        """Note that `error` is raised, if it is a failure of a background task.

        A background task that gets the failure of another one does not pass it on, nor does a task
        that it has started: only code outside of the session's own tasks can handle it.
        """
        if self in _background_of.get():
            return
        for owner in self.owners:
            if owner.failed_with(error):
                self.mark_known(error, owner)

    def mark_known(self, error: BaseException, owner: TaskOwner) -> None:
        """Note that a failure was raised or logged. With one that ends the session, the later ones
        of its owner count as known; they were logged when they happened.
        """
        if self.recovers(error):
            self._known.append(error)
        else:
            owner.raised = True

    def is_known(self, error: BaseException, owner: TaskOwner) -> bool:
        """Return whether a failure was raised or logged."""
        return owner.raised or any(error is one for one in self._known)

    def is_part_of_call(self) -> bool:
        """Return whether this code is part of a run of the session, or of its end: of a hook."""
        run = current_run()
        while run is not None and not (run.active and run.session is self):
            run = run.outer
        return run is not None

    def end_run(self, cause: BaseException) -> None:
        """End the run in progress with `cause`."""
        if self.runner is not None:
            self.waits.end(cause)

    def awaited(self) -> Awaited:
        """Return the session, for the wait-for graph: it waits for its run, or for what its block
        does.
        """
        key = None if self.publisher is None else self.publisher.key
        tasks = [task for task in (self.runner or self.entered_by,) if task is not None]
        one = Awaited(
            "session",
            self.label,
            ", ".join(self._activities()),
            lambda: tasks,
            key or self,
            ends=False,
            not_found="",
        )
        return (
            one if self.runner is not None else one._replace(needs="any")
        )  # other tasks may run it

    def _activities(self) -> Iterator[str]:
        now, run_began = monotonic_now()(), self.run_began()
        if self.store is not None:
            yield f"step {self.store.latest.step}"
        if self.runner is not None:
            yield f"in run {self.runs}" + (
                "" if run_began is None else f" for {secs_text(now - run_began)}"
            )
        elif self.phase == "open" and run_began is not None:
            yield f"in its block; run {self.runs} began {secs_text(now - run_began)} ago"
        else:
            yield (
                self.phase
                if self.since is None
                else f"{self.phase} for {secs_text(now - self.since)}"
            )
        if self.recovering_from is not None:
            yield f"in recovery {self.recoveries} from {safe_repr(self.recovering_from)}"
        for what, reason in (
            ("paused", self.pause_reason),
            ("draining", self.drain_reason),
            ("stopping", self.stop_reason),
        ):
            if reason is not None:
                yield f"{what}: {reason}"

    def name_session(self, error: BaseException) -> None:
        """Add the session's name, if it was given one, to an error that it raises; nothing to a
        cancellation or a clean end.
        """
        if self.name is None or isinstance(error, asyncio.CancelledError) or is_clean_end(error):
            return
        if (note := f"in session {self.name!r}") not in notes_of(error):
            add_note(error, note)

    def until(self, awaitable: Awaitable[T]) -> Awaitable[T]:
        """Return a wait of code in a run for something, which a stop of the session ends too; at
        its end it is the last one.
        """
        return (
            awaitable
            if self.phase != "open"
            else self.current.until(Wait[T]("a wait in a run"), awaitable)
        )

    # -- the stop, the drain before it and the pause: recorded in any thread, and then begun in the
    # loop

    def request_stop(self, reason: str | None) -> None:
        """Request a stop, from any thread; the first reason is kept."""
        check_instance(reason, str, "reason", optional=True)
        if not self.stopped:
            self.record_stop(reason)
            self.call_in_loop(self.end_waits)
        elif self.stop_reason is None:  # closed before; a stop was requested only now
            self.stop_reason = reason

    def record_stop(self, reason: str | None) -> None:
        """Record a stop, from any thread or signal handler; the waits continue until `end_waits` is
        called in the loop.
        """
        self.stop_reason = self.stop_reason or reason or "a stop was requested"
        self.stopped = True  # after the reason: another thread may read both in between

    def record_end(self, reason: str | None = None) -> None:
        """Keep why the session ends if no stop was requested: a drain, or else `reason`; nothing is
        stopped yet.
        """
        self.stop_reason = self.stop_reason or self.drain_reason or reason

    def end_waits(self, error: BaseException | None = None) -> None:
        """End the waits because of `error` or the stop; an error ends the run too, unless it
        recovers from that already.
        """
        if self.stopped:
            self.forget_drain_limits()
        self.wake_waiters()
        for wait in tuple(self.stoppable):
            wait.end(error or self.stop_error())
        if (
            error is not None
            and error is not self.recovering_from
            and (self.session is not None or self.whole.errors)
        ):
            self.end_run(error)

    def stop_error(self) -> StopRequestedError:
        return StopRequestedError(self.stop_reason or self.drain_reason or "the session has ended")

    def request_drain(self, reason: str | None, secs: float | None) -> None:
        """Request a drain of at most `secs`, from any thread; the first reason is kept."""
        check_instance(reason, str, "reason", optional=True)
        check_secs(secs, "secs", optional=True)
        if self.stopped:
            return
        begin = self.begin_drain if self.drain_reason is None else self._limit_drain
        if secs is not None:
            self._drain_limits.append(secs)
        self.record_drain(reason)
        self.call_in_loop(begin)

    def record_drain(self, reason: str | None) -> None:
        """Record a drain, from any thread or signal handler; the waits continue until `begin_drain`
        is called in the loop.
        """
        self.drain_reason = self.drain_reason or reason or "a drain was requested"

    def begin_drain(self) -> None:
        """End the waits that a drain ends, and a pause."""
        if self.drain_reason is None or self.stopped:
            return
        logger.info("%s: draining: %s", self.label, self.drain_reason)
        self._limit_drain()
        self.resume()
        self.wake_waiters()
        for wait, ends_at_drain in tuple(self.stoppable.items()):
            if ends_at_drain:
                wait.end(self.stop_error())

    def end_producers(self, producers: Producers) -> None:
        """Cancel the producers, and those of all waits in `until`, that do not end by themselves in
        a drain.
        """
        for task in {*producers}.union(*(owner.producers for owner in self.owners)):
            if task not in _ending_in_drains:
                _ending_in_drains.add(task)
                task.cancel(f"a drain ends this producer: {self.drain_reason}")

    def _limit_drain(self) -> None:
        while (
            self._drain_limits and not self.stopped
        ):  # of several limits the one that is reached first stops it
            secs = self._drain_limits.pop(0)
            late = functools.partial(
                self.request_stop, f"{self.drain_reason}, and the drain took longer than {secs} s"
            )
            self._drain_timers.append(current_clock().call_later(secs, late))

    def forget_drain_limits(self) -> None:
        """Cancel what would stop the session at the end of the time for a drain."""
        self._drain_limits.clear()
        while self._drain_timers:
            self._drain_timers.pop().cancel()

    def pause(self, reason: str | None) -> None:
        """Begin a pause, from any thread; the first reason is kept."""
        check_instance(reason, str, "reason", optional=True)
        if self.pause_reason is None:
            self.pause_reason = reason or "a pause was requested"
            # The next run must wait even if the loop has no turn before it: Python 3.15 does not
            # suspend for a call in a thread that has already ended.
            self.on_pause()
            self.call_in_loop(self._pause_changed)

    def resume(self) -> None:
        """End the pause, if there is one; from any thread."""
        if self.pause_reason is not None:
            self.pause_reason = None
            self.call_in_loop(self._pause_changed)

    def _pause_changed(self) -> None:
        logger.info(
            "%s: %s",
            self.label,
            "resumed" if self.pause_reason is None else f"paused: {self.pause_reason}",
        )
        self.wake_waiters()
        self.on_pause()

    def clear_stop(self) -> None:
        """Withdraw the stop and the drain."""
        self.stopped = False
        self.stop_reason = self.drain_reason = None
        self.forget_drain_limits()

    def call_in_loop(self, call: Callable[[], None]) -> None:
        """Call `call` in the loop, from any thread, and immediately in a task of the loop."""
        loop = self.loop
        if loop is None:
            return  # there is no waiter: each one looks for a stop after it has set the loop
        if loop is running_loop() and asyncio.current_task() is not None:
            call()
        elif not loop.is_closed():
            # From another thread, or outside of a task: perhaps from a signal handler that has
            # interrupted the loop while it waits for events, which only this ends.
            loop.call_soon_threadsafe(call)

    def wake_waiters(self) -> None:
        for waiter, condition in self.waiters.items():
            if condition():
                wake(waiter)


class TaskOwner:
    """What owns background tasks: the whole session, which may be used alone, or one raw session,
    until it is replaced.
    """

    def __init__(
        self, state: SessionState, clean_stop_exception_types: tuple[type[BaseException], ...] = ()
    ) -> None:
        """Start without tasks."""
        self.state: SessionState = state
        self._clean = clean_stop_exception_types
        self.tasks: dict[asyncio.Task[Any], bool] = {}
        """Those that have not ended, in the order of their start, and whether they were cancelled
        from here.
        """
        self.errors: list[BaseException] = []
        """The failures so far, in the order of their occurrence."""
        self.raised: bool = False
        """Whether a failure that ends the session has been raised."""
        self.producers: WeakSet[asyncio.Task[Any]] = WeakSet()
        """The tasks that waits in `until` have named as their producers."""
        self.joined: bool = False
        self.closed: bool = False
        """Whether its session is ending, or was replaced."""
        self.ending: str | None = None
        """Why no task can be started any more."""
        self._disowned: str | None = None

    def should_stop(self) -> bool:
        return self.closed or self.state.stopped

    def bind(self) -> None:
        """Bind the session to the running loop."""
        state, loop = self.state, running_loop()
        if loop is None or loop is not (state.loop or loop):
            raise WrongLoopError(
                f"{self!r} is used outside its own event loop; only request_stop and should_stop"
                " may be"
            )
        if state.loop is None:
            state.loop = loop
            state.begin_drain()  # one that was requested before

    # -- waits

    async def until(
        self,
        wait: Wait[T],
        awaitable: Awaitable[T],
        producers: Producers | None = None,
        *,
        drain: bool = False,
    ) -> T:
        """`Coordinator.until`, with the wait that gets what ends it. With `()` all producers have
        ended.
        """
        state, end = self.state, None
        try:
            self.bind()
            if (error := self._wait_error(drain)) is not None:
                raise_unchanged(error)
            if not inspect.isawaitable(awaitable):  # also generators that are marked as coroutines
                raise InvalidArgumentError(
                    f"until got {awaitable!r}; give a coroutine, a task or a future"
                )
            state.stoppable[wait] = drain
            end = None if producers is None else EndOfProducers(producers, wait)
            return await wait.result_of(awaitable)
        except BaseException as raised:
            # An element of a queue, for example; a future that was given has its result still.
            if (
                wait.keeps_result
                and (lost := wait.results[0]) is not None
                and not asyncio.isfuture(awaitable)
            ):
                logger.warning(
                    "%s: a wait was cancelled as its result came, which is lost: %s",
                    state.label,
                    safe_repr(lost),
                )
            close_unawaited(awaitable)
            if not state.is_part_of_call():
                state.mark_raised(raised)
            raise
        finally:
            state.stoppable.pop(wait, None)
            if end is not None:
                end.stop_watching()

    def _wait_error(self, drain: bool) -> BaseException | None:
        """Return the error that ends a wait now: the first failure, else the stop, or the drain if
        that ends it too.
        """
        state = self.state
        for failure in state.failures():
            if self.failed_with(failure) or state.whole.failed_with(failure):
                return failure
        return (
            state.stop_error()
            if self.should_stop() or (drain and state.drain_reason is not None)
            else None
        )

    async def wait_for_resume(self) -> None:
        """Wait while there is a pause; a stop or a failure ends the wait."""
        while self.state.pause_reason is not None:
            with observing(self.state.observers, "wait", "end of the pause"):
                await self.until(
                    Wait("the end of the pause"),
                    self.wait_for(lambda: self.state.pause_reason is None),
                )

    async def wait_for(self, condition: Callable[[], bool], secs: float | None = None) -> bool:
        """Wait until `condition()` holds, of requests or of having no tasks, at most `secs`; return
        whether it does.
        """
        check_secs(secs, "timeout", optional=True)
        if not condition():
            self.bind()
        # Looked at again: a request from another thread came before the loop was known, or it will
        # wake the waiter there.
        if not condition():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.state.waiters[waiter] = condition
            try:
                await wait_woken(waiter, secs)
            finally:
                del self.state.waiters[waiter]
        return condition()

    # -- tasks

    def start_soon(
        self, fn: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...], name: str | None
    ) -> asyncio.Task[T]:
        """Start `fn(*args)` as a task that is not part of the run in which it was started."""
        self.bind()
        if self.ending is not None:
            raise SessionClosedError(f"no task can be started any more: {self.ending}")
        context = contextvars.copy_context()
        context.run(leave_run)
        context.run(_background_of.set, (*_background_of.get(), self.state))
        coro: Any = context.run(fn, *args)
        if not asyncio.iscoroutine(coro):
            raise InvalidArgumentError(
                f"{fn!r} returned {coro!r} and not a coroutine; start_soon takes an `async def` and"
                " its arguments"
            )
        task: asyncio.Task[T] = new_task(coro, name or getattr(fn, "__name__", None), context)
        self.tasks[task] = False
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if not self.tasks:
            self.state.wake_waiters()
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not self.ends_in_drain(error)
        ):
            add_origin(error, f"background task {task.get_name()!r}")
            how = "ended" if self.is_clean_end(error) else "failed"
            self.record_error(error, f"background task {task.get_name()!r} {how}")

    def failed_with(self, error: BaseException) -> bool:
        """Return whether `error` is one of the failures."""
        return any(error is one for one in self.errors)

    def is_clean_end(self, error: BaseException) -> bool:
        return is_clean_end(error) or isinstance(error, self._clean)

    def ends_in_drain(self, error: BaseException) -> bool:
        """Return whether a task ends cleanly in a drain, in which the others finish what they have
        under way.
        """
        return self.state.drain_reason is not None and self.is_clean_end(error)

    def record_error(self, error: BaseException, what: str) -> None:
        """Record the failure of a task: it ends waits, and stops a session that does not recover; a
        clean end is a stop.
        """
        if self.failed_with(error) or self.state.whole.failed_with(error):
            return  # `until` raised it in the task, which passed it on
        is_clean = self.is_clean_end(error)
        if (self.closed and is_clean) or is_end_of_producers(error):
            return
        state, described = self.state, f"{what}: {safe_repr(error)}"
        if is_clean:
            state.request_stop(described)
            return
        if self._disowned is not None:
            logger.error("%s: %s, after %s", state.label, what, self._disowned, exc_info=error)
            return
        # The waits end before anything is said about the error: that calls the error's own methods.
        first = not self.errors
        self.errors.append(error)
        state.note_failure(error)
        if not state.stopped and (self is state.whole or not state.is_recoverable(error)):
            state.stop_reason = described
            state.stopped = True
        if (
            first or state.stopped
        ):  # otherwise the first one has interrupted the run already, which may be recovering
            state.call_in_loop(functools.partial(state.end_waits, error if first else None))
        if not first:  # the first one is raised; this one must not be lost
            add_note(self.errors[0], f"then {described}")
            logger.error("%s: %s after another failure", state.label, what, exc_info=error)

    def raise_failure(self) -> None:
        """Raise the first failure, if there is one."""
        if self.errors:
            if not self.state.is_part_of_call():
                self.state.mark_raised(self.errors[0])
            raise_unchanged(self.errors[0])

    def cancel_tasks(self, why: str) -> None:
        """Cancel the tasks, each once; no other can be started from now on."""
        self.ending = self.ending or why
        for task, cancelled in tuple(self.tasks.items()):
            if not cancelled:
                self.tasks[task] = True
                task.cancel(why)

    def close(self, failure: str | None = None) -> None:
        """Stop the owner of these tasks, whose session is replaced or closed; after a failure they
        are cancelled immediately.
        """
        self.closed, state = True, self.state
        if failure is not None:
            self.cancel_tasks(failure)
        if self is state.whole:
            state.stop_reason = state.stop_reason or failure or state.drain_reason
            state.stopped = True
            state.call_in_loop(state.end_waits)

    def disown(self, why: str) -> None:
        """Only log errors of tasks from now on, as no caller is left to raise them; refuse other
        tasks.
        """
        self._disowned = self._disowned or why
        self.ending = self.ending or why

    def __repr__(self) -> str:
        state = self.state
        doing = "running" if state.drain_reason is None else f"draining: {state.drain_reason}"
        if self.should_stop():
            doing = f"stopping: {state.stop_reason}"
        return (
            f"<Coordinator {doing}, tasks:"
            f" {', '.join(task.get_name() for task in self.tasks) or 'none'}>"
        )


_ending_in_drains: WeakSet[asyncio.Task[Any]] = WeakSet()
"""The tasks that look for a drain, or depend on producers, and so end by themselves in one."""


def note_own_end_in_drain() -> None:
    """Note that the current task ends by itself in a drain."""
    task = None if running_loop() is None else asyncio.current_task()
    if task is not None:
        _ending_in_drains.add(task)


async def end_tasks(
    owners: Sequence[TaskOwner],
    stop_grace_secs: float,
    cancel_grace_secs: float,
    why: str,
    what: str,
) -> None:
    """Wait `stop_grace_secs`, if not 0, for the tasks of all these, cancel them, wait
    `cancel_grace_secs`, then warn.

    The first wait ends early if all tasks that are left wait for queues, and have done so since the
    look before: none of them can wake another, and no other code has. Tasks that they start
    meanwhile are part of it. `why` is the message of the cancellation; `what`, in messages, the
    session and what it is doing.
    """

    def described() -> dict[object, str]:
        return {
            one.task: str(one) for owner in owners for one in background_activities(owner.tasks)
        }

    async def ended(secs: float) -> bool:
        return await owners[0].wait_for(lambda: not any(owner.tasks for owner in owners), secs)

    with LongWaitLog(what, described):
        now = current_clock().now
        began = now()
        before: dict[asyncio.Task[Any], object] = {}
        for look in (*_LOOKS_SECS, stop_grace_secs):
            left = began + min(look, stop_grace_secs) - now()
            if left <= 0:
                continue  # the loop was blocked, and nothing could use the queues
            if await ended(left):
                return
            waits = {task: queue_wait(task) for owner in owners for task in owner.tasks}
            is_idle = None not in waits.values() and waits == before
            before = waits
            if is_idle and now() - began < stop_grace_secs:
                names = "; ".join(described().values())
                text = "%s: cancelled early, as no other task is left that uses their queues: %s"
                logger.info(text, what, names)
                break
        for owner in owners:
            owner.cancel_tasks(why)
        if not await ended(cancel_grace_secs):
            names = "; ".join(described().values())
            logger.warning(
                "%s: still active %s s after their cancellation: %s", what, cancel_grace_secs, names
            )


_LOOKS_SECS = (0.05, 0.15, 1.0)
"""When to look, after a stop, whether all tasks that are left wait for queues."""
_Queue: Any = asyncio.Queue
_QUEUE_METHODS = frozenset({_Queue.put.__code__, _Queue.get.__code__, _Queue.join.__code__})


def queue_wait(task: asyncio.Task[Any]) -> object:
    """Return the future of a task that waits in a method of a queue, and else None.

    None in a `with` block, too: it may be a time limit, after which the task continues by itself.
    """
    from aiohooks._why.frames import held_by  # seldom needed

    frames = task_wait(task).frames
    if not frames or frames[-1].f_code not in _QUEUE_METHODS or held_by(task):
        return None
    _, waiter = [*links_of(coroutine_of(task))][-1]
    return None if not asyncio.isfuture(waiter) or waiter.done() else waiter


# -- the producers of a wait: tasks without which it would never end

_MOST_PASSES = 5  # of the loop: a notified waiter may have to wake another one, or to take a lock


class EndOfProducers:
    """Ends a wait when all the tasks that it depends on have ended, and it has had the time to take
    what they left.
    """

    def __init__(self, producers: Producers, wait: Wait[Any]) -> None:
        self._producers = producers
        self._wait: Wait[Any] | None = wait
        """None when it has ended."""
        self._left = {one for one in producers if not one.done()}
        for one in self._left:
            one.add_done_callback(self._ended)
        if not self._left:
            self._let_pass(_MOST_PASSES)

    def _ended(self, producer: asyncio.Task[Any]) -> None:
        self._left.discard(producer)
        if not self._left:
            self._let_pass(_MOST_PASSES)

    def _let_pass(self, passes: int) -> None:
        if (
            self._wait is None
        ):  # this call, or the callback of a producer, was due when the wait ended
            return
        if passes:
            asyncio.get_running_loop().call_soon(self._let_pass, passes - 1)
        else:
            Calls.end(self._wait, self._error())  # also during a recovery

    def _error(self) -> BaseException:
        ends: list[str] = []
        for one in self._producers:
            error = None if one.cancelled() else one.exception()
            if error is not None and not is_clean_end(error):
                return error
            if one.cancelled():
                how = "was cancelled"
            elif error is None or is_end_of_producers(error):
                how = "has finished"
            else:
                how = f"has ended: {safe_repr(error)}"
            ends.append(f"producer {one.get_name()!r} {how}")
        return ProducerFinishedError(", ".join(ends))

    def stop_watching(self) -> None:
        """The wait has ended."""
        self._wait = None
        for one in self._left:
            one.remove_done_callback(self._ended)


def is_end_of_producers(error: BaseException) -> bool:
    """Return whether a task that ended with this has finished: all that it waited for was produced
    and used.
    """
    return all(isinstance(one, ProducerFinishedError) for one in flattened([error]))


def checked_producers(producer: Producer | None) -> Producers | None:
    """Return the tasks; raise `InvalidArgumentError` if there is none, or something else."""
    if producer is None:
        return None
    given: object = producer
    producers = (
        tuple(producer)
        if isinstance(given, Iterable) and not asyncio.isfuture(given)
        else (producer,)
    )
    if not producers or not all(is_task(one) for one in producers):
        raise InvalidArgumentError(
            f"producer is {producer!r}; give a task, or several in a list: what start_soon returns"
        )
    return cast("Producers", producers)
