"""The rate of steps that reports show."""

from __future__ import annotations

from collections import deque

from aiohooks.stores._protocol import Position

_RATE_WINDOW_SECS = 10.0
_RATE_INTERVAL_SECS = 0.2


class StepRate:
    """Steps per second over the last seconds.

    They are taken from the reports: nothing is measured between them.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Position]] = deque()
        self._rate: float | None = None

    def update(self, now: float, position: Position) -> float | None:
        """Return the current rate, or None until there are two measurements."""
        seen = self._seen
        # Steps before and after a reset have no difference.
        if seen and seen[-1][1].epoch != position.epoch:
            seen.clear()
        if not seen or now - seen[-1][0] >= _RATE_INTERVAL_SECS:
            seen.append((now, position))
            while len(seen) > 2 and now - seen[1][0] >= _RATE_WINDOW_SECS:
                seen.popleft()
            first_time, first = seen[0]
            self._rate = None
            if now > first_time:
                self._rate = (position.step - first.step) / (now - first_time)
        return self._rate
