"""Exploring a program: it runs again and again, each time with other disturbances, on a virtual
clock.

explore       runs a coroutine function under many schedules, and raises at the first that breaks a
              promise
unreliable    a function whose calls may be slow, fail, or lose their answer while a program is
              explored
choose        one of several values: the first, or another where the schedule says so
may_happen    a function that may be called at any wait
always        a check that must hold at every wait
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import json
import logging
import math
import os
import random
import re
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

from aiohooks._core import cancel
from aiohooks._core.clock import set_current_clock, sleep
from aiohooks._core.validate import (
    check_choice,
    check_instance,
    check_secs,
    checked_int,
    is_coroutine_function,
)
from aiohooks._why.tasks import task_wait
from aiohooks.errors import InvalidArgumentError, flattened, safe_repr
from aiohooks.session.lifecycle import OPEN_SESSIONS
from aiohooks.testing._schedule_loop import NumberedTask, Place, Schedule, ScheduleLoop
from aiohooks.testing.leaks import describe_context, describe_unraisable

P = ParamSpec("P")
T = TypeVar("T")
Disturbance = Literal[
    "order", "slow", "failure", "choice", "cancel", "timeout", "stop", "signal", "event", "kill"
]
"""What disturbs a program; see `explore`."""
DISTURBANCES: tuple[Disturbance, ...] = get_args(Disturbance)
_RATES = {
    "order": (0.0, 0.1, 0.4, 0.8),
    "slow": (0.0, 0.0, 0.02, 0.2),
    "failure": (0.0, 0.1, 0.5),
    "choice": (0.1, 0.5, 0.8),
}
"""How often these happen where they can; a seed chooses one rate of each."""
_EVENTS: tuple[str, ...] = ("cancel", "timeout", "stop", "signal", "event")
"""These happen before a step of a task, or after it; a seed chooses one or two of them, each about
once.
"""
_SECS = (0.0, 0.001, 0.05, 1.0)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SPACES = re.compile(r"[\s@]+")
_MOST_STEPS = 100_000
_MOST_SHRINKING = 400
_DISTURBANCE = re.compile(r"([^@\s]+)@(\d+)=(\d+)")


class ExplorationError(AssertionError):
    """A promise was broken under a schedule; `await explore(program, replay=error.replay)` repeats
    it.
    """

    def __init__(self, message: str, replay: str) -> None:
        super().__init__(message)
        self.replay: str = replay


class Explored(NamedTuple):
    """The result of `explore`: how many `schedules`, the `steps` of tasks in them, the number of
    `disturbances` by kind.
    """

    schedules: int
    steps: int
    disturbances: Mapping[str, int]


async def explore(
    program: Callable[..., Awaitable[Any]],
    *,
    seeds: int | Iterable[int] = 1_000,
    disturb: Iterable[Disturbance] = DISTURBANCES,
    exhaust: int | None = None,
    max_secs: float | None = None,
    replay: str | None = None,
) -> Explored:
    """Run a coroutine function again and again, each time with other disturbances; raise at the
    first promise that is broken.

    Example: `await explore(transfer_between_accounts, seeds=500)`.

    The disturbances: `"order"`, tasks that can run next run in another order; `"slow"`, time passes
    before a step of a task, or in a call of an `unreliable` function; `"failure"`, such a call
    fails, or its answer is lost; `"choice"`, a `choose` has another result than its first;
    `"cancel"`, the program is cancelled while it waits, perhaps again; `"timeout"`, its time limit
    ends; `"stop"`, a stop of its open sessions is requested; `"signal"`, it gets a SIGINT or
    SIGTERM that it handles; `"event"`, something happens that the program says `may_happen`;
    `"kill"`, its process is killed, and it runs again with its files.

    The promises: a program that is not cancelled returns, or raises the error of an unreliable
    call, or, where time passed, a `TimeoutError`; one that is cancelled ends so, and one whose time
    limit ends raises `TimeoutError`; nothing else cancels it; it ends, and leaves no task and no
    open session; no error is lost, no coroutine forgotten and no file left open. What else must
    hold, the program asserts, at its end or `always`.

    The program is called anew for each seed, in an event loop of its own, whose time jumps to the
    next timer. The loop that awaits this stands still meanwhile. Files and threads work, but what
    they do is not part of the schedule, and neither is the order in which anyio cancels scopes
    inside of one another: a problem that depends on that may not come again. Nothing is logged.

    Args:
        program: a coroutine function without arguments; or with one, which is an empty directory
            for its files. Only such a program is killed: it is called again with the same
            directory.
        seeds: how many schedules are tried, besides the one without a disturbance; or their seeds:
            `range(1_000, 2_000)`.
        disturb: the kinds of disturbances.
        exhaust: in place of random schedules, try all with so many disturbances at most. Of one
            kind, or for a small program: `disturb="cancel", exhaust=1` cancels at every wait, and
            `disturb="order", exhaust=100` runs tasks in every order.
        max_secs: how long the program may take, in seconds of its own time; by default there is no
            limit.
        replay: the disturbances of a problem that was found, to be repeated alone.

    Raises:
        ExplorationError: a promise was broken. It says which, the fewest disturbances found that
            show it, where the tasks waited, and how to repeat it; its cause is the error of the
            program, if it has one.
        InvalidArgumentError: an argument is invalid.
        UnsupportedSystemError: the event loop of this Python runs its tasks in another way than
            those of 3.11 to 3.15.
    """
    if not is_coroutine_function(program):
        raise InvalidArgumentError(
            f"program is {safe_repr(program)}; give a coroutine function, with one argument at most"
        )
    numbers = (
        range(checked_int(seeds, "seeds", 1))
        if isinstance(seeds, int)
        else [checked_int(one, "a seed") for one in seeds]
    )
    most = None if exhaust is None else checked_int(exhaust, "exhaust", 1)
    check_secs(max_secs, "max_secs", optional=True, positive=True)
    kinds = (disturb,) if isinstance(disturb, str) else tuple(disturb)
    for kind in kinds:
        check_choice(kind, "a kind in disturb", *DISTURBANCES)
    given = None if replay is None else _parsed(replay)
    explorer = _Explorer(program, kinds, math.inf if max_secs is None else max_secs)

    def explore_schedules() -> None:
        with _quiet(explorer.errors):
            if given is not None:
                explorer.explore(Schedule(given=given), "the replay")
            elif most is not None:
                explorer.explore_all(most)
            else:
                steps = explorer.explore(Schedule(), "the first run").steps
                for seed in numbers:
                    explorer.explore(explorer.schedule(seed, steps), f"seed {seed}")

    await _call_outside_of_loop(explore_schedules)
    return Explored(explorer.schedules, explorer.steps, explorer.disturbances)


def unreliable(
    function: Callable[P, Awaitable[T]], *errors: Callable[[], Exception]
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a coroutine function that does the same, and whose calls may be slow or fail while a
    program is explored.

    Example: `client.post = unreliable(client.post, ConnectionError)`.

    Args:
        function: a coroutine function.
        errors: classes of errors, or functions that return one. A call that fails raises one of
            them before it has done anything, or after it has done all: then its answer is lost.
    """

    @functools.wraps(function)
    async def call(*args: P.args, **keywords: P.kwargs) -> T:
        run = _current_run.get()
        if run is None:
            return await function(*args, **keywords)
        name = getattr(function, "__qualname__", repr(function))
        await sleep(run.choose("slow", _SECS, lambda secs: f"a call of {name} takes {secs:g} s"))
        # The errors in turn, each before and after the call.
        failures = [
            None,
            *((error, when) for error in errors for when in ("", " after it was made")),
        ]

        def describe(failure: Any) -> str:
            return (
                f"a call of {name} fails with"
                f" {getattr(failure[0], '__name__', 'an error')}{failure[1]}"
            )

        failure = run.choose("failure", failures, describe)
        if not failure:
            return await function(*args, **keywords)
        if failure[1]:
            await function(*args, **keywords)
        raise run.injected(failure[0]())

    return call


