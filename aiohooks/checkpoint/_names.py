"""The names inside a checkpoint directory; everything else in there is left alone."""

from __future__ import annotations

import re
from typing import NamedTuple

LOCK = ".lock"
ARRAYS = "arrays.safetensors"
STATE = "state.msgpack"
MANIFEST = "manifest.json"
FILES = (ARRAYS, STATE)
"""The files that a manifest vouches for."""

LARGEST_INT = 2**63 - 1
SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
"""What a name that comes from a file may look like."""

_STEP = re.compile(r"step-([0-9]{12,19})\.([0-9]{6,19})", re.ASCII)
_DAMAGED = re.compile(r"damaged-(step-[0-9]{12,19}\.[0-9]{6,19})(?:-[0-9]{1,9})?", re.ASCII)
_TEMPORARY = re.compile(r"\.tmp-(?:drop-)?step-[0-9]{12,19}\.[0-9]{6,19}(?:-[0-9]{1,9})?", re.ASCII)


class Name(NamedTuple):
    """The name of one checkpoint; names sort by when they were committed."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}.{self.sequence:06d}"


def parse(name: str) -> Name | None:
    """The checkpoint that a directory's name stands for; None if it is none, or not written as we write it."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    found = Name(sequence=int(match[2]), step=int(match[1]))
    return found if str(found) == name and max(found) <= LARGEST_INT else None


def parse_damaged(name: str) -> Name | None:
    """The checkpoint that was set aside under this name; None if it is none."""
    match = _DAMAGED.fullmatch(name)
    return parse(match[1]) if match is not None else None


def is_temporary(name: str) -> bool:
    """Whether this is something unfinished of ours, which a writer may sweep away."""
    return _TEMPORARY.fullmatch(name) is not None


def free(name: str, taken: set[str]) -> str:
    """This name, or with a number behind it if it is taken."""
    number, wanted = 1, name
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def next_sequence(names: list[str]) -> int:
    """One more than the highest there is, the damaged ones counted too."""
    found = [each for name in names if (each := parse(name) or parse_damaged(name)) is not None]
    return 1 + max((each.sequence for each in found), default=0)
