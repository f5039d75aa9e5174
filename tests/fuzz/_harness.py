"""Shared by the programs: directories, suspensions, leaks, loops, injected bugs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any
from unittest import mock

Method = Callable[..., Any]


@types.coroutine
def watched(
    coro: Coroutine[Any, Any, Any], suspended: Callable[[Any], None], resumed: Callable[[], None] = lambda: None
) -> Generator[Any, Any, Any]:
    """Await a coroutine; call `suspended` with what it waits for at each suspension, and `resumed` after it."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            waited = coro.send(value) if error is None else coro.throw(error)
        except StopIteration as stop:
            return stop.value
        value = error = None
        suspended(waited)
        try:
            value = yield waited
        except BaseException as thrown:
            error = thrown
        resumed()


@contextlib.contextmanager
def scratch() -> Generator[Path]:
    """Make a temporary directory for the block, in memory if possible, where fsync costs nothing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aiohooks-", dir=memory) as path:
        yield Path(path)


def called_by_library() -> bool:
    """Return whether the caller of this, a method of a task, was called by the library."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("aiohooks")


@contextlib.contextmanager
def log_disabled() -> Generator[None]:
    """Log nothing in the block."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def collecting_finalizer_errors(errors: list[str]) -> Generator[None]:
    """Collect warnings and the errors of finalisers; the block itself collects the garbage, between its points."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: errors.append(f"{unraisable.exc_value!r} in {unraisable.object!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()  # older objects need not be traversed after every batch
        try:
            yield
        finally:
            if enabled:
                gc.enable()
            sys.unraisablehook = hook


def described(context: dict[str, Any]) -> str:
    """Describe what a loop's exception handler gets."""
    return f"{context.get('message')}: {context.get('exception')!r} {context.get('task') or context.get('future') or ''}"


def close_loop(loop: asyncio.AbstractEventLoop, secs: float) -> None:
    """Close a loop; tasks that hang in it are cancelled as `asyncio.run` would, for a while."""
    for _ in range(5):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=secs))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@contextlib.contextmanager
def replaced(owner: type | types.ModuleType, name: str, replacement: Method) -> Generator[None]:
    """Replace `owner.name` in the block by a function that gets the original one, and then its arguments."""
    original = vars(owner)[name]
    with mock.patch.object(owner, name, lambda *args, **options: replacement(original, *args, **options)):
        yield
