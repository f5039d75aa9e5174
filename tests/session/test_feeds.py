"""Feeds that are taken ahead of the runs, or by a thread: in order, each used once, none lost without a word."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.session.steps import Steps
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, Loader, counting_graph
from tests.support.waiting import forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python


class Source:
    """Numbers from 0, as an async or a plain iterator, that says how many were taken and whether it was closed."""

    def __init__(self, count: int = 100) -> None:
        self.count = count
        self.taken = 0
        self.closed = False

    async def numbers(self) -> AsyncIterator[int]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                self.taken += 1
                yield number
        finally:
            await asyncio.sleep(0)
            self.closed = True

    def plain(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.taken += 1
                yield number
        finally:
            self.closed = True

    def feeds(self, kind: str) -> dict[str, Any]:
        return {"feeds": self.numbers() if kind == "async" else self.plain(), "thread": kind == "thread"}


async def same(batch: int) -> int:
    return batch


KINDS = pytest.mark.parametrize("kind", ["async", "plain", "thread"])


@KINDS
@pytest.mark.parametrize("prefetch", [0, 1, 5])
async def test_every_element_is_used_once_and_in_order(kind: str, prefetch: int) -> None:
    """Whatever is taken ahead, the steps get what they would get without; the iterator is closed behind the last one."""
    source = Source(12)
    async with ah.AsyncMonitoredSession(same) as session:
        steps = session.steps("same", prefetch=prefetch, **source.feeds(kind))
        assert [batch async for batch in steps] == list(range(12))
        assert session.status().feeds_unused == 0
    assert source.closed


@KINDS
async def test_as_many_as_were_asked_for_are_taken_ahead(kind: str) -> None:
    """While a step runs, `prefetch` elements are taken and no more; the status has their number."""
    source, held = Source(), asyncio.Event()

    async def step(batch: int) -> int:
        await held.wait()
        return batch

    async with ah.AsyncMonitoredSession(step) as session:
        steps = session.steps("step", prefetch=3, **source.feeds(kind))
        running = asyncio.ensure_future(anext(steps))
        await until_true(lambda: source.taken == 4)
        await ticks(20)
        assert (source.taken, session.status().feeds_unused, steps.unused) == (4, 3, [1, 2, 3])
        held.set()
        assert await running == 0


@KINDS
@pytest.mark.parametrize("prefetch", [0, 2])
async def test_a_failure_comes_out_of_the_step_that_would_have_got_the_element(kind: str, prefetch: int) -> None:
    """The steps before it are made; the error is the same object."""
    error = OSError("no more data")

    def plain() -> Iterator[int]:
        yield 0
        yield 1
        raise error

    async def numbers() -> AsyncIterator[int]:
        for number in plain():
            yield number

    async def use() -> None:
        async with ah.AsyncMonitoredSession(same) as session:
            feeds = numbers() if kind == "async" else plain()
            steps = session.steps("same", feeds=feeds, prefetch=prefetch, thread=kind == "thread")
            seen.extend([await anext(steps), await anext(steps)])
            await anext(steps)

    seen: list[int] = []
    with pytest.raises(OSError, match="no more data") as raised:
        await use()
    assert raised.value is error
    assert seen == [0, 1]


@KINDS
async def test_a_stop_keeps_what_was_not_used(kind: str) -> None:
    """The iterator is closed; what was taken is in `unused` and in the status, also behind the end of the session."""
    source = Source()
    async with ah.AsyncMonitoredSession(same) as session:
        steps = session.steps("same", prefetch=2, **source.feeds(kind))
        async for batch in steps:
            if batch == 4:
                await until_true(lambda: source.taken == 7)
                session.request_stop("enough")
    assert source.closed
    assert steps.unused == [5, 6]
    assert session.status().feeds_unused == 2
    assert "elements of feeds taken ahead: 2" in str(session.status())


async def test_a_generator_is_closed_where_it_was_read() -> None:
    """A generator that a thread reads may block at its end, too."""
    threads: list[int] = []

    def blocking() -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            threads.append(threading.get_ident())

    async with ah.AsyncMonitoredSession(same) as session:
        for thread in (False, True):
            async for _ in session.steps("same", feeds=blocking(), prefetch=1, thread=thread):
                if thread:
                    session.request_stop("enough")
    assert [one == threading.get_ident() for one in threads] == [True, False]


@pytest.mark.parametrize("thread", [False, True])
async def test_an_iterator_of_the_users_own_is_not_closed(thread: bool) -> None:
    """Only what was made for the loop is closed, and generators, which are of no other use: a reader may be used again."""

    class Reader:
        closed = False
        taken = 0

        def __iter__(self) -> Reader:
            return self

        def __next__(self) -> int:
            self.taken += 1
            return self.taken

        def close(self) -> None:
            self.closed = True

    reader = Reader()
    async with ah.AsyncMonitoredSession(same, [ah.StopAtStepHook(last_step=2)]) as session:
        assert [batch async for batch in session.steps("same", feeds=reader, prefetch=1, thread=thread)] == [1, 2]
    assert not reader.closed


async def test_a_thread_that_hangs_keeps_its_iterator(clock: ManualClock) -> None:
    """It is left behind at the end of the grace period; a generator that runs cannot be closed, and none is."""
    blocked, released = threading.Event(), threading.Event()

    def hangs() -> Iterator[int]:
        blocked.set()
        released.wait(60)
        yield 1

    session = ah.AsyncMonitoredSession(same, stop_grace_period_secs=5)
    try:
        async with session:
            running = asyncio.ensure_future(anext(session.steps("same", feeds=hangs(), thread=True), None))
            await until_true(blocked.is_set)
            session.request_stop("enough")
            assert await running is None
            closing = asyncio.create_task(session.aclose())
            await until_true(lambda: clock.advance(1) or closing.done())
            await closing
    finally:
        released.set()


async def test_another_loop_over_the_same_steps_continues() -> None:
    """A loop that is left by `break` loses nothing that was taken ahead."""
    async with ah.AsyncMonitoredSession(same) as session:
        steps = session.steps("same", feeds=Source(6).numbers(), prefetch=3)
        async for batch in steps:
            if batch == 1:
                break
        assert [batch async for batch in steps] == [2, 3, 4, 5]


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_a_wait_for_a_feed_ends_at_a_stop(prefetch: int) -> None:
    """The loop ends though the feeds never come, and the generator is closed."""
    closed: list[bool] = []

    async def one() -> AsyncIterator[int]:
        try:
            yield 1
            await forever()
        finally:
            closed.append(True)

    async with ah.AsyncMonitoredSession(same) as session:
        steps = session.steps("same", feeds=one(), prefetch=prefetch)
        assert await anext(steps) == 1
        ending = await parked(anext(steps, None))
        session.request_stop("enough")
        assert await ending is None
    assert closed == [True]


@pytest.mark.parametrize("count", [2, 3], ids=["the last", "one before the end"])
@pytest.mark.parametrize("phase", ["before_run", "step", "after_run"])
async def test_an_element_is_used_by_the_commit(phase: str, count: int) -> None:
    """A run that fails before it gives the element back, also where the feeds have ended; one that fails later has used it."""

    async def fail(place: str) -> None:
        await ticks(20)
        if place == phase and session.status().runs == 2 and not again:
            raise OSError("not yet")

    async def step(batch: int) -> int:
        await fail("step")
        return batch

    again = False
    hooks = [PhaseHook(place, lambda *_, place=place: fail(place)) for place in ("before_run", "after_run")]
    async with ah.AsyncMonitoredSession(step, hooks) as session:
        steps = session.steps("step", feeds=range(count), prefetch=1)
        with pytest.raises(OSError, match="not yet"):
            [batch async for batch in steps]
        used = 2 if phase == "after_run" else 1
        assert (session.global_step.latest.step, steps.unused[:1]) == (used, [*range(used, count)][:1])
        again = True
        assert [batch async for batch in steps] == [*range(used, count)]


@KINDS
async def test_an_element_is_taken_when_it_is_asked_for(kind: str) -> None:
    """Without `prefetch`, however long the steps before it took."""
    source = Source(3)
    async with ah.AsyncMonitoredSession(same) as session:
        async for batch in session.steps("same", prefetch=0, **source.feeds(kind)):
            await ticks(20)
            assert source.taken == batch + 1


async def test_a_thread_that_takes_elements_does_not_stop_the_loop() -> None:
    """While it blocks, other tasks run."""
    blocked, released = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        blocked.set()
        released.wait(60)
        yield 1

    async with ah.AsyncMonitoredSession(same) as session:
        running = asyncio.ensure_future(anext(session.steps("same", feeds=slow(), thread=True)))
        await until_true(blocked.is_set)
        released.set()
        assert await running == 1


# -- feeds with a state


async def test_the_state_of_feeds_counts_what_was_used(tmp_path: Path) -> None:
    """A checkpoint has the state behind the step's own element; at a stop the feeds are set back to it. Nothing is repeated."""
    used: list[int] = []

    async def step(batch: int) -> int:
        used.append(batch)
        await ticks(3)
        return batch

    for last in (3, 7, 12):
        loader = Loader(12)
        creator = ah.ChiefSessionCreator(step, scaffold=ah.Scaffold(tracked={"data": loader}), checkpoint_dir=tmp_path)
        saver = ah.CheckpointSaverHook(every=ah.Every(steps=2))
        async with ah.AsyncMonitoredSession(creator, [saver, ah.StopAtStepHook(last_step=last)]) as session:
            async for _ in session.steps("step", feeds=loader, prefetch=4):
                assert loader.position > used[-1]
        assert loader.position == last
        assert session.status().feeds_unused == 0
    assert used == list(range(12))


