"""The connection of a store to its engine, and the writes of a process.

Calls continue over a new connection when the old one is lost. Writes are sent one after another.
"""

from __future__ import annotations

import asyncio
import itertools
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from aiohooks._core.activity import Awaited, Parked, active, enter
from aiohooks._core.clock import monotonic_now, secs_text, sleep, wake
from aiohooks._core.waits import Backoff, wait_done, wait_for_others
from aiohooks.errors import (
    AiohooksError,
    StaleTermError,
    StoreDamagedError,
    StoreRefusedError,
    StoreResetError,
    StoreUnavailableError,
    copy_error,
)
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    EngineError,
    Position,
    Write,
    WriteKind,
    checked_step,
    closed_error,
    logger,
)
from aiohooks.stores.engine import Engine

T = TypeVar("T")
_MAX_PAUSE_SECS = 5.0

# The opening of a connection, which calls wait for. It is pending while the engine connects. Its
# result is an error: None as soon as the connection is open, or else the error that ends the calls.
# A lost connection gets a new opening.
Opening = asyncio.Future[Exception | None]


class Connection:
    """Connects an engine when it is first needed, and again whenever the connection is lost.

    If the first connection cannot be made in time, calls raise the error, and the next call tries
    again. A lost connection is made again until that succeeds, or until the run is found damaged.
    An engine that is not `remote` is connected once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        connect: Callable[[], Awaitable[None]],
        lease_secs: float,
    ) -> None:
        """Connect later.

        Args:
            engine: the engine, attached to the store.
            connect: connects the engine, and processes its first snapshot.
            lease_secs: the time after which a lease that is not renewed runs out.
        """
        self.engine = engine
        self.tasks = engine.link.tasks
        self.is_open = False
        """Whether waits may begin: the engine has been connected, and has not failed since.

        It stays true during an outage.
        """
        self.lost_at: float | None = None
        """The time since which the connection has been lost, or None without an outage."""
        self._connect = connect
        # A pause is shorter than a lease, so that no lease runs out during it.
        max_pause_secs = min(_MAX_PAUSE_SECS, lease_secs / 4)
        self._backoff = Backoff(initial_secs=0.05, max_secs=max_pause_secs)
        self._connect_task: asyncio.Task[None] | None = None
        self._report_task: asyncio.Task[None] | None = None
        # The opening of the current connection, or None until a call needs a connection.
        self._opening: Opening | None = None

    # Calls.

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `await request()`.

        While the engine is unavailable, call `request` again over each new connection.
        """
        while True:
            used_opening = await self.wait()
            try:
                return await request()
            except (StoreRefusedError, StoreResetError):
                raise  # the engine would give the same answer again
            except StoreDamagedError as error:
                self.fail(error)  # other requests cannot succeed, either
                raise
            except StoreUnavailableError as error:
                if not self.engine.remote:
                    raise  # there is no connection that could be made again
                # The opening is another one if the loss of this connection is known already.
                if used_opening is self._opening:
                    self._begin_outage(error)

    async def wait(self) -> Opening:
        """Wait until there is a connection, and return its opening.

        If no connection can be made, raise the error. While a session is being opened in the
        current context, a stop of it ends the wait. Neither the stop nor a cancellation of the
        caller ends the opening, for which other callers may wait.
        """
        while True:
            opening = self._opening or self._begin_connecting()
            if not opening.done():
                with active("wait", "connection", self.awaited):
                    # `wait_done` cancels nothing: all callers share the opening.
                    opening_done = wait_done([opening], secs=None)
                    # `wait_for_others` lets a stop of the session end this caller's wait.
                    await wait_for_others(opening_done)
            error = opening.result()  # an opening's result is its error, or None
            if error is not None:
                raise copy_for_caller(error)
            # Otherwise this connection has been lost since, and there is another opening.
            if opening is self._opening:
                return opening

    def awaited(self) -> Awaited:
        """Describe a wait for the engine, for reports such as `why`."""
        detail = "no answer yet"
        if self.lost_at is not None:
            now = monotonic_now()
            detail = f"unreachable for {secs_text(now() - self.lost_at)}"
        engine = type(self.engine).__name__
        return Awaited("store", f"{engine} of {self.engine.link.run}", detail)

    # The connection.

    def _begin_connecting(self) -> Opening:
        """Start the task that connects, and return the opening to wait for."""
        self._opening = get_running_loop().create_future()
        self._connect_task = self.tasks.spawn(self._stay_connected(), "connection")
        return self._opening

    async def _stay_connected(self) -> None:
        """Keep a connection until the store is closed, or the run is found damaged.

        Until the first success, give up after `connect_timeout`, or at a permanent error. Later,
        try again without a limit.
        """
        link = self.engine.link
        gives_up_at = link.clock.now() + link.connect_timeout
        attempt = 0
        while True:
            began = link.clock.now()
            error = await self._run_connection()
            if error is None:  # an engine that is not `remote` needs no other connection
                return
            await self._disconnect()
            now = link.clock.now()
            has_lasted = now - began > _MAX_PAUSE_SECS
            # After a connection that has lasted, begin again with the shortest pause. After each
            # failed attempt or short connection, make a longer pause.
            attempt = 1 if has_lasted else attempt + 1
            pause_secs = self._backoff.pause_secs(attempt)
            if self.is_open:
                # The engine was connected before, so only damage ends the attempts.
                if isinstance(error, StoreDamagedError):
                    self.fail(error)
                    return
                self._begin_outage(error)
            else:
                # Only a plain StoreUnavailableError can be temporary. Its subclasses and all other
                # errors are permanent.
                is_permanent = type(error) is not StoreUnavailableError
                if is_permanent or now + pause_secs >= gives_up_at:
                    self._end_opening(error)
                    self._opening = None  # the next call tries again
                    return
            logger.info("run %s: %s; trying again", link.run, error)
            await sleep(pause_secs, link.clock)

    async def _run_connection(self) -> Exception | None:
        """Connect, and let the engine report until the connection is lost. Return the error.

        Return None once an engine is connected that is not `remote`.
        """
        try:
            await self._connect()
            self._note_connected()
            if not self.engine.remote:
                return None
            await self._watch()
        except Exception as error:
            # Any error, even one that no engine should raise: it would end the task that connects,
            # and all callers would wait indefinitely.
            return error

    def _note_connected(self) -> None:
        """End the outage, if there was one, and let the calls that wait for it continue."""
        link = self.engine.link
        if self.lost_at is not None:
            secs = link.clock.now() - self.lost_at
            logger.info("run %s: connected again after %.1f s", link.run, secs)
            self.lost_at = None
        self._end_opening(None)

    async def _watch(self) -> NoReturn:
        """Let the engine report until the connection is lost, and raise the error."""
        # The engine reports in a task of its own, so that `_begin_outage` can cancel it when a call
        # finds the connection lost.
        self._report_task = self.tasks.spawn(self.engine.watch(), "reports")
        await wait_done([self._report_task], None)
        if not self._report_task.cancelled():
            self._report_task.result()  # raises the error that has ended the reports
        raise StoreUnavailableError("the engine has ended the connection")

    async def _disconnect(self) -> None:
        """Disconnect the engine. Only log an error of this, because the caller must continue."""
        try:
            await self.engine.disconnect()
        except Exception:
            logger.exception("run %s: disconnecting has failed", self.engine.link.run)

    def _begin_outage(self, error: Exception) -> None:
        """Make calls wait for another connection. During an outage, do nothing.

        Also end the reports of the engine: `_stay_connected` waits for their end to connect again.
        """
        if self.lost_at is not None:
            return
        link = self.engine.link
        logger.warning("run %s: the connection is lost, trying again: %s", link.run, error)
        self.lost_at = link.clock.now()
        self._opening = get_running_loop().create_future()
        if self._report_task is not None:
            self._report_task.cancel()

    def _end_opening(self, result: Exception | None) -> None:
        """Set the result of the opening: None for a connection, or the error of the calls."""
        self.is_open = result is None
        # A result cannot be changed: if the opening has one already, a new opening replaces it.
        if self._opening is None or self._opening.done():
            self._opening = get_running_loop().create_future()
        self._opening.set_result(result)

    # The end.

    def fail(self, error: EngineError) -> None:
        """End all calls and waits with an error, and fail later calls.

        Do nothing if the connection was never begun or is stopped already.
        """
        if self._connect_task is None:
            return
        logger.error("run %s: %s", self.engine.link.run, error)
        self.stop(error)
        self.engine.link.waits.abort(error)
        self.tasks.spawn(self._disconnect(), "closing the connection")

    def stop(self, error: Exception) -> None:
        """End all calls with an error, fail later calls, and never connect again.

        The engine itself stays connected.
        """
        for task in (self._connect_task, self._report_task):
            if task is not None:
                task.cancel()
        self._connect_task = None
        self.lost_at = None
        self._end_opening(error)


