"""Background tasks, the stop, the drain before it and the first error, shared by everything inside
a session.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar, TypeVarTuple

from aiohooks._core.calls import Wait
from aiohooks._core.cancel import DEFAULT_GRACE_SECS, current_task
from aiohooks._core.coroutines import close_unawaited
from aiohooks._core.observers import Observer, observing
from aiohooks._core.validate import check_callable, check_secs
from aiohooks._why.tasks import describe_awaitable
from aiohooks.errors import InvalidArgumentError, NestedRunError
from aiohooks.session._state import (
    Producer,
    SessionState,
    TaskOwner,
    checked_producers,
    end_tasks,
    note_own_end_in_drain,
)
from aiohooks.session.status import SessionStatus

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Requests(abc.ABC):
    """What is requested of a session: the same methods of the session itself and of its
    coordinators.
    """

    _state: SessionState

    @abc.abstractmethod
    def should_stop(self) -> bool:
        """Return whether a stop was requested."""

    @property
    def stop_reason(self) -> str | None:
        """Why a stop was requested, or the session ended without one: its failure, a drain, or the
        exception of a clean end.

        The first reason; None if there is none, as after a block that was left without an exception
        or a stop.
        """
        return self._state.stop_reason

    def request_drain(self, reason: str | None = None, *, secs: float | None = None) -> None:
        """Request that nothing new is begun and what is under way is finished, and then a stop;
        from any thread.

        Loops over `session.steps` use the elements that were taken ahead, or are in their queue,
        and take no others; when all of them have ended, a stop is requested. Producers that do not
        look for a drain are cancelled, after they have put what they waited to put. A loop of yours
        looks at `should_drain()`. Waits in `until(..., drain=True)` end. A background task that
        ends cleanly stops no other. A pause ends. The first reason is kept, and of several time
        limits the one that is reached first; after a stop nothing changes.

        Args:
            reason: a text, which is the reason of the stop as well.
            secs: how long the drain may take; then a stop is requested. In a session that is not
                open yet, from its opening on.
        """
        self._state.request_drain(reason, secs)

    def should_drain(self) -> bool:
        """Return whether nothing new is to be begun: a drain or a stop was requested. Never waits,
        never raises.
        """
        note_own_end_in_drain()
        return self._state.drain_reason is not None or self.should_stop()

    @property
    def drain_reason(self) -> str | None:
        """Why the session drains, or drained before its stop; None if no drain was requested."""
        return self._state.drain_reason

    def pause(self, reason: str | None = None) -> None:
        """Let no run of the session begin until `resume`, from any thread; a run in progress is
        finished.

        Whoever runs the session waits in the next run; feeds that are taken ahead are taken up to
        their limit, leases are renewed, checkpoints written, and tasks continue. The first reason
        is kept. A stop, a failed background task and the end of the session end the wait.
        """
        self._state.pause(reason)

    def resume(self) -> None:
        """End the pause, if there is one; from any thread."""
        self._state.resume()

    @property
    def pause_reason(self) -> str | None:
        """Why the session is paused; None if it is not."""
        return self._state.pause_reason


class Coordinator(Requests):
    """Coordinates tasks that stop together; usable alone, and every session has one.

    A stop is recorded immediately, with its first reason, and withdrawn only by `clear_stop`. A
    task that fails also requests a stop, and its error ends every wait in `until`. An error that
    means a clean end (`OutOfRangeError`, ...) is a plain stop.

    A session has a new coordinator after each recovery; a stop requested from it stops the whole
    session.
    """

    def __init__(self, clean_stop_exception_types: tuple[type[BaseException], ...] = ()) -> None:
        """Start without tasks, not stopped.

        Args:
            clean_stop_exception_types: errors of tasks that mean a plain stop, besides the usual
                ones.
        """
        types: object = clean_stop_exception_types
        if not isinstance(types, tuple) or not all(
            isinstance(one, type) and issubclass(one, BaseException) for one in types
        ):  # pyright: ignore[reportUnknownVariableType]
            raise InvalidArgumentError(
                f"clean_stop_exception_types is {types!r}; give a tuple of exception classes"
            )
        state = SessionState()
        state.whole = state.current = TaskOwner(state, clean_stop_exception_types)
        self._set_owner(state.whole)

    def _set_owner(self, owner: TaskOwner) -> None:
        self._owner = owner
        self._state: SessionState = owner.state
        self.errors: list[BaseException] = owner.errors
        """The failures so far, in the order of their occurrence."""
        self.observers: list[Observer] = owner.state.observers
        """Notified of what happens outside of the session's runs, and of all waits in `until`."""

    # -- the stop

    def request_stop(self, reason: str | BaseException | None = None) -> None:
        """Request a stop; from any thread or signal handler, any number of times. The first reason
        is kept.

        Args:
            reason: a text, or an error, which then counts as the failure of a task.

        Raises:
            BaseException: the error itself, if it is reported after `join`, because it would be
                lost otherwise.
        """
        if isinstance(reason, BaseException):
            if self._owner.joined and not self._owner.is_clean_end(reason):
                raise reason
            self._owner.record_error(reason, "reported")
            return
        self._state.request_stop(reason)

    def should_stop(self) -> bool:
        """Return whether a stop was requested; never waits, never raises."""
        return self._owner.should_stop()

    async def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Wait until a stop is requested, at most `timeout` seconds; return whether it was."""
        return await self._owner.wait_for(self.should_stop, timeout)

    def clear_stop(self) -> None:
        """Reset the stop, the drain, their reasons, the errors and `joined`; the tasks stay."""
        self._state.clear_stop()
        for owner in (self._owner, self._state.whole):
            owner.errors.clear()
            owner.raised = owner.joined = False

    # -- the drain

    async def wait_for_drain(self, timeout: float | None = None) -> bool:
        """Wait until a drain or a stop is requested, at most `timeout` seconds; return whether it
        was.
        """
        state = self._state
        note_own_end_in_drain()
        return await self._owner.wait_for(
            lambda: state.drain_reason is not None or self.should_stop(), timeout
        )

    async def wait_for_resume(self) -> None:
        """Wait while there is a pause, as a run does before it begins: also for tasks that prepare
        what runs use.

        Raises:
            StopRequestedError: a stop was requested; a clean end of a session.
            BaseException: the error of a background task that has failed.
        """
        await self._owner.wait_for_resume()

    # -- waits

    async def until(
        self, awaitable: Awaitable[T], *, producer: Producer | None = None, drain: bool = False
    ) -> T:
        """Await something; a stop or the failure of a background task also ends the wait.

        A coroutine is cancelled then; a task or future that was passed in is not. A result that
        comes in the very turn of the loop in which the caller is cancelled is lost, with a warning:
        `session.steps(feeds=queue)` keeps the elements of a queue.

        Args:
            awaitable: a coroutine, a task or a future.
            producer: the task, or the tasks, without which the awaitable is never done: when all of
                them have ended, and what they have left is used up, the wait ends. Give the wait
                itself then, such as `queue.get()`: a coroutine that does other work after it would
                be cut off.
            drain: whether a drain ends the wait too: for what would begin something new, such as
                the next message of a source.

        Returns:
            The result of the awaitable.

        Raises:
            StopRequestedError: a stop was requested, before or meanwhile, or a drain if that ends
                the wait; a clean end of a session.
            ProducerFinishedError: the producers have finished or were cancelled; a clean end, too.
            BaseException: the error of the background task, or the producer, that failed, the same
                object.
        """
        try:
            producers = checked_producers(producer)
        except InvalidArgumentError:
            close_unawaited(awaitable)
            raise
        if drain or producers:
            note_own_end_in_drain()
            self._owner.producers.update(producers or ())
        what = describe_awaitable(awaitable) if self.observers else ""
        with observing(self.observers, "wait", what):
            return await self._owner.until(
                Wait("what `until` awaits"), awaitable, producers, drain=drain
            )

    def status(self) -> SessionStatus | None:
        """Return the current activities of the session; None if this coordinator is used without
        one.
        """
        return None if self._state.get_status is None else self._state.get_status()

    # -- background tasks

    def start_soon(
        self, fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts, name: str | None = None
    ) -> asyncio.Task[T]:
        """Start `fn(*args)` as a task that this coordinator owns.

        If it fails, waits end, and in a session the current `run` is cancelled and raises the
        error. A cancelled task does not count as a failure.

        Returns:
            The task.

        Raises:
            InvalidArgumentError: `fn` is not a coroutine function.
            SessionClosedError: the tasks are being cancelled, or the session has ended or was
                replaced. A task that is started before, also during the grace period, ends with the
                others.
        """
        check_callable(fn, "start_soon's function")
        return self._owner.start_soon(fn, args, name)

    @property
    def tasks(self) -> tuple[asyncio.Task[Any], ...]:
        """The background tasks that have not ended, in the order of their start."""
        return tuple(self._owner.tasks)

    def raise_requested_exception(self) -> None:
        """Raise the first failure, if there is one."""
        self._owner.raise_failure()

    @contextlib.contextmanager
    def stop_on_exception(self) -> Generator[None]:
        """Report the error of the block like that of a task instead of raising it; `join` raises
        it.

        A cancellation, `KeyboardInterrupt` and the like propagate.
        """
        try:
            yield
        except Exception as error:
            if not self._owner.ends_in_drain(error):
                self.request_stop(error)

    async def join(self, stop_grace_period_secs: float = DEFAULT_GRACE_SECS) -> None:
        """Wait until all tasks have ended, or until a stop is requested and the grace period after
        it has passed.

        Tasks that still run then are cancelled; a warning names those that ignore it. After a
        second, another warning names the tasks that are waited for after the stop.

        Raises:
            NestedRunError: called from one of the tasks, which would wait for itself.
            BaseException: the first failure of a task.
        """
        check_secs(stop_grace_period_secs, "stop_grace_period_secs")
        state, owner = self._state, self._owner
        owner.bind()
        if (task := current_task()) in owner.tasks:
            raise NestedRunError(
                f"join was called from the background task {task.get_name()!r}, which it waits for;"
                " to wait for the end there, use wait_for_stop"
            )
        await owner.wait_for(lambda: not owner.tasks or self.should_stop())
        try:
            why, what = f"a stop was requested: {self.stop_reason}", f"{state.label}, joining"
            await end_tasks([owner], stop_grace_period_secs, stop_grace_period_secs, why, what)
        finally:
            if not owner.closed:
                owner.ending = None
        owner.joined = True
        state.forget_drain_limits()
        self.raise_requested_exception()

    @property
    def joined(self) -> bool:
        """Whether a `join` has completed."""
        return self._owner.joined

    def __repr__(self) -> str:
        return repr(self._owner)


def coordinator_of(state: SessionState) -> Coordinator:
    """Return a coordinator for a new raw session, whose tasks it owns from now on."""
    coord = Coordinator()
    state.current = TaskOwner(state)
    coord._set_owner(state.current)  # pyright: ignore[reportPrivateUsage]
    return coord


def owner_of(coord: Coordinator) -> TaskOwner:
    """Return the owner of a coordinator's tasks, and by it the state of the session: for the other
    parts of the library.
    """
    return coord._owner  # pyright: ignore[reportPrivateUsage]
