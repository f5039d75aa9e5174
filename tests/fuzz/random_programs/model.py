"""The reference model: what the records of one execution must look like.

From what went in at each boundary - which calls of the program failed, who cancelled which task,
who asked for a stop - it says what must have come out. It knows nothing of how the library does it,
nor of the order in which tasks run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from itertools import permutations

from aiohooks import errors
from aiohooks.testing import choose
from tests.fuzz.random_programs.execution import Execution, RecoverableError
from tests.fuzz.random_programs.programs import Program, draw
from tests.fuzz.random_programs.records import Record, SessionRecord, TrackedTask, flat, reachable

ENDED = (
    errors.HookGroupClosedError,
    errors.StopRequestedError,
    errors.SessionClosedError,
    errors.RecoveryExhaustedError,
)


async def run(draw_program: Callable[[], Program] = draw) -> None:
    """Run a program that the schedule chooses, on a loop with or without debug mode and eager
    tasks; it is to be explored.
    """
    loop, logs = asyncio.get_running_loop(), list[logging.LogRecord]()
    mode = choose("plain", "plain", "debug", "eager", name="loop")
    loop.slow_callback_duration = 1e9
    loop.set_debug(mode == "debug")
    if mode == "eager" and sys.version_info >= (3, 12):
        loop.set_task_factory(asyncio.create_eager_task_factory(TrackedTask))
    execution = Execution(draw_program())
    with _collecting_logs(logs):
        await execution.execute()
    execution.logs = logs
    found = violations(execution)
    assert not found, "; ".join(found)


@contextlib.contextmanager
def _collecting_logs(logs: list[logging.LogRecord]) -> Iterator[None]:
    """Collect the library's log, also where logging is disabled."""
    logger, disabled = logging.getLogger("aiohooks"), logging.root.manager.disable
    handler = logging.Handler()
    handler.handle = logs.append  # type: ignore[assignment, method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.disable(logging.NOTSET)
    try:
        yield
    finally:
        logging.disable(disabled)
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def violations(execution: Execution) -> list[str]:
    """Return what is wrong; each text begins with the law that does not hold."""
    unmade = [one.number for one in execution.sessions if one.session is None]
    assert not unmade, f"the sessions {unmade} of the program cannot be made: it tests nothing"
    found = [f"values: {one}" for one in execution.wrong]
    found += [f"task left: {one}" for one in execution.left]
    found += [
        f"caller cancelled: {one.get_name()}, by the library"
        for one in execution.tasks
        if one.by_library
    ]
    for record in [one for one in execution.records if one.is_library]:
        found += cancel_laws(record)
        if record.what in ("run", "raw", "hooked", "call", "until"):
            found += run_laws(execution, record)
    for session in (execution.group_record, *execution.sessions):
        if session.record is not None:
            found += [
                *block_laws(execution, session, session.record),
                *hook_laws(execution, session, session.record),
                *failure_laws(execution, session, session.record),
            ]
    for session in execution.sessions:
        found += overlap_laws(execution, session)
    found += background_laws(execution)
    return [*found, *lost_errors(execution)]


def cancel_laws(record: Record) -> Iterator[str]:
    """A cancel is neither lost nor invented, and the library leaves the task's count as it was."""
    if record.kept and not record.cancelled:
        yield f"cancel lost: {record!r}"
    if record.cancelled and not record.may_be_cancelled:
        yield f"cancel invented: {record!r}"
    if record.is_outermost and (record.stray or record.count_error):
        yield (
            "cancel count: off by"
            f" {record.count_error}{', a stray cancel is left' if record.stray else ''}: {record!r}"
        )


