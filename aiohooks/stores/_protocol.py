"""What stores and engines exchange: positions, snapshots of a run, requests and their answers, and the errors of engines."""

from __future__ import annotations

import logging
import math
import operator
from typing import Literal, NamedTuple, SupportsIndex

from aiohooks.errors import InvalidArgumentError, StoreDamagedError, StoreUnavailableError

logger = logging.getLogger("aiohooks.stores")

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


class Member(NamedTuple):
    """One who may advance the run, in some process; kept by the engine for as long as it is renewed."""

    id: str
    """Of this member, beginning with that of its process: `process/number`."""
    name: str
    ttl: float
    """For how many seconds after its last renewal it counts as alive."""
    waits_for: int = 0
    """The highest step that it waits for itself; it is at work when the run is there."""
    term: int = 0
    """Its term, if this is the lease of a chief; a publisher has 0."""
    ready: bool = False
    """Whether that chief has initialised what the workers need."""
    heartbeat: int = 0
    """How often it has been renewed."""

    @property
    def process(self) -> str:
        """The process it is in."""
        return self.id.rpartition("/")[0]


class LastExit(NamedTuple):
    """How a member left."""

    number: int
    """Counts departures, so that an old one is told from a new one."""
    name: str
    step: int
    error: str
    """What it failed with; empty if it finished."""
    lost: bool
    """Whether it did not leave, but was found dead."""


class Failure(NamedTuple):
    """That all waits were ended by `fail`, and at which mark."""

    error: str
    position: Position


class Snapshot(NamedTuple):
    """A run at one moment."""

    position: Position
    term: int = 0
    ready: bool = False
    revision: int = 0
    """Changes with everything here but the mark."""
    members: tuple[Member, ...] = ()
    last_exit: LastExit | None = None
    failure: Failure | None = None
    expires_secs: float | None = None
    """In how many seconds a member may be found dead: look again then. None: the engine tells by itself."""


class Write(NamedTuple):
    """Moves the mark."""

    kind: Literal["advance", "raise", "reset"]
    amount: int
    floor: Position
    """The highest position that the writer knows; a run that is behind has lost something and jumps there first."""
    term: int
    """The writer's term, 0 without one; an older one than the run's is refused."""
    writer: str
    seq: int
    """Counts the writer's writes: a repeated one is answered again, not done again."""


class Join(NamedTuple):
    """Registers a member, renews it, or changes what it waits for."""

    member: Member


class Leave(NamedTuple):
    """Takes a member out; without a name it leaves silently."""

    id: str
    name: str = ""
    step: int = 0
    error: str = ""
    writer: str = ""
    seq: int = 0
    """Counts what this writer tells once, as that of a `Write`; 0: it is not repeated."""


class Lead(NamedTuple):
    """Makes the member the chief, in a new term, if there is none."""

    member: Member


class Fail(NamedTuple):
    """Ends all waits, everywhere."""

    error: str
    writer: str = ""
    seq: int = 0
    """As that of a `Leave`."""


Request = Write | Join | Leave | Lead | Fail


class Answer(NamedTuple):
    """What came of a request."""

    status: Literal["ok", "stale", "busy", "full"]
    """"stale": of an older term; "busy": there is another chief; "full": it would pass the highest step."""
    position: Position
    """The position that a write led to; otherwise the present one."""
    term: int
    revision: int


EngineError = StoreUnavailableError | StoreDamagedError
ENGINE_ERRORS = (StoreUnavailableError, StoreDamagedError)
"""What comes of asking an engine that is away, says no, or has lost its mind."""


def damaged_error(run: str, path: str, *, found: str, expected: str, delete: str) -> StoreDamagedError:
    """The error for what was found in the place of a part of a run; `delete` says how to delete it by hand."""
    return StoreDamagedError(
        f"{path}: found {found}, expected {expected}. Where the run {run!r} was is not known, and nothing is made up in its "
        f"place: stop its processes, and then restore it, or call forget() of a new store, or {delete}; a chief goes on from "
        "its newest checkpoint",
        path=path,
        found=found,
        expected=expected,
    )
