"""What the history of a simulation must satisfy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from aiohooks.stores import Position
from tests.fuzz.simulation.history import History, Tenure
from tests.fuzz.simulation.virtual_time import Process
from tests.support.step_laws import Operation, find_second_leader, find_violation


def check(cluster: Any) -> Iterator[str]:
    """Yield what is wrong."""
    history: History = cluster.history
    yield from check_each_process(history)
    yield from check_counts(history)
    calls = calls_before_a_loss(history)
    yield from filter(None, (find_violation(calls), find_second_leader(calls)))
    yield from check_wait_ends(cluster)
    yield from check_leads(cluster)


def calls_before_a_loss(history: History) -> list[Operation]:
    """Return the calls that began before any data was lost; what ended later has no answer."""
    loss = min(history.losses, default=math.inf)
    calls: list[Operation] = []
    for call in history.calls:
        if call.began > loss:
            continue
        operation = Operation(id(call.process), call.kind, call.amount, call.began, term=call.term)
        if call.step is not None and call.ended is not None and call.ended <= loss:
            position = Position(1, call.step)
            operation = dataclasses.replace(operation, ended=call.ended, position=position)
        calls.append(operation)
    return calls


def check_each_process(history: History) -> Iterator[str]:
    """No process ever sees a position before one it has seen; a wait returns the step it waited
    for, or a later one.
    """
    for call in history.calls:
        if call.step is None or call.known_after is None:
            continue
        (epoch, step), amount = call.known, call.amount
        if call.known_after < call.known:
            yield f"{call.process} has gone back: {call}"
        if call.known_after.epoch == epoch and call.kind == "advance":
            amount += step
        if call.step < amount:
            yield f"{call.process} saw less than {amount}: {call}"


def check_counts(history: History) -> Iterator[str]:
    """The final step is what was advanced: nothing twice, and nothing acknowledged was lost unless
    the server lost data.
    """
    if not history.final_steps:
        return
    final = history.final_steps[0]
    if len(set(history.final_steps)) > 1:
        yield f"at the end processes read different steps: {history.final_steps}"
    before = [
        one for one in history.calls if one.kind == "advance" and one.began < history.settled + 1.0
    ]
    most = sum(one.amount for one in history.calls if one.kind == "advance")
    acknowledged = sum(one.amount for one in before if one.step is not None)
    if final > most:
        yield f"counted twice: {final} after advances by {most}"
    if not history.losses and final < acknowledged:
        yield f"lost: {final} after acknowledged advances by {acknowledged}"


def check_wait_ends(cluster: Any) -> Iterator[str]:
    """No wait ends while its trainer lives, and each ends with what has happened."""
    history: History = cluster.history
    late = history.late_secs
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
    late = history.late_secs
    for lead in history.leads:
        ended = float("inf") if lead.ended is None else lead.ended
        for other in history.leads:
            if other.process is lead.process or not lead.began <= other.began < ended:
                continue
            if knew_nothing(other.process, lead, other.began, history):
                continue
            if history.was_well(lead.process, other.began - late, other.began):
                yield f"two chiefs: {lead} and {other}"
    for stale in history.stale_terms:
        if not history.was_well(stale.process, stale.time - late, stale.time):
            continue
        # A chief that knew nothing of this one leads until this one is back, in whichever order
        # they are.
        if not any(
            knew_nothing(other.process, lead, stale.time, history)
            for lead in history.leads
            for other in history.leads
            if lead.process is stale.process and other.process is not stale.process
        ):
            yield f"a chief that could be reached has lost its term: {stale}"
    yield from check_terms(history)


def check_terms(history: History) -> Iterator[str]:
    """Also after a loss: who was granted the lead is the only one to write as a chief, until a
    later term begins. A process that knows nothing of it may lead until the chief of before is
    back.
    """
    for lead in history.leads:
        for call in history.calls:
            is_of_a_chief = call.term and call.step is not None
            is_later = call.began > lead.began and call.process is not lead.process
            if not (is_of_a_chief and is_later and call.term <= lead.term):
                continue
            if not knew_nothing(call.process, lead, call.began, history):
                yield f"a write of an earlier chief: {call}, after {lead}"


def knew_nothing(process: Process, lead: Tenure, time: float, history: History) -> bool:
    """Return whether a process could not know of the lead of another one at a time: the run was
    lost before, and the process came after that, or was cut off from the beginning of the lead on.
    """
    opened = min((at for at, opener in history.opened if opener is process), default=time)
    return any(
        opened > loss - 1.0 or history.was_cut_off(process, lead.began, loss)
        for loss in history.losses
        if loss <= time
    )
