"""What the processes of a simulation did and saw, and what was true meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aiohooks.stores import Position
from tests.fuzz.simulation.virtual_time import Process, World


@dataclass
class Call:
    """A call of a store, from its beginning to its end."""

    process: Process
    kind: Literal["advance", "read", "wait"]
    amount: int  # of an advance; the step of a wait
    began: float
    known: Position
    """The latest position that the process knew when it began."""
    term: int = 0
    ended: float | None = None
    known_after: Position | None = None
    """The latest position that it knew at the end."""
    step: int | None = None
    """The result; None if it failed, was cancelled, or did not end."""


@dataclass
class Tenure:
    """A publisher or a chief, from the moment when the engine knew it."""

    name: str
    process: Process
    began: float
    term: int = 0
    ended: float | None = None
    how: str = ""
    """"finished", "failed" or "killed"."""


@dataclass
class WaitEnd:
    """A wait that was ended, or a term, and why."""

    process: Process
    time: float
    kind: str  # finished, failed
    text: str


@dataclass
class History:
    """All of it."""

    world: World
    calls: list[Call] = field(default_factory=list)
    publishers: list[Tenure] = field(default_factory=list)
    leads: list[Tenure] = field(default_factory=list)
    wait_ends: list[WaitEnd] = field(default_factory=list)
    stale_terms: list[WaitEnd] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """When the server lost data."""
    opened: list[tuple[float, Process]] = field(default_factory=list)
    """When a process first connected."""
    ill: list[tuple[Process, float, float]] = field(default_factory=list)
    """When a process could not act or be reached."""
    late_secs: float = 0.0
    """For how long after that others may still take it for dead."""
    final_steps: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    settled: float = 0.0
    """The time from which on there were no faults, and their consequences had passed."""

    def was_well(self, process: Process, since: float, until: float) -> bool:
        """Return whether the process could act and be reached throughout, and for so long before
        that no other process took it for dead.
        """
        return not any(
            victim is process and began < until and ended + self.late_secs > since
            for victim, began, ended in self.ill
        )

    def was_cut_off(self, process: Process, since: float, until: float) -> bool:
        """Return whether the process could not act or be reached at any time between."""
        return any(
            victim is process and began < since and ended > until
            for victim, began, ended in self.ill
        )
