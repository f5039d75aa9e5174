"""Signals at the k-th suspension of a scenario in this process, for all k."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conformance.report import loop_factory
from tests.fuzz._harness import collecting_finalizer_errors, log_disabled, watched
from tests.fuzz.signals.scenarios import SCENARIOS, Entry, Fixture, Scenario
from tests.support.waiting import HANG_SECS

MAX_DISTANCE = 10
"""The second signal is sent at most this many suspensions after the first."""
PREVIOUS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
BATCH = 100


@dataclass(frozen=True, slots=True)
class Delivery:
    """One signal: the suspension at which it is sent, and whether by the kernel or by Python itself."""

    at: int
    number: signal.Signals
    by_kill: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is needed to reproduce a point."""

    scenario: Scenario
    loop: str
    seed: int
    deliveries: tuple[Delivery, ...]

    def __str__(self) -> str:
        sent = ", ".join(f"{one.number.name} at {one.at}{' by kill' if one.by_kill else ''}" for one in self.deliveries)
        return f"{self.scenario.__name__} seed {self.seed} on {self.loop}: {sent or 'no signal'}"


@dataclass(slots=True)
class Tally:
    """The signals sent and the violations found on one loop."""

    signals: Counter[str] = field(default_factory=Counter)
    once: int = 0
    twice: int = 0
    violations: list[str] = field(default_factory=list)
    secs: float = 0.0


