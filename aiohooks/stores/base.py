"""The contract of a step store, and what is the same on every engine."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import socket
from asyncio import get_running_loop
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from aiohooks._core.reports import Awaited, Waiting
from aiohooks._why.processes import process_state
from aiohooks.errors import (
    InvalidArgumentError,
    StoreClosedError,
    StoreResetError,
    WrongLoopError,
)
from aiohooks.stores._protocol import (
    MAX_STEP,
    Member,
    Position,
    StoreStatistics,
    Term,
    checked_step,
    checked_timeout,
)
from aiohooks.stores._waiting import Changes, WaitRegistry
from aiohooks.stores.publishers import Publisher, Publishers, publisher_summary

_ON_RESET = ("keep", "raise")
_THREADS = "; from a thread give the coroutine to asyncio.run_coroutine_threadsafe()"
OPEN_BY_URL = (
    "open one in the other process by its URL: open_step_store(url, run=...), or"
    " AIOHOOKS_STEP_STORE and AIOHOOKS_RUN"
)


class StepStore(Waiting):
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
        self._check_loop()
        if not self.inline:
            await self._before_wait(MAX_STEP)
        await self._waits.wait_initialised(timeout)

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until the other processes could know the publishers of this one.

        This waits for `timeout` seconds at most.

        If the engine is unavailable this returns after the first attempt, and they are announced
        later.
        """

    # Overridden by a store that several processes share.

    async def _before_wait(self, step: int) -> None:
        """Called before a wait for `step`, unless the store is `inline`.

        Open the store, and read the run if the wait would fail by what this process knows.
        """

    def _subscribe(self, step: int | None) -> None:
        """Called with the next threshold whenever it has changed: the lowest step with a waiter.

        After a wake this comes in the next tick.

        It is 0 while any change is waited for, and None without a waiter.
        """

    def _on_publisher_changed(self, publisher: Publisher) -> None:
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
            PublisherFailedError: no publisher is left, the last one failed; or `fail` was called.
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
        return Changes(self._next_position, self._waits.wake)

    async def _next_position(self, seen: Position | None) -> Position:
        self._check_loop()
        if not self.inline:
            await self._before_wait(self.latest.step + (seen == self.latest))
        return await self._waits.next_position(seen)

    # Publishing.

    def publisher(self, name: str) -> Publisher:
        """Register a publisher, which may advance the store until it is closed.

        It counts from now on.
        """
        name = _checked_name(name, "publisher ")
        self._check_loop()
        publisher = Publisher(name, self._leave, self._waits.publishers.on_held_up)
        self._waits.join(publisher)
        return publisher

    def _leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        if not self._waits.closed:
            self._check_loop()
        self._waits.leave(publisher, exc)

    def fail(self, exc: BaseException) -> None:
        """End all waits with `PublisherFailedError`, caused by `exc`.

        Also those that begin later, until a publisher registers or the step moves.
        """
        if not isinstance(exc, BaseException):
            raise InvalidArgumentError(
                f"fail({exc!r}): give the exception that the publisher failed with"
            )
        self._check_loop()
        self._waits.fail(exc)

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
        return StoreStatistics(
            latest=waits.latest,
            term=waits.term,
            waiting=waits.waiting_for_steps,
            wanted=waits.wanted,
            watching=waits.watching,
            publishers=waits.publishers.names,
            waits=waits.steps_waited,
            waiting_secs=waits.waiting_secs,
        )

    def awaited_by(self, method: str, arguments: Mapping[str, Any]) -> Awaited | None:
        """Return what a call waits for, for status and the notes of errors."""
        if method == "wait_for":
            return self.awaited_step(arguments["step"])
        if method == "_next_position":
            return self.awaited_step(self.latest.step + 1)._replace(name=f"a change of {self.run}")
        if method == "wait_initialised":
            return self.awaited_step(0)._replace(
                name=f"the chief of {self.run}, which initialises it", key=None
            )
        return None

    def awaited_step(self, step: int) -> Awaited:
        """Return a step for reports, with the publishers that could reach it."""
        seen = self.latest.step

        def publishers() -> list[Awaited]:
            registered = self._waits.publishers
            here = [publisher for publisher in registered.here if not publisher.waiting]
            others = [member for member in registered.others if member.waits_for <= seen]
            if not here and not others:  # all of them wait themselves
                here = list(registered.here)
                others = list(registered.others)
            awaited = [publisher.awaited() for publisher in here]
            return awaited + [awaited_member(member) for member in others]

        return Awaited(
            "step",
            f"step {step} of {self.run}",
            f"seen {seen}",
            publishers,
            key=f"{self._identity}: step {step} of {self.run}",
            secs=self._waits.waiting_secs,
            needs="any",
            not_found="no publisher",
        )

    @property
    def _identity(self) -> str:
        """What the run of this store is known by in the wait-for graph."""
        return str(id(self))

    @property
    def _label(self) -> str:
        """What kind of store this is, for reports."""
        return type(self).__name__

    def __repr__(self) -> str:
        waits = self._waits
        epoch, step = waits.latest
        summary = publisher_summary(waits.publishers.names)
        state = ", closed" if waits.closed else ""
        if waits.waiting_for_steps:
            state += f", {waits.waiting_for_steps} waiting for step {waits.wanted} or more"
        return f"<{self._label} {self.run!r} at step {step} of epoch {epoch}{state}, {summary}>"

    def _observe(self, position: Position) -> None:
        """Take note of a position that the engine has reported; an older one is dropped."""
        self._waits.observe(position)

    def _check_process(self) -> None:
        if self._waits.forked:
            raise WrongLoopError(
                f"{self!r} came here by a fork and does not work here: {OPEN_BY_URL}"
            )

    def _check_loop(self) -> None:
        """Check that the store's own loop is running here.

        The first call decides which one that is.
        """
        self._check_process()
        try:
            loop = get_running_loop()
        except RuntimeError:
            raise WrongLoopError(
                f"{self!r} is used where no event loop is running{_THREADS}"
            ) from None
        if loop is not self._loop:
            if self._waits.closed:
                raise self._closed_error()
            if self._loop is not None:
                raise WrongLoopError(
                    f"{self!r} is used in another event loop than its own{_THREADS}"
                )
            self._loop = loop

    def _closed_error(self) -> StoreClosedError:
        return StoreClosedError(f"{self!r} is closed: make a new one")

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


def publishers_of(store: StepStore) -> Publishers:
    """Return the publishers of a store, as far as they are known here.

    This is for the other parts of the library.
    """
    return store._waits.publishers  # pyright: ignore[reportPrivateUsage]


_MAX_NAME = 1_000


def _checked_name(name: str, what: str) -> str:
    # It is shown in messages and logs, one line each.
    if not isinstance(name, str) or not name or not name.isprintable():
        raise InvalidArgumentError(f"{what}{name!r}: give a printable name that is not empty")
    if len(name) > _MAX_NAME:
        raise InvalidArgumentError(
            f"{what}{name[:40]!r}... has {len(name):,} characters; give a name of {_MAX_NAME:,} at"
            " most"
        )
    return name
