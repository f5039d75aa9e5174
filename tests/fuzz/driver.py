"""Runs one operation and cancels it at its k-th suspension.

Suspensions are counted wherever the code under test waits: in the operation itself and in every coroutine that a scenario
hands to the library through `Probe.watch`. A `Shot` says at which suspension, whom and how to cancel. What the cancel did is
known exactly, because every task here is a `CountingTask`, which tells the library's own cancels from those of others.

    S   at the suspension: the waiting is ended at once
    W   when what is waited for is there and the wake-up is queued: the result is lost, the race behind many bugs
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

MOST_SUSPENSIONS = 1_000
HANG_SECS = 2.0
SPARED = "~"
"""Labels that begin so, or user's tasks, are those on which others wait; they are not cancelled by themselves."""
HARNESS = "wrapper"
"""Names of the tasks that are the harness's own begin so."""
USER = "runner"
"""Names of the user's own tasks begin so."""

Victim = Literal["root", "self"]
Flavour = Literal["S", "W"]
How = Literal["direct", "own"]


class Livelock(BaseException):
    """The operation suspends again and again and does not come to an end."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One cancel: `at` is the number of the suspension, `own` lets the wrapper cancel in its own way."""

    at: int
    victim: Victim = "root"
    flavour: Flavour = "S"
    how: How = "direct"


class CountingTask(asyncio.Task[Any]):
    """A task that knows how often others, and how often the library, cancelled it; compares with `cancelling()`."""

    outside = 0
    library = 0
    taken_back = 0

    def cancel(self, msg: Any = None) -> bool:
        accepted = super().cancel(msg)
        if accepted:
            if _called_by_library():
                self.library += 1
            else:
                self.outside += 1
        return accepted

    def uncancel(self) -> int:
        if _called_by_library():
            self.taken_back += 1
        else:
            self.outside -= 1
        return super().uncancel()


def _called_by_library() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("aiohooks")


class _Watched:
    """Awaits a coroutine and reports each of its suspensions."""

    __slots__ = ("coro", "label", "probe")

    def __init__(self, coro: Coroutine[Any, Any, Any], probe: Probe, label: str) -> None:
        self.coro, self.probe, self.label = coro, probe, label

    def __await__(self) -> Generator[Any, Any, Any]:
        coro, probe, label = self.coro, self.probe, self.label
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waited = coro.send(value) if error is None else coro.throw(error)
            except StopIteration as stop:
                return stop.value
            value = error = None
            probe.suspended(waited, label)
            try:
                value = yield waited
            except BaseException as thrown:
                error = thrown
            probe.resumed()


