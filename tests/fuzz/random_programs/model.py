"""The reference model: what the records of one execution must look like.

From what went in at each boundary - which calls of the program failed, who cancelled which task, who asked for a stop - it
says what must have come out. It knows nothing of how the library does it, nor of the order in which tasks run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from aiohooks import errors
from aiohooks.errors import is_clean_end
from tests.fuzz.random_programs.execution import Execution, RecoverableError
from tests.fuzz.random_programs.records import Record, SessionRecord, flat, reachable

ENDED = (errors.HookGroupClosedError, errors.StopRequestedError, errors.SessionClosedError, errors.RecoveryExhaustedError)


def violations(execution: Execution) -> list[str]:
    """Return what is wrong; each text begins with the law that does not hold."""
    if execution.hung:
        return [f"deadlock: {', '.join(execution.left)}"]
    found = [f"values: {one}" for one in execution.wrong]
    found += [f"task left: {one}" for one in execution.left]
    found += [f"loop error: {one}" for one in execution.loop_errors]
    for record in execution.records:
        if record.is_library:
            found += cancel_laws(record)
            if record.what in ("run", "raw", "hooked", "call"):
                found += run_laws(execution, record)
            elif record.what == "until":
                found += until_laws(record)
    found += group_laws(execution, execution.group_record)
    for session in execution.sessions:
        found += hook_laws(execution, session)
        found += session_laws(execution, session)
    return [*found, *lost_errors(execution)]


def cancel_laws(record: Record) -> Iterator[str]:
    """A cancel is neither lost nor invented, and the library leaves the task's count as it was."""
    if record.kept and not record.cancelled:
        yield f"cancel lost: {record!r}"
    if record.cancelled and not record.may_be_cancelled:
        yield f"cancel invented: {record!r}"
    if record.is_outermost and (record.stray or record.count_error):
        yield f"cancel count: off by {record.count_error}{', a stray cancel is left' if record.stray else ''}: {record!r}"


def run_laws(execution: Execution, run: Record) -> Iterator[str]:
    """A run ends with the errors of the calls of its last attempt: one as it is, several as a flat group; or it returns."""
    session, out = run.session, run.outcome
    assert session is not None
    own = execution.of(session)
    calls = [one for one in own if one.token == run.token and not one.is_library]
    if run.what == "run":  # a recovery announces a new session to the hooks; what fails then is the run's outcome, too
        announced = [one for one in own if one.name == "after_create_session" and run.began < one.began]
        calls += [one for one in announced if one.before(run, ended=True)]
    last = max((one.epoch for one in calls), default=0)
    calls = [one for one in calls if one.epoch == last]
    failed = [one for one in calls if one.failed]
    if out is None:
        if failed:
            yield f"error lost: {run!r}, but {failed}"
        if run.what == "run" and session.stop_asked and session.stop_asked < run.began:
            yield f"stop lost: {run!r}, but a stop was requested before"
        yield from context_laws(run, calls)
    if out is None or run.cancelled:
        return
    raised = flat(one.error for one in failed)
    beside = [one for one in own if one.what in ("background", "queued") and one.outcome is not None]
    closing = session.closing is not None and run.ended is not None and session.closing < run.ended
    if run.was_cancelled or closing or any(one.outcome is error for one in beside for error in reachable([out])):
        return  # something else came out; the errors of the calls are found somewhere, see `lost_errors`
    if len(failed) == 1 and raised and out is not failed[0].outcome:
        yield f"error replaced: {run!r}, but {failed}"
    if any(not any(one is error for error in flat([out])) for one in raised):
        yield f"error lost: {run!r}, but {failed}"
    left = run.what == "call" and session.body is not None and session.body.before(run, ended=True)
    ended = left or session.stop_asked or beside or any(one.what == "run" and one.outcome for one in own)
    for error in flat([out]):
        timed_out = isinstance(error, errors.HookTimeoutError) and any(spec.timeout for spec in session.specs)
        third_party = isinstance(error, errors.HookCancelledError) and any(one.cancelled for one in [*failed, *beside])
        if not (any(error is one for one in raised) or timed_out or third_party or (ended and isinstance(error, ENDED))):
            yield f"error invented: {error!r} in {run!r}, but {failed}"


def until_laws(until: Record) -> Iterator[str]:
    """A wait ends with what it waited for, and does not begin after a stop."""
    awaited, stopped = until.value, until.session and until.session.stop_asked
    if until.outcome is None and awaited.outcome is not None:
        yield f"error lost: {until!r}, but {awaited!r}"
    if stopped and stopped < until.began and (until.outcome is None or awaited.ended is not None):
        yield f"stop lost: {until!r}, but a stop was requested before"


