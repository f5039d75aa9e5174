"""What an engine provides to a step store, and what the store offers to its engine."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohooks._core.clock import Clock
from aiohooks.stores._protocol import (
    Answer,
    EngineError,
    Position,
    Request,
    Snapshot,
)
from aiohooks.stores.base import WaitRegistry


class Engine(abc.ABC):
    """The place where the processes of a run keep it: a server, an actor, files.

    Each store has an engine of its own.

    Each method does one thing once, and what takes effect twice where it is repeated is recognized
    (`RunState` does that). The store repeats, waits, renews leases, combines advances and
    reconnects. A method raises `StoreUnavailableError` if the connection fails or the engine
    refuses for now: the store repeats it over a new connection. It raises `StoreRefusedError` if
    the engine would refuse again, and `StoreDamagedError` if what it finds is no run: after that
    nothing is repeated.
    """

    remote: ClassVar[bool] = True
    """Whether it is behind a connection, which may be lost and is made again, and where the dead
    are found by leases. Otherwise nothing is tried again, and the engine removes the members of
    dead processes by itself.
    """
    connect_timeout: ClassVar[float] = 10.0
    """How many seconds the first connection may take, unless the store is given another limit."""
    link: EngineLink
    """What the store offers; set by `attach`."""

    def attach(self, link: EngineLink) -> None:
        """Called once, when the store is made.

        An option that does not fit raises `InvalidArgumentError` here.
        """
        self.link = link

    @abc.abstractmethod
    async def connect(self) -> Snapshot:
        """Connect, subscribe, and then read the run; make the run if it is not there.

        Report from then on.

        If there is no run any more, another one than before (`Snapshot.run_id`), or an older copy,
        the engine has lost data. Then it applies `RunState.follow` with what this process knows
        (`waits.known_run` of its link), and the run has another id than the lost one. Requests and
        reports of a run with another id than the known one must fail, and end the connection; so
        must a request that `RunState` has answered with "lost".
        """

    async def watch(self) -> None:  # noqa: B027 - only if it is `remote`
        """Report positions and snapshots until the connection fails."""

    @abc.abstractmethod
    async def request(self, request: Request) -> Answer:
        """Send a request.

        One that was sent before, and whose answer was lost, gets the same answer.
        """

    @abc.abstractmethod
    async def read(self) -> Snapshot:
        """Read the run."""

    def advance_nowait(self, by: int, floor: Position, term: int) -> Position | None:
        """Advance without suspending, as the `Write` with these values.

        Return None if a request is needed for that.
        """
        return None

    def subscribe(self, step: int | None) -> None:  # noqa: B027 - an engine may report every step
        """Report from `step` on, the lowest one with a waiter.

        It is 0 for any change, and None without a waiter.
        """

    @abc.abstractmethod
    async def delete(self) -> None:
        """Delete the run, whatever it holds, also without `connect`."""

    @abc.abstractmethod
    async def disconnect(self) -> None:
        """Release what `connect` took, also after a failed one.

        Never raise for a broken connection.
        """

    async def close(self) -> None:
        """`disconnect` for the last time; the store bounds the time."""
        await self.disconnect()


@dataclass(frozen=True, slots=True)
class EngineLink:
    """Made by a store for its engine. Everything is called in the store's event loop."""

    run: str
    """The name of the run."""
    process: str
    """The name of this process, different for each store; the `writer` of its requests."""
    clock: Clock
    heartbeat: float
    """After how many seconds of silence a connection is to be tested."""
    connect_timeout: float
    waits: WaitRegistry
    """What this process waits for: `latest` is the latest position that it knows, `threshold` the
    lowest step with a waiter, as for `Engine.subscribe`.
    """
    observe: Callable[[Snapshot], None]
    """Reports the state of the run; `waits.observe` reports the position alone. Older reports than
    the latest are ignored.
    """
    fail: Callable[[EngineError], None]
    """Ends all calls and waits with an error, for good."""
    spawn: Callable[[Coroutine[Any, Any, Any], str], asyncio.Task[Any]]
    """Starts a task of the store's, with what it is for; it is cancelled before `close`."""
