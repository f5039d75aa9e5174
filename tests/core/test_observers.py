"""What observers of a session are notified of, whether there is one or several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from aiohooks._core.activity import Kind, observed_call
from tests.support.waiting import cancel_and_wait, forever, parked, ticks

pytestmark = pytest.mark.every_python


class Recorder:
    """An observer that records what it is notified of, with its name."""

    def __init__(self, name: str, events: list[tuple[object, ...]]) -> None:
        self.name = name
        self.events = events

    def started(self, kind: Kind, what: str) -> Recorder:
        self.events.append((self.name, "started", kind, what))
        return self

    def suspended(self) -> None:
        self.events.append((self.name, "suspended"))

    def ended(self, error: BaseException | None) -> None:
        self.events.append((self.name, "ended", error))


async def awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("error", [None, ValueError("no")], ids=repr)
async def test_each_observer_is_notified_of_a_call(names: str, error: ValueError | None) -> None:
    """Of its start, of its first suspension only, and of its end, with its error."""
    events: list[tuple[object, ...]] = []
    observers = [Recorder(name, events) for name in names]

    async def call(number: int) -> int:
        await ticks(2)
        if error is not None:
            raise error
        return number

    calling = observed_call(call, "hook", "H.end", observers, 5)
    assert await asyncio.gather(asyncio.ensure_future(calling), return_exceptions=True) == [
        error or 5
    ]
    happened: list[tuple[object, ...]] = [
        ("started", "hook", "H.end"),
        ("suspended",),
        ("ended", error),
    ]
    assert events == [(name, *event) for event in happened for name in names]


async def test_a_call_may_return_any_awaitable() -> None:
    """As under a plain `await`."""
    events: list[tuple[object, ...]] = []
    future = asyncio.get_running_loop().create_future()
    calling = await parked(
        awaited(observed_call(lambda: future, "operation", "loss", [Recorder("a", events)]))
    )
    future.set_result(5)
    assert await calling == 5
    assert events == [
        ("a", "started", "operation", "loss"),
        ("a", "suspended"),
        ("a", "ended", None),
    ]


@pytest.mark.parametrize("thrown_away", [False, True])
async def test_an_observed_call_is_ended_from_outside(thrown_away: bool) -> None:
    """A cancel reaches what is awaited; where the caller is thrown away it is closed. Both are its
    end.
    """
    events: list[tuple[object, ...]] = []
    ends: list[str] = []

    async def call() -> None:
        try:
            await forever()
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    coro = awaited(observed_call(call, "hook", "H.end", [Recorder("a", events)]))
    if thrown_away:
        coro.send(None)
        coro.close()
    else:
        task = await parked(coro)
        await cancel_and_wait(task)
        assert task.cancelled()
    assert ends == ["GeneratorExit" if thrown_away else "CancelledError"]
    assert [type(event[-1]).__name__ for event in events if event[1] == "ended"] == ends
