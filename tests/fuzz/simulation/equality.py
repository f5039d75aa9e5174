"""The writings of a run's logic against `RunState`: `python -m tests.fuzz.simulation.equality --count 2000`.

All of them get the same random requests, many of them repeated or out of date, and must give the same answers and states: the
script in a real Redis or Valkey server, the script as the simulation has it, the updates of NATS, and Ray's actor.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import redis

from aiohooks._aio.clock import LoopClock
from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    Expire,
    Fail,
    Join,
    Lead,
    Leave,
    Member,
    Position,
    Request,
    Snapshot,
    Write,
)
from aiohooks.stores._run_state import RunState
from aiohooks.stores.nats._compare_and_set import NO_MESSAGE, CompareAndSet, LatestMessage, decode_message
from aiohooks.stores.ray._actor import StepActor, pack_message, request_kind, unpack_answer, unpack_message, unpack_snapshot
from aiohooks.stores.redis import _script
from tests.fuzz.simulation.redis_engine import ScriptedRun
from tests.support.needs import find_program
from tests.support.redis_servers import KINDS
from tests.support.store_servers import PROGRAMS, running

_LENGTH = 30


class Writing(Protocol):
    """One implementation of a run."""

    async def apply(self, request: Request) -> Answer: ...

    async def snapshot(self) -> Snapshot: ...


class ByRedis:
    """The script, called as the store calls it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        """`call` gets the request, the id of the known run, and the arguments."""
        self._call = call
        self._swap(_script.parse_read(call("read", "id")), RunState())

    async def apply(self, request: Request) -> Answer:
        if isinstance(request, Write):
            parsed = _script.parse_answer(self._call("write", "id", *_script.write_arguments(request)))
            assert parsed is not None
            return parsed[0]
        found = _script.parse_read(self._call("read", "id"))
        state = found.state.copy()
        answer = state.apply(request)
        assert self._swap(found, state)
        return answer

    async def snapshot(self) -> Snapshot:
        return _script.parse_read(self._call("read", "id")).state.snapshot()

    def recent(self) -> dict[str, tuple[int, Position]]:
        """Return the answers to the last writers."""
        lines = _script.parse_read(self._call("read", "id")).recent.splitlines()
        parts = (line.rsplit(" ", 3) for line in lines)
        return {writer: (int(seq), Position(int(epoch), int(step))) for writer, seq, epoch, step in parts}

    def _swap(self, found: _script.FoundRun, state: RunState) -> int:
        return int(self._call("swap", found.run_id, *_script.swap_arguments(found, "id", state, 0, "")))


class ByNats:
    """The updates of NATS, with a subject that is a variable."""

    def __init__(self) -> None:
        self._latest = NO_MESSAGE
        self._run = CompareAndSet(
            LoopClock(),
            fetch=self._fetch,
            publish=self._publish,
            on_latest=lambda latest, before: None,
            on_data_lost=lambda: None,
            recover=lambda state, backup: None,
        )

    async def _fetch(self, secs: float) -> LatestMessage:
        return self._latest

    async def _publish(self, data: bytes, after: int) -> int | None:
        assert after == self._latest.seq
        self._latest = decode_message(after + 1, data)
        return self._latest.seq

    async def apply(self, request: Request) -> Answer:
        return await self._run.update(lambda state: state.apply(request), 1.0)

    async def snapshot(self) -> Snapshot:
        return self._latest.state.snapshot()


class ByRay:
    """Ray's actor, in this process."""

    def __init__(self) -> None:
        self._actor = StepActor()

    async def apply(self, request: Request) -> Answer:
        reply = await self._actor.apply(pack_message(self._actor.incarnation, 0, request_kind(request), request))
        return unpack_answer(unpack_message(reply)[1])

    async def snapshot(self) -> Snapshot:
        reply = await self._actor.read(pack_message(self._actor.incarnation, 0))
        return unpack_snapshot(unpack_message(reply)[1])._replace(run_id="")


