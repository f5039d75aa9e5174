"""Marks, and which numbers can be steps."""

from __future__ import annotations

import math
import operator
from typing import NamedTuple, SupportsIndex

from aiohooks.errors import InvalidArgumentError

MAX_STEP = 2**53 - 1
"""The highest step: every engine, and JSON, still counts exactly up to here."""


class Position(NamedTuple):
    """Where a run is: the step, and the epoch it counts in. Ordered; every reset begins a new epoch."""

    epoch: int
    step: int


def checked_step(value: SupportsIndex, what: str, least: int | None = 0) -> int:
    """The step as a plain int.

    Raises:
        InvalidArgumentError: not a whole number, below `least`, or above `MAX_STEP`.
    """
    if not isinstance(value, bool):
        try:
            step = operator.index(value)
        except TypeError:
            pass  # a float, a string, None: said below
        else:
            if (least is None or step >= least) and step <= MAX_STEP:
                return step
    bounds = f"from {least} to {MAX_STEP}" if least is not None else f"up to {MAX_STEP}"
    raise InvalidArgumentError(f"{what} {value!r}: give a whole number {bounds}")


def checked_timeout(timeout: float | None) -> float | None:
    """The seconds of a wait's timeout; None for no limit.

    Raises:
        InvalidArgumentError: not a number, or negative.
    """
    if timeout is None or timeout == math.inf:
        return None
    number: object = timeout
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
        raise InvalidArgumentError(f"timeout={timeout!r}: give seconds, at least 0, or None for no limit")
    return timeout
