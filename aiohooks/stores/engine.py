"""The interface between a step store and its engine, in both directions."""

from __future__ import annotations

import abc
import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohooks._core.cancel import new_task, wait_done
from aiohooks._core.clock import Clock
from aiohooks.stores._protocol import (
    Answer,
    EngineError,
    Position,
    Report,
    Request,
    Snapshot,
    logger,
)
from aiohooks.stores.base import WaitRegistry


class Engine(abc.ABC):
    """The place where a run is kept: a server, an actor, or files.

    An engine belongs to one store.

    Each method makes one attempt. The store repeats requests, waits, renews leases, combines
    advances and reconnects. So the engine must recognize a request that it has carried out already,
    as `RunState` does.

    A method raises `StoreUnavailableError` if the connection fails, or if the engine rejects the
    call for now: the store calls the method again over a new connection. It raises
    `StoreRefusedError` if the engine would reject the call again, and `StoreDamagedError` if the
    data is not that of a run: the store does not call the method again.
    """

    remote: ClassVar[bool] = True
    """Whether the engine is behind a connection, which the store makes again when it is lost, and
    finds dead processes by leases. Otherwise the store connects once, and the engine itself removes
    the members of dead processes.
    """
    connect_timeout: ClassVar[float] = 10.0
    """How many seconds the first connection may take, unless the store has the option."""
    link: EngineLink
    """The parts of the store that the engine uses, set by `attach`."""

    def attach(self, link: EngineLink) -> None:
        """Called once, when the store is made.

        Raises:
            InvalidArgumentError: an option of the engine does not fit the store, or its run.
        """
        self.link = link

    @abc.abstractmethod
    async def connect(self) -> Snapshot:
        """Connect, subscribe to reports, and then read the run. Make the run if there is none.

        The engine has lost data if the run is missing that this process knows, if it has another
        `Snapshot.run_id`, or if it is an older copy. Then the engine applies `RunState.follow` with
        the known run (`link.waits.known_run`), and gives the run another id than the lost one.

        Requests and reports of a run with another id than the known one must raise
        `StoreUnavailableError`, and so must a request that `RunState` has answered with "lost": the
        store connects again.
        """

    async def watch(self) -> None:  # noqa: B027 - only if it is `remote`
        """Report positions and snapshots until the connection fails."""

    @abc.abstractmethod
    async def request(self, request: Request) -> Answer:
        """Send a request.

        A request that is sent again, as its answer was lost, gets the same answer again.
        """

    @abc.abstractmethod
    async def read(self) -> Snapshot:
        """Read the run."""

    def advance_nowait(self, by: int, floor: Position, term: int) -> Position | None:
        """Advance without suspending, as a `Write` with these values does.

        Return None if that is not possible: the store sends a request then.
        """
        return None

    def subscribe(self, step: int | None) -> None:  # noqa: B027 - an engine may report every step
        """Report positions from `step` on, the lowest step with a waiter.

        It is 0 while a wait is for any change, and None without a waiter.
        """

    @abc.abstractmethod
    async def delete(self) -> None:
        """Delete the run, even if it is damaged, connected or not."""

    @abc.abstractmethod
    async def disconnect(self) -> None:
        """Release the resources of `connect`, also after it has failed.

        Never raise for a broken connection.
        """

    async def close(self) -> None:
        """`disconnect` for the last time. The store limits the time."""
        await self.disconnect()


@dataclass(frozen=True, slots=True)
class EngineLink:
    """The parts of a store that its engine uses, in the store's event loop only."""

    run: str
    """The name of the run."""
    process: str
    """The name of this process, different for each store, the `writer` of its requests."""
    clock: Clock
    """The clock of the store's event loop."""
    heartbeat: float
    """After how many seconds of silence the engine tests its connection."""
    connect_timeout: float
    """How many seconds the first connection may take."""
    waits: WaitRegistry
    """The waits of this process, to read: `latest` is the latest position that it knows, and
    `waiters.lowest` the lowest step with a waiter. Without a waiter it is above all steps.
    """
    tasks: StoreTasks
    """The tasks of the store and its engine. They are cancelled before `close`."""
    observe: Callable[[Report], None]
    """Reports the position or the state of the run, or the error that all calls and waits raise
    from now on. A position or state that is older than the latest one is ignored.
    """


class StoreTasks:
    """The tasks of a store: they run in no session's context, and end with the store."""

    def __init__(self, run: str) -> None:
        self.running: dict[asyncio.Task[Any], None] = {}
        """The tasks that have not ended, in the order in which they were started."""
        self._run = run

    def spawn(self, coro: Coroutine[Any, Any, None], purpose: str) -> asyncio.Task[None]:
        """Start a task, and log the error that ends it, if any. `purpose` is in its name."""
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
        """Return the task if it still runs. Otherwise start the work in a new one."""
        if task is None or task.done():
            return self.spawn(work(), purpose)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        del self.running[task]
        error = None if task.cancelled() else task.exception()
        # The connection logs the errors of an engine, which end it.
        if error is not None and not isinstance(error, EngineError):
            logger.error("%s failed", task.get_name(), exc_info=error)

    async def cancel(self, secs: float) -> None:
        """Cancel all tasks, and wait for them, `secs` seconds at most."""
        tasks = tuple(self.running)
        for task in tasks:
            task.cancel()
        await wait_done(tasks, secs)
