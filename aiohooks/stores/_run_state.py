"""The state of a run as an engine keeps it, and what each request does to it: pure, without I/O and without a clock."""

from __future__ import annotations

import json
from typing import Any

from aiohooks.stores._mark import MAX_STEP, Mark
from aiohooks.stores._view import Answer, Departed, Fail, Failure, Join, Lead, Leave, Member, Request, View, Write

_ENCODER = json.JSONEncoder(separators=(",", ":"))
_MOST_WRITERS = 1024  # whose last answers are kept; the longest silent one is forgotten first


class RunState:
    """One run. Whoever keeps it applies one request at a time; engines with a language of their own do the same there."""

    __slots__ = ("answers", "departed", "departures", "failure", "mark", "members", "news", "ready", "reign")

    def __init__(self) -> None:
        """A run that nobody has begun."""
        self.mark = Mark(1, 0)
        self.reign = 0
        self.ready = 0  # the reign that has initialised what the workers need
        self.news = 0
        self.members: dict[str, Member] = {}
        self.departed: Departed | None = None
        self.departures = 0
        self.failure: Failure | None = None
        self.answers: dict[str, tuple[int, Mark]] = {}

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

    def lose(self, id: str, beat: int) -> bool:
        """Takes out a member whose lease ran out, unless it has been renewed since `beat`; whether it did."""
        member = self.members.get(id)
        if member is None or member.beat != beat:
            return False
        del self.members[id]
        self._departs(member.name, self.mark.step, "", lost=True)
        return True

    def forget(self, *writers: str) -> None:
        """Takes out what is kept for these to repeat their requests."""
        for writer in writers:
            self.answers.pop(writer, None)

    def recover(self, known: RunState) -> None:
        """Takes over how far the run was, and which requests were done, from one who knew this before it was lost."""
        self.mark = max(self.mark, known.mark)
        for writer, last in known.answers.items():
            self.answers[writer] = max(last, self.answers.get(writer, last))
        while len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]

    def view(self, expires_secs: float | None = None) -> View:
        """What to tell of it."""
        return View(
            self.mark,
            self.reign,
            self.ready == self.reign > 0,
            self.news,
            tuple(self.members.values()),
            self.departed,
            self.failure,
            expires_secs,
        )

    def _answer(self, verdict: Any) -> Answer:
        return Answer(verdict, self.mark, self.reign, self.news)

    def _write(self, write: Write) -> Answer:
        last = self.answers.pop(write.writer, None)
        if last is not None and last[0] >= write.seq:
            self.answers[write.writer] = last
            return Answer("ok", last[1], self.reign, self.news)
        refused = None
        floor = max(self.mark, write.floor)
        epoch, step = floor
        if write.kind == "advance":
            step += write.amount
        elif write.kind == "raise":
            step = max(step, write.amount)
        else:
            epoch, step = epoch + 1, write.amount
        if 0 < write.reign < self.reign:
            refused = "stale"
        elif step > MAX_STEP:
            refused = "full"
        if refused is not None:
            if last is not None:
                self.answers[write.writer] = last
            return self._answer(refused)
        self.reign = max(self.reign, write.reign)
        self.mark = Mark(epoch, step)
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
        self.answers[writer] = seq, self.mark
        if len(self.answers) > _MOST_WRITERS:
            del self.answers[next(iter(self.answers))]

    def _join(self, member: Member) -> None:
        known = self.members.get(member.id)
        member = member._replace(beat=0 if known is None else known.beat + 1)
        if 0 < member.reign < self.reign:
            # A chief that was thought dead, and whose successor reigns: its lease is gone.
            if self.members.pop(member.id, None) is not None:
                self.news += 1
            return
        self.members[member.id] = member
        self.reign = max(self.reign, member.reign)
        if member.ready and self.ready != member.reign:
            self.ready = member.reign
            self.news += 1
        if known is None or known._replace(beat=member.beat) != member:
            self.news += 1

    def _leave(self, leave: Leave) -> None:
        known = self.members.pop(leave.id, None)
        if leave.name:
            self._departs(leave.name, leave.step, leave.error, lost=False)
        elif known is not None:
            self.news += 1

    def _departs(self, name: str, step: int, error: str, *, lost: bool) -> None:
        self.departures += 1
        self.departed = Departed(self.departures, name, step, error, lost)
        self.news += 1

    def _lead(self, member: Member) -> Answer:
        if any(other.reign and other.id != member.id for other in self.members.values()):
            return self._answer("busy")
        known = self.members.get(member.id)
        if known is None or not known.reign:  # not the same request again, its answer lost
            self.reign += 1
            self.members[member.id] = member._replace(reign=self.reign, ready=False)
            self.news += 1
        return self._answer("ok")

    def _fail(self, fail: Fail) -> None:
        self.failure = Failure(fail.error, self.mark)
        self.news += 1

    # As text, for engines that keep bytes.

    def dump(self) -> bytes:
        """All of it, as JSON."""
        return _ENCODER.encode(
            {
                "mark": self.mark,
                "reign": self.reign,
                "ready": self.ready,
                "news": self.news,
                "members": list(self.members.values()),
                "departed": self.departed,
                "departures": self.departures,
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
            state.mark = _mark(read["mark"])
            state.reign, state.ready, state.news = _number(read["reign"]), _number(read["ready"]), _number(read["news"])
            state.members = {member.id: member for member in map(_member, read["members"])}
            state.departures = _number(read["departures"])
            if read["departed"] is not None:
                number, name, step, error, lost = read["departed"]
                state.departed = Departed(_number(number), str(name), _number(step), str(error), bool(lost))
            if read["failure"] is not None:
                error, mark = read["failure"]
                state.failure = Failure(str(error), _mark(mark))
            state.answers = {writer: (_number(seq), _mark(mark)) for writer, (seq, mark) in read["answers"].items()}
        except Exception as error:  # whatever it stumbles over: this was written by somebody else
            raise ValueError(f"{data[:100]!r}, which is not the state of a run") from error
        return state


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of steps")
    return value


def _mark(fields: Any) -> Mark:
    epoch, step = fields
    return Mark(_number(epoch), _number(step))


def _member(fields: Any) -> Member:
    id, name, ttl, waits_for, reign, ready, beat = fields
    return Member(str(id), str(name), float(ttl), _number(waits_for), _number(reign), bool(ready), _number(beat))
