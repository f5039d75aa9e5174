"""A run of a program under one schedule: its disturbances, and the promises that it breaks."""

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
# Characters that a name cannot have in the text of a replay: see `explore`.
_SEPARATORS = re.compile(r"[\s@]+")
_MOST_STEPS = 100_000
"""After so many steps of its tasks, a program counts as endless."""
_MOST_STEPS_TO_END = 1_000
"""After so many steps, the loop gives up a cancelled task for now: see `_end_tasks`."""

current_run: ContextVar[ScheduleRun | None] = ContextVar("aiohooks_explored_run", default=None)


class ScheduleRun:
    """A run of a program under one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        """Run nothing yet: call `execute`."""
        self.schedule = schedule
        self.problems: list[str] = []
        """Descriptions of the broken promises."""
        self.error: BaseException | None = None
        """The error of the program."""
        self.waits: list[str] = []
        """Descriptions of the waits of tasks that had not ended with the program."""
        self.notes: dict[Place, str] = {}
        """Descriptions of the disturbances, in a replay."""
        self.steps = 0
        """The number of steps of tasks until the program had ended."""
        self.events: list[tuple[Call, str]] = []
        """The active events of `may_happen`, with their names."""
        self.checks: list[Call] = []
        """The active checks of `always`."""
        # Whether the program has ended: nothing disturbs the remaining tasks.
        self._is_over = False
        self._steps_to_end = 0
        # The errors of `unreliable` functions, which the program may raise.
        self._injected: list[BaseException] = []

    def execute(self, program: Program, errors: list[str]) -> None:
        """Run the program, and set `problems`.

        Errors that are reported to the loop are appended to `errors`, to which the caller has those
        of finalizers appended.
        """
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
            lost_errors = errors[:]
            self._end_tasks()
        finally:
            # These attributes may keep objects alive that the garbage collection below must find.
            del self._main, self._network, self.events, self.checks
            self._loop.close()
            gc.collect()
        # If tasks were left, their cancellation above may have caused more errors.
        if not self.problems:
            lost_errors = errors[:]
        self.problems += [f"an error was lost: {error}" for error in lost_errors[:1]]
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
        """Note an error of an `unreliable` function, and return it: the program may raise it."""
        self._injected.append(error)
        return error

    def before_step(self) -> None:
        """Count the step, and let time pass before it."""
        if self._is_over:
            self._steps_to_end += 1
            # A task that does not end when it is cancelled must not keep the loop running.
            if self._steps_to_end % _MOST_STEPS_TO_END == 0:
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
        """Call the event if the schedule says that it happens here."""
        happens = self.choose(
            kind,
            (False, True),
            lambda _: f"{name or kind}, {self._place()}",
            name,
        )
        if happens:
            event()

    def next_task(self, tasks: list[Task]) -> Task:
        """Return the task that runs next, of tasks in the order of the loop."""
        first = tasks[0]
        if len(tasks) == 1 or self._is_over:
            return first
        return self.choose(
            "order",
            tasks,
            lambda task: f"{_task_place(task)} runs before {_task_place(first)}",
        )

    def _place(self) -> str:
        """Describe for a note where the program waits now."""
        return f"as the program waits at {_line(self._main)}"

    # The end

    def _stop(self) -> None:
        """Stop the loop: the program has ended, or a promise is broken."""
        self._is_over = True
        self._loop.stop()

    def _ended(self, _: object) -> None:
        """Called when the task of the program has ended."""
        # `asyncio.run` stops its loop in the same way: tasks that are scheduled make a last step.
        if not self._is_over:
            self._stop()

    def _judge(self) -> None:
        """Add the broken promises to `problems`, the most specific first."""
        kinds = {kind for kind, _ in self.schedule.taken}
        tasks = asyncio.all_tasks(self._loop)
        if self.error is not None:
            is_exit = isinstance(self.error, SystemExit)
            promise = "it ends the process" if is_exit else "it does not always hold"
            self.problems.append(f"{promise}: {safe_repr(self.error)}")
        elif not self._main.done():
            self.problems.append(self._describe_endless())
        else:
            self._judge_end(kinds)
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
        """Describe why the program has not ended."""
        if self._loop.stuck_because:
            return f"a deadlock: {self._loop.stuck_because}"
        return f"it does not end: after {_MOST_STEPS:,} steps of tasks the program still runs"

    def _judge_end(self, kinds: Collection[str]) -> None:
        """Add a problem if the end of the program does not fit the kinds of disturbances."""
        if self._main.cancelled():
            if "cancel" not in kinds:
                self.problems.append(
                    "a cancel was invented: the program ended with CancelledError, and nothing had"
                    " cancelled it"
                )
            return
        error = self._main.exception()
        if self._is_expected(error, kinds):
            return
        self.error = error
        if "cancel" not in kinds:
            self.problems.append(f"an error: {safe_repr(error)}")
            return
        ending = f"raised {safe_repr(error)}"
        if error is None:
            ending = f"returned {safe_repr(self._main.result())}"
        self.problems.append(
            f"a cancel was lost: the program {ending}, and should have ended with CancelledError"
        )

    def _is_expected(self, error: BaseException | None, kinds: Collection[str]) -> bool:
        """Return whether a program may end with this error, None for a result.

        It may if the error, or a cause of it, was injected or is that of a lost connection, and in
        a group, if this is so for each error.
        """
        if error is None:
            return "cancel" not in kinds
        if isinstance(error, TimeoutError) and "slow" in kinds and "cancel" not in kinds:
            return True
        causes: list[BaseException] = []
        while error is not None and error not in causes:
            if any(error is injected for injected in self._injected):
                return True
            if self._network.has_lost_connection and isinstance(error, ConnectionError):
                return True
            if isinstance(error, BaseExceptionGroup):
                errors = flattened([error])  # pyright: ignore[reportUnknownArgumentType]
                return all(self._is_expected(inner, kinds) for inner in errors)
            causes.append(error)
            error = error.__cause__ or error.__context__
        return False

    def _end_tasks(self) -> None:
        """Cancel the remaining tasks, so that they do not disturb the next run."""
        loop = self._loop
        # A cancelled task may start other tasks, or ignore the cancel. Tasks that are left after
        # these attempts are dropped with the loop.
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
    """Await a program, which may return any awaitable: a task needs a coroutine."""
    return await program()


def _key(kind: str, name: str) -> str:
    """Return the key of a choice. The text of a replay has it, so it must be one word."""
    return f"{kind}:{_SEPARATORS.sub('_', name)}" if name else kind


def _name(task: Task) -> str:
    """Return the name of a task, the same in each run."""
    name = task.get_name()
    # asyncio numbers the tasks of a process, also those of earlier runs.
    if name.startswith("Task-"):
        name = getattr(task.get_coro(), "__qualname__", name).rpartition(".")[2]
    return name


def _task_place(task: Task) -> str:
    """Describe a task by its name, and by its line if it waits in the user's code."""
    if all(map(is_library, task_wait(task).frames)):
        return _name(task)
    return f"{_name(task)} at {_line(task)}"


def _line(task: Task) -> str:
    """Return the line of the user's code in which a task waits."""
    return (task_wait(task).where or "its beginning").partition(", in ")[0]
