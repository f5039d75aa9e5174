"""A check that a block of asynchronous code cleans up.

`async with no_leaks():` compares the state after the block with the state before it and lists every
difference. Leaks are:

- a task that is not done when the block is left: whoever starts a task must await it; the report
  names the line of the user's code in which it waits;
- a cancellation of the current task that the block swallowed or took back (`cancelling()` has
  changed);
- an open file, socket or pipe, but no shared library (where `/proc/self/fd` exists);
- a running thread; idle workers of the thread pools of anyio and of the loop may stay, busy ones
  may not;
- a changed signal handler;
- an unreported error: an exception never retrieved, a coroutine never awaited, a pending task
  destroyed, an error in a callback or a finalizer, an unclosed resource.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Generator, Mapping
from typing import Any, Self

from aiohooks._core.waits import current_task
from aiohooks._why.tasks import task_wait
from aiohooks.errors import add_note

# The ticks of the event loop before leaks are reported: a closed transport closes its socket in the
# next tick, and notifies its protocol in the tick after that.
_TICKS = 3
# The time in which threads must end or become idle. A worker thread returns its result first and
# becomes idle a little later, on a busy machine after a second.
_THREAD_WAIT_SECS = 10.0

_SHARED_LIBRARY = re.compile(r"\.so(\.\d+)*$")

# A pool has no public list of its threads. They are recognized by their names, and idle threads by
# the files of their frames. The files of the standard library have full paths, because other
# packages have a `queue.py`, too.
LOCK_FILES = (threading.__file__, queue.__file__)
_WORKER_FILES = (
    *LOCK_FILES,
    os.path.join("_backends", "_asyncio.py"),
    os.path.join("futures", "thread.py"),
)
WORKER_NAMES = ("AnyIO worker thread", "asyncio_", "uvloop_")


class no_leaks:
    """Checks that a block leaves nothing behind: `async with no_leaks(): ...`. The module lists
    what counts as a leak.

    If the block raises, its exception passes, with the leaks as a note. The block is checked in its
    own task, loop and thread. The loop's exception handler is replaced while it lasts.

    Example:
        async with no_leaks():
            async with AsyncMonitoredSession(graph) as session:
                await session.run("train")
    """

    def __init__(self) -> None:
        """Check nothing yet. An object can check several blocks, one after another."""
        self.leaks: tuple[str, ...] = ()
        """The leaks that were found, one line each, set after the block."""
        self._before: _State
        self._errors: list[str] = []
        self._restore = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        # Errors of an earlier block, and of garbage from before this block, must not count.
        gc.collect()
        self._errors.clear()
        self._collect_errors()
        self._before = _State()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        pending_cancel: asyncio.CancelledError | None = None
        try:
            leaks = _immediate_leaks(self._before)
            # A cancel that comes now must not hide a leak, so it is raised below.
            for _ in range(_TICKS):
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError as caught:
                    pending_cancel = caught
            gc.collect()
            # The finalizers of the first collection may have made more garbage.
            gc.collect()
            leaks += _delayed_leaks(self._before) + self._errors
        finally:
            self._restore.close()
        self.leaks = tuple(leaks)
        # A cancel that was pending when the block ended is raised, as it would be by any `await`.
        # But if the block itself has raised a cancel, that one is raised.
        raises_cancel = pending_cancel is not None and not isinstance(error, asyncio.CancelledError)
        if raises_cancel:
            error = pending_cancel
        if self.leaks:
            message = "\n  - ".join(("leaks:", *self.leaks))
            if error is None:
                raise AssertionError(message)
            add_note(error, message)
        if raises_cancel and error is not None:
            raise error

    def _collect_errors(self) -> None:
        """Append the errors that are reported to the loop or by finalizers to `_errors`."""
        loop = asyncio.get_running_loop()
        self._restore.callback(loop.set_exception_handler, loop.get_exception_handler())
        loop.set_exception_handler(
            lambda _, context: self._errors.append(describe_context(context))
        )
        self._restore.enter_context(collected_from_finalizers(self._errors))


class _State:
    """The tasks, files, threads and signal handlers that exist at one moment."""

    def __init__(self) -> None:
        """Read the current state."""
        self.tasks = asyncio.all_tasks()
        self.cancelling = current_task().cancelling()
        self.files = open_files()
        self.threads = set(threading.enumerate())
        self.handlers = _signal_handlers()


def _immediate_leaks(before: _State) -> list[str]:
    """Return the leaks that count as soon as the block is left."""
    task = current_task()
    new_tasks = asyncio.all_tasks() - before.tasks - {task}
    leaks = [describe_task(leaked) for leaked in new_tasks]
    if task.cancelling() != before.cancelling:
        leaks.append(f"cancelling() of the task was {before.cancelling} and is {task.cancelling()}")
    return leaks


def _delayed_leaks(before: _State) -> list[str]:
    """Return the leaks of things that may take a tick, or a moment of their thread, to close."""
    leaks: list[str] = []
    deadline = time.monotonic() + _THREAD_WAIT_SECS
    for thread in threading.enumerate():
        # Other threads from before the block may run. But a worker that does not become idle runs a
        # function that the block has abandoned, even if the worker is from before the block.
        if thread in before.threads and not thread.name.startswith(WORKER_NAMES):
            continue
        if not _becomes_idle(thread, deadline):
            leaks.append(f"thread {thread.name!r} still runs")
    # Files come after threads, because a thread may close its files when it ends.
    leaks += [
        f"file descriptor {number} open on {target}"
        for number, target in open_files().items()
        if before.files.get(number) != target
    ]
    leaks += [
        f"signal handler of {signal.Signals(number).name}: {handler!r}"
        for number, handler in _signal_handlers().items()
        if before.handlers[number] != handler
    ]
    return leaks


def open_files() -> dict[int, str]:
    """Return the open files of this process by descriptor, where `/proc/self/fd` exists.

    Shared libraries are left out, because libffi keeps its own library open when `ctypes` is
    imported. With uvloop, the null device is left out, because libuv keeps it open from the first
    server of a loop on.
    """
    files: dict[int, str] = {}
    has_uvloop = "uvloop" in sys.modules
    # Not every system has this folder.
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            # The descriptor with which the folder was listed is closed already.
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                is_kept_by_uvloop = has_uvloop and target == os.devnull
                if not is_kept_by_uvloop and not _SHARED_LIBRARY.search(target):
                    files[int(number)] = target
    return files


def _signal_handlers() -> dict[int, Any]:
    """Return the handlers of all signals, by number."""
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _becomes_idle(thread: threading.Thread, deadline: float) -> bool:
    """Wait until the thread has ended, or is an idle worker of a pool. Return False at the
    deadline.
    """
    while thread.is_alive() and not is_idle_worker(thread):
        if time.monotonic() > deadline:
            return False
        thread.join(0.001)
    return True


def is_idle_worker(thread: threading.Thread) -> bool:
    """Return whether a thread is a worker of a pool, and waits for work."""
    if not thread.name.startswith(WORKER_NAMES):
        return False
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    # The thread has ended, or its pool has called a function that has no Python frame.
    if frame is None or frame.f_code.co_name in ("run", "run_sync"):
        return False
    return all(
        caller.f_code.co_filename.endswith(_WORKER_FILES)
        for caller, _ in traceback.walk_stack(frame)
    )


def describe_task(task: asyncio.Task[Any]) -> str:
    """Describe a task that still runs, and where it waits."""
    waits = task_wait(task).where or "its beginning"
    return f"task {task.get_name()!r} still runs, waits at {waits}"


@contextlib.contextmanager
def collected_from_finalizers(errors: list[str]) -> Generator[None]:
    """Append descriptions of the errors of finalizers in the block to `errors`.

    These include coroutines that were never awaited, and resources that were never closed.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: errors.append(describe_unraisable(unraisable))
    try:
        # A warning in a finalizer that is turned into an error arrives at the hook.
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "error",
                message="coroutine .* was never awaited",
                category=RuntimeWarning,
            )
            warnings.simplefilter("error", ResourceWarning)
            yield
    finally:
        sys.unraisablehook = hook


def describe_context(context: Mapping[str, Any]) -> str:
    """Describe the argument of a loop's exception handler."""
    objects = [
        repr(context[key])
        for key in ("task", "future", "handle", "exception")
        if context.get(key) is not None
    ]
    message = str(context.get("message", "an error in the loop"))
    return ": ".join([message, *objects])


def describe_unraisable(unraisable: Any) -> str:
    """Describe the argument of `sys.unraisablehook`."""
    error = unraisable.exc_value or unraisable.exc_type
    return f"{unraisable.err_msg or 'unreported error in'} {unraisable.object!r}: {error!r}"