def choose(first: T, *others: T, name: str = "") -> T:
    """Return the first of these values, or another one where the schedule of an exploration says
    so.

    Example: `status = choose(200, 404, 500)`.

    Args:
        first: what is usual, and what is returned outside of an exploration.
        others: the other values.
        name: what is chosen, for messages. Choices of another name do not change what these are.
    """
    run = _current_run.get()
    if run is None:
        return first
    return run.choose(
        "choice", (first, *others), lambda value: f"{name or 'chosen'}: {safe_repr(value)}", name
    )


def may_happen(event: Callable[[], object], name: str = "") -> AbstractContextManager[None]:
    """Say what may happen at any wait while the block is active, in an exploration.

    Example: `with may_happen(server.drop_connections): ...`.

    Args:
        event: a function that lets it happen. It must not fail; once it has returned False, it
            could not happen.
        name: for messages; by default that of the function.
    """
    run = _current_run.get()
    return _member(
        [] if run is None else run.events, (event, name or getattr(event, "__name__", "event"))
    )


def always(check: Callable[[], object]) -> AbstractContextManager[None]:
    """Call `check` at every wait while the block is active, in an exploration; it asserts what must
    always hold.

    Example: `with always(account.check_balance): ...`.
    """
    run = _current_run.get()
    return _member([] if run is None else run.checks, check)


