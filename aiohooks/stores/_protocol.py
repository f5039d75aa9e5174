"""The values that stores, engines and users exchange, and the errors of engines."""

from __future__ import annotations

import logging
import math
import operator
from dataclasses import dataclass
from typing import Literal, NamedTuple, SupportsIndex

from aiohooks._core.validate import check_secs
from aiohooks.errors import (
    InvalidArgumentError,
    StoreClosedError,
    StoreDamagedError,
    StoreUnavailableError,
    safe_str,
    shortened,
)

logger = logging.getLogger("aiohooks.stores")

MAX_STEP = 2**53 - 1
"""The highest step: every engine, and JSON, still counts exactly up to here."""


class Position(NamedTuple):
    """The `step` of a run, and the `epoch` that it counts in.

    Positions are ordered: every reset begins a new epoch.
    """

    epoch: int
    step: int


def checked_step(value: SupportsIndex, what: str, least: int | None = 0) -> int:
    """Return the step as a plain int.

    Raises:
        InvalidArgumentError: `value` is not a whole number, or is below `least` or above
            `MAX_STEP`.
    """
    if not isinstance(value, bool):
        try:
            step = operator.index(value)
        except TypeError:
            pass  # a float, a string, None: reported below
        else:
            if (least is None or step >= least) and step <= MAX_STEP:
                return step
    bounds = f"from {least} to {MAX_STEP}" if least is not None else f"up to {MAX_STEP}"
    raise InvalidArgumentError(f"{what} {value!r}: give a whole number {bounds}")


def checked_timeout(timeout: float | None) -> float | None:
    """Return the seconds of a wait's timeout, or None for no limit.

    Raises:
        InvalidArgumentError: `timeout` is not a number, or negative.
    """
    if timeout == math.inf:
        return None
    check_secs(timeout, "timeout", optional=True)
    return timeout


# What an engine reports.


class Member(NamedTuple):
    """A publisher or a chief in one of the processes.

    The engine keeps it for as long as its lease is renewed.
    """

    id: str
    """`process/number`."""
    name: str
    ttl: float
    """For how many seconds after its last renewal it counts as alive."""
    waits_for: int = 0
    """The highest step that it waits for itself; it can advance again once the run is there."""
    term: int = 0
    """The term of a chief; 0 for a publisher."""
    ready: bool = False
    """Whether that chief has initialised what the workers need."""
    heartbeat: int = 0
    """How often it has been renewed."""

    @property
    def process(self) -> str:
        return self.id.rpartition("/")[0]


class LastExit(NamedTuple):
    """How the last member left."""

    number: int
    """Counts the exits, so that an old one can be told from a new one."""
    name: str
    step: int
    error: str
    """What it failed with; empty if it finished."""
    lost: bool
    """Whether it was found dead instead of leaving by itself."""


class Snapshot(NamedTuple):
    """The state of a run."""

    position: Position
    term: int = 0
    leader: str = ""
    """The process that the term was granted to."""
    ready: bool = False
    revision: int = 0
    """Grows with every change of a field other than the position."""
    members: tuple[Member, ...] = ()
    last_exit: LastExit | None = None
    run_id: str = ""
    """A random word made with the run; with another one the engine has lost the run meanwhile."""

    @property
    def chief(self) -> Member | None:
        return next((member for member in self.members if member.term), None)

    @property
    def is_initialised(self) -> bool:
        """Whether the chief has initialised the run, and the run has not ended since.

        Without a living member it has ended, or its chief will be restarted.
        """
        return self.ready and bool(self.members or self.last_exit is None)


# What users see of a store and of a run.


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """The state of a store.

    Attributes:
        latest: the latest known position.
        term: the number of the latest known term; 0 before the first one.
        waiting: how many `wait_for` are parked.
        wanted: the lowest step one of them waits for; None if there is none.
        watching: how many iterations of `changes` wait for the next position.
        publishers: the names of the registered publishers, in order.
        waiting_secs: for how long there has been a wait without a break; None if there is none.
    """

    latest: Position
    term: int
    waiting: int
    wanted: int | None
    watching: int
    publishers: tuple[str, ...]
    waiting_secs: float | None


@dataclass(frozen=True, slots=True)
class Term:
    """The time in which one process is the chief of a run.

    Created by `StepStore.lead`.

    Attributes:
        number: 1 for the first term of a run; each later one is higher.
    """

    number: int


# What an engine is asked for.


WriteKind = Literal["advance", "raise", "reset"]


class Write(NamedTuple):
    """Moves the position."""

    kind: WriteKind
    amount: int
    floor: Position
    """The highest position that the writer knows; a run that is behind it has lost data."""
    term: int
    """The writer's term, 0 without one; refused if it is older than the run's."""
    writer: str
    seq: int
    """Numbers the writer's writes: a repeated one gets its first answer again and changes
    nothing.
    """

    def target(self, position: Position) -> tuple[int, int]:
        """Return the epoch and the step that it leads to from `position`."""
        epoch, step = position
        if self.kind == "advance":
            return epoch, step + self.amount
        if self.kind == "raise":
            return epoch, max(step, self.amount)
        return epoch + 1, self.amount


class Join(NamedTuple):
    """Registers a member, renews it, or changes what it waits for."""

    member: Member


class Leave(NamedTuple):
    """Removes a member; without a name the others are not notified."""

    id: str
    name: str = ""
    step: int = 0
    error: str = ""
    writer: str = ""
    seq: int = 0
    """Numbers the writer's exits, as that of a `Write`. The writer of the exits of a process is
    another than that of its writes: `process/`.
    """


class Lead(NamedTuple):
    """Makes the member the chief, in a new term, if there is no chief."""

    member: Member


class Expire(NamedTuple):
    """Removes a member that was silent for the time of its lease.

    A member that has been renewed since `heartbeat` stays.
    """

    id: str
    heartbeat: int


Request = Write | Join | Leave | Lead | Expire


class Answer(NamedTuple):
    """The result of a request."""

    status: Literal["ok", "stale", "busy", "full", "lost"]
    """"stale": of an older term; "busy": there is another chief; "full": it would pass the highest
    step; "lost": the writer knows a later position than the run has.
    """
    position: Position
    """The position that a write led to; otherwise the current one."""
    term: int


_MAX_TEXT = 2_000
"""The characters of an error's text that travel: every process of the run reads them each time it
reads the run.
"""


def error_text(exc: BaseException) -> str:
    """Return the text of an error for other processes: its class and its message.

    The middle of a long message is left out.
    """
    return shortened(f"{type(exc).__name__}: {safe_str(exc)}", _MAX_TEXT)


# How an engine fails.

EngineError = StoreUnavailableError | StoreDamagedError
ENGINE_ERRORS = (StoreUnavailableError, StoreDamagedError)
"""The errors of an engine that is unavailable, refuses a request, or holds corrupt data."""


def closed_error(run: str) -> StoreClosedError:
    """Return the error for an operation that is pending when its store is closed."""
    return StoreClosedError(f"the step store {run} was closed")


def damaged_error(
    run: str, path: str, *, found: str, expected: str, delete: str
) -> StoreDamagedError:
    """Return the error for a damaged part of a run; `delete` says how to delete it by hand."""
    return StoreDamagedError(
        f"{path}: found {found}, expected {expected}. The position of the run {run!r} is unknown"
        " and is not guessed: stop its processes, then restore it, or call forget() of a new"
        f" store, or {delete}; a chief continues from its newest checkpoint",
        path=path,
        found=found,
        expected=expected,
    )
