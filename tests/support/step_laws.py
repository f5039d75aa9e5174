"""The laws of a step store, for histories of real processes: linearizable calls, exact sums, terms.

A position only grows, and each operation returns the one that it led to or saw. So the order in
which the operations took effect is that of their positions, and the check is exact and needs no
search:

- the steps that an advance added, `(step - amount, step]`, are those of no other one: otherwise a
  write was lost, and its answer was given to another one;
- what is missing between them was added by operations without an answer, whose callers were killed:
  each of them at most once, and not before it began; otherwise something counted twice;
- an operation that began after another one had ended is behind it: a read sees what was
  acknowledged, and a write adds to it.

A wait is no read: it may end with a step that has been left behind meanwhile, but not with one that
was not reached yet; what begins after it sees that step.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from aiohooks.stores import Position

Kind = Literal["advance", "raise", "reset", "read", "wait"]
START = Position(1, 0)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store, with the times of a clock that all processes share."""

    process: int
    """Its id."""
    kind: Kind
    amount: int
    """What was added, or the step that was raised to, reset to or waited for."""
    began: float
    ended: float = math.inf
    """Infinite for a call without an answer, which may have taken effect at any time since, or not
    at all.
    """
    position: Position = START
    """The position that it led to, or saw."""
    term: int = 0
    """The term of its process; 0 if that is not the chief."""

    @property
    def is_known(self) -> bool:
        return self.ended < math.inf

    @property
    def reads(self) -> bool:
        """Whether its position is the current one of a moment between its begin and its end."""
        return self.kind != "wait"


@dataclass(frozen=True, slots=True)
class _Point:
    """An answered operation in the order of the positions: it led from `before` to the operation's
    position.
    """

    operation: Operation
    before: Position

    @property
    def moves(self) -> bool:
        return self.before < self.operation.position


def find_violation(history: Sequence[Operation]) -> str:
    """Return why a history is not linearizable; empty if it is. What has no answer is an advance or
    a raise.
    """
    known = [one for one in history if one.is_known]
    unanswered = [one for one in history if not one.is_known and one.kind not in ("read", "wait")]
    assert {one.kind for one in unanswered} <= {"advance", "raise"}
    points, wrong = _points([one for one in known if one.reads])
    if not wrong:
        wrong = _find_overlap_or_gap(points, unanswered)
    return wrong or _find_stale(points, known) or _find_future_wait(points, known, unanswered)


def _points(known: Sequence[Operation]) -> tuple[list[_Point], str]:
    """Return the answered operations in the order of their effects."""
    points: list[_Point] = []
    raisers: dict[Position, Operation] = {}
    moved_to = {START}
    earliest_end: dict[Position, float] = {}
    for one in known:
        position = one.position
        earliest_end[position] = min(one.ended, earliest_end.get(position, math.inf))
        if one.kind == "advance":
            moved_to.add(position)
        elif one.kind == "reset":
            if position.step != one.amount:
                return [], f"{one} led to another step"
            moved_to.add(position)
        elif one.kind == "raise":
            if position.step < one.amount:
                return [], f"{one} did not raise the step"
            if position.step == one.amount:
                raisers[position] = min(
                    one, raisers.get(position, one), key=lambda each: each.began
                )
    for one in known:
        epoch, step = one.position
        before = one.position
        if one.kind == "advance":
            before = Position(epoch, step - one.amount)
        elif one.kind == "reset":
            before = Position(epoch - 1, 0)
        elif (
            raisers.get(one.position) is one
            and one.position not in moved_to
            and one.began < earliest_end[one.position]
        ):
            before = Position(epoch, -1)  # from wherever the step was
        points.append(_Point(one, before))
    points.sort(key=lambda point: (point.operation.position, not point.moves, point.before))
    return points, ""


