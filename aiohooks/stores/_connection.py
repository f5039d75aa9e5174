"""The connection of a store to its engine, and what is sent over it.

Calls outlast its loss; writes are sent one after the other.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from asyncio import get_running_loop
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from aiohooks._core.activity import Awaited, Parked, active, enter
from aiohooks._core.cancel import new_task, wait_done
from aiohooks._core.clock import monotonic_now, secs_text, sleep, wake
from aiohooks._core.waits import Backoff, wait_for_others
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
    ENGINE_ERRORS,
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
        error = None if task.cancelled() else task.exception()
        # The errors of an engine end a connection, which is logged there.
        if error is not None and not isinstance(error, ENGINE_ERRORS):
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def cancel(self, secs: float) -> None:
        """Cancel all tasks, and wait for them, `secs` seconds at most."""
        late = tuple(self.running)
        for task in late:
            task.cancel()
        await wait_done(late, secs)


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
            tasks: starts the tasks of the connection.
            connect: connects the engine, and processes its first snapshot.
            lease_secs: the time in which leases run out unless there is a connection.
        """
        self.engine: Engine = engine
        self.tasks: StoreTasks = tasks
        self.is_open: bool = False
        """Whether waits may begin: the engine has been connected, and has not failed since."""
        self.lost_at: float | None = None
        """Since when the connection has been lost; None while it is there."""
        self._connect = connect
        # No lease runs out in a pause.
        max_pause_secs = min(_MAX_PAUSE_SECS, lease_secs / 4)
        self._backoff = Backoff(initial_secs=0.05, max_secs=max_pause_secs)
        self._keeping: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        # The current connection, which callers wait for. It is pending while it is made. Its result
        # is None when it is there, and otherwise the error that ends the calls.
        self._current: asyncio.Future[Exception | None] | None = None

    # Calls.

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Await `request()`, again over a new connection each time the engine is unavailable."""
        while True:
            used = await self.wait()
            try:
                return await request()
            except (StoreRefusedError, StoreResetError):
                raise  # the engine would give the same answer again
            except StoreDamagedError as error:
                self.fail(error)  # no other request can succeed, either
                raise
            except StoreUnavailableError as error:
                if not self.engine.remote:
                    raise  # there is no connection that could be made again
                if used is self._current:
                    self._lose(error)

    async def wait(self) -> asyncio.Future[Exception | None]:
        """Wait until there is a connection and return it, or raise the error that ends the calls.

        If a session is being opened here, a stop of it ends the wait.
        """
        while True:
            current = self._current or self._begin()
            if not current.done():
                with active("wait", "connection", self.awaited):
                    await wait_for_others(wait_done([current], None))
            error = current.result()
            if error is not None:
                raise copied(error)
            if current is self._current:  # otherwise it has been lost again
                return current

    def awaited(self) -> Awaited:
        """Describe the engine as something that is waited for, in reports such as `why`."""
        detail = "no answer yet"
        if self.lost_at is not None:
            detail = f"away for {secs_text(monotonic_now()() - self.lost_at)}"
        engine = type(self.engine).__name__
        return Awaited("store", f"{engine} of {self.engine.link.run}", detail)

    # The connection.

    def _begin(self) -> asyncio.Future[Exception | None]:
        """Start the task that connects, and return what its callers wait for."""
        self._current = get_running_loop().create_future()
        self._keeping = self.tasks.spawn(self._keep(), "connection")
        return self._current

    async def _keep(self) -> None:
        """Connect, in several attempts if need be, and again whenever the connection is lost."""
        link = self.engine.link
        gives_up_at = link.clock.now() + link.connect_timeout
        attempt = 0
        while True:
            began = link.clock.now()
            try:
                await self._connect()
                self._open()
                if not self.engine.remote:
                    return
                await self._watch()
            except Exception as raised:
                # Errors that no engine should raise are caught as well: without this task all
                # callers would wait indefinitely.
                error = raised
            await self._disconnect()
            now = link.clock.now()
            # A connection that has lasted is made again soon, others less and less often.
            if now - began > _MAX_PAUSE_SECS:
                attempt = 0
            attempt += 1
            pause_secs = self._backoff.pause_secs(attempt)
            if self.is_open:
                if isinstance(error, StoreDamagedError):
                    return self.fail(error)
                self._lose(error)
            elif type(error) is not StoreUnavailableError or now + pause_secs >= gives_up_at:
                self._settle(error)
                self._current = None  # the next call tries again
                return
            logger.info("run %s: %s; trying again", link.run, error)
            await sleep(pause_secs, link.clock)

    def _open(self) -> None:
        link = self.engine.link
        if self.lost_at is not None:
            secs = link.clock.now() - self.lost_at
            logger.info("run %s: connected again after %.1f s", link.run, secs)
            self.lost_at = None
        self._settle(None)

    async def _watch(self) -> NoReturn:
        """Let the engine report until the connection is lost, and raise the error."""
        # In a task of its own: a report runs through no other file than the engine's.
        self._reporting = self.tasks.spawn(self.engine.watch(), "reports")
        await wait_done([self._reporting], None)
        if not self._reporting.cancelled():
            self._reporting.result()
        raise StoreUnavailableError("the engine has ended the connection")

    async def _disconnect(self) -> None:
        """Disconnect the engine, and log an error of that: it ends nothing else."""
        try:
            await self.engine.disconnect()
        except Exception:
            logger.exception("run %s: disconnecting has failed", self.engine.link.run)

    def _lose(self, error: Exception) -> None:
        """Let calls wait for another connection; harmless if this one is lost already."""
        if self.lost_at is not None:
            return
        link = self.engine.link
        logger.warning("run %s: the connection is lost, trying again: %s", link.run, error)
        self.lost_at = link.clock.now()
        self._current = get_running_loop().create_future()
        if self._reporting is not None:
            self._reporting.cancel()

    def _settle(self, result: Exception | None) -> None:
        """Let callers continue: None if there is a connection, or the error that they raise."""
        self.is_open = result is None
        if self._current is None or self._current.done():
            self._current = get_running_loop().create_future()
        self._current.set_result(result)

    # The end.

    def fail(self, error: EngineError) -> None:
        """End all calls and waits with an error, for good."""
        if self._keeping is None:
            return
        logger.error("run %s: %s", self.engine.link.run, error)
        self.stop(error)
        self.engine.link.waits.abort(error)
        self.tasks.spawn(self._disconnect(), "closing the connection")

    def stop(self, error: Exception) -> None:
        """Let all calls end with an error, and make no connection any more.

        The engine stays connected.
        """
        for task in (self._keeping, self._reporting):
            if task is not None:
                task.cancel()
        self._keeping = None
        self.lost_at = None
        self._settle(error)


def copied(error: Exception) -> Exception:
    """Return an error for another caller, which collects its own traceback."""
    return copy_error(error) if isinstance(error, AiohooksError) else error


class _PendingWrite:
    """One caller's write, until it is answered."""

    __slots__ = ("amount", "answer", "kind", "task")

    def __init__(self, kind: WriteKind, amount: int) -> None:
        self.task = asyncio.current_task()
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
        self._pending: list[_PendingWrite] = []
        self._sending: asyncio.Task[None] | None = None
        enter(self)

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
            answer = await wait_for_others(write.answer)
        finally:
            write.answer.cancel()  # a stop has ended the wait
        if isinstance(answer, Position):
            return answer
        raise answer

    def parked(self) -> list[Parked]:
        return [Parked(write.task, self._connection.awaited) for write in self._pending]

    def close(self) -> None:
        """End the writes that have not been answered."""
        for write in self._pending:
            wake(write.answer, closed_error(self._connection.engine.link.run))
        self._pending.clear()

    async def _send_all(self) -> None:
        while self._pending:
            batch = self._next_batch()
            waiting = [write for write in batch if not write.answer.done()]
            if waiting:
                await self._send(waiting)
            # Only now: closing the store answers what is in the queue.
            del self._pending[: len(batch)]

    def _next_batch(self) -> list[_PendingWrite]:
        """Return the next write, and if it is an advance, the advances behind it."""
        first = self._pending[0]
        if first.kind != "advance":
            return [first]
        return list(itertools.takewhile(lambda write: write.kind == "advance", self._pending))

    async def _send(self, batch: list[_PendingWrite]) -> None:
        """Send writes in one request, and answer each."""
        try:
            reached = await self._request(batch)
        except Exception as error:
            # Errors that no engine should raise are caught as well: otherwise the callers would
            # wait indefinitely. Each caller gets a copy, which collects its own traceback.
            for write in batch:
                wake(write.answer, copied(error))
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
