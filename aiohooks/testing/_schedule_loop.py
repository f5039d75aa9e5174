"""An event loop with virtual time, in which a schedule chooses the order of tasks: for `explore`.

The loop jumps to its next timer when nothing else can run. Callbacks run in the order of any
asyncio loop. Steps of tasks that are next to one another in its queue may change places. Files and
threads are real: the loop waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import selectors
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

from aiohooks.errors import UnsupportedSystemError
from aiohooks.testing.leaks import is_idle_worker

Task = asyncio.Task[Any]
_MOST_TURNS = 10_000
"""After so many turns of the loop without progress of a task, the loop stops."""
_IDLE_TURNS = 50
"""The time jumps after so many turns in which only callbacks ran."""
_THREAD_SECS = 2.0
"""How long, in real time, the loop waits for a working thread or a child process."""
_LOCK_SECS = 0.05
"""How long, in real time, the loop waits for a thread that waits for a lock or a queue, which may
have been released just now.
"""
FILE_SECS = 0.2
"""How long, in real time, the loop waits for files if it waits for nothing else."""
_POLL_SECS = 0.005
_LOCK_FILES = (f"{os.sep}threading.py", f"{os.sep}queue.py")
_BLOCKED_PLACES: set[tuple[types.CodeType, int]] = set()
"""The instructions at which threads have blocked for `_THREAD_SECS`: a worker may wait for its next
task in C, as that of `aiosqlite` does.
"""


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
        loop.leave_task()
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
    """Waits for files. Where a loop would wait for its next timer, the time jumps."""

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
        events = self._wait_for_threads()
        if not events and timeout is not None:
            loop.secs += timeout
        elif not events and loop.may_be_woken():
            events = super().select(FILE_SECS)
        if not events and timeout is None:
            return self._stop()
        return events

    def _wait_for_threads(self) -> list[Any]:
        """Return the events of files. Wait for the first while threads or processes are busy."""
        start = time.monotonic()
        while True:
            # A thread wakes the loop before it becomes idle, so look at threads before files.
            frames = self.loop.busy_threads()
            limit = _LOCK_SECS if frames else 0.0
            if self.loop.has_process() or not all(map(_waits, frames)):
                limit = _THREAD_SECS
            is_late = time.monotonic() - start >= limit
            events = super().select(0 if is_late else _POLL_SECS)
            if limit == _THREAD_SECS and is_late:
                _BLOCKED_PLACES.update(map(_place, frames))
            if events or is_late:
                return events

    def _stop(self) -> list[Any]:
        self.loop.is_stuck = True
        self.loop.stop()
        return []


class ScheduleLoop(asyncio.SelectorEventLoop):
    """The event loop of one schedule."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.secs: float = 0.0
        """The time."""
        self.is_stuck: bool = False
        """Whether the loop has stopped because no task could ever run again."""
        self.scheduler: Scheduler = scheduler
        self.numbers: Iterator[int] = itertools.count()
        """The numbers of its futures and tasks."""
        self.turns: int = 0
        """The turns since a task has made progress."""
        self._files = _Selector()
        self._files.loop = self
        super().__init__(self._files)
        # asyncio has no public way to choose the next handle: its loop takes it from `_ready`.
        if not hasattr(self, "_ready"):
            self._files.close()
            raise UnsupportedSystemError(
                "explore cannot choose what the event loop of this Python runs next"
            )
        self._ready: Any = _ReadyQueue(self)
        self._own_files = len(self._files.get_map())
        self._threads = {*threading.enumerate()}
        self._processes: list[asyncio.SubprocessTransport] = []

    def time(self) -> float:
        return self.secs

    now = time  # as a clock of the library

    def run_forever(self) -> None:
        try:
            super().run_forever()
        finally:
            asyncio._set_running_loop(self)
            self.leave_task()
            asyncio._set_running_loop(None)

    def leave_task(self) -> None:
        """Leave the current task.

        An eager task remains the current one if its context was entered before it started. No other
        task could run then.
        """
        # asyncio has no public way to leave a task. Before Python 3.12 there are no eager tasks.
        leave: Any = getattr(asyncio.tasks, "_swap_current_task", None)
        if leave is not None:
            with suppress(KeyError):  # Python 3.12 raises it without a current task
                leave(self, None)

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> Task:
        if self.get_task_factory() is not None:
            return super().create_task(coro, **options)
        return NumberedTask(coro, loop=self, **options)

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().subprocess_exec(*args, **options)
        self._processes.append(transport)
        return transport, protocol

    async def subprocess_shell(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().subprocess_shell(*args, **options)
        self._processes.append(transport)
        return transport, protocol

    def has_process(self) -> bool:
        """Return whether a child process runs."""
        return any(transport.get_returncode() is None for transport in self._processes)

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

    def busy_threads(self) -> list[types.FrameType]:
        """Return the innermost frames of threads that were started inside of the loop.

        Idle workers of pools are left out.
        """
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        return [
            frames[thread.ident]
            for thread in self._new_threads()
            if thread.ident in frames and (_has_work(thread) or not is_idle_worker(thread))
        ]

    def may_be_woken(self) -> bool:
        """Return whether the loop watches a file besides its own, or has a thread."""
        watches_files = len(self._files.get_map()) > self._own_files
        return watches_files or bool(self._new_threads())

    def _new_threads(self) -> set[threading.Thread]:
        return {*threading.enumerate()} - self._threads


def _waits(frame: types.FrameType) -> bool:
    """Return whether the thread of this frame waits for another thread, perhaps for the loop's."""
    is_in_lock = frame.f_code.co_filename.endswith(_LOCK_FILES)
    return is_in_lock or _place(frame) in _BLOCKED_PLACES


def _place(frame: types.FrameType) -> tuple[types.CodeType, int]:
    return frame.f_code, frame.f_lasti


def _has_work(thread: threading.Thread) -> bool:
    """Return whether a worker of anyio has not taken its work yet."""
    queue = getattr(thread, "queue", None)
    return queue is not None and not queue.empty()
