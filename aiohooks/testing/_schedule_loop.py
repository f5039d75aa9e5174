"""An event loop whose time is virtual, and in which a schedule chooses what runs next: for
`explore`.

It jumps to the next timer when nothing else can run. Of the tasks that could run next the schedule
chooses one; plain callbacks run in the order of the loop, before any task. Files and threads work:
the loop waits for them in real time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from aiohooks.errors import UnsupportedSystemError
from aiohooks.testing.leaks import is_idle_worker

Place = tuple[str, int]
"""A kind of choice, and its number among those of the kind."""
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_THREAD_SECS, _FILE_SECS = 10.0, 0.2
"""How long the loop waits in real time: for a thread that works; for an idle one or a file, where
nothing else is left.
"""
_IDLE_TURNS = 50
"""The time jumps whenever no task has progressed for so many turns of the loop."""
_MOST_TURNS = 10_000
"""After so many turns without progress the loop waits only for files."""
_LAST_TURN = 20_000
"""After so many turns without progress the loop stops."""
_PIECE_SECS = 0.005  # a thread may end without waking the loop


class Schedule:
    """The choices of a seed, or given ones. 0 is always what happens without a disturbance."""

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[str, float] = _NOTHING,
        given: Mapping[Place, int] = _NOTHING,
        noted: Collection[str] = (),
    ) -> None:
        """Choose by `seed` otherwise than 0, each kind at its rate; or take what is `given`. Note
        where kinds could be chosen.
        """
        self._seed = seed
        self._rates = rates
        self._random = random.Random(seed)
        self._given = given
        self._noted = noted
        self.is_given: bool = bool(given)
        self.numbers: dict[str, int] = {}
        """How many choices of each kind there were."""
        self.taken: dict[Place, int] = {}
        """Those that were not 0."""
        self.later: list[tuple[Place, int]] = []
        """Choices of the noted kinds that were 0 and came after the last one taken, with the number
        of options.
        """

    def without(self, kind: str) -> Schedule:
        """Return the same schedule from its beginning, without the choices of a kind."""
        rates = {one: rate for one, rate in self._rates.items() if one != kind}
        given = {place: choice for place, choice in self._given.items() if place[0] != kind}
        return Schedule(self._seed, rates, given, self._noted)

    def may_choose(self, kind: str) -> bool:
        """Return whether a choice of this kind can be another than 0."""
        return kind in self._rates or any(key.partition(":")[0] == kind for key, _ in self._given)

    def may_matter(self, kind: str) -> bool:
        """Return whether choices of this kind can be another than 0, or are noted."""
        return kind in self._noted or self.may_choose(kind)

    def choose(self, kind: str, key: str, options: int) -> int:
        """Return a number below `options`; those of a key, which is the kind or that and a name,
        are numbered by themselves.
        """
        number = self.numbers[key] = self.numbers.get(key, 0) + 1
        if self.is_given:
            choice = min(self._given.get((key, number), 0), options - 1)
        else:
            rate = self._rates.get(kind, 0.0)
            choice = (
                self._random.randrange(1, options)
                if rate and options > 1 and self._random.random() < rate
                else 0
            )
        if choice:
            self.taken[key, number] = choice
            self.later.clear()
        elif options > 1 and kind in self._noted:
            self.later.append(((key, number), options))
        return choice

    def take_back(self, key: str) -> Place:
        """Forget the last choice of this kind, which could not happen, and return its place."""
        place = key, self.numbers[key]
        self.taken.pop(place, None)
        return place


class NumberedFuture(asyncio.Future[Any]):
    """A future whose place in a set depends on its number in the loop, and not on its address."""

    def __init__(self, *, loop: Any) -> None:
        self._number: int = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its number in the loop, and not on its address."""

    is_being_cancelled: bool = False
    """Whether its next step raises a cancel."""

    def __init__(self, coro: Any, *, loop: Any = None, **options: Any) -> None:
        loop = loop or asyncio.get_running_loop()
        self._number: int = next(loop.numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def cancel(self, msg: Any = None) -> bool:
        accepted = super().cancel(msg)
        self.is_being_cancelled = accepted
        return accepted


NumberedTask.__name__ = NumberedTask.__qualname__ = "Task"  # as they are in messages
NumberedFuture.__name__ = NumberedFuture.__qualname__ = "Future"


class _ReadyQueue(deque[asyncio.Handle]):
    """What can run next: of each task its first handle; callbacks before that, but those that they
    schedule after one task.

    No task overtakes a callback that was scheduled before it.
    """

    def __init__(self, loop: ScheduleLoop) -> None:
        super().__init__()
        self._loop = loop
        self._callbacks: int | None = (
            None  # so many are left of those that there were after the last task
        )

    def popleft(self) -> asyncio.Handle:
        self._loop.leave_task()
        first: dict[asyncio.Task[Any], int] = {}
        plain: list[int] = []
        handles = [*self]  # a thread may add one at any time
        for index, handle in enumerate(handles):
            task = None if handle.cancelled() else _task_of(handle)
            if task is None:
                plain.append(index)
            elif task not in first:
                first[task] = index
        count = len(handles)
        if self._callbacks is None or not first:
            is_after_task = self._callbacks is None
            self._callbacks = len(plain)
            if is_after_task and plain:  # as the task waits, before callbacks may have ended that
                self._loop.after_step()
                if len(self) > count:
                    return self._take(count)
        if self._callbacks or (plain and plain[0] < max(first.values())):
            self._callbacks = max(self._callbacks - 1, 0)
            return self._take(plain[0])
        self._loop.before_step()
        if len(self) > count:  # what that has scheduled comes first
            return self._take(count)
        self._callbacks = None
        task = self._loop.next_task([*first])
        if isinstance(task, NumberedTask) and task.is_being_cancelled:
            task.is_being_cancelled = (
                False  # a scope of anyio repeats its cancel: that is no progress
            )
        else:
            self._loop.turns = 0
        return self._take(first[task])

    def _take(self, index: int) -> asyncio.Handle:
        handle = self[index]
        del self[index]
        return handle


def _task_of(handle: asyncio.Handle) -> asyncio.Task[Any] | None:
    # A handle has no public attribute for its callback. That of a step is a method of the task.
    owner = getattr(getattr(handle, "_callback", None), "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return None
    return owner  # pyright: ignore[reportUnknownVariableType]


class _Selector(selectors.DefaultSelector):
    """Waits for files; where a loop would wait for its next timer, the time jumps."""

    loop: ScheduleLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.turns += 1
        if self.loop.turns > _LAST_TURN:  # a timer or a file is ready again and again
            return self._stop()
        if timeout == 0 and self.loop.turns % _IDLE_TURNS == 0:
            # Callbacks run again and again, as those of a cancelled scope of anyio do, and wait for
            # a task to end.
            timeout = self.loop.secs_to_timer()
        has_to_wait = timeout is None or timeout > 0
        left = _THREAD_SECS
        while True:
            is_busy = has_to_wait and left > 0 and self.loop.has_busy_thread()
            events = super().select(
                _PIECE_SECS if is_busy else 0
            )  # after that look: a thread wakes the loop before it is idle
            if events or not is_busy:
                break
            left -= _PIECE_SECS
        if events or not has_to_wait:
            return events
        if timeout is not None and self.loop.turns < _MOST_TURNS:
            self.loop.secs += timeout
        elif not (events := super().select(_FILE_SECS) if self.loop.may_be_woken() else []):
            return self._stop()
        return events

    def _stop(self) -> list[Any]:
        self.loop.is_stuck = True
        self.loop.stop()
        return []


class ScheduleLoop(asyncio.SelectorEventLoop):
    """The loop of one schedule."""

    def __init__(
        self,
        before_step: Callable[[], None],
        after_step: Callable[[], None],
        next_task: Callable[[list[asyncio.Task[Any]]], asyncio.Task[Any]],
    ) -> None:
        """Call `before_step` before a step of a task, `after_step` before callbacks that follow;
        run `next_task` of several.
        """
        self.secs: float = 0.0
        """The time."""
        self.is_stuck: bool = False
        """Whether it has stopped as nothing could ever run again."""
        self.before_step: Callable[[], None] = before_step
        self.after_step: Callable[[], None] = after_step
        self.next_task: Callable[[list[asyncio.Task[Any]]], asyncio.Task[Any]] = next_task
        self.numbers: Iterator[int] = itertools.count()
        """Of its futures and tasks."""
        self.turns: int = 0
        """Those since the last step of a task that was not its cancel."""
        self._of_files = _Selector()
        self._of_files.loop = self
        super().__init__(self._of_files)
        # asyncio has no public way to choose the next handle: its loop takes it from `_ready`.
        if not hasattr(self, "_ready"):
            self._of_files.close()
            raise UnsupportedSystemError(
                "explore cannot choose what the event loop of this Python runs next"
            )
        self._ready: Any = _ReadyQueue(self)
        self._own_files = len(self._of_files.get_map())
        self._threads = {*threading.enumerate()}

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
        """Leave the current task after a step: an eager one whose context was entered already
        remains, and no other could run.
        """
        # asyncio has no public way to leave a task. Before Python 3.12 there are no eager ones.
        leave: Any = getattr(asyncio.tasks, "_swap_current_task", None)
        if leave is not None:
            with contextlib.suppress(
                KeyError
            ):  # Python 3.12 raises it where there is no current task
                leave(self, None)

    def _add_callback(self, handle: asyncio.Handle) -> None:
        if handle not in self._ready:  # a task may have run before it, and its file be ready still
            super()._add_callback(handle)  # type: ignore[misc]

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        if self.get_task_factory() is not None:
            return super().create_task(coro, **options)
        return NumberedTask(coro, loop=self, **options)

    def secs_to_timer(self) -> float | None:
        """Return the time to the next timer, if there is one."""
        # asyncio has no public list of its timers. Without it, a loop that repeats callbacks is
        # stuck.
        scheduled: list[asyncio.TimerHandle] = getattr(self, "_scheduled", [])
        return max(scheduled[0].when() - self.secs, 0) if scheduled else None

    def has_busy_thread(self) -> bool:
        """Return whether a thread works that was started in it, or will as soon as it takes its
        work.
        """
        new = {*threading.enumerate()} - self._threads
        return bool(new) and any(not is_idle_worker(one) or _has_work(one) for one in new)

    def may_be_woken(self) -> bool:
        """Return whether it watches a file or socket besides its own, or has a thread."""
        return len(self._of_files.get_map()) > self._own_files or not self._threads.issuperset(
            threading.enumerate()
        )


def _has_work(thread: threading.Thread) -> bool:
    queue = getattr(thread, "queue", None)  # of a worker of anyio
    return queue is not None and not queue.empty()
