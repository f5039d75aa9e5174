"""The actor that keeps a run on a Ray cluster, its messages, and the counter that survives the loss
of its memory.

All of it is plain Python that runs without Ray.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

from aiohooks._aio.clock import wake
from aiohooks.stores._protocol import (
    Answer,
    Fail,
    Failure,
    Join,
    LastExit,
    Lead,
    Leave,
    Member,
    Position,
    Request,
    Snapshot,
    Write,
)
from aiohooks.stores._run_state import RunState

_REQUESTS: tuple[type[Request], ...] = get_args(Request)
_MAX_WRITERS = 4096


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


# The counter.


class WriterTotal(NamedTuple):
    """What one writer has added."""

    writer: str
    seq: int
    """The number of its last write."""
    total: int
    """All that it has added in this epoch."""
    step: int
    """The step that its last write led to."""


class CounterDelta(NamedTuple):
    """A counter, or what has changed in one, as it is sent."""

    epoch: int
    compactions: int
    """How often the totals of the longest silent writers have been added to `base`."""
    base: int
    totals: tuple[WriterTotal, ...]


class GCounter:
    """The step of a run as a grow-only counter: a base, and what each writer has added.

    Each process keeps a copy of what it has received. After a restart of the actor, which loses its
    memory, the processes send their copies, in any order and at any time, and `merge` keeps the
    highest total of each writer. So no acknowledged write is lost, and none that is sent again
    counts twice. Steps alone could not do that: of two of them it is not known whether they count
    the same writes.
    """

    __slots__ = ("_compactions", "_totals", "base", "epoch", "total", "version")

    def __init__(self) -> None:
        self.epoch = 1
        self.base = 0
        self.total = 0
        """The sum of all writers' totals."""
        self.version = 0
        """Incremented by each change."""
        self._compactions = 0
        # In the order of their last change, each with the version of that.
        self._totals: dict[str, tuple[int, WriterTotal]] = {}

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.base + self.total)

    def add(self, writer: str, seq: int, position: Position) -> None:
        """Record that a writer's write has led to `position`."""
        if position.epoch != self.epoch:
            self.start_epoch(position.epoch, position.step)
        known = self._totals.get(writer)
        total = position.step - self.position.step + (0 if known is None else known[1].total)
        self._put(WriterTotal(writer, seq, total, position.step))
        if len(self._totals) > _MAX_WRITERS:
            self._compact()

    def delta_since(self, version: int) -> CounterDelta:
        """Return what has changed since a version; 0 for everything."""
        changed: list[WriterTotal] = []
        for changed_in, entry in reversed(self._totals.values()):
            if changed_in <= version:
                break
            changed.append(entry)
        changed.reverse()
        return CounterDelta(self.epoch, self._compactions, self.base, tuple(changed))

    def merge(self, delta: CounterDelta) -> list[WriterTotal]:
        """Merge what another copy knows; return the entries that were new here."""
        if delta.epoch > self.epoch:
            self.start_epoch(delta.epoch, delta.base)
        same_epoch = delta.epoch == self.epoch
        if same_epoch and delta.compactions > self._compactions:
            # A compaction changes every entry, so the delta is complete: writers that it lacks are
            # in its base.
            kept = {entry.writer for entry in delta.totals}
            self._remove(writer for writer in tuple(self._totals) if writer not in kept)
            self._compactions, self.base = delta.compactions, delta.base
        elif same_epoch and delta.compactions == self._compactions:
            self.base = max(self.base, delta.base)
        new: list[WriterTotal] = []
        for fields in delta.totals:
            entry = WriterTotal(*fields)
            known = self._totals.get(entry.writer)
            if known is not None and known[1].seq >= entry.seq:
                continue
            if same_epoch and delta.compactions < self._compactions and known is None:
                continue  # in the base already
            if not same_epoch:
                entry = entry._replace(total=0 if known is None else known[1].total)
            self._put(entry)
            new.append(entry)
        return new

    def start_epoch(self, epoch: int, base: int) -> None:
        """Start a later epoch. Writes of earlier ones no longer count, but a repeated one must
        still be known.
        """
        if epoch == self.epoch:
            return
        self.epoch, self.base, self.total, self._compactions = epoch, base, 0, 0
        for writer, (version, entry) in self._totals.items():
            self._totals[writer] = version, entry._replace(total=0)

    def _put(self, entry: WriterTotal) -> None:
        known = self._totals.pop(entry.writer, None)
        self.version += 1
        self.total += entry.total - (0 if known is None else known[1].total)
        self._totals[entry.writer] = self.version, entry

    def _remove(self, writers: Iterable[str]) -> None:
        for writer in writers:
            self.total -= self._totals.pop(writer)[1].total

    def _compact(self) -> None:
        step = self.position.step
        self._remove(tuple(self._totals)[: _MAX_WRITERS // 2])
        self.base = step - self.total
        self._compactions += 1
        for _, entry in tuple(self._totals.values()):
            self._put(entry)  # the next delta has all of them


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

    A reply is its kind ("snapshot", "position", "answer"), its content, the version of the counter,
    and the counter's delta since the version that came with the call.

    Ray starts the actor again when its process or its node dies; it has lost everything then. Each
    call but `connect` has the `incarnation` that the process knows, and an empty reply asks the
    process to connect again. Processes send what they know when they connect, and repeat their
    unanswered requests.
    """

    def __init__(self) -> None:
        self.incarnation: str = secrets.token_hex(8)
        """A different one after each start."""
        self.polls: dict[str, tuple[LongPoll, asyncio.Future[None]]] = {}
        """By process, each with the future that answers it."""
        self._state = RunState()
        self._counter = GCounter()
        self._calls = 0

    # Remote calls.

    async def connect(self, message: bytes) -> bytes:
        """Merge what a process knows, if it knows an earlier incarnation. Reply with the
        incarnation and a snapshot.
        """
        process, known_incarnation, known_snapshot, known_counter = unpack_message(message)
        state, delta = self._state, CounterDelta(*known_counter)
        if known_incarnation not in ("", self.incarnation):
            known = unpack_snapshot(known_snapshot)
            # since the actor started: what was counted before counts no more, its writes are known
            # all the same
            if state.resets:
                new = self._counter.merge(delta._replace(epoch=0))
            else:
                new = self._counter.merge(delta)
                known = known._replace(position=self._counter.position)
            state.recover(
                process,
                known,
                {entry.writer: (entry.seq, Position(delta.epoch, entry.step)) for entry in new},
            )
            self._counter.start_epoch(*state.position)
            self._answer_satisfied()
        return pack_message(self.incarnation, *self._reply("snapshot", self._snapshot(), 0))

    async def apply(self, message: bytes) -> bytes:
        self._calls += 1
        incarnation, since, kind, fields = unpack_message(message)
        if incarnation != self.incarnation:
            return b""
        state, request = self._state, unpack_request(kind, fields)
        if isinstance(request, (Write, Leave, Fail)):
            previous = state.answers.get(request.writer)
            answer = state.apply(request)
            if state.answers.get(request.writer) is not previous:
                self._counter.add(request.writer, request.seq, state.position)
        else:
            answer = state.apply(request)
        if self._answer_satisfied():
            await asyncio.sleep(0)  # the waiters are answered before the writer
        return pack_message(*self._reply("answer", answer, since))

    async def read(self, message: bytes) -> bytes:
        self._calls += 1
        incarnation, since = unpack_message(message)
        if incarnation != self.incarnation:
            return b""
        return pack_message(*self._reply("snapshot", self._snapshot(), since))

    async def long_poll(self, message: bytes) -> bytes:
        """Reply when the poll is satisfied, its time is up, or the process has sent a newer one."""
        self._calls += 1
        incarnation, since, fields = unpack_message(message)
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
            return pack_message(*self._reply("position", state.position, since))
        return pack_message(*self._reply("snapshot", self._snapshot(), since))

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

    def _reply(self, kind: str, content: Any, since: int) -> tuple[Any, ...]:
        return kind, content, self._counter.version, self._counter.delta_since(since)

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