@pytest.mark.parametrize("count", [4, 20], ids=["behind the end", "before the end"])
@pytest.mark.parametrize("prefetch", [1, 3])
async def test_a_recovery_begins_no_other_pass(prefetch: int, count: int) -> None:
    """Feeds that begin again when they are iterated over, as data loaders do, make one whole pass if nothing restores them."""
    used, failures = list[int](), [ah.AbortedError("lost")]

    class Passes(Loader):
        async def __aiter__(self) -> AsyncIterator[int]:
            self.position %= self.count
            async for number in super().__aiter__():
                yield number

    async def step(batch: int) -> int:
        await ticks(20)
        if len(used) == 3 and failures:
            raise failures.pop()
        used.append(batch)
        return batch

    async with ah.AsyncMonitoredSession(step, recovery=NO_BACKOFF) as session:
        async for _ in session.steps("step", feeds=Passes(count), prefetch=prefetch):
            pass
        assert session.status().recoveries == 1
    assert used == list(range(count))


async def test_a_recovery_during_the_wait_for_restored_feeds(tmp_path: Path) -> None:
    """The wait continues with the feeds that are read anew; the loop does not hang."""
    gate, used = asyncio.Event(), list[int]()

    class Held(Loader):
        async def __aiter__(self) -> AsyncIterator[int]:
            async for number in super().__aiter__():
                if number == 3:
                    await gate.wait()
                yield number

    async def fail() -> None:
        raise ah.AbortedError("lost")

    async def use(steps: Steps) -> None:
        async for batch in steps:
            used.append(batch)

    loader = Held(6)
    creator = ah.ChiefSessionCreator(same, scaffold=ah.Scaffold(tracked={"data": loader}), checkpoint_dir=tmp_path)
    hooks = [ah.CheckpointSaverHook(every=ah.Every(steps=2), background=False)]
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=NO_BACKOFF) as session:
        loop = asyncio.ensure_future(use(session.steps("same", feeds=loader, prefetch=1)))
        await until_true(lambda: used == [0, 1, 2])
        await ticks(20)
        failed = session.coord
        failed.start_soon(fail)
        await until_true(lambda: session.coord is not failed)
        gate.set()
        await loop
    assert used == [0, 1, 2, 2, 3, 4, 5]


