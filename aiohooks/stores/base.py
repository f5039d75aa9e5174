"""StepStore, the contract of all step stores, and WaitRegistry, the waits of a store.

MemoryStepStore is the store of one process: in the memory of its event loop.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import socket
from asyncio import get_running_loop
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, ClassVar, Literal, Self

from aiohooks._core.activity import Awaited, Parked, RunScope, active, current_run, enter
from aiohooks._core.clock import current_clock, monotonic_now, wake
from aiohooks._core.validate import InitRequired, check_secs
from aiohooks._core.waits import (
    ANY_CHANGE,
    ThresholdWaiters,
    Waiters,
    current_task,
    until_stop,
    wait_for_others,
)
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
    closed_error,
    logger,
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


# The future of a wait. Its result is the step seen when it was woken, or the error that ends the
# wait. The error is not set as the future's exception: a task that was cancelled in the same tick
# would never fetch the exception, and asyncio would report that.
Waiter = asyncio.Future[int | AiohooksError]


class Changes:
    """An iterator over a store's positions, from the current one to the newest.

    Positions between two steps of the iteration are skipped, so there is never a backlog. The
    iteration ends when the publishers have finished and no change can follow. If they failed, or
    the store was closed, it raises the error that `wait_for` would raise. You may drop it at any
    time: it holds nothing while no task waits for it.

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
    """The latest position, the waits and the publishers of a store. Ends each wait once.

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
        """Start with no waits.

        Args:
            run: the name of the run, for messages.
            position: the position to start from.
            subscribe: notifies the engine of the lowest step with a waiter. The step is 0 while a
                wait is for any change, and None without a waiter.
            on_publisher_changed: called when a publisher has begun or ended a wait.
            on_unreachable: called when there are waits and, as far as this process knows, none can
                succeed.
        """
        # The run.
        self.run = run
        self.latest: Position = position
        self.snapshot: Snapshot = Snapshot(position, revision=-1)
        """The latest snapshot of the run. Its position may be older than `latest`. The revision is
        -1 until the first snapshot of an engine.
        """
        self.closed: bool = False
        self.forked: bool = False
        """Whether the store came into this process by a fork."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock = current_clock()
        # Waits.
        self.waiters: ThresholdWaiters[AiohooksError] = ThresholdWaiters(none=MAX_STEP + 1)
        """The waits for a step, by the step, and the waits for any change, at `ANY_CHANGE` (0).

        Without a waiter, `lowest` is above all steps.
        """
        self.waiting_tasks: dict[Waiter, tuple[asyncio.Task[Any] | None, int]] = {}
        """The task and the step of each waiter, for reports."""
        self.waiting_since: float | None = None
        """The time since which there has always been a waiter, or None without a waiter."""
        self._reset_waiters: dict[Waiter, None] = {}  # the waits with `on_reset="raise"`
        self.vacancies: Waiters = Waiters()
        """The waits for the lead."""
        self._subscribe = subscribe
        # The threshold that the engine got last.
        self._subscribed_threshold = self.waiters.lowest
        # Whether the engine will get the threshold in the next turn of the loop. With an update for
        # each woken waiter instead, advances would cost 1.8 times as much.
        self._update_scheduled = False
        # Publishers.
        self.registered: dict[Publisher, None] = {}
        """The publishers of this process, in order of registration."""
        self.other_publishers: tuple[Member, ...] = ()
        """The publishers of other processes."""
        self.last_exit: PublisherExit | None = None
        """The exit of the publisher that left last, in any process."""
        self.has_left: bool = False
        """Whether a publisher of this process has left."""
        self.registration_open: bool = False
        """Whether further publishers will register soon: until then, no wait ends because there is
        no publisher.
        """
        self._on_publisher_changed = on_publisher_changed
        self._on_unreachable = on_unreachable

    def after_fork(self) -> None:
        """Note that the store is in a forked child. See `call_after_fork`."""
        self.forked = True

    # Waiting.

    async def wait(
        self, threshold: int, secs: float | None = None, *, raise_on_reset: bool = False
    ) -> int:
        """Park the current task until the step reaches `threshold`, which it has not reached yet.

        Args:
            threshold: the step, or `ANY_CHANGE` for the next change of the run.
            secs: the limit of the wait, or None for no limit.
            raise_on_reset: whether a reset ends the wait with `StepResetError`.

        Returns:
            The step seen when the task was woken.
        """
        awaited_step = threshold
        if threshold == ANY_CHANGE:
            # Reports, and other processes, see this as a wait for the next step.
            awaited_step = self.latest.step + 1
        waiter = self._new_waiter(threshold)
        if secs == 0:
            raise self._timeout_error(threshold, 0.0)
        self.waiters.park(threshold, waiter)
        self.waiting_tasks[waiter] = (asyncio.current_task(self._loop), awaited_step)
        if raise_on_reset:
            self._reset_waiters[waiter] = None
        blocked_publishers: list[Publisher] = []
        session_run = current_run()
        if session_run is not None:
            # The publisher of a session cannot advance while a run of the session waits here.
            blocked_publishers = self._park_publishers(waiter, awaited_step, session_run)
        timer = None
        try:
            self._update_threshold()
            if secs is not None:
                on_timeout = functools.partial(self._time_out, threshold, waiter, self._clock.now())
                timer = self._clock.call_later(secs, on_timeout)
            if blocked_publishers:
                # They may have been the last publishers that could advance.
                self.check_reachable()
            result = await until_stop(waiter, session_run)
        finally:
            # Hot path: many waits may end at the same time, so each skips the cleanup that it does
            # not need.
            del self.waiting_tasks[waiter]
            if timer is not None:
                timer.cancel()
            if blocked_publishers:
                self._unpark_publishers(blocked_publishers, waiter)
            if raise_on_reset:
                del self._reset_waiters[waiter]
            # Waking removes a waiter, so most waiters are no longer parked here. If the lowest
            # threshold is a later one, that is certain without the call of `discard`.
            if self.waiters.lowest <= threshold and self.waiters.discard(threshold, waiter):
                self._update_threshold()
        if isinstance(result, int):
            return result
        raise result  # an error is a result, too: see `Waiter`

    def _new_waiter(self, threshold: int) -> Waiter:
        """Return a future for a wait. Raise an error if the wait cannot succeed."""
        error = self.unreachable_error
        if error is not None:
            raise _error_of_wait(error, threshold)
        self._loop = asyncio.get_running_loop()  # kept for `wake`
        return self._loop.create_future()

    @property
    def known_run(self) -> Snapshot:
        """The latest snapshot of the run that this process knows, with the latest position."""
        return self.snapshot._replace(position=self.latest)

    @property
    def waiting_secs(self) -> float | None:
        """The seconds since `waiting_since`, or None without a wait."""
        if self.waiting_since is None:
            return None
        # Not the registry's clock: reports may come from a thread, where no loop is running.
        now = monotonic_now()
        return max(0.0, now() - self.waiting_since)

    # Events: each method wakes the waits that it concerns.

    def observe(self, position: Position) -> None:
        """Record a position and wake its waiters. Ignore a position that is not newer."""
        old = self.latest
        if position <= old:
            return
        self.latest = position
        if position.step >= self.waiters.lowest:
            self.wake()
        if position.epoch != old.epoch:  # a reset begins a new epoch
            message = f"{self.run} was reset from step {old.step} to step {position.step}"
            # This affects only waiters that are still pending: the new step may have woken some.
            for waiter in self._reset_waiters:
                wake(waiter, StepResetError(message, old=old, new=position))

    def wake(self) -> None:
        """End the waits for the latest step and below, and the waits for any change.

        The engine gets the new threshold one turn of the loop later. Woken tasks often wait for the
        next step immediately, so that one update is enough for the end of a wait and for the next
        wait.
        """
        self.waiters.wake(self.latest.step)  # includes `ANY_CHANGE`, which is below all steps
        if not self.waiters.count:
            self.waiting_since = None
        if self._loop is not None and not self._update_scheduled:
            self._update_scheduled = True
            self._loop.call_soon(self._update_threshold)

    def observe_run(self, snapshot: Snapshot) -> None:
        """Record a snapshot. If the run has just been initialized, wake `wait_initialised`."""
        was_initialised = self.snapshot.is_initialised
        self.snapshot = snapshot
        if snapshot.is_initialised and not was_initialised:
            self.wake()  # `wait_initialised` waits for any change

    def leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        """Remove a publisher and record its exit, with the error that it failed with, if any."""
        del self.registered[publisher]
        self.has_left = True
        error = None if exc is None or is_clean_end(exc) else exc
        self.last_exit = PublisherExit(publisher.name, self.latest.step, error)
        self.check_reachable()

    def close(self) -> None:
        """End all waits with `StoreClosedError`, and fail later ones."""
        self.closed = True
        self.fail_unreachable()

    # Waits that cannot succeed.

    @property
    def unreachable_error(self) -> AiohooksError | None:
        """The error of a wait that begins now, or None if the wait may succeed.

        It depends on what this process knows: another process may have changed the run since.
        """
        if self.closed:
            return closed_error(self.run)
        last_exit = self.last_exit
        # Before the first publisher leaves, or while registration is open, another may register.
        if last_exit is None or self.registration_open:
            return None
        if not self._all_publishers_waiting():
            return None
        if last_exit.error is None:
            return PublisherFinishedError(f"{last_exit.name} finished at step {last_exit.step}")
        error = PublisherFailedError(f"{last_exit.name} failed at step {last_exit.step}")
        error.__cause__ = last_exit.error
        return error

    def _all_publishers_waiting(self) -> bool:
        """Return whether each publisher, if there is any, itself waits for a later step.

        No publisher can advance the run then.
        """
        # Publishers often begin to wait in the order of their registration. So begin with the last
        # publisher: it is the likeliest not to wait yet, which ends the loop.
        for publisher in reversed(self.registered):
            if not publisher.waiting:
                return False
        # A report about another process may be old: if the step that a member waits for is reached
        # by now, the member will continue, and does not count as waiting. The `waits_for` of a
        # member without a wait is 0, a step that is always reached.
        step = self.latest.step
        return all(member.waits_for > step for member in self.other_publishers)

    def fail_unreachable(self) -> None:
        """End all waits with `unreachable_error`, if there is one."""
        error = self.unreachable_error
        if error is not None:
            self.abort(error)

    def abort(self, error: AiohooksError) -> None:
        """End all waits for a step or a change with an error.

        Also wake the tasks that wait for the lead: they request it again, and get the error from
        the engine.
        """
        self.vacancies.wake()
        for threshold, waiter in self.waiters.pop_all():
            wake(waiter, _error_of_wait(error, threshold))
        self._update_threshold()

    def _time_out(self, step: int, waiter: Waiter, began: float) -> None:
        """End a wait for `step` that has reached its limit."""
        wake(waiter, self._timeout_error(step, self._clock.now() - began))

    def _timeout_error(self, step: int, secs: float) -> StepTimeoutError:
        """Return the error of a wait for `step` that has lasted for `secs`."""
        problem = f"step {step} of {self.run} was not reached"
        return step_timeout_error(
            problem, wanted=step, seen=self.latest.step, secs=secs, publishers=self.publisher_names
        )

    def not_ready_error(self, secs: float | None) -> SessionNotReadyError:
        """Return the error of a wait of `secs` for a chief that initializes the run."""
        summary = publisher_summary(self.publisher_names)
        message = f"the chief of {self.run} has not initialised it within {secs:g} s, {summary}"
        return SessionNotReadyError(message)

    def check_reachable(self) -> None:
        """Call `on_unreachable` if there are waits and, as far as is known, none can succeed.

        Called after a publisher has left or begun to wait.
        """
        if self.waiters.count and self.unreachable_error is not None:
            self._on_unreachable()

    # The lowest threshold.

    def _update_threshold(self) -> None:
        """Give the engine the lowest threshold, if it has changed, and update `waiting_since`.

        Called after waiters have been added or removed.
        """
        self._update_scheduled = False
        lowest = self.waiters.lowest
        if lowest != self._subscribed_threshold:
            self._subscribed_threshold = lowest
            self._subscribe(lowest if self.waiters.count else None)
        if not self.waiters.count:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = self._clock.now()

    # Publishers.

    @property
    def publisher_names(self) -> tuple[str, ...]:
        """The names of the publishers: of this process, as registered, then of the others."""
        local_names = [publisher.name for publisher in self.registered]
        return tuple(local_names + [member.name for member in self.other_publishers])

    def _park_publishers(self, waiter: Waiter, step: int, innermost: RunScope) -> list[Publisher]:
        """Record a wait for `step` in the registered publishers that it blocks. Return these.

        A wait in the run `innermost` blocks the publishers of this run and of the runs that enclose
        it.
        """
        blocked: list[Publisher] = []
        for publisher, scope in publishers_held_up(innermost).items():
            # A run may have a publisher of another store.
            if publisher in self.registered:
                publisher.parked[waiter] = step, scope
                blocked.append(publisher)
                self._on_publisher_changed(publisher)
        return blocked

    def _unpark_publishers(self, blocked: list[Publisher], waiter: Waiter) -> None:
        """Remove an ended wait from the publishers that it has blocked."""
        for publisher in blocked:
            del publisher.parked[waiter]  # even if the publisher has left meanwhile
            self._on_publisher_changed(publisher)


