"""An event loop with virtual time, in which a schedule chooses the order of tasks: for `explore`.

When nothing else can run, the time jumps to the next timer. Callbacks run in the order of any
asyncio loop. Steps of tasks that are next to one another in the queue of the loop may change
places. Files and threads are real: the loop waits for threads that work. Sockets and processes are
rejected, because they would not follow the schedule.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from aiohooks._why.tasks import location
from aiohooks.errors import UnsupportedSystemError
from aiohooks.testing.leaks import LOCK_FILES, WORKER_NAMES, is_idle_worker

Task = asyncio.Task[Any]
_MOST_TURNS = 10_000
"""After so many turns without progress of a task, the loop stops."""
_IDLE_TURNS = 50
"""After so many turns in which only callbacks ran, the time jumps to the next timer."""
# In real time:
_THREAD_SECS = 10.0
"""How long the loop waits for a thread that works."""
_LOCK_SECS = 0.05
"""How long the loop waits for a thread in a lock or a queue: it may continue any moment."""
_DEADLOCK_SECS = 1.0
"""The same if no task can run, also for an idle worker, which may have got work any moment."""
_POLL_SECS = 0.005
"""How often the loop looks at threads while it waits for them."""
_REJECTED = (
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
    """A future whose place in a set depends on its number in the loop, not on its address."""

    def __init__(self, *, loop: Any) -> None:
        self._number: int = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its number in the loop, not on its address."""

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


class Scheduler(Protocol):
    """Decides about the steps of tasks: a `ScheduleRun`."""

    def before_step(self) -> None:
        """Called before a step of a task."""

    def after_step(self) -> None:
        """Called after a step, before the callbacks that follow it."""

    def next_task(self, tasks: list[Task]) -> Task:
        """Return the task whose step runs next."""
        ...


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
                # Now, so that a cancel can come before the callback ends the wait of a task.
                loop.scheduler.after_step()
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
        # A copy, because a thread may add a handle at any time.
        for index, handle in enumerate([*self]):
            task = _task_of(handle)
            if task is None:
                break
            steps.setdefault(task, index)
        return steps


def _task_of(handle: asyncio.Handle) -> Task | None:
    """Return the task of which a handle is a step, or None for a callback."""
    # A handle has no public attribute for its callback. A step's callback is a method of its task.
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
            if loop.turns % _IDLE_TURNS:
                return super().select(0)
            # A cancelled scope of anyio calls itself in each turn until its tasks have ended. Let
            # the time jump all the same, as one of these tasks may wait for a timer.
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
            # A thread wakes the loop before it becomes idle, so look at threads before files.
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
    """The event loop of one schedule."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Make a loop that asks `scheduler` which task runs next."""
        self.secs: float = 0.0
        """The virtual time."""
        self.stuck_because: str = ""
        """The reason for which the loop has stopped by itself, empty if it has not."""
        self.scheduler: Scheduler = scheduler
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
        # The threads that are not the program's.
        self._other_threads = {*threading.enumerate()}

    def time(self) -> float:
        return self.secs

    now = time  # as a clock of the library

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> Task:
        if self.get_task_factory() is not None:
            return super().create_task(coro, **options)
        return NumberedTask(coro, loop=self, **options)

    def count_progress(self, task: Task) -> None:
        """Note that the step of this task runs next."""
        # An anyio scope repeats its cancel in each turn, which is no progress.
        if isinstance(task, NumberedTask) and task.is_being_cancelled:
            task.is_being_cancelled = False
        else:
            self.turns = 0

    def secs_to_timer(self) -> float | None:
        """Return the time to the next timer, or None without a timer."""
        # asyncio has no public list of timers. If a Python has no such list, a program whose
        # callbacks repeat themselves counts as stuck.
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        if not timers:
            return None
        return max(timers[0].when() - self.secs, 0)

    def busy_threads(self, with_idle: bool) -> list[tuple[str, bool]]:
        """Return a place in the code, and whether it may be idle, for each thread of the program.

        A thread may be idle if it waits for a lock. Idle workers of pools are left out unless
        `with_idle`.
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
    queue = getattr(thread, "queue", None)
    return queue is not None and not queue.empty()


def _rejecting(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises an error with this name."""

    def reject(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"{name} is outside of an exploration's schedule; replace what uses it by a double"
            " (`asyncio.start_server` and `open_connection` are simulated)"
        )

    return reject


for _name in _REJECTED:
    setattr(ScheduleLoop, _name, _rejecting(_name))
