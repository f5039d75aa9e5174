"""How the script of the Redis step store is asked, and how its answers are read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from aiohooks.stores._mark import Mark
from aiohooks.stores._view import Answer, Departed, Fail, Failure, Join, Lead, Leave, Member, Request, View, Write

_LATEST = 2**64 - 1  # the highest second half of an id: what comes after it is a later epoch


class Keys:
    """The keys of a run."""

    def __init__(self, run: str) -> None:
        """Of the run with this name."""
        # A brace in the name would end the hash tag, and the keys could come to lie on different nodes of a cluster.
        tag = run.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self.stream: str = f"aiohooks:{{{tag}}}"
        self.all: tuple[str, ...] = (self.stream, *(f"{self.stream}:{what}" for what in ("news", "state", "members", "answers")))

    @property
    def news(self) -> str:
        """The stream that tells of all but the mark."""
        return self.all[1]

    def wake(self, process: str) -> str:
        """The stream by which a process wakes its own blocking read."""
        return f"{self.stream}:wake:{process}"


def cursor(latest: Mark, due: int, nobody: int) -> str:
    """From where to read the stream of marks: what comes after it is of interest to who waits for the step `due`."""
    if due >= nobody:
        return f"{latest.epoch}-{_LATEST}"
    return f"{latest.epoch}-{max(due - 1, latest.step)}"


def mark_of(id: bytes | str) -> Mark:
    """The mark that is the id of an entry."""
    epoch, _, step = as_text(id).partition("-")
    return Mark(int(epoch), int(step))


def arguments(request: Request) -> tuple[str | int, ...]:
    """What the script is to be given for a request, the keys and how long to keep them left out; first what to do."""
    if isinstance(request, Write):
        floor, reign = request.floor, request.reign
        return ("write", request.kind, request.amount, floor.epoch, floor.step, reign, request.writer, request.seq)
    if isinstance(request, Join):
        member = request.member
        return ("join", member.id, _packed(member), _millis(member.ttl), member.reign, int(member.ready))
    if isinstance(request, Leave):
        return ("leave", request.id, request.name, request.step, request.error, request.writer, request.seq)
    if isinstance(request, Lead):
        return ("lead", request.member.id, _packed(request.member), _millis(request.member.ttl))
    assert isinstance(request, Fail)
    return ("fail", request.error, request.writer, request.seq)


def answer_of(reply: Any) -> Answer:
    """What the script answered to a request."""
    verdict, *numbers = as_text(reply).split()
    epoch, step, reign, news = map(int, numbers)
    return Answer(cast("Any", verdict), Mark(epoch, step), reign, news)


def view_of(reply: Any, process: str) -> tuple[View, str]:
    """What the script answered when it was asked to look, as `process` sees it; and the id of the last news."""
    epoch, step, state, packed, now = reply
    known = _mapping(state)
    rows = sorted((_unpacked(id, text) for id, text in _mapping(packed).items()), key=lambda row: row[1])
    ends = [row[2] for row in rows if row[0].process != process]
    departed = failure = None
    if "d_name" in known:
        number, at, lost = int(known["departures"]), int(known["d_step"]), known["d_lost"] == "1"
        departed = Departed(number, known["d_name"], at, known["d_error"], lost)
    if "f_error" in known:
        failure = Failure(known["f_error"], Mark(int(known["f_epoch"]), int(known["f_step"])))
    reign = int(known.get("reign", 0))
    view = View(
        Mark(epoch, step),
        reign,
        int(known.get("ready", 0)) == reign > 0,
        int(known.get("news", 0)),
        tuple(row[0] for row in rows),
        departed,
        failure,
        # Its own leases it renews itself, and needs nobody to tell it that it is dead.
        max(0, min(ends) - now) / 1000 if ends else None,
    )
    return view, known.get("told", "0-0")


def entries(reply: Any) -> Iterable[tuple[str, str]]:
    """The keys in an answer of XREAD, each with the id of its last entry; a list in RESP2, and a mapping in RESP3."""
    if not reply:
        return
    for key, found in reply.items() if hasattr(reply, "items") else reply:
        # Clients are not of one mind: in RESP3 the entries may be in one more list.
        last = found[-1]
        while isinstance(last[0], (list, tuple)):
            last = last[-1]
        yield as_text(key), as_text(last[0])


def as_text(value: Any) -> str:
    """Text of the server's; what is no text in it is shown."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _millis(secs: float) -> int:
    return max(1, round(min(secs, 1e9) * 1000))


def _packed(member: Member) -> str:
    return json.dumps([member.name, member.ttl, member.waits_for])


def _unpacked(id: str, packed: str) -> tuple[Member, int, int]:
    """A member, its place in the order of arrival, and when its lease ends by the server's clock, in milliseconds."""
    ends, beat, order, reign, ready, text = packed.split(" ", 5)
    name, ttl, waits_for = json.loads(text)
    return Member(id, name, ttl, waits_for, int(reign), ready == "1", int(beat)), int(order), int(ends)


def _mapping(flat: Any) -> dict[str, str]:
    # A list in RESP3 too: scripts speak RESP2 unless they say otherwise.
    texts = [as_text(one) for one in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
