"""The loop over runs and its feeds: in order, each used once, none lost without a word, also if
taken ahead or by a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.testing import RecordingHook, explore
from tests.support.checks import invalid, logged_errors
from tests.support.hooks import PhaseHook
from tests.support.sessions import (
    Loader,
    Source,
    counting,
    doubling,
    outcome,
    same,
    use_up,
)
from tests.support.waiting import forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python

KINDS = pytest.mark.parametrize("kind", Source.KINDS)


# -- what a step is fed with


async def test_the_global_step_does_not_change_how_a_step_is_fed() -> None:
    """One parameter, besides the global step, is fed with the element, whatever that is."""

    async def add(batch: Any, global_step: int) -> dict[str, Any]:
        return {"got": (batch, global_step)}

    async with ah.AsyncMonitoredSession(add) as session:
        feeds = [7, {"batch": 8}, {"other": 9}, None]
        got = [result async for result in session.steps("got", feeds=feeds)]
    assert got == [(7, 0), ({"batch": 8}, 1), ({"other": 9}, 2), (None, 3)]


def queue_of(count: int) -> asyncio.Queue[int]:
    """Return a queue with so many numbers."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    for number in range(count):
        queue.put_nowait(number)
    return queue


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (queue_of, {}),
        (lambda count: iter(range(count)), {}),
        (lambda count: iter(range(count)), {"prefetch": 2}),
        (lambda count: Source(count).numbers(), {}),
        (lambda count: Source(count).numbers(), {"prefetch": 2}),
        (Loader, {}),
        (Loader, {"prefetch": 3}),
    ],
)
async def test_another_loop_over_the_same_feeds_continues_with_them(
    make: Any, options: dict[str, Any]
) -> None:
    """Whatever a time limit around each loop cuts off, every element makes one step, in order; none
    is lost with its loop.
    """

    async def program() -> None:
        feeds = make(12)
        used = list[int]()

        async def step(numbers: Any) -> dict[str, Any]:
            await sleep(0.4)
            return {"used": numbers}

        async with ah.AsyncMonitoredSession(step) as session:
            while len(used) < 12:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        async for numbers in session.steps("used", feeds=feeds, **options):
                            used.append(numbers)
        assert used == [*range(12)]

    await explore(program, seeds=20, disturb=["order"])


@pytest.mark.parametrize(
    "feed",
    [list(range(20_000)), {"a": 1, "x" * 50_000: 2}, "x" * 50_000],
    ids=["list", "key", "text"],
)
async def test_a_message_is_short_however_large_the_feed(feed: Any) -> None:
    """It says what to do; the value is shown in part."""

    async def step(a: int, b: int) -> None: ...

    async with ah.AsyncMonitoredSession(step) as session:
        with pytest.raises(ah.errors.FetchError) as caught:
            await anext(session.steps(feeds=[feed]))
    assert 20 < len(str(caught.value)) < 2_100


# -- taken ahead, or by a thread


@KINDS
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [OSError, ah.OutOfRangeError])
async def test_a_failure_comes_out_of_the_step_that_would_have_got_the_element(
    kind: str, prefetch: int, error: type[Exception]
) -> None:
    """The steps before it are made; the error is the same object, and ends the session cleanly or
    not as everywhere.
    """
    raised = error("no more data")
    hook = RecordingHook(fetches="same")
    ended = list[int]()

    def fail(taken: int) -> None:
        if taken == 3:
            raise raised

    session = ah.AsyncMonitoredSession(same, [hook])

    async def use(_: object) -> None:
        await use_up(session.steps("same", prefetch=prefetch, **Source(9, fail).feeds(kind)))
        ended.append(1)

    assert await outcome(session, use) is (raised if error is OSError else None)
    assert (hook.results, ended, "end" in hook.phases()) == ([0, 1], [], error is not OSError)


@KINDS
async def test_a_stop_keeps_what_was_not_used(kind: str) -> None:
    """`prefetch` elements are taken and no more. They are in `unused` and in the status, also after
    the end of the session, which closes the iterator.
    """
    source = Source()
    async with ah.AsyncMonitoredSession(same) as session:
        steps = session.steps("same", prefetch=3, **source.feeds(kind))
        async for batch in steps:
            if batch == 4:
                await until_true(lambda: session.status().feeds_unused == 3)
                await ticks(20)
                assert source.taken == 8
                session.request_stop("enough")
    assert (source.closed, steps.unused, session.status().feeds_unused) == (True, [5, 6, 7], 3)
    assert "elements of feeds taken and not used: 3" in str(session.status())


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
    assert [thread_id == threading.get_ident() for thread_id in threads] == [True, False]


