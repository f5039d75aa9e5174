"""The state of a run as an engine keeps it, and the effect of each request: without I/O and without
a clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiohooks.stores._protocol import (
    MAX_STEP,
    Answer,
    Expire,
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
    """One run; one request is applied at a time. Engines with a language of their own implement the
    same in it.
    """

    def __init__(self) -> None:
        self.position = Position(1, 0)
        self.term = 0
        self.leader = ""  # the process that the term was granted to
        self.ready = 0  # the term that has initialised what the workers need
        self.revision = 0
        self.members: dict[str, Member] = {}
        self.last_exit: LastExit | None = None
        self.exits = 0
        self.failure: Failure | None = None
        self.answers: dict[str, tuple[int, Position]] = {}
        # After the data was lost, see `recover`:
        self.recovered: list[str] = []  # the processes that have said what they know
        self.recovered_epoch = self.position.epoch  # the highest epoch from before
        self.recovered_exits = 0  # the highest number of an exit from before
        self.recovered_revision = 0  # the highest revision from before
        self.unconfirmed: list[
            str
        ] = []  # members that other processes knew, and that have not been renewed since
        self.gone: list[str] = []  # those that were removed without having been renewed

    def copy(self) -> RunState:
        other = RunState.__new__(RunState)
        vars(other).update(
            {
                name: value.copy() if isinstance(value, (dict, list)) else value
                for name, value in vars(self).items()
            }
        )
        return other

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
        elif not self._is_repeated(request):
            if isinstance(request, Leave):
                self._leave(request)
            else:
                self.failure = Failure(request.error, self.position)
                self.revision += 1
        return self._answer("ok")

    def recover(
        self, process: str, known: Snapshot, answers: Mapping[str, tuple[int, Position]]
    ) -> None:
        """Take over what a process knows of the run from before the engine lost it, with its own
        members as they are now.

        Each process does this once after a loss, in any order; what has happened since the loss is
        kept. A reset since the loss
        counts: a chief has restored what it has, and does not know the later steps from before.
        Members of other processes come back as they were last seen: none counts as gone before it
        could be announced again, and none that has been found dead since the loss comes back.
        """
        before = self.snapshot()
        self._recover_position(known)
        for writer, last in answers.items():
            self.answers[writer] = max(last, self.answers.get(writer, last))
        while len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]
        if known.term > self.term:
            self._begin_term(known.term, known.leader)
            for member in tuple(self.members.values()):
                if self._is_stale(member):
                    self._remove(member.id)
        if known.ready and (known.term, known.leader) == (self.term, self.leader):
            self.ready = self.term
        if known.failure is not None and self.failure is None:
            self.failure = known.failure
        if known.last_exit is not None and known.last_exit != self.last_exit:
            self._recover_exit(known.last_exit)
        self._recover_members(process, known)
        if self.snapshot() != before:
            self.revision = max(self.revision, known.revision) + 1

    def mark_older(self) -> None:
        """Before `recover`: the engine has an older copy of the run, or a part of it, in which
        nothing is from after the loss.
        """
        self.recovered.clear()
        self.gone.clear()
        self.recovered_epoch = self.position.epoch
        self.recovered_exits, self.recovered_revision = self.exits, self.revision
        self.unconfirmed = list(self.members)

    @property
    def resets(self) -> int:
        """How often the step was reset since the loss."""
        return self.position.epoch - self.recovered_epoch

    def _recover_position(self, known: Snapshot) -> None:
        position, resets = known.position, self.resets
        if not resets:
            self.position = max(self.position, position)
        elif known.term > self.term:  # by a chief that was none
            self.position = Position(max(self.position.epoch, position.epoch) + 1, position.step)
            self.recovered_epoch = self.position.epoch
        elif position.epoch > self.recovered_epoch:
            self.position = Position(position.epoch + resets, self.position.step)
        self.recovered_epoch = max(self.recovered_epoch, position.epoch)

    def _recover_exit(self, known: LastExit) -> None:
        if self.exits <= self.recovered_exits:
            if known.number > self.exits:
                self.exits, self.last_exit = known.number, known
        elif (
            known.number >= self.exits and self.last_exit is not None
        ):  # there was one since the loss: that is the last one
            self.exits = known.number + 1
            self.last_exit = self.last_exit._replace(number=self.exits)
        self.recovered_exits = max(self.recovered_exits, known.number)

    def _recover_members(self, process: str, known: Snapshot) -> None:
        here = {member.id for member in known.members}
        newest = known.revision >= self.recovered_revision
        for id in tuple(self.unconfirmed):
            # The process itself, or one with a more recent snapshot, knows that it has left.
            if id not in here and (newest or id.rpartition("/")[0] == process):
                self._remove(id)
        seen_since = {*self.members, *self.gone}
        for member in known.members:
            if member.process == process:
                self._join(member)
            elif (
                newest
                and member.process not in self.recovered
                and not self._is_stale(member)
                and member.id not in seen_since
            ):
                self.members[member.id] = member
                self.unconfirmed.append(member.id)
        self.recovered_revision = max(self.recovered_revision, known.revision)
        if process not in self.recovered:
            self.recovered.append(process)

    def snapshot(self, run_id: str = "") -> Snapshot:
        return Snapshot(
            self.position,
            self.term,
            self.leader,
            self.ready == self.term > 0,
            self.revision,
            tuple(self.members.values()),
            self.last_exit,
            self.failure,
            run_id,
        )

    def _answer(self, status: Any) -> Answer:
        return Answer(status, self.position, self.term)

    def _write(self, write: Write) -> Answer:
        last = self._last_answer(write.writer)
        if last is not None and last[0] >= write.seq:
            return Answer("ok", last[1], self.term)
        epoch, step = write.target(self.position)
        if self._is_older_term(write.term, write.writer):
            return self._answer("stale")
        if step > MAX_STEP:
            return self._answer("full")
        self._begin_term(write.term, write.writer)
        self.position = Position(epoch, step)
        self._remember(write.writer, write.seq)
        return self._answer("ok")

    def _is_repeated(self, request: Leave | Fail) -> bool:
        """Return whether the request was applied before and its answer lost; if not, count it as
        applied.
        """
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
        if self._is_stale(member):
            # A chief that was taken for dead, and whose successor leads: its lease is gone.
            if self._remove(member.id) is not None:
                self.revision += 1
            return
        self._confirm(member)
        self._begin_term(member.term, member.process)
        if member.ready and self.ready != member.term:
            self.ready = member.term
            self.revision += 1
        if known is None or known._replace(heartbeat=member.heartbeat) != member:
            self.revision += 1

    def _leave(self, leave: Leave) -> None:
        known = self._remove(leave.id)
        if leave.name:
            self._record_exit(leave.name, leave.step, leave.error, lost=False)
        elif known is not None:
            self.revision += 1

    def _expire(self, expire: Expire) -> None:
        member = self.members.get(expire.id)
        if member is not None and member.heartbeat == expire.heartbeat:
            self._remove(expire.id)
            self._record_exit(member.name, self.position.step, "", lost=True)

    def _confirm(self, member: Member) -> None:
        self.members[member.id] = member
        if member.id in self.unconfirmed:
            self.unconfirmed.remove(member.id)

    def _remove(self, id: str) -> Member | None:
        if id in self.unconfirmed:
            self.unconfirmed.remove(id)
            self.gone.append(id)
        return self.members.pop(id, None)

    def _record_exit(self, name: str, step: int, error: str, *, lost: bool) -> None:
        self.exits += 1
        self.last_exit = LastExit(self.exits, name, step, error, lost)
        self.revision += 1

    def _lead(self, member: Member) -> Answer:
        if any(other.term and other.id != member.id for other in self.members.values()):
            return self._answer("busy")
        known = self.members.get(member.id)
        if (
            known is None or not known.term
        ):  # otherwise it is the same request, repeated because its answer was lost
            self._begin_term(self.term + 1, member.process)
            self._confirm(member._replace(term=self.term, ready=False))
            self.revision += 1
        return self._answer("ok")

    def _begin_term(self, term: int, leader: str) -> None:
        """Begin a term, unless it is not newer than the current one."""
        if term > self.term:
            self.term, self.leader = term, leader

    def _is_older_term(self, term: int, process: str) -> bool:
        """Return whether a term of this process has ended. Two processes may have the same term if
        the engine lost its data.
        """
        return 0 < term < self.term or (0 < term == self.term and self.leader not in ("", process))

    def _is_stale(self, member: Member) -> bool:
        return self._is_older_term(member.term, member.process)

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
            read = json.loads(data)
            state.position = _position(read["position"])
            state.term, state.ready, state.revision = (
                _number(read["term"]),
                _number(read["ready"]),
                _number(read["revision"]),
            )
            state.members = {member.id: member for member in map(_member, read["members"])}
            state.exits = _number(read["exits"])
            state.leader = str(read.get("leader", ""))
            names = (
                [str(one) for one in read.get(key, ())]
                for key in ("recovered", "unconfirmed", "gone")
            )
            state.recovered, state.unconfirmed, state.gone = names
            state.recovered_epoch = _number(read.get("recovered_epoch", state.position.epoch))
            state.recovered_exits = _number(read.get("recovered_exits", 0))
            state.recovered_revision = _number(read.get("recovered_revision", 0))
            if read["last_exit"] is not None:
                number, name, step, error, lost = read["last_exit"]
                state.last_exit = LastExit(
                    _number(number), str(name), _number(step), str(error), bool(lost)
                )
            if read["failure"] is not None:
                error, position = read["failure"]
                state.failure = Failure(str(error), _position(position))
            state.answers = {
                writer: (_number(seq), _position(position))
                for writer, (seq, position) in read["answers"].items()
            }
        except Exception as error:  # whatever is wrong: `data` comes from outside
            raise ValueError(f"{data[:100]!r}, which is not the state of a run") from error
        return state


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_STEP:
        raise ValueError(f"{value!r:.50} is not a whole number from 0 to {MAX_STEP}")
    return value


def _position(fields: Any) -> Position:
    epoch, step = fields
    return Position(_number(epoch), _number(step))


def _member(fields: Any) -> Member:
    id, name, ttl, waits_for, term, ready, heartbeat, trace = fields
    if not ttl > 0:
        raise ValueError(f"{ttl!r:.50} is not the time of a lease")
    return Member(
        str(id),
        str(name),
        float(ttl),
        _number(waits_for),
        _number(term),
        bool(ready),
        _number(heartbeat),
        str(trace),
    )
