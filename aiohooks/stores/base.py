"""The contract of a step store, its waits, and what is the same on every engine."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import socket
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal, Self, TypeVar

from aiohooks._core.activity import Awaited, Parked, active, enter
from aiohooks._core.clock import current_clock, monotonic_now, wake
from aiohooks._core.scope import RunScope, current_run
from aiohooks._core.waiters import ANY_CHANGE, ThresholdWaiters, Waiters
from aiohooks._core.waits import wait_for_others
from aiohooks._why.processes import process_state
from aiohooks.errors import (
    AiohooksError,
    InvalidArgumentError,
    PublisherFailedError,
    PublisherFinishedError,
    SessionNotReadyError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
    StoreResetError,
    WrongLoopError,
    add_note,
    copy_error,
    is_clean_end,
    safe_repr,
)
from aiohooks.stores._protocol import (
    MAX_STEP,
    Member,
    Position,
    Snapshot,
    StoreStatistics,
    Term,
    checked_step,
    checked_timeout,
    closed_error,
)
from aiohooks.stores.publishers import (
    Publisher,
    PublisherExit,
    publisher_summary,
    publishers_held_up,
)

_ON_RESET = ("keep", "raise")
_THREADS = "; from a thread give the coroutine to asyncio.run_coroutine_threadsafe()"
OPEN_BY_URL = (
    "open one in the other process by its URL: open_step_store(url, run=...), or"
    " AIOHOOKS_STEP_STORE and AIOHOOKS_RUN"
)

E = TypeVar("E", bound=BaseException)

# An error that ends a wait is a result of its future, too: a future's exception that is never
# fetched, because the task was cancelled in the same tick, would be reported as never retrieved.
Waiter = asyncio.Future[int | AiohooksError]


class Changes:
    """An iterator over a store's positions, from the current one to the newest.

    Positions that came and went between two steps of the iteration are left out; there is never a
    backlog. It ends when the publishers have finished and no change can follow; when they failed,
    or the store was closed, it raises what a `wait_for` would raise. It holds nothing while no task
    waits on it, so it may be dropped at any time.

    Created by `StepStore.changes`.
    """

    __slots__ = ("_next_position", "_seen")

    def __init__(self, next_position: Callable[[Position | None], Awaitable[Position]]) -> None:
        self._next_position = next_position
        self._seen: Position | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Position:
        try:
            position = await self._next_position(self._seen)
        except PublisherFinishedError:
            raise StopAsyncIteration from None
        self._seen = position
        return position


class WaitRegistry:
    """The latest position, the waits and the publishers of a store; ends each wait once.

    Nothing here calls user code: ending a wait only makes its task runnable.
    """

    def __init__(
        self,
        run: str,
        position: Position,
        subscribe: Callable[[int | None], None],
        on_publisher_changed: Callable[[Publisher], None],
        on_unreachable: Callable[[], None],
    ) -> None:
        """Start with no waits; the callbacks are the methods of these names of `StepStore`."""
        self.run: str = run
        self.latest: Position = position
        self.waiters: ThresholdWaiters[AiohooksError] = ThresholdWaiters(none=MAX_STEP + 1)
        """The waits for a step, and those for any change."""
        self.registered: dict[Publisher, None] = {}
        """The publishers of this process, in order of registration."""
        self.others: tuple[Member, ...] = ()
        """Those of other processes."""
        self.last_exit: PublisherExit | None = None
        """How the last publisher left."""
        self.has_left: bool = False
        """Whether a publisher of this process has left."""
        self.closed: bool = False
        self.forked: bool = False
        """Whether the store came into this process by a fork."""
        self.registration_open: bool = False
        """Whether publishers that are not known here may still register: no wait ends for want of
        one.
        """
        self.snapshot: Snapshot = Snapshot(position, revision=-1)
        """The latest one of the run; only `latest` has the latest position."""
        self.waiting_since: float | None = None
        """Since when there has been a wait for a step or a change, without a break."""
        self._clock = current_clock()
        self._subscribe = subscribe
        self._on_publisher_changed = on_publisher_changed
        self._on_unreachable = on_unreachable
        self.vacancies: Waiters = Waiters()
        """The waits for the lead."""
        self._reset_waiters: dict[Waiter, None] = {}  # waits for a step that a reset ends
        self.tasks: dict[Waiter, tuple[asyncio.Task[Any] | None, int]] = {}
        """The task of each wait for a step or a change, and the step, for reports."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscribed = self.waiters.lowest  # the threshold that the store was notified of
        # Without it, advances of one turn that each wake a waiter schedule as many updates, and
        # cost 1.8 times as much.
        self._update_scheduled = False

    def after_fork(self) -> None:
        """Note that the store is in a forked child; see `call_after_fork`."""
        self.forked = True

    # Waiting.

    async def wait(
        self, threshold: int, secs: float | None = None, *, raise_on_reset: bool = False
    ) -> int:
        """Wait until a step that is not reached yet, or for `ANY_CHANGE`.

        Args:
            threshold: the step, or `ANY_CHANGE`.
            secs: how long at most; None for no limit.
            raise_on_reset: whether a reset ends the wait with `StepResetError`.

        Returns:
            The step seen.
        """
        wanted: int | None = threshold
        blocked_step = threshold
        if threshold == ANY_CHANGE:
            wanted = None
            blocked_step = self.latest.step + 1
        waiter = self._new_waiter(wanted)
        if secs == 0:
            raise self._timeout_error(threshold, 0.0)
        self.waiters.park(threshold, waiter)
        self.tasks[waiter] = (asyncio.current_task(self._loop), blocked_step)
        if raise_on_reset:
            self._reset_waiters[waiter] = None
        # While it waits in a run of a session, the publisher of that run cannot advance.
        run = current_run()
        publishers = [] if run is None else self._park_publishers(waiter, blocked_step, run)
        timer = None
        try:
            self._update_threshold()
            if secs is not None:
                on_timeout = functools.partial(self._time_out, threshold, waiter, self._clock.now())
                timer = self._clock.call_later(secs, on_timeout)
            if publishers:
                self.check_reachable()
            session = None if run is None else run.session
            # A stop of the session ends the wait. The waiter is parked by now, so that no advance
            # is missed.
            result = await (waiter if session is None else session.until(waiter))
        finally:
            # Many waits may end at the same time, so each skips the cleanup that it does not need.
            del self.tasks[waiter]
            if timer is not None:
                timer.cancel()
            if publishers:
                self._unpark_publishers(publishers, waiter)
            if raise_on_reset:
                del self._reset_waiters[waiter]
            if self.waiters.discard(threshold, waiter):
                self._update_threshold()
        if isinstance(result, int):
            return result
        raise result  # an error is a result of a waiter, see `Waiter`

    def _new_waiter(self, wanted: int | None = None) -> Waiter:
        """Return a future for a wait, or raise why the wait cannot succeed."""
        if (reason := self.unreachable) is not None:
            raise _error_of_wait(reason, wanted)
        self._loop = asyncio.get_running_loop()
        return self._loop.create_future()

    @property
    def known_run(self) -> Snapshot:
        """The run as this process knows it."""
        return self.snapshot._replace(position=self.latest)

    @property
    def threshold(self) -> int | None:
        """The lowest threshold: 0 while any change is waited for, None without a waiter."""
        return self.waiters.lowest if self.waiters.count else None

    @property
    def waiting_secs(self) -> float | None:
        """For how long there has been a wait without a break; None if there is none."""
        if self.waiting_since is None:
            return None
        # In any thread, where no loop may be running.
        now = monotonic_now()
        return max(0.0, now() - self.waiting_since)

    # What happens: each of these wakes the waits that it concerns.

    def observe(self, position: Position) -> None:
        """Take note of a position, and wake its waiters.

        One that is older than the latest is dropped.
        """
        old = self.latest
        if position <= old:
            return
        self.latest = position
        if position.step >= self.waiters.lowest:
            self.wake()
        if position.epoch != old.epoch:
            message = f"{self.run} was reset from step {old.step} to step {position.step}"
            for waiter in self._reset_waiters:
                wake(waiter, StepResetError(message, old=old, new=position))

    def wake(self) -> None:
        """End the waits that the latest position answers.

        What else follows waits until their tasks have run: woken tasks often wait again
        immediately.
        """
        self.waiters.wake(self.latest.step)
        if not self.waiters.count:
            self.waiting_since = None
        if self._loop is not None and not self._update_scheduled:
            self._update_scheduled = True
            self._loop.call_soon(self._update_threshold)

    def observe_run(self, snapshot: Snapshot) -> None:
        """Take note of a snapshot, also of the chief that has initialised the run."""
        was_initialised = self.snapshot.is_initialised
        self.snapshot = snapshot
        if snapshot.is_initialised and not was_initialised:
            self.wake()  # those that wait for any change

    def leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        """Remove a publisher, and keep how it left."""
        del self.registered[publisher]
        self.has_left = True
        error = None if exc is None or is_clean_end(exc) else exc
        self.last_exit = PublisherExit(publisher.name, self.latest.step, error)
        self.check_reachable()

    def close(self) -> None:
        """End all waits for good."""
        self.closed = True
        self.fail_unreachable()

    # How waits fail.

    @property
    def unreachable(self) -> AiohooksError | None:
        """The error that a wait would raise that began now, as far as is known here.

        None if it would not fail.
        """
        if self.closed:
            return closed_error(self.run)
        left = self.last_exit
        if left is None or self.registration_open:  # a publisher may still register
            return None
        if not self._all_waiting():
            return None
        if left.error is None:
            return PublisherFinishedError(f"{left.name} finished at step {left.step}")
        reason = PublisherFailedError(f"{left.name} failed at step {left.step}")
        reason.__cause__ = left.error
        return reason

    def _all_waiting(self) -> bool:
        """Return whether no publisher can advance the run.

        That is so if each one waits itself, for a later step, or if there is none.

        Waits of this process end as soon as their step is reached, so their steps need no look.
        The publishers that have registered last are asked first: where many begin to wait in the
        order of their registration, each time only one is asked.
        """
        step = self.latest.step
        return all(publisher.waiting for publisher in reversed(self.registered)) and all(
            member.waits_for > step for member in self.others
        )

    def fail_unreachable(self) -> None:
        """End all waits, if none can succeed."""
        reason = self.unreachable
        if reason is not None:
            self.abort(reason)

    def abort(self, reason: AiohooksError) -> None:
        """End all waits; those for the lead ask the engine again, and get the error from it."""
        self.vacancies.wake()
        for threshold, parked in self.waiters.pop_all():
            wake(parked, _error_of_wait(reason, threshold or None))
        self._update_threshold()

    def _time_out(self, step: int, waiter: Waiter, since: float) -> None:
        wake(waiter, self._timeout_error(step, self._clock.now() - since))

    def _timeout_error(self, step: int, secs: float) -> StepTimeoutError:
        problem = f"step {step} of {self.run} was not reached"
        error = step_timeout_error(
            problem, wanted=step, seen=self.latest.step, secs=secs, publishers=self.names
        )
        return self._with_why(error)

    def not_ready_error(self, secs: float | None) -> SessionNotReadyError:
        summary = publisher_summary(self.names)
        message = f"the chief of {self.run} has not initialised it within {secs:g} s, {summary}"
        return self._with_why(SessionNotReadyError(message))

    def _with_why(self, error: E) -> E:
        """Return `error`, with a note on what keeps publishers of this process from advancing."""
        # A publisher that waits for a step itself is held up by another one.
        busy = [publisher for publisher in self.registered if not publisher.waiting]
        if not busy:
            return error
        from aiohooks._why.builder import why  # seldom needed

        note = why(*(publisher.awaited() for publisher in busy))
        if note:
            add_note(error, note)
        return error

    def check_reachable(self) -> None:
        """Report waits that cannot succeed any more.

        Called after a publisher has left or begun to wait.
        """
        if self.waiters.count and self.unreachable is not None:
            self._on_unreachable()

    # The next threshold.

    def _update_threshold(self) -> None:
        """After waiters have come or left."""
        self._update_scheduled = False
        if self.waiters.lowest != self._subscribed:
            self._subscribed = self.waiters.lowest
            self._subscribe(self.threshold)
        if not self.waiters.count:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = self._clock.now()

    # Publishers.

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those in this process, in order of registration, then of those in others."""
        here = [publisher.name for publisher in self.registered]
        return tuple(here + [member.name for member in self.others])

    def _park_publishers(
        self, wait: asyncio.Future[Any], step: int, innermost: RunScope
    ) -> list[Publisher]:
        """Add the wait to each registered publisher that it blocks; return those publishers."""
        parked: list[Publisher] = []
        for publisher, run in publishers_held_up(innermost).items():
            if publisher in self.registered:
                publisher.parked[wait] = step, run
                parked.append(publisher)
                self._on_publisher_changed(publisher)
        return parked

    def _unpark_publishers(self, parked: list[Publisher], wait: asyncio.Future[Any]) -> None:
        for publisher in parked:
            del publisher.parked[wait]  # also of a publisher that has left meanwhile
            self._on_publisher_changed(publisher)


def _error_of_wait(reason: AiohooksError, wanted: int | None = None) -> AiohooksError:
    """Return a copy of `reason`, why no wait can succeed, for one wait."""
    return copy_error(reason, None if wanted is None else f"{reason}, wanted {wanted}")


def step_timeout_error(
    problem: str, *, wanted: int, seen: int, secs: float, publishers: tuple[str, ...]
) -> StepTimeoutError:
    """Return the error of a wait that took too long."""
    message = (
        f"{problem} in {round(secs, 3):g} s: seen step {seen}, {publisher_summary(publishers)}"
    )
    return StepTimeoutError(message, wanted=wanted, seen=seen, waited_secs=secs)


class StepStore(abc.ABC):
    """Keeps the global step of a run, advances it, and lets tasks wait for it.

    A store belongs to the event loop in which it is first used. From another loop or thread every
    call raises `WrongLoopError` before it does anything; only `latest` and `statistics` may be used
    anywhere. Steps are whole numbers from 0 to 2**53 - 1.

    A wait (`wait_for`, or the next item of `changes`) raises when it cannot succeed. A store knows
    its publishers: those that registered with `publisher`. When one has left, and none remains or
    each remaining one is itself waiting, the step cannot advance any more and all waits end: with
    `PublisherFinishedError` if the last publisher to leave had finished, with
    `PublisherFailedError` if it had failed. Before the first publisher leaves, waits continue: a
    publisher may still register.

    For engines: report each position to `_observe`; `_subscribe` says which positions are needed.
    """

    inline: ClassVar[bool] = False
    """Whether `advance_nowait` is available, which advances without suspending."""

    def __init__(self, position: Position, *, run: str) -> None:
        """Start from `position`; `run` names what is counted."""
        self.run: str = _checked_name(run, "run=")
        """The name of the run whose step this is."""
        self._waits = WaitRegistry(
            self.run, position, self._subscribe, self._on_publisher_changed, self._on_unreachable
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        enter(self)

    # What an engine implements.

    @abc.abstractmethod
    async def value(self) -> Position:
        """Return the engine's current position; `latest` is the one this process knows."""

    @abc.abstractmethod
    async def advance(self, by: int = 1) -> int:
        """Add `by` (at least 1) to the step, exactly once.

        Returns:
            The step that this led to.
        """

    def advance_nowait(self, by: int = 1) -> int:
        """`advance` without suspending, in the store's event loop; only where `inline` is true."""
        raise TypeError(f"{self!r} cannot advance without waiting; await advance()")

    @abc.abstractmethod
    async def raise_to(self, step: int) -> int:
        """Raise the step to `step`; change nothing if it is there already, or further.

        Returns:
            The step afterwards.
        """

    @abc.abstractmethod
    async def reset(self, step: int) -> Position:
        """Begin a new epoch at `step`, which may be lower or higher than the current step.

        Waiters for a step above it keep waiting, or get `StepResetError` if they asked for that.
        """

    @abc.abstractmethod
    def lead(self) -> contextlib.AbstractAsyncContextManager[Term]:
        """Make this process the chief of the run during the block, in a new term.

        This waits while there is another chief.

        Writes of this process carry the term: after a newer term has begun, because this process
        was taken for dead, they are refused with `StaleTermError`.
        """

    @abc.abstractmethod
    async def mark_initialised(self) -> None:
        """Report that this process, the chief, has initialised what the workers need.

        Call it inside `lead` only.
        """

    def acknowledge_loss(self) -> StoreResetError | None:
        """Let writes be made again after the engine has lost the data of the run.

        Call it before you restore what belongs to the run, as a session does when it recovers.

        Returns:
            The error that writes have raised until now; None if there was no loss.
        """
        return None

    async def wait_initialised(self, timeout: float | None = None) -> None:
        """Wait until the chief of the current term has called `mark_initialised`.

        This waits for `timeout` seconds at most.

        Raises:
            SessionNotReadyError: the time is up.
            PublisherFinishedError: all publishers have finished.
            PublisherFailedError: no publisher is left, and the last one failed.
            StoreClosedError: the store was closed.
        """
        timeout = checked_timeout(timeout)
        now = current_clock().now
        began = now()
        while True:
            self._check_loop()
            if not self.inline:
                await self._before_wait(MAX_STEP)
            if self._waits.snapshot.is_initialised:
                return
            left = None if timeout is None else max(0.0, began + timeout - now())
            try:
                with active("wait", f"the chief of {self.run}", self._awaited_chief):
                    await wait_for_others(self._waits.wait(ANY_CHANGE, left))
            except StepTimeoutError:
                raise self._waits.not_ready_error(timeout) from None

    async def flush(self, timeout: float | None = None) -> None:  # noqa: B027 - see below
        """Wait until the other processes could know the publishers of this one.

        This waits for `timeout` seconds at most.

        If the engine is unavailable this returns after the first attempt, and they are announced
        later.
        """

    # Overridden by a store that several processes share: that of one has nothing to do here.

    async def _before_wait(self, step: int) -> None:  # noqa: B027
        """Called before a wait for `step`, unless the store is `inline`.

        Open the store, and read the run if the wait would fail by what this process knows.
        """

    def _subscribe(self, step: int | None) -> None:  # noqa: B027
        """Called with the next threshold whenever it has changed: the lowest step with a waiter.

        After a wake this comes in the next tick.

        It is 0 while any change is waited for, and None without a waiter.
        """

    def _on_publisher_changed(self, publisher: Publisher) -> None:  # noqa: B027
        """Called when a publisher has begun or ended a wait."""

    def _on_unreachable(self) -> None:
        """Called when there are waits and none can succeed, as far as is known here.

        When that is certain, fail them.
        """
        self._waits.fail_unreachable()

    # Waiting.

    @property
    def latest(self) -> Position:
        """The latest position that this process knows, without I/O; may be read in any thread."""
        return self._waits.latest

    async def wait_for(
        self,
        step: int,
        *,
        timeout: float | None = None,
        on_reset: Literal["keep", "raise"] = "keep",
    ) -> int:
        """Wait until the step is reached.

        A step that is reached already, or is not above 0, never suspends.

        Cancelling it leaves nothing behind. No wake-up can be lost: a waiter compares numbers, it
        does not catch a signal.

        Args:
            step: the step to wait for.
            timeout: how many seconds at most; None for no limit.
            on_reset: when a reset puts the step below `step` again: "keep" waiting, or "raise"
                `StepResetError`.

        Returns:
            The step seen when it was woken: `step` or more.

        Raises:
            StepTimeoutError: the time is up.
            PublisherFinishedError: no publisher is left that could reach it; the last one finished.
                A clean end of a session.
            PublisherFailedError: no publisher is left, and the last one failed.
                Caused by that error.
            StepResetError: the step was reset, and `on_reset="raise"`.
            StoreClosedError: the store was closed.
            StopRequestedError: in a run of a session, to which a stop was requested.
        """
        if type(step) is not int or step > MAX_STEP:
            step = checked_step(step, "wait for step", least=None)
        secs = None if timeout is None else checked_timeout(timeout)
        if on_reset not in _ON_RESET:
            raise InvalidArgumentError(f'on_reset={on_reset!r}: give "keep" or "raise"')
        self._check_loop()
        if not self.inline:
            await self._before_wait(step)
        seen = self._waits.latest.step
        if seen >= step:
            return seen
        return await self._waits.wait(step, secs, raise_on_reset=on_reset == "raise")

    def changes(self) -> Changes:
        """Return an iterator over the positions: the current one, then always the newest.

        Positions in between are skipped.
        """
        return Changes(self._next_position)

    async def _next_position(self, seen: Position | None) -> Position:
        self._check_loop()
        if not self.inline:
            await self._before_wait(self.latest.step + (seen == self.latest))
        while self.latest == seen:  # a wait for the chief ends with all waits for a change
            await self._waits.wait(ANY_CHANGE)
        return self.latest

    # Publishing.

    def publisher(self, name: str) -> Publisher:
        """Register a publisher, which may advance the store until it is closed.

        It counts from now on.
        """
        name = _checked_name(name, "publisher ")
        self._check_loop()
        publisher = Publisher(name, self._leave)
        self._waits.registered[publisher] = None
        return publisher

    def _leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        if not self._waits.closed:
            self._check_loop()
        self._waits.leave(publisher, exc)

    # Lifetime.

    async def aclose(self) -> None:
        """Close the store: waits end with `StoreClosedError`, and so do later calls.

        Harmless when called twice.
        """
        if not self._waits.closed:
            self._check_loop()
            self._loop = None
            self._waits.close()

    async def forget(self) -> None:
        """Delete the run, with its step, wherever it is kept, and close the store.

        Call it when no other store uses the run.
        """
        await self.aclose()

    async def __aenter__(self) -> Self:
        self._check_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def statistics(self) -> StoreStatistics:
        """Return the current state of the store."""
        waits = self._waits
        waiting = waits.waiters.count_above(ANY_CHANGE)
        return StoreStatistics(
            latest=waits.latest,
            term=waits.snapshot.term,
            waiting=waiting,
            wanted=waits.waiters.lowest_above(ANY_CHANGE),
            watching=waits.waiters.count - waiting,
            publishers=waits.names,
            waiting_secs=waits.waiting_secs,
        )

    def parked(self) -> list[Parked]:
        """Return an entry for each task that waits, for reports."""
        return [
            Parked(task, functools.partial(self.awaited_step, step))
            for task, step in list(self._waits.tasks.values())
        ]

    def _awaited_chief(self) -> Awaited:
        return self.awaited_step(0)._replace(name=f"the chief of {self.run}", key=None)

    def awaited_step(self, step: int) -> Awaited:
        """Describe a step as something that is waited for, in reports such as `why`.

        It is reached by any of the publishers that do not wait for a step themselves. If all of
        them wait, they are in a deadlock, and the report shows them all.
        """
        seen = self.latest.step
        waits = self._waits
        here = [publisher for publisher in waits.registered if not publisher.waiting]
        others = [member for member in waits.others if member.waits_for <= seen]
        if not here and not others:
            here = list(waits.registered)
            others = list(waits.others)

        def publishers() -> list[Awaited]:
            awaited = [publisher.awaited() for publisher in here]
            return awaited + [awaited_member(member) for member in others]

        return Awaited(
            "step",
            f"step {step} of {self.run}",
            f"seen {seen}" if here or others else f"seen {seen}, no publisher",
            publishers,
            key=f"{self._identity}: step {step} of {self.run}",
            secs=self._waits.waiting_secs,
            needs="any",
        )

    @property
    def _identity(self) -> str:
        """What the run of this store is known by in the wait-for graph."""
        return str(id(self))

    def __repr__(self) -> str:
        waits = self._waits
        latest = waits.latest
        state = ", closed" if waits.closed else ""
        place = f"at step {latest.step} of epoch {latest.epoch}{state}"
        return f"<{type(self).__name__} {self.run!r} {place}, {publisher_summary(waits.names)}>"

    def _observe(self, position: Position) -> None:
        """Take note of a position that the engine has reported; an older one is dropped."""
        self._waits.observe(position)

    def _check_loop(self) -> None:
        """Check that the store's own loop is running here.

        The first call decides which one that is.
        """
        if self._waits.forked:
            raise WrongLoopError(
                f"{self!r} came here by a fork and does not work here: {OPEN_BY_URL}"
            )
        try:
            loop = get_running_loop()
        except RuntimeError:
            raise WrongLoopError(
                f"{self!r} is used where no event loop is running{_THREADS}"
            ) from None
        if loop is not self._loop:
            if self._waits.closed:
                raise StoreClosedError(f"{self!r} is closed: make a new one")
            if self._loop is not None:
                raise WrongLoopError(
                    f"{self!r} is used in another event loop than its own{_THREADS}"
                )
            self._loop = loop

    def _not_leading_error(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self!r}: only the chief can have initialised it; call this inside `async with"
            " lead()`"
        )


def awaited_member(member: Member) -> Awaited:
    """Return a member of another process as what is waited for, for reports."""
    host, _, pid = member.process.rpartition(":")[0].rpartition(":")
    state = None
    if host == socket.gethostname() and pid.isdecimal():
        state = process_state(int(pid))
    return Awaited(
        "process",
        f"{member.name}, process {pid} on {host}",
        state or "",
        key=f"publisher {member.id}",
    )


def publishers_of(store: StepStore) -> WaitRegistry:
    """Return the waits and the publishers of a store, as far as they are known here.

    This is for the other parts of the library.
    """
    return store._waits  # pyright: ignore[reportPrivateUsage]


def _checked_name(name: str, what: str) -> str:
    # It is shown in messages and logs, one line each.
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 1_000:
        raise InvalidArgumentError(
            f"{what}{safe_repr(name)}: give a printable name of 1 to 1,000 characters"
        )
    return name
