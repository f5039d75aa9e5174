"""The state of a run as an engine keeps it, and what each request does to it: pure, without I/O and without a clock."""

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
_MOST_WRITERS = 1024  # whose last answers are kept; the longest silent one is forgotten first


class RunState:
    """One run. Whoever keeps it applies one request at a time; engines with a language of their own do the same there."""

    __slots__ = ("answers", "exits", "failure", "last_exit", "members", "position", "ready", "revision", "term")

    def __init__(self) -> None:
        """A run that nobody has begun."""
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
        """Another one, equal to this one."""
        other = RunState()
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, dict) else value)
        return other

    def apply(self, request: Request) -> Answer:
        """Does it, or refuses it and changes nothing."""
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
                self._fail(request)
        return self._answer("ok")

    def expire(self, id: str, heartbeat: int) -> bool:
        """Takes out a member whose lease ran out, unless it has been renewed since `heartbeat`; whether it did."""
        member = self.members.get(id)
        if member is None or member.heartbeat != heartbeat:
            return False
        del self.members[id]
        self._departs(member.name, self.position.step, "", lost=True)
        return True

    def forget(self, *writers: str) -> None:
        """Takes out what is kept for these to repeat their requests."""
        for writer in writers:
            self.answers.pop(writer, None)

    def recover(self, known: RunState) -> None:
        """Takes over how far the run was, and which requests were done, from one who knew this before it was lost."""
        self.position = max(self.position, known.position)
        for writer, last in known.answers.items():
            self.answers[writer] = max(last, self.answers.get(writer, last))
        while len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]

    def snapshot(self, expires_secs: float | None = None) -> Snapshot:
        """What to tell of it."""
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
        last = self.answers.pop(write.writer, None)
        if last is not None and last[0] >= write.seq:
            self.answers[write.writer] = last
            return Answer("ok", last[1], self.term, self.revision)
        refused = None
        floor = max(self.position, write.floor)
        epoch, step = floor
        if write.kind == "advance":
            step += write.amount
        elif write.kind == "raise":
            step = max(step, write.amount)
        else:
            epoch, step = epoch + 1, write.amount
        if 0 < write.term < self.term:
            refused = "stale"
        elif step > MAX_STEP:
            refused = "full"
        if refused is not None:
            if last is not None:
                self.answers[write.writer] = last
            return self._answer(refused)
        self.term = max(self.term, write.term)
        self.position = Position(epoch, step)
        self._remember(write.writer, write.seq)
        return self._answer("ok")

    def _is_repeated(self, request: Leave | Fail) -> bool:
        """Whether it was done already, and its answer lost; otherwise it counts as done from now on."""
        if not request.seq:
            return False
        last = self.answers.get(request.writer)
        if last is not None and last[0] >= request.seq:
            return True
        self.answers.pop(request.writer, None)
        self._remember(request.writer, request.seq)
        return False

    def _remember(self, writer: str, seq: int) -> None:
        self.answers[writer] = seq, self.position
        if len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]

    def _join(self, member: Member) -> None:
        known = self.members.get(member.id)
        member = member._replace(heartbeat=0 if known is None else known.heartbeat + 1)
        if 0 < member.term < self.term:
            # A chief that was thought dead, and whose successor terms: its lease is gone.
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
            self._departs(leave.name, leave.step, leave.error, lost=False)
        elif known is not None:
            self.revision += 1

    def _departs(self, name: str, step: int, error: str, *, lost: bool) -> None:
        self.exits += 1
        self.last_exit = LastExit(self.exits, name, step, error, lost)
        self.revision += 1

    def _lead(self, member: Member) -> Answer:
        if any(other.term and other.id != member.id for other in self.members.values()):
            return self._answer("busy")
        known = self.members.get(member.id)
        if known is None or not known.term:  # not the same request again, its answer lost
            self.term += 1
            self.members[member.id] = member._replace(term=self.term, ready=False)
            self.revision += 1
        return self._answer("ok")

    def _fail(self, fail: Fail) -> None:
        self.failure = Failure(fail.error, self.position)
        self.revision += 1

    # As text, for engines that keep bytes.

    def dump(self) -> bytes:
        """All of it, as JSON."""
        return _ENCODER.encode(
            {
                "position": self.position,
                "term": self.term,
                "ready": self.ready,
                "revision": self.revision,
                "members": list(self.members.values()),
                "last_exit": self.last_exit,
                "exits": self.exits,
                "failure": self.failure,
                "answers": self.answers,
            }
        ).encode()

    @classmethod
    def load(cls, data: bytes) -> RunState:
        """What `dump` gave.

        Raises:
            ValueError: it is not that.
        """
        state = cls()
        try:
            read = json.loads(data)
            state.position = _mark(read["position"])
            state.term, state.ready, state.revision = _number(read["term"]), _number(read["ready"]), _number(read["revision"])
            state.members = {member.id: member for member in map(_member, read["members"])}
            state.exits = _number(read["exits"])
            if read["last_exit"] is not None:
                number, name, step, error, lost = read["last_exit"]
                state.last_exit = LastExit(_number(number), str(name), _number(step), str(error), bool(lost))
            if read["failure"] is not None:
                error, position = read["failure"]
                state.failure = Failure(str(error), _mark(position))
            state.answers = {writer: (_number(seq), _mark(position)) for writer, (seq, position) in read["answers"].items()}
        except Exception as error:  # whatever it stumbles over: this was written by somebody else
            raise ValueError(f"{data[:100]!r}, which is not the state of a run") from error
        return state


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of steps")
    return value


def _mark(fields: Any) -> Position:
    epoch, step = fields
    return Position(_number(epoch), _number(step))


def _member(fields: Any) -> Member:
    id, name, ttl, waits_for, term, ready, heartbeat = fields
    return Member(str(id), str(name), float(ttl), _number(waits_for), _number(term), bool(ready), _number(heartbeat))
