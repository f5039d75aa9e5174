"""The state of a run as an engine keeps it, and the effect of each request.

There is no I/O here, and no clock.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple, get_type_hints

from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    Expire,
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

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_START = Position(1, 0)
_MOST_WRITERS = 1024  # whose last answers are kept; the least recent one is dropped first


class LastAnswer(NamedTuple):
    """The number of a writer's last write or exit, and where that led to."""

    seq: int
    position: Position


class RunState:
    """One run, to which one request at a time is applied.

    Engines with a language of their own implement the same in it.
    """

    def __init__(self) -> None:
        self.position: Position = _START
        self.term: int = 0
        self.leader: str = ""  # the process that the term was granted to
        self.ready: int = 0  # the latest term whose chief has initialised the run
        self.revision: int = 0
        self.members: dict[str, Member] = {}
        self.last_exit: LastExit | None = None
        self.exits: int = 0
        self.answers: dict[str, LastAnswer] = {}

    def apply(self, request: Request) -> Answer:
        """Apply the request, or refuse it and change nothing."""
        if isinstance(request, Write):
            return self._write(request)
        if isinstance(request, Join):
            self._join(request.member)
        elif isinstance(request, Lead):
            return self._lead(request.member)
        elif isinstance(request, Expire):
            self._expire(request)
        else:
            self._leave(request)
        return self._answer("ok")

    def follow(self, lost: Snapshot) -> None:
        """Follow a run that the engine has lost, as a process knew it.

        The epoch is later than any of the lost run, so that no step falls within an epoch. The
        first process that knew it decides on the step, unless a chief has decided on it before. The
        chief of the latest term may lead on, and no other one. The members have the time of their
        lease to return.
        """
        epoch, step = self.position
        if self.position == _START and (self.term < lost.term or not self.term):
            step = lost.position.step
        self.position = Position(max(epoch, lost.position.epoch + 1), step)
        if self.term < lost.term:
            self.term = lost.term
            self.leader = lost.leader
            self.members = {id: member for id, member in self.members.items() if not member.term}
        for member in lost.members:
            # A process that has left something since had announced its members before.
            has_returned = f"{member.process}/" in self.answers
            if not has_returned and not self._is_term_over(member.term, member.process):
                self.members.setdefault(member.id, member)
        self.revision += 1

    def snapshot(self, run_id: str = "") -> Snapshot:
        return Snapshot(
            self.position,
            self.term,
            self.leader,
            self.ready == self.term > 0,
            self.revision,
            tuple(self.members.values()),
            self.last_exit,
            run_id,
        )

    def _answer(self, status: Any) -> Answer:
        return Answer(status, self.position, self.term)

    def _write(self, write: Write) -> Answer:
        last = self._last_answer(write.writer)
        if last is not None and last.seq >= write.seq:
            return Answer("ok", last.position, self.term)
        if write.floor > self.position:
            return self._answer("lost")
        epoch, step = write.target(self.position)
        if self._is_term_over(write.term, write.writer):
            return self._answer("stale")
        if step > MAX_STEP:
            return self._answer("full")
        self.position = Position(epoch, step)
        self._remember(write.writer, write.seq)
        return self._answer("ok")

    def _last_answer(self, writer: str) -> LastAnswer | None:
        last = self.answers.pop(writer, None)
        if last is not None:
            self.answers[writer] = last  # moved to the end: it is not silent
        return last

    def _remember(self, writer: str, seq: int) -> None:
        self.answers[writer] = LastAnswer(seq, self.position)
        if len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]

    def _join(self, member: Member) -> None:
        known = self.members.get(member.id)
        if self._is_term_over(member.term, member.process):
            # A chief that was taken for dead, and whose successor leads: its lease is gone.
            if self.members.pop(member.id, None) is not None:
                self.revision += 1
            return
        if member.ready and self.ready != member.term:
            self.ready = member.term
            self.revision += 1
        heartbeat = 0 if known is None else known.heartbeat + 1
        self.members[member.id] = member._replace(heartbeat=heartbeat)
        if known is None or known._replace(heartbeat=heartbeat) != self.members[member.id]:
            self.revision += 1

    def _leave(self, leave: Leave) -> None:
        last = self._last_answer(leave.writer)
        if last is not None and last.seq >= leave.seq:
            return  # its answer was lost, and it was sent again
        self._remember(leave.writer, leave.seq)
        known = self.members.pop(leave.id, None)
        if leave.name:
            self._record_exit(leave.name, leave.step, leave.error, lost=False)
        elif known is not None:
            self.revision += 1

    def _expire(self, expire: Expire) -> None:
        member = self.members.get(expire.id)
        if member is not None and member.heartbeat == expire.heartbeat:
            del self.members[expire.id]
            self._record_exit(member.name, self.position.step, "", lost=True)

    def _record_exit(self, name: str, step: int, error: str, *, lost: bool) -> None:
        self.exits += 1
        self.last_exit = LastExit(self.exits, name, step, error, lost)
        self.revision += 1

    def _lead(self, member: Member) -> Answer:
        if any(other.term and other.id != member.id for other in self.members.values()):
            return self._answer("busy")
        if member.id not in self.members:  # otherwise its answer was lost, and it is sent again
            self.term += 1
            self.leader = member.process
            self.members[member.id] = member._replace(term=self.term)
            self.revision += 1
        return self._answer("ok")

    def _is_term_over(self, term: int, process: str) -> bool:
        """Return whether this process leads no more in a term that it had; 0 is none."""
        return term > 0 and (term, process) != (self.term, self.leader)

    def dump(self) -> bytes:
        return _ENCODER.encode({**vars(self), "members": list(self.members.values())}).encode()

    @classmethod
    def load(cls, data: bytes) -> RunState:
        """Return the state that `dump` returned.

        Raises:
            ValueError: `data` is not such a state.
        """
        state = cls()
        try:
            fields = json.loads(data)
            for name in ("position", "term", "leader", "ready", "revision", "exits"):
                default: Any = getattr(state, name)
                setattr(state, name, _decoded(type(default), fields[name]))
            members = [_decoded(Member, member) for member in fields["members"]]
            state.members = {member.id: member for member in members}
            if fields["last_exit"] is not None:
                state.last_exit = _decoded(LastExit, fields["last_exit"])
            for writer, answer in fields["answers"].items():
                state.answers[writer] = _decoded(LastAnswer, answer)
        except Exception as error:  # whatever is wrong: `data` comes from outside
            raise ValueError(f"{data[:100]!r}, which is not the state of a run") from error
        return state


def _decoded(kind: Any, value: Any) -> Any:
    """Return JSON as a value of this kind: an int, a float, a string, a bool or a named tuple.

    All ints are steps or counts, and the only floats are the times of leases.

    Raises:
        ValueError: it is of another kind, or out of range.
        TypeError: it cannot be iterated over, as the fields of a named tuple are.
    """
    if hasattr(kind, "_fields"):  # a named tuple
        hints = _field_types(kind)
        return kind(*(_decoded(hint, field) for hint, field in zip(hints, value, strict=True)))
    if kind is float and type(value) is int:
        value = float(value)
    is_valid = type(value) is kind  # True is no int here
    if kind is int:
        is_valid = is_valid and 0 <= value <= MAX_STEP
    if kind is float:
        is_valid = is_valid and value > 0
    if not is_valid:
        raise ValueError(f"{value!r:.50} is not a valid {kind.__name__}")
    return value


@functools.cache
def _field_types(kind: Any) -> tuple[Any, ...]:
    return tuple(get_type_hints(kind).values())
