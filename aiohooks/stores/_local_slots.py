"""What each process waits for, as it lies in the file `quiet`: a number for each."""

from __future__ import annotations

import struct
from bisect import bisect_right

NOBODY = 0
"""What a slot holds while its process waits for nothing; for a step, it holds the step and 1 more."""
_EVERYTHING = 1
_BELL = 1 << 62  # added to a slot: its process is told by its bell
_SLOT = struct.Struct("=Q")
SIZE = _SLOT.size
"""Of one slot."""


def packed_slot(value: int, *, bell: bool) -> bytes:
    """The bytes of one slot."""
    return _SLOT.pack(value | _BELL if bell else value)


class Slots:
    """What the slots hold at one moment, but for that of this process itself, which knows what it does."""

    __slots__ = ("_wanted", "bells", "data", "none")

    def __init__(self, data: bytes, own: int) -> None:
        """Reads `data`; `own` is the slot of this process."""
        self.data = data
        self.bells: list[int] = []
        """The slots whose processes are told by their bells."""
        numbers = memoryview(data[: len(data) // SIZE * SIZE]).cast("Q").tolist()
        if 0 <= own < len(numbers):
            numbers[own] = NOBODY
        wanted = [number for number in numbers if number]
        if wanted and max(wanted) >= _BELL:
            self.bells = [slot for slot, number in enumerate(numbers) if number & _BELL]
            wanted = [number & ~_BELL for number in wanted if number & ~_BELL]
        wanted.sort()
        self._wanted = wanted
        self.none = not wanted
        """Whether nobody waits for anything."""

    def due(self, old: int, new: int) -> bool:
        """Whether somebody is to be told that the step has gone from `old` to `new`."""
        wanted = self._wanted
        if not wanted:
            return False
        if wanted[0] == _EVERYTHING:
            return True
        place = bisect_right(wanted, old + 1)
        return place < len(wanted) and wanted[place] <= new + 1