# -- steps in a thread


async def test_a_step_in_a_thread_leaves_the_loop_free() -> None:
    """Other tasks run while it computes; it is fed and fetched as any other step."""
    computing, released = threading.Event(), threading.Event()

    def train(batch: int, scale: int = 10) -> dict[str, int]:
        computing.set()
        released.wait(60)
        return {"loss": scale * batch}

    async with ah.AsyncMonitoredSession(ah.in_thread(train)) as session:
        running = asyncio.create_task(session.run(["loss", "train"], {"batch": 2}))
        await until_true(computing.is_set)
        released.set()
        assert await running == [20, {"loss": 20}]
    assert await ah.in_thread(train)(3) == {"loss": 30}


async def test_a_cancel_waits_for_the_step_in_a_thread() -> None:
    """The thread cannot be interrupted: the cancel comes out when it has returned, and the run has changed nothing."""
    computing, released = threading.Event(), threading.Event()

    def train() -> None:
        computing.set()
        released.wait(60)

    async with ah.AsyncMonitoredSession(ah.in_thread(train)) as session:
        running = asyncio.create_task(session.run("train"))
        await until_true(computing.is_set)
        running.cancel()
        await ticks(10)
        assert not running.done()
        released.set()
        await asyncio.wait([running])
        assert running.cancelled()
        assert session.global_step.latest.step == 0


