"""Which methods are called on which kind of end: the rules as data, and the page in the docs that is made of them.

`RULES` says what must happen in each cell; `tests.support.failure_cells` tries one, and
`tests/session/test_failure_matrix.py` compares.
`python -m tests.support.failure_rules --write docs/failure-matrix.md` writes the page.
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

# Which hooks get a call, where hook `i` misbehaves.
ALL = "all"
UP_TO = "1 to i"
NONE = "-"

# What the caller gets, and what `close` gets.
NOTHING = "nothing"
ITS_ERROR = "the error"
CANCELLED = "`CancelledError`"


class Rule(NamedTuple):
    """What happens if hook `i` misbehaves in its first call of a phase (for `run`: the operation that it fetches does).

    `begin` to `close` say which hooks are called, `create` and `run` whether the session does. `runs` is how many runs
    returned to the caller; if none did, the run's columns are about the one that was broken off.
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


RULES: dict[tuple[str, str], Rule] = {
    # While the session is constructed every error ends it, a clean end, too: nothing has run that could have ended.
    # Only what began is closed.
    ("begin", "error"): Rule(UP_TO, False, NONE, NONE, False, NONE, NONE, UP_TO, 0, 0, False, ITS_ERROR, ITS_ERROR),
    ("begin", "cancel"): Rule(UP_TO, False, NONE, NONE, False, NONE, NONE, UP_TO, 0, 0, False, CANCELLED, CANCELLED),
    ("begin", "stop"): Rule(ALL, True, ALL, NONE, False, NONE, ALL, ALL, 0, 0, True, NOTHING, NOTHING),
    ("begin", "clean end"): Rule(UP_TO, False, NONE, NONE, False, NONE, NONE, UP_TO, 0, 0, False, ITS_ERROR, ITS_ERROR),
    ("after_create_session", "error"): Rule(ALL, True, UP_TO, NONE, False, NONE, NONE, ALL, 0, 0, False, ITS_ERROR, ITS_ERROR),
    ("after_create_session", "cancel"): Rule(ALL, True, UP_TO, NONE, False, NONE, NONE, ALL, 0, 0, False, CANCELLED, CANCELLED),
    ("after_create_session", "stop"): Rule(ALL, True, ALL, NONE, False, NONE, ALL, ALL, 0, 0, True, NOTHING, NOTHING),
    ("after_create_session", "clean end"): Rule(
        ALL, True, UP_TO, NONE, False, NONE, NONE, ALL, 0, 0, False, ITS_ERROR, ITS_ERROR
    ),
    # An error breaks the run off: nothing is committed, no later phase, no `end`. A stop lets this run finish.
    ("before_run", "error"): Rule(ALL, True, ALL, UP_TO, False, NONE, NONE, ALL, 0, 0, True, ITS_ERROR, ITS_ERROR),
    ("before_run", "cancel"): Rule(ALL, True, ALL, UP_TO, False, NONE, NONE, ALL, 0, 0, True, CANCELLED, CANCELLED),
    ("before_run", "stop"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 1, 1, True, NOTHING, NOTHING),
    ("before_run", "clean end"): Rule(ALL, True, ALL, UP_TO, False, NONE, ALL, ALL, 0, 0, True, NOTHING, NOTHING),
    ("run", "error"): Rule(ALL, True, ALL, ALL, True, NONE, NONE, ALL, 0, 0, True, ITS_ERROR, ITS_ERROR),
    ("run", "cancel"): Rule(ALL, True, ALL, ALL, True, NONE, NONE, ALL, 0, 0, True, CANCELLED, CANCELLED),
    ("run", "stop"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 1, 1, True, NOTHING, NOTHING),
    ("run", "clean end"): Rule(ALL, True, ALL, ALL, True, NONE, ALL, ALL, 0, 0, True, NOTHING, NOTHING),
    # The step is committed by then; the caller's result is lost with the error.
    ("after_run", "error"): Rule(ALL, True, ALL, ALL, True, UP_TO, NONE, ALL, 0, 1, True, ITS_ERROR, ITS_ERROR),
    ("after_run", "cancel"): Rule(ALL, True, ALL, ALL, True, UP_TO, NONE, ALL, 0, 1, True, CANCELLED, CANCELLED),
    ("after_run", "stop"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 1, 1, True, NOTHING, NOTHING),
    ("after_run", "clean end"): Rule(ALL, True, ALL, ALL, True, UP_TO, ALL, ALL, 0, 1, True, NOTHING, NOTHING),
    # An error of one `end` keeps no other from running, and is an error whatever its type. A cancelled end is none: the
    # hooks left over get `close` only.
    ("end", "error"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, ITS_ERROR, ITS_ERROR),
    ("end", "cancel"): Rule(ALL, True, ALL, ALL, True, ALL, UP_TO, ALL, 2, 2, True, CANCELLED, CANCELLED),
    ("end", "stop"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, NOTHING, NOTHING),
    ("end", "clean end"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, ITS_ERROR, ITS_ERROR),
    # `close` is shielded: a cancellation comes out after all of them.
    ("close", "error"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, ITS_ERROR, NOTHING),
    ("close", "cancel"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, CANCELLED, NOTHING),
    ("close", "stop"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, NOTHING, NOTHING),
    ("close", "clean end"): Rule(ALL, True, ALL, ALL, True, ALL, ALL, ALL, 2, 2, True, ITS_ERROR, NOTHING),
}