@pytest.mark.parametrize("count", [2, 3], ids=["the last", "one before the end"])
@pytest.mark.parametrize("phase", ["before_run", "step", "after_run"])
async def test_an_element_is_used_by_the_commit(phase: str, count: int) -> None:
    """A run that fails before it gives the element back, also where the feeds have ended; one that
    fails later has used it.
    """
    again = False

    async def fail(place: str) -> None:
        await ticks(20)
        if place == phase and session.status().runs == 2 and not again:
            raise OSError("not yet")

    async def step(batch: int) -> int:
        await fail("step")
        return batch

    hooks = [
        PhaseHook(place, lambda *_, place=place: fail(place))
        for place in ("before_run", "after_run")
    ]
    async with ah.AsyncMonitoredSession(step, hooks) as session:
        steps = session.steps("step", feeds=range(count), prefetch=1)
        with pytest.raises(OSError, match="not yet"):
            await use_up(steps)
        used = 2 if phase == "after_run" else 1
        assert (session.global_step.latest.step, steps.unused[:1]) == (
            used,
            [*range(used, count)][:1],
        )
        again = True
        assert [batch async for batch in steps] == [*range(used, count)]


# -- steps in a thread


async def test_a_step_in_a_thread() -> None:
    """Other tasks run while it computes; a cancel comes out when the thread has returned, and the
    run has changed nothing.
    """
    computing = threading.Event()
    released = threading.Event()

    def train(batch: int, scale: int = 10) -> dict[str, int]:
        computing.set()
        released.wait(60)
        return {"loss": scale * batch}

    async with ah.AsyncMonitoredSession(ah.in_thread(train)) as session:
        running = asyncio.create_task(session.run(["loss", "train"], {"batch": 2}))
        await until_true(computing.is_set)
        released.set()
        assert await running == [20, {"loss": 20}]
        computing.clear()
        released.clear()
        running = asyncio.create_task(session.run(["loss", "train"], {"batch": 2}))
        await until_true(computing.is_set)
        running.cancel()
        await ticks(10)
        assert not running.done()
        released.set()
        await asyncio.wait([running])
        assert (running.cancelled(), session.global_step.latest.step) == (True, 1)
    assert await ah.in_thread(train)(3) == {"loss": 30}


# -- what is refused


def test_only_blocking_functions_go_into_a_thread() -> None:
    """A coroutine function is refused, and so is what cannot be called."""
    with invalid("the step is 5"):
        ah.in_thread(5)  # type: ignore[arg-type]
    with invalid("is a coroutine function", "leave out in_thread"):
        ah.in_thread(same)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"feeds": 5}, "feeds is 5; give something to iterate over, sync or async"),
        ({"feeds": object()}, "feeds is <object object"),
        ({"feeds": {"batch": 1}}, "feeds is {'batch': 1}; give something to iterate over"),
        ({"feeds": "rows"}, "feeds is 'rows'; give something to iterate over"),
        ({"prefetch": -1, "feeds": [1]}, "prefetch is -1"),
        ({"prefetch": True, "feeds": [1]}, "prefetch is True"),
        ({"prefetch": 1}, "feeds is None"),
        (
            {"prefetch": 1, "feeds": asyncio.Queue()},
            "prefetch and thread are for feeds to iterate over",
        ),
        ({"thread": True, "feeds": asyncio.Queue()}, "are for feeds to iterate over"),
        (
            {"producer": "a task", "feeds": Source().numbers()},
            "session.until(queue.get(), producer=...)",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str) -> None:
    """The error has the values and says what to do: a mapping is one element and not many."""
    async with counting() as session:
        if "producer" in options:
            options = {**options, "producer": session.start_soon(ticks)}
        with invalid(says):
            session.steps("train", **options)


# -- feeds that fail as the session stops


def failing_loader(stop: Any, error: Exception) -> Iterator[int]:
    """Give an element, then fail for the reason for which the session is stopped."""
    yield 1
    stop("SIGTERM")
    raise error


async def failing_stream(stop: Any, error: Exception) -> AsyncIterator[int]:
    for element in failing_loader(stop, error):
        yield element


def failing_when_closed(stop: Any, error: Exception) -> Iterator[int]:
    """Give elements, and fail when the stop closes the generator."""
    try:
        yield 1
        stop("SIGTERM")
        yield from range(9)
    finally:
        raise error


