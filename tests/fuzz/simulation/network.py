"""The network between processes and one server: connections whose messages arrive late, in order,
or not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tests.fuzz.simulation.virtual_time import Process, World


class Server(Protocol):
    """What is at the other end of all connections."""

    def on_message(self, connection: Connection, message: Any) -> None: ...

    def on_closed(self, connection: Connection) -> None: ...


class Connection:
    """One connection of a process to the server. Messages of one direction stay in order; a
    connection that ends loses some.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.network = network
        self.number = network.count
        self.on_message: Callable[[Any], None] = lambda message: None
        self.on_lost: Callable[[], None] = lambda: None
        self.client_open = self.server_open = True
        self._answers_end = False  # an answer was lost: none that was sent after it arrives
        self._last_arrival = {True: 0.0, False: 0.0}
        self._under_way: dict[bool, deque[Callable[[], None]]] = {True: deque(), False: deque()}

    # The process.

    def send(self, message: Any) -> None:
        if self.client_open and self.process.alive:
            self._carry(True, lambda: self._arrive_at_server(message))

    def close(self) -> None:
        """Close it; what was sent may still arrive, also after what is sent on a later
        connection.
        """
        if self.client_open:
            self.client_open = False
            self._carry(True, self._close_server_end)

    # The server.

    def reply(self, message: Any) -> None:
        if not self.server_open or self._answers_end:
            return
        if self.network.loses_answer(self.process):
            self._answers_end = True
            self.network.world.after(0.0, self.drop)
        else:
            self._carry(False, lambda: self._arrive_at_client(message))

    def drop(self) -> None:
        """End it from the server, or in the network: the process notices it later, if at all."""
        if self.server_open:
            self._close_server_end()
        self._carry(False, self._lose)

    # In between.

    def _carry(self, to_server: bool, arrive: Callable[[], None]) -> None:
        world = self.network.world
        time = max(world.now + self.network.delay(self.process), self._last_arrival[to_server])
        self._last_arrival[to_server] = time
        self._under_way[to_server].append(arrive)
        world.at(time, lambda: self._pass(to_server))

    def _pass(self, to_server: bool) -> None:
        """Let the next message arrive, unless the way is blocked: then later, as TCP sends it
        again.
        """
        network = self.network
        blocked_until = network.blocked_until(self.process, to_server)
        if blocked_until <= network.world.now:
            self._under_way[to_server].popleft()()
        else:
            network.world.at(blocked_until, lambda: self._pass(to_server))

    def _arrive_at_server(self, message: Any) -> None:
        if self.server_open and self.network.is_up:
            self.network.world.trace(self.process, "->", self.number, content=message)
            self.network.server.on_message(self, message)
        elif self.client_open:
            self._carry(False, self._lose)  # a reset

    def _arrive_at_client(self, message: Any) -> None:
        if self.client_open:
            self.network.world.trace(self.process, "<-", self.number, content=message)
            self.process.deliver(self._on_message, message)

    def _on_message(self, message: Any) -> None:
        if self.client_open:
            self.on_message(message)

    def _close_server_end(self) -> None:
        if self.server_open:
            self.server_open = False
            self.network.connections.pop(self, None)
            self.network.server.on_closed(self)

    def _lose(self) -> None:
        if self.client_open:
            self.network.world.trace(self.process, "lost", self.number)
            self.process.deliver(self._on_lost)

    def _on_lost(self) -> None:
        if self.client_open:
            self.client_open = False
            self.on_lost()


class Network:
    """All connections to the server, and the faults on their way."""

    def __init__(self, world: World, mean_delay_secs: float) -> None:
        self.world = world
        self.server: Server
        self.is_up = True
        self.count = 0
        self.connections: dict[Connection, None] = {}
        """Those that the server has."""
        self.mean_delay_secs = mean_delay_secs
        self._paused_until = 0.0
        self._slow_until: dict[Process, tuple[float, float]] = {}
        self._blocked: dict[tuple[Process, bool], float] = {}
        self._answers_to_lose: dict[Process, tuple[int, Callable[[], None]]] = {}

    def delay(self, process: Process) -> float:
        until, factor = self._slow_until.get(process, (0.0, 1.0))
        return self.world.chance.expovariate(1 / self.mean_delay_secs) * (
            factor if self.world.now < until else 1.0
        )

    def blocked_until(self, process: Process, to_server: bool) -> float:
        blocked = self._blocked.get((process, to_server), 0.0)
        return max(blocked, self._paused_until) if to_server else blocked

    async def connect(self, process: Process) -> Connection:
        """Connect a process; it may wait for long.

        Raises:
            ConnectionError: nothing listens there.
        """
        answered = process.create_future()

        def arrive() -> None:
            refused = not self.is_up
            self.world.after(self.delay(process), lambda: answer(refused))

        def answer(refused: bool) -> None:
            if self.world.now < (until := self.blocked_until(process, False)):
                self.world.at(until, lambda: answer(refused))
            else:
                process.deliver(lambda: answered.done() or answered.set_result(refused))

        def begin() -> None:
            blocked = self._blocked.get((process, True), 0.0)
            if self.world.now < blocked:
                self.world.at(blocked, begin)
            else:
                arrive()

        self.world.after(self.delay(process), begin)
        if await answered:
            raise ConnectionRefusedError("Connection refused")
        self.count += 1
        connection = Connection(self, process)
        self.connections[connection] = None
        self.world.trace(process, "connected", self.count)
        return connection

    # Faults.

    def lose_answers(self, process: Process, count: int, then: Callable[[], None]) -> None:
        """End the connection of the next answers to a process, instead of delivering them, and call
        `then` each time.
        """
        self._answers_to_lose[process] = count, then

    def loses_answer(self, process: Process) -> bool:
        count, then = self._answers_to_lose.pop(process, (0, lambda: None))
        if count > 1:
            self._answers_to_lose[process] = count - 1, then
        if count:
            then()
        return count > 0

    def block(
        self, process: Process, secs: float, *, to_server: bool = True, to_process: bool = True
    ) -> None:
        """Let nothing pass to or from a process for so long."""
        for direction, wanted in ((True, to_server), (False, to_process)):
            if wanted:
                self._blocked[process, direction] = self.world.now + secs

    def slow_down(self, process: Process, secs: float, factor: float) -> None:
        self._slow_until[process] = self.world.now + secs, factor

    def cut(self, process: Process) -> None:
        """End all connections of a process."""
        for connection in tuple(self.connections):
            if connection.process is process:
                connection.drop()

    def hang_up(self, process: Process) -> None:
        """Close all connections of a process that has died."""
        for connection in tuple(self.connections):
            if connection.process is process:
                connection.close()

    def pause_server(self, secs: float) -> None:
        """Have the server take nothing for so long; its host still accepts connections."""
        self._paused_until = max(self._paused_until, self.world.now + secs)

    def stop_server(self) -> None:
        """End the server's process, and with it all connections."""
        self.is_up = False
        for connection in tuple(self.connections):
            connection.drop()

    def start_server(self) -> None:
        self.is_up = True
