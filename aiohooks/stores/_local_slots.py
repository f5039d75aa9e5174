"""What each process waits for, as it lies in the file `quiet`: a number for each."""

from __future__ import annotations

import struct

from aiohooks.stores._mark import MAX_STEP

NOBODY = 0
"""What a slot holds while its process waits for nothing; for a step, it holds the step and 1 more; step 0 is every step."""
_BELL = 1 << 62  # added to a slot: its process is told by its bell
_STEP = _BELL - 1
_SLOT = struct.Struct("<Q")
SIZE = _SLOT.size
"""Of one slot."""


def packed_slot(value: int, *, bell: bool) -> bytes:
    """The bytes of one slot."""
    return _SLOT.pack(value | _BELL if bell else value)


def asked(slots: bytes, own: int, old: int, new: int) -> tuple[bool, int]:
    """Whether somebody is to be told that the step goes from `old` to `new`, and at which higher step somebody is next.

    Slot `own` is that of this process itself, which knows what it does.
    """
    due, later = False, MAX_STEP + 1
    for slot, (number,) in enumerate(_SLOT.iter_unpack(slots)):
        if number != NOBODY and slot != own:
            step = (number & _STEP) - 1
            if step > new:
                if step < later:
                    later = step
            elif step > old:
                due = True
            elif step == 0:
                return True, 0
    return due, later


def bells(slots: bytes, own: int) -> list[int]:
    """The slots, but for `own`, whose processes are told by their bells."""
    highest = slots[SIZE - 1 :: SIZE]  # of each slot the byte that the bell is in
    return [slot for slot, byte in enumerate(highest) if byte and slot != own] if any(highest) else []
