"""The values that stores, engines and users exchange, and the errors of engines."""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import Literal, NamedTuple, SupportsIndex

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

    Positions compare by their epochs first. Every reset begins a new epoch, which is the next
    number, so that a later position is always the greater one.
    """

    epoch: int
    step: int


def checked_step(value: SupportsIndex, what: str, least: int | None = 0) -> int:
    """Return the step as a plain int.

    Args:
        value: the step.
        what: the beginning of the error's message, which the value follows.
        least: the lowest valid step, or None if there is none.

    Raises:
        InvalidArgumentError: `value` is not a whole number, or is below `least` or above
            `MAX_STEP`.
    """
    if not isinstance(value, bool):
        try:
            step = operator.index(value)
        except TypeError:
            pass  # a float, a string or None, which is reported below
        else:
            if (least is None or step >= least) and step <= MAX_STEP:
                return step
    bounds = f"from {least} to {MAX_STEP}" if least is not None else f"up to {MAX_STEP}"
    raise InvalidArgumentError(f"{what} {value!r}: give a whole number {bounds}")


# The state of a run, as an engine reports it.


class Member(NamedTuple):
    """A publisher or a chief, as all processes of the run see it.

    The engine keeps a member until it leaves, or until its lease runs out.
    """

    id: str
    """`process/number`."""
    name: str
    ttl: float
    """The time of its lease in seconds: for how long it counts as alive after its last renewal."""
    waits_for: int = 0
    """The highest step that it waits for itself, or 0 if it does not wait. It cannot advance the
    run before the run reaches this step.
    """
    term: int = 0
    """The term of a chief, 0 for a publisher."""
    ready: bool = False
    """Whether the chief has initialized the run for its workers. It is false for a publisher."""
    heartbeat: int = 0
    """The number of its renewals, which the engine counts."""

    @property
    def process(self) -> str:
        """The name of its process."""
        return self.id.rpartition("/")[0]


class LastExit(NamedTuple):
    """The exit of the member that left last."""

    number: int
    """The number of the exit in the run: it distinguishes equal exits."""
    name: str
    step: int
    error: str
    """The class and the message of the error that it failed with, empty if it has finished."""
    lost: bool
    """Whether the member was found dead instead of leaving by itself."""


class Snapshot(NamedTuple):
    """The state of a run at a moment, as an engine reports it."""

    position: Position
    term: int = 0
    leader: str = ""
    """The process that the term was granted to, empty before the first term."""
    ready: bool = False
    """Whether the chief of the term has initialized the run for its workers."""
    revision: int = 0
    """A number that grows with every change of a field other than the position."""
    members: tuple[Member, ...] = ()
    last_exit: LastExit | None = None
    run_id: str = ""
    """A random word that is made with the run, or empty if it is not known yet. Another word means
    that the engine has lost the run.
    """

    @property
    def chief(self) -> Member | None:
        """The member that leads the run, or None. Only a chief has a term."""
        return next((member for member in self.members if member.term), None)

    @property
    def is_initialised(self) -> bool:
        """Whether the chief has initialized the run, and the run has not ended since.

        A run without members has ended if a member has left. It may continue with a new chief.
        """
        has_ended = self.last_exit is not None and not self.members
        return self.ready and not has_ended


# Values for users.


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """The state of a store.

    Attributes:
        latest: the latest known position.
        term: the number of the latest known term, 0 before the first one.
        waiting: how many `wait_for` are parked.
        wanted: the lowest step that a `wait_for` is parked for, or None if none is parked.
        watching: how many iterations of `changes` wait for the next position.
        publishers: the names of the registered publishers, in order.
        waiting_secs: for how many seconds at least one wait has been pending, None without a wait.
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
        number: 1 for the first term of a run. Each later one is higher.
    """

    number: int


# Requests to an engine, and its answers.


WriteKind = Literal["advance", "raise", "reset"]


class Write(NamedTuple):
    """A request to move the position."""

    kind: WriteKind
    amount: int
    """The steps to add by "advance", the lowest step after "raise", or the step after "reset"."""
    floor: Position
    """The highest position that the writer knows. A run that is behind it has lost data."""
    term: int
    """The writer's term, 0 without one. A term that is older than the run's is rejected."""
    writer: str
    seq: int
    """The number of the write among all writes of the writer. A write that is sent again gets its
    first answer again, and changes nothing.
    """

    def target(self, position: Position) -> Position:
        """Return the position that the write leads to from this one."""
        epoch, step = position
        if self.kind == "advance":
            return Position(epoch, step + self.amount)
        if self.kind == "raise":
            return Position(epoch, max(step, self.amount))
        return Position(epoch + 1, self.amount)  # the reset begins a new epoch


class Join(NamedTuple):
    """A request to register a member, to renew its lease, or to change its fields."""

    member: Member


class Leave(NamedTuple):
    """A request to remove a member, and to record its exit unless the name is empty."""

    id: str
    name: str = ""
    step: int = 0
    error: str = ""
    writer: str = ""
    """The name of the process and a slash, because the exits of a process are numbered separately
    from its writes.
    """
    seq: int = 0
    """The number of the exit among all exits of the writer, as for a `Write`."""


class Lead(NamedTuple):
    """A request to make the member the chief, in a new term, if there is no chief."""

    member: Member


class Expire(NamedTuple):
    """A request to remove a member whose lease has run out.

    The member remains if it has been renewed since `heartbeat`.
    """

    id: str
    heartbeat: int


Request = Write | Join | Leave | Lead | Expire


class Answer(NamedTuple):
    """The result of a request."""

    status: Literal["ok", "stale", "busy", "full", "lost"]
    """Whether the request has taken effect ("ok"), or why it has not: its term is older than the
    term of the run ("stale"), there is another chief ("busy"), the step would be too high ("full"),
    or the run is behind the writer's floor ("lost").
    """
    position: Position
    """The position that a write led to. For other requests, the current position."""
    term: int
    """The current term of the run."""


_MAX_ERROR_TEXT = 2_000
"""The maximal length of an error's text. There is a limit because the text is a part of the state
of a run, which every process reads again and again.
"""


def error_text(exc: BaseException) -> str:
    """Return the text of an error for other processes: its class and its message.

    The middle of a long message is left out.
    """
    return shortened(f"{type(exc).__name__}: {safe_str(exc)}", _MAX_ERROR_TEXT)


# The errors of an engine.

EngineError = StoreUnavailableError | StoreDamagedError
"""The error of an engine that is unavailable, rejects a request, or has damaged data."""

Report = Position | Snapshot | EngineError
"""A report of an engine: the position of the run, its state, or the error that has ended it."""


def closed_error(run: str) -> StoreClosedError:
    """Return the error of a call that is pending when its store is closed, or made afterwards."""
    return StoreClosedError(f"the step store {run} was closed")


def damaged_error(
    run: str, path: str, *, found: str, expected: str, delete: str
) -> StoreDamagedError:
    """Return the error for a damaged part of a run.

    Args:
        run: the name of the run.
        path: the place of the damaged part.
        found: a description of its content.
        expected: a description of the content of an undamaged run.
        delete: what to do to delete the part by hand.
    """
    return StoreDamagedError(
        f"{path}: found {found}, expected {expected}. The position of the run {run!r} is unknown"
        " and is not guessed: stop its processes, then restore it, or call forget() of a new"
        f" store, or {delete}; a chief continues from its newest checkpoint",
        path=path,
        found=found,
        expected=expected,
    )
