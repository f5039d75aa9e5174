"""Run one operation and cancel it at its k-th suspension.

Suspensions are counted wherever the code under test waits: in the operation itself and in every coroutine that a scenario
passes to the library through `Probe.watch`. A `Cancel` says at which suspension, which task and how to cancel. Its effect is
known exactly: the library cancels no task of its callers, so every cancel of one is from outside.

    suspended   at the suspension: the wait ends immediately
    waking      when the result is set and the wake-up is queued: the result is lost, the race behind many bugs
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.fuzz._harness import called_by_library, watched

MOST_SUSPENSIONS = 1_000
HANG_SECS = 2.0
NOT_CANCELLED = "~"
"""Prefix of the labels and user's tasks on which others wait; they are not cancelled by themselves."""
HARNESS = "wrapper"
"""Prefix of the names of the harness's own tasks."""
USER = "runner"
"""Prefix of the names of the user's own tasks."""

Target = Literal["root", "self"]
Timing = Literal["suspended", "waking"]
How = Literal["direct", "own"]


class Livelock(BaseException):
    """The operation suspends again and again and does not end."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """One cancel: `at` is the number of the suspension, `own` lets the wrapper cancel in its own way."""

    at: int
    target: Target = "root"
    timing: Timing = "suspended"
    how: How = "direct"


class CountingTask(asyncio.Task[Any]):
    """A task that counts the cancels of others, for comparison with `cancelling()`, and what the library does to it."""

    outside = 0
    library = 0
    """How often the library has cancelled it or taken a cancel back: never, if it is a caller's."""

    def cancel(self, msg: Any = None) -> bool:
        accepted = super().cancel(msg)
        if accepted and called_by_library():
            self.library += 1
        elif accepted:
            self.outside += 1
        return accepted

    def uncancel(self) -> int:
        if called_by_library():
            self.library += 1
        else:
            self.outside -= 1
        return super().uncancel()


