"""What the NATS store keeps in a server: the names, the stream, one message a run; pure, without the client."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

from aiohooks.errors import InvalidArgumentError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores._protocol import Position
from aiohooks.stores._run_state import RunState

OLDEST_SERVER = 2, 9
"""What republishes the messages of a stream, and compares before it sets; the oldest one that was tried."""

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_FORMAT = b"1"
_LONGEST_START = 150  # of a message: all but the state
_STREAM_NOT_FOUND, _NO_MESSAGE = 10059, 10037
_WRONG_SEQUENCE = 10071, 10164
_NOT_ENABLED = 10039, 10076
_NO_REPLICAS = 10074
_LONGEST_TOKEN = 500


class NobodyAnswersError(StoreUnavailableError):
    """The server is there, and nobody has the stream: it is gone, or has no leader for now."""


class ForeignMessageError(StoreUnavailableError):
    """A message of a run that no store of this version wrote; says what it is. Who reads the newest one knows if it stays so."""


class StreamGoneError(NobodyAnswersError):
    """The server says that there is no such stream."""


class Head:
    """The newest message of a run; the state in it is read when it is asked for."""

    __slots__ = ("_state", "born", "data", "life", "position", "seq")

    def __init__(self, seq: int, data: bytes, state: RunState | None = None) -> None:
        """Reads the beginning of it.

        Raises:
            ForeignMessageError: it does not begin as one of ours.
        """
        self.seq: int = seq
        """Its number in the stream; 0 if there is none."""
        self.data: bytes = data
        self._state = state
        try:
            kind, born, changes, position, _ = data[:_LONGEST_START].split(b" ", 4)
            epoch, step = position.split(b".")
            self.position: Position = Position(int(epoch), int(step))
        except ValueError as error:
            raise _foreign(data) from error
        if kind != _FORMAT:
            raise _foreign(data)
        self.born: bytes = born
        """Of the run, a random word made with its first message: with another one, its data was lost meanwhile."""
        self.life: tuple[bytes, bytes] = born, changes

    @property
    def state(self) -> RunState:
        """All that it says of the run.

        Raises:
            ForeignMessageError: it is not one of ours.
        """
        if self._state is None:
            try:
                self._state = RunState.load(self.data.split(b" ", 4)[4])
            except ValueError as error:
                raise _foreign(self.data) from error
        return self._state


def pack(born: bytes, state: RunState) -> bytes:
    """Encode the state as a message: the life, the count of changes, the position, then the rest."""
    beats = sum(member.heartbeat for member in state.members.values())
    return b"%b %b %d.%d %d.%d %b" % (_FORMAT, born, state.revision, beats, *state.position, state.dump())


def life_of(data: bytes) -> tuple[bytes, bytes]:
    """What `Head.life` would be."""
    parts = data[:_LONGEST_START].split(b" ", 3)
    return (parts[1], parts[2]) if len(parts) > 3 else (b"", b"")


def unpack(seq: int, data: bytes) -> Head:
    """What a message says, all of it.

    Raises:
        ForeignMessageError: it is not one of ours.
    """
    head = Head(seq, data)
    _ = head.state
    return head


def _foreign(data: bytes) -> ForeignMessageError:
    return ForeignMessageError(f"a message of {len(data)} bytes, which begins with {data[:50]!r}")


NO_HEAD = Head(0, pack(b"", RunState()))


@dataclass(frozen=True, slots=True)
class Names:
    """Where a run is: one subject of a stream that all runs share."""

    stream: str
    run: str

    def __post_init__(self) -> None:
        if not isinstance(self.stream, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", self.stream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"stream={self.stream!r}: give a name of letters, digits, _ and -")
        if len(self._token) > _LONGEST_TOKEN:
            raise InvalidArgumentError(f"run={self.run[:50]!r}...: too long for a NATS subject; give a shorter name")

    @property
    def _token(self) -> str:
        # No dot, wildcard or space; different runs stay different.
        return quote(self.run, safe="").replace(".", "%2E")

    @property
    def subject(self) -> str:
        """Where the run's message is."""
        return f"{self.stream}.run.{self._token}"

    @property
    def news(self) -> str:
        """Where the server says it again once it is kept."""
        return f"{self.stream}.news.{self._token}"

    @property
    def elected(self) -> str:
        """Where a cluster says that the stream has a new leader."""
        return f"$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.{self.stream}"

    def api(self, what: str) -> str:
        """A request about the stream."""
        return f"$JS.API.STREAM.{what}.{self.stream}"

    @property
    def _wanted(self) -> dict[str, Any]:
        return {
            "subjects": [f"{self.stream}.run.*"],
            "retention": "limits",
            "max_msgs_per_subject": 1,
            "republish": {"src": f"{self.stream}.run.*", "dest": f"{self.stream}.news.{{{{wildcard(1)}}}}"},
        }

    def config(self, replicas: int, forget_after_secs: float | None) -> dict[str, Any]:
        """The stream as it is to be made."""
        return {
            "name": self.stream,
            **self._wanted,
            "storage": "file",
            "discard": "old",
            "num_replicas": replicas,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_consumers": -1,
            "max_age": round((forget_after_secs or 0) * 1e9),
        }

    def check(self, config: dict[str, Any]) -> None:
        """Looks at a stream that is there.

        Raises:
            StoreRefusedError: it would not do.
        """
        for name, wanted in self._wanted.items():
            if (found := config.get(name)) != wanted:
                raise StoreRefusedError(
                    f"the stream {self.stream} is not one for step stores: its {name} is {found!r} and not {wanted!r};"
                    " take another name with stream=, or delete it"
                )


def head_of(reply: dict[str, Any]) -> Head:
    """The newest message, as the server gave it."""
    if failed(reply) == _NO_MESSAGE:
        return NO_HEAD
    checked(reply)
    message = reply["message"]
    return unpack(int(message["seq"]), base64.b64decode(message.get("data") or ""))


def failed(reply: dict[str, Any]) -> int:
    """The server's number of what went wrong; 0 if nothing did."""
    return int(reply["error"].get("err_code", -1)) if "error" in reply else 0


def is_missing(reply: dict[str, Any]) -> bool:
    """Whether there is no such stream."""
    return failed(reply) == _STREAM_NOT_FOUND


def wrong_sequence(reply: dict[str, Any]) -> bool:
    """Whether somebody else was faster."""
    return failed(reply) in _WRONG_SEQUENCE


def checked(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply, if it is not that something went wrong.

    Raises:
        StoreUnavailableError: it is.
    """
    number = failed(reply)
    if not number:
        return reply
    said = f"{reply['error'].get('description', 'no reason given')} (error {number})"
    if number in _NOT_ENABLED:
        raise StoreRefusedError(
            f"{said}: JetStream is not enabled for this account; start the server with `nats-server -js -sd DIR`"
        )
    if number == _NO_REPLICAS:
        raise StoreRefusedError(f"{said}: it is one server, no cluster; leave out replicas=")
    if number == _STREAM_NOT_FOUND:
        raise StreamGoneError(f"{said}: the stream is gone")
    raise StoreUnavailableError(f"the NATS server says: {said}")


def parsed(data: bytes) -> dict[str, Any]:
    """A reply of JetStream.

    Raises:
        StoreUnavailableError: it is not one.
    """
    try:
        reply: Any = json.loads(data)
        if isinstance(reply, dict):
            return cast("dict[str, Any]", reply)
    except ValueError:
        pass
    raise StoreUnavailableError(f"the NATS server gave an answer that is not JetStream's: {data[:100]!r}")
