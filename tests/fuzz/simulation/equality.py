"""Redis's script against `RunState`: `python -m tests.fuzz.simulation.equality --count 2000`.

The engine of Ray is `RunState` itself, and that of Redis has its writes in Lua. The script in a
real server, and as the simulation has it, get the same random requests as a `RunState`, many of
them repeated or out of date, and must give the same answers and states.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from aiohooks.stores import redis as engine
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    Expire,
    Join,
    Lead,
    Leave,
    Member,
    Position,
    Request,
    Write,
)
from aiohooks.stores.engine import RunState
from tests.fuzz._harness import command
from tests.fuzz.simulation.redis_engine import ScriptedRun
from tests.support.needs import find_program
from tests.support.redis_servers import KINDS
from tests.support.store_servers import PROGRAMS, running

_LENGTH = 30


class Script:
    """The script, called as the store calls it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        """`call` gets the request and its arguments."""
        self._call = call
        self.swap(self.read(), RunState())

    def apply(self, request: Request) -> Answer:
        """Return the answer to a request."""
        if isinstance(request, Write):
            return engine.parse_answer(self._call("write", engine.write_argument(request)))
        found = self.read()
        state = copy.deepcopy(found.state)
        answer = state.apply(request)
        assert self.swap(found, state)
        return answer

    def read(self) -> engine.FoundRun:
        """Return the state of the run."""
        return engine.parse_read(self._call("read"))

    def swap(self, found: engine.FoundRun, state: RunState, run_id: str = "id") -> int:
        """Replace the state; return the new version, or 0."""
        return int(self._call("swap", *engine.swap_arguments(found, run_id, state)))


class ServerScript(Script):
    """The script in a server, which has nothing but this run."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = engine.run_keys("a {strange} name%", "process")
        client.flushall()
        super().__init__(self.call)

    def call(self, request: str, *arguments: Any, run_id: str = "id") -> Any:
        """Call it for the run of this identity."""
        head = f"{request} {run_id}"
        return self.client.eval(engine.SCRIPT, len(self.keys), *self.keys, head, *arguments)


def random_requests(chance: random.Random, state: RunState) -> Iterator[Request]:
    """Yield requests; `state` is the run as it is when each one is asked for."""
    processes = ("a:1:x", "b 2 y", "ünï:3:z")
    seqs = dict.fromkeys((*processes, *(f"{process}/" for process in processes)), 0)
    sent: deque[Request] = deque(maxlen=8)
    for _ in range(_LENGTH):
        process = chance.choice(processes)
        seqs[process] += 1
        step = chance.choice(
            (0, 1, 2, 7, 40, MAX_STEP - 1, MAX_STEP) if chance.random() < 0.1 else (0, 1, 2, 3)
        )
        term = chance.choice((0, state.term, max(0, state.term - 1), state.term + 1))
        member = Member(
            f"{process}/{chance.randrange(3)}",
            chance.choice(("trainer", "ünï\n", '"\\ 1 2 3')),
            2.5,
            step,
        )
        exit_writer = f"{process}/"
        seqs[exit_writer] += 1
        floor = chance.choice(
            (
                Position(1, 0),
                state.position,
                Position(state.position.epoch, step),
                Position(2, step),
            )
        )
        request: Request = chance.choice(
            (
                Write("advance", max(1, step), floor, term, process, seqs[process]),
                Write("advance", 1, floor, 0, process, seqs[process]),
                Write(chance.choice(("raise", "reset")), step, floor, term, process, seqs[process]),
                Join(member),
                Join(member._replace(term=term, ready=chance.random() < 0.5)),
                Lead(member),
                Leave(
                    member.id,
                    chance.choice(("", member.name)),
                    step,
                    chance.choice(("", "E: x")),
                    exit_writer,
                    seqs[exit_writer],
                ),
                Expire(chance.choice([*state.members, member.id]), chance.randrange(3)),
            )
        )
        if sent and chance.random() < 0.25:
            request = chance.choice(sent)
        sent.append(request)
        yield request


def difference(seed: int, scripts: dict[str, Script]) -> str:
    """Send requests to `RunState` and to each script; return the first difference, or nothing."""
    state = RunState()
    for number, request in enumerate(random_requests(random.Random(seed), state)):
        answer = state.apply(request)
        for name, script in scripts.items():
            where = f"seed {seed}, {name}, request {number}, {request}"
            if (found := script.apply(request)) != answer:
                return f"{where}: {found} instead of {answer}"
            if (shown := script.read().state.snapshot()) != state.snapshot():
                return f"{where}: {shown} instead of {state.snapshot()}"
    return ""


def _simulated() -> Script:
    run = ScriptedRun()
    return Script(lambda request, *arguments: run.call(f"{request} id", *arguments))


def compare(seeds: Sequence[int], client: redis.Redis | None) -> list[str]:
    """Return the differences of the script of the simulation, and of that in a server."""
    found = [
        difference(
            seed,
            {
                "simulated": _simulated(),
                **({} if client is None else {"in the server": ServerScript(client)}),
            },
        )
        for seed in seeds
    ]
    return [text for text in found if text]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = command("simulation.equality", __doc__, count=2_000).parse_args(arguments)
    seeds = range(options.seed, options.seed + options.count)
    kinds = [kind for kind in KINDS if find_program(PROGRAMS[kind])]
    with tempfile.TemporaryDirectory() as directory:
        for kind in kinds:
            with (
                running(kind, Path(directory), keeps=False) as server,
                redis.Redis(port=server.port, decode_responses=True) as client,
            ):
                found = compare(seeds, client)
            print(
                *found,
                f"{kind}, and the simulated script: {options.count:,} sequences, {len(found)}"
                " differences",
                sep="\n",
            )
            if found:
                return 1
    return int(not kinds)


if __name__ == "__main__":
    sys.exit(main())
