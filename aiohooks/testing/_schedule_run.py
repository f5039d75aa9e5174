"""A run of a program under one schedule: its disturbances, and the promises that it breaks.

The event loop of the run has virtual time, and the schedule chooses the order of tasks there. When
nothing else can run, the time jumps to the next timer. The queue of the loop has callbacks and
steps: a step is the code of a task between two of its waits. Callbacks run in the order of any
asyncio loop. Steps that are next to one another in the queue may change places. Files and threads
are real: the loop waits for threads that work. Sockets and processes are rejected, because they
would not follow the schedule.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

from aiohooks._core.clock import set_current_clock
from aiohooks._why.tasks import is_library, location, task_wait
from aiohooks.errors import UnsupportedSystemError, flattened, safe_repr
from aiohooks.session.lifecycle import OPEN_SESSIONS
from aiohooks.testing._network import Network
from aiohooks.testing._schedule import DELAYS, Place, Schedule
from aiohooks.testing.leaks import LOCK_FILES, WORKER_NAMES, describe_context, is_idle_worker

Task = asyncio.Task[Any]
_MOST_TURNS = 10_000
"""After so many turns of the loop without progress of a task, the loop stops."""
_IDLE_TURNS = 50
"""After so many turns of the loop in which only callbacks ran, the time jumps to the next timer."""
_THREAD_SECS = 10.0
"""How long the loop waits for a thread that works, in real time like the next three."""
_LOCK_SECS = 0.05
"""How long the loop waits for a thread in a lock or a queue, which may continue any moment."""
_DEADLOCK_SECS = 1.0
"""How long the loop waits for any thread if no task can run. An idle worker may have got work."""
_POLL_SECS = 0.005
"""How often the loop looks at threads while it waits for them."""
_REJECTED_METHODS = (
    "connect_read_pipe",
    "connect_write_pipe",
    "create_datagram_endpoint",
    "create_unix_connection",
    "create_unix_server",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_sendall",
    "subprocess_exec",
    "subprocess_shell",
)
"""Methods of loops that use sockets or processes."""


class NumberedFuture(asyncio.Future[Any]):
    """A future whose place in a set depends on its number, and not on its address.

    So a set of futures has the same order in each run.
    """

    def __init__(self, *, loop: Any) -> None:
        self._number: int = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its number, as that of a `NumberedFuture` does."""

    is_being_cancelled: bool = False
    """Whether its next step raises `CancelledError`."""

    def __init__(self, coro: Any, *, loop: Any = None, **options: Any) -> None:
        """Start the task, as `asyncio.Task` does, in a `ScheduleLoop`."""
        loop = loop or asyncio.get_running_loop()
        self._number: int = next(loop.numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def cancel(self, msg: Any = None) -> bool:
        self.is_being_cancelled = super().cancel(msg)
        return self.is_being_cancelled


# Messages about the user's tasks show these names.
NumberedTask.__name__ = NumberedTask.__qualname__ = "Task"
NumberedFuture.__name__ = NumberedFuture.__qualname__ = "Future"


class _ReadyQueue(deque[asyncio.Handle]):
    """The callbacks and the steps of tasks that can run next. No callback changes its place."""

    def __init__(self, loop: ScheduleLoop) -> None:
        super().__init__()
        self._loop = loop
        self._last_was_step = False

    def popleft(self) -> asyncio.Handle:
        """Remove and return the next handle: a callback at the front, or the step that runs next.

        The loop calls this for each handle that it runs.
        """
        loop = self._loop
        steps = self._first_steps()
        if not steps:
            if self._last_was_step:
                # The callback may end the wait of a task, and a cancel may come before that.
                loop.scheduler.at_waits()
            self._last_was_step = False
            return super().popleft()
        self._last_was_step = True
        loop.scheduler.before_step()
        task = loop.scheduler.next_task([*steps])
        loop.count_progress(task)
        handle = self[steps[task]]
        del self[steps[task]]
        return handle

    def _first_steps(self) -> dict[Task, int]:
        """Return the tasks with a step before the first callback, with the index of the step."""
        steps: dict[Task, int] = {}
        # The queue is copied, because a thread may add a handle at any time.
        for index, handle in enumerate([*self]):
            task = _task_of(handle)
            if task is None:
                break
            steps.setdefault(task, index)
        return steps


def _task_of(handle: asyncio.Handle) -> Task | None:
    """Return the task of which a handle is a step, or None for a callback."""
    # A handle has no public attribute for its callback. The callback of a step is a method of its
    # task.
    callback: Any = getattr(handle, "_callback", None)
    owner: Any = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return None
    return owner  # pyright: ignore[reportUnknownVariableType]


class _Selector(selectors.DefaultSelector):
    """Reports events of files. Where a loop would wait for its next timer, the time jumps."""

    loop: ScheduleLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return the events of files. The loop calls this in each turn.

        A `timeout` of 0 means that callbacks or steps can run. Otherwise it is the time to the next
        timer, or None without a timer: the program is in a deadlock if no thread works.
        """
        loop = self.loop
        loop.turns += 1
        if loop.turns > _MOST_TURNS:
            return self._stop()
        if timeout == 0:
            if loop.turns % _IDLE_TURNS != 0:
                return super().select(0)
            # Only callbacks have run. A cancelled scope of anyio, for example, calls itself in each
            # turn until its tasks have ended. Let the time jump all the same, because one of these
            # tasks may wait for a timer.
            timeout = loop.secs_to_timer()
        events = self._wait_for_threads(is_deadlock=timeout is None)
        if not events and timeout is None:
            return self._stop()
        if not events and not loop.stuck_because:
            loop.secs += timeout or 0
        return events

    def _wait_for_threads(self, is_deadlock: bool) -> list[Any]:
        """Return the events of files. While threads work, wait for the first event."""
        start = time.monotonic()
        while True:
            # A thread writes to a file, which wakes the loop, before it becomes idle. So look at
            # threads before files, or its event would be missed.
            places = self.loop.busy_threads(is_deadlock)
            working = [place for place, may_be_idle in places if not may_be_idle]
            limit_secs = 0.0
            if places:
                limit_secs = _DEADLOCK_SECS if is_deadlock else _LOCK_SECS
            if working:
                limit_secs = _THREAD_SECS
            is_late = time.monotonic() - start >= limit_secs
            events = super().select(0 if is_late else _POLL_SECS)
            if not events and is_late and working:
                return self._stop(
                    f"a thread has not ended within {_THREAD_SECS:g} s, at {working[0]}"
                )
            if events or is_late:
                return events

    def _stop(self, why: str = "no task can run any more") -> list[Any]:
        """Stop the loop for this reason, and return no events."""
        self.loop.stuck_because = why
        self.loop.stop()
        return []


class ScheduleLoop(asyncio.SelectorEventLoop):
    """The event loop of one run."""

    def __init__(self, scheduler: ScheduleRun) -> None:
        """Make a loop that asks `scheduler` which task runs next."""
        self.secs: float = 0.0
        """The virtual time, in seconds."""
        self.stuck_because: str = ""
        """Why the loop has stopped by itself. Empty if it has not."""
        self.scheduler: ScheduleRun = scheduler
        self.numbers: Iterator[int] = itertools.count()
        """The numbers of its futures and tasks."""
        self.turns: int = 0
        """How many turns the loop has made since a task has made progress."""
        files = _Selector()
        files.loop = self
        super().__init__(files)
        # asyncio has no public way to choose the next handle: its loop takes it from `_ready`.
        if not hasattr(self, "_ready"):
            files.close()
            raise UnsupportedSystemError(
                "explore cannot choose what the event loop of this Python runs next"
            )
        self._ready: Any = _ReadyQueue(self)
        # The threads that the program has not started.
        self._other_threads = {*threading.enumerate()}

    def time(self) -> float:
        return self.secs

    # The loop is also the clock of the library, which needs this method.
    now = time

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> Task:
        if self.get_task_factory() is not None:
            return super().create_task(coro, **options)
        return NumberedTask(coro, loop=self, **options)

    def count_progress(self, task: Task) -> None:
        """Note that the step of this task runs next."""
        # A step that gets a cancel is no progress: an anyio scope repeats its cancel in each turn.
        if isinstance(task, NumberedTask) and task.is_being_cancelled:
            task.is_being_cancelled = False
        else:
            self.turns = 0

    def secs_to_timer(self) -> float | None:
        """Return the time to the next timer, or None without a timer."""
        # asyncio has no public list of timers. On a Python without this list, a program whose
        # callbacks repeat themselves counts as stuck.
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        if not timers:
            return None
        return max(timers[0].when() - self.secs, 0)

    def busy_threads(self, with_idle: bool) -> list[tuple[str, bool]]:
        """Return the place in the code of each thread of the program, and whether it may be idle.

        An idle worker of a pool is only in the list if `with_idle`. Any other thread may be idle if
        it waits for a lock or a queue.
        """
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        places: list[tuple[str, bool]] = []
        for thread in {*threading.enumerate()} - self._other_threads:
            frame = frames.get(thread.ident or 0)
            is_idle = is_idle_worker(thread) and not _has_work(thread)
            if frame is not None and (with_idle or not is_idle):
                is_in_lock = frame.f_code.co_filename.endswith(LOCK_FILES)
                is_worker = thread.name.startswith(WORKER_NAMES)
                places.append((location(frame), is_idle or (is_in_lock and not is_worker)))
        return places


def _has_work(thread: threading.Thread) -> bool:
    """Return whether a worker of anyio has got work that it has not begun yet."""
    # The workers of the loop's own pool have no such attribute.
    queue = getattr(thread, "queue", None)
    return queue is not None and not queue.empty()


def _rejecting(name: str) -> Callable[..., NoReturn]:
    """Return a method of the loop that only raises an error, which has the name of the method."""

    def reject(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"{name} is outside of an exploration's schedule; replace what uses it by a double"
            " (`asyncio.start_server` and `open_connection` are simulated)"
        )

    return reject


for _method in _REJECTED_METHODS:
    setattr(ScheduleLoop, _method, _rejecting(_method))


T = TypeVar("T")
Call = Callable[[], object]
Program = Callable[..., Awaitable[Any]]
# The characters that separate the parts of a replay's text, such as `event:crash@3=1`. A name in it
# cannot have them.
_SEPARATORS = re.compile(r"[\s@]+")
_MOST_STEPS = 100_000
"""After so many steps of its tasks, a program counts as endless."""
_MOST_STEPS_TO_END = 1_000
"""After so many steps of cancelled tasks, `_end_tasks` cancels the tasks that still run again."""

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
        # Whether the program has ended or was stopped. Nothing disturbs the remaining tasks then.
        self._is_over = False
        # The number of steps of tasks since then.
        self._steps_to_end = 0
        # The errors that `unreliable` functions have raised, which the program may raise.
        self._injected: list[BaseException] = []

    def execute(self, program: Program, errors: list[str]) -> None:
        """Run the program, and set `problems`.

        `errors` gets the errors that are reported to the loop. The caller appends the errors of
        finalizers to it meanwhile. It is empty at the end.
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
            except SystemExit as error:
                # A callback or the program ends the process.
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
        # The errors of finalizers have come by now. But if there is a problem already, `_end_tasks`
        # may have cancelled tasks that were left, and later errors may come from that.
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
        """Return the option that the schedule chooses. Option 0 is the ordinary behavior.

        Args:
            kind: the kind of the choice.
            options: the options.
            describe: describes an option other than option 0, which disturbs the program. In a
                replay, the report lists these disturbances.
            name: a name for the key of the choice.
        """
        key = _key(kind, name)
        index = self.schedule.choose(kind, key, options)
        if index != 0 and self.schedule.is_replay:
            self.notes[key, self.schedule.counts[key]] = describe(options[index])
        return options[index]

    def injected(self, error: Exception) -> Exception:
        """Return an error that an `unreliable` function will raise, and keep it: the program may
        raise it, too.
        """
        self._injected.append(error)
        return error

    def before_step(self) -> None:
        """Called before each step of a task: count the step, and disturb the program."""
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
        self.at_waits()

    def at_waits(self) -> None:
        """Check the invariants, and let a cancel or events happen.

        This is called before each step, and before a callback that comes after a step. All tasks
        wait at this moment.
        """
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
        """Return the task that runs next. `tasks` are in the order of the loop."""
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
        """Stop the loop: the program has ended, broken a promise or exceeded a limit."""
        self._is_over = True
        self._loop.stop()

    def _ended(self, _: object) -> None:
        """Called when the task of the program has ended."""
        # The loop ends its current turn first, in which scheduled tasks make a last step. So does
        # that of `asyncio.run`.
        if not self._is_over:
            self._stop()

    def _judge(self) -> None:
        """Add the broken promises to `problems`, the most specific first."""
        # A key begins with its kind: see `_key`.
        kinds = {key.partition(":")[0] for key, _ in self.schedule.taken}
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
        """Return whether the program may end with this error, or if it is None with a result.

        An error is expected if it, or an error in its chain of causes and contexts, was injected or
        is that of a lost connection. A group is expected if each of its errors is. A timeout is
        expected if time has passed, and a result if no cancel came.
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
        # A cancelled task may start other tasks, or ignore the cancel. So there are ten attempts,
        # and tasks that are left after them are dropped with the loop.
        for _ in range(10):
            tasks = asyncio.all_tasks(loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            # The loop stops when all tasks wait for something that is later than this timer.
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
    """Await a program. It may return any awaitable, but a task needs a coroutine."""
    return await program()


def _key(kind: str, name: str) -> str:
    """Return the key of a choice: its kind, or its kind and a name."""
    if not name:
        return kind
    return f"{kind}:{_SEPARATORS.sub('_', name)}"


def _name(task: Task) -> str:
    """Return the name of a task, the same in each run."""
    name = task.get_name()
    # By default, the name has the number of the task in the process, which differs in each run.
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