def copy_for_caller(error: Exception) -> Exception:
    """Return a copy of an error that several callers raise: each collects its own traceback."""
    return copy_error(error) if isinstance(error, AiohooksError) else error


class _PendingWrite:
    """A write, and the future that its caller waits for."""

    __slots__ = ("amount", "answer", "kind", "task")

    def __init__(self, kind: WriteKind, amount: int) -> None:
        self.task = asyncio.current_task()  # the task of the caller, for reports
        self.kind: WriteKind = kind
        self.amount = amount
        # The position that the write has led to, or its error. An error is set as a result, too: a
        # caller that was cancelled would not fetch an exception, and asyncio would log that.
        self.answer: asyncio.Future[Position | Exception] = get_running_loop().create_future()


class Writes:
    """Queues the writes of a process, and sends them in their order."""

    def __init__(self, connection: Connection) -> None:
        self.loss: StoreResetError | None = None
        """The error of a loss of the run that is not acknowledged yet: all writes raise it."""
        self.term = 0
        """The term of this process while it is the chief, otherwise 0."""
        self._connection = connection
        self._seq = 0
        # The pending writes in their order. Those at the front may be on their way to the engine.
        self._queue: list[_PendingWrite] = []
        self._send_task: asyncio.Task[None] | None = None
        enter(self)

    @property
    def can_skip_queue(self) -> bool:
        """Whether a write may be made directly: no write is pending, and no loss of the run."""
        is_idle = self._send_task is None or self._send_task.done()
        return is_idle and self.loss is None

    def check_loss(self) -> None:
        """Raise the error of a loss of the run that is not acknowledged yet."""
        if self.loss is not None:
            raise copy_error(self.loss)

    async def write(self, kind: WriteKind, amount: int) -> Position:
        """Send a write, and return the position that it has led to."""
        if not self._connection.is_open:
            # Wait here and not in the task that sends: a stop of the session can end this wait.
            await self._connection.wait()
        write = _PendingWrite(kind, amount)
        self._queue.append(write)
        self._send_task = self._connection.tasks.ensure_running(
            self._send_task, self._send_all, "writing"
        )
        try:
            answer = await wait_for_others(write.answer)
        finally:
            # If a stop has ended the wait, do not send the write. Otherwise this has no effect.
            write.answer.cancel()
        if isinstance(answer, Position):
            return answer
        raise answer

    def parked(self) -> list[Parked]:
        """Return an entry for each task that waits for its write, for reports."""
        return [Parked(write.task, self._connection.awaited) for write in self._queue]

    def close(self) -> None:
        """End the pending writes with the error of a closed store."""
        for write in self._queue:
            wake(write.answer, closed_error(self._connection.engine.link.run))
        self._queue.clear()

    async def _send_all(self) -> None:
        """Send the queue, one batch after another, until it is empty."""
        while self._queue:
            # A batch is the front of the queue, and stays there while it is sent.
            batch = self._next_batch()
            # Leave out the writes of cancelled callers, whose answers are done.
            awaited_writes = [write for write in batch if not write.answer.done()]
            if awaited_writes:
                await self._send(awaited_writes)
            # Only now remove the batch from the queue: until here, `close` could still end its
            # writes with an error.
            del self._queue[: len(batch)]

    def _next_batch(self) -> list[_PendingWrite]:
        """Return the writes at the front of the queue that one request can make.

        These are all advances before the first other write, or that write alone.
        """
        first = self._queue[0]
        if first.kind != "advance":
            return [first]
        return list(itertools.takewhile(lambda write: write.kind == "advance", self._queue))

    async def _send(self, batch: list[_PendingWrite]) -> None:
        """Send writes in one request, and answer each of them."""
        try:
            reached = await self._request(batch)
        except Exception as error:
            # Any error, even one that no engine should raise: otherwise the callers would wait
            # indefinitely.
            for write in batch:
                wake(write.answer, copy_for_caller(error))
            return
        # The last write has led to the position `reached`. Each advance began at a step that is
        # lower by its amount, where the write before it had ended. So go through the writes
        # backwards.
        step = reached.step
        for write in reversed(batch):
            wake(write.answer, Position(reached.epoch, step))
            step -= write.amount

    async def _request(self, batch: list[_PendingWrite]) -> Position:
        """Send one request for all writes of a batch. Return the position that it has led to."""
        engine = self._connection.engine
        waits = engine.link.waits
        self._seq += 1
        request = Write(
            batch[0].kind,
            sum(write.amount for write in batch),
            floor=waits.latest,
            term=self.term,
            writer=engine.link.process,
            seq=self._seq,
        )

        async def send() -> Answer | None:
            if all(write.answer.done() for write in batch):
                return None  # all callers were cancelled, so no write is wanted any more
            self.check_loss()
            return await engine.request(request)

        answer = await self._connection.call(send)
        if answer is None:
            return request.floor  # any position will do, because no caller waits for it
        self._check_answer(request, answer)
        waits.observe(answer.position)
        return answer.position

    def _check_answer(self, write: Write, answer: Answer) -> None:
        """Raise an error if the engine has rejected the write."""
        run = self._connection.engine.link.run
        step = answer.position.step
        if answer.status == "stale":
            raise StaleTermError(
                f"the term {write.term} of this process over {run} has ended, {answer.term} has"
                f" begun at step {step}: its lease had run out, and another chief took over, or"
                " may; stop, or start again",
                term=write.term,
                newest=answer.term,
            )
        if answer.status == "lost":
            raise StoreUnavailableError(
                f"run {run}: the engine has an older copy of it, at step {step}"
            )
        if answer.status == "full":
            # `checked_step` raises the error for a step that is too high.
            checked_step(MAX_STEP + 1, f"{write.kind} by {write.amount} would lead to step")
