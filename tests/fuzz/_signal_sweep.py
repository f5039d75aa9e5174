"""P14 in this process: signals at the k-th suspension of a program, wherever in it that is."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz._signal_scenarios import SCENARIOS, Act, Scenario, Stage

HANG_SECS = 10
FARTHEST = 10
"""The second signal comes at most so many suspensions after the first."""
EARLIER: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
BATCH = 100


@dataclass(frozen=True, slots=True)
class Shot:
    """One signal: at which suspension, and whether the kernel brings it or Python itself."""

    at: int
    number: signal.Signals
    by_kill: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is needed to fire a point again."""

    scenario: Scenario
    loop: str
    seed: int
    shots: tuple[Shot, ...]

    def __str__(self) -> str:
        shots = ", ".join(f"{shot.number.name} at {shot.at}{' by kill' if shot.by_kill else ''}" for shot in self.shots)
        return f"{self.scenario.__name__} seed {self.seed} on {self.loop}: {shots or 'nothing'}"


@dataclass(slots=True)
class Tally:
    """What was fired and found."""

    signals: Counter[str] = field(default_factory=Counter)
    once: int = 0
    twice: int = 0
    violations: list[str] = field(default_factory=list)
    secs: float = 0.0


class _Counted:
    """Awaits a coroutine, and tells of each of its suspensions."""

    __slots__ = ("coro", "point")

    def __init__(self, coro: Any, point: Point) -> None:
        self.coro, self.point = coro, point

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waited = self.coro.send(value) if error is None else self.coro.throw(error)
            except StopIteration as stop:
                return stop.value
            value = error = None
            self.point.suspended()
            try:
                value = yield waited
            except BaseException as thrown:
                error = thrown


async def _counted(coro: Any, point: Point) -> Any:
    return await _Counted(coro, point)