LOGGED = {
    failing_loader: "while the session stops; it ends normally",
    failing_stream: "while the session stops; it ends normally",
    failing_when_closed: "closing the feeds",
}


@pytest.mark.parametrize(
    ("feeds", "thread", "prefetch"),
    [
        (failing_loader, False, 0),
        (failing_loader, False, 2),
        (failing_loader, True, 0),
        (failing_loader, True, 2),
        (failing_stream, False, 0),
        (failing_stream, False, 2),
        (failing_when_closed, False, 2),
        (failing_when_closed, True, 0),
        (failing_when_closed, True, 2),
    ],
)
async def test_feeds_that_fail_after_a_stop_end_the_session_as_usual(
    feeds: Any, thread: bool, prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever stopped the session has often stopped what feeds it, too: `end` is called, so that
    nothing is lost, the error is logged, and what reads the feeds ends.
    """
    error = RuntimeError("a worker of the loader was killed")
    hook = RecordingHook()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        source = feeds(session.request_stop, error)
        await use_up(session.steps("batch", feeds=source, prefetch=prefetch, thread=thread))

    session = ah.AsyncMonitoredSession(same, [hook], stop_grace_period_secs=0.1)
    assert await outcome(session, use) is None
    assert (session.stop_reason, hook.phases()[-2:]) == ("SIGTERM", ["end", "close"])
    assert logged_errors(caplog) == [error]
    assert LOGGED[feeds] in caplog.text


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_feeds_that_a_stop_ends_cleanly_are_no_error(
    prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait of the feeds that a stop ends is a clean end, also if the stop came just before it."""

    class Source:
        def __aiter__(self) -> Source:
            return self

        async def __anext__(self) -> int:
            session.request_stop("SIGTERM")
            await session.until(forever())
            return 1

    async def use(session: ah.AsyncMonitoredSession) -> None:
        await use_up(session.steps("batch", feeds=Source(), prefetch=prefetch))

    session = ah.AsyncMonitoredSession(same)
    assert await outcome(session, use) is None
    assert session.stop_reason == "SIGTERM"
    assert caplog.messages == []


@pytest.mark.parametrize("ending", ["raises", "yields"])
async def test_feeds_that_swallow_their_cancellation_delay_no_end(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Their cleanup raises another error, or they give another element, although a stop has
    cancelled them: what reads them ends all the same.
    """
    error, hook = ConnectionError("the connection is lost"), RecordingHook()

    async def numbers() -> AsyncIterator[int]:
        yield 1
        session.request_stop("SIGTERM")
        try:
            await forever()
        except asyncio.CancelledError:
            if ending == "raises":
                raise error from None
        yield 2
        await forever()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        await use_up(session.steps("batch", feeds=numbers()))

    session = ah.AsyncMonitoredSession(same, [hook])
    assert await outcome(session, use) is None
    assert hook.phases()[-2:] == ["end", "close"]
    assert logged_errors(caplog) == ([error] if ending == "raises" else [])
    assert "still active" not in caplog.text


@pytest.mark.parametrize("task_group", [asyncio.TaskGroup, anyio.create_task_group])
@pytest.mark.parametrize("ending", ["stop", "drain", "break", "failure"])
async def test_feeds_with_a_task_group_around_their_yield(
    ending: str, task_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """When such a generator is closed, the group raises the GeneratorExit in a group of errors,
    which is no failure. What a task of the group raises meanwhile is logged.
    """
    error, hook = ConnectionError("the connection is lost"), RecordingHook()

    async def fail_at_the_end() -> None:
        try:
            await forever()
        finally:
            raise error

    async def numbers() -> AsyncIterator[int]:
        async with task_group() as group:
            start = getattr(group, "create_task", None)
            if ending == "failure":
                start(fail_at_the_end()) if start else group.start_soon(fail_at_the_end)
            for number in range(100):
                yield number
                await asyncio.sleep(0)

    async def use(session: ah.AsyncMonitoredSession) -> None:
        async for _ in session.steps("batch", feeds=numbers()):
            if ending == "drain":
                session.request_drain("enough")
            elif ending == "break":
                break
            else:
                session.request_stop("enough")

    assert await outcome(ah.AsyncMonitoredSession(same, [hook]), use) is None
    assert hook.phases()[-2:] == ["end", "close"]
    logged: Any = logged_errors(caplog)
    assert len(logged) == (ending == "failure")
    if logged:
        assert logged[0].exceptions == (error,)


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("continues", [False, True])
async def test_a_prefetched_error_outlives_the_loop_that_has_not_got_it(
    thread: bool, continues: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another loop over the same feeds gets it, and only once; without one the end logs it."""
    error = OSError("the disk is gone")

    def numbers() -> Generator[int]:
        yield 1
        raise error

    async with ah.AsyncMonitoredSession(same) as session:
        feeds = numbers()
        async for _ in session.steps("batch", feeds=feeds, prefetch=3, thread=thread):
            break
        await until_true(lambda: inspect.getgeneratorstate(feeds) == inspect.GEN_CLOSED)
        await ticks(20)
        if continues:
            with pytest.raises(OSError, match="the disk is gone"):
                await use_up(session.steps("batch", feeds=feeds, prefetch=3, thread=thread))
            await until_true(lambda: not session.status().background)
            await use_up(session.steps("batch", feeds=feeds, prefetch=3))
    assert logged_errors(caplog) == ([] if continues else [error])


class Numbers:
    """A loader of the numbers from 1."""

    def __init__(self, last: int = 10**9) -> None:
        self.position = 0
        self.last = last

    def __iter__(self) -> Iterator[int]:
        while self.position < self.last:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


async def around(loader: Numbers) -> AsyncIterator[int]:
    """Give the elements of a loader, as feeds without a state do."""
    for element in loader:
        yield element


WRAPS = pytest.mark.parametrize(
    "wrap",
    [around, lambda loader: map(abs, loader), lambda loader: (number for number in loader)],
    ids=["async", "map", "generator"],
)


def counting_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about tracked objects that feeds may read."""
    return [message for message in caplog.messages if "may read a tracked object" in message]


@WRAPS
@pytest.mark.parametrize("thread", [False, True])
async def test_feeds_around_a_tracked_loader_skip_nothing(
    tmp_path: Path, wrap: Any, thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The state of a tracked loader counts the elements that it has given. Feeds that may read it
    cannot be prefetched, so each save counts the elements of the steps; a resumed run skips none.
    """
    used: list[int] = []
    for last in (3, 7, 12):
        loader = Numbers(11)
        creator = ah.ChiefSessionCreator(
            same, scaffold=ah.Scaffold(tracked={"data": loader}), checkpoint_dir=tmp_path
        )
        saver = ah.CheckpointSaverHook(every=ah.Every(steps=1), save_on_end=False)
        async with ah.AsyncMonitoredSession(
            creator, [saver, ah.StopAtStepHook(last_step=last)]
        ) as session:
            in_thread = thread and wrap is not around
            feeds = wrap(loader)
            with invalid("prefetch is 2", "may read a tracked object"):
                session.steps("same", feeds=feeds, prefetch=2, thread=in_thread)
            await use_up(session.steps("same", feeds=feeds, thread=in_thread), used)
    assert used == [*range(1, 12)]
    assert counting_warnings(caplog) == []


async def test_a_state_that_counts_an_unused_element_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run has an element, or has failed with it, when the state of the session is taken: a
    warning names the feeds that may have read the element of a tracked object.
    """
    loader = Numbers()
    holds = asyncio.Event()

    async def fail(number: int) -> int:
        await holds.wait()
        raise OSError("not yet")

    creator = ah.ChiefSessionCreator(fail, scaffold=ah.Scaffold(tracked={"data": loader}))
    async with ah.session.AsyncSingularMonitoredSession(creator) as session:
        raw = session.raw_session()
        assert raw is not None
        feeds = (number for number in loader)
        steps = session.steps(feeds=feeds)
        loop = await parked(anext(steps))
        raw.state_dict()
        assert len(counting_warnings(caplog)) == 1
        holds.set()
        with pytest.raises(OSError, match="not yet"):
            await loop
        raw.state_dict()
    *_, warning = counting_warnings(caplog)
    assert "skips it" in warning
    assert "give the object itself as feeds=" in warning


async def test_all_feeds_are_taken_in_one_task() -> None:
    """A generator of feeds may have a time limit around its `yield`, which belongs to a task."""
    tasks: set[Any] = set()

    async def feeds() -> AsyncIterator[int]:
        async with asyncio.timeout(1000):
            for number in range(4):
                await asyncio.sleep(0)
                tasks.add(asyncio.current_task())
                yield number

    async with doubling() as session:
        assert [loss async for loss in session.steps("loss", feeds=feeds())] == [0, 2, 4, 6]
    assert len(tasks) == 1
