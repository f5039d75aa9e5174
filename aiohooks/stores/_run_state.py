"""The state of a run as an engine keeps it, and the effect of each request: without I/O and without a clock."""

from __future__ import annotations

import json
from typing import Any

from aiohooks.stores._protocol import (
    MAX_STEP,
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

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_MOST_WRITERS = 1024  # whose last answers are kept; the least recent one is dropped first


class RunState:
    """One run; one request is applied at a time. Engines with a language of their own implement the same in it."""

    __slots__ = ("answers", "exits", "failure", "last_exit", "members", "position", "ready", "revision", "term")

    def __init__(self) -> None:
        self.position = Position(1, 0)
        self.term = 0
        self.ready = 0  # the term that has initialised what the workers need
        self.revision = 0
        self.members: dict[str, Member] = {}
        self.last_exit: LastExit | None = None
        self.exits = 0
        self.failure: Failure | None = None
        self.answers: dict[str, tuple[int, Position]] = {}

    def copy(self) -> RunState:
        other = RunState()
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, dict) else value)
        return other

    def apply(self, request: Request) -> Answer:
        """Apply the request, or refuse it and change nothing."""
        if isinstance(request, Write):
            return self._write(request)
        if isinstance(request, Join):
            self._join(request.member)
        elif isinstance(request, Lead):
            return self._lead(request.member)
        elif not self._is_repeated(request):
            if isinstance(request, Leave):
                self._leave(request)
            else:
                self.failure = Failure(request.error, self.position)
                self.revision += 1
        return self._answer("ok")

    def expire(self, id: str, heartbeat: int) -> bool:
        """Remove a member whose lease ran out, unless it has been renewed since `heartbeat`; return whether it was removed."""
        member = self.members.get(id)
        if member is None or member.heartbeat != heartbeat:
            return False
        del self.members[id]
        self._record_exit(member.name, self.position.step, "", lost=True)
        return True

    def forget(self, *writers: str) -> None:
        """Drop the last answers to these writers."""
        for writer in writers:
            self.answers.pop(writer, None)

    def recover(self, known: RunState) -> None:
        """Restore the position and the last answers from a copy of the run that has been lost."""
        self.position = max(self.position, known.position)
        for writer, last in known.answers.items():
            self.answers[writer] = max(last, self.answers.get(writer, last))
        while len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]

    def snapshot(self, expires_secs: float | None = None) -> Snapshot:
        return Snapshot(
            self.position,
            self.term,
            self.ready == self.term > 0,
            self.revision,
            tuple(self.members.values()),
            self.last_exit,
            self.failure,
            expires_secs,
        )

    def _answer(self, status: Any) -> Answer:
        return Answer(status, self.position, self.term, self.revision)

    def _write(self, write: Write) -> Answer:
        last = self._last_answer(write.writer)
        if last is not None and last[0] >= write.seq:
            return Answer("ok", last[1], self.term, self.revision)
        epoch, step = write.target(self.position)
        if 0 < write.term < self.term:
            return self._answer("stale")
        if step > MAX_STEP:
            return self._answer("full")
        self.term = max(self.term, write.term)
        self.position = Position(epoch, step)
        self._remember(write.writer, write.seq)
        return self._answer("ok")

    def _is_repeated(self, request: Leave | Fail) -> bool:
        """Return whether the request was applied before and its answer lost; if not, count it as applied."""
        if not request.seq:
            return False
        last = self._last_answer(request.writer)
        if last is not None and last[0] >= request.seq:
            return True
        self._remember(request.writer, request.seq)
        return False

    def _last_answer(self, writer: str) -> tuple[int, Position] | None:
        last = self.answers.pop(writer, None)
        if last is not None:
            self.answers[writer] = last  # moved to the end: it is not silent
        return last

    def _remember(self, writer: str, seq: int) -> None:
        self.answers[writer] = seq, self.position
        if len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]

    def _join(self, member: Member) -> None:
        known = self.members.get(member.id)
        member = member._replace(heartbeat=0 if known is None else known.heartbeat + 1)
        if 0 < member.term < self.term:
            # A chief that was taken for dead, and whose successor leads: its lease is gone.
            if self.members.pop(member.id, None) is not None:
                self.revision += 1
            return
        self.members[member.id] = member
        self.term = max(self.term, member.term)
        if member.ready and self.ready != member.term:
            self.ready = member.term
            self.revision += 1
        if known is None or known._replace(heartbeat=member.heartbeat) != member:
            self.revision += 1

    def _leave(self, leave: Leave) -> None:
        known = self.members.pop(leave.id, None)
        if leave.name:
            self._record_exit(leave.name, leave.step, leave.error, lost=False)
        elif known is not None:
            self.revision += 1

    def _record_exit(self, name: str, step: int, error: str, *, lost: bool) -> None:
        self.exits += 1
        self.last_exit = LastExit(self.exits, name, step, error, lost)
        self.revision += 1

    def _lead(self, member: Member) -> Answer:
        if any(other.term and other.id != member.id for other in self.members.values()):
            return self._answer("busy")
        known = self.members.get(member.id)
        if known is None or not known.term:  # otherwise it is the same request, repeated because its answer was lost
            self.term += 1
            self.members[member.id] = member._replace(term=self.term, ready=False)
            self.revision += 1
        return self._answer("ok")

    def dump(self) -> bytes:
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        fields["members"] = list(self.members.values())
        return _ENCODER.encode(fields).encode()

    @classmethod
    def load(cls, data: bytes) -> RunState:
        """Return the state that `dump` returned.

        Raises:
            ValueError: `data` is not such a state.
        """
        state = cls()
        try:
            read = json.loads(data)
            state.position = _position(read["position"])
            state.term, state.ready, state.revision = _number(read["term"]), _number(read["ready"]), _number(read["revision"])
            state.members = {member.id: member for member in map(_member, read["members"])}
            state.exits = _number(read["exits"])
            if read["last_exit"] is not None:
                number, name, step, error, lost = read["last_exit"]
                state.last_exit = LastExit(_number(number), str(name), _number(step), str(error), bool(lost))
            if read["failure"] is not None:
                error, position = read["failure"]
                state.failure = Failure(str(error), _position(position))
            state.answers = {writer: (_number(seq), _position(position)) for writer, (seq, position) in read["answers"].items()}
        except Exception as error:  # whatever is wrong: `data` comes from outside
            raise ValueError(f"{data[:100]!r}, which is not the state of a run") from error
        return state


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of 0 or more")
    return value


def _position(fields: Any) -> Position:
    epoch, step = fields
    return Position(_number(epoch), _number(step))


def _member(fields: Any) -> Member:
    id, name, ttl, waits_for, term, ready, heartbeat = fields
    return Member(str(id), str(name), float(ttl), _number(waits_for), _number(term), bool(ready), _number(heartbeat))
