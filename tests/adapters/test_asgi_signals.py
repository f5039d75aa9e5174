"""Hearing of the signals that a server owns."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from aiohooks.adapters.asgi._lifespan import notify_on_signals
from tests.support.asgi import Exchange, turns
from tests.support.services import Work, make


@pytest.fixture
def server() -> Iterator[list[int]]:
    """The signals that a server has received: it has handlers of its own, as uvicorn does."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    yield received
    for each, handler in before.items():
        assert signal.getsignal(each) is handle, "the server's handler was given back"
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_waits_before_the_server_ends(server: list[int], number: signal.Signals) -> None:
    """The server gets its signal, and the session stops at once: the clients it is going to wait for are answered."""
    service = make(Work())
    async with service.lifespan():
        waiting = Exchange(service, "/steps/9")
        await turns()
        os.kill(os.getpid(), number)
        await waiting.task
        assert waiting.reply.json["message"] == f"the session makes no more steps: the server received {number.name}"
        assert server == [number]


async def test_signals_may_be_left_alone(server: list[int]) -> None:
    """With `stop_on_signals=False` the session goes on until the server ends it."""
    service = make(Work(), stop_on_signals=False)
    async with service.lifespan():
        await turns()
        os.kill(os.getpid(), signal.SIGTERM)
        await turns()
        assert service.health().state == "running"
        assert server == [signal.SIGTERM]


async def test_what_is_not_handled_is_left_as_it_is() -> None:
    """A signal that would end the process still does: nobody has said that it should not."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with notify_on_signals(print):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_handler_set_meanwhile_is_kept(server: list[int]) -> None:
    """Whoever has taken the signal over inside the block keeps it."""

    def other(number: int, frame: FrameType | None) -> None:
        pass

    mine = signal.getsignal(signal.SIGTERM)
    with notify_on_signals(print):
        signal.signal(signal.SIGTERM, other)
    assert signal.getsignal(signal.SIGTERM) is other
    signal.signal(signal.SIGTERM, mine)


async def test_other_threads_have_no_signals() -> None:
    """A server in another thread than the main one works without them."""
    before = signal.getsignal(signal.SIGTERM)
    same: list[bool] = []

    async def inside() -> None:
        with notify_on_signals(print):
            same.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=lambda: asyncio.run(inside()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert same == [True]


async def test_a_forked_child_does_not_write_into_its_parents_loop(server: list[int]) -> None:
    """In a child the server's handler alone is called."""
    heard: list[str] = []
    with notify_on_signals(heard.append):
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        child = os.fork()
        if child == 0:
            handler(signal.SIGTERM, None)
            os._exit(len(server))
        _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - it ends by itself
        assert os.waitstatus_to_exitcode(status) == 1
        await turns()
        assert heard == []