@dataclass(slots=True)
class Probe:
    """Counts the suspensions of one operation, cancels it as planned, and records how it ended."""

    cancels: tuple[Cancel, ...] = ()
    check: Callable[[], None] = lambda: None
    """Called at every suspension, for what must hold at all times."""
    own: Callable[[int], None] | None = None
    """The wrapper's own way to cancel; gets the number of the suspension."""

    suspensions: int = 0
    delivered: int = 0
    """Number of cancels that a task accepted while the operation ran."""
    in_children: set[int] = field(default_factory=set)
    """The suspensions that happened in other tasks than the operation's."""
    children: list[str] = field(default_factory=list)
    """Labels of the coroutines whose own task was cancelled, other than the operation's."""
    direct: dict[asyncio.Task[Any], int] = field(default_factory=dict)
    """Accepted cancels of our own, by task."""
    wrapper_cancels: int = 0

    task: asyncio.Task[Any] | None = None
    outcome: BaseException | None = None
    outside: int = 0
    """Number of cancels of the operation's task that the operation had to pass on."""
    kept: int = 0
    """By how much `cancelling()` has grown over the operation."""
    by_library: int = 0
    """How often the library has cancelled the task, or taken a cancel back."""
    pending: bool = False
    """Whether the next await after a normal end raised."""
    leftovers: tuple[str, ...] = ()
    running: bool = False
    found_violations: list[str] = field(default_factory=list)
    _parked: set[asyncio.Task[Any]] = field(default_factory=set)
    _next: int = 0

    async def watch(self, label: str, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Await `fn(*args)`, and count its suspensions."""
        return await self.watched(label, _call(fn, *args))

    async def watched(self, label: str, coro: Coroutine[Any, Any, Any]) -> Any:
        """Await a coroutine, and count its suspensions. Await the result immediately."""
        return await watched(coro, lambda waited: self.suspended(waited, label), self.resumed)

    async def foreign_code(self, label: str, fn: Callable[[], Awaitable[Any]]) -> Any:
        """Await `fn()`, code of others that may cancel its own task or swallow a cancel; the caller's task is another one."""
        if asyncio.current_task() is self.task:
            self.found_violations.append(f"caller's task: {label} is called in it")
        before = len(self.children)
        try:
            return await fn()
        except asyncio.CancelledError:
            before = len(self.children)
            raise
        finally:  # what it has swallowed is not reported
            self.children[before:] = [one for one in self.children[before:] if one != label]

    def suspended(self, waited: Any, label: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        if task in self._parked or not self.running:  # seen already, by a watcher further inside
            return
        self._parked.add(task)
        self.suspensions += 1
        if self._may_cancel(task, label):
            self.in_children.add(self.suspensions)
        if self.suspensions > MOST_SUSPENSIONS:
            raise Livelock(f"{self.suspensions} suspensions, the last in {label}")
        self.check()
        while self._next < len(self.cancels) and self.cancels[self._next].at == self.suspensions:
            self._inject(self.cancels[self._next], task, waited, label)
            self._next += 1

    def _may_cancel(self, task: asyncio.Task[Any], label: str) -> bool:
        """Return whether a task other than the operation's may be cancelled by itself."""
        is_waited_for = label.startswith(NOT_CANCELLED) or task.get_name().startswith(USER + NOT_CANCELLED)
        return task is not self.task and not is_waited_for

    def resumed(self) -> None:
        task = asyncio.current_task()
        if task is not None:  # None: thrown away by the garbage collector
            self._parked.discard(task)

    def _inject(self, cancel: Cancel, task: asyncio.Task[Any], waited: Any, label: str) -> None:
        target = self.task if cancel.target == "root" else task
        if cancel.target == "self" and not self._may_cancel(task, label):
            return  # the order of the tasks is another one than in the run without a cancel
        assert target is not None

        def cancel_now(_: object = None) -> None:
            if not self.running:
                return  # too late: the operation has ended
            if cancel.how == "own" and self.own is not None:
                self.own(cancel.at)
                self.wrapper_cancels += 1
                self.delivered += 1
            elif target.cancel():
                self.delivered += 1
                self.direct[target] = self.direct.get(target, 0) + 1
                if target is not self.task:
                    # A task of the user's own may be in the middle of anything; it is the one that was cancelled.
                    self.children.append(USER if target.get_name().startswith(USER) else label)

        if cancel.timing == "suspended":
            cancel_now()
        elif waited is None:
            asyncio.get_running_loop().call_soon(cancel_now)
        else:
            waited.add_done_callback(cancel_now)

    async def run(self, operation: Callable[[], Awaitable[None]]) -> None:
        """Run the operation in the current task, record how it ended, and let its exception pass."""
        task = self.task = asyncio.current_task()
        assert isinstance(task, CountingTask)
        outside, cancelling = task.outside, task.cancelling()
        self.running = True
        try:
            await self.watch("operation", operation)
        except BaseException as error:
            self.outcome = error
            if _is_circular(error):
                self.found_violations.append(f"context: the contexts of {error!r} make a circle")
        self.running = False
        self.outside = task.outside - outside
        self.kept = task.cancelling() - cancelling
        self.by_library = task.library
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

    def violations(self) -> list[str]:
        """Return what the operation did wrong with respect to cancellation."""
        found = list(self.found_violations)
        cancelled = isinstance(self.outcome, asyncio.CancelledError)
        if self.outside and not cancelled and not (self.outcome is None and self.pending and self.kept > 0):
            found.append(f"cancellation: cancelled {self.outside} time(s), ended with {self.outcome!r}, pending={self.pending}")
        if not self.outside and cancelled:
            found.append(f"cancellation: raised {self.outcome!r}, and was not cancelled")
        if self.kept != self.outside:
            found.append(f"cancel count: cancelling() grew by {self.kept} over {self.outside} cancels")
        if self.by_library:
            found.append(f"caller's task: the library has cancelled it, or taken a cancel back, {self.by_library} time(s)")
        if isinstance(self.outcome, Livelock):
            found.append(f"hang: {self.outcome}")
        found += [f"leak: task {name!r} outlived the operation" for name in self.leftovers]
        return found


def _is_circular(error: BaseException) -> bool:
    known: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        if any(link is one for one in known):
            return True
        known.append(link)
        link = link.__context__
    return False


async def _call(fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    return await fn(*args)


def counting_factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    """Make `CountingTask`s: a task factory that accepts any options that Python and uvloop pass on."""
    options.pop("eager_start", None)
    return CountingTask(coro, loop=loop, **options)
