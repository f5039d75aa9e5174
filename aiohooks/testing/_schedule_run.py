"""A program under one schedule: what happens to it, and which promises it breaks."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from aiohooks._core.clock import set_current_clock
from aiohooks._why.tasks import is_library, task_wait
from aiohooks.errors import flattened, safe_repr
from aiohooks.session.lifecycle import OPEN_SESSIONS
from aiohooks.testing._network import Network
from aiohooks.testing._schedule import DELAYS, Place, Schedule
from aiohooks.testing._schedule_loop import ScheduleLoop, Task
from aiohooks.testing.leaks import describe_context

T = TypeVar("T")
Call = Callable[[], object]
Program = Callable[..., Awaitable[Any]]
_SPACES = re.compile(r"[\s@]+")
_MOST_STEPS = 100_000
_MOST_STEPS_TO_END = 1_000

current_run: ContextVar[ScheduleRun | None] = ContextVar("aiohooks_explored_run", default=None)


class ScheduleRun:
    """A program under one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.problems: list[str] = []
        """The promises that were broken, and how."""
        self.error: BaseException | None = None
        """The error of the program."""
        self.waits: list[str] = []
        """Where tasks waited that had not ended."""
        self.notes: dict[Place, str] = {}
        """Descriptions of the disturbances, in a replay."""
        self.steps = 0
        self.events: list[tuple[Call, str]] = []
        self.checks: list[Call] = []
        self._is_over = False  # nothing disturbs the program any more
        self._steps_to_end = 0
        self._injected: list[BaseException] = []

    def execute(self, program: Program, errors: list[str]) -> None:
        """Run the program, and judge it. `errors` also receives the errors of finalizers."""
        self._loop = ScheduleLoop(self)
        self._loop.set_exception_handler(
            lambda _, context: errors.append(describe_context(context))
        )
        self._network = Network(self._loop, self.choose)
        context = contextvars.copy_context()
        context.run(set_current_clock, self._loop)
        context.run(current_run.set, self)
        self._main = self._loop.create_task(
            _call(program),
            name="program",
            context=context,
        )
        self._main.add_done_callback(self._ended)
        try:
            try:
                self._loop.run_forever()
            except SystemExit as error:  # of a callback, or of the program
                self.error = error
            self._is_over = True
            self._judge()
            lost = errors[:]
            self._end_tasks()
        finally:
            # Their frames may hold what the garbage collection below has to find.
            del self._main, self._network, self.events, self.checks
            self._loop.close()
            gc.collect()
        if not self.problems:  # else cancels of the remaining tasks may have caused errors
            lost = errors[:]
        self.problems += [f"an error was lost: {error}" for error in lost[:1]]
        errors.clear()

    # Disturbances

    def choose(
        self,
        kind: str,
        options: Sequence[T],
        describe: Callable[[T], str],
        name: str = "",
    ) -> T:
        """Return the option that the schedule chooses."""
        key = _key(kind, name)
        choice = self.schedule.choose(kind, key, options)
        if choice and self.schedule.is_replay:
            self.notes[key, self.schedule.counts[key]] = describe(options[choice])
        return options[choice]

    def injected(self, error: Exception) -> Exception:
        """Note an error that the program may raise."""
        self._injected.append(error)
        return error

    def before_step(self) -> None:
        if self._is_over:
            self._steps_to_end += 1
            if self._steps_to_end % _MOST_STEPS_TO_END == 0:  # a task does not end when cancelled
                self._loop.stop()
            return
        self.steps += 1
        if self.steps > _MOST_STEPS:
            self._stop()
        self._loop.secs += self.choose(
            "slow", DELAYS, lambda secs: f"{secs:g} s pass, {self._place()}"
        )
        self.after_step()

    def after_step(self) -> None:
        """Check the invariants, and let events happen."""
        if self._is_over or self._main.done():
            return
        try:
            for check in self.checks:
                check()
        except Exception as error:
            self.error = error
            self._stop()
            return
        self._may_happen("cancel", self._main.cancel)
        for event, name in tuple(self.events):
            self._may_happen("event", event, name)

    def _may_happen(self, kind: str, event: Call, name: str = "") -> None:
        happens = self.choose(
            kind,
            (False, True),
            lambda _: f"{name or kind}, {self._place()}",
            name,
        )
        if happens and event() is False:
            place = self.schedule.take_back(_key(kind, name))
            self.notes.pop(place, None)

    def next_task(self, tasks: list[Task]) -> Task:
        first = tasks[0]  # in the order of the loop
        if len(tasks) == 1 or self._is_over:
            return first
        return self.choose(
            "order",
            tasks,
            lambda task: f"{_task_place(task)} runs before {_task_place(first)}",
        )

    def _place(self) -> str:
        return f"as the program waits at {_line(self._main)}"

    # The end

    def _stop(self) -> None:
        self._is_over = True
        self._loop.stop()

    def _ended(self, _: object) -> None:
        # The loop finishes its turn, as that of `asyncio.run` does: steps that are scheduled run.
        if not self._is_over:
            self._stop()

    def _judge(self) -> None:
        """Add the broken promises, the most specific first."""
        happened = {kind for kind, _ in self.schedule.taken}
        tasks = asyncio.all_tasks(self._loop)
        if self.error is not None:
            is_exit = isinstance(self.error, SystemExit)
            promise = "it ends the process" if is_exit else "it does not always hold"
            self.problems.append(f"{promise}: {safe_repr(self.error)}")
        elif not self._main.done():
            self.problems.append(self._describe_endless())
        else:
            self._judge_end(happened)
            if tasks:
                names = sorted(map(_name, tasks))
                self.problems.append(f"tasks are left: {', '.join(names)}")
            elif any(session.requests.loop is self._loop for session in OPEN_SESSIONS):
                self.problems.append("a session is left open")
        self.waits = sorted(
            f"task {_name(task)} waits at {task_wait(task).where or 'its beginning'}"
            for task in tasks
        )

    def _describe_endless(self) -> str:
        if self._loop.stuck_because:
            return f"a deadlock: {self._loop.stuck_because}"
        return f"it does not end: after {_MOST_STEPS:,} steps of tasks the program still runs"

    def _judge_end(self, happened: Collection[str]) -> None:
        """Compare the end of the program with what happened to it."""
        if self._main.cancelled():
            if "cancel" not in happened:
                self.problems.append(
                    "a cancel was invented: the program ended with CancelledError, and nothing had"
                    " cancelled it"
                )
            return
        error = self._main.exception()
        if self._is_expected(error, happened):
            return
        self.error = error
        if "cancel" not in happened:
            self.problems.append(f"an error: {safe_repr(error)}")
            return
        ending = f"raised {safe_repr(error)}"
        if error is None:
            ending = f"returned {safe_repr(self._main.result())}"
        self.problems.append(
            f"a cancel was lost: the program {ending}, and should have ended with CancelledError"
        )

    def _is_expected(self, error: BaseException | None, happened: Collection[str]) -> bool:
        if error is None:
            return "cancel" not in happened
        if isinstance(error, TimeoutError) and "slow" in happened and "cancel" not in happened:
            return True
        causes: list[BaseException] = []
        while error is not None and error not in causes:
            if any(error is injected for injected in self._injected):
                return True
            if self._network.has_lost_connection and isinstance(error, ConnectionError):
                return True
            if isinstance(error, BaseExceptionGroup):
                errors = flattened([error])  # pyright: ignore[reportUnknownArgumentType]
                return all(self._is_expected(inner, happened) for inner in errors)
            causes.append(error)
            error = error.__cause__ or error.__context__
        return False

    def _end_tasks(self) -> None:
        """Cancel the remaining tasks, so that they do not disturb the next run."""
        loop = self._loop
        # A task may start others, or ignore a cancel; what is left then is dropped with the loop.
        for _ in range(10):
            tasks = asyncio.all_tasks(loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            timer = loop.call_later(1, loop.stop)
            loop.run_forever()
            timer.cancel()
        for shutdown in (loop.shutdown_asyncgens(), loop.shutdown_default_executor()):
            ending = loop.create_task(shutdown)
            ending.add_done_callback(lambda _: loop.stop())
            for _ in range(10):
                loop.run_forever()
                if ending.done():
                    break


async def _call(program: Program) -> Any:
    return await program()


def _key(kind: str, name: str) -> str:
    return f"{kind}:{_SPACES.sub('_', name)}" if name else kind


def _name(task: Task) -> str:
    name = task.get_name()
    # The number of a task depends on what ran before this exploration.
    if name.startswith("Task-"):
        name = getattr(task.get_coro(), "__qualname__", name).rpartition(".")[2]
    return name


def _task_place(task: Task) -> str:
    if all(map(is_library, task_wait(task).frames)):
        return _name(task)
    return f"{_name(task)} at {_line(task)}"


def _line(task: Task) -> str:
    """Return the line of the user's code in which a task waits."""
    return (task_wait(task).where or "its beginning").partition(", in ")[0]
