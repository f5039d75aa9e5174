"""The connection of a store to its engine, and what is sent over it.

Calls outlast its loss; writes are sent one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from asyncio import get_running_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

from aiohooks._core.activity import Awaited, active
from aiohooks._core.cancel import new_task, wait_done
from aiohooks._core.clock import monotonic_now, secs_text, sleep, wake
from aiohooks._core.waiters import Waiters
from aiohooks._core.waits import Backoff, is_opening, wait_for_others
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


class StoreTasks:
    """The tasks of a store: they run in no session's context, and end with the store."""

    def __init__(self, run: str) -> None:
        self.running: dict[asyncio.Task[Any], None] = {}
        """The tasks that have not ended, in the order in which they were started."""
        self._run = run

    def spawn(self, coro: Coroutine[Any, Any, T], purpose: str) -> asyncio.Task[T]:
        """Start a task; an error that ends it is logged."""
        task = new_task(coro, f"step store {self._run}: {purpose}", contextvars.Context())
        self.running[task] = None
        task.add_done_callback(self._on_done)
        return task

    def ensure_running(
        self,
        task: asyncio.Task[None] | None,
        work: Callable[[], Coroutine[Any, Any, None]],
        purpose: str,
    ) -> asyncio.Task[None]:
        """Return the task if it still runs; otherwise start the work in a new one."""
        if task is None or task.done():
            return self.spawn(work(), purpose)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        del self.running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def cancel(self, secs: float) -> None:
        """Cancel all tasks, and wait for them, `secs` seconds at most."""
        late = tuple(self.running)
        for task in late:
            task.cancel()
        await wait_done(late, secs)


