"""Which methods are called on which kind of end: the rules as data, and the page that is generated
from them.

`RULES` defines the expected calls of each cell; `tests.support.failure_cells` runs a cell, and
`tests/session/test_failure_matrix.py` compares the two.
`python -m tests.support.failure_rules --write tests/session/FAILURE_MATRIX.md` writes the page.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import aiohooks as ah
from tests.support.failure_cells import HOOKS, OVERLAPPING, RUNS, Cell, Event

PHASES = ("begin", "after_create_session", "before_run", "run", "after_run", "end", "close")
KINDS = ("error", "cancel", "stop", "clean end")

# Which hooks are called if hook `i` misbehaves.
ALL = "all"
UP_TO = "1 to i"
NONE = "-"

# What the caller and `close` get.
NOTHING = "nothing"
ITS_ERROR = "the error"
CANCELLED = "`CancelledError`"


class Rule(NamedTuple):
    """The outcome if hook `i` misbehaves in its first call of a phase (for `run`: the operation
    that it fetches does).

    `begin` to `close` are the hooks that are called; `create` and `run` are whether the session
    does so. `runs` is the number of runs that returned to the caller; if it is 0, the run's columns
    describe the run that was interrupted.
    """

    begin: str
    create: bool
    after_create_session: str
    before_run: str
    run: bool
    after_run: str
    end: str
    close: str
    runs: int
    step: int
    enters: bool
    caller_gets: str
    close_gets: str


def raises(rule: Rule, error: str) -> Rule:
    """The caller and `close` get the error."""
    return rule._replace(caller_gets=error, close_gets=error)


FINISHED = Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, NOTHING, NOTHING)
ONE_RUN = FINISHED._replace(runs=1, step=1)
NO_RUN = FINISHED._replace(before_run=NONE, run=False, after_run=NONE, runs=0, step=0)
NOT_OPENED = NO_RUN._replace(end=NONE, enters=False)

# The hooks that are called, by the phase in which one fails.
IN_BEGIN = NOT_OPENED._replace(begin=UP_TO, create=False, after_create_session=NONE, close=UP_TO)
IN_CREATION = NOT_OPENED._replace(after_create_session=UP_TO)
IN_BEFORE_RUN = NO_RUN._replace(before_run=UP_TO, end=NONE)
IN_RUN = NO_RUN._replace(before_run=ALL, run=True, end=NONE)
IN_AFTER_RUN = IN_RUN._replace(after_run=UP_TO, step=1)

RULES: dict[tuple[str, str], Rule] = {
    # While the session is constructed every error ends it, including a clean end: no run has taken
    # place yet. Only hooks whose `begin` was started are closed.
    ("begin", "error"): raises(IN_BEGIN, ITS_ERROR),
    ("begin", "cancel"): raises(IN_BEGIN, CANCELLED),
    ("begin", "stop"): NO_RUN,
    ("begin", "clean end"): raises(IN_BEGIN, ITS_ERROR),
    ("after_create_session", "error"): raises(IN_CREATION, ITS_ERROR),
    ("after_create_session", "cancel"): raises(IN_CREATION, CANCELLED),
    ("after_create_session", "stop"): NO_RUN,
    ("after_create_session", "clean end"): raises(IN_CREATION, ITS_ERROR),
    # An error interrupts the run: no commit, no later phase, no `end`. A stop lets this run finish.
    ("before_run", "error"): raises(IN_BEFORE_RUN, ITS_ERROR),
    ("before_run", "cancel"): raises(IN_BEFORE_RUN, CANCELLED),
    ("before_run", "stop"): ONE_RUN,
    ("before_run", "clean end"): IN_BEFORE_RUN._replace(end=ALL),
    ("run", "error"): raises(IN_RUN, ITS_ERROR),
    ("run", "cancel"): raises(IN_RUN, CANCELLED),
    ("run", "stop"): ONE_RUN,
    ("run", "clean end"): IN_RUN._replace(end=ALL),
    # The step has been committed; the caller gets the error instead of the result.
    ("after_run", "error"): raises(IN_AFTER_RUN, ITS_ERROR),
    ("after_run", "cancel"): raises(IN_AFTER_RUN, CANCELLED),
    ("after_run", "stop"): ONE_RUN,
    ("after_run", "clean end"): IN_AFTER_RUN._replace(end=ALL),
    # An error of one `end` does not keep the others from running, and is an error whatever its
    # type. After a cancellation the remaining hooks get `close` only.
    ("end", "error"): raises(FINISHED, ITS_ERROR),
    ("end", "cancel"): raises(FINISHED._replace(end=UP_TO), CANCELLED),
    ("end", "stop"): FINISHED,
    ("end", "clean end"): raises(FINISHED, ITS_ERROR),
    # `close` is shielded: a cancellation is raised after all of them.
    ("close", "error"): FINISHED._replace(caller_gets=ITS_ERROR),
    ("close", "cancel"): FINISHED._replace(caller_gets=CANCELLED),
    ("close", "stop"): FINISHED,
    ("close", "clean end"): FINISHED._replace(caller_gets=ITS_ERROR),
}


def cells() -> list[Cell]:
    """Return the matrix: 5 hooks, 7 phases, 4 kinds (the clean end with two types), hooks that
    suspend or do not.
    """
    raises: dict[str, tuple[type[Exception] | None, ...]] = {
        "error": (ValueError,),
        "clean end": (ah.OutOfRangeError, StopAsyncIteration),
    }
    return [
        Cell(phase, kind, hook, raised, suspends)
        for phase, kind, hook, suspends in itertools.product(PHASES, KINDS, HOOKS, (False, True))
        for raised in raises.get(kind, (None,))
    ]


def expected_events(cell: Cell) -> list[tuple[Event, bool]]:
    """Return the expected calls of a cell, in order, and whether each is required.

    Overlapping hooks of a phase overlap where they may wait. If hooks suspend, those after the
    misbehaving one were started too; otherwise they were not, except that a hook that cancels its
    task suspends to do so, and then they may have been. The session is closed once, before or after
    the hooks are.
    """
    rule = RULES[cell.phase, cell.kind]
    events: list[tuple[Event, bool]] = []

    def called(phase: str, who: str) -> None:
        last = {ALL: len(HOOKS), UP_TO: cell.hook, NONE: 0}[who]
        events.extend(((phase, number), True) for number in HOOKS[:last])
        if who == UP_TO and phase in OVERLAPPING and (cell.suspends or cell.kind == "cancel"):
            events.extend(((phase, number), cell.suspends) for number in HOOKS[last:])

    called("begin", rule.begin)
    if rule.create:
        events.append((("create", 0), True))
    called("after_create_session", rule.after_create_session)
    for _ in range(max(rule.runs, 1)):
        called("before_run", rule.before_run)
        if rule.run:
            events.append((("run", 0), True))
        called("after_run", rule.after_run)
    called("end", rule.end)
    closing = [number for number in HOOKS if rule.close == ALL or number <= cell.hook]
    events.extend((("close", number), True) for number in reversed(closing))
    return events


COLUMNS = (
    "begin",
    "session",
    "after_create_session",
    "before_run",
    "run",
    "after_run",
    "end",
    "close",
)
DOING = {
    "error": "raises an error",
    "cancel": "is running when the task is cancelled",
    "stop": "requests a stop",
    "clean end": "raises `OutOfRangeError`",
}


INTRO = f"""\
# Failure matrix: what is called on which kind of end

