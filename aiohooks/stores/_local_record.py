"""The few bytes in which the files `quiet` and `loud` keep where a run is."""

from __future__ import annotations

import struct
from typing import NamedTuple

from aiohooks.stores._mark import Mark

_BODY = struct.Struct("<5Q")
_HALF = _BODY.size
_MAGIC = int.from_bytes(b"ahooks.1", "little")
SIZE = 2 * _HALF
"""Of a packed record."""


class Record(NamedTuple):
    """Where a run is. A later record is greater: nothing of it ever goes back, but the step in a new epoch."""

    mark: Mark
    news: int
    reign: int


def made(epoch: int, step: int, news: int, reign: int) -> Record:
    """A record of four numbers; what `Record(Mark(epoch, step), news, reign)` does, in half the time."""
    mark = tuple.__new__(Mark, (epoch, step))  # pyright: ignore[reportUnknownMemberType]
    return tuple.__new__(Record, (mark, news, reign))  # pyright: ignore[reportUnknownMemberType]


def pack(epoch: int, step: int, news: int, reign: int) -> bytes:
    """The bytes of a record: everything twice, which tells a whole one from another quicker than a checksum would."""
    return 2 * _BODY.pack(_MAGIC, epoch, step, news, reign)


def unpack(data: bytes) -> Record | None:
    """The record at the beginning of `data`; None if it is not whole."""
    if len(data) < SIZE or data[:_HALF] != data[_HALF:SIZE]:
        return None
    magic, epoch, step, news, reign = _BODY.unpack_from(data)
    return made(epoch, step, news, reign) if magic == _MAGIC else None


def what_is(data: bytes) -> str:
    """What lies where a record should be, for a message."""
    first, second = data[:_HALF], data[_HALF:SIZE]
    if len(data) < SIZE:
        return f"{len(data)} bytes"
    if not first.startswith(b"ahooks."):
        return f"something else, which begins with {first[:8]!r}"
    if first != second:
        return "a record whose two copies differ"
    return f"a record of version {first[7:8]!r}"


class Seen:
    """The record last read at one place: mostly it is still the same, and need not be unpacked again. Threads may share it."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._last: tuple[bytes, Record | None] = b"", None

    def put(self, data: bytes, record: Record) -> None:
        """Was written just now, or is what will be read next, as far as can be known."""
        self._last = data, record

    def get(self, data: bytes) -> Record | None:
        """The record that `data` is; None if it is not whole."""
        last = self._last
        if data != last[0]:
            self._last = last = data, unpack(data)
        return last[1]
