"""Many programs on one loop: counting, replaying and making smaller."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from tests.conformance.report import loop_factory
from tests.fuzz._harness import close_loop, collecting_finalizer_errors, described
from tests.fuzz.random_programs.execution import Execution
from tests.fuzz.random_programs.model import violations
from tests.fuzz.random_programs.programs import Program, generate, smaller
from tests.fuzz.random_programs.records import TrackedTask, make_task

BATCH = 500
YOUNG = 25
MOST_SHRINKING = 3_000
MODES = ("plain", "debug", "eager") if sys.version_info >= (3, 12) else ("plain", "debug")


class NoFiles(selectors.SelectSelector):
    """A selector that is never waited on: the loop always has something to run."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return [] if timeout == 0 else super().select(timeout)


@dataclass
class Finding:
    """A program with a violation."""

    number: int
    program: Program
    what: list[str]


@dataclass
class Campaign:
    """Runs programs in a loop, which is replaced when one hangs. A context manager."""

    loop_kind: str = "asyncio"
    mode: str = "plain"
    programs: int = 0
    ticks: int = 0
    calls: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    _loop: asyncio.AbstractEventLoop | None = None
    _errors: list[str] = field(default_factory=list)
    _logs: list[logging.LogRecord] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Self:
        self._stack.enter_context(_collecting_logs(self._logs))
        self._stack.enter_context(collecting_finalizer_errors(self._errors))
        return self

    def __exit__(self, *exc: object) -> None:
        self._close_loop()
        self._stack.close()

    def run(self, seed: int, count: int, first: int = 0, without: frozenset[str] = frozenset()) -> Iterator[Finding]:
        """Run programs of a seed, except those that contain an action of `without`; yield those with a violation."""
        for start in range(first, first + count, BATCH):
            numbers = range(start, min(start + BATCH, first + count))
            programs = [(number, generate(seed, number)) for number in numbers]
            programs = [(number, program) for number, program in programs if not program.kinds() & without]
            for number, program in programs:
                if what := self.run_one(program):
                    yield Finding(number, program, what)
            if self._collect():  # found only by collecting garbage: run the batch again to find the program
                for number, program in programs:
                    if what := self.run_one(program, collect=True):
                        yield Finding(number, program, what)

    def run_one(self, program: Program, *, tracing: bool = False, collect: bool = False) -> list[str]:
        """Run one program; return what is wrong."""
        execution = self.execute(program, tracing=tracing)
        found = violations(execution)
        execution.clear()
        if collect:
            del execution
            found += [f"leak: {one}" for one in self._collect()]
        return found

    def execute(self, program: Program, *, tracing: bool = False) -> Execution:
        """Run one program and return its execution."""
        self._errors.clear()
        self._logs.clear()
        execution = Execution(program, tracing=tracing)
        execution.execute(self._loop or self._new_loop())
        execution.logs = list(self._logs)
        execution.loop_errors += self._errors
        self._errors.clear()
        if execution.hung or execution.left:
            self._new_loop()
        self.programs += 1
        self.ticks += execution.ticks
        self.calls += len(execution.records)
        if self.programs % YOUNG == 0:
            # The class of each group lives until a collection of all generations, and slows down the making of others.
            gc.collect(2 if self.programs % (20 * YOUNG) == 0 else 1)
        return execution

    def shrink(self, program: Program, what: list[str]) -> tuple[Program, list[str]]:
        """Return the smallest program found that violates the same law."""
        law = what[0].split(":")[0]
        tries = 0
        while True:
            for candidate in smaller(program):
                tries += 1
                if tries > MOST_SHRINKING:
                    return program, what
                found = [one for one in self.run_one(candidate, collect=law == "leak") if one.startswith(law)]
                if found:
                    program, what = candidate, found
                    break
            else:
                return program, what

    def _collect(self) -> list[str]:
        self._errors.clear()
        gc.collect()
        found = list(self._errors)
        self._errors.clear()
        return found

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        self._close_loop()
        loop = asyncio.SelectorEventLoop(NoFiles()) if self.loop_kind == "asyncio" else loop_factory(self.loop_kind)()
        loop.set_debug(self.mode == "debug")
        loop.slow_callback_duration = 1e9
        loop.set_task_factory(self._task_factory())
        loop.set_exception_handler(lambda _, context: self._errors.append(described(context)))
        self._loop = loop
        return loop

    def _task_factory(self) -> Any:
        if self.mode != "eager":
            return make_task
        if sys.version_info < (3, 12):
            raise ValueError("eager tasks come with Python 3.12")
        # asyncio's own, which anyio recognises.
        return asyncio.create_eager_task_factory(TrackedTask)

    def _close_loop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            close_loop(loop, 0.01)


@contextlib.contextmanager
def _collecting_logs(logs: list[logging.LogRecord]) -> Iterator[None]:
    """Collect the library's log."""
    logger = logging.getLogger("aiohooks")
    handler = _Handler(logs)
    old_level, old_propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(old_level)
        logger.propagate = old_propagate


class _Handler(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.handle = records.append  # type: ignore[assignment]


def campaign(
    count: int,
    seed: int,
    loop: str,
    mode: str,
    first: int = 0,
    most: int = 10,
    without: frozenset[str] = frozenset(),
    report: Callable[[str], Any] = print,
) -> Campaign:
    """Run programs and report violations, each kind once, with the smallest program that shows it."""
    with Campaign(loop, mode) as runner:
        began = time.monotonic()
        for finding in runner.run(seed, count, first, without):
            if runner.kinds[_kind(finding.what)] < 3:
                with Campaign(loop, mode) as shrinking:  # each keeps the log until its next program
                    small, what = shrinking.shrink(finding.program, finding.what)
                if not runner.kinds[_kind(what)]:
                    lines = [f"\nseed {seed}, --only {finding.number}, {loop}, {mode}, Python {sys.version.split()[0]}"]
                    report("\n".join([*lines, *what[:4], str(small)]))
                runner.kinds[_kind(what)] += 1
            runner.kinds[_kind(finding.what)] += 1
            if len(runner.kinds) > most:
                break
        secs = time.monotonic() - began
        report(
            f"{runner.programs} programs, {runner.calls} calls, {runner.ticks} ticks, {sum(runner.kinds.values())} violations,"
            f" Python {sys.version.split()[0]}, {loop}, {mode}, {runner.programs / max(secs, 1e-9):.0f} a second"
        )
    return runner


def _kind(what: list[str]) -> str:
    """Return the law and what it was broken by, without what differs from program to program."""
    law, _, text = what[0].partition(": ")
    return f"{law}: {re.sub('[0-9].*|[(].*', '', text)[:60]}"