class Outages:
    """The outages of an engine.

    A session that opens may wait for what a task of its store requests. From an outage on, a stop
    ends this wait.
    """

    def __init__(self) -> None:
        self._current = 0
        self._waiters = Waiters()

    @contextlib.contextmanager
    def outage(self) -> Generator[None]:
        """Mark the time of this block as an outage, in which the engine does not answer."""
        self._current += 1
        self._waiters.wake()
        try:
            yield
        finally:
            self._current -= 1

    async def wait_in_opening(self, answer: asyncio.Future[Any]) -> None:
        """Wait until `answer` is done, if a session is being opened by this code.

        A session whose engine answers is opened even after a stop, and its hooks see the end. So
        this waits like `wait_for_others` only from an outage on.
        """
        if not is_opening():
            return
        if not self._current:
            with self._waiters.added() as outage:
                await asyncio.wait([answer, outage], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await wait_for_others(wait_done([answer], None))


class Connection:
    """Connects an engine when it is first needed, and again whenever the connection is lost.

    If the first connection fails, the next call tries again. A lost one is made again until that
    succeeds, or until the run is found damaged. An engine that is not `remote` is connected once.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: StoreTasks,
        *,
        connect: Callable[[], Awaitable[None]],
        lease_secs: float,
    ) -> None:
        """Connect later.

        Args:
            engine: the engine.
            tasks: starts the task that keeps the connection.
            connect: connects the engine, and processes its first snapshot.
            lease_secs: the time in which leases run out unless there is a connection.
        """
        self.engine: Engine = engine
        self.tasks: StoreTasks = tasks
        self.outages: Outages = Outages()
        self.is_open: bool = False
        """Whether waits may begin: the engine has been connected, and has not failed since."""
        self.has_failed: bool = False
        """Whether all calls fail for good."""
        self.lost_at: float | None = None
        """Since when the connection has been lost; None while it is there."""
        self._connect = connect
        # No lease runs out in a pause.
        max_pause_secs = min(_MAX_PAUSE_SECS, lease_secs / 4)
        self._backoff = Backoff(initial_secs=0.05, max_secs=max_pause_secs)
        self._keeping: asyncio.Task[None] | None = None
        # What callers wait for: pending while a connection is made. Its result is None when the
        # connection is there, and otherwise the error that ends the calls. A new one takes its
        # place when that changes; None before the first connection is begun.
        self._ready: asyncio.Future[Exception | None] | None = None
        self._settled = Waiters()  # the calls that wait before they are tried again

    # Calls.

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Await `request()`, again after a pause each time the engine is unavailable."""
        attempt = 0
        while True:
            await self.wait()
            try:
                with self.active_wait():
                    return await request()
            except (StoreRefusedError, StoreResetError):
                raise  # the engine would give the same answer again
            except StoreDamagedError as error:
                self.fail(error)  # no other request can succeed, either
                raise
            except StoreUnavailableError:
                if not self.engine.remote:
                    raise  # there is no connection that could be made again
            attempt += 1
            with self.outages.outage():
                pause = self._settled.wait(
                    self._backoff.pause_secs(attempt), self.engine.link.clock
                )
                with self.active_wait():
                    await wait_for_others(pause)

    async def wait(self) -> None:
        """Wait until there is a connection, or raise the error that ends the calls."""
        ready: asyncio.Future[Exception | None] | None = None
        while ready is None or ready is not self._ready:  # otherwise it has been lost again
            ready = self._ready or self._begin()
            if not ready.done():
                with self.active_wait():
                    await wait_for_others(wait_done([ready], None))
            error = ready.result()
            if isinstance(error, AiohooksError):
                raise copy_error(error)
            if error is not None:
                raise error

    def active_wait(self) -> active:
        """Enter a wait for the engine in the registry of activity."""
        return active("wait", self._name, self._awaited)

    @property
    def _name(self) -> str:
        return f"{type(self.engine).__name__} of {self.engine.link.run}"

    def _awaited(self) -> Awaited:
        detail = "no answer yet"
        if self.lost_at is not None:
            detail = f"away for {secs_text(monotonic_now()() - self.lost_at)}"
        return Awaited("store", self._name, detail)

    def _settle(self, result: Exception | None) -> None:
        """Let callers continue: None if there is a connection, or the error that they raise."""
        self.is_open = result is None
        if self._ready is None or self._ready.done():
            self._ready = get_running_loop().create_future()
        self._ready.set_result(result)
        self._settled.wake()

    # The connection.

    def _begin(self) -> asyncio.Future[Exception | None]:
        """Start the task that connects, and return what its callers wait for."""
        self._ready = get_running_loop().create_future()
        self._keeping = self.tasks.spawn(self._keep(), "connection")
        return self._ready

    async def _keep(self) -> None:
        """Connect, in several attempts if need be, and again whenever the connection is lost."""
        clock = self.engine.link.clock
        began = clock.now()
        has_connected = False
        attempt = 0
        while True:
            error = await self._try_to_connect()
            if error is None:
                if not self.engine.remote:
                    return
                has_connected = True
                connected_at = clock.now()
                error = await self._watch()
                # A connection that has lasted is made again soon, others less and less often.
                if clock.now() - connected_at > _MAX_PAUSE_SECS:
                    attempt = 0
            attempt += 1
            pause_secs = self._backoff.pause_secs(attempt)
            if has_connected and isinstance(error, StoreDamagedError):
                self.fail(error)
                return
            if not has_connected and self._is_final(error, clock.now() + pause_secs - began):
                self._settle(error)
                self._ready = None  # the next call tries again
                return
            self._note_outage(error, is_first=not has_connected)
            with self.outages.outage():
                await sleep(pause_secs, clock)

    def _is_final(self, error: Exception, secs: float) -> bool:
        """Return whether the first connection is given up, `secs` after it was begun."""
        if isinstance(error, StoreRefusedError) or not isinstance(error, StoreUnavailableError):
            return True
        return not self.engine.remote or secs > self.engine.link.connect_timeout

    async def _try_to_connect(self) -> Exception | None:
        """Connect, and return the error if that fails."""
        try:
            await self._connect()
        except Exception as error:
            # Errors that no engine should raise are caught as well: without this task all callers
            # would wait indefinitely.
            await self._disconnect()
            return error
        if self.lost_at is not None:
            link = self.engine.link
            secs = link.clock.now() - self.lost_at
            logger.info("run %s: connected again after %.1f s", link.run, secs)
        self.lost_at = None
        self._settle(None)
        return None

    async def _watch(self) -> Exception:
        """Let the engine report, and return the error that ends this."""
        error: Exception = StoreUnavailableError("the engine has ended the connection")
        try:
            await self.engine.watch()
        except Exception as raised:
            error = raised
        await self._disconnect()
        return error

    async def _disconnect(self) -> None:
        """Disconnect the engine, and log an error of that: it ends nothing else."""
        try:
            await self.engine.disconnect()
        except Exception:
            logger.exception("run %s: disconnecting has failed", self.engine.link.run)

    def _note_outage(self, error: Exception, *, is_first: bool) -> None:
        """Begin an outage, or log that it continues; the first connection is only logged."""
        link = self.engine.link
        if is_first:
            logger.info("run %s: %s; trying again", link.run, error)
            return
        if self.lost_at is not None:
            secs = link.clock.now() - self.lost_at
            logger.info("run %s: still disconnected after %.0f s: %s", link.run, secs, error)
            return
        logger.warning("run %s: the connection is lost, trying again: %s", link.run, error)
        self.lost_at = link.clock.now()
        self._ready = get_running_loop().create_future()

    # The end.

    def fail(self, error: EngineError) -> None:
        """End all calls and waits with an error, for good."""
        if self._keeping is None:
            return
        logger.error("run %s: %s", self.engine.link.run, error)
        self.has_failed = True
        self._stop(error)
        self.engine.link.waits.abort(error)
        self.tasks.spawn(self._disconnect(), "closing the connection")

    def stop(self) -> None:
        """End all calls, and make no connection any more; the engine stays connected."""
        self._stop(closed_error(self.engine.link.run))

    def _stop(self, error: Exception) -> None:
        """Let all calls end with an error."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        self.lost_at = None
        self._settle(error)


class _PendingWrite:
    """One caller's write, until it is answered."""

    __slots__ = ("amount", "answer", "kind")

    def __init__(self, kind: WriteKind, amount: int) -> None:
        self.kind: WriteKind = kind
        self.amount = amount
        # An error is a result, too: a cancelled caller does not fetch it.
        self.answer: asyncio.Future[Position | Exception] = get_running_loop().create_future()


class Writes:
    """Sends the writes of a process, in their order."""

    def __init__(self, connection: Connection) -> None:
        self.loss: StoreResetError | None = None
        """The loss of the run that was not acknowledged yet: it ends all writes."""
        self.term: int = 0
        """The term of this process while it is the chief."""
        self._connection = connection
        self._seq = 0
        self._pending: deque[_PendingWrite] = deque()
        self._sending: asyncio.Task[None] | None = None

    @property
    def may_overtake(self) -> bool:
        """Whether a write may be made without waiting: there is none before it, and no loss."""
        is_free = self._sending is None or self._sending.done()
        return is_free and self.loss is None

    def check_loss(self) -> None:
        """Raise the error of a loss that was not acknowledged yet."""
        if self.loss is not None:
            raise copy_error(self.loss)

    async def write(self, kind: WriteKind, amount: int) -> Position:
        """Return the position that a write has led to."""
        if not self._connection.is_open:
            await self._connection.wait()  # here, and not in the task that sends: a stop can end it
        write = _PendingWrite(kind, amount)
        self._pending.append(write)
        self._sending = self._connection.tasks.ensure_running(
            self._sending, self._send_all, "writing"
        )
        try:
            with self._connection.active_wait():
                await self._connection.outages.wait_in_opening(write.answer)
                answer = await write.answer
        finally:
            write.answer.cancel()  # a stop has ended the wait
        if isinstance(answer, Position):
            return answer
        raise answer

    def close(self) -> None:
        """End the writes that have not been sent."""
        for write in self._pending:
            wake(write.answer, closed_error(self._connection.engine.link.run))
        self._pending.clear()

    async def _send_all(self) -> None:
        while self._pending:
            batch = self._next_batch()
            if batch:
                await self._send(batch)

    def _next_batch(self) -> list[_PendingWrite]:
        """Take the next write off the queue, and if it is an advance, the advances behind it.

        Cancelled writes are dropped, so that the batch may be empty.
        """
        pending = self._pending
        batch = [pending.popleft()]
        if batch[0].kind == "advance":
            while pending and pending[0].kind == "advance":
                batch.append(pending.popleft())
        return [write for write in batch if not write.answer.done()]

    async def _send(self, batch: list[_PendingWrite]) -> None:
        """Send writes in one request, and answer each."""
        try:
            reached = await self._request(batch)
        except asyncio.CancelledError:  # the store is closed
            for write in batch:
                wake(write.answer, closed_error(self._connection.engine.link.run))
            raise
        except Exception as error:
            # Errors that no engine should raise are caught as well: otherwise the callers would
            # wait indefinitely. Each caller gets a copy, which collects its own traceback.
            for write in batch:
                copied = copy_error(error) if isinstance(error, AiohooksError) else error
                wake(write.answer, copied)
            return
        # The engine returns where all writes have led to: walk back to the step of each advance.
        step = reached.step
        for write in reversed(batch):
            wake(write.answer, Position(reached.epoch, step))
            step -= write.amount

    async def _request(self, batch: list[_PendingWrite]) -> Position:
        """Return the position that the writes lead to together."""
        engine = self._connection.engine
        waits = engine.link.waits
        self._seq += 1
        request = Write(
            batch[0].kind,
            sum(write.amount for write in batch),
            waits.latest,
            self.term,
            engine.link.process,
            self._seq,
        )

        async def send() -> Answer | None:
            if all(write.answer.done() for write in batch):
                return None  # all callers were cancelled
            self.check_loss()
            return await engine.request(request)

        answer = await self._connection.call(send)
        if answer is None:
            return request.floor
        self._check(request, answer)
        waits.observe(answer.position)
        return answer.position

    def _check(self, write: Write, answer: Answer) -> None:
        """Raise an error if the engine has refused the write."""
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
            checked_step(MAX_STEP + 1, f"{write.kind} by {write.amount} would lead to step")
