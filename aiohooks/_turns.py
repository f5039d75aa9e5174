"""Turns: tasks that want the same thing get it one after the other, in the order in which they asked."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Taking turns. Unlike `asyncio.Lock` the way without waiting is two attribute reads, and `taken` says who waits."""

    __slots__ = ("_waiting", "taken")

    def __init__(self) -> None:
        """Starts free."""
        self.taken: bool = False
        """Whether somebody has the turn now."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Waits for the turn, and has it then; only to be called while it is taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()  # it came together with the cancellation: the next one must not wait for ever
            elif turn in self._waiting:  # or passed over already
                self._waiting.remove(turn)
            raise

    def give_back(self) -> None:
        """Ends the own turn; the next one in line has it from now on."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.taken = False

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)
