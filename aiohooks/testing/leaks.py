"""What a piece of asynchronous code leaves behind: tasks, files, threads, waiters, unheard errors.

`async with no_leaks():` compares the world after the block with the world before it and names every difference.

What counts as left behind:

- a task that is not done at the moment the block is left. Not a tick later: who starts a task awaits it;
- a cancel of the current task that the block took back or kept to itself (`cancelling()` has changed);
- a waiter that is still parked in one of the `stores`, or a publisher still registered there;
- an open file, socket or pipe (where `/proc/self/fd` exists);
- a running thread. Idle workers of anyio's and of the loop's own thread pool stay for later use and are allowed;
  one that still runs a function is not;
- a signal handler that is not the one from before;
- an error nobody heard of: an exception never retrieved, a coroutine never awaited, a pending task destroyed, an error in
  a callback or a finaliser, an unclosed resource;
- an async generator that was begun and neither finished nor closed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

# A closed transport gives up its socket in the next tick, and tells its protocol in the one after.
_TICKS = 3
# A worker thread answers first and goes idle then, so an idle-looking moment may be a little away.
_THREAD_PATIENCE_SECS = 0.5

_WORKER_FILES = (
    "threading.py",
    "queue.py",
    os.path.join("_backends", "_asyncio.py"),
    os.path.join("futures", "thread.py"),
)
_WORKER_NAMES = ("AnyIO worker thread", "asyncio_", "uvloop_")


class _Statistics(Protocol):
    """A store's figures, as far as they are needed here."""

    @property
    def waiting(self) -> int: ...
    @property
    def watching(self) -> int: ...
    @property
    def publishers(self) -> tuple[str, ...]: ...


class _HasStatistics(Protocol):
    """A step store, as far as it is needed here."""

    def statistics(self) -> _Statistics: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What exists at one moment, as `take` found it; give it to `leaks_since` later."""

    tasks: frozenset[asyncio.Task[Any]]
    cancelling: int
    files: Mapping[int, str]
    threads: frozenset[threading.Thread]
    handlers: Mapping[int, Any]
    stores: tuple[tuple[_HasStatistics, int, tuple[str, ...]], ...]

    @classmethod
    def take(cls, stores: Iterable[_HasStatistics] = ()) -> Self:
        """Notes what exists now; call it in the task that runs the code to be checked."""
        return cls(
            tasks=frozenset(asyncio.all_tasks()),
            cancelling=_current_task().cancelling(),
            files=_open_files(),
            threads=frozenset(threading.enumerate()),
            handlers=_signal_handlers(),
            stores=tuple((store, *_parked(store)) for store in stores),
        )


@dataclass(frozen=True, slots=True)
class Leaks:
    """What was left behind, one line each; false when there is nothing."""

    leftovers: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.leftovers)

    def __str__(self) -> str:
        if not self.leftovers:
            return "nothing was left behind"
        return "left behind:\n" + "\n".join(f"  - {line}" for line in self.leftovers)


def leaks_since(before: Snapshot) -> Leaks:
    """Compares this moment with `before`, in the same task, without waiting and without collecting garbage."""
    return Leaks((*_left_at_once(before), *_left_open(before)))


def assert_no_leaks(before: Snapshot) -> None:
    """Raises if anything is there now that was not `before`.

    It sees tasks, files, threads, handlers and waiters; errors that nobody heard of are seen by `no_leaks` only.

    Raises:
        AssertionError: names each leftover.
    """
    leaks = leaks_since(before)
    if leaks:
        raise AssertionError(str(leaks))


class no_leaks:
    """Checks that a block leaves nothing behind; the module says what counts.

    If the block itself raises, its exception passes and the leftovers are added to it as a note. The check is of the task,
    loop and thread it runs in, and it takes over the loop's exception handler while it lasts.

    Example:
        async with no_leaks(stores=[store]):
            async with AsyncMonitoredSession(graph, global_step=store) as session:
                await session.run("train")
    """

    def __init__(self, *, stores: Iterable[_HasStatistics] = ()) -> None:
        """Watches also the waiters and publishers of `stores`."""
        self.leaks: Leaks = Leaks()
        """What was found; known after the block."""
        self._stores = tuple(stores)
        self._before: Snapshot
        self._heard: list[str] = []
        self._generators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._undo: list[Callable[[], Any]] = []

    async def __aenter__(self) -> Self:
        gc.collect()  # what earlier code left is its own
        self._listen()
        self._before = Snapshot.take(self._stores)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        cancel: asyncio.CancelledError | None = None
        try:
            found = _left_at_once(self._before)
            for _ in range(_TICKS):
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError as caught:
                    cancel = caught
            found += self._unfinished_generators()
            gc.collect()
            gc.collect()  # finalisers of the first round may have let go of more
            found += _left_open(self._before) + self._heard
        finally:
            self._stop_listening()
        self.leaks = Leaks(tuple(found))
        if cancel is not None and not isinstance(error, asyncio.CancelledError):
            error = cancel  # a cancel that was pending when the block ended: passed on, as any await would
        if self.leaks:
            if error is None:
                raise AssertionError(str(self.leaks))
            error.add_note(str(self.leaks))
        if error is cancel and cancel is not None:
            raise cancel

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        handler = loop.get_exception_handler()
        loop.set_exception_handler(lambda _, context: self._heard.append(_told(context)))
        self._undo.append(lambda: loop.set_exception_handler(handler))

        hook = sys.unraisablehook
        sys.unraisablehook = lambda unraisable: self._heard.append(_unraisable_told(unraisable))
        self._undo.append(lambda: setattr(sys, "unraisablehook", hook))

        # As errors, these come out of finalisers and so through the hook above.
        catcher = warnings.catch_warnings()
        catcher.__enter__()
        warnings.filterwarnings("error", message="coroutine .* was never awaited", category=RuntimeWarning)
        warnings.simplefilter("error", ResourceWarning)
        self._undo.append(lambda: catcher.__exit__(None, None, None))

        firstiter, finalizer = sys.get_asyncgen_hooks()

        def begun(generator: Any) -> None:
            self._generators.add(generator)
            if firstiter is not None:
                firstiter(generator)

        sys.set_asyncgen_hooks(begun, finalizer)
        self._undo.append(lambda: sys.set_asyncgen_hooks(firstiter, finalizer))

    def _stop_listening(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _unfinished_generators(self) -> list[str]:
        return [
            f"async generator {generator.__qualname__} begun and not closed"
            for generator in self._generators
            if generator.ag_frame is not None
        ]


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "the leaks check runs inside a task"
    return task


def _left_at_once(before: Snapshot) -> list[str]:
    """What must be gone at the very moment the code is left."""
    found: list[str] = []
    task = _current_task()
    found += [f"task {one.get_name()!r} still runs {_place(one)}" for one in asyncio.all_tasks() - before.tasks - {task}]
    if task.cancelling() != before.cancelling:
        found.append(f"cancelling() of the task was {before.cancelling} and is {task.cancelling()}")
    for store, waiters, publishers in before.stores:
        now, names = _parked(store)
        if now > waiters:
            found.append(f"{now - waiters} waiter(s) parked in {store!r}")
        found += [f"publisher {name!r} registered in {store!r}" for name in names if name not in publishers]
    return found


def _left_open(before: Snapshot) -> list[str]:
    """What may take a tick, or a thread's last breath, to go."""
    found = [
        f"file descriptor {number} open on {target}"
        for number, target in _open_files().items()
        if before.files.get(number) != target
    ]
    found += [
        f"signal handler of {signal.Signals(number).name}: {handler!r}"
        for number, handler in _signal_handlers().items()
        if before.handlers[number] != handler
    ]
    patience = time.monotonic() + _THREAD_PATIENCE_SECS
    for thread in set(threading.enumerate()) - before.threads:
        while thread.is_alive() and not _is_idle_worker(thread):
            if time.monotonic() > patience:
                found.append(f"thread {thread.name!r} still runs")
                break
            thread.join(0.001)
    # An idle worker from before that is busy now has work that nobody waits for.
    found += [
        f"thread {thread.name!r} still runs a function that nobody waits for"
        for thread in before.threads
        if thread.is_alive() and thread.name.startswith(_WORKER_NAMES) and not _becomes_idle(thread, patience)
    ]
    return found