def context_laws(run: Record, calls: list[Record]) -> Iterator[str]:
    """A step sees the context variables of its hooks; hooks of a lower order are done before those of a higher one begin."""
    hooks = [(one.hook.spec.order, one.hook.number, one) for one in calls if one.hook is not None]
    for train in [one for one in calls if one.name == "train" and one.value is not None]:
        for _, number, one in hooks:
            seen = train.value[number]
            if one.name == "before_run" and one.outcome is None and seen != (run.token, one.attempt):
                yield f"context: the step of {run!r} saw {seen} of hook {number}"
    for (order, _, one), (other_order, _, other) in itertools.permutations(hooks, 2):
        if order < other_order and one.name == other.name and not one.before(other):
            yield f"order: {one.name} of order {other_order} began before order {order} was done: {run!r}"


def hook_laws(execution: Execution, session: SessionRecord) -> Iterator[str]:
    """Each begun hook is closed once, in reverse order, after all else; `end` is for clean ends; runs take turns."""
    own, block, body = execution.of(session), session.record, session.body
    assert block is not None
    calls = [(one.hook.number, one) for one in own if one.hook is not None]
    closers = [one for one in own if one.what == "aclose" and body is not None and one.began < (body.ended or 0)]
    failed = session.body_failed and not closers
    lost = [error for error in flat(one.outcome for one in own) if isinstance(error, RecoverableError)]
    gave_up = lost or any(one.what == "background" for one in own)
    cut_off = block.was_cancelled or block.thrown or any(one.what == "aclose" and one.was_cancelled for one in own)
    for number, spec in enumerate(session.specs):
        records = [one for other, one in calls if other == number]
        names, methods = [one.name for one in records], dict(spec.methods)
        if "close" in methods and (session.epoch or "begin" in names) and names.count("close") != 1:
            yield f"close: hook {number} got {names}"
        if names.count("begin") > 1 or names.count("end") > 1 or ("end" in names and failed):
            yield f"end: hook {number} got {names}, the body ended with {body!r}"
        if "end" in methods and "end" not in names and body and not (failed or cut_off or gave_up):
            yield f"end: hook {number} got {names}, the body ended with {body!r}"
        close = next((one for one in records if one.name == "close"), None)
        for one in records:
            if not one.before(block, ended=True) or not (close is None or one is close or one.before(close)):
                yield f"task left: {one!r} was still running when its hook, or the session, had ended"
    closes = [number for number, one in calls if one.name == "close"]
    if closes != sorted(closes, reverse=True):
        yield f"close: hooks were closed in the order {closes}"
    runs = [[one for one in own if one.token == run.token and not one.is_library] for run in own if run.what == "run"]
    for first, second in itertools.permutations([calls for calls in runs if calls], 2):
        if first[0].began < second[0].began and not all(one.before(second[0]) for one in first):
            yield f"turns: {second[0]!r} began during {first}"


def session_laws(execution: Execution, session: SessionRecord) -> Iterator[str]:
    """The body's error comes out of the block unchanged; errors of `end` and `close` come out; variables equal the step."""
    own, block = execution.of(session), session.record
    if session.body_failed:
        yield from same_error(block, session.body)
    failed = [one for one in own if one.name in ("begin", "end", "close") and one.failed]
    if failed and not any(one.what in ("session", "aclose") and one.outcome for one in own):
        yield f"error lost: {block!r}, but {failed}"
    if session.final is not None:
        value, replaced, step = session.final
        if value is not None and (value != step or replaced != session.replaced):
            yield f"values: the variable is {value}, the step {step}; another is {replaced} after {session.replaced} runs"
        if step < session.commits:
            yield f"values: {session.commits} runs have returned, the step is {step}"


def group_laws(execution: Execution, group: SessionRecord) -> Iterator[str]:
    """Members that were entered are left once, in reverse order; the error of the block stays itself."""
    calls = [(one.hook.number, one) for one in execution.of(group) if one.hook is not None]
    entered = [number for number, one in calls if one.name == "__aenter__" and one.outcome is None]
    left = [number for number, one in calls if one.name == "__aexit__"]
    if left != entered[::-1]:
        yield f"close: members {entered} were entered, {left} left"
    yield from same_error(group.record, group.body)


def same_error(block: Record | None, body: Record | None) -> Iterator[str]:
    """The error of the body comes out of the block, or a cancel."""
    if (
        block is not None
        and body is not None
        and body.outcome is not None
        and block.outcome is not body.outcome
        and not block.cancelled
    ):
        yield f"error replaced: {block!r}, but {body!r}"


def lost_errors(execution: Execution) -> Iterator[str]:
    """Every error that a call of the program ended with has come out of a call of the library, or was logged."""
    failed = [one for one in execution.records if one.what in ("hook", "queued", "op", "background") and one.outcome is not None]
    reached, text = execution.reported() if failed else ([], "")
    known: set[object] = set()
    for one in failed:
        if one.is_logged and one.hook and (one.hook in known or one.hook.spec.timeout):
            continue  # only the first failure of a hook is logged; it may be that of a call that had not begun in time
        known.add(one.hook)
        for error in flat([one.error]):
            known_by_text = (str(error) and repr(error) in text) or (one.what == "background" and is_clean_end(error))
            if not known_by_text and not any(error is other for other in reached):
                yield f"error lost: {one!r}"