def random_requests(chance: random.Random, state: RunState) -> Iterator[Request]:
    """Yield requests; `state` is the run as it is when each one is asked for."""
    processes = ("a:1:x", "b 2 y", "ünï:3:z")
    seqs = dict.fromkeys((*processes, *(f"{process}/" for process in processes)), 0)
    sent: deque[Request] = deque(maxlen=8)
    for _ in range(_LENGTH):
        process = chance.choice(processes)
        seqs[process] += 1
        step = chance.choice((0, 1, 2, 7, 40, MAX_STEP - 1, MAX_STEP) if chance.random() < 0.1 else (0, 1, 2, 3))
        term = chance.choice((0, state.term, max(0, state.term - 1), state.term + 1))
        member = Member(f"{process}/{chance.randrange(3)}", chance.choice(("trainer", "ünï\n", '"\\ 1 2 3')), 2.5, step)
        exit_writer = f"{process}/"
        seqs[exit_writer] += 1
        floor = chance.choice((Position(1, 0), state.position, Position(state.position.epoch, step), Position(2, step)))
        request: Request = chance.choice(
            (
                Write("advance", max(1, step), floor, term, process, seqs[process]),
                Write("advance", 1, floor, 0, process, seqs[process]),
                Write(chance.choice(("raise", "reset")), step, floor, term, process, seqs[process]),
                Join(member),
                Join(member._replace(term=term, ready=chance.random() < 0.5)),
                Lead(member),
                Leave(
                    member.id, chance.choice(("", member.name)), step, chance.choice(("", "E: x")), exit_writer, seqs[exit_writer]
                ),
                Fail("E: y", exit_writer, seqs[exit_writer]),
                Expire(chance.choice([*state.members, member.id]), chance.randrange(3)),
            )
        )
        if sent and chance.random() < 0.25:
            request = chance.choice(sent)
        sent.append(request)
        yield request


async def difference(seed: int, writings: dict[str, Writing]) -> str:
    """Send requests to `RunState` and to each writing; return the first difference, or nothing."""
    state = RunState()
    for number, request in enumerate(random_requests(random.Random(seed), state)):
        answer = state.apply(request)
        for name, writing in writings.items():
            # The script does not say the revision.
            if (found := await writing.apply(request))[:3] != answer[:3]:
                return f"seed {seed}, {name}, request {number}, {request}: {found} instead of {answer}"
            if (shown := await writing.snapshot()) != state.snapshot():
                return f"seed {seed}, {name}, request {number}, {request}: {shown} instead of {state.snapshot()}"
            recent = writing.recent() if isinstance(writing, ByRedis) else {}
            if any(recent[writer] > state.answers[writer] for writer in recent):
                return f"seed {seed}, {name}, request {number}, {request}: the recent answers {recent}"
    return ""


def _in_server(client: redis.Redis) -> Writing:
    keys = _script.Keys("equality").all
    client.flushall()
    return ByRedis(
        lambda request, known, *arguments: client.eval(_script.SCRIPT, len(keys), *keys, request, "", known, *arguments)
    )


def _simulated() -> Writing:
    run = ScriptedRun()
    return ByRedis(lambda request, known, *arguments: run.call(request, known, *map(str, arguments)))


def compare(seeds: Sequence[int], client: redis.Redis | None) -> list[str]:
    """Return the differences."""

    async def compare_all() -> list[str]:
        found: list[Awaitable[str]] = []
        for seed in seeds:
            writings: dict[str, Writing] = {"simulated script": _simulated(), "nats": ByNats(), "ray": ByRay()}
            if client is not None:
                writings["script"] = _in_server(client)
            found.append(difference(seed, writings))
        return [text for each in found if (text := await each)]

    return asyncio.run(compare_all())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.simulation.equality", description=__doc__)
    parser.add_argument("--count", type=int, default=2_000, help="sequences of requests (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.count)
    kinds = [kind for kind in KINDS if find_program(PROGRAMS[kind])]
    with tempfile.TemporaryDirectory() as directory:
        for kind in kinds:
            with running(kind, Path(directory), keeps=False) as server, redis.Redis(port=server.port) as client:
                found = [text for seed in seeds for text in compare([seed], client)]
            print(*found, f"{kind}, and the others: {options.count:,} sequences, {len(found)} differences", sep="\n")
            if found:
                return 1
    return int(not kinds)


if __name__ == "__main__":
    sys.exit(main())
