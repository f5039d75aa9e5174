"""RunReport: what an engine knows of a run, for people and programs that look at it from outside."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aiohooks.stores._protocol import Snapshot


@dataclass(frozen=True, slots=True)
class PublisherReport:
    """A publisher of a run.

    Attributes:
        name: its name.
        process: its process, as `host:pid:word`.
        waits_for: the step that it waits for itself, and cannot advance until then; None while it does not wait.
        lease_secs: for how long after its last renewal it counts as alive; None where the engine finds the dead by itself.
        renewals: how often its lease was renewed, or what it waits for has changed.
    """

    name: str
    process: str
    waits_for: int | None
    lease_secs: float | None
    renewals: int


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How the last publisher or chief of a run left.

    Attributes:
        name: its name.
        step: the step at which it left.
        error: what it failed with; None if it finished.
        lost: whether it was found dead instead of leaving by itself.
    """

    name: str
    step: int
    error: str | None
    lost: bool


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run as its engine has it.

    Created by `StepStore.inspect`.

    Attributes:
        run: the name of the run.
        epoch: the epoch; each reset begins a new one.
        step: the step.
        term: the number of the latest term; 0 before the first one.
        chief: the process of the chief; None if there is none.
        initialised: whether the chief has initialised what the workers need.
        publishers: the registered publishers.
        last_exit: how the last one left; None if none has left.
        failure: the error that ended all waits at this step; None if there is none.
        waiting: the lowest step that each waiting process waits for, in order, 0 for any change; None if the engine does not
            know the waiters.
    """

    run: str
    epoch: int
    step: int
    term: int = 0
    chief: str | None = None
    initialised: bool = False
    publishers: tuple[PublisherReport, ...] = ()
    last_exit: ExitReport | None = None
    failure: str | None = None
    waiting: tuple[int, ...] | None = None


def report_of(run: str, snapshot: Snapshot, waiting: tuple[int, ...] | None = None) -> RunReport:
    """Return the report of a run that an engine has read."""
    position, members, left, failure = snapshot.position, snapshot.members, snapshot.last_exit, snapshot.failure
    return RunReport(
        run=run,
        epoch=position.epoch,
        step=position.step,
        term=snapshot.term,
        chief=next((member.process for member in members if member.term), None),
        # Without a living member nothing is initialised any more.
        initialised=snapshot.ready and bool(members or left is None),
        publishers=tuple(
            PublisherReport(
                member.name,
                member.process,
                member.waits_for or None,
                member.ttl if math.isfinite(member.ttl) else None,
                member.heartbeat,
            )
            for member in members
            if not member.term
        ),
        last_exit=None if left is None else ExitReport(left.name, left.step, left.error or None, left.lost),
        failure=None if failure is None or failure.position != position else failure.error,
        waiting=waiting,
    )