def _find_overlap_or_gap(points: Sequence[_Point], unanswered: Sequence[Operation]) -> str:
    deadlines = [math.inf] * (len(points) + 1)  # by when the position of each point was reached
    for number in range(len(points) - 1, -1, -1):
        deadlines[number] = min(points[number].operation.ended, deadlines[number + 1])
    advances = sorted(
        (one for one in unanswered if one.kind == "advance"), key=lambda one: one.began
    )
    began = [one.began for one in advances]
    most_missing = [0, *itertools.accumulate(one.amount for one in advances)]
    raised = [one for one in unanswered if one.kind == "raise"]
    current, missing = START, 0
    for point, deadline in zip(points, deadlines, strict=False):
        one = point.operation
        if one.kind == "reset":
            if one.position.epoch != current.epoch + 1:
                return f"{one} began an epoch that is not the next one after {current}"
        else:
            if one.position.epoch != current.epoch:
                return f"{one} is in an epoch that no reset has begun, after {current}"
            if point.before.step >= 0:
                if point.before < current:
                    return (
                        f"{one} overlaps with what led to {current}: a write was lost, and its"
                        " steps were given twice"
                    )
                raised_to = [
                    each.amount
                    for each in raised
                    if each.began < deadline and each.amount <= point.before.step
                ]
                missing += point.before.step - max([current.step, *raised_to])
                if missing > most_missing[bisect.bisect_left(began, deadline)]:
                    return f"{one}: {missing} steps up to there were counted twice, or for no one"
        current = one.position
    return ""


def _find_stale(points: Sequence[_Point], known: Sequence[Operation]) -> str:
    """Return an operation that took effect before one that had ended when it began."""
    by_end = sorted(known, key=lambda one: one.ended)
    highest = START
    ended = 0
    for point in sorted(points, key=lambda each: each.operation.began):
        one = point.operation
        while ended < len(by_end) and by_end[ended].ended < one.began:
            highest = max(highest, by_end[ended].position)
            ended += 1
        is_jump = point.moves and (one.kind == "reset" or point.before.step < 0)
        if (one.position <= highest) if is_jump else (point.before < highest):
            return f"{one} is stale: {highest} had been seen before it began"
    return ""


def _find_future_wait(
    points: Sequence[_Point], known: Sequence[Operation], unanswered: Sequence[Operation]
) -> str:
    """Return a wait that ended with a position that no operation begun by then could have led to,
    or before its step.
    """
    movers = sorted(
        (point for point in points if point.moves), key=lambda each: each.operation.position
    )
    positions = [point.operation.position for point in movers]
    earliest = [math.inf] * (
        len(movers) + 1
    )  # the begin of the earliest operation at that position or behind it
    for number in range(len(movers) - 1, -1, -1):
        earliest[number] = min(movers[number].operation.began, earliest[number + 1])
    begun = sorted(one.began for one in unanswered)
    for one in known:
        if one.kind != "wait":
            continue
        if one.position.step < one.amount:
            return f"{one} ended before its step"
        if (
            one.position == START
            or earliest[bisect.bisect_left(positions, one.position)] < one.ended
        ):
            continue
        if not bisect.bisect_left(begun, one.ended):
            return f"{one} ended with a step that was not reached yet"
    return ""


def find_second_leader(history: Iterable[Operation]) -> str:
    """Return a write of a term that another process has, or that was accepted after one of a newer
    term.
    """
    writes = sorted(
        (one for one in history if one.term and one.is_known and one.kind == "advance"),
        key=lambda one: one.term,
    )
    accepted: dict[int, float] = {}
    for term, same in itertools.groupby(writes, lambda one: one.term):
        of_term = list(same)
        if len({one.process for one in of_term}) > 1:
            return f"two processes have written in the term {term}"
        accepted[term] = min(one.ended for one in of_term)
    for one in writes:
        newer = [ended for term, ended in accepted.items() if term > one.term]
        if newer and min(newer) < one.began:
            return f"{one} was accepted after a write of a newer term"
    return ""