<!-- `python -m tests.support.failure_rules --write tests/session/FAILURE_MATRIX.md` -->

Each column is a session with {len(HOOKS)} hooks whose body calls `run` {RUNS} times unless a stop
is requested. Hook *i* misbehaves in its first call of the method that the heading names; for *run*,
an operation that hook *i* fetches does. The rows show on which hooks each method is called: *all*,
*1 to i*, or none (-). The tests check every column for each *i*, with hooks that suspend and hooks
that do not.
"""

NOTES = """
## What the tables do not show

- `begin` and `end` are called one after another, `close` in reverse order. The hooks of
  `after_create_session`, `before_run` and `after_run` run concurrently where they may wait. With
  *1 to i*, the hooks after *i* may therefore have been started too; they are cancelled and awaited
  before the error is raised.
- *closed*: every session that was created is closed, once. *step* is the global step afterwards.
- *the error* is the same object that was raised. If several hooks raise, the caller gets one flat
  `ExceptionGroup`.
- `StopAsyncIteration`, `StopIteration` and `StopRequestedError` behave like `OutOfRangeError`.
  While the session is being created, and in `end` or `close`, they are errors like any other.
- `AbortedError` and `UnavailableError` from `after_create_session`, `before_run`, the run or
  `after_run` are recovered: the session is closed, a new one is created, `after_create_session` of
  all hooks is called again, and the run is repeated. `begin` is never repeated.
- `close` runs in a separate, shielded task: a cancellation is raised after all hooks are closed.
"""


def page() -> str:
    """Return the page."""
    parts: list[str] = [INTRO]
    for phase in dict.fromkeys(phase for phase, _ in RULES):
        columns = [_column(phase, kind, RULES[phase, kind]) for kind in DOING]
        names = [
            f"hook *i*, in `{phase}`",
            *(f"`{name}`" for name in COLUMNS),
            "step",
            "the caller gets",
            "`close` gets",
        ]
        heading, *rows = zip(names, *columns, strict=True)
        lines = [heading, ["---"] * len(heading), *rows]
        parts += [f"## In {phase}\n", *(f"| {' | '.join(line)} |" for line in lines), ""]
    return "\n".join([*parts, NOTES.lstrip()])


def _column(phase: str, kind: str, rule: Rule) -> list[str]:
    twice = ", twice" if rule.runs == RUNS else ""
    run = NONE
    if rule.run:
        run = (
            f"{rule.runs} of {RUNS}"
            if rule.runs
            else "interrupted"
            if phase == "run"
            else "1, result lost"
        )
    return [
        DOING[kind],
        rule.begin,
        "closed" if rule.create else NONE,
        rule.after_create_session,
        rule.before_run + twice,
        run,
        rule.after_run + twice,
        rule.end,
        rule.close,
        str(rule.step),
        rule.caller_gets + ("" if rule.enters else ", from `async with`"),
        "`None`" if rule.close_gets == NOTHING else rule.close_gets,
    ]


def main(argv: list[str] | None = None) -> int:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.failure_rules", description=main.__doc__
    )
    parser.add_argument("--write", type=Path, help="write to this file instead of printing")
    options = parser.parse_args(argv)
    if options.write is None:
        print(page())
    else:
        options.write.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
