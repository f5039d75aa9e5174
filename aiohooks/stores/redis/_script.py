"""The script of the Redis step store: its keys, its arguments, and how its replies are read."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterable
from typing import Any, cast

from aiohooks.stores._protocol import Answer, Failure, Join, LastExit, Lead, Leave, Member, Position, Request, Snapshot, Write

SCRIPT = importlib.resources.files("aiohooks.stores.redis").joinpath("script.lua").read_text(encoding="utf-8")
SCRIPT_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""How the server calls the script once it has it."""

_MAX_SEQUENCE = 2**64 - 1  # the highest second half of an entry's id: only a later epoch comes after it


class Keys:
    """The keys of a run."""

    def __init__(self, run: str) -> None:
        # A brace in the name would end the hash tag, and the keys could come to lie on different nodes of a cluster.
        tag = run.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self.positions: str = f"aiohooks:{{{tag}}}"
        """A stream with one entry, whose id is the position of the run."""
        self.changes: str = f"{self.positions}:changes"
        """A stream that gets an entry with each change of anything but the position."""
        hashes = (f"{self.positions}:{name}" for name in ("state", "members", "answers"))
        self.all: tuple[str, ...] = (self.positions, self.changes, *hashes)
        """All of them, in the order in which the script expects them."""

    def wake(self, process: str) -> str:
        """Return the stream by which a process ends its own blocking read."""
        return f"{self.positions}:wake:{process}"


def read_after(latest: Position, due: int, no_step: int) -> str:
    """Return the id after which to read the positions: the first entry beyond it concerns a waiter for step `due`."""
    if due >= no_step:
        return f"{latest.epoch}-{_MAX_SEQUENCE}"
    return f"{latest.epoch}-{max(due - 1, latest.step)}"


def parse_position(entry_id: bytes | str) -> Position:
    """Return the position that is the id of an entry."""
    epoch, _, step = _as_text(entry_id).partition("-")
    return Position(int(epoch), int(step))


def script_arguments(request: Request) -> tuple[str | int, ...]:
    """Return the arguments of the script for a request: its name, then its fields."""
    if isinstance(request, Write):
        floor, term = request.floor, request.term
        return ("write", request.kind, request.amount, floor.epoch, floor.step, term, request.writer, request.seq)
    if isinstance(request, Join):
        member = request.member
        return ("join", member.id, _pack_member(member), _millis(member.ttl), member.term, int(member.ready))
    if isinstance(request, Leave):
        return ("leave", request.id, request.name, request.step, request.error, request.writer, request.seq)
    if isinstance(request, Lead):
        return ("lead", request.member.id, _pack_member(request.member), _millis(request.member.ttl))
    return ("fail", request.error, request.writer, request.seq)


def parse_answer(reply: Any) -> Answer:
    """Read the script's reply to a request."""
    status, *numbers = _as_text(reply).split()
    epoch, step, term, revision = map(int, numbers)
    return Answer(cast("Any", status), Position(epoch, step), term, revision)


def parse_snapshot(reply: Any, process: str) -> tuple[Snapshot, str]:
    """Read the script's reply to "read" or "open", as `process` sees it; with it the id of the last entry of the changes."""
    epoch, step, flat_state, flat_members, now_ms = reply
    state = _mapping(flat_state)
    members = sorted((_unpack_member(id, packed) for id, packed in _mapping(flat_members).items()), key=lambda row: row[1])
    # A process renews its own leases, and never finds itself dead.
    expiries_ms = [row[2] for row in members if row[0].process != process]
    last_exit = failure = None
    if "exit_name" in state:
        number, at_step, lost = int(state["exits"]), int(state["exit_step"]), state["exit_lost"] == "1"
        last_exit = LastExit(number, state["exit_name"], at_step, state["exit_error"], lost)
    if "failure_error" in state:
        failure = Failure(state["failure_error"], Position(int(state["failure_epoch"]), int(state["failure_step"])))
    term = int(state.get("term", 0))
    snapshot = Snapshot(
        Position(epoch, step),
        term,
        int(state.get("ready", 0)) == term > 0,
        int(state.get("revision", 0)),
        tuple(row[0] for row in members),
        last_exit,
        failure,
        max(0, min(expiries_ms) - now_ms) / 1000 if expiries_ms else None,
    )
    return snapshot, state.get("revision_entry", "0-0")


def latest_entries(reply: Any) -> Iterable[tuple[str, str]]:
    """Yield the keys in a reply of XREAD, each with the id of its last entry."""
    if not reply:
        return
    # RESP2 gives a list, RESP3 a mapping, and some clients put the entries of RESP3 into one more list.
    for key, found in reply.items() if hasattr(reply, "items") else reply:
        last = found[-1]
        while isinstance(last[0], (list, tuple)):
            last = last[-1]
        yield _as_text(key), _as_text(last[0])


def _as_text(value: Any) -> str:
    """Return text of the server's, with bytes that are not UTF-8 escaped."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _millis(secs: float) -> int:
    return max(1, round(min(secs, 1e9) * 1000))


def _pack_member(member: Member) -> str:
    return json.dumps([member.name, member.ttl, member.waits_for])


def _unpack_member(id: str, packed: str) -> tuple[Member, int, int]:
    """Return a member, its place in the order of arrival, and when its lease expires by the server's clock, in ms."""
    expires_ms, heartbeat, order, term, ready, text = packed.split(" ", 5)
    name, ttl, waits_for = json.loads(text)
    return Member(id, name, ttl, waits_for, int(term), ready == "1", int(heartbeat)), int(order), int(expires_ms)


def _mapping(flat: Any) -> dict[str, str]:
    # A list in RESP3 too: scripts speak RESP2 unless they ask for the other.
    texts = [_as_text(one) for one in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
