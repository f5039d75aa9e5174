"""The few bytes in which the files `quiet` and `loud` keep where a run is."""

from __future__ import annotations

import struct
from typing import NamedTuple

_BODY = struct.Struct("<5Q")
_HALF = _BODY.size
_MAGIC = int.from_bytes(b"ahooks.1", "little")
SIZE = 2 * _HALF
"""Of a packed record."""


class Record(NamedTuple):
    """Where a run is. A later record is greater: nothing of it ever goes back, but the step in a new epoch."""

    epoch: int
    step: int
    news: int
    reign: int


def pack(epoch: int, step: int, news: int, reign: int) -> bytes:
    """The bytes of a record: everything twice, which tells a whole one from another quicker than a checksum would."""
    return 2 * _BODY.pack(_MAGIC, epoch, step, news, reign)


def unpack(data: bytes) -> Record | None:
    """The record at the beginning of `data`; None if it is not whole."""
    if len(data) < SIZE or data[:_HALF] != data[_HALF:SIZE]:
        return None
    magic, epoch, step, news, reign = _BODY.unpack_from(data)
    return Record(epoch, step, news, reign) if magic == _MAGIC else None


class Seen:
    """The record last read at one place: mostly it is still the same, and need not be unpacked again. Threads may share it."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._last: tuple[bytes, Record | None] = b"", None

    def put(self, data: bytes, record: Record) -> None:
        """Was written just now."""
        self._last = data, record

    def get(self, data: bytes) -> Record | None:
        """The record that `data` is; None if it is not whole."""
        last = self._last
        if data != last[0]:
            self._last = last = data, unpack(data)
        return last[1]