def cells() -> list[Cell]:
    """The matrix: 5 hooks, 7 phases, 4 kinds (the clean end by two types), and hooks that suspend and that do not."""
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
    """The calls by the cell's rule, in order, and whether each must have been made.

    Hooks of a phase that overlap are started together as soon as one of them suspends. So where hooks suspend, those
    behind the misbehaving one were started, too; where they do not, they were not, except that a hook which has itself
    cancelled suspends for that, and then they may have been. The session is closed once, before or after the hooks are.
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


COLUMNS = ("begin", "session", "after_create_session", "before_run", "run", "after_run", "end", "close")
DOING = {
    "error": "raises an error",
    "cancel": "is running when the task is cancelled",
    "stop": "asks for a stop",
    "clean end": "raises `OutOfRangeError`",
}


INTRO = f"""\
# Which methods are called on which kind of end

<!-- Written by `python -m tests.support.failure_rules --write docs/failure-matrix.md`; change the rules there. -->

Each line is a session with {len(HOOKS)} hooks whose body calls `run` {RUNS} times, unless it is asked to stop.
Hook *i* misbehaves in its first call of the phase; under *run* it is an operation that hook *i* fetches. The columns
say which hooks are called: *all*, *1 to i*, or none (-). The tests try every line for each *i*, with hooks that suspend
and hooks that do not.
"""

NOTES = """
What the table cannot show:

- `begin` and `end` go one by one, `close` in reverse. The hooks of `after_create_session`, `before_run` and `after_run`
  overlap: once one of them suspends the others are started. So with *1 to i* the hooks behind *i* may have been
  started, too; they are cancelled and awaited before the error goes on.
- *closed*: every session that was created is closed, once. *step* is the global step afterwards.
- *the error* is the same object that was raised. If several hooks raise, the caller gets one flat `ExceptionGroup`.
- `StopAsyncIteration`, `StopIteration` and `StopRequestedError` do what `OutOfRangeError` does. While the session is
  being made, and out of `end` or `close`, they are errors like any other.
- `AbortedError` and `UnavailableError` out of `after_create_session`, `before_run`, the run or `after_run` are
  recovered: the session is closed, a new one is created, `after_create_session` of all hooks is called again, and the
  run is repeated. `begin` is never repeated.
- `close` runs in a task of its own, shielded: a cancellation comes out when all hooks are closed.
"""


def page() -> str:
    """The page in the docs, from the rules."""
    columns = ["phase", "hook *i*", *(f"`{name}`" for name in COLUMNS), "step", "the caller gets", "`close` gets"]
    lines = [columns, ["---"] * len(columns), *(_row(*of, rule) for of, rule in RULES.items())]
    return "\n".join([INTRO, *(f"| {' | '.join(line)} |" for line in lines), NOTES])


def _row(phase: str, kind: str, rule: Rule) -> list[str]:
    twice = ", twice" if rule.runs == RUNS else ""
    run = NONE
    if rule.run:
        run = f"{rule.runs} of {RUNS}" if rule.runs else "broken off" if phase == "run" else "1, result lost"
    return [
        phase,
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
        rule.caller_gets + ("" if rule.enters else ", entering the block"),
        "`None`" if rule.close_gets == NOTHING else rule.close_gets,
    ]


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or prints it."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.failure_rules", description=main.__doc__)
    parser.add_argument("--write", type=Path, help="where to, instead of printing it")
    options = parser.parse_args(argv)
    if options.write is None:
        print(page())
    else:
        options.write.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
