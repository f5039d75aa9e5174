"""Exploring a program: runs on a virtual clock, each with other disturbances.

explore       run a coroutine function under many schedules, and raise at the first broken promise
unreliable    make a function whose calls may be slow, fail, or lose their answer
choose        return one of several values: the first, or another if the schedule says so
may_happen    let a function be called at any wait
always        check an invariant at every wait
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import random
import re
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

from aiohooks._core import waits
from aiohooks._core.clock import sleep
from aiohooks._core.validate import (
    check_choice,
    check_instance,
    checked_int,
    is_coroutine_function,
)
from aiohooks.errors import InvalidArgumentError, flattened, safe_repr
from aiohooks.testing._schedule import DELAYS, Place, Priorities, Schedule
from aiohooks.testing._schedule_run import Call, NumberedTask, Program, ScheduleRun, current_run
from aiohooks.testing.leaks import collected_from_finalizers

P = ParamSpec("P")
T = TypeVar("T")
Disturbance = Literal["order", "slow", "failure", "choice", "cancel", "event"]
"""A kind of disturbance. See `explore`."""
DISTURBANCES: tuple[Disturbance, ...] = get_args(Disturbance)
_RATES = {
    "order": (0.0, 0.1, 0.4, 0.8),
    "slow": (0.0, 0.0, 0.02, 0.2),
    "failure": (0.0, 0.1, 0.5),
    "choice": (0.1, 0.5, 0.8),
}
"""The rates of each kind, of which a seed draws one: the part of the places of this kind at which a
disturbance happens.
"""
_AVERAGE_COUNTS = (0.0, 0.0, 0.5, 1.0, 2.0)
"""For the kinds "cancel" and "event", a seed draws how often a disturbance happens in a run, on
average. Every step of the program is a place of these kinds.
"""
_PRIORITIES_RATE = 0.5
"""The part of the schedules that order tasks by priorities, and not at a rate."""
_MOST_CHANGES = 3
"""How often a schedule with priorities changes a priority at most."""
_MOST_SHRINKING = 400
"""How many runs may be made to find a smaller set of disturbances with the same problem."""
# A disturbance in the text of a replay, such as `order@12=1`: the key, the number and the choice.
_REPLAYED = re.compile(r"([^@\s]+)@(\d+)=(\d+)")


class ExplorationError(AssertionError):
    """A promise was broken under a schedule.

    `await explore(program, replay=error.replay)` runs the program with the same disturbances.
    """

    def __init__(self, message: str, replay: str) -> None:
        super().__init__(message)
        self.replay: str = replay


class Explored(NamedTuple):
    """The result of `explore`: the number of `schedules`, and of `disturbances` by key.

    A key is the kind of a disturbance, or the kind and a name.
    """

    schedules: int
    disturbances: Mapping[str, int]


async def explore(
    program: Program,
    *,
    seeds: int | Iterable[int] = 1_000,
    disturb: Iterable[Disturbance] = DISTURBANCES,
    exhaust: int | None = None,
    replay: str | None = None,
) -> Explored:
    """Run a coroutine function under many schedules, each with other disturbances. Raise an error
    for the first broken promise.

    Example: `await explore(transfer_between_accounts, seeds=500)`.

    The disturbances: `"order"`, tasks that can run next change places, at random or by priorities
    that change a few times (PCT); `"slow"`, time passes before a step of a task, in a call of an
    `unreliable` function or on a connection; `"failure"`, such a call fails, or its answer or
    connection is lost; `"choice"`, `choose` returns another value than the first; `"cancel"`, the
    program is cancelled while it waits, once or several times; `"event"`, an event that the program
    announced with `may_happen` occurs.

    The promises: the program ends. If it is cancelled, it ends with that cancellation, and nothing
    else cancels it. Otherwise it returns, or raises the error of an unreliable call or lost
    connection or, if time passed, a `TimeoutError`. It leaves no task, open session or open file,
    loses no error, and awaits every coroutine. Assert everything else in the program, at its end or
    with `always`.

    Each schedule has its own event loop, whose time jumps to the next timer. Meanwhile your own
    event loop is blocked. Streams have a simulated network: `asyncio.start_server` and
    `open_connection` make connections inside the program. Files and threads work, but are not part
    of the schedule, and neither is the order in which anyio cancels nested scopes: a problem that
    depends on these may not be reproducible. Subprocesses and other sockets are rejected. Nothing
    is logged.

    Args:
        program: a coroutine function without arguments.
        seeds: the number of random schedules, or their seeds: `range(1_000, 2_000)`. A schedule
            without a disturbance comes first.
        disturb: the kinds of disturbances.
        exhaust: instead of random schedules, try all schedules with at most this many disturbances.
            Use it with one kind, or for a small program: `disturb="cancel", exhaust=1` cancels at
            every wait, and `disturb="order", exhaust=100` runs tasks in every order that an event
            loop allows.
        replay: the disturbances of an earlier problem, to repeat only these, as far as the program
            still has places for them.

    Raises:
        ExplorationError: a promise was broken. The error lists the broken promises, the fewest
            disturbances found that show them, where the tasks waited, and how to repeat it. Its
            cause is the error of the program, if it has one.
        InvalidArgumentError: an argument is invalid, or the program has a place for none of the
            disturbances of `replay`.
        UnsupportedSystemError: the event loop of this Python runs its tasks in another way than
            Python 3.11 to 3.15.
    """
    if not is_coroutine_function(program):
        raise InvalidArgumentError(
            f"program is {safe_repr(program)}; give a coroutine function without arguments"
        )
    if isinstance(seeds, Iterable):
        numbers: Iterable[int] = [checked_int(seed, "a seed") for seed in seeds]
    else:
        numbers = range(checked_int(seeds, "seeds", 1))
    if exhaust is not None:
        checked_int(exhaust, "exhaust", 1)
    kinds = [disturb] if isinstance(disturb, str) else [*disturb]
    if not kinds:
        raise InvalidArgumentError("disturb is empty; give a kind, or leave it out for all kinds")
    for kind in kinds:
        check_choice(kind, "a kind in disturb", *DISTURBANCES)
    replayed = None if replay is None else _parsed(replay)
    explorer = _Explorer(program, kinds)

    def explore_schedules() -> None:
        with _quiet(explorer.errors):
            if replayed is not None:
                run = explorer.explore(Schedule(choices=replayed), "the replay")
                _check_replayed(replayed, run)
            elif exhaust is not None:
                explorer.explore_all(exhaust)
            else:
                explorer.explore_seeds(numbers)

    await _call_outside_of_loop(explore_schedules)
    return Explored(explorer.schedules, explorer.disturbances)


def unreliable(
    function: Callable[P, Awaitable[T]],
    *errors: Callable[[], Exception],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that calls `function`. In an exploration, calls may be slow or
    fail.

    Example: `client.post = unreliable(client.post, ConnectionError)`.

    Args:
        function: a coroutine function.
        errors: classes of errors, or functions that return an error. A call that fails raises one
            of these either before it has done anything, or after it has done everything, when only
            its answer is lost.
    """

    @functools.wraps(function)
    async def call(*args: P.args, **keywords: P.kwargs) -> T:
        run = current_run.get()
        if run is None:
            return await function(*args, **keywords)
        name = getattr(function, "__qualname__", repr(function))
        delay = run.choose(
            "slow",
            DELAYS,
            lambda secs: f"a call of {name} takes {secs:g} s",
        )
        await sleep(delay)
        # Option 0 is a call that succeeds.
        failures = [None, *itertools.starmap(_Failure, itertools.product(errors, (False, True)))]
        failure = run.choose(
            "failure",
            failures,
            lambda failure: f"a call of {name} fails {failure}",
        )
        if failure is None:
            return await function(*args, **keywords)
        if failure.is_answer_lost:
            await function(*args, **keywords)
        raise run.injected(failure.make_error())

    return call