class Point:
    """One run of a scenario with its shots, and the status."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self.plan = plan
        self.suspensions = 0
        self.fired: list[signal.Signals] = []
        self.stage = Stage(random.Random(plan.seed), scratch)
        self.outcome: BaseException | None = None
        self.problems: list[str] = []
        self._left = list(plan.shots)
        self._open: list[Act] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def suspended(self) -> None:
        self.suspensions += 1
        if self._left and self._left[0].at <= self.suspensions:
            self._fire(self._left.pop(0))

    def _fire(self, shot: Shot) -> None:
        if signal.getsignal(shot.number) in EARLIER.values() or not any(
            act.session.status().state in OPEN for act in self.stage.acts
        ):
            return  # no session is open
        if not self.fired:
            self._open = [act for act in self.stage.acts if act.session.status().state in OPEN]
            asyncio.get_running_loop().call_soon(self._before)  # right before what the signal puts there
        self.fired.append(shot.number)
        if shot.by_kill:
            os.kill(os.getpid(), shot.number)
        else:
            signal.raise_signal(shot.number)
        if len(self.fired) == 2:
            asyncio.get_running_loop().call_soon(self._cut)  # right behind what the signal has put there

    def _before(self) -> None:
        """In the tick of the signal somebody else may ask for a stop, who is the first then."""
        self._open = [act for act in self._open if act.session.stop_reason in (None, f"{self.fired[0].name} received")]

    def _cut(self) -> None:
        self.stage.cut = True

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        options.pop("eager_start", None)
        task = asyncio.Task(_counted(coro, self), loop=loop, **options)
        self._tasks.append(task)
        return task

    def _hang(self) -> None:
        where = sorted(f"{task.get_name()}: {task.get_stack(limit=1)}" for task in self._tasks if not task.done())
        self.problems.append(f"hangs: {where}")
        for task in self._tasks:
            task.cancel()

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(HANG_SECS, self._hang)
        try:
            await self.plan.scenario(self.stage)
        finally:
            timer.cancel()
        others = [task.get_name() for task in self._tasks if not task.done() and task is not asyncio.current_task()]
        if others:
            self.problems.append(f"tasks are left: {others}")

    def run(self) -> None:
        """Runs it in a loop of its own, as a script does."""
        factory = asyncio.new_event_loop
        if self.plan.loop == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                loop = runner.get_loop()
                loop.set_task_factory(self._task)
                loop.set_exception_handler(lambda _, context: self.problems.append(f"heard: {context!r}"))
                runner.run(self._main())
        except BaseException as error:
            self.outcome = error
        self._judge()
        self.outcome = None
        for act in self.stage.acts:
            act.left = None if isinstance(act.left, BaseException) else act.left

    # -- the status

    def _judge(self) -> None:
        problems = self.problems
        problems += self.stage.problems
        problems += [f"task {task.get_name()} is not done" for task in self._tasks if not task.done()]
        for number, handler in EARLIER.items():
            if signal.getsignal(number) != handler:
                problems.append(f"the handler of {number.name} is {signal.getsignal(number)!r}")
                signal.signal(number, handler)
        fd = signal.set_wakeup_fd(-1)
        if fd != -1:
            problems.append(f"the wakeup fd is {fd}")
        self._judge_outcome()
        for place, act in enumerate(self.stage.acts):
            self._judge_act(place, act)

    def _judge_outcome(self) -> None:
        outcome = self.outcome
        if len(self.fired) < 2:
            right = outcome is None
        elif self.fired[1] == signal.SIGINT:
            right = isinstance(outcome, KeyboardInterrupt)
        else:
            right = isinstance(outcome, SystemExit) and outcome.code == 128 + self.fired[1]
        if not right:
            self.problems.append(f"ended with {outcome!r}")

    def _judge_act(self, number: int, act: Act) -> None:
        cut = len(self.fired) > 1
        session = act.session
        for hook in act.hooks:
            calls = hook.calls
            begun, ended, closed = calls["begin"], calls["end"], calls["close"]
            whole = begun == closed == 1 and (ended <= 1 if cut else ended == 1)
            if not whole and not (cut and begun == closed == ended == 0):
                self.problems.append(f"a hook of session {number}: {dict(calls)}")
        if not cut and act.left != "well":
            self.problems.append(f"session {number} was left with {act.left!r}")
        if session.status().state not in ("closed", "new"):
            self.problems.append(f"session {number} is {session.status().state}")
        if act in self._open and (session.stop_reason, session.stop_signal) != (f"{self.fired[0].name} received", self.fired[0]):
            self.problems.append(f"session {number} stopped because: {session.stop_reason}, by {session.stop_signal!r}")


OPEN = ("opening", "open", "closing")


def sweep(*, points: int, loop: str, seed: int = 0, scenarios: Sequence[Scenario] = SCENARIOS) -> Tally:
    """Fires at least so many signals, half of them in pairs, evenly over the scenarios."""
    tally = Tally()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, _quiet(tally):
        plans = _plans(loop, seed, scenarios, Path(scratch), tally)
        for number, plan in enumerate(plans):
            point = _run(plan, Path(scratch), tally)
            tally.signals[plan.scenario.__name__] += len(point.fired)
            tally.once += len(point.fired) == 1
            tally.twice += len(point.fired) == 2
            if number % BATCH == 0:
                gc.collect()
            if tally.signals.total() >= points or len(tally.violations) > 20:
                break
        gc.collect()
    tally.secs = time.perf_counter() - began
    return tally


def _run(plan: Plan, scratch: Path, tally: Tally) -> Point:
    signal.alarm(6 * HANG_SECS)  # ends the process, where even the loop is stuck
    try:
        point = Point(plan, scratch)
        point.run()
    finally:
        signal.alarm(0)
    tally.violations += [f"{plan}: {problem}" for problem in point.problems]
    return point


def _plans(loop: str, seed: int, scenarios: Sequence[Scenario], scratch: Path, tally: Tally) -> Iterator[Plan]:
    """For ever: each suspension of each scenario once, with another seed in each round."""
    rng = random.Random(seed)
    while True:
        seed += 1
        rounds: list[list[Plan]] = []
        for scenario in scenarios:
            length = _run(Plan(scenario, loop, seed, ()), scratch, tally).suspensions
            plans = [Plan(scenario, loop, seed, _shots(at, rng)) for at in range(1, length + 1)]
            rng.shuffle(plans)
            rounds.append(plans)
        while any(rounds):
            for plans in rounds:
                if plans:
                    yield plans.pop()


def _shots(at: int, rng: random.Random) -> tuple[Shot, ...]:
    def shot(at: int) -> Shot:
        return Shot(at, rng.choice((signal.SIGINT, signal.SIGTERM)), rng.random() < 0.5)

    first = shot(at)
    return (first,) if rng.random() < 0.5 else (first, shot(at + rng.randrange(FARTHEST + 1)))


@contextmanager
def _quiet(tally: Tally) -> Iterator[None]:
    """Python's own handlers, no log, and what finalisers complain of counts."""
    assert threading.current_thread() is threading.main_thread(), "signals come to the main thread"
    before = {number: signal.signal(number, handler) for number, handler in EARLIER.items()}
    hook, disabled = sys.unraisablehook, logging.root.manager.disable
    sys.unraisablehook = lambda one: tally.violations.append(f"unheard: {one.exc_value!r} in {one.object!r}")
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        logging.disable(disabled)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
