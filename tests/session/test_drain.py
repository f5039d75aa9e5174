"""A drain: what was taken is used, nothing new is begun, and then the session stops; it is limited,
and a stop wins over it.

What it does in a coordinator alone is in `test_coordinator.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import (
    NO_BACKOFF,
    Loader,
    Source,
    failing_step,
    same,
    use_up,
)
from tests.support.waiting import forever, parked, ticks

pytestmark = pytest.mark.every_python


def drains_at(session: ah.AsyncMonitoredSession, count: int, reason: str | None = None) -> Source:
    """Make a source that drains the session when so many elements were taken."""
    return Source(on_take=lambda taken: taken == count and session.request_drain(reason))


# -- what is used, and what is not begun


@pytest.mark.parametrize("kind", Source.KINDS)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
async def test_what_was_taken_is_used_and_nothing_else_is_taken(kind: str, prefetch: int) -> None:
    """Also the element that is just being taken; the session ends cleanly, with the reason of the
    drain.
    """
    ends = RecordingHook()
    used = list[int]()
    async with ah.AsyncMonitoredSession(same, [ends]) as session:
        source = drains_at(session, 4, "enough")
        await use_up(session.steps("same", prefetch=prefetch, **source.feeds(kind)), used)
        assert session.should_stop()
    assert (used, source.taken) == ([0, 1, 2, 3], 4)
    assert (session.stop_reason, session.drain_reason, session.status().feeds_unused) == (
        "enough",
        "enough",
        0,
    )
    assert ends.phases()[-2:] == ["end", "close"]


@pytest.mark.parametrize("feeds", [None, range(9)], ids=["without feeds", "fed"])
async def test_a_hook_drains_the_loop(feeds: Any) -> None:
    """Through its coordinator: the step in progress is finished, and no other begins."""

    async def drain(context: ah.SessionRunContext) -> None:
        assert context.coord is not None
        if context.global_step == 3:
            context.coord.request_drain("three steps")

    async with ah.AsyncMonitoredSession(
        same if feeds else do_nothing_step, [PhaseHook("before_run", drain)]
    ) as session:
        await use_up(session.steps(feeds=feeds))
    assert (session.status().runs, session.stop_reason) == (3, "three steps")


async def do_nothing_step() -> None:
    """Do nothing: a step without a parameter."""


@pytest.mark.parametrize("thread", [False, True], ids=["by the loop", "by a thread"])
@pytest.mark.parametrize("kind", ["queue", "generator", "generator, taken ahead"])
async def test_an_idle_loop_ends(kind: str, thread: bool) -> None:
    """Nothing is under way that it could know of: the request is seen immediately, and wakes those
    who wait.
    """

    async def received() -> AsyncIterator[int]:
        yield await session.until(asyncio.Queue[int]().get(), drain=True)

    async with ah.AsyncMonitoredSession(same) as session:
        feeds: Any = received() if "generator" in kind else asyncio.Queue[int]()
        loop = await parked(
            use_up(session.steps("same", feeds=feeds, prefetch=int("ahead" in kind)))
        )
        await ticks(20)
        if thread:
            requesting = threading.Thread(target=session.request_drain, args=("idle",))
            requesting.start()
            requesting.join()
        else:
            session.request_drain("idle")
        await loop
    assert session.stop_reason == "idle"


@pytest.mark.parametrize("kind", ["put", "idle", "until", "pipeline", "unnamed"])
async def test_a_drain_ends_producers_that_do_not_look_for_it(kind: str) -> None:
    """They are endless: what they waited to put is used, in order, and they are cancelled then. Of
    producers that are not named, no more is taken.
    """
    raw = asyncio.Queue[int](2)
    ready = asyncio.Queue[int](2)
    used = list[int]()

    async def produce(queue: asyncio.Queue[int]) -> None:
        for number in range(10**9):
            if kind == "idle" and number == 6:
                await forever()
            elif kind == "until":
                await session.until(queue.put(number))
            else:
                await queue.put(number)

    async def convert(reader: asyncio.Task[None]) -> None:
        while True:
            number = await session.until(raw.get(), producer=reader)
            await ticks(3)
            await ready.put(number)

    async with ah.AsyncMonitoredSession(same) as session:
        producer = session.start_soon(produce, raw if kind == "pipeline" else ready)
        if kind == "pipeline":
            producer = session.start_soon(convert, producer)
        named = None if kind == "unnamed" else producer
        async for number in session.steps("same", feeds=ready, producer=named):
            used.append(number)
            if number == 4:
                session.request_drain("enough")
                waiting = 4 + ready.qsize() + raw.qsize()
        assert (producer.done(), session.stop_reason) == (kind != "unnamed", "enough")
    assert used == [*range(len(used))]
    assert waiting <= used[-1] < 30


async def test_every_loop_finishes_before_the_stop() -> None:
    """The last one that ends requests it; one that was left does not count."""
    queues = [asyncio.Queue[int](), asyncio.Queue[int]()]
    used = [list[int](), list[int]()]
    gate = asyncio.Event()

    async def produce() -> None:
        with contextlib.suppress(ah.StopRequestedError):
            await session.until(forever(), drain=True)
        await gate.wait()  # what it has under way
        queues[1].put_nowait(1)

    queues[0].put_nowait(0)
    async with ah.AsyncMonitoredSession(same) as session:
        left = session.steps("same", feeds=range(5))
        async for _ in left:
            break
        producer = session.start_soon(produce)
        other = session.start_soon(
            use_up, session.steps("same", feeds=queues[1], producer=producer), used[1]
        )
        await ticks()
        session.request_drain("enough")
        await use_up(session.steps("same", feeds=queues[0]), used[0])
        assert not session.should_stop()
        gate.set()
        await other
        assert session.should_stop()
        assert left.unused == []
    assert used == [[0], [1]]


@pytest.mark.parametrize("way", ["loop", "anext"])
async def test_a_loop_that_has_failed_does_not_count_however_long_its_error_is_kept(
    way: str,
) -> None:
    """The traceback of the error refers to the loop. A drain does not wait for the end of that."""
    queue, used, errors = asyncio.Queue[int](), list[int](), list[ValueError]()
    for number in (1, -1, 2):
        queue.put_nowait(number)

    async def step(batch: int) -> int:
        if batch < 0 and not errors:
            raise ValueError(batch)
        return batch

    async with ah.AsyncMonitoredSession(step) as session:
        steps = aiter(session.steps("step", feeds=queue))
        while not session.should_stop():
            try:
                if way == "loop":
                    await use_up(session.steps("step", feeds=queue), used)
                else:
                    used.append(await anext(steps))
            except ValueError as error:
                errors.append(error)
                session.request_drain("enough")
            except StopAsyncIteration:
                break
        assert session.should_stop()
    assert (used, len(errors)) == ([1, -1, 2], 1)


# -- with other events


async def test_a_recovery_during_a_drain(tmp_path: Path) -> None:
    """What the restored feeds have is not taken, and is in their state: neither the element of the
    run nor those before it.
    """
    loader = Loader()
    used = list[int]()
    failures = [ah.AbortedError("lost")]

    async def step(number: int) -> int:
        if number == 5 and failures:
            session.request_drain()
            raise failures.pop()
        used.append(number)
        return number

    creator = ah.ChiefSessionCreator(
        step, scaffold=ah.Scaffold(tracked={"data": loader}), checkpoint_dir=tmp_path
    )
    hooks = [ah.CheckpointSaverHook(every=ah.Every(steps=2), background=False)]
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=NO_BACKOFF) as session:
        await use_up(session.steps("step", feeds=loader, prefetch=2))
        assert session.status().recoveries == 1
    assert used == [0, 1, 2, 3, 4]
    assert loader.position == 4, "restored behind step 4: a resumed run takes 4 next"


async def test_a_drain_ends_a_pause() -> None:
    """What was taken is to be used; a pause that follows holds the runs, and a stop ends that."""
    async with ah.AsyncMonitoredSession(same) as session:
        session.pause("no space")
        run = await parked(session.run("same", {"batch": 1}))
        session.request_drain()
        assert (await run, session.pause_reason) == (1, None)
        session.pause("again")
        run = await parked(session.run("same", {"batch": 1}))
        await ticks(20)
        assert not run.done()
        session.request_stop("over")
        with pytest.raises(ah.StopRequestedError, match="over"):
            await run


# -- its end


async def test_what_a_drain_makes_a_producer_lose_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names each producer that a drain cancels, which may hold an element; not one that
    has ended.
    """

    async def read(out: asyncio.Queue[int]) -> None:
        number = 0
        while True:
            taken.append(number)
            await out.put(number)
            number += 1

    taken: list[int] = []
    queue: asyncio.Queue[int] = asyncio.Queue(1)
    async with ah.AsyncMonitoredSession(failing_step()) as session:
        reader = session.start_soon(read, queue)
        ended = session.start_soon(ticks)
        await ended
        used = []
        async for number in session.steps("loss", feeds=queue, producer=[reader, ended]):
            used.append(number)
            if number == 3:
                session.request_drain()
    assert used == taken[: len(used)]
    warned = [text for text in caplog.messages if "the drain cancels the producer" in text]
    assert len(taken) - len(used) - queue.qsize() == len(warned) == 1
    assert "'read'" in warned[0]
