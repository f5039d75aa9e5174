"""A Redis server for the simulation, and redis-py's client of it: the store and its engine are the
library's own.

The server does what `aiohooks/stores/redis.lua` does; `equality` compares the two on a real
server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import redis.exceptions as errors

from aiohooks.stores._protocol import Position, Write
from aiohooks.stores.engine import LastAnswer, RunState
from aiohooks.stores.redis import RedisEngine
from tests.fuzz.simulation.network import Connection, Network
from tests.fuzz.simulation.virtual_time import Process


@dataclass
class Keys:
    """The keys of a run, as the script keeps them."""

    position: tuple[Position, str] | None = None  # with the id of the run
    change: int = 0  # the id of the last entry
    state: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def revision(self) -> tuple[object, ...]:
        """What differs after each change."""
        return self.position, self.state.get("version"), len(self.answers)

    def copy(self) -> Keys:
        return Keys(self.position, self.change, dict(self.state), dict(self.answers))


class ScriptedRun:
    """The script: what it does to the keys."""

    def __init__(self) -> None:
        self.keys = Keys()

    def call(self, head: str, *args: Any) -> Any:
        request, known_run_id = head.split(" ", 1)
        keys = self.keys
        self.position, self.run_id = keys.position or (Position(1, 0), "")
        self.term, self.leader = int(keys.state.get("term", 0)), keys.state.get("leader", "")
        if self.run_id != keys.state.get("run", "") or self.run_id != keys.answers.get("run", ""):
            self.run_id = ""
        if request == "write":
            return self._write(known_run_id, *args)
        if request == "swap":
            return self._swap(args)
        version = int(keys.state.get("version", 0))
        data = keys.state.get("data", "")
        return [self.run_id, version, data, *self.position, self.term, self.leader]

    def _write(self, known_run_id: str, argument: str) -> str:
        kind, amount, floor_epoch, floor_step, term, seq, writer = argument.split(" ", 6)
        status, position, answers, state = "lost", self.position, self.keys.answers, RunState()
        if self.run_id and self.run_id == known_run_id:
            state.position, state.term, state.leader = self.position, self.term, self.leader
            if (last := answers.get(f"w {writer}")) is not None:
                last_seq, epoch, step = map(int, last.split())
                state.answers[writer] = LastAnswer(last_seq, Position(epoch, step))
            before, floor = dict(state.answers), Position(int(floor_epoch), int(floor_step))
            known_kind: Any = kind
            write = Write(known_kind, int(amount), floor, int(term), writer, int(seq))
            status, position, self.term = state.apply(write)
            if state.answers != before:
                self._keep(state, writer, f"{seq} {position.epoch} {position.step}")
        return f"{status} {position.epoch} {position.step} {self.term}"

    def _keep(self, state: RunState, writer: str, answer: str) -> None:
        if state.position.epoch > self.position.epoch:
            self.keys.state["version"] = str(int(self.keys.state["version"]) + 1)
        if state.position > self.position:
            self.keys.position = state.position, self.run_id
        self.keys.answers[f"w {writer}"] = answer

    def _swap(self, args: tuple[Any, ...]) -> int:
        found_run_id, after, new_run_id, data, epoch, step, term, leader, notifies = args
        keys, version = self.keys, int(self.keys.state.get("version", 0))
        if self.run_id != found_run_id or version != after:
            return 0
        is_new = new_run_id != self.run_id
        if is_new:
            keys.answers = {"run": new_run_id}
            keys.position, keys.change, keys.state = None, 0, {}
            self.run_id, version = new_run_id, 0
        target = Position(epoch, step)
        moves, self.position = target > self.position, max(target, self.position)
        if moves or is_new:
            keys.position = self.position, self.run_id
        new_version = version + 1
        keys.state |= {
            "run": self.run_id,
            "version": str(new_version),
            "term": str(term),
            "leader": leader,
            "data": data.decode(),
        }
        if notifies:
            keys.change = new_version
        return new_version


@dataclass(eq=False)
class _BlockedRead:
    connection: Connection
    after: tuple[tuple[int, int], ...]
    wake_key: str
    open: bool = True


class RedisServer:
    """One run in a server: the commands that the store uses."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.run = ScriptedRun()
        self._saved: list[tuple[float, Keys]] = []
        """Its append-only file: the keys after each change, with the time."""
        self._wakes: dict[str, int] = {}
        self._reads: list[_BlockedRead] = []
        self._knows_script = False

    def on_message(self, connection: Connection, message: tuple[Any, ...]) -> None:
        command = message[0]
        if command in ("EVALSHA", "EVAL"):
            if command == "EVALSHA" and not self._knows_script:
                connection.reply(errors.NoScriptError("No matching script."))
                return
            self._knows_script = True
            first_argument = 3 + message[2]
            head, *args = message[first_argument:]
            if head.startswith("wake "):
                wake_key = message[first_argument - 1]
                self._wakes[wake_key] = self._wakes.get(wake_key, 0) + 1
                connection.reply(1)
            else:
                before = self.run.keys.revision
                connection.reply(self.run.call(head, *args))
                if self.run.keys.revision != before:
                    self._saved.append((self.network.world.now, self.run.keys.copy()))
            self._answer_reads()
        elif command == "XREAD" and message[1] == "BLOCK":
            keys, after = message[4:7], message[7:10]
            ids = tuple((int(one.partition("-")[0]), int(one.partition("-")[2])) for one in after)
            read = _BlockedRead(connection, ids, keys[2])
            self._reads.append(read)
            self.network.world.after(message[2] / 1000, lambda: self._end_read(read, None))
            self._answer_reads()
        elif command == "XREAD":
            connection.reply(None)
        elif command == "DEL":
            self.lose_data()
            connection.reply(1)
        else:
            raise AssertionError(f"the simulated Redis does not know {command}")

    def _end_read(self, read: _BlockedRead, reply: Any) -> None:
        if read.open:
            read.open = False
            self._reads.remove(read)
            read.connection.reply(reply)

    def _answer_reads(self) -> None:
        run = self.run.keys
        for read in tuple(self._reads):
            found: list[Any] = []
            if run.position is not None and run.position[0] > read.after[0]:
                (epoch, step), run_id = run.position
                found.append(["aiohooks:{default}", [(f"{epoch}-{step}", {"run": run_id})]])
            if (run.change, 0) > read.after[1]:
                found.append(["aiohooks:{default}:changes", [(f"{run.change}-0", {"n": ""})]])
            if (self._wakes.get(read.wake_key, 0), 0) > read.after[2]:
                entry = (f"{self._wakes[read.wake_key]}-0", {"w": ""})
                found.append([read.wake_key, [entry]])
            if found:
                self._end_read(read, found)

    def on_closed(self, connection: Connection) -> None:
        for read in tuple(self._reads):
            if read.connection is connection:
                read.open = False
                self._reads.remove(read)

    # Faults.

    def lose_data(self) -> None:
        """Delete all keys, while the connections stay."""
        self._saved.clear()
        self.run.keys = Keys()

    def restart(self, lost_secs: float) -> None:
        """Start again with what is on the disk, without the changes of the last `lost_secs`."""
        self._wakes.clear()
        self._knows_script = False
        while self._saved and self._saved[-1][0] > self.network.world.now - lost_secs:
            self._saved.pop()
        self.run.keys = self._saved[-1][1].copy() if self._saved else Keys()
        self.network.start_server()


class _Client:
    """What the engine uses of redis-py's client. A call that ends without a reply closes the
    connection, and the next one makes another.
    """

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def execute_command(self, *command: Any) -> Any:
        async with self._lock:
            connection = self._connection
            if connection is None or not connection.client_open:
                self._connection = connection = await self._network.connect(self._process)
            reply = self._process.create_future()

            def receive(message: Any) -> None:
                if not reply.done():
                    reply.set_result(message)

            connection.on_message = receive
            connection.on_lost = lambda: receive(
                errors.ConnectionError("Connection closed by server.")
            )
            connection.send(command)
            try:
                message = await reply
            except BaseException:
                connection.close()
                raise
        if isinstance(message, Exception):
            raise message
        return message

    async def aclose(self) -> None:
        if self._connection is not None:
            self._connection.close()


def simulated_redis_engine(network: Network, process: Process) -> RedisEngine:
    """Return the store's engine, with a client of the simulation."""
    return RedisEngine(client=lambda: _Client(network, process))