@contextlib.contextmanager
def _member(items: list[T], item: T) -> Generator[None]:
    items.append(item)
    try:
        yield
    finally:
        items.remove(item)


class _Run:
    """A program under one schedule."""

    def __init__(
        self,
        program: Callable[[], Awaitable[Any]],
        schedule: Schedule,
        max_secs: float,
        errors: list[str],
        kill: Callable[[_Run], object] | None = None,
    ) -> None:
        self.schedule = schedule
        self.problem = ""
        """The promise that was broken, and how, if one was."""
        self.error: BaseException | None = None
        """That of the program."""
        self.waits: list[str] = []
        """Where those tasks waited that had not ended."""
        self.notes: dict[Place, str] = {}
        """Its disturbances in words."""
        self.steps = 0
        self.events: list[tuple[Callable[[], object], str]] = []
        self.checks: list[Callable[[], object]] = []
        self._happens = [kind for kind in (*_EVENTS, "kill") if schedule.may_matter(kind)]
        self._is_over = False  # nothing is to be disturbed any more
        self._steps_to_end = 0
        self._injected: list[BaseException] = []
        self._max_secs = max_secs
        self._kill = kill
        self._handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._limit: asyncio.Timeout | None = None
        self._loop = ScheduleLoop(self._before_step, self._between_steps, self._next_task)
        self._loop.set_exception_handler(
            lambda _, context: errors.append(describe_context(context))
        )
        context = contextvars.copy_context()
        context.run(set_current_clock, self._loop)
        context.run(_current_run.set, self)
        self._main = self._loop.create_task(self._limited(program), name="program", context=context)
        self._main.add_done_callback(self._ended)
        try:
            try:
                self._loop.run_forever()
            except (
                SystemExit
            ) as error:  # out of a callback, or out of the program, whose error it is then, too
                self.error = error
            self._judge()
            if self.problem:
                self.waits += [f"reported to the loop: {one}" for one in errors[:1]]
            self._end_tasks()
        finally:
            del self._main, self._limit, self.events, self.checks
            self._loop.close()
            gc.collect()  # errors that were not retrieved, and coroutines that were not awaited
        if errors and not self.problem:
            self.problem = f"an error was lost: {errors[0]}"
        errors.clear()

    async def _limited(self, program: Callable[[], Awaitable[Any]]) -> Any:
        async with asyncio.timeout(None) as self._limit:
            return await program()

    # -- while it runs

    def choose(
        self, kind: str, options: Sequence[T], describe: Callable[[T], str], name: str = ""
    ) -> T:
        """Return the option that the schedule chooses; `describe` says what that means."""
        key = _key(kind, name)
        choice = self.schedule.choose(kind, key, len(options))
        if choice and self.schedule.is_given:  # only then are they wanted
            self.notes[key, self.schedule.numbers[key]] = describe(options[choice])
        return options[choice]

    def injected(self, error: Exception) -> Exception:
        """Note an error that the program may raise."""
        self._injected.append(error)
        return error

    def _before_step(self) -> None:
        if self._is_over:
            self._steps_to_end += 1
            if self._steps_to_end % 1_000 == 0:  # of tasks that do not end when they are cancelled
                self._loop.stop()
            return
        self.steps += 1
        if self.steps > _MOST_STEPS or self._loop.secs > self._max_secs:
            self._is_over = True
            self._loop.stop()
        self._loop.secs += self.choose(
            "slow", _SECS, lambda secs: f"{secs:g} s pass, {self._place()}"
        )
        self._between_steps()

    def _between_steps(self) -> None:
        """Check what must always hold, and let something happen."""
        if self._is_over or self._main.done():
            return
        for check in self.checks:
            try:
                check()
            except Exception as error:
                self.error, self._is_over = error, True
                self._loop.stop()
                return
        for kind in self._happens:
            if kind == "event":
                for event, name in tuple(self.events):
                    self._may_happen(kind, functools.partial(_happens, event), name)
            else:
                self._may_happen(kind, functools.partial(self._happen, kind))

    def _may_happen(self, kind: str, happen: Callable[[], bool], name: str = "") -> None:
        if (
            self.choose(kind, (False, True), lambda _: f"{name or kind}, {self._place()}", name)
            and not happen()
        ):
            self.notes.pop(self.schedule.take_back(_key(kind, name)), None)

    def _next_task(self, tasks: list[asyncio.Task[Any]]) -> asyncio.Task[Any]:
        if len(tasks) == 1 or self._is_over:
            return tasks[0]
        return self.choose(
            "order", tasks, lambda task: f"{_place(task)} runs before {_place(tasks[0])}"
        )

    def _happen(self, kind: str) -> bool:
        """Let something happen to the program; return whether it could."""
        if kind == "cancel":
            return self._main.cancel()
        if kind == "timeout":
            limit = self._limit
            if limit is None or limit.expired() or limit.when() is not None:
                return False
            limit.reschedule(self._loop.secs)
        elif kind == "stop":
            open_requests = [session.requests for session in OPEN_SESSIONS]
            sessions = [one for one in open_requests if one.loop is self._loop and not one.stopped]
            for one in sessions:
                one.request_stop("explored")
            return bool(sessions)
        elif kind == "kill":
            if self._kill is None:
                return False
            self._kill(self)
        else:
            numbers = [
                number
                for number, before in self._handlers.items()
                if signal.getsignal(number) != before
            ]
            is_first = [kind for kind, _ in self.schedule.taken].count("signal") == 1
            if (
                not numbers
                or not is_first
                or threading.current_thread() is not threading.main_thread()
            ):
                return False
            signal.raise_signal(numbers[-1])
        return True

    def _place(self) -> str:
        return f"as the program waits at {_line(self._main)}"

    # -- at its end

    def _ended(self, main: asyncio.Task[Any]) -> None:
        if self._is_over:  # and cancelled for that
            return
        self._is_over = True
        left = [one for one in asyncio.all_tasks(self._loop) if not one.done()]
        if left:
            self.waits = _waits(left)
            self.problem = f"tasks are left: {', '.join(map(_name, left))}"
        elif any(session.requests.loop is self._loop for session in OPEN_SESSIONS):
            self.problem = "a session is left open"
        self._loop.stop()

    def _judge(self) -> None:
        """Say which promise was broken, if one was; how the program ended comes first."""
        main, happened, self._is_over = self._main, {kind for kind, _ in self.schedule.taken}, True
        if self._limit is None or not self._limit.expired():
            happened.discard("timeout")
        if self.error is not None:
            what = (
                "it ends the process"
                if isinstance(self.error, SystemExit)
                else "it does not always hold"
            )
            self.waits, self.problem = (
                _waits(asyncio.all_tasks(self._loop)),
                f"{what}: {safe_repr(self.error)}",
            )
            return
        if not main.done():
            self.waits = _waits(asyncio.all_tasks(self._loop))
            if self._loop.is_stuck:
                self.problem = "a deadlock: no task can run any more"
            elif self._loop.secs > self._max_secs:
                self.problem = f"too long: after {self._loop.secs:g} s the program has not ended"
            else:
                self.problem = (
                    f"it does not end: after {_MOST_STEPS:,} steps of tasks the program still runs"
                )
            return
        if main.cancelled():
            if "timeout" in happened and "cancel" not in happened:
                self.problem = (
                    "a time limit was lost: the program ended with CancelledError, and not with"
                    " TimeoutError"
                )
            elif not happened & {"cancel", "signal"}:
                self.problem = (
                    "a cancel was invented: the program ended with CancelledError, and nothing had"
                    " cancelled it"
                )
            return
        self.error = main.exception()
        if self._is_expected(self.error, happened):
            self.error = None
        elif "cancel" in happened or "timeout" in happened:
            what, due = (
                ("a cancel", "CancelledError")
                if "cancel" in happened
                else ("a time limit", "TimeoutError")
            )
            ended = (
                f"returned {safe_repr(main.result())}"
                if self.error is None
                else f"raised {safe_repr(self.error)}"
            )
            self.problem = f"{what} was lost: the program {ended}, and should have ended with {due}"
        elif self.error is not None:
            self.problem = f"an error: {safe_repr(self.error)}"

    def _is_expected(self, error: BaseException | None, happened: set[str]) -> bool:
        if error is None:
            return happened.isdisjoint(("cancel", "timeout"))
        if (
            isinstance(error, TimeoutError)
            and "cancel" not in happened
            and happened & {"timeout", "slow"}
        ):
            return True
        seen: list[BaseException] = []
        while error is not None and error not in seen:
            seen.append(error)
            if any(error is one for one in self._injected):
                return True
            if isinstance(error, BaseExceptionGroup):
                errors = flattened([error])  # pyright: ignore[reportUnknownArgumentType]
                return all(self._is_expected(one, happened) for one in errors)
            error = error.__cause__ or error.__context__
        return False

    def _end_tasks(self) -> None:
        """Cancel what is left, so that nothing of it disturbs the next run."""
        loop = self._loop
        for _ in range(10):
            tasks = asyncio.all_tasks(loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            timer = loop.call_later(1, loop.stop)
            loop.run_forever()
            timer.cancel()  # tasks that do not end have stopped the loop before
        for last in (loop.shutdown_asyncgens(), loop.shutdown_default_executor()):
            ending = loop.create_task(last)
            ending.add_done_callback(lambda _: loop.stop())
            for _ in range(10):
                loop.run_forever()
                if ending.done():
                    break


_current_run: ContextVar[_Run | None] = ContextVar("aiohooks_explored_run", default=None)


class _Explorer:
    """The runs of a program."""

    def __init__(
        self, program: Callable[..., Awaitable[Any]], kinds: Iterable[str], max_secs: float
    ) -> None:
        self.errors: list[str] = []
        """What was reported to the loop, and by finalisers."""
        self.schedules = 0
        self.steps = 0
        self.disturbances: Counter[str] = Counter()
        self._program: Callable[..., Awaitable[Any]] = program
        self._takes_directory = any(
            one.default is one.empty for one in inspect.signature(program).parameters.values()
        )
        self._kinds = frozenset(kinds) - (frozenset() if self._takes_directory else {"kill"})
        self._make_run = functools.partial(_Run, max_secs=max_secs, errors=self.errors)

    def schedule(self, seed: int, steps: int) -> Schedule:
        """Return the schedule of a seed, for a program that takes about so many steps."""
        choose = random.Random(seed)
        rates = {kind: choose.choice(rates) for kind, rates in _RATES.items()}
        events = [kind for kind in _EVENTS if kind in self._kinds]
        events = choose.sample(events, min(choose.choice((0, 1, 1, 2)), len(events)))
        if self._takes_directory and choose.random() < 0.3:
            events.append("kill")
        rates |= {kind: choose.choice((0.5, 1, 2)) / max(steps, 1) for kind in events}
        return Schedule(seed, {kind: rate for kind, rate in rates.items() if kind in self._kinds})

    def _run(self, schedule: Schedule) -> _Run:
        if not self._takes_directory:
            return self._make_run(self._program, schedule)
        with tempfile.TemporaryDirectory(prefix="aiohooks-explore-") as directory:
            program = functools.partial(self._program, Path(directory))
            if not schedule.may_choose("kill"):
                return self._make_run(program, schedule)
            if killed := self._killed(
                program, schedule
            ):  # in a child, whose choices are not taken here
                run = self._make_run(program, Schedule())
                for kind, number, choice, note in killed:
                    run.schedule.taken[kind, number], run.notes[kind, number] = choice, note
                return run
        return self._run(schedule.without("kill"))

    def _killed(
        self, program: Callable[[], Awaitable[Any]], schedule: Schedule
    ) -> list[tuple[str, int, int, str]]:
        """Run a program in a process of its own; return its disturbances if one is a kill, and
        nothing if it ends before.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:

            def kill(run: _Run) -> None:
                with open(writer, "w") as file:
                    json.dump(
                        [
                            (*place, choice, run.notes.get(place, ""))
                            for place, choice in run.schedule.taken.items()
                        ],
                        file,
                    )
                os._exit(0)

            try:
                self._make_run(program, schedule, kill=kill)
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader) as file:
            found: list[tuple[str, int, int, str]] = json.loads(file.read() or "[]")
        os.waitpid(child, 0)
        return found

    def explore_all(self, most: int) -> None:
        """Explore all schedules with so many disturbances at most, those with fewer first."""
        found = [
            (Schedule(), self.explore(Schedule(noted=self._kinds), "the first run").schedule.later)
        ]
        for _ in range(most):
            longer: list[tuple[Schedule, list[tuple[Place, int]]]] = []
            for parent, later in found:
                for place, options in later:
                    for choice in range(1, options):
                        given = {**parent.taken, place: choice}
                        run = self.explore(
                            Schedule(given=given, noted=self._kinds), f"schedule {self.schedules}"
                        )
                        if len(run.schedule.taken) == len(given):  # otherwise it could not happen
                            longer.append((run.schedule, run.schedule.later))
            found = longer

    def explore(self, schedule: Schedule, name: str) -> _Run:
        """Run the program.

        Raises:
            ExplorationError: a promise was broken.
        """
        run = self._run(schedule)
        self.schedules += 1
        self.steps += run.steps
        self.disturbances.update(kind for kind, _ in run.schedule.taken)
        if not run.problem:
            return run
        run = self._least(run)
        again = self._run(Schedule(given=run.schedule.taken))  # once more, for its notes
        replay = " ".join(
            f"{kind}@{number}={choice}"
            for (kind, number), choice in sorted(run.schedule.taken.items())
        )
        disturbed = [f"  disturbed: {note}" for _, note in sorted(again.notes.items())]
        lines = [f"{run.problem} ({name}, {self.schedules:,} schedules)", *disturbed]
        if run.error is not None and (
            frames := traceback.extract_tb(flattened([run.error])[0].__traceback__)
        ):
            lines.append(
                f"  raised in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})"
            )
        lines += [f"  {one}" for one in run.waits]
        if _kind(again) != _kind(run):
            lines.append(
                "  it did not come again with the same disturbances: something else than these"
                " decides what happens"
            )
        raise ExplorationError(
            "\n".join([*lines, f"  again: explore(..., replay={replay!r})"]), replay
        ) from run.error

    def _least(self, run: _Run) -> _Run:
        """Return a run with the same problem, and as few disturbances as were found."""
        tries, size = 0, max(len(run.schedule.taken) // 2, 1)
        while run.schedule.taken and tries < _MOST_SHRINKING:
            places = [*run.schedule.taken]
            for start in range(0, len(places), size):
                without = places[start : start + size]
                given = {
                    place: choice
                    for place, choice in run.schedule.taken.items()
                    if place not in without
                }
                tries += 1
                smaller = self._run(Schedule(given=given))
                if _kind(smaller) == _kind(run) and len(smaller.schedule.taken) < len(places):
                    run = smaller
                    break
            else:
                if size == 1:
                    break
                size //= 2
        return run


def _happens(event: Callable[[], object]) -> bool:
    return event() is not False


def _key(kind: str, name: str) -> str:
    return f"{kind}:{_SPACES.sub('_', name)}" if name else kind


def _kind(run: _Run) -> tuple[str, type | None]:
    return run.problem.partition(":")[0], type(run.error)


def _parsed(replay: str) -> dict[Place, int]:
    check_instance(replay, str, "replay")
    found = [_DISTURBANCE.fullmatch(one) for one in replay.split()]
    if None in found:
        raise InvalidArgumentError(
            f"replay is {replay!r}; give what an ExplorationError has as its `replay`"
        )
    return {(one[1], int(one[2])): int(one[3]) for one in found if one is not None}


def _name(task: asyncio.Task[Any]) -> str:
    name, coro = task.get_name(), task.get_coro()
    return (
        getattr(coro, "__qualname__", name).rpartition(".")[2] if name.startswith("Task-") else name
    )


def _place(task: asyncio.Task[Any]) -> str:
    return f"{_name(task)} at {_line(task)}"


def _line(task: asyncio.Task[Any]) -> str:
    """Return the line of the user's code in which a task waits."""
    return (task_wait(task).where or "its beginning").partition(", in ")[0]


def _waits(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    return sorted(
        f"task {_name(one)} waits at {task_wait(one).where or 'its beginning'}" for one in tasks
    )


async def _call_outside_of_loop(function: Callable[[], None]) -> None:
    """Call a function that runs other loops in this thread.

    A callback of this loop calls it: other loops could not run their tasks inside a step of this
    one's.
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
            ended.set_exception(error)  # also a KeyboardInterrupt, which the task raises then
        else:
            ended.set_result(None)

    loop.call_soon(call)
    await ended


@contextlib.contextmanager
def _no_running_loop(loop: asyncio.AbstractEventLoop) -> Generator[None]:
    """Let other loops run in this thread for the block, which `loop` runs."""
    # asyncio exports this function for event loops. No loop starts while another one is running.
    asyncio._set_running_loop(None)
    is_main = threading.current_thread() is threading.main_thread()
    # The socket by which signals wake the outer loop, which does not read it meanwhile: it would
    # fill up.
    wakeup_fd = signal.set_wakeup_fd(-1) if is_main else -1
    try:
        yield
    finally:
        if is_main:
            signal.set_wakeup_fd(wakeup_fd)
        asyncio._set_running_loop(loop)


@contextlib.contextmanager
def _quiet(errors: list[str]) -> Generator[None]:
    """Log nothing in the block, and collect the errors of finalisers; garbage is collected between
    two runs only.
    """
    disabled, hook, was_enabled = logging.root.manager.disable, sys.unraisablehook, gc.isenabled()
    logging.disable()
    gc.disable()
    unfreezes = (
        not gc.get_freeze_count()
    )  # else the program itself has frozen objects, which must remain so
    if not unfreezes:
        gc.collect()  # garbage would remain, too
    gc.freeze()  # what was there before need not be looked at after each run
    sys.unraisablehook = lambda unraisable: errors.append(describe_unraisable(unraisable))
    make_task = cancel.make_task
    cancel.make_task = NumberedTask
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "error", message="coroutine .* was never awaited", category=RuntimeWarning
            )
            warnings.simplefilter("error", ResourceWarning)
            warnings.filterwarnings(
                "ignore", message=".*fork.* may lead to deadlocks", category=DeprecationWarning
            )
            yield
    finally:
        cancel.make_task = make_task
        sys.unraisablehook = hook
        if unfreezes:
            gc.unfreeze()
        logging.disable(disabled)
        if was_enabled:
            gc.enable()
