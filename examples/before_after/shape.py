"""What the pairs of programs have in common: the fault that is injected into both, and how they are told apart."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable


class Fault:
    """What happens to the other side, and when it did."""

    def __init__(self) -> None:
        """It has not happened yet."""
        self.at: float | None = None
        self.struck = asyncio.Event()

    def strikes(self) -> None:
        """Notes the time."""
        self.at = time.monotonic()
        self.struck.set()

    def kills(self) -> RuntimeError:
        """Notes the time; to be raised."""
        self.strikes()
        return RuntimeError("out of memory")


Program = Callable[[Fault], Awaitable[object]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of wait, in two programs.

    Attributes:
        name: what it is.
        fault: what happens to the other side.
        old_code: the line that waits, as it is written by hand.
        our_code: the line in its place.
        names: the dead side, as our error names it; empty where nobody dies.
        old: the program as it is written by hand.
        ours: the same with this library.
    """

    name: str
    fault: str
    old_code: str
    our_code: str
    names: str
    old: Program
    ours: Program
