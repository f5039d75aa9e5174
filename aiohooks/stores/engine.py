"""What an engine provides to a step store, and what the store offers to its engine."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiohooks._core.clock import Clock
from aiohooks.stores._protocol import Answer, Position, Report, Request, Snapshot
from aiohooks.stores.base import WaitRegistry

if TYPE_CHECKING:  # it uses engines itself
    from aiohooks.stores._connection import StoreTasks


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
    """The parts of the store that the engine uses; set by `attach`."""

    def attach(self, link: EngineLink) -> None:
        """Called once, when the store is made.

        Raises:
            InvalidArgumentError: an option of the engine does not fit the store, or its run.
        """
        self.link = link

    @abc.abstractmethod
    async def connect(self) -> Snapshot:
        """Connect, subscribe to reports, and then read the run; make the run if there is none.

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
        """`disconnect` for the last time; the store limits the time."""
        await self.disconnect()


@dataclass(frozen=True, slots=True)
class EngineLink:
    """The parts of a store that its engine uses, in the store's event loop only."""

    run: str
    """The name of the run."""
    process: str
    """The name of this process, different for each store; the `writer` of its requests."""
    clock: Clock
    """The clock of the store's event loop."""
    heartbeat: float
    """After how many seconds of silence the engine tests its connection."""
    connect_timeout: float
    """How many seconds the first connection may take."""
    waits: WaitRegistry
    """The waits of this process, to read: `latest` is the latest position that it knows, and
    `threshold` the lowest step with a waiter, as for `Engine.subscribe`.
    """
    tasks: StoreTasks
    """The tasks of the store and its engine. They are cancelled before `close`."""
    observe: Callable[[Report], None]
    """Reports the position or the state of the run, or the error that all calls and waits raise
    from now on. A position or state that is older than the latest one is ignored.
    """
