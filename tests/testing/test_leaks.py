"""The leaks check: each kind of leak is injected and found, and clean code passes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from aiohooks.testing import leaks, no_leaks
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python


async def leaks_of(leak: Callable[[], Awaitable[Any]]) -> str:
    """Return the leaks that the check finds in `leak`, which must have one."""
    with (
        pytest.raises(AssertionError) as failure,
        mock.patch.object(leaks, "_THREAD_WAIT_SECS", 0.1),
    ):  # a leaked one does not end
        async with no_leaks():
            await leak()
    return str(failure.value)


async def never() -> None:
    """A coroutine that is never awaited."""


async def test_clean_code_leaves_nothing() -> None:
    """Tasks awaited, files closed, threads joined, generators finished: no leaks."""
    async with no_leaks() as check:
        assert await asyncio.create_task(asyncio.sleep(0, "done")) == "done"
        os.close(os.open(__file__, os.O_RDONLY))
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    assert check.leaks == ()


async def test_a_shared_library_may_stay_open(tmp_path: Path) -> None:
    """An import may open one for as long as the process lasts."""
    with contextlib.ExitStack() as stack:
        async with no_leaks() as check:
            for name in ("libffi.so", "libffi.so.8.5.0"):
                stack.enter_context((tmp_path / name).open("w"))
        assert check.leaks == ()


async def test_the_first_server_of_a_loop_leaves_nothing() -> None:
    """The loop of uvloop keeps the null device open from then on."""
    async with no_leaks():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        server.close()
        await server.wait_closed()


async def test_a_running_task_is_named_with_its_line() -> None:
    """A task that is not done when the block is left is named, with the line of the user's in which
    it waits.
    """
    ended = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    async def straggler() -> None:
        await ended.wait()

    async def leak() -> None:
        tasks.append(asyncio.create_task(straggler(), name="straggler"))
        await asyncio.sleep(0)

    found = await leaks_of(leak)
    line = straggler.__code__.co_firstlineno + 1
    assert f"'straggler' still runs, waits at {straggler.__qualname__} ({__file__}:{line})" in found
    ended.set()
    await tasks[0]


def a_task_that_is_cancelled_and_not_awaited() -> Iterator[str]:
    task = asyncio.ensure_future(forever())
    task.set_name("cancelled")
    task.cancel()
    yield "task 'cancelled' still runs"


def an_open_file() -> Iterator[str]:
    opened = os.open(__file__, os.O_RDONLY)
    yield f"file descriptor {opened} open on {__file__}"
    os.close(opened)


def an_open_socket() -> Iterator[str]:
    with socket.socket():
        yield "open on socket:"


def a_running_thread() -> Iterator[str]:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="forgotten")
    thread.start()
    yield "thread 'forgotten' still runs"
    ended.set()
    thread.join()


def a_signal_handler() -> Iterator[str]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    yield "signal handler of SIGUSR1"
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "leak",
    [
        a_task_that_is_cancelled_and_not_awaited,
        an_open_file,
        an_open_socket,
        a_running_thread,
        a_signal_handler,
    ],
)
async def test_what_is_left_open_is_named(leak: Callable[[], Iterator[str]]) -> None:
    """What was not there before, and is when the block is left."""
    leaking = leak()

    async def begin() -> None:
        named.append(next(leaking))

    named: list[str] = []
    found = await leaks_of(begin)
    assert named[0] in found
    assert [*leaking] == []
    await ticks()


async def test_idle_workers_of_the_pools_are_allowed() -> None:
    """Idle worker threads of anyio and of the loop belong to the loop, not to the block."""
    async with no_leaks():
        assert await anyio.to_thread.run_sync(lambda: 1) == 1
        assert await asyncio.to_thread(lambda: 2) == 2


@pytest.mark.parametrize("warm", [False, True], ids=["new worker", "worker from before"])
async def test_abandoned_worker_is_named(warm: bool) -> None:
    """A worker that still runs an abandoned function is named."""
    if warm:
        await anyio.to_thread.run_sync(lambda: None)
    ended = threading.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stuck() -> None:
        loop.call_soon_threadsafe(started.set)
        ended.wait()

    async def leak() -> None:
        task = asyncio.create_task(anyio.to_thread.run_sync(stuck, abandon_on_cancel=True))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])

    assert "thread 'AnyIO worker thread' still runs" in await leaks_of(leak)
    ended.set()


class Fragile:
    def __del__(self) -> None:
        raise OSError("finaliser")


async def forget_a_socket() -> None:
    socket.socket()


async def forget_a_coroutine() -> None:
    never()  # type: ignore[unused-coroutine]


async def forget_an_error() -> None:
    async def failing() -> None:
        raise ValueError("unseen")

    asyncio.create_task(failing())  # noqa: RUF006 - that is the leak
    await ticks()


async def fail_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(os.environ.__getitem__, "callback")


async def fail_in_a_finaliser() -> None:
    Fragile()


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (forget_a_socket, "unclosed <socket"),
        (forget_a_coroutine, "coroutine 'never' was never awaited"),
        (forget_an_error, "exception was never retrieved"),
        (forget_an_error, "ValueError('unseen')"),
        (fail_in_a_callback, "KeyError('callback')"),
        (fail_in_a_finaliser, "OSError('finaliser')"),
    ],
)
async def test_what_no_one_reports_is_named(
    leak: Callable[[], Awaitable[None]], named: str
) -> None:
    """A socket closed by the garbage collector, a coroutine never awaited, an error that no one
    sees: all are named.
    """
    assert named in await leaks_of(leak)


async def test_swallowed_cancel_is_named() -> None:
    """A change of the task's `cancelling()`, as by a swallowed cancellation, is named."""

    async def leak() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    assert "cancelling() of the task was 0 and is 1" in await asyncio.create_task(leaks_of(leak))


async def test_error_of_the_block_has_the_leaks_as_a_note() -> None:
    """The exception of the block is raised, with the leaks as a note."""
    ended = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []
    error = ValueError("own")

    async def leak() -> None:
        tasks.append(asyncio.create_task(ended.wait(), name="straggler"))
        raise error

    with pytest.raises(ValueError, match="own") as failure:
        async with no_leaks():
            await leak()
    assert failure.value is error
    assert "task 'straggler' still runs" in error.__notes__[0]
    ended.set()
    await tasks[0]


async def test_pending_cancel_is_passed_on() -> None:
    """A cancellation that is pending at the end of the block is raised by the check."""

    async def body() -> None:
        async with no_leaks():
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    task = asyncio.create_task(body())
    await asyncio.wait([task])
    assert task.cancelled()


async def test_hooks_and_handlers_are_restored() -> None:
    """The hooks and handlers that the check replaces are restored afterwards, also after a
    failure.
    """

    def hooks() -> tuple[Any, ...]:
        handler = asyncio.get_running_loop().get_exception_handler()
        return sys.unraisablehook, handler, sys.get_asyncgen_hooks(), list(warnings.filters)

    async def leak() -> None:
        assert hooks() != before
        never()  # type: ignore[unused-coroutine]

    before = hooks()
    await leaks_of(leak)
    assert hooks() == before
