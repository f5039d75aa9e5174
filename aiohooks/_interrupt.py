"""Ending a task's current wait from outside, and taking the cancel back exactly."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aiohooks._clock import TimerHandle, current_clock
from aiohooks._stacks import standing


class Interrupt:
    """One block of one task that may be ended from outside.

    `fire` cancels the task; when the block has been left, `settle` takes that cancel back and says whether another one,
    from outside, remains. Only own cancels are ever taken back, so a cancel of the caller's is never lost.
    """

    __slots__ = ("_base", "_cancelled", "_fired", "_later", "cause", "task")

    def __init__(self, task: asyncio.Task[Any], base: int | None = None) -> None:
        """Opens the block; `task` is the one that runs it, `base` its `cancelling()` when the block was opened."""
        self.task = task
        self.cause: BaseException | None = None
        """What the block is to end with instead of the cancellation, if the one who fired said it."""
        self._base = cancels_of(task) if base is None else base
        self._fired = False
        self._cancelled = False
        self._later: asyncio.Handle | None = None

    @property
    def fired(self) -> bool:
        """Whether `fire` was called."""
        return self._fired

    def fire(self, why: str, cause: BaseException | None = None) -> None:
        """Ends the block's current wait, once."""
        if not self._fired:
            self._fired = True
            self.cause = cause
            if self.task is _current_task():
                # Cancelling oneself takes effect at the next await, which may be one behind the block; before 3.13 it cannot
                # be taken back. So it is put off: while the block waits, or not at all.
                self._later = self.task.get_loop().call_soon(self._cancel, why)
            else:
                self._cancel(why)

    def _cancel(self, why: str) -> None:
        self._later = None
        self._cancelled = True
        self.task.cancel(why)

    def from_outside(self) -> bool:
        """Whether the task has been cancelled, since the block was opened, by somebody else."""
        return self.task.cancelling() - self._cancelled > self._base

    def settle(self) -> bool:
        """Takes the own cancel back; true if the task was cancelled from outside meanwhile."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if self._cancelled:
            self._cancelled = False
            self.task.uncancel()
        return self.task.cancelling() > self._base


def running_task() -> asyncio.Task[Any]:
    """The task that runs now."""
    task = _current_task()
    assert task is not None, "coroutines of this library run inside a task"
    return task


if sys.version_info >= (3, 12):
    _current_task = task_of = asyncio.current_task
else:  # written in Python there, and slower than all else that a run does for itself
    _tasks: dict[asyncio.AbstractEventLoop | None, asyncio.Task[Any]] = asyncio.tasks._current_tasks  # type: ignore[attr-defined]

    def task_of(loop: asyncio.AbstractEventLoop | None) -> asyncio.Task[Any] | None:
        """The task that runs in `loop` now."""
        return _tasks.get(loop)

    def _current_task() -> asyncio.Task[Any] | None:
        return _tasks.get(asyncio.get_running_loop())


def cancels_of(task: asyncio.Task[Any]) -> int:
    """How many cancels the task has been through; one that it has called on itself and not met yet is not among them."""
    return task.cancelling() - bool(getattr(task, "_must_cancel", False))


class TimeLimit:
    """A block of the running task that may take so many seconds: `with TimeLimit(5.0, "closing X"): await ...`.

    Raises `TimeoutError` when the time is up; a cancel from outside passes as it is.
    """

    __slots__ = ("_interrupt", "_secs", "_timer", "_what", "expired", "stood")

    def __init__(self, secs: float | None, what: str) -> None:
        """Sets no limit for `secs=None`."""
        self._secs = secs
        self._what = what
        self._timer: TimerHandle | None = None
        self.expired = False
        """Whether the block ended because the time was up."""
        self.stood = ""
        """Where the task was when the time was up."""

    def __enter__(self) -> None:
        self._interrupt = Interrupt(running_task())
        if self._secs is not None:
            self._timer = current_clock().call_later(self._secs, self._expire)

    def _expire(self) -> None:
        self.stood = standing(self._interrupt.task)
        self._interrupt.fire(self._what)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        fired = self._interrupt.fired
        outer = self._interrupt.settle()
        if fired and not outer and isinstance(error, asyncio.CancelledError):
            self.expired = True
            raise TimeoutError(f"{self._what} took longer than {self._secs} s") from error