class Point:
    """One run of a scenario with its signals, and the checks."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self.plan = plan
        self.suspensions = 0
        self.sent: list[signal.Signals] = []
        self._drained = False  # by the first signal
        self.fixture = Fixture(random.Random(plan.seed), scratch)
        self.outcome: BaseException | None = None
        self.problems: list[str] = []
        self._pending = list(plan.deliveries)
        self._open: list[Entry] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def count_suspension(self, waited: object) -> None:
        self.suspensions += 1
        if self._pending and self._pending[0].at <= self.suspensions:
            self._send(self._pending.pop(0))

    def _send(self, delivery: Delivery) -> None:
        if signal.getsignal(delivery.number) in PREVIOUS.values() or not any(
            entry.session.status().state in OPEN for entry in self.fixture.entries
        ):
            return  # no session is open
        if not self.sent:
            # Without those that were stopped otherwise: the signal is not their reason.
            self._open = [
                entry
                for entry in self.fixture.entries
                if entry.session.status().state in OPEN and entry.session.stop_reason is None
            ]
        self.sent.append(delivery.number)
        if delivery.by_kill:
            os.kill(os.getpid(), delivery.number)
        else:
            signal.raise_signal(delivery.number)
        if len(self.sent) == 1:
            self._drained = any(entry.session.drain_reason is not None for entry in self._open)
        if len(self.sent) - self._drained == 2:
            asyncio.get_running_loop().call_soon(self._note_cancel)  # right after the callback of the signal

    @property
    def _cancelled(self) -> bool:
        """Whether more signals were sent than those that end a session cleanly."""
        return len(self.sent) - self._drained > 1

    def _note_cancel(self) -> None:
        self.fixture.cancelled = True

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        options.pop("eager_start", None)
        task = asyncio.Task(self._counted(coro), loop=loop, **options)
        self._tasks.append(task)
        return task

    async def _counted(self, coro: Any) -> Any:
        return await watched(coro, self.count_suspension)

    def _hang(self) -> None:
        where = sorted(f"{task.get_name()}: {task.get_stack(limit=1)}" for task in self._tasks if not task.done())
        self.problems.append(f"hangs: {where}")
        for task in self._tasks:
            task.cancel()

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(HANG_SECS, self._hang)
        try:
            await self.plan.scenario(self.fixture)
        finally:
            timer.cancel()
        others = [task.get_name() for task in self._tasks if not task.done() and task is not asyncio.current_task()]
        if others:
            self.problems.append(f"tasks are left: {others}")

    def run(self) -> None:
        """Run the scenario in a new loop, as a script does."""
        try:
            with asyncio.Runner(loop_factory=loop_factory(self.plan.loop)) as runner:
                loop = runner.get_loop()
                loop.set_task_factory(self._task)
                loop.set_exception_handler(lambda _, context: self.problems.append(f"reported to the loop: {context!r}"))
                runner.run(self._main())
        except BaseException as error:
            self.outcome = error
        self._check()
        self.outcome = None
        for entry in self.fixture.entries:
            entry.left = None if isinstance(entry.left, BaseException) else entry.left

    # -- the checks

    def _check(self) -> None:
        problems = self.problems
        problems += self.fixture.problems
        problems += [f"task {task.get_name()} is not done" for task in self._tasks if not task.done()]
        for number, handler in PREVIOUS.items():
            if signal.getsignal(number) != handler:
                problems.append(f"the handler of {number.name} is {signal.getsignal(number)!r}")
                signal.signal(number, handler)
        fd = signal.set_wakeup_fd(-1)
        if fd != -1:
            problems.append(f"the wakeup fd is {fd}")
        self._check_outcome()
        for place, entry in enumerate(self.fixture.entries):
            self._check_entry(place, entry)

    def _check_outcome(self) -> None:
        outcome = self.outcome
        if not self._cancelled:
            right = outcome is None
        elif self.sent[1] == signal.SIGINT:
            right = isinstance(outcome, KeyboardInterrupt)
        else:
            right = isinstance(outcome, SystemExit) and outcome.code == 128 + self.sent[1]
        if not right:
            self.problems.append(f"ended with {outcome!r}")

    def _check_entry(self, number: int, entry: Entry) -> None:
        cancelled = self._cancelled
        session = entry.session
        for hook in entry.hooks:
            calls = hook.calls
            begun, ended, closed = calls["begin"], calls["end"], calls["close"]
            complete = begun == closed == 1 and (ended <= 1 if cancelled else ended == (entry.left == "cleanly"))
            if not complete and not (cancelled and begun == closed == ended == 0):
                self.problems.append(f"a hook of session {number}: {dict(calls)}")
        if not cancelled and entry.left not in ("cleanly", "unopened"):
            self.problems.append(f"session {number} was left with {entry.left!r}")
        if session.status().state not in ("closed", "new"):
            self.problems.append(f"session {number} is {session.status().state}")
        reasons = [(f"{one.name} received", one) for one in self.sent[: 1 + self._drained]]
        if entry in self._open and (session.stop_reason, session.stop_signal) not in reasons:
            self.problems.append(f"session {number} stopped because: {session.stop_reason}, by {session.stop_signal!r}")


OPEN = ("opening", "open", "closing")


def sweep(*, points: int, loop: str, seed: int = 0, scenarios: Sequence[Scenario] = SCENARIOS) -> Tally:
    """Send at least `points` signals, in half of the points two, evenly over the scenarios."""
    tally, unreported = Tally(), list[str]()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, _python_handlers(), log_disabled(), collecting_finalizer_errors(unreported):
        plans = _plans(loop, seed, scenarios, Path(scratch), tally)
        for number, plan in enumerate(plans):
            point = _run(plan, Path(scratch), tally)
            tally.signals[plan.scenario.__name__] += len(point.sent)
            tally.once += len(point.sent) == 1
            tally.twice += len(point.sent) == 2
            if number % BATCH == 0:
                gc.collect()
            if tally.signals.total() >= points or len(tally.violations) > 20:
                break
        gc.collect()
    tally.violations += [f"unreported: {one}" for one in unreported]
    tally.secs = time.perf_counter() - began
    return tally


def _run(plan: Plan, scratch: Path, tally: Tally) -> Point:
    signal.alarm(2 * HANG_SECS)  # ends the process where even the loop hangs
    try:
        point = Point(plan, scratch)
        point.run()
    finally:
        signal.alarm(0)
    tally.violations += [f"{plan}: {problem}" for problem in point.problems]
    return point


def _plans(loop: str, seed: int, scenarios: Sequence[Scenario], scratch: Path, tally: Tally) -> Iterator[Plan]:
    """Yield plans without end: each suspension of each scenario once, with another seed in each round."""
    rng = random.Random(seed)
    while True:
        seed += 1
        rounds: list[list[Plan]] = []
        for scenario in scenarios:
            length = _run(Plan(scenario, loop, seed, ()), scratch, tally).suspensions
            plans = [Plan(scenario, loop, seed, _deliveries(at, rng)) for at in range(1, length + 1)]
            rng.shuffle(plans)
            rounds.append(plans)
        while any(rounds):
            for plans in rounds:
                if plans:
                    yield plans.pop()


def _deliveries(at: int, rng: random.Random) -> tuple[Delivery, ...]:
    def delivery(at: int) -> Delivery:
        return Delivery(at, rng.choice((signal.SIGINT, signal.SIGTERM)), rng.random() < 0.5)

    first = delivery(at)
    return (first,) if rng.random() < 0.5 else (first, delivery(at + rng.randrange(MAX_DISTANCE + 1)))


@contextmanager
def _python_handlers() -> Iterator[None]:
    """Install Python's own handlers."""
    assert threading.current_thread() is threading.main_thread(), "signals are sent to the main thread"
    before = {number: signal.signal(number, handler) for number, handler in PREVIOUS.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
