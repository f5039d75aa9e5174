"""What one engine tells of a run: the position, who publishes, how the last one left; and what can be asked of it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from aiohooks.stores._position import Position


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
    news: int = 0
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
    news: int