@dataclass(slots=True)
class Probe:
    """Counts the suspensions of one operation and fires the shots; then knows what became of the operation."""

    shots: tuple[Shot, ...] = ()
    look: Callable[[], None] = lambda: None
    """Called at every suspension, for what must hold at every moment."""
    own: Callable[[int], None] | None = None
    """The wrapper's own way to cancel; gets the number of the suspension."""

    suspensions: int = 0
    fired: int = 0
    """Shots that reached a living victim while the operation ran."""
    in_children: set[int] = field(default_factory=set)
    """The suspensions that happened in other tasks than the operation's."""
    children: list[str] = field(default_factory=list)
    """Labels of the coroutines whose own task was shot, other than the operation's."""
    direct: dict[asyncio.Task[Any], int] = field(default_factory=dict)
    """Accepted cancels of our own, by task."""
    wrapper_fired: int = 0

    task: asyncio.Task[Any] | None = None
    outcome: BaseException | None = None
    outside: int = 0
    """Cancels of the operation's task that the operation had to answer for."""
    kept: int = 0
    """By how much `cancelling()` has grown over the operation."""
    unbalanced: int = 0
    """The library's cancels of the task that it did not take back, or took back too often."""
    pending: bool = False
    """Whether the next await after a normal end raised."""
    leftovers: tuple[str, ...] = ()
    running: bool = False
    problems: list[str] = field(default_factory=list)
    _parked: set[asyncio.Task[Any]] = field(default_factory=set)
    _next: int = 0

    async def watch(self, label: str, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Awaits `fn(*args)`, whose suspensions count from now on."""
        return await _Watched(_call(fn, *args), self, label)

    async def watched(self, label: str, coro: Coroutine[Any, Any, Any]) -> Any:
        """Awaits a coroutine, whose suspensions count from now on; to be awaited at once."""
        return await _Watched(coro, self, label)

    def suspended(self, waited: Any, label: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        if task in self._parked or not self.running:  # seen already, by a watcher further inside
            return
        self._parked.add(task)
        self.suspensions += 1
        if task is not self.task and not (label.startswith(SPARED) or task.get_name().startswith(USER + SPARED)):
            self.in_children.add(self.suspensions)
        if self.suspensions > MOST_SUSPENSIONS:
            raise Livelock(f"{self.suspensions} suspensions, the last in {label}")
        self.look()
        while self._next < len(self.shots) and self.shots[self._next].at == self.suspensions:
            self._aim(self.shots[self._next], task, waited, label)
            self._next += 1

    def resumed(self) -> None:
        task = asyncio.current_task()
        if task is not None:  # None: thrown away by the garbage collector
            self._parked.discard(task)

    def _aim(self, shot: Shot, task: asyncio.Task[Any], waited: Any, label: str) -> None:
        victim = self.task if shot.victim == "root" else task
        assert victim is not None

        def fire(_: object = None) -> None:
            if not self.running:
                return  # too late: the operation has ended
            if shot.how == "own" and self.own is not None:
                self.own(shot.at)
                self.wrapper_fired += 1
                self.fired += 1
            elif victim.cancel():
                self.fired += 1
                self.direct[victim] = self.direct.get(victim, 0) + 1
                if victim is not self.task:
                    # A task of the user's own may be in the middle of anything; it is the one that was cancelled.
                    self.children.append(USER if victim.get_name().startswith(USER) else label)

        if shot.flavour == "S":
            fire()
        elif waited is None:
            asyncio.get_running_loop().call_soon(fire)
        else:
            waited.add_done_callback(fire)

    async def run(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Runs the operation in the current task, notes what became of it, and lets its exception pass."""
        task = self.task = asyncio.current_task()
        assert isinstance(task, CountingTask)
        outside, balance, cancelling = task.outside, task.library - task.taken_back, task.cancelling()
        self.running = True
        try:
            await _Watched(_call(operation), self, "operation")
        except BaseException as error:
            self.outcome = error
        self.running = False
        self.outside = task.outside - outside
        self.kept = task.cancelling() - cancelling
        self.unbalanced = task.library - task.taken_back - balance
        self.leftovers = tuple(
            name for one in asyncio.all_tasks() if one is not task and not (name := one.get_name()).startswith(HARNESS)
        )
        if self.outcome is not None:
            raise self.outcome
        if self.outside:
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.pending = True
                raise

    def status(self) -> list[str]:
        """What the operation did wrong with respect to cancellation, whatever it was."""
        found = list(self.problems)
        cancelled = isinstance(self.outcome, asyncio.CancelledError)
        if self.outside > 0 and not cancelled and not (self.outcome is None and self.pending and self.kept > 0):
            found.append(f"I7: cancelled {self.outside} time(s), yet ended with {self.outcome!r}, pending={self.pending}")
        if self.outside <= 0 and cancelled:
            found.append(f"I7: raised {self.outcome!r}, and nobody had cancelled it")
        if self.kept != self.outside:
            found.append(f"I8: cancelling() grew by {self.kept} over {self.outside} cancels")
        if self.unbalanced:
            found.append(f"I8: the library's own cancels and uncancels differ by {self.unbalanced}")
        if isinstance(self.outcome, Livelock):
            found.append(f"I36: {self.outcome}")
        found += [f"I9: task {name!r} outlived the operation" for name in self.leftovers]
        return found


async def _call(fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    return await fn(*args)


def counting_factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    """A task factory whose tasks are `CountingTask`s; takes what options Python and uvloop pass on (E-7)."""
    options.pop("eager_start", None)
    return CountingTask(coro, loop=loop, **options)
