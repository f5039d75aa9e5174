"""The actor that keeps a run on a Ray cluster; a plain object, which knows nothing of Ray."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from typing import Any, NamedTuple

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
from aiohooks.stores.ray._counter import Ledger, Pages

_REQUESTS: tuple[type[Request], ...] = (Write, Join, Leave, Lead, Fail)


def packed(*message: Any) -> bytes:
    """A message; names of tuples are left out."""
    return json.dumps(message, separators=(",", ":"), check_circular=False).encode()


def unpacked(message: bytes) -> list[Any]:
    """What was packed, with lists in place of tuples."""
    fields: list[Any] = json.loads(message)
    return fields


def kind_of(request: Request) -> int:
    """The kind of a request, which its fields do not say."""
    return _REQUESTS.index(type(request))


def request_of(kind: int, fields: Any) -> Request:
    """A request, unpacked."""
    if _REQUESTS[kind] is Write:
        name, amount, floor, term, writer, seq = fields
        return Write(name, amount, Position(*floor), term, writer, seq)
    if _REQUESTS[kind] is Join:
        return Join(Member(*fields[0]))
    if _REQUESTS[kind] is Lead:
        return Lead(Member(*fields[0]))
    return Leave(*fields) if _REQUESTS[kind] is Leave else Fail(*fields)


def answer_of(fields: Any) -> Answer:
    """An answer, unpacked."""
    status, position, term, revision = fields
    return Answer(status, Position(*position), term, revision)


def snapshot_of(fields: Any) -> Snapshot:
    """A snapshot, unpacked."""
    position, term, ready, revision, members, last_exit, failure, expires_secs = fields
    return Snapshot(
        Position(*position),
        term,
        ready,
        revision,
        tuple(Member(*member) for member in members),
        None if last_exit is None else LastExit(*last_exit),
        None if failure is None else Failure(failure[0], Position(*failure[1])),
        expires_secs,
    )


_STOPPED_SECS = 0.05
"""A timer that is later than this was held up: nothing could be heard meanwhile, no renewal either."""


class Wish(NamedTuple):
    """What a process waits for, and what it knows."""

    process: str
    number: int
    """Counts the wishes of the process; the newest one is in force."""
    due: int | None
    """The lowest step that it waits for; None: no step."""
    epoch: int
    revision: int
    secs: float
    """After how long it wants to hear something in any case."""


class Watch:
    """A wish that is waiting to be granted."""

    __slots__ = ("granted", "wish")

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def grant(self) -> None:
        """Lets it go."""
        if not self.granted.done():
            self.granted.set_result(None)


class StepKeeper:
    """Keeps one run in memory: its state, the leases of its members, and one waiting call of each process.

    An answer is its kind ("snapshot", "position", "answer"), its content, the version of the ledger, and what is new in
    that since the version that came with the call.

    Ray starts it again when its process or its node dies, and it has lost everything then. It answers nothing but `hello`
    to those who knew its predecessor: they tell it what they know, and what they are repeats itself from there.
    """

    def __init__(self) -> None:
        """Knows nothing."""
        self.life: str = secrets.token_hex(8)
        """Another one after each start."""
        self.watches: dict[str, Watch] = {}
        """By process."""
        self._state = RunState()
        self._ledger = Ledger()
        self._leases: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due: float = 0.0
        self._lowest: float = math.inf
        """No watch is due below this step."""
        self._hearsay: set[str] = set()
        """Members that others have told of, and that have not come back themselves."""
        self._calls = 0

    # Calls.

    async def hello(self, message: bytes) -> bytes:
        """A process has come, or has come back, and says what it knows: its snapshot, and its ledger.

        The answer begins with the life that this one is in, which comes first in every other call.
        """
        known, known_pages = unpacked(message)
        state, snapshot, pages = self._state, snapshot_of(known), Pages(*known_pages)
        for entry in self._ledger.merge(pages):
            state.answers[entry.writer] = entry.seq, Position(pages.epoch, entry.step)
        state.position = max(state.position, self._ledger.position)
        self._remember(snapshot)
        self._tell()
        return packed(self.life, *self._reply("snapshot", state.snapshot(), 0))

    async def apply(self, message: bytes) -> bytes:
        """Does what is asked for; an empty answer is for those who must say `hello` first."""
        self._calls += 1
        life, since, kind, fields = unpacked(message)
        if life != self.life:
            return b""
        state, request = self._state, request_of(kind, fields)
        position, revision = state.position, state.revision
        if isinstance(request, (Join, Lead)):
            answer = state.apply(request)
            self._hearsay.discard(request.member.id)
            self._renew(request.member.id, request.member.ttl)
        else:
            answered = state.answers.get(request.writer)
            answer = state.apply(request)
            if state.answers.get(request.writer) is not answered:
                self._ledger.add(request.writer, request.seq, state.position)
            if isinstance(request, Leave):
                self._leases.pop(request.id, None)
        if state.revision != revision or state.position.epoch != position.epoch or state.position.step >= self._lowest:
            self._tell()
            await asyncio.sleep(0)  # those who have waited hear of it first
        return packed(*self._reply("answer", answer, since))

    async def look(self, message: bytes) -> bytes:
        """The run as it is."""
        self._calls += 1
        life, since = unpacked(message)
        return packed(*self._reply("snapshot", self._state.snapshot(), since)) if life == self.life else b""

    async def watch(self, message: bytes) -> bytes:
        """Answers when the wish is granted, when its time is up, or when the process has a newer one."""
        self._calls += 1
        life, since, fields = unpacked(message)
        if life != self.life:
            return b""
        wish = Wish(*fields)
        watch = Watch(wish)
        if not self._grants(wish) and self._park(watch):
            timer = asyncio.get_running_loop().call_later(wish.secs, watch.grant)
            try:
                await watch.granted
            finally:
                timer.cancel()
                if self.watches.get(wish.process) is watch:
                    del self.watches[wish.process]
        state = self._state
        if state.revision == wish.revision:
            return packed(*self._reply("position", state.position, since))
        return packed(*self._reply("snapshot", state.snapshot(), since))

    async def leave(self, process: str) -> None:
        """A process has gone, and waits no more."""
        watch = self.watches.get(process)
        if watch is not None:
            watch.grant()

    async def statistics(self) -> dict[str, int]:
        """Its process, how many wait, and how many calls there have been."""
        return {"pid": os.getpid(), "waiting": len(self.watches), "calls": self._calls, "members": len(self._state.members)}

    # What they do.

    def _reply(self, kind: str, content: Any, since: int) -> tuple[Any, ...]:
        return kind, content, self._ledger.version, self._ledger.since(since)

    def _remember(self, snapshot: Snapshot) -> None:
        """Takes over what this one has not heard of yet."""
        state = self._state
        if snapshot.term > state.term:
            state.term = snapshot.term
        if snapshot.ready and snapshot.term == state.term:
            state.ready = state.term
        if snapshot.last_exit is not None and snapshot.last_exit.number > state.exits:
            state.exits, state.last_exit = snapshot.last_exit.number, snapshot.last_exit
        if snapshot.failure is not None and (state.failure is None or state.failure.position < snapshot.failure.position):
            state.failure = snapshot.failure
        if snapshot.revision >= state.revision:
            state.revision = snapshot.revision + 1
            # They may have died together with the one who kept their leases: then these run out here.
            there = {member.id for member in snapshot.members}
            for id in self._hearsay - there:
                del state.members[id], self._leases[id]
            self._hearsay &= there
            for member in snapshot.members:
                if member.id not in state.members:
                    state.members[member.id] = member
                    self._hearsay.add(member.id)
                    self._renew(member.id, member.ttl)

    def _park(self, watch: Watch) -> bool:
        """Makes a wish the one in force, unless the process has sent a newer one already."""
        wish = watch.wish
        earlier = self.watches.get(wish.process)
        if earlier is not None:
            if earlier.wish.number > wish.number:
                return False
            earlier.grant()
        self.watches[wish.process] = watch
        if wish.due is not None:
            self._lowest = min(self._lowest, wish.due)
        return True

    def _grants(self, wish: Wish) -> bool:
        state = self._state
        epoch, step = state.position
        return epoch != wish.epoch or state.revision != wish.revision or (wish.due is not None and step >= wish.due)

    def _tell(self) -> None:
        """Something has changed: grants what can be."""
        lowest = math.inf
        for watch in self.watches.values():
            if watch.granted.done():
                continue
            if self._grants(watch.wish):
                watch.grant()
            elif watch.wish.due is not None:
                lowest = min(lowest, watch.wish.due)
        self._lowest = lowest

    # Leases.

    def _renew(self, id: str, ttl: float) -> None:
        if id in self._state.members:
            self._leases[id] = asyncio.get_running_loop().time() + ttl
            self._plan()

    def _plan(self) -> None:
        due = min(self._leases.values())
        if self._timer is not None:
            if self._due <= due:
                return  # it looks again then
            self._timer.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_at(due, self._run_out)

    def _run_out(self) -> None:
        self._timer = None
        state, now = self._state, asyncio.get_running_loop().time()
        late = now - self._due
        if late > _STOPPED_SECS:
            self._leases = {id: until + late for id, until in self._leases.items()}
        revision = state.revision
        for id in [id for id, until in self._leases.items() if until <= now]:
            del self._leases[id]
            self._hearsay.discard(id)
            member = state.members.get(id)
            if member is not None:
                state.expire(id, member.heartbeat)
        if state.revision != revision:
            self._tell()
        if self._leases:
            self._plan()
