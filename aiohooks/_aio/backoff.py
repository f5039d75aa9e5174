"""Exponential backoff between attempts."""

from __future__ import annotations

import dataclasses
import random

from aiohooks._validate import check_secs


@dataclasses.dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff: pauses that double from `initial_secs` up to `max_secs`; with `jitter`, a random part of each.

    A pause of 0 is valid.
    """

    initial_secs: float = 0.1
    max_secs: float = 30.0
    jitter: bool = True

    def __post_init__(self) -> None:
        for name in ("initial_secs", "max_secs"):
            check_secs(getattr(self, name), name)

    def pause_secs(self, attempt: int) -> float:
        """Return the seconds to wait before attempt number `attempt`, counted from 1."""
        # The exponent is bounded, or a long series of attempts would overflow the float.
        longest = min(self.max_secs, self.initial_secs * 2.0 ** min(attempt - 1, 1000))
        return random.uniform(0, longest) if self.jitter else longest
