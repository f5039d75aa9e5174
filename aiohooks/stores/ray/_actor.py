"""The actor that keeps a run on a Ray cluster, and its messages.

All of it is plain Python that runs without Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from typing import Any, NamedTuple, get_args

from aiohooks._aio.clock import wake
from aiohooks.stores._protocol import (
    Answer,
    Failure,
    Join,
    LastExit,
    Lead,
    Mark,
    Member,
    Position,
    Request,
    Snapshot,
    Write,
)
from aiohooks.stores._run_state import RunState

_REQUESTS: tuple[type[Request], ...] = get_args(Request)


# Messages: JSON, in which tuples become lists.


def pack_message(*fields: Any) -> bytes:
    """Encode a message."""
    return json.dumps(fields, separators=(",", ":"), check_circular=False).encode()


def unpack_message(message: bytes) -> list[Any]:
    """Decode a message."""
    fields: list[Any] = json.loads(message)
    return fields


def request_kind(request: Request) -> int:
    """Return the number of the request's type, which its fields do not say."""
    return _REQUESTS.index(type(request))


def unpack_request(kind: int, fields: Any) -> Request:
    """Restore a request of this kind from a message."""
    request: Any = _REQUESTS[kind]
    if request is Write:
        name, amount, floor, term, writer, seq = fields
        return Write(name, amount, Position(*floor), term, writer, seq)
    received: Request = request(Member(*fields[0])) if request in (Join, Lead) else request(*fields)
    return received


def unpack_answer(fields: Any) -> Answer:
    """Restore an answer from a message."""
    status, position, term = fields
    return Answer(status, Position(*position), term)


def unpack_snapshot(fields: Any) -> Snapshot:
    """Restore a snapshot from a message."""
    position, term, leader, ready, revision, members, last_exit, failure, run_id = fields
    return Snapshot(
        Position(*position),
        term,
        leader,
        ready,
        revision,
        tuple(Member(*member) for member in members),
        None if last_exit is None else LastExit(*last_exit),
        None if failure is None else Failure(failure[0], Position(*failure[1])),
        run_id,
    )


# The actor.


class LongPoll(NamedTuple):
    """What a process waits for, and what it knows."""

    process: str
    number: int
    """Counts the process's polls; the newest one replaces the others."""
    threshold: int | None
    """The lowest step that the process waits for; None: no step."""
    epoch: int
    revision: int
    secs: float
    """After how long it is answered in any case."""


class StepActor:
    """Keeps one run in memory: its state, and one long poll of each process.

    A reply is its kind ("snapshot", "position", "answer") and its content.

    Ray starts the actor again when its process or its node dies; it has lost everything then. Each
    call but `connect` has the `incarnation` that the process knows, and an empty reply asks the
    process to connect again, which then sends how far it knows the lost run to have come.
    """

    def __init__(self) -> None:
        self.incarnation: str = secrets.token_hex(8)
        """A different one after each start."""
        self.polls: dict[str, tuple[LongPoll, asyncio.Future[None]]] = {}
        """By process, each with the future that answers it."""
        self._state = RunState()
        self._calls = 0

    # Remote calls.

    async def connect(self, message: bytes) -> bytes:
        """Reply with the incarnation and a snapshot.

        A process that knows an earlier incarnation says how far the run had come.
        """
        known_incarnation, (position, term) = unpack_message(message)
        if known_incarnation not in ("", self.incarnation):
            self._state.succeed(Mark(Position(*position), term))
            self._answer_satisfied()
        return pack_message(self.incarnation, "snapshot", self._snapshot())

    async def apply(self, message: bytes) -> bytes:
        self._calls += 1
        incarnation, kind, fields = unpack_message(message)
        if incarnation != self.incarnation:
            return b""
        answer = self._state.apply(unpack_request(kind, fields))
        if self._answer_satisfied():
            await asyncio.sleep(0)  # the waiters are answered before the writer
        return pack_message("answer", answer)

    async def read(self, message: bytes) -> bytes:
        self._calls += 1
        if unpack_message(message) != [self.incarnation]:
            return b""
        return pack_message("snapshot", self._snapshot())

    async def long_poll(self, message: bytes) -> bytes:
        """Reply when the poll is satisfied, its time is up, or the process has sent a newer one."""
        self._calls += 1
        incarnation, fields = unpack_message(message)
        if incarnation != self.incarnation:
            return b""
        poll = LongPoll(*fields)
        if not self._satisfies(poll) and (waiter := self._park(poll)) is not None:
            timer = asyncio.get_running_loop().call_later(poll.secs, wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                parked = self.polls.get(poll.process)
                if parked is not None and parked[1] is waiter:
                    del self.polls[poll.process]
        state = self._state
        if state.revision == poll.revision:
            return pack_message("position", state.position)
        return pack_message("snapshot", self._snapshot())

    async def leave(self, process: str) -> None:
        """End the poll of a process that is closing its store."""
        if process in self.polls:
            wake(self.polls[process][1])

    async def statistics(self) -> dict[str, int]:
        """Return the id of the actor's process, the number of parked polls, of calls so far, and of
        members.
        """
        return {
            "pid": os.getpid(),
            "waiting": len(self.polls),
            "calls": self._calls,
            "members": len(self._state.members),
        }

    # Snapshots and polls.

    def _snapshot(self) -> Snapshot:
        return self._state.snapshot(self.incarnation)

    def _park(self, poll: LongPoll) -> asyncio.Future[None] | None:
        """Make this the poll of its process, and return what answers it; None if the process has
        sent a newer one already.
        """
        earlier = self.polls.get(poll.process)
        if earlier is not None:
            if earlier[0].number > poll.number:
                return None
            wake(earlier[1])
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.polls[poll.process] = poll, waiter
        return waiter

    def _satisfies(self, poll: LongPoll) -> bool:
        state = self._state
        epoch, step = state.position
        return (
            epoch != poll.epoch
            or state.revision != poll.revision
            or (poll.threshold is not None and step >= poll.threshold)
        )

    def _answer_satisfied(self) -> bool:
        """Answer the polls that are satisfied now; return whether there was one. There is one poll
        of each process.
        """
        satisfied = [
            waiter
            for poll, waiter in self.polls.values()
            if not waiter.done() and self._satisfies(poll)
        ]
        for waiter in satisfied:
            wake(waiter)
        return bool(satisfied)