def run_laws(execution: Execution, run: Record) -> Iterator[str]:
    """It ends with the errors of the calls of its last attempt: one as it is, several as a flat
    group; or it returns.
    """
    session, out, calls = run.session, run.outcome, execution.last_attempt(run)
    assert session is not None
    failed = [one for one in calls if one.failed]
    stopped = run.what in ("run", "until") and session.stop_asked and session.stop_asked < run.began
    if stopped and (out is None or calls):
        yield f"stop lost: {run!r} with {calls}, but a stop was requested before"
    if out is None and failed:
        yield f"error lost: {run!r}, but {failed}"
    if out is None:
        yield from context_laws(run, calls)
    if out is None or run.cancelled:
        return
    came, raised, own = flat([out]), flat(one.error for one in failed), execution.of(session)
    beside = [
        one for one in own if one.what in ("background", "queued") and one.outcome is not None
    ]
    closing = session.closing is not None and run.ended is not None and session.closing < run.ended
    if (
        run.was_cancelled
        or closing
        or any(error in reachable([out]) for error in flat(one.outcome for one in beside))
    ):
        # something else came out; the errors of the calls are found somewhere, see `lost_errors`
        return
    # A requested stop is raised anew in each run that it ends, with the same text.
    is_stop = bool(session.stop_asked) and isinstance(out, errors.StopRequestedError)
    lost = [error for error in raised if error not in came]
    if is_stop:
        lost = [error for error in lost if not isinstance(error, errors.StopRequestedError)]
    wrapped = len(failed) == 1 and raised == came and out is not failed[0].outcome
    if lost or wrapped:
        yield f"error replaced: {run!r}, but {failed}"
    left = session.body is not None and session.body.before(run, ended=True)
    recovers = run.what == "until" and session.recovers  # a wait ends with the raw session
    ended = (
        left
        or recovers
        or session.stop_asked
        or beside
        or any(one.what == "run" and one.outcome for one in own)
    )
    for error in came:
        timed_out = isinstance(error, errors.HookTimeoutError) and any(
            spec.timeout for spec in session.specs
        )
        third_party = isinstance(error, errors.HookCancelledError) and any(
            record.cancelled or record.left_cancel for record in [*calls, *beside]
        )
        if not (
            error in raised or timed_out or third_party or (ended and isinstance(error, ENDED))
        ):
            yield f"error invented: {error!r} in {run!r}, but {failed}"


def context_laws(run: Record, calls: list[Record]) -> Iterator[str]:
    """A step sees the context variables of its hooks; hooks of a lower order are done before those
    of a higher one begin.
    """
    hooks = [(one.hook.spec.order, one.hook.number, one) for one in calls if one.hook is not None]
    for train in [one for one in calls if one.name == "train" and one.value is not None]:
        for _, number, one in hooks:
            if (
                one.name == "before_run"
                and one.outcome is None
                and train.value[number] != (run.token, one.attempt)
            ):
                yield f"context: the step of {run!r} saw {train.value[number]} of hook {number}"
    for (order, _, one), (other_order, _, other) in permutations(hooks, 2):
        # A hook that wraps others is done when these are.
        is_inner = one.name == other.name == "around"
        if order < other_order and one.name == other.name and not (is_inner or one.before(other)):
            yield (
                f"order: {one.name} of order {other_order} began before order {order} was done:"
                f" {run!r}"
            )


def block_laws(execution: Execution, session: SessionRecord, block: Record) -> Iterator[str]:
    """The body's error comes out of the block, and those of `begin`, `end` and `close`; variables
    equal the step.
    """
    own, error = execution.of(session), session.body_error
    if error not in (None, block.outcome) and not block.cancelled:
        yield f"error replaced: {block!r}, but {session.body!r}"
    failed = [one for one in own if one.name in ("begin", "end", "close") and one.failed]
    if failed and not any(one.what in ("session", "aclose") and one.outcome for one in own):
        yield f"error lost: {block!r}, but {failed}"
    if session.final is not None:
        value, replaced, step = session.final
        if (
            value not in (None, step)
            or replaced not in (None, session.replaced)
            or step < session.commits
        ):
            yield (
                f"values: {session.final}, but {session.commits} runs have returned,"
                f" {session.replaced} with `replace`"
            )


def failure_laws(execution: Execution, session: SessionRecord, block: Record) -> Iterator[str]:
    """The failure of a background task leaves the session, unless code outside of its own tasks and
    hooks has got it.
    """
    own = execution.of(session)
    failed = [
        one
        for one in own
        if one.what == "background"
        and isinstance(one.outcome, Exception)
        and not errors.is_clean_end(one.outcome)
        and one.before(block, ended=True)
    ]
    if not failed or block.ended is None or block.outcome is not None:
        return
    outcomes = [one.outcome for one in own if one.is_library and not one.is_inside]
    delivered = reachable(error for error in outcomes if error is not None)
    if not any(error in delivered for error in flat(one.outcome for one in failed)):
        yield f"failure kept: {failed}, but {block!r}"


