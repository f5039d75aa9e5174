"""The current rate of steps, for those who report it."""

from __future__ import annotations

from collections import deque

from aiohooks.stores import Position

_RATE_WINDOW_SECS = 10.0
_RATE_INTERVAL_SECS = 0.2


class StepRate:
    """Steps per second over the last seconds, taken from the reports: nothing is measured between them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Position]] = deque()
        self._rate: float | None = None

    def update(self, now: float, position: Position) -> float | None:
        """Return the current rate, or None until there are two measurements."""
        seen = self._seen
        if seen and seen[-1][1].epoch != position.epoch:  # steps before and after a reset have no difference
            seen.clear()
        if not seen or now - seen[-1][0] >= _RATE_INTERVAL_SECS:
            seen.append((now, position))
            while len(seen) > 2 and now - seen[1][0] >= _RATE_WINDOW_SECS:
                seen.popleft()
            elapsed = now - seen[0][0]
            self._rate = (position.step - seen[0][1].step) / elapsed if elapsed > 0 else None
        return self._rate
