"""A step store whose state is outside this process: opening it, its publishers' leases, the chief's reign, news."""

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
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, ClassVar, Literal, Self

from aiohooks._checks import check_secs
from aiohooks._clock import current_clock
from aiohooks._errors import (
    InvalidArgumentError,
    StaleReignError,
    StoreUnavailableError,
    WrongLoopError,
)
from aiohooks._shield import shielded, wait_done
from aiohooks.stores._changes import Watch
from aiohooks.stores._mark import MAX_STEP, Mark, checked_step
from aiohooks.stores._members import Members
from aiohooks.stores._news import News
from aiohooks.stores._process import ProcessBound
from aiohooks.stores._progress import logger
from aiohooks.stores._publishers import Publisher
from aiohooks.stores._store import Reign, StepStore
from aiohooks.stores._view import Answer, Fail, Lead, Member, Request, View, Write

_CLOSE_SECS = 5.0
"""How long closing waits for the engine: what it could not be told then, its leases tell."""

OnLost = Literal["raise", "keep"]


class SharedStepStore(ProcessBound, StepStore):
    """What all stores over processes have in common. Each process opens its own, by the same address and run.

    It is opened by the first call that needs it, or by `async with`; closing tells the others that its publishers have left.
    Publishers and the chief hold leases: when their process dies, the waiters of all processes are told.

    For engines: `_open` begins to report, with `_take`; `_request` asks the engine for one thing, exactly once.
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
        StepStore.__init__(self, Mark(1, 0), run=run)
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
        self._seq = 0
        self._reign = 0
        self._leads = False
        self._elsewhere = News(
            self.run,
            self._process,
            self._room,
            self._clock,
            keep=on_lost == "keep",
            join_grace_secs=join_grace_secs,
            look=lambda: self._spawn(self._look_again(), "looking after leases"),
        )
        self._opening: asyncio.Task[None] | None = None
        self._opened = False
        self._tasks: set[asyncio.Task[Any]] = set()
        ProcessBound.__init__(self)

    # What an engine does.

    @abc.abstractmethod
    async def _open(self) -> None:
        """Connects, and takes (`_take`) the view of the run, which it makes if it is not there; reports from then on.

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
    async def _look(self) -> View:
        """Reads the run, after finding out which leases have run out.

        Raises:
            StoreUnavailableError: it gave up.
        """

    @abc.abstractmethod
    async def _disconnect(self) -> None:
        """Gives back all that `_open` took, also after a failed one; bounded in time by its caller."""

    @abc.abstractmethod
    async def forget(self) -> None:
        """Deletes the run, with its step, from the engine. Nobody may use it then; close this store afterwards."""

    # The contract.

    async def value(self) -> Mark:
        """See `StepStore.value`."""
        await self._ensure_open()
        self._take(await self._look())
        return self._room.latest

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

    async def reset(self, step: int) -> Mark:
        """See `StepStore.reset`."""
        step = checked_step(step, "reset to step")
        await self._ensure_open()
        return await self._write("reset", step)

    async def wait_for(self, step: int, *, timeout: float | None = None, on_reset: Literal["keep", "raise"] = "keep") -> int:
        """See `StepStore.wait_for`."""
        if not self._opened:
            await self._ensure_open()
        if self._room.hopeless and not self._room.closed:
            self._take(await self._look())  # nobody here waited for news
        return await super().wait_for(step, timeout=timeout, on_reset=on_reset)

    async def _next_mark(self, seen: Mark | None, own: dict[Watch, None]) -> Mark:
        if not self._opened:
            await self._ensure_open()
        return await super()._next_mark(seen, own)

    async def wait_initialised(self, timeout: float | None = None) -> None:
        """See `StepStore.wait_initialised`."""
        await self._ensure_open()
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
        publisher = super().publisher(name)
        self._members.join(publisher)
        return publisher

    def fail(self, exc: BaseException) -> None:
        """See `StepStore.fail`; ends the waits of all processes."""
        super().fail(exc)
        self._spawn(self._request(Fail(f"{type(exc).__name__}: {exc}")), "telling of a failure")

    @contextlib.asynccontextmanager
    async def lead(self, ttl: float | None = None) -> AsyncGenerator[Reign]:
        """See `StepStore.lead`."""
        check_secs(ttl, "ttl", optional=True, positive=True)
        await self._ensure_open()
        members = self._members
        if self._leads:
            raise InvalidArgumentError(f"{self!r} leads already, or is about to: leave that block first")
        self._leads = True
        member = members.new(f"chief {self._process}", ttl if self._leased else None)
        failure: BaseException | None = None
        try:
            reign = await self._take_lead(member)
            self._reign = reign
            members.chief = member._replace(reign=reign)
            members.announce()
            yield Reign(reign)
        except BaseException as error:
            failure = error
            raise
        finally:
            # Also where it was cancelled: the lead may have been granted all the same.
            led, self._reign, members.chief, self._leads = self._reign, 0, None, False
            left = self._room.publishers.departure
            told = not led or members.publish or (left is not None and not left.elsewhere)
            # Its publishers say how it left, if it has any.
            members.take_leave(member, "" if told else "chief", self._room.latest.step, failure)

    async def flush(self, timeout: float | None = None) -> None:
        """See `StepStore.flush`."""
        await self._members.flush(timeout)

    async def aclose(self) -> None:
        """See `StepStore.aclose`; tells the engine within 5 s that this process has left."""
        if self._room.closed:
            return
        self._enter()
        for publisher in self._room.publishers.here:
            publisher.close()
        closing = self._shut_down()
        await shielded(closing, grace_secs=_CLOSE_SECS, what=f"closing the step store {self.run}")

    # Opening.

    async def __aenter__(self) -> Self:
        await self._ensure_open()
        return self

    async def _ensure_open(self) -> None:
        self._enter()
        if self._opened:
            return
        if self._room.closed:
            raise self._closed_error()
        if self._opening is None:
            self._opening = self._spawn(self._open_first(), "opening")
        opening = self._opening
        await wait_done([opening], None)
        if opening.cancelled():
            raise self._closed_error()
        if (error := opening.exception()) is not None:
            if self._opening is opening:
                self._opening = None  # the next call tries again
            raise error
        self._enter()

    async def _open_first(self) -> None:
        try:
            await self._open()
        except BaseException:
            await self._disconnect()
            raise
        self._opened = self._members.going = self._elsewhere.going = True
        self._members.announce()

    async def _shut_down(self) -> None:
        if self._opened:
            await self._members.flush(_CLOSE_SECS)
        self._members.stop()
        self._opened = False
        await super().aclose()
        self._elsewhere.stop()
        late = tuple(self._tasks)
        for task in late:
            task.cancel()
        await wait_done(late, _CLOSE_SECS)
        await self._disconnect()

    # Writing.

    def _next_write(self, kind: Literal["advance", "raise", "reset"], amount: int) -> Write:
        """A write that nobody has made before."""
        self._seq += 1
        return Write(kind, amount, self._room.latest, self._reign, self._process, self._seq)

    async def _write(self, kind: Literal["advance", "raise", "reset"], amount: int) -> Mark:
        write = self._next_write(kind, amount)
        return self._written(write, await self._request(write))

    def _written(self, write: Write, answer: Answer) -> Mark:
        """Takes note of what a write led to."""
        if answer.verdict == "stale":
            raise StaleReignError(
                f"the reign {write.reign} of this process over {self.run} has ended, {answer.reign} has begun at step "
                f"{answer.mark.step}: its lease had run out, and another chief took over; stop, or start again",
                reign=write.reign,
                newest=answer.reign,
            )
        if answer.verdict == "full":
            checked_step(MAX_STEP + 1, f"{write.kind} by {write.amount} would lead to step")
        self._observe(answer.mark)
        return answer.mark

    def _arm(self, step: int | None) -> None:
        """Looks after leases only while somebody waits."""
        self._elsewhere.watch_leases()

    def _advance_into(self, by: int, answer: concurrent.futures.Future[int]) -> None:
        if not answer.set_running_or_notify_cancel():
            return

        async def advance() -> None:
            try:
                step = await self.advance(by)
            except asyncio.CancelledError:
                answer.set_exception(self._closed_error())
                raise
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(step)

        try:
            self._enter()
        except Exception as error:
            answer.set_exception(error)
        else:
            self._spawn(advance(), "advance for a thread")

    # Members of this process.

    def _leave(self, publisher: Publisher, exc: BaseException | None) -> None:
        super()._leave(publisher, exc)
        self._members.leave(publisher, self._room.latest.step, exc)

    def _waits_changed(self, publisher: Publisher) -> None:
        self._members.waits_changed(publisher)

    # News.

    def _take(self, view: View) -> None:
        """Takes note of what the engine tells; called in the event loop, also with views that are out of date."""
        self._observe(view.mark)
        self._elsewhere.take(view)

    @property
    def _view(self) -> View:
        """The latest one that was taken."""
        return self._elsewhere.view

    async def _look_again(self) -> None:
        try:
            self._take(await self._look())
        except StoreUnavailableError as error:
            logger.warning("run %s: could not look after the leases: %s", self.run, error)

    async def _take_lead(self, member: Member) -> int:
        while True:
            answer = await self._request(Lead(member))
            if answer.verdict == "ok":
                return answer.reign
            self._take(await self._look())
            chief = self._elsewhere.chief
            if chief is not None:
                logger.info("run %s: waiting for the lead, which %s has", self.run, chief.name)
                await self._elsewhere.vacancy()
                if self._room.closed:
                    raise self._closed_error()

    # Tasks, forks, copies.

    def _spawn(self, coro: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
        """A task of the store's own: in no session's context, ended with the store."""
        task = asyncio.get_running_loop().create_task(coro, name=f"step store {self.run}: {what}", context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and task is not self._opening:
            logger.error("%s failed", task.get_name(), exc_info=error)

    def _enter(self) -> None:
        if self._forked:
            raise WrongLoopError(self._fork_message())
        super()._enter()
