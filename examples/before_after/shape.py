"""A pair of programs, and the fault that is injected into both."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable


class Fault:
    """The fault on the other side of the wait, and its time."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.injected = asyncio.Event()

    def record(self) -> None:
        """Record that the fault happens now."""
        self.at = time.monotonic()
        self.injected.set()

    def failure(self) -> RuntimeError:
        """Record the fault and return the error to raise."""
        self.record()
        return RuntimeError("out of memory")


Program = Callable[[Fault], Awaitable[object]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of wait, as a pair of programs.

    Attributes:
        name: the kind of wait.
        fault: the fault of the other side.
        old_code: the line that waits, as usually written by hand.
        our_code: the line that replaces it.
        names: the dead side, as our error names it; empty without a death.
        old: the program as usually written by hand.
        ours: the program with this library.
    """

    name: str
    fault: str
    old_code: str
    our_code: str
    names: str
    old: Program
    ours: Program