class _Failure(NamedTuple):
    """The failure of a call.

    Attributes:
        make_error: returns the error.
        is_answer_lost: whether the call is made first. Otherwise it does nothing.
    """

    make_error: Callable[[], Exception]
    is_answer_lost: bool

    def __str__(self) -> str:
        name = getattr(self.make_error, "__name__", "an error")
        if self.is_answer_lost:
            return f"with {name} after it was made"
        return f"with {name}"


def choose(first: T, *others: T, name: str = "") -> T:
    """Return the first of these values, or another value if the schedule of an exploration chooses
    it.

    Example: `status = choose(200, 404, 500)`.

    Args:
        first: the usual value, which is also returned outside of an exploration.
        others: the other values.
        name: the subject of the choice, for messages. Choices of another name do not change what
            these are.
    """
    run = current_run.get()
    if run is None:
        return first
    return run.choose(
        "choice",
        (first, *others),
        lambda value: f"{name or 'chosen'}: {safe_repr(value)}",
        name,
    )


def may_happen(event: Call, name: str = "") -> AbstractContextManager[None]:
    """Announce an event that an exploration may let happen at any wait while the block is active.

    Example: `with may_happen(server.drop_connections): ...`.

    Args:
        event: a function that lets it happen. It must not fail.
        name: the name of the event in messages, by default that of the function.
    """
    run = current_run.get()
    if run is None:
        return contextlib.nullcontext()
    if not name:
        name = getattr(event, "__name__", "event")
    return _appended(run.events, (event, name))