def hook_laws(execution: Execution, session: SessionRecord, block: Record) -> Iterator[str]:
    """Hooks begin once each, and end once each in their `order`, only after a clean body; what was
    begun is closed, in reverse order.
    """
    own, body, specs = execution.of(session), session.body, session.specs
    calls = [(one.name, one.hook.number) for one in own if one.hook is not None]
    begins, ends, closes, exits = (
        [n for name, n in calls if name == each] for each in ("begin", "end", "close", "__aexit__")
    )
    begun = len(specs) if session.epoch else max(begins, default=-1) + 1
    if max(closes, default=-1) >= begun:
        unbegun = [number for number in range(begun, len(specs)) if "begin" in specs[number].names]
        if not unbegun:
            # The others have no `begin`, and count as begun before the session is created, where a
            # cancel may come.
            begun = len(specs)
        elif sys.version_info < (3, 12):
            # A call begins a turn after it was started there; a hook counts as begun from then, and
            # a cancel may come between.
            begins, begun = [*begins, unbegun[0]], unbegun[0] + 1
    to_begin, to_end, to_close = (
        [n for n in range(begun) if name in specs[n].names] for name in ("begin", "end", "close")
    )
    entered = [
        one.hook.number
        for one in own
        if one.hook and one.name == "__aenter__" and one.outcome is None
    ]
    if begins != to_begin or closes[::-1] != to_close or exits[::-1] != entered:
        yield f"close: begun {begins}, entered {entered}; closed {closes}, left {exits}"
    closed_before = body is not None and any(
        one.what == "aclose" and one.began < (body.ended or 0) for one in own
    )
    to_end.sort(key=lambda number: specs[number].order)
    if session.body_error and not closed_before:
        to_end = []
    gave_up = any(
        one.what == "background" or RecoverableError in map(type, flat([one.outcome]))
        for one in own
    )
    cut_off = (
        block.was_cancelled
        or block.thrown
        or any(one.what == "aclose" and one.was_cancelled for one in own)
    )
    if ends != to_end[: len(ends) if gave_up or cut_off or body is None else None]:
        yield f"end: hooks {ends} got it, not {to_end}; the body ended with {body!r}"


def overlap_laws(execution: Execution, session: SessionRecord) -> Iterator[str]:
    """Nothing runs on when its hook was closed, or its session has ended; runs take turns."""
    own = execution.of(session)
    closes = {one.hook: one for one in own if one.name == "close"}
    for one in own:
        close = closes.get(one.hook, one)
        if one.hook and not (
            one.before(session.record, ended=True) and (one is close or one.before(close))
        ):
            yield f"task left: {one!r} was still running when its hook, or the session, had ended"
    runs = [
        [one for one in own if one.token == run.token and not one.is_library]
        for run in own
        if run.what == "run"
    ]
    for first, second in permutations(filter(None, runs), 2):
        if first[0].began < second[0].began and not all(one.before(second[0]) for one in first):
            yield f"turns: {second[0]!r} began during {first}"


def background_laws(execution: Execution) -> Iterator[str]:
    """Every call of the group that was accepted is made for each background hook, or is counted as
    dropped; also a call that raises nothing but the failures of earlier background calls.
    """
    specs = execution.group_record.specs
    group = execution.entered_group
    status = [] if group is None else group.status()
    if len(status) != len(specs):
        return  # a hook that could not be entered was removed
    queued = [one for one in execution.of(execution.group_record) if one.what == "queued"]
    callees = [one.hook.number for one in queued if one.hook is not None]
    late = flat(one.outcome for one in queued)
    accepted = [
        one
        for one in execution.records
        if one.what == "call"
        and one.name == "notify"
        and one.ended is not None
        and all(error in late for error in flat([one.outcome]))
    ]
    for number, (spec, counts) in enumerate(zip(specs, status, strict=True)):
        if not spec.background or "notify" not in spec.names:
            continue
        begun = callees.count(number)
        if begun + counts.dropped + counts.pending < len(accepted):
            yield f"call lost: hook {number} has {begun} calls and {counts}, of {accepted}"


def lost_errors(execution: Execution) -> Iterator[str]:
    """Every error that a call of the program ended with has come out of a call of the library, or
    was logged.
    """
    failed = [
        one
        for one in execution.records
        if one.what in ("hook", "queued", "op", "background") and one.outcome is not None
    ]
    reached, text = execution.reported() if failed else ([], "")
    known: set[object] = set()
    for one in sorted(failed, key=lambda one: one.ended or 0):
        if one.is_logged and one.hook and (one.hook in known or one.hook.spec.timeout):
            # only the first failure of a hook is logged; it may be that of a call that had not
            # begun in time
            continue
        known.add(one.hook)
        for error in flat([one.error]):
            known_by_text = (str(error) and repr(error) in text) or (
                one.what == "background" and errors.is_clean_end(error)
            )
            if not known_by_text and error not in reached:
                yield f"error lost: {one!r}"
