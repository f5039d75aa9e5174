"""What the history of a simulation must satisfy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.fuzz.simulation.history import History, Operation


def check(cluster: Any) -> Iterator[str]:
    """Yield what is wrong."""
    history: History = cluster.history
    exact = not history.losses
    yield from check_each_process(history)
    yield from check_counts(history, exact)
    for began, ended in segments(history):
        yield from check_linearizable(
            [one for one in history.operations if began <= one.began <= ended], ended
        )
    yield from check_wait_ends(cluster)
    yield from check_leads(cluster)


def segments(history: History) -> list[tuple[float, float]]:
    """Return the times between which no data was lost, and in which what a process has seen cannot
    be forgotten.
    """
    if not history.losses:
        return [(0.0, float("inf"))]
    return [(0.0, min(history.losses)), (history.settled, float("inf"))]


def check_each_process(history: History) -> Iterator[str]:
    """No process ever sees a position before one it has seen; a wait returns the step it waited
    for, or a later one.
    """
    for operation in history.operations:
        if operation.step is None or operation.known_after is None:
            continue
        (epoch, step), amount = operation.known, operation.amount
        if operation.known_after < operation.known:
            yield f"{operation.process} has gone back: {operation}"
        if operation.known_after.epoch == epoch and operation.kind == "advance":
            amount += step
        if operation.step < amount:
            yield f"{operation.process} saw less than {amount}: {operation}"


def check_counts(history: History, exact: bool) -> Iterator[str]:
    """The final step is what was advanced: nothing twice, and nothing acknowledged was lost unless
    the server lost data.
    """
    if not history.final_steps:
        return
    final = history.final_steps[0]
    if len(set(history.final_steps)) > 1:
        yield f"at the end processes read different steps: {history.final_steps}"
    before = [
        one
        for one in history.operations
        if one.kind == "advance" and one.began < history.settled + 1.0
    ]
    most = sum(one.amount for one in history.operations if one.kind == "advance")
    acknowledged = sum(one.amount for one in before if one.step is not None)
    if final > most:
        yield f"counted twice: {final} after advances by {most}"
    if exact and final < acknowledged:
        yield f"lost: {final} after acknowledged advances by {acknowledged}"


def check_linearizable(operations: list[Operation], until: float) -> Iterator[str]:
    """Advances, reads and waits have one order that agrees with the order in time: exact for a
    counter.

    An acknowledged advance has taken its place, (step - amount, step], for itself; a read or a wait
    stands between two places; and what ended before something else began stands before it.
    """
    known = [
        one
        for one in operations
        if one.step is not None and one.ended is not None and one.ended <= until
    ]
    advances = sorted(
        (one for one in known if one.kind == "advance"), key=lambda one: one.step or 0
    )
    end = 0
    for one in advances:
        assert one.step is not None
        if one.step - one.amount < end and end:
            yield f"two advances have led to the same step, or one counts twice: {one}"
        end = one.step
    inside = {
        step for one in advances for step in range((one.step or 0) - one.amount + 1, one.step or 0)
    }
    yield from (
        f"a step that no advance has led to: {one}"
        for one in known
        if one.kind != "advance" and one.step in inside
    )
    ends = sorted(known, key=lambda one: one.ended or 0.0)
    highest, at = 0, 0
    for one in sorted(known, key=lambda one: one.began):
        while at < len(ends) and (ends[at].ended or 0.0) < one.began:
            highest = max(highest, ends[at].step or 0)
            at += 1
        assert one.step is not None
        if one.kind != "wait" and one.step < highest + (one.amount if one.kind == "advance" else 0):
            yield f"step {highest} had been seen before this began: {one}"
    most, at = 0, 0
    begins = sorted((one for one in operations if one.kind == "advance"), key=lambda one: one.began)
    first = (
        min(
            (one.step or 0) - one.amount if one.kind == "advance" else (one.step or 0)
            for one in known
        )
        if known
        else 0
    )
    for one in ends:
        while at < len(begins) and begins[at].began <= (one.ended or 0.0):
            most += begins[at].amount
            at += 1
        if (one.step or 0) > first + most + (0 if not first else 10**9):
            yield f"a step that no advance can have led to: {one}"


def check_wait_ends(cluster: Any) -> Iterator[str]:
    """No wait ends while its trainer lives, and each ends with what has happened."""
    history: History = cluster.history
    late = 2 * cluster.lease_secs + cluster.heartbeat_secs + 4.0
    for end in history.wait_ends:
        margin = 1.0 if history.was_well(end.process, end.time - late, end.time) else late
        for trainer in history.publishers:
            lives = trainer.began < end.time - margin and (
                trainer.ended is None or trainer.ended > end.time
            )
            if lives and history.was_well(trainer.process, end.time - late, end.time):
                yield f"a wait was ended while its trainer {trainer.name} lived: {end}"
                break
        if end.kind == "finished" and not any(
            each.how == "finished" and each.ended is not None and each.ended <= end.time
            for each in (*history.publishers, *history.leads)
        ):
            yield f"no publisher has finished: {end}"


def check_leads(cluster: Any) -> Iterator[str]:
    """There is one chief, until it leaves or could not be reached; writes of an earlier term come
    before those of a later one.
    """
    history: History = cluster.history
    late = 2 * cluster.lease_secs + cluster.heartbeat_secs + 4.0

    is_new = partial(came_after_a_loss, history)
    for lead in history.leads:
        for other in history.leads:
            if other is lead or not lead.began <= other.began < (
                float("inf") if lead.ended is None else lead.ended
            ):
                continue
            if other.process is lead.process or is_new(other.process, other.began):
                continue
            if history.was_well(lead.process, other.began - late, other.began):
                yield f"two chiefs: {lead} and {other}"
    for stale in history.stale_terms:
        excused = not history.was_well(stale.process, stale.time - late, stale.time)
        # One that came after a loss and knew nothing leads until the chief of before is back, in
        # whichever order they are.
        if not excused and not any(is_new(lead.process, stale.time) for lead in history.leads):
            yield f"a chief that could be reached has lost its term: {stale}"
    yield from check_terms(history)
    for began, ended in segments(history):
        writes = [
            one
            for one in history.operations
            if one.term and one.step is not None and one.began >= began
        ]
        writes = sorted(
            (one for one in writes if one.ended is not None and one.ended <= ended),
            key=lambda one: one.step or 0,
        )
        for before, after in itertools.pairwise(writes):
            if after.term < before.term:
                yield f"the write of an earlier term comes later: {before}, {after}"
            if after.term == before.term and after.process is not before.process:
                yield f"two processes have written in one term: {before}, {after}"


def check_terms(history: History) -> Iterator[str]:
    """Also after a loss: who was granted the lead is the only one to write as a chief, until a
    later term begins. A process that came after the loss, and knows nothing of the run, may lead
    until the chief of before is back.
    """
    for lead in history.leads:
        for operation in history.operations:
            is_of_a_chief = operation.term and operation.step is not None
            is_later = operation.began > lead.began and operation.process is not lead.process
            if not (is_of_a_chief and is_later and operation.term <= lead.term):
                continue
            if not came_after_a_loss(history, operation.process, operation.began):
                yield f"a write of an earlier chief: {operation}, after {lead}"


def came_after_a_loss(history: History, process: Any, time: float) -> bool:
    """Return whether the run may have been lost when the process came, so that it knew nothing of
    it.
    """
    opened = min((at for at, opener in history.opened if opener is process), default=time)
    return any(loss <= time and opened > loss - 1.0 for loss in history.losses)