def always(check: Call) -> AbstractContextManager[None]:
    """Call `check`, which asserts an invariant, at every wait of an exploration while the block is
    active.

    Example: `with always(account.check_balance): ...`.
    """
    run = current_run.get()
    if run is None:
        return contextlib.nullcontext()
    return _appended(run.checks, check)


@contextlib.contextmanager
def _appended(items: list[T], item: T) -> Generator[None]:
    """Append an item to a list for the block."""
    items.append(item)
    try:
        yield
    finally:
        items.remove(item)


class _Explorer:
    """Runs a program under one schedule after another, and counts schedules and disturbances."""

    def __init__(self, program: Program, kinds: Iterable[str]) -> None:
        """Run nothing yet. `kinds` are the kinds of disturbances."""
        self.errors: list[str] = []
        """The errors of the current run that were reported to the loop or by finalizers."""
        # The replays for a smaller set of disturbances do not count.
        self.schedules = 0
        self.disturbances: Counter[str] = Counter()
        self._program = program
        self._kinds = frozenset(kinds)

    def explore_seeds(self, seeds: Iterable[int]) -> None:
        """Explore the schedule without a disturbance, and then the random schedule of each seed."""
        first = self.explore(Schedule(), "the first run")
        steps = max(first.steps, 1)
        decisions = first.schedule.counts.get("order", 1)
        for seed in seeds:
            schedule = self._random_schedule(seed, steps, decisions)
            self.explore(schedule, f"seed {seed}")

    def _random_schedule(self, seed: int, steps: int, decisions: int) -> Schedule:
        """Return the schedule of a seed.

        Args:
            seed: the seed.
            steps: about how many steps of tasks the program takes: as many as its first run.
            decisions: about how many decisions about their order it needs, by the same measure.
        """
        generator = random.Random(seed)
        # A rate is drawn for every kind, so that it does not depend on the other kinds in use.
        drawn_rates = {kind: generator.choice(choices) for kind, choices in _RATES.items()}
        for kind in ("cancel", "event"):
            drawn_rates[kind] = generator.choice(_AVERAGE_COUNTS) / steps
        rates = {kind: drawn_rates[kind] for kind in self._kinds}
        priorities = None
        # Some bugs are found sooner with priorities, and others with random changes of the order.
        if "order" in self._kinds and generator.random() < _PRIORITIES_RATE:
            changes = generator.randint(0, _MOST_CHANGES)
            priorities = Priorities(generator, changes, decisions)
        return Schedule(seed, rates, priorities=priorities)

    def explore_all(self, most: int) -> None:
        """Explore all schedules with at most this number of disturbances, those with fewer first.

        A schedule is extended by one disturbance more: by each that could have happened after its
        last one.
        """
        run = self.explore(Schedule(noted=self._kinds), "the first run")
        schedules = [run.schedule]
        for _ in range(most):
            longer: list[Schedule] = []
            for schedule in schedules:
                for place, options in schedule.alternatives:
                    for choice in range(1, options):
                        choices = {**schedule.taken, place: choice}
                        run = self.explore(
                            Schedule(choices=choices, noted=self._kinds),
                            f"schedule {self.schedules}",
                        )
                        # An earlier disturbance may have led the program past the place of another.
                        was_possible = len(run.schedule.taken) == len(choices)
                        if was_possible:
                            longer.append(run.schedule)
            schedules = longer

    def explore(self, schedule: Schedule, name: str) -> ScheduleRun:
        """Run the program under a schedule. The name of the schedule is for the message.

        Raises:
            ExplorationError: a promise was broken.
        """
        run = self._run(schedule)
        self.schedules += 1
        self.disturbances.update(kind for kind, _ in run.schedule.taken)
        if run.problems:
            run = self._shrunk(run)
            self._report(run, f"{name}, {self.schedules:,} schedules")
        return run

    def _run(self, schedule: Schedule) -> ScheduleRun:
        """Run the program once, without counting."""
        run = ScheduleRun(schedule)
        run.execute(self._program, self.errors)
        return run

    def _report(self, run: ScheduleRun, how: str) -> None:
        """Raise the error for a run with problems. `how` says in which schedule it was found."""
        # Run the program again with the same disturbances, because only a replay makes notes of
        # them, and because the message says if the problem does not come again.
        again = self._run(Schedule(choices=run.schedule.taken))
        taken = sorted(run.schedule.taken.items())
        choices = [f"{key}@{number}={choice}" for (key, number), choice in taken]
        replay = " ".join(choices)
        first, *others = run.problems
        lines = [f"{first} ({how})"]
        lines += [f"  also {problem}" for problem in others]
        lines += [f"  disturbed: {note}" for _, note in sorted(again.notes.items())]
        if run.error is not None:
            error = flattened([run.error])[0]
            for frame in traceback.extract_tb(error.__traceback__)[-1:]:
                lines.append(f"  raised in {frame.name} ({frame.filename}:{frame.lineno})")
        lines += [f"  {wait}" for wait in run.waits]
        if _problem_kind(again) != _problem_kind(run):
            lines.append(
                "  it did not come again with the same disturbances: something else than these"
                " decides what happens"
            )
        lines.append(f"  again: explore(..., replay={replay!r})")
        raise ExplorationError("\n".join(lines), replay) from run.error

    def _shrunk(self, run: ScheduleRun) -> ScheduleRun:
        """Return a run with the same problem, and as few disturbances as were found."""
        tries = 0
        # How many disturbances are left out together: a half, then quarters, and finally single
        # ones.
        size = max(len(run.schedule.taken) // 2, 1)
        while size and tries < _MOST_SHRINKING:
            places = [*run.schedule.taken]
            for start in range(0, len(places), size):
                choices = {**run.schedule.taken}
                for place in places[start : start + size]:
                    del choices[place]
                tries += 1
                smaller = self._run(Schedule(choices=choices))
                is_smaller = len(smaller.schedule.taken) < len(places)
                if is_smaller and _problem_kind(smaller) == _problem_kind(run):
                    run = smaller
                    break
            else:
                # No group of this size can be left out.
                size //= 2
        return run


def _problem_kind(run: ScheduleRun) -> tuple[str, type | None]:
    """Return a value that is equal for runs with the same problem: its promise, and the error."""
    problem = run.problems[0] if run.problems else ""
    return problem.partition(":")[0], type(run.error)


def _parsed(replay: str) -> dict[Place, int]:
    """Return the choices in the `replay` of an `ExplorationError`, by place."""
    check_instance(replay, str, "replay")
    choices: dict[Place, int] = {}
    for text in replay.split():
        match = _REPLAYED.fullmatch(text)
        if match is None:
            raise InvalidArgumentError(
                f"replay is {replay!r}; give what an ExplorationError has as its `replay`"
            )
        choices[match[1], int(match[2])] = int(match[3])
    return choices


def _check_replayed(replayed: Mapping[Place, int], run: ScheduleRun) -> None:
    """Raise if none of the disturbances could be repeated, because the replay has shown nothing."""
    if replayed and not run.schedule.taken:
        places = ", ".join(f"{key}@{number}" for key, number in replayed)
        raise InvalidArgumentError(
            f"replay has {places}, and the program comes to none of these places: it is another"
            " one than that in which they were found"
        )


async def _call_outside_of_loop(function: Callable[[], None]) -> None:
    """Call a function that runs other loops in this thread.

    A callback of the current loop calls the function, because the tasks of other loops cannot run
    inside a step of a task.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def call() -> None:
        if ended.cancelled():
            return
        try:
            with _no_running_loop(loop):
                function()
        except BaseException as error:
            # The task raises the error, and a KeyboardInterrupt as well, not the loop.
            ended.set_exception(error)
        else:
            ended.set_result(None)

    loop.call_soon(call)
    await ended


@contextlib.contextmanager
def _no_running_loop(loop: asyncio.AbstractEventLoop) -> Generator[None]:
    """Let other loops run in this thread during the block. `loop` is the loop that runs now."""
    # No loop starts while another one is set as running. asyncio exports this function for authors
    # of event loops.
    asyncio._set_running_loop(None)
    is_main = threading.current_thread() is threading.main_thread()
    # Signals would write to the socket of the outer loop, which does not read it meanwhile.
    wakeup_fd = signal.set_wakeup_fd(-1) if is_main else -1
    try:
        yield
    finally:
        if is_main:
            signal.set_wakeup_fd(wakeup_fd)
        asyncio._set_running_loop(loop)


@contextlib.contextmanager
def _quiet(errors: list[str]) -> Generator[None]:
    """Log nothing in the block, and append the errors of finalizers to `errors`.

    Garbage is collected only between two runs, so that an error belongs to the run before.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable()
        if gc.isenabled():
            stack.callback(gc.enable)
        gc.disable()
        if not gc.get_freeze_count():
            # The caller has frozen no objects of its own, which `unfreeze` would free, too.
            stack.callback(gc.unfreeze)
            gc.collect()
        # The collections after each run then do not visit the objects from before the block.
        gc.freeze()
        stack.callback(setattr, waits, "make_task", waits.make_task)
        waits.make_task = NumberedTask
        stack.enter_context(collected_from_finalizers(errors))
        yield
