"""The server's disk: an append-only log of its states, of which a crash can lose the last changes,
and tear the last one.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from tests.fuzz.simulation.virtual_time import World

T = TypeVar("T")


class Disk(Generic[T]):
    """The states that were written, each with its time. A torn one does not have its checksum, and
    is not read.
    """

    def __init__(self, world: World, empty: T) -> None:
        self._world = world
        self._empty = empty
        self._log: deque[tuple[float, T]] = deque([(-1.0, empty)], maxlen=200)

    def write(self, state: T) -> None:
        self._log.append((self._world.now, state))

    def read(self, lost_secs: float = 0.0) -> T:
        """Return the last state that survives a crash that loses the changes of the last seconds; a
        torn one is passed over.
        """
        while len(self._log) > 1 and self._log[-1][0] > self._world.now - lost_secs:
            self._log.pop()
        return self._log[-1][1]

    def lose(self) -> None:
        self._log = deque([(-1.0, self._empty)], maxlen=200)
