"""The step actor of Ray in a simulated process, and its handle: the store and the actor are the
library's own.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorUnavailableError

from aiohooks.stores.ray import RayEngine, StepActor
from tests.fuzz.simulation.network import Connection, Network
from tests.fuzz.simulation.virtual_time import Process
from tests.support.fake_ray import Call, Method


class RayServer:
    """The process of the actor; it keeps nothing when it dies."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._process = Process(network.world, "actor")
        self.actor = StepActor()

    def on_message(self, connection: Connection, message: tuple[Any, ...]) -> None:
        number, method, args = message
        process, actor = self._process, self.actor

        async def call() -> None:
            try:
                result = await getattr(actor, method)(*args)
            except Exception as error:
                result = error
            if process is self._process:
                connection.reply((number, result))

        process.start(call())

    def on_closed(self, connection: Connection) -> None:
        pass

    # Faults.

    def lose_data(self) -> None:
        """Ray starts the actor again immediately."""
        self.network.stop_server()
        self.restart(0.0)

    def restart(self, lost_secs: float) -> None:
        old, self._process, self.actor = (
            self._process,
            Process(self.network.world, "actor"),
            StepActor(),
        )
        old.kill()
        self.network.start_server()


class _Handle:
    """The actor's handle in one process. Its calls arrive in order; all that are not answered fail
    with the connection.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Any] | None = None
        self._calls: dict[int, tuple[str, tuple[Any, ...], Call]] = {}
        self._count = 0

    def __getattr__(self, name: str) -> Method:
        return Method(self.send, name)

    def send(self, name: str, args: tuple[Any, ...], call: Call) -> None:
        self._count += 1
        self._calls[self._count] = name, args, call
        if self._connection is not None and self._connection.client_open:
            self._connection.send((self._count, name, args))
        elif self._connecting is None or self._connecting.done():
            self._connecting = self._process.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            connection = await self._network.connect(self._process)
        except ConnectionError:
            self._fail_calls()
            return
        self._connection = connection
        connection.on_message, connection.on_lost = self._receive, self._fail_calls
        for number, (name, args, _) in self._calls.items():
            connection.send((number, name, args))

    def _receive(self, message: tuple[int, Any]) -> None:
        number, answer = message
        _, _, call = self._calls.pop(number)
        if isinstance(answer, Exception):
            call.fail(answer)
        else:
            call.answer(answer)

    def _fail_calls(self) -> None:
        calls, self._calls = self._calls, {}
        for _, _, call in calls.values():
            call.fail(ActorUnavailableError("the simulated actor is unavailable", b"0" * 16))


class SimulatedRayEngine(RayEngine):
    """The store's engine, with Ray's handle replaced."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__("simulated")
        self._handle = _Handle(network, process)

    def _get_or_create_actor(self) -> Any:
        return self._handle
