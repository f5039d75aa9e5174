"""An event loop with virtual time, in which a schedule chooses the order of tasks: for `explore`.

The loop jumps to its next timer when nothing else can run. Callbacks run in the order of any
asyncio loop. Steps of tasks that are next to one another in its queue may change places. Files and
threads are real: the loop waits for threads that work. What else is outside of the schedule, such
as sockets and processes, is rejected.
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
"""After so many turns of the loop without progress of a task, the loop stops."""
_IDLE_TURNS = 50
"""The time jumps after so many turns in which only callbacks ran."""
_THREAD_SECS = 10.0
"""How long, in real time, the loop waits for a working thread."""
_LOCK_SECS = 0.05
"""How long, in real time, the loop waits for a thread of the program that waits for a lock or a
queue, which may have been released just now. Before a deadlock it waits longer, also for an idle
worker, which may have taken its work just now.
"""
_POLL_SECS = 0.005
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
"""Methods of loops that begin what is outside of the schedule."""


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
        loop = loop or asyncio.get_running_loop()
        self._number: int = next(loop.numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def cancel(self, msg: Any = None) -> bool:
        self.is_being_cancelled = super().cancel(msg)
        return self.is_being_cancelled


# Messages show these names.
NumberedTask.__name__ = NumberedTask.__qualname__ = "Task"
NumberedFuture.__name__ = NumberedFuture.__qualname__ = "Future"


class Scheduler(Protocol):
    """What decides about the steps of tasks."""

    def before_step(self) -> None:
        """Is called before a step of a task."""

    def after_step(self) -> None:
        """Is called before the callbacks that follow a step."""

    def next_task(self, tasks: list[Task]) -> Task:
        """Return the task whose step runs next."""
        ...


class _ReadyQueue(deque[asyncio.Handle]):
    """Handles that can run next. No callback changes its place."""

    def __init__(self, loop: ScheduleLoop) -> None:
        super().__init__()
        self._loop = loop
        self._ran_step = False

    def popleft(self) -> asyncio.Handle:
        loop = self._loop
        steps = self._first_steps()
        if not steps:
            if self._ran_step:
                # A cancel may come while the task waits, before a callback ends its wait.
                loop.scheduler.after_step()
            self._ran_step = False
            return super().popleft()
        self._ran_step = True
        loop.scheduler.before_step()
        task = loop.scheduler.next_task([*steps])
        loop.count_progress(task)
        handle = self[steps[task]]
        del self[steps[task]]
        return handle

    def _first_steps(self) -> dict[Task, int]:
        """Return the tasks with a step before the first callback, and the places of the steps."""
        steps: dict[Task, int] = {}
        # A copy, because a thread may add a handle at any time.
        for index, handle in enumerate([*self]):
            task = _task_of(handle)
            if task is None:
                break
            steps.setdefault(task, index)
        return steps


def _task_of(handle: asyncio.Handle) -> Task | None:
    # A handle has no public attribute for its callback. A step's callback is a method of its task.
    callback: Any = getattr(handle, "_callback", None)
    owner: Any = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return None
    return owner  # pyright: ignore[reportUnknownVariableType]


class _Selector(selectors.DefaultSelector):
    """Looks for files; where a loop would wait for its next timer, the time jumps."""

    loop: ScheduleLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        loop = self.loop
        loop.turns += 1
        if loop.turns > _MOST_TURNS:
            return self._stop()
        if timeout == 0:
            if loop.turns % _IDLE_TURNS:
                return super().select(0)
            # The callbacks of a cancelled anyio scope run again and again, until a task ends.
            timeout = loop.secs_to_timer()
        events = self._wait_for_threads(is_deadlock=timeout is None)
        if not events and timeout is None:
            return self._stop()
        if not events and not loop.stuck_because:
            loop.secs += timeout or 0
        return events

    def _wait_for_threads(self, is_deadlock: bool) -> list[Any]:
        """Return the events of files; wait for the first while threads work."""
        start = time.monotonic()
        while True:
            # A thread wakes the loop before it becomes idle, so look at threads before files.
            places = self.loop.busy_threads(is_deadlock)
            working = [place for place, may_be_idle in places if not may_be_idle]
            limit = 0.0
            if places:
                limit = 1.0 if is_deadlock else _LOCK_SECS
            if working:
                limit = _THREAD_SECS
            is_late = time.monotonic() - start >= limit
            events = super().select(0 if is_late else _POLL_SECS)
            if not events and is_late and working:
                return self._stop(
                    f"a thread has not ended within {_THREAD_SECS:g} s, at {working[0]}"
                )
            if events or is_late:
                return events

    def _stop(self, why: str = "no task can run any more") -> list[Any]:
        self.loop.stuck_because = why
        self.loop.stop()
        return []


class ScheduleLoop(asyncio.SelectorEventLoop):
    """The event loop of one schedule."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.secs: float = 0.0
        """The time."""
        self.stuck_because: str = ""
        """Why the loop has stopped, if no task could run."""
        self.scheduler: Scheduler = scheduler
        self.numbers: Iterator[int] = itertools.count()
        """The numbers of its futures and tasks."""
        self.turns: int = 0
        """The turns since a task has made progress."""
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
        self._threads = {*threading.enumerate()}

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
        """Return the time to the next timer, or None."""
        # asyncio has no public list of timers. Without it, a loop that repeats callbacks is stuck.
        timers: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        if not timers:
            return None
        return max(timers[0].when() - self.secs, 0)

    def busy_threads(self, with_idle: bool) -> list[tuple[str, bool]]:
        """Return where threads are that were started inside of the loop, and whether they may be
        idle, as they wait for a lock; idle workers of pools only on request.
        """
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        places: list[tuple[str, bool]] = []
        for thread in {*threading.enumerate()} - self._threads:
            frame = frames.get(thread.ident or 0)
            is_idle = is_idle_worker(thread) and not _has_work(thread)
            if frame is not None and (with_idle or not is_idle):
                is_in_lock = frame.f_code.co_filename.endswith(LOCK_FILES)
                is_worker = thread.name.startswith(WORKER_NAMES)
                places.append((location(frame), is_idle or (is_in_lock and not is_worker)))
        return places


def _has_work(thread: threading.Thread) -> bool:
    """Return whether a worker of anyio has not taken its work yet."""
    queue = getattr(thread, "queue", None)
    return queue is not None and not queue.empty()


def _rejecting(name: str) -> Callable[..., NoReturn]:
    def reject(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"{name} is outside of an exploration's schedule; replace what uses it by a double"
            " (`asyncio.start_server` and `open_connection` are simulated)"
        )

    return reject


for _name in _REJECTED:
    setattr(ScheduleLoop, _name, _rejecting(_name))