def _open_files() -> dict[int, str]:
    files: dict[int, str] = {}
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return files
    for number in numbers:
        try:
            files[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own descriptor
            continue
    return files


def _signal_handlers() -> dict[int, Any]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _parked(store: _HasStatistics) -> tuple[int, tuple[str, ...]]:
    statistics = store.statistics()
    return statistics.waiting + statistics.watching, statistics.publishers


def _is_idle_worker(thread: threading.Thread) -> bool:
    """Whether this is a pool's thread that waits for its next function."""
    if not thread.name.startswith(_WORKER_NAMES):
        return False
    frame = sys._current_frames().get(thread.ident or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None or frame.f_code.co_name in ("run", "run_sync"):
        return False  # gone, or inside a function that has no frame of its own
    while frame is not None:
        if not frame.f_code.co_filename.endswith(_WORKER_FILES):
            return False
        frame = frame.f_back
    return True


def _becomes_idle(thread: threading.Thread, patience: float) -> bool:
    while not _is_idle_worker(thread) and thread.is_alive():
        if time.monotonic() > patience:
            return False
        thread.join(0.001)
    return True


def _place(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return f"({task.get_coro()!r})"
    code = frames[-1].f_code
    return f"({code.co_qualname}, {os.path.basename(code.co_filename)}:{frames[-1].f_lineno})"


def _told(context: Mapping[str, Any]) -> str:
    error = context.get("exception")
    owner = context.get("task") or context.get("future") or context.get("handle")
    parts = [str(context.get("message", "an error in the loop"))]
    if owner is not None:
        parts.append(repr(owner))
    if error is not None:
        parts.append(repr(error))
    return ": ".join(parts)


def _unraisable_told(unraisable: Any) -> str:
    what = unraisable.exc_value if unraisable.exc_value is not None else unraisable.exc_type
    return f"{unraisable.err_msg or 'unheard error in'} {unraisable.object!r}: {what!r}"
