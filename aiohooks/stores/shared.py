"""A step store whose state is outside this process: opening it, its publishers' leases, the chief's term, news."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import contextvars
import math
import os
import secrets
import socket
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

from aiohooks._aio.cancel import shielded, wait_done
from aiohooks._aio.clock import current_clock
from aiohooks._validate import check_secs
from aiohooks.errors import InvalidArgumentError, StaleTermError, StoreDamagedError, WrongLoopError
from aiohooks.stores._membership import Members, RunWatcher
from aiohooks.stores._protocol import MAX_STEP, Answer, Lead, Member, Position, Request, Snapshot, Write, checked_step, logger
from aiohooks.stores._publishers import Publisher
from aiohooks.stores._waiting import ChangeWaiter
from aiohooks.stores.base import StepStore, Term

T = TypeVar("T")
Kind = Literal["advance", "raise", "reset"]


class Writes:
    """Numbers the writes of a process to a run."""

    __slots__ = ("_process", "_run", "_seq")

    def __init__(self, run: str, process: str) -> None:
        """Nothing was written yet."""
        self._run = run
        self._process = process
        self._seq = 0

    def next(self, kind: Kind, amount: int, floor: Position, term: int) -> Write:
        """A write that nobody has made before."""
        self._seq += 1
        return Write(kind, amount, floor, term, self._process, self._seq)

    def position_of(self, write: Write, answer: Answer) -> Position:
        """What a write has led to.

        Raises:
            StaleTermError: a younger term has begun.
            InvalidArgumentError: it would pass the highest step.
        """
        if answer.status == "stale":
            raise StaleTermError(
                f"the term {write.term} of this process over {self._run} has ended, {answer.term} has begun at step "
                f"{answer.position.step}: its lease had run out, and another chief took over; stop, or start again",
                term=write.term,
                newest=answer.term,
            )
        if answer.status == "full":
            checked_step(MAX_STEP + 1, f"{write.kind} by {write.amount} would lead to step")
        return answer.position


async def settle(answer: concurrent.futures.Future[T], work: Callable[[], Awaitable[T]]) -> None:
    """Hands what comes of `work` to another thread; where it is cancelled, also before it began, see `unsettled`."""
    try:
        result = await work()
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def unsettled(answer: concurrent.futures.Future[T], error: Exception) -> None:
    """Ends the other thread's wait, if `settle` was kept from it."""
    if not answer.done():
        answer.set_exception(error)


_HOW = "open one in the other process by its URL: open_step_store(url, run=...), or AIOHOOKS_STEP_STORE and AIOHOOKS_RUN"


class ProcessBound:
    """Knows whether it came into this process by a fork, and refuses to be pickled."""

    _forked = False

    def __init__(self) -> None:
        """Belongs to this process from now on."""
        _all.add(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} cannot be pickled: {_HOW}")

    def _check_process(self) -> None:
        if self._forked:
            raise WrongLoopError(f"{self!r} came here by a fork and does not work here: {_HOW}")


_all: weakref.WeakSet[ProcessBound] = weakref.WeakSet()


def _after_fork() -> None:
    for one in _all:
        one._forked = True  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_CLOSE_SECS = 5.0
"""How long closing waits for the engine: what it could not be told then, its leases tell."""

OnLost = Literal["raise", "keep"]


