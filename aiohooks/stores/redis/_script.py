"""The script of the Redis step store: its keys, its arguments, and how its replies are read."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from aiohooks.stores._protocol import MAX_STEP, Answer, Position, Write
from aiohooks.stores._run_state import RunState

SCRIPT = (
    importlib.resources.files("aiohooks.stores.redis")
    .joinpath("script.lua")
    .read_text(encoding="utf-8")
)
SCRIPT_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""How the server calls the script once it has it."""

_MAX_SEQUENCE = (
    2**64 - 1
)  # the highest second half of an entry's id: only a later epoch comes after it


class Keys:
    """The keys of a run."""

    def __init__(self, run: str) -> None:
        # A brace in the name would end the hash tag, and the keys could come to lie on different
        # nodes of a cluster.
        tag = run.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self.positions: str = f"aiohooks:{{{tag}}}"
        """A stream with one entry, whose id is the position of the run; see the script."""
        self.changes: str = f"{self.positions}:changes"
        """A stream that gets an entry with each change of anything but the position."""
        self.all: tuple[str, ...] = (
            self.positions,
            self.changes,
            f"{self.positions}:state",
            f"{self.positions}:answers",
        )
        """All of them, in the order in which the script expects them."""

    def wake(self, process: str) -> str:
        """Return the stream by which a process ends its own blocking read."""
        return f"{self.positions}:wake:{process}"


def read_after(latest: Position, due: int | None) -> str:
    """Return the id after which to read the positions: the first entry beyond it concerns a waiter
    for step `due`, if any.
    """
    if due is None:
        return f"{latest.epoch}-{_MAX_SEQUENCE}"
    return f"{latest.epoch}-{max(due - 1, latest.step)}"


def parse_position(entry_id: bytes | str) -> Position:
    """Return the position that is the id of an entry; raise `ValueError` if it is none."""
    epoch, _, step = _as_text(entry_id).partition("-")
    position = Position(int(epoch), int(step))
    if max(position) > MAX_STEP:
        raise ValueError(f"{position} is beyond {MAX_STEP}")
    return position


class FoundRun(NamedTuple):
    """A run as it was read."""

    run_id: str
    """Empty if the run is missing, or a part of it. The state then has the part that is left."""
    version: str
    """Changes with each change of anything but the position; empty without a state."""
    state: RunState

    @property
    def last_change(self) -> str:
        """The id of an entry of the changes, after which all that follow are later than this."""
        return f"{self.version or 0}-0"


def write_arguments(write: Write) -> tuple[str | int, ...]:
    """Return the arguments of the script for a write."""
    floor = write.floor
    return (write.kind, write.amount, floor.epoch, floor.step, write.term, write.writer, write.seq)


def swap_arguments(found: FoundRun, run_id: str, state: RunState) -> tuple[str | int, ...]:
    """Return the arguments of the script to replace the state of a run that was found; with another
    id, the run as well.
    """
    notifies, fails = state.revision != found.state.revision, state.failure != found.state.failure
    data, position = state.dump().decode(), state.position
    changed = (position.epoch, position.step, state.term, state.leader, int(notifies), int(fails))
    return (
        found.version,
        run_id,
        data,
        *changed,
        found.state.position.epoch,
    )


def parse_answer(reply: Any) -> Answer:
    """Read the script's reply to a write."""
    status, *numbers = _as_text(reply).split()
    epoch, step, term = map(int, numbers)
    return Answer(cast("Any", status), Position(epoch, step), term)


def parse_read(reply: Any) -> FoundRun:
    """Read the script's reply to "read" or "inspect"."""
    run_id, epoch, step, version, term, leader, data, failed_at = map(_as_text, reply)
    state = RunState.load(data.encode()) if data else RunState()
    state.position, state.term, state.leader = Position(int(epoch), int(step)), int(term), leader
    if state.failure is not None and failed_at:
        state.failure = state.failure._replace(position=parse_position(failed_at))
    if version:
        int(version)
    return FoundRun(run_id, version, state)


def latest_entries(reply: Any) -> Iterable[tuple[str, str, dict[str, str]]]:
    """Yield the keys in a reply of XREAD, each with the id of its last entry, and that entry's
    fields.
    """
    if not reply:
        return
    # RESP2 gives a list, RESP3 a mapping, and some clients put the entries of RESP3 into one more
    # list.
    for key, found in reply.items() if hasattr(reply, "items") else reply:
        last = found[-1]
        while isinstance(last[0], (list, tuple)):
            last = last[-1]
        texts = [_as_text(one) for one in last[1]]
        yield _as_text(key), _as_text(last[0]), dict(zip(texts[::2], texts[1::2], strict=True))


def _as_text(value: Any) -> str:
    """Return text of the server's, with bytes that are not UTF-8 escaped."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