def test_only_blocking_functions_go_into_a_thread() -> None:
    """A coroutine function is refused, and so is what cannot be called."""
    with refused(ah.errors.InvalidArgumentError, "the step is 5"):
        ah.in_thread(5)  # type: ignore[arg-type]
    with refused(ah.errors.InvalidArgumentError, "is a coroutine function", "leave out in_thread"):
        ah.in_thread(same)
    assert repr(ah.in_thread(do_nothing_blocking)).startswith("in_thread(<function do_nothing_blocking")


def do_nothing_blocking() -> None:
    """Return."""


# -- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"feeds": 5}, "feeds is 5; give something to iterate over, sync or async"),
        ({"feeds": object()}, "feeds is <object object"),
        ({"feeds": {"batch": 1}}, "feeds is {'batch': 1}; give something to iterate over"),
        ({"feeds": "rows"}, "feeds is 'rows'; give something to iterate over"),
        ({"feeds": [1], "batch": 2}, "batch is 2"),
        ({"feeds": [1], "max_wait_secs": 2}, "max_wait_secs is 2"),
        ({"feeds": asyncio.Queue(), "max_wait_secs": 2}, "give batch= as well"),
        ({"feeds": asyncio.Queue(), "batch": 0}, "batch is 0"),
        ({"feeds": asyncio.Queue(), "batch": 2, "max_wait_secs": -1}, "max_wait_secs is -1"),
        ({"prefetch": -1, "feeds": [1]}, "prefetch is -1"),
        ({"prefetch": True, "feeds": [1]}, "prefetch is True"),
        ({"prefetch": 1}, "feeds is None"),
        ({"prefetch": 1, "feeds": asyncio.Queue()}, "a queue holds what its producer puts in"),
        ({"thread": True, "feeds": Source().numbers()}, "thread=True for those that block"),
        ({"thread": True, "feeds": asyncio.Queue()}, "a queue holds"),
    ],
)
async def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    """The error has the values and says what to do: a mapping is one element and not many, batches are for queues."""
    async with ah.AsyncMonitoredSession(counting_graph()) as session:
        with refused(ah.errors.InvalidArgumentError, says):
            session.steps("train", **options)