class SharedStepStore(ProcessBound, StepStore):
    """What all stores over processes have in common. Each process opens its own, by the same address and run.

    It is opened by the first call that needs it, or by `async with`; closing tells the others that its publishers have left.
    Publishers and the chief hold leases: when their process dies, the waiters of all processes are told.

    For engines: `_open` begins to report, with `_observe_snapshot`; `_request` asks the engine for one thing, exactly once.
    """

    _leased: ClassVar[bool] = True
    """Whether members are known to be alive by renewing their leases; otherwise the engine finds the dead by itself."""

    def __init__(self, *, run: str, on_lost: OnLost = "raise", lease_secs: float = 10.0, join_grace_secs: float = 30.0) -> None:
        """Does not connect yet.

        Args:
            run: the name of the run; stores of different runs never meet.
            on_lost: what waiters are told when a publisher was found dead and nobody is left who could reach their step:
                "raise" `PublisherFailedError`, or "keep" waiting for the one that is started in its place.
            lease_secs: how long a process that has stopped renewing its leases counts as alive.
            join_grace_secs: how long to wait for publishers where all had left before this store was opened.
        """
        StepStore.__init__(self, Position(1, 0), run=run)
        if on_lost not in ("raise", "keep"):
            raise InvalidArgumentError(f'on_lost={on_lost!r}: give "raise" or "keep"')
        check_secs(lease_secs, "lease_secs", positive=True)
        check_secs(join_grace_secs, "join_grace_secs")
        self._lease_secs = lease_secs if self._leased else math.inf
        self._clock = current_clock()
        self._process = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        # Not a bound method of the engine, which is not complete yet.
        self._members = Members(
            self.run, self._process, self._lease_secs, self._clock, lambda request: self._request(request), self._spawn
        )
        self._writes = Writes(self.run, self._process)
        self._term = 0
        self._leader: Member | None = None  # that leads here, or would
        self._watcher = RunWatcher(
            self.run,
            self._process,
            self._waits,
            self._clock,
            keep=on_lost == "keep",
            join_grace_secs=join_grace_secs,
            look=lambda: self._read_run(),
            take=lambda snapshot: self._observe_snapshot(snapshot),
            spawn=self._spawn,
        )
        self._opening: asyncio.Task[None] | None = None
        self._opened = self._closing = self._forgotten = False
        self._tasks: set[asyncio.Task[Any]] = set()
        ProcessBound.__init__(self)

    # What an engine does.

    @abc.abstractmethod
    async def _open(self) -> None:
        """Connect and report the run's snapshot (`_observe_snapshot`); make the run if it is not there. Report from then on.

        Raises:
            StoreUnavailableError: it is not there, or says no.
        """

    @abc.abstractmethod
    async def _request(self, request: Request) -> Answer:
        """Does it exactly once, however often it must be sent; waits while the engine is away.

        Raises:
            StoreUnavailableError: it gave up.
        """

    @abc.abstractmethod
    async def _read_run(self) -> Snapshot:
        """Reads the run, after finding out which leases have run out.

        Raises:
            StoreUnavailableError: it gave up.
        """

    @abc.abstractmethod
    async def _disconnect(self) -> None:
        """Gives back all that `_open` took, also after a failed one; bounded in time by its caller."""

    @abc.abstractmethod
    async def _delete_run(self) -> None:
        """Deletes the run from the engine, also one that is damaged; `_disconnect` follows, and must not bring it back."""

    # The contract.

    async def value(self) -> Position:
        """See `StepStore.value`."""
        await self._ensure_open()
        self._observe_snapshot(await self._read_run())
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; while the engine is away it waits."""
        by = checked_step(by, "advance by", least=1)
        await self._ensure_open()
        return (await self._write("advance", by)).step

    async def raise_to(self, step: int) -> int:
        """See `StepStore.raise_to`."""
        step = checked_step(step, "raise to step")
        await self._ensure_open()
        return (await self._write("raise", step)).step

    async def reset(self, step: int) -> Position:
        """See `StepStore.reset`."""
        step = checked_step(step, "reset to step")
        await self._ensure_open()
        return await self._write("reset", step)

    async def wait_for(self, step: int, *, timeout: float | None = None, on_reset: Literal["keep", "raise"] = "keep") -> int:
        """See `StepStore.wait_for`."""
        if not self._opened:
            await self._ensure_open()
        step = checked_step(step, "wait for step", least=None)
        if self._waits.unreachable and step > self._waits.latest.step:
            await self._refresh()
        return await super().wait_for(step, timeout=timeout, on_reset=on_reset)

    async def _next_position(self, seen: Position | None, own: dict[ChangeWaiter, None]) -> Position:
        if not self._opened:
            await self._ensure_open()
        if self._waits.unreachable and seen == self._waits.latest:
            await self._refresh()
        return await super()._next_position(seen, own)

    async def wait_initialised(self, timeout: float | None = None) -> None:
        """See `StepStore.wait_initialised`."""
        await self._ensure_open()
        if self._waits.unreachable:
            await self._refresh()
        await super().wait_initialised(timeout)

    async def mark_initialised(self) -> None:
        """See `StepStore.mark_initialised`."""
        await self._ensure_open()
        chief = self._members.chief
        if chief is None:
            raise InvalidArgumentError(f"{self!r}: only the chief can have initialised it; call this inside `async with lead()`")
        self._members.chief = chief._replace(ready=True)
        self._members.announce()
        await self.flush()

    def publisher(self, name: str) -> Publisher:
        """See `StepStore.publisher`; the other processes are told in the background, see `flush`."""
        self._check_not_closing()
        publisher = super().publisher(name)
        self._members.join(publisher)
        return publisher

    def fail(self, exc: BaseException) -> None:
        """See `StepStore.fail`; ends the waits of all processes."""
        super().fail(exc)
        self._members.fail(exc)

    @contextlib.asynccontextmanager
    async def lead(self, ttl: float | None = None) -> AsyncGenerator[Term]:
        """See `StepStore.lead`."""
        check_secs(ttl, "ttl", optional=True, positive=True)
        await self._ensure_open()
        if self._leader is not None:
            raise InvalidArgumentError(f"{self!r} leads already, or is about to: leave that block first")
        self._leader = member = self._members.new(f"chief {self._process}", ttl if self._leased else None)
        try:
            answer = await self._request(Lead(member))
            while answer.status != "ok":
                await self._watcher.vacancy()
                self._check_not_closing()
                answer = await self._request(Lead(member))
            self._check_not_closing()
            self._term = answer.term
            self._members.chief = member._replace(term=answer.term)
            self._members.announce()
            yield Term(answer.term)
        except BaseException as error:
            # Also where it was cancelled before: the lead may have been granted all the same.
            self._step_down(error)
            raise
        self._step_down(None)

    def _step_down(self, failure: BaseException | None) -> None:
        leader, self._leader = self._leader, None
        if leader is not None:
            led, self._term, self._members.chief = self._term, 0, None
            left = self._waits.publishers.last_exit
            told = not led or self._members.publish or (left is not None and not left.is_remote)
            # Its publishers say how it left, if it has any.
            self._members.take_leave(leader, "" if told else "chief", self._waits.latest.step, failure)

    async def flush(self, timeout: float | None = None) -> None:
        """See `StepStore.flush`."""
        await self._members.flush(timeout)

    async def forget(self) -> None:
        """Deletes the run, with its step, from the engine, also one that is damaged, and closes this store.

        Call it when all others have closed theirs: one that is still open would bring the run back.

        Raises:
            StoreUnavailableError: it could not be deleted.
        """
        try:
            await self._ensure_open()
        except StoreDamagedError as error:
            logger.info("run %s: deleting what cannot be read: %s", self.run, error)
        self._leave_all()
        await self._members.flush(_CLOSE_SECS)
        self._members.stop()
        self._forgotten = True
        try:
            await self._delete_run()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """See `StepStore.aclose`; tells the engine within 5 s that this process has left."""
        if self._waits.closed:
            return
        self._enter()
        self._leave_all()
        await shielded(self._shut_down(), grace_secs=_CLOSE_SECS, what=f"closing the step store {self.run}")

    def _leave_all(self) -> None:
        self._closing = True
        for publisher in self._waits.publishers.here:
            publisher.close()
        self._step_down(None)

    # Opening.

    async def __aenter__(self) -> Self:
        try:
            await self._ensure_open()
        except asyncio.CancelledError:
            await self.aclose()  # the opening would go on, and nobody comes to close it
            raise
        return self

    async def _ensure_open(self) -> None:
        self._enter()
        if not (self._opened or self._closing):
            if self._opening is None:
                self._opening = self._spawn(self._open_first(), "opening")
            opening = self._opening
            await wait_done([opening], None)
            if opening.cancelled():
                raise self._closed_error()
            if (error := opening.exception()) is not None:
                raise error
            self._enter()
        self._check_not_closing()

    def _check_not_closing(self) -> None:
        if self._closing:
            raise self._closed_error()

    async def _open_first(self) -> None:
        try:
            await self._open()
        except BaseException:
            await self._disconnect()
            raise
        self._opened = self._members.active = self._watcher.active = True
        self._members.announce()

    async def _shut_down(self) -> None:
        if self._opened:
            await self._members.flush(_CLOSE_SECS)
        self._members.stop()
        self._opened = False
        await super().aclose()
        self._watcher.stop()
        late = tuple(self._tasks)
        for task in late:
            task.cancel()
        await wait_done(late, _CLOSE_SECS)
        await self._disconnect()

    # Writing.

    def _next_write(self, kind: Kind, amount: int) -> Write:
        return self._writes.next(kind, amount, self._waits.latest, self._term)

    async def _write(self, kind: Kind, amount: int) -> Position:
        write = self._next_write(kind, amount)
        return self._written(write, await self._request(write))

    def _written(self, write: Write, answer: Answer) -> Position:
        position = self._writes.position_of(write, answer)
        self._observe(position)
        return position

    def _subscribe(self, step: int | None) -> None:
        self._watcher.watch_leases()  # only while somebody waits

    def _advance_into(self, by: int, answer: concurrent.futures.Future[int]) -> None:
        if not answer.set_running_or_notify_cancel():
            return

        try:
            self._enter()
        except Exception as error:
            answer.set_exception(error)
        else:
            task = self._spawn(settle(answer, lambda: self.advance(by)), "advance for a thread")
            task.add_done_callback(lambda _: unsettled(answer, self._closed_error()))

    # Members of this process.

    def _leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        super()._leave(publisher, exc)
        self._members.leave(publisher, self._waits.latest.step, exc)

    def _waits_changed(self, publisher: Publisher) -> None:
        self._members.waits_changed(publisher)

    # RunWatcher.

    def _observe_snapshot(self, snapshot: Snapshot) -> None:
        """Takes note of what the engine tells; called in the event loop, also with snapshots that are out of date."""
        self._observe(snapshot.position)
        self._watcher.take(snapshot)

    @property
    def _snapshot(self) -> Snapshot:
        """The latest one that was taken."""
        return self._watcher.snapshot

    async def _refresh(self) -> None:
        """Before a wait that would end badly at once: nobody here has waited for news. Those who come together ask once."""
        self._enter()
        if (looking := self._watcher.refresh()) is not None:
            await wait_done([looking], None)

    def _on_unreachable(self) -> None:
        # Others may have moved the step, or have come, and this process has not heard of it yet.
        self._watcher.refresh()

    # Tasks, forks, copies.

    def _spawn(self, coro: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        """A task of the store's own: in no session's context, ended with the store."""
        task = asyncio.get_running_loop().create_task(coro, name=f"step store {self.run}: {what}", context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if task is self._opening:
            self._opening = None  # the next call tries again, also if nobody has waited for this one
        else:
            logger.error("%s failed", task.get_name(), exc_info=error)

    def _enter(self) -> None:
        self._check_process()
        super()._enter()