def _error_of_wait(error: AiohooksError, threshold: int) -> AiohooksError:
    """Return a copy of an error that ends all waits. A wait for a step adds the step to it."""
    if threshold == ANY_CHANGE:
        return copy_error(error)
    return copy_error(error, f"{error}, wanted {threshold}")


def step_timeout_error(
    problem: str, *, wanted: int, seen: int, secs: float, publishers: tuple[str, ...]
) -> StepTimeoutError:
    """Return the error of a wait for `wanted` that timed out after `secs` seconds."""
    message = (
        f"{problem} in {round(secs, 3):g} s: seen step {seen}, {publisher_summary(publishers)}"
    )
    return StepTimeoutError(message, wanted=wanted, seen=seen, waited_secs=secs)


class StepStore(InitRequired, abc.ABC):
    """Keeps the global step of a run, advances it, and lets tasks wait for it.

    A store belongs to the event loop in which it is first used. From another loop or thread every
    call raises `WrongLoopError` before it does anything. Only `latest` and `statistics` may be used
    anywhere. Steps are whole numbers from 0 to 2**53 - 1.

    A wait (`wait_for`, or the next item of `changes`) raises when it cannot succeed. A store knows
    its publishers, which are registered with `publisher`. When a publisher has left, and none
    remains or each remaining one is itself waiting, the step cannot advance any more and all waits
    end: with `PublisherFinishedError` if the last publisher to leave had finished, with
    `PublisherFailedError` if it had failed. Before the first publisher leaves, waits continue: a
    publisher may still register.

    A subclass reports positions to `_waits`, from the step on that the store subscribes to.
    """

    inline: ClassVar[bool] = False
    """Whether the step is in the memory of this process.

    Then only waits suspend, and `advance_nowait` is available.
    """

    def __init__(
        self,
        position: Position,
        *,
        run: str,
        subscribe: Callable[[int | None], None] = lambda step: None,
    ) -> None:
        """Start from `position`.

        Args:
            position: the position of the run, as far as it is known.
            run: the name of the run whose step this is.
            subscribe: called when the lowest step with a waiter has changed: 0 while a wait is for
                any change, and None without a waiter. After a wake, the call comes one turn of the
                loop later.
        """
        self.run: str = _checked_name(run, "run=")
        """The name of the run."""
        self._waits = WaitRegistry(
            self.run, position, subscribe, self._on_publisher_changed, self._on_unreachable
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        enter(self)

    # The contract, which `MemoryStepStore` and `SharedStepStore` implement.

    @abc.abstractmethod
    async def value(self) -> Position:
        """Read the current position of the run.

        `latest`, in contrast, is the latest position that was read or reported.
        """

    @abc.abstractmethod
    async def advance(self, by: int = 1) -> int:
        """Add `by` (at least 1) to the step, exactly once.

        Returns:
            The step that this led to.
        """

    def advance_nowait(self, by: int = 1) -> int:
        """Advance like `advance`, but without suspending. Only a store that is `inline` can do so.

        Call this in the store's event loop.
        """
        raise TypeError(f"{self!r} cannot advance without waiting; await advance()")

    @abc.abstractmethod
    async def raise_to(self, step: int) -> int:
        """Raise the step to `step`. Change nothing if it is already as high.

        Returns:
            The step afterwards.
        """

    @abc.abstractmethod
    async def reset(self, step: int) -> Position:
        """Begin a new epoch at `step`, which may be lower or higher than the current step.

        Waits for a step above it continue, or raise `StepResetError` with `on_reset="raise"`.
        """

    @abc.abstractmethod
    def lead(self) -> contextlib.AbstractAsyncContextManager[Term]:
        """Make this process the chief of the run during the block, in a new term.

        This waits while there is another chief.

        Writes of this process carry the term. They raise `StaleTermError` after a newer term has
        begun, because this process was taken for dead.
        """

    @abc.abstractmethod
    async def mark_initialised(self) -> None:
        """Report that this process, the chief, has initialized the run for its workers.

        Call it inside `lead` only.
        """

    def acknowledge_loss(self) -> StoreResetError | None:
        """Allow writes again after the engine has lost the data of the run.

        Call it before you restore the data that belongs to the run, as a session does when it
        recovers.

        Returns:
            The error that writes have raised since the loss, or None if there was no loss.
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
        check_secs(timeout, "timeout", optional=True)
        now = current_clock().now
        began = now()
        is_logged = False
        while True:
            self._check_loop()
            if not self.inline:
                # `_prepare_wait` also reads the run if no known publisher can reach the given step.
                # This wait is for no step, so give the highest.
                await self._prepare_wait(MAX_STEP)
            if self._waits.snapshot.is_initialised:
                return
            if not is_logged:
                is_logged = True
                logger.info("run %s: waiting until its chief has initialized it", self.run)
            remaining_secs = None
            if timeout is not None:
                remaining_secs = max(0.0, began + timeout - now())
            try:
                with active("wait", f"the chief of {self.run}", self._awaited_chief):
                    await wait_for_others(self._waits.wait(ANY_CHANGE, remaining_secs))
            except StepTimeoutError:
                raise self._waits.not_ready_error(timeout) from None

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until the publishers of this process are announced to the other processes.

        This waits for `timeout` seconds at most. If the engine is unavailable, it returns after the
        first attempt, and the store announces the publishers later.
        """

    # Overridden by `SharedStepStore`. A store for one process needs no more than this.

    async def _prepare_wait(self, step: int) -> None:
        """Called before a wait for `step`, unless the store is `inline`: connect to the engine.

        If no publisher that this process knows can reach the step, also read the run from the
        engine, because another process may have registered one since.
        """

    def _on_publisher_changed(self, publisher: Publisher) -> None:
        """Called when a publisher has begun or ended a wait."""

    def _on_unreachable(self) -> None:
        """Called when there are waits and, as far as this process knows, none can succeed.

        End the waits as soon as this is certain. For a store of one process it is certain now.
        """
        self._waits.fail_unreachable()

    # Waiting.

    @property
    def latest(self) -> Position:
        """The latest position that this process knows. You may read it in any thread."""
        return self._waits.latest

    async def wait_for(
        self,
        step: int,
        *,
        timeout: float | None = None,
        on_reset: Literal["keep", "raise"] = "keep",
    ) -> int:
        """Wait until the step is reached, or return immediately if it is reached already.

        A store for several processes connects first, if it is not connected yet. Cancelling a wait
        leaves nothing behind.

        Args:
            step: the step to wait for.
            timeout: the limit in seconds, or None for no limit.
            on_reset: when a reset puts the step below `step` again: "keep" waiting, or "raise"
                `StepResetError`.

        Returns:
            The latest step when the wait ended: `step` or more.

        Raises:
            StepTimeoutError: the time is up.
            PublisherFinishedError: no publisher is left that could reach the step, and the last one
                finished. In a session this is a clean end.
            PublisherFailedError: no publisher is left that could reach the step, and the last one
                failed. Its exception is the `__cause__`.
            StepResetError: the step was reset, and `on_reset="raise"`.
            StoreClosedError: the store was closed.
            StopRequestedError: the wait is in a run of a session, and a stop was requested.
        """
        # Hot path: sessions wait in each step, with an int and without a timeout. These values skip
        # the calls of the checks.
        if type(step) is not int or step > MAX_STEP:
            step = checked_step(step, "wait for step", least=None)
        if timeout is not None:
            check_secs(timeout, "timeout", optional=True)
        if on_reset not in _ON_RESET:
            raise InvalidArgumentError(f'on_reset={on_reset!r}: give "keep" or "raise"')
        self._check_loop()
        # A store in the memory of this process (`inline`) is always connected and up to date.
        if not self.inline:
            await self._prepare_wait(step)
        latest_step = self._waits.latest.step
        if latest_step >= step:
            return latest_step
        return await self._waits.wait(step, timeout, raise_on_reset=on_reset == "raise")

    def changes(self) -> Changes:
        """Return an iterator over the positions: the current one, then always the newest.

        Positions in between are skipped.
        """
        return Changes(self._next_position)

    async def _next_position(self, seen: Position | None) -> Position:
        """Return the latest position. If it equals `seen`, wait for the next position.

        `seen` is the last position of the iteration, or None before the first.
        """
        self._check_loop()
        if not self.inline:
            # Connect, and if a wait would fail, read the run first. `_prepare_wait` decides this by
            # the awaited step. If the position has changed already, there will be no wait: give the
            # current step, which is reached.
            awaited_step = self.latest.step
            if self.latest == seen:
                awaited_step += 1
            await self._prepare_wait(awaited_step)
        # A wait for any change also ends when the run is initialized, which does not change the
        # position. So wait in a loop.
        while self.latest == seen:
            await self._waits.wait(ANY_CHANGE)
        return self.latest

    # Publishing.

    def publisher(self, name: str) -> Publisher:
        """Register a publisher, which may advance the store until you close it.

        From now on, waits take it into account.
        """
        name = _checked_name(name, "publisher ")
        self._check_loop()
        publisher = Publisher(name, self._leave)
        self._waits.registered[publisher] = None
        return publisher

    def _leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        """Called by a publisher that leaves, with the error that it failed with, if any."""
        if not self._waits.closed:  # a publisher may also leave a closed store
            self._check_loop()
        self._waits.leave(publisher, exc)

    # Lifetime.

    async def aclose(self) -> None:
        """Close the store: waits and later calls raise `StoreClosedError`.

        You may call this twice.
        """
        if not self._waits.closed:
            self._check_loop()
            self._loop = None  # makes the next `_check_loop` find that the store is closed
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
        """Return the latest position, the waits and the publishers, as this process knows them."""
        waits = self._waits
        waiters = waits.waiters
        # The waiters above the threshold ANY_CHANGE wait for a step. The others are iterations of
        # `changes`, or wait for the chief.
        waiting = waiters.count_above(ANY_CHANGE)
        return StoreStatistics(
            latest=waits.latest,
            term=waits.snapshot.term,
            waiting=waiting,
            wanted=waiters.lowest_above(ANY_CHANGE),
            watching=waiters.count - waiting,
            publishers=waits.publisher_names,
            waiting_secs=waits.waiting_secs,
        )

    def parked(self) -> list[Parked]:
        """Return an entry for each task that waits, for reports."""
        return [
            Parked(task, functools.partial(self.awaited_step, step))
            for task, step in list(self._waits.waiting_tasks.values())
        ]

    def _awaited_chief(self) -> Awaited:
        """Describe a wait until the chief has initialized the run, for reports such as `why`."""
        # It waits for the same publishers as a wait for a step, whose number does not matter.
        return self.awaited_step(0)._replace(name=f"the chief of {self.run}", key=None)

    def awaited_step(self, step: int) -> Awaited:
        """Describe a wait for a step, for reports such as `why`.

        The report shows the publishers that can reach the step: those that do not wait for a step
        themselves. If all publishers wait, they are in a deadlock, and the report shows all.
        """
        seen = self.latest.step
        waits = self._waits
        own_publishers = [publisher for publisher in waits.registered if not publisher.waiting]
        other_members = [member for member in waits.other_publishers if member.waits_for <= seen]
        if not own_publishers and not other_members:
            own_publishers = list(waits.registered)
            other_members = list(waits.other_publishers)

        def publishers() -> list[Awaited]:
            awaited = [publisher.awaited() for publisher in own_publishers]
            return awaited + [awaited_member(member) for member in other_members]

        return Awaited(
            "step",
            f"step {step} of {self.run}",
            f"seen {seen}" if own_publishers or other_members else f"seen {seen}, no publisher",
            publishers,
            key=f"{self._graph_key}: step {step} of {self.run}",
            secs=waits.waiting_secs,
            needs="any",
        )

    @property
    def _graph_key(self) -> str:
        """The key of the run in the wait-for graph of `why`, the same in all stores of the run."""
        return str(id(self))

    def __repr__(self) -> str:
        waits = self._waits
        latest = waits.latest
        state = ", closed" if waits.closed else ""
        place = f"at step {latest.step} of epoch {latest.epoch}{state}"
        publishers = publisher_summary(waits.publisher_names)
        return f"<{type(self).__name__} {self.run!r} {place}, {publishers}>"

    def _check_loop(self) -> None:
        """Raise an error unless the store is open and its event loop is running here.

        The first call makes the running loop the loop of the store.
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
        """Return the error of `mark_initialised` outside of `lead`."""
        return InvalidArgumentError(
            f"{self!r}: only the chief can have initialised it; call this inside `async with"
            " lead()`"
        )


def awaited_member(member: Member) -> Awaited:
    """Describe a member of another process, for reports such as `why`."""
    # The name of a process is `host:pid:word`, with a random word.
    host_and_pid = member.process.rpartition(":")[0]
    host, _, pid = host_and_pid.rpartition(":")
    detail = None
    if host == socket.gethostname() and pid.isdecimal():
        from aiohooks._why.sources import process_state  # only for reports, and slow to import

        detail = process_state(int(pid))  # None while the process can run
    return Awaited(
        "process",
        f"{member.name}, process {pid} on {host}",
        detail or "",
        key=f"publisher {member.id}",
    )


def _checked_name(name: str, subject: str) -> str:
    """Return the name of a run or a publisher, which messages and logs show in one line."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 1_000:
        raise InvalidArgumentError(
            f"{subject}{safe_repr(name)}: give a printable name of 1 to 1,000 characters"
        )
    return name


class MemoryStepStore(StepStore):
    """A step kept in memory, for the sessions and tasks of one event loop.

    Only waits suspend.
    """

    inline = True

    def __init__(self, step: int = 0, *, run: str = "default") -> None:
        """Start at `step`, in epoch 1. `run` is the name in messages."""
        super().__init__(Position(1, checked_step(step, "step")), run=run)
        self._lead_lock = asyncio.Lock()
        self._chief: asyncio.Task[Any] | None = None
        """The task that leads, or None."""

    async def value(self) -> Position:
        """See `StepStore.value`. It is the same as `latest`, and does not suspend."""
        self._check_loop()
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; does not suspend."""
        self._check_loop()
        return self.advance_nowait(by)

    async def raise_to(self, step: int) -> int:
        """See `StepStore.raise_to`; does not suspend."""
        step = checked_step(step, "raise to step")
        self._check_loop()
        self._waits.observe(Position(self._waits.latest.epoch, step))
        return self._waits.latest.step

    async def reset(self, step: int) -> Position:
        """See `StepStore.reset`; does not suspend."""
        step = checked_step(step, "reset to step")
        self._check_loop()
        position = Position(self._waits.latest.epoch + 1, step)
        self._waits.observe(position)
        return position

    @contextlib.asynccontextmanager
    async def lead(self) -> AsyncGenerator[Term]:
        self._check_loop()
        if self._chief is current_task():
            raise InvalidArgumentError(f"this task leads {self!r} already: leave that block first")
        async with self._lead_lock:
            self._chief = current_task()
            term = self._waits.snapshot.term + 1
            self._waits.observe_run(Snapshot(self.latest, term))
            try:
                yield Term(term)
            finally:
                self._chief = None

    async def mark_initialised(self) -> None:
        self._check_loop()
        if not self._lead_lock.locked():
            raise self._not_leading_error()
        self._waits.observe_run(self._waits.snapshot._replace(ready=True))

    def advance_nowait(self, by: int = 1) -> int:
        # Hot path, once per step of each session: it calls other functions only where needed.
        if type(by) is not int or by < 1:
            by = checked_step(by, "advance by", least=1)
        if self._loop is None:  # the store is not in use yet, or closed
            self._check_loop()
        waits = self._waits
        epoch, step = waits.latest
        step += by
        # Below the lowest threshold, the step wakes no waiter, and is no higher than MAX_STEP: the
        # lowest threshold is MAX_STEP + 1 at most.
        if step < waits.waiters.lowest:
            # This is the same as Position(epoch, step), and takes half the time.
            new = tuple.__new__(Position, (epoch, step))  # pyright: ignore[reportUnknownMemberType]
            waits.latest = new
        elif step > MAX_STEP:
            checked_step(step, f"advance by {by} would lead to step")  # raises the error
        else:
            waits.latest = Position(epoch, step)
            waits.wake()
        return step
