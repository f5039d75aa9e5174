"""A drain: what was taken is used, nothing new is begun, and then the session stops; it is limited, and a stop wins over it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._aio.opening import wait_for_others
from aiohooks.errors import AbortedError, OutOfRangeError, StopRequestedError
from aiohooks.session import Steps
from aiohooks.testing import ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, Loader
from tests.support.waiting import fail, forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python


class Source:
    """Numbers from 0, without an end; says how many were taken, and drains the session when so many are."""

    def __init__(self, drain_at: int = 4) -> None:
        self.taken = 0
        self.drain_at = drain_at
        self.drain: Callable[[], object] | None = None

    def _take(self) -> int:
        self.taken += 1
        if self.taken == self.drain_at and self.drain is not None:
            self.drain()
        return self.taken - 1

    def plain(self) -> Iterator[int]:
        while True:
            yield self._take()

    async def asynchronous(self) -> AsyncIterator[int]:
        while True:
            number = self._take()
            await ticks(3)  # what it does with an element that it has taken
            yield number

    def feeds(self, kind: str) -> dict[str, Any]:
        return {"feeds": self.asynchronous() if kind == "async" else self.plain(), "thread": kind == "thread"}


async def same(number: int) -> int:
    return number


async def endless() -> None:
    await forever()


async def use(steps: Steps, used: list[Any] | None = None) -> None:
    """Run a loop of steps to its end."""
    async for value in steps:
        if used is not None:
            used.append(value)


# -- what is used, and what is not begun


@pytest.mark.parametrize("kind", ["async", "plain", "thread"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
async def test_what_was_taken_is_used_and_nothing_else_is_taken(kind: str, prefetch: int) -> None:
    """Also the element that is just being taken; the session ends cleanly, with the reason of the drain."""
    source, ends = Source(), RecordingHook()
    async with ah.AsyncMonitoredSession(same, [ends]) as session:
        source.drain = lambda: session.request_drain("enough")
        used = [number async for number in session.steps("same", prefetch=prefetch, **source.feeds(kind))]
        assert used == list(range(4)), "all that was taken, in order"
        assert session.should_stop()
    assert source.taken == 4
    assert (session.stop_reason, session.drain_reason) == ("enough", "enough")
    assert ends.record[-2:] == [("hook", "end"), ("hook", "close")]
    assert session.status().feeds_unused == 0


async def test_a_loop_without_feeds_ends() -> None:
    """The step in progress is finished, and no other begins."""

    async def step() -> None:
        if session.status().runs == 3:
            session.request_drain("three steps")

    async with ah.AsyncMonitoredSession(step) as session:
        await use(session.steps())
    assert session.status().runs == 3
    assert session.stop_reason == "three steps"


@pytest.mark.parametrize("waiting", [0, 1, 3])
@pytest.mark.parametrize("batch", [None, 2, 20])
async def test_a_queue_is_used_up(waiting: int, batch: int | None) -> None:
    """With what producers are about to put in, who wait for room; none of these is known to the loop. No batch waits for more."""
    queue, used, gate = asyncio.Queue[int](maxsize=2), list[Any](), asyncio.Event()

    async def step(number: Any) -> Any:
        await gate.wait()
        return number

    async with ah.AsyncMonitoredSession(step) as session:
        queue.put_nowait(0)
        queue.put_nowait(1)
        puts = [await parked(queue.put(2 + number)) for number in range(waiting)]
        loop = await parked(use(session.steps("step", feeds=queue, batch=batch), used))
        session.request_drain()
        gate.set()
        await loop
        await asyncio.gather(*puts)
    assert (used if batch is None else [number for one in used for number in one]) == list(range(2 + waiting))
    assert queue.empty()
    assert session.stop_reason == "a drain was requested"


@pytest.mark.parametrize("thread", [False, True], ids=["by the loop", "by a thread"])
@pytest.mark.parametrize("kind", ["queue", "batches", "generator", "generator, taken ahead"])
async def test_an_idle_loop_ends(kind: str, thread: bool) -> None:
    """Nothing is under way that it could know of: the request is seen immediately, and wakes those who wait."""

    async def received() -> AsyncIterator[int]:
        yield await session.until(asyncio.Queue[int]().get(), drain=True)

    async with ah.AsyncMonitoredSession(same) as session:
        feeds: Any = received() if "generator" in kind else asyncio.Queue[int]()
        options: Any = {"prefetch": int("ahead" in kind), "batch": 3 if kind == "batches" else None}
        loop = await parked(use(session.steps("same", feeds=feeds, **options)))
        await ticks(20)
        if thread:
            requesting = threading.Thread(target=session.request_drain, args=("idle",))
            requesting.start()
            requesting.join()
        else:
            session.request_drain("idle")
        await loop
    assert session.stop_reason == "idle"


async def test_producers_finish_what_they_have_taken() -> None:
    """A loop that knows its producers waits for them; each of their elements is used, and none is taken after the drain began."""
    queue, source, taken, used = asyncio.Queue[int](1), asyncio.Queue[int](), list[int](), list[int]()
    gate = asyncio.Event()

    async def produce(coord: ah.Coordinator) -> None:
        while True:
            number = await coord.until(source.get(), drain=True)
            taken.append(number)
            await gate.wait()  # what it does with the element
            await coord.until(queue.put(number))

    for number in range(5):
        source.put_nowait(number)
    async with ah.AsyncMonitoredSession(same) as session:
        producers = [session.start_soon(produce, session.coord) for _ in range(2)]
        loop = asyncio.ensure_future(use(session.steps("same", feeds=queue, producer=producers), used))
        await until_true(lambda: len(taken) == 2)
        session.request_drain("enough")
        await ticks(20)
        assert not loop.done()
        gate.set()
        await loop
    assert (sorted(used), taken) == ([0, 1], [0, 1])
    assert source.qsize() == 3
    assert session.stop_reason == "enough"


async def test_a_generator_ends_where_it_waits_for_something_new() -> None:
    """Where it does anything else with an element that it has taken, it is not cut off."""
    messages = asyncio.Queue[int]()

    async def received() -> AsyncIterator[int]:
        while True:
            number = await session.until(messages.get(), drain=True)
            await ticks(20)
            yield number

    for number in (1, 2):
        messages.put_nowait(number)
    async with ah.AsyncMonitoredSession(same) as session:
        used = list[int]()
        loop = asyncio.ensure_future(use(session.steps("same", feeds=received()), used))
        await until_true(lambda: used == [1])
        await ticks()
        assert messages.empty(), "the second one was taken"
        session.request_drain("enough")
        await loop
        assert used == [1, 2]
        idle = await parked(use(session.steps("same", feeds=received())))
        await idle
    assert session.stop_reason == "enough"


async def test_every_loop_finishes_before_the_stop() -> None:
    """The last one that ends requests it; one that was left does not count."""
    queues = [asyncio.Queue[int](), asyncio.Queue[int]()]
    used: list[list[int]] = [[], []]
    gate = asyncio.Event()

    async def produce() -> None:
        await gate.wait()
        queues[1].put_nowait(1)

    queues[0].put_nowait(0)
    async with ah.AsyncMonitoredSession(same) as session:
        left = session.steps("same", feeds=range(5))
        async for _ in left:
            break
        producer = session.start_soon(produce)
        other = session.start_soon(use, session.steps("same", feeds=queues[1], producer=producer), used[1])
        await ticks()
        session.request_drain("enough")
        await use(session.steps("same", feeds=queues[0]), used[0])
        assert not session.should_stop()
        gate.set()
        await other
        assert session.should_stop()
        assert left.unused == []
    assert used == [[0], [1]]


async def test_a_loop_over_passes_ends() -> None:
    """One that begins anew until the session stops is stopped behind the drained pass."""
    passes = 0
    async with ah.AsyncMonitoredSession(same, yield_secs=None) as session:
        while not session.should_stop():
            passes += 1
            async for number in session.steps("same", feeds=range(3)):
                if passes == 2 and number == 1:
                    session.request_drain("two passes")
    assert passes == 2
    assert session.status().runs == 5


async def test_a_loop_of_ones_own() -> None:
    """It looks at `should_drain`; runs are made as before, and the session that is left has the reason of the drain."""
    async with ah.AsyncMonitoredSession(same) as session:
        assert not session.should_drain()
        for number in range(9):
            if session.should_drain():
                break
            await session.run("same", {"number": number})
            if number == 3:
                session.request_drain("enough")
                session.request_drain("later")
        assert await session.run("same", {"number": 7}) == 7
        assert not session.should_stop()
    assert session.stop_reason == "enough"


async def test_a_block_that_is_left_by_the_drain() -> None:
    """The wait's error is a clean end; the reason is that of the drain, for the hooks' `end` too."""
    reasons = list[str | None]()

    async def end(session: ah.Session) -> None:
        reasons.append(monitored.stop_reason)

    monitored = ah.AsyncMonitoredSession(same, [PhaseHook("end", end)])
    async with monitored:
        monitored.request_drain("enough")
        await monitored.until(forever(), drain=True)
    assert (monitored.stop_reason, reasons) == ("enough", ["enough"])


async def test_the_state_of_feeds_has_what_was_used(tmp_path: Path) -> None:
    """The checkpoint of the end has it, and a run that is resumed from it continues with the next element."""
    loaders = [Loader(), Loader()]
    used: list[list[int]] = [[], []]
    for loader, numbers in zip(loaders, used, strict=True):
        creator = ah.ChiefSessionCreator(same, scaffold=ah.Scaffold(tracked={"data": loader}), checkpoint_dir=tmp_path)
        async with ah.AsyncMonitoredSession(creator, [ah.CheckpointSaverHook()]) as session:
            async for number in session.steps("same", feeds=loader, prefetch=3):
                numbers.append(number)
                if len(numbers) == 3:
                    await until_true(lambda: session.status().feeds_unused == 3)
                    session.request_drain()
    assert used[0] == [0, 1, 2, 3, 4, 5]
    assert used[1] == [6, 7, 8, 9, 10, 11]


# -- with other events


async def test_a_recovery_during_a_drain(tmp_path: Path) -> None:
    """What the restored feeds have is not taken, and is in their state: neither the element of the run nor those before it."""
    loader, used, failures = Loader(), list[int](), [AbortedError("lost")]

    async def step(number: int) -> int:
        if number == 5 and failures:
            session.request_drain()
            raise failures.pop()
        used.append(number)
        return number

    creator = ah.ChiefSessionCreator(step, scaffold=ah.Scaffold(tracked={"data": loader}), checkpoint_dir=tmp_path)
    hooks = [ah.CheckpointSaverHook(every=ah.Every(steps=2), background=False)]
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=NO_BACKOFF) as session:
        await use(session.steps("step", feeds=loader, prefetch=2))
        assert session.status().recoveries == 1
    assert used == [0, 1, 2, 3, 4]
    assert loader.position == 4, "restored behind step 4: a resumed run takes 4 next"


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_a_generator_that_is_not_asked_again_is_said(caplog: pytest.LogCaptureFixture, prefetch: int) -> None:
    """What it would have taken elsewhere stays there."""
    caplog.set_level(logging.INFO, "aiohooks")

    async def step(number: int) -> None:
        session.request_drain()

    async with ah.AsyncMonitoredSession(step) as session:
        await use(session.steps(feeds=(one for one in range(100)), prefetch=prefetch))
    assert len([one for one in caplog.messages if "no other element is taken of <generator" in one]) == 1


async def test_a_recovery_without_a_checkpoint_uses_the_rest() -> None:
    """Elements of feeds without a state are used all the same."""
    source, failures = Source(), [AbortedError("lost")]

    async def step(number: int) -> int:
        if number == 1 and failures:
            await until_true(lambda: source.taken == 4)
            raise failures.pop()
        return number

    async with ah.AsyncMonitoredSession(step, recovery=NO_BACKOFF) as session:
        source.drain = session.request_drain
        used = [number async for number in session.steps("step", prefetch=2, feeds=source.plain())]
        assert session.status().recoveries == 1
    assert used == [0, 1, 2, 3]


async def test_a_drain_ends_a_pause() -> None:
    """What was taken is to be used; a pause that follows holds the runs, and a stop ends that."""
    async with ah.AsyncMonitoredSession(same) as session:
        session.pause("no space")
        run = await parked(session.run("same", {"number": 1}))
        session.request_drain()
        assert await run == 1
        assert session.pause_reason is None
        session.pause("again")
        run = await parked(session.run("same", {"number": 1}))
        await ticks(20)
        assert not run.done()
        session.request_stop("over")
        with pytest.raises(StopRequestedError, match="over"):
            await run


@pytest.mark.parametrize("phase", ["begin", "after_create_session", "before"])
async def test_a_drain_before_the_session_is_open(phase: str) -> None:
    """It opens, makes no step and ends cleanly."""
    ends = RecordingHook()

    async def drain(*_: object) -> None:
        session.request_drain("not now")

    session = ah.AsyncMonitoredSession(same, [ends, PhaseHook(phase, drain)])
    if phase == "before":
        await drain()
    async with session:
        await use(session.steps("same", feeds=range(9)))
    assert session.status().runs == 0
    assert session.stop_reason == "not now"
    assert ends.record[-2:] == [("hook", "end"), ("hook", "close")]


async def test_a_drain_while_the_session_ends() -> None:
    """It changes nothing but the reason, as a stop does."""

    async def drain(session: ah.Session) -> None:
        monitored.request_drain("too late")

    monitored = ah.AsyncMonitoredSession(same, [PhaseHook("end", drain)])
    async with monitored:
        pass
    assert (monitored.drain_reason, monitored.stop_reason) == ("too late", "too late")


async def test_a_session_that_waits_for_others_is_not_opened() -> None:
    """Nothing is under way in a worker that waits for its chief; so it is at a stop."""
    creator = ah.WorkerSessionCreator(same, variables=ah.Variables())
    session = ah.AsyncMonitoredSession(creator)
    opening = await parked(session.__aenter__())
    await ticks()
    session.request_drain("not now")
    with pytest.raises(StopRequestedError, match="not now"):
        await opening
    assert session.stop_reason == "not now"


async def test_a_recovery_during_a_drain_waits_for_others() -> None:
    """A run is under way, so its session is created again, however long an engine or a chief takes; a stop ends the wait."""
    gate, failures = asyncio.Event(), [AbortedError("lost")]
    graph = ah.Graph()

    @graph.train_op
    async def train() -> int:
        if failures:
            raise failures.pop()
        return 1

    class Creator(ah.ChiefSessionCreator):
        async def create_session(self) -> ah.Session:
            if not failures:
                await wait_for_others(gate.wait())
            return await super().create_session()

    async with ah.AsyncMonitoredSession(Creator(graph), recovery=NO_BACKOFF) as session:
        run = await parked(session.run("train"))
        await until_true(lambda: session.status().recoveries)
        session.request_drain()
        await ticks(20)
        assert not run.done()
        gate.set()
        assert await run == 1


# -- its end


async def test_it_is_limited(clock: ManualClock) -> None:
    """When the time is over it is a stop, whose reason says so; elements that were not used are known as at any stop."""
    held = asyncio.Event()

    async def step(number: int) -> int:
        if number == 1:
            await until_true(lambda: session.status().feeds_unused == 3)
            session.request_drain("enough", secs=20)
            session.request_drain("later", secs=30)
            await held.wait()
        return number

    async with ah.AsyncMonitoredSession(step) as session:
        steps = session.steps("step", feeds=range(9), prefetch=3)
        loop = asyncio.ensure_future(use(steps))
        await until_true(lambda: session.drain_reason)
        await ticks()
        clock.advance(19)
        await ticks(20)
        assert not session.should_stop()
        clock.advance(1)
        await ticks(20)
        assert session.should_stop()
        held.set()
        await loop
        assert steps.unused == [2, 3, 4]
    assert session.stop_reason == "enough, and the drain took longer than 20 s"


@pytest.mark.parametrize("first", [None, 20.0])
async def test_a_later_request_limits_it(clock: ManualClock, first: float | None) -> None:
    """Who ends a session that drains already can rely on the time limit; the reason is the first one."""
    async with ah.AsyncMonitoredSession(same) as session:
        session.request_drain("enough", secs=first)
        clock.advance(10)
        session.request_drain("later", secs=7)
        session.request_drain("and later", secs=8)
        session.pause("no space")
        clock.advance(6)
        await ticks()
        assert not session.should_stop()
        assert session.pause_reason == "no space", "only the first request ends a pause"
        clock.advance(1)
        assert session.should_stop()
    assert session.stop_reason == "enough, and the drain took longer than 7 s"
    assert clock.pending == 0


async def test_its_time_begins_when_the_session_opens(clock: ManualClock) -> None:
    """A request before that is kept, with its time limit."""
    session = ah.AsyncMonitoredSession(same)
    session.request_drain("not now", secs=20)
    clock.advance(100)
    async with session:
        clock.advance(19)
        await ticks(20)
        assert not session.should_stop()
        clock.advance(1)
        await ticks(20)
        assert session.should_stop()
    assert clock.pending == 0


async def test_a_stop_wins() -> None:
    """The loop ends as at any stop; a drain after it changes nothing."""
    async with ah.AsyncMonitoredSession(same) as session:
        steps = session.steps("same", feeds=range(9), prefetch=3)
        async for number in steps:
            if number == 1:
                await until_true(lambda: session.status().feeds_unused == 3)
                session.request_drain("drained")
                session.request_stop("stopped")
        assert steps.unused == [2, 3, 4]
    assert (session.stop_reason, session.drain_reason) == ("stopped", "drained")
    async with ah.AsyncMonitoredSession(same) as session:
        session.request_stop("stopped")
        session.request_drain("drained")
    assert (session.stop_reason, session.drain_reason) == ("stopped", None)


async def test_a_cancellation_wins() -> None:
    """It comes out of the loop, and the session has no clean end."""
    ends = RecordingHook()

    async def drained() -> None:
        async with ah.AsyncMonitoredSession(endless, [ends]) as session:
            session.request_drain()
            await session.run("endless")

    task = await parked(drained())
    await ticks(20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ("hook", "end") not in ends.record


async def test_a_failure_wins() -> None:
    """Of a background task too: its error comes out, and is the reason."""
    session = ah.AsyncMonitoredSession(endless)

    async def drained() -> None:
        async with session:
            session.request_drain()
            session.start_soon(fail, ZeroDivisionError("no"))
            await session.run("endless")

    with pytest.raises(ZeroDivisionError):
        await drained()
    assert session.stop_reason is not None
    assert "ZeroDivisionError" in session.stop_reason


def test_its_arguments() -> None:
    """The reason is a text, the time a number that is not negative."""
    wrong: Any = 3
    session = ah.AsyncMonitoredSession(same)
    with refused(ah.errors.InvalidArgumentError, "reason is 3", "str"):
        session.request_drain(wrong)
    with refused(ah.errors.InvalidArgumentError, "secs is -1"):
        session.request_drain(secs=-1)
    assert session.drain_reason is None


# -- in the coordinator, and what others see of it


async def test_waits_during_a_drain() -> None:
    """One for something new ends, and none begins; others continue, and so does what waits for a stop."""
    coord = ah.Coordinator()
    gate = asyncio.Event()
    new, other = await parked(coord.until(forever(), drain=True)), await parked(coord.until(gate.wait()))
    drain, stop = await parked(coord.wait_for_drain()), await parked(coord.wait_for_stop())
    assert not coord.should_drain()
    coord.request_drain("enough")
    with pytest.raises(StopRequestedError, match="enough"):
        await new
    assert await drain
    await ticks(20)
    assert not other.done()
    assert not stop.done()
    with pytest.raises(StopRequestedError, match="enough"):
        await coord.until(forever(), drain=True)
    assert await coord.wait_for_drain()
    assert (coord.should_drain(), coord.should_stop(), coord.drain_reason) == (True, False, "enough")
    assert repr(coord) == "<Coordinator draining: enough, tasks: none>"
    gate.set()
    await other
    coord.request_stop("over")
    assert await stop
    assert repr(coord) == "<Coordinator stopping: over, tasks: none>"


async def test_a_stop_ends_what_a_drain_ends() -> None:
    """`should_drain` is true, and those who wait for the drain are woken."""
    coord = ah.Coordinator()
    new, drain = await parked(coord.until(forever(), drain=True)), await parked(coord.wait_for_drain())
    coord.request_stop("over")
    assert coord.should_drain()
    assert await drain
    with pytest.raises(StopRequestedError, match="over"):
        await new


async def test_the_wait_for_a_drain_has_a_time_limit(clock: ManualClock) -> None:
    """It returns whether there is a drain."""
    coord = ah.Coordinator()
    wait = await parked(coord.wait_for_drain(5))
    clock.advance(5)
    assert not await wait


async def test_a_drain_can_be_cleared(clock: ManualClock) -> None:
    """With the stop; its time is not limited any more."""
    coord = ah.Coordinator()
    await coord.join()
    coord.request_drain("enough", secs=10)
    coord.clear_stop()
    assert (coord.should_drain(), coord.drain_reason, clock.pending) == (False, None, 0)
    clock.advance(20)
    await ticks()
    assert not coord.should_stop()
    coord.request_drain("again", secs=10)
    await coord.join()
    assert clock.pending == 0


async def _ends_by_an_error(coord: ah.Coordinator) -> None:
    await coord.wait_for_drain()
    raise OutOfRangeError("no more data")


async def _ends_by_a_wait(coord: ah.Coordinator) -> None:
    await coord.until(forever(), drain=True)


async def _reports_its_end(coord: ah.Coordinator) -> None:
    with coord.stop_on_exception():
        await coord.until(forever(), drain=True)


@pytest.mark.parametrize("produce", [_ends_by_an_error, _ends_by_a_wait, _reports_its_end])
async def test_the_clean_end_of_a_task_is_no_stop(produce: Callable[[ah.Coordinator], Awaitable[None]]) -> None:
    """Otherwise the first producer that ends would stop those who finish what they have under way; without a drain it does."""

    async def main(coord: ah.Coordinator) -> None:
        await produce(coord)

    coord = ah.Coordinator()
    task = coord.start_soon(main, coord)
    await ticks()
    coord.request_drain("enough")
    await asyncio.wait([task])
    await ticks()
    assert not coord.should_stop()
    coord.start_soon(fail, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await coord.join()


async def test_a_hook_drains_the_session() -> None:
    """Through its coordinator, the one after a recovery too."""

    async def drain(run_context: ah.SessionRunContext) -> None:
        assert run_context.coord is not None
        if run_context.global_step == 3:
            run_context.coord.request_drain("three steps")

    used = list[int]()
    graph_step = PhaseHook("before_run", drain)
    async with ah.AsyncMonitoredSession(same, [graph_step]) as session:
        await use(session.steps("same", feeds=range(9)), used)
    assert used == [0, 1, 2]


async def test_the_status_shows_it() -> None:
    """Until the stop, whose reason is the same."""
    async with ah.AsyncMonitoredSession(same) as session:
        assert session.status().drain_reason is None
        session.request_drain("enough")
        assert session.status().drain_reason == "enough"
        assert "\n  draining: enough" in str(session.status())
        session.request_stop()
        assert "draining" not in str(session.status())
        assert session.status().drain_reason == "enough"
