"""Feeds over recoveries: whoever restores the checkpoint restores the feeds, and what is lost is
said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.testing import choose, explore
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import do_nothing, recovery_policy, use_up
from tests.support.waiting import cancel_and_wait, forever, ticks

pytestmark = pytest.mark.every_python

COUNT = 12
ALL = tuple(range(1, COUNT + 1))


class Feed:
    """Feeds of the numbers from 1, with a position; one iterator for all loops."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        return self

    def __next__(self) -> dict[str, int]:
        if self.position == self.count:
            raise StopIteration
        self.position += 1
        return {"number": self.position}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Anew(Feed):
    """The same, with an iterator for each loop, that reads the position when it begins."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        for number in range(self.position, self.count):
            self.position = number + 1
            yield {"number": self.position}


class Async(Anew):
    """The same, async."""

    async def __aiter__(self) -> AsyncIterator[dict[str, int]]:
        for element in Anew.__iter__(self):
            await asyncio.sleep(0)
            yield element


Fail = Callable[[str, int], Awaitable[None]]


def fails_once(*places: tuple[str, int]) -> Fail:
    """Return a function that raises once for each of these places and numbers."""
    left = list(places)

    async def fail(place: str, number: int) -> None:
        if (place, number) in left:
            left.remove((place, number))
            raise ah.UnavailableError(f"{place} {number}")

    return fail


def calling(fail: Fail, phase: str, place: str) -> PhaseHook:
    """Return a hook that calls `fail` with the place and the step."""

    async def call(context: ah.SessionRunContext, *_: object) -> None:
        await fail(place, context.global_step)

    return PhaseHook(phase, call)


def training(fail: Fail, directory: Path | None = None, **tracked: Any) -> ah.ChiefSessionCreator:
    """Make a creator of a graph whose variable `seen` has the elements of the steps that are
    kept.
    """
    graph = ah.Graph()
    graph.placeholder("number")
    graph.variable("seen", ())

    @graph.train_op(updates="seen")
    async def train(number: int, seen: tuple[int, ...]) -> tuple[int, ...]:
        await ticks(3)
        await fail("step", number)
        return (*seen, number)

    return ah.ChiefSessionCreator(
        graph, scaffold=ah.Scaffold(tracked=tracked), checkpoint_dir=directory
    )


def saving(every: int, **options: Any) -> ah.CheckpointSaverHook:
    return ah.CheckpointSaverHook(every=ah.Every(steps=every), **options)


PLACES = {
    "before_run": [("before_run", 9)],
    "step": [("step", 9)],
    "after_run, before the save": [("after_run", 9)],
    "after_run, behind the save": [("behind", 9)],
    "task": [("task", 9)],
    "again and again": [
        ("step", 9),
        ("step", 6),
        ("behind", 9),
        ("before_run", 9),
        ("after_run", 10),
        ("step", 12),
    ],
    "the first": [("step", 1), ("after_run", 1)],
    "the last": [("step", 12), ("behind", 12)],
}
HOW = [
    (0, 5, False),
    (2, 5, False),
    (20, 1, True),
    (2, 9, True),
    (0, 1, False),
]


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", [Feed, Anew, Async])
@pytest.mark.parametrize("how", HOW, ids=str)
async def test_each_element_makes_one_step_of_what_is_kept(
    tmp_path: Path, places: list[tuple[str, int]], kind: type[Feed], how: tuple[int, int, bool]
) -> None:
    """Wherever runs failed, whatever was taken ahead or saved, in order, once;
    and so is what is saved.
    """
    prefetch, every, background = how
    fail_once = fails_once(*places)
    tasks = [place for place in places if place[0] == "task"]

    async def fail(place: str, number: int) -> None:
        if place == "before_run" and ("task", number) in tasks:
            tasks.clear()
            session.coord.start_soon(fail_once, "task", number)  # type: ignore[arg-type]
            await forever()
        await fail_once(place, number)

    feed = kind()
    policy = recovery_policy(on_lost_feeds="raise")
    behind = ah.configure(calling(fail, "after_run", "behind"), order=200)
    before = calling(fail, "before_run", "before_run")
    after = calling(fail, "after_run", "after_run")
    hooks: list[Any] = [before, after, behind, saving(every, background=background)]
    creator = training(fail, tmp_path, feed=feed)
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=policy) as session:
        await use_up(session.steps("train", feeds=feed, prefetch=prefetch))
        assert await session.run("seen") == ALL
        assert (session.global_step.latest.step, session.status().recoveries) == (
            COUNT,
            len(places),
        )
    async with ah.checkpoint.Saver(tmp_path, read_only=True) as saver:
        restored = await saver.restore()
    assert restored is not None
    assert restored.state["tracked"]["feed"] == {"position": COUNT}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("count", [2, 3, COUNT])
@pytest.mark.parametrize("cancelled", [(0,), (1,), (2,), (1, 0), (0, 2)])
async def test_an_element_is_used_once_where_loops_share_feeds(
    prefetch: int, count: int, cancelled: tuple[int, ...]
) -> None:
    """Some of three loops over the same feeds are cancelled: what the others have taken does not
    come again, also at the end of the feeds, and the state of the session skips nothing.
    """
    feed = Feed(count)
    holds = asyncio.Event()
    skipped: list[tuple[int, ...]] = []

    async def wait(context: ah.SessionRunContext) -> None:
        await holds.wait()

    async def use(session: ah.AsyncMonitoredSession) -> None:
        await use_up(session.steps("train", feeds=feed, prefetch=prefetch))

    creator = training(fails_once(), feed=feed)
    async with ah.session.AsyncSingularMonitoredSession(
        creator, [PhaseHook("before_run", wait)]
    ) as session:

        async def check() -> None:
            await ticks(20)
            raw = session.raw_session()
            assert raw is not None
            state = raw.state_dict()
            counted = range(1, state["tracked"]["feed"]["position"] + 1)
            skipped.append(tuple({*counted} - {*state["variables"]["seen"]}))

        loops = [asyncio.create_task(use(session)) for _ in range(3)]
        await check()
        for number in cancelled:
            await cancel_and_wait(loops[number])
            await check()
        holds.set()
        await asyncio.gather(*loops, return_exceptions=True)
        await check()
        await use(session)
        seen = await session.run("seen")
    assert sorted(seen) == [*range(1, count + 1)]
    assert skipped == [()] * len(skipped)
    assert feed.position == count


async def test_loops_that_share_feeds_use_them_in_their_order(tmp_path: Path) -> None:
    """The run of the first element is cancelled while another loop waits for its turn with the
    second: it makes a step with the first before. So a recovery repeats no step that is kept.
    """
    feed, hold = Feed(3), [True]

    async def wait(context: ah.SessionRunContext) -> None:
        if hold:
            await forever()

    creator = training(fails_once(("step", 1)), tmp_path, feed=feed)
    hooks = [PhaseHook("before_run", wait), saving(1, background=False)]
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=recovery_policy()) as session:
        loops = [asyncio.create_task(use_up(session.steps("train", feeds=feed))) for _ in range(2)]
        await ticks(20)
        hold.clear()
        await cancel_and_wait(loops[0])
        await loops[1]
        assert await session.run("seen") == (1, 2, 3)


class Slow(Async):
    """The same, whose elements may take time."""

    async def __aiter__(self) -> AsyncIterator[dict[str, int]]:
        for element in Anew.__iter__(self):
            await sleep(choose(0, 0.01))
            yield element


async def train_beside_requests(folder: Path) -> None:
    """Use up tracked feeds with time limits, beside requests that have time limits, and that
    recover.
    """
    feed = Slow(4)
    kept = list[tuple[int, ...]]()
    graph = ah.Graph()
    graph.placeholder("number")
    graph.variable("made", ())

    @graph.train_op(updates="made")
    async def train(made: tuple[int, ...], number: int) -> tuple[int, ...]:
        await sleep(choose(0, 0.01))
        return (*made, number)

    @graph.operation
    async def look(made: tuple[int, ...]) -> None:
        if choose(False, True, name="lost"):
            raise ah.AbortedError("lost")

    @ah.hook("after_create_session")
    async def connect(session: ah.Session, coord: ah.Coordinator) -> None:
        await sleep(choose(0, 0.01))

    @ah.hook("end")
    async def keep(session: ah.Session) -> None:
        kept.append(session.variables.snapshot()["made"])

    async def request() -> None:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(choose(None, 0.01, 0.015)):
                    await session.run("look")

    policy = recovery_policy(max_attempts=1000, backoff=ah.Backoff(0.01, jitter=False))
    creator = ah.ChiefSessionCreator(
        graph, checkpoint_dir=folder, scaffold=ah.Scaffold(tracked={"feed": feed})
    )
    hooks = [ah.CheckpointSaverHook(save_on_end=False), connect, keep]
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=policy) as session:
        requests = [asyncio.create_task(request()) for _ in range(2)]
        steps = session.steps("train", feeds=feed)
        ended = False
        while not ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(choose(None, 0.015)):
                    await use_up(steps)
                    ended = True
        await asyncio.gather(*requests)
    assert kept == [(1, 2, 3, 4)]


async def in_a_new_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:
        await train_beside_requests(Path(folder))


@pytest.mark.asyncio(loop_factories=["asyncio"])  # what is explored has a loop of its own
async def test_a_loop_uses_each_element_once_beside_recoveries_of_other_tasks() -> None:
    """Recoveries of requests that run beside the loop, and are cancelled anywhere: it does not end
    early, nor wait forever.
    """
    await explore(in_a_new_folder, seeds=50, disturb=["order", "choice"])


# -- what cannot be set back


async def lose_at_nine(directory: Path, kind: str, **options: Any) -> tuple[int, ...]:
    """Make a training whose run of element 9 fails once, with a checkpoint at step 5; return the
    elements of its steps.
    """
    queue = asyncio.Queue[Any]()
    for element in (elements := list(Feed())):
        queue.put_nowait(element)
    tracked = {"feed": Feed()} if kind == "beside tracked" else {}
    creator = training(fails_once(("step", 9)), directory, **tracked)
    policy = recovery_policy(**options)
    async with ah.AsyncMonitoredSession(
        creator, [saving(5, background=False)], recovery=policy
    ) as session:
        for feed in tracked.values():
            await anext(aiter(session.steps("train", feeds=feed)))
            del elements[0]
        if kind == "by hand":
            for element in elements:
                await session.run("train", element)
        else:
            producer = session.start_soon(do_nothing) if kind == "queue" else None
            feeds: Any = {"queue": queue, "not tracked": Feed()}.get(kind, elements)
            await use_up(session.steps("train", feeds=feeds, producer=producer))
        seen: tuple[int, ...] = await session.run("seen")
    return seen


KINDS = pytest.mark.parametrize(
    "kind", ["list", "queue", "not tracked", "beside tracked", "by hand"]
)


@KINDS
async def test_steps_whose_feeds_are_gone_are_counted(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The recovery goes back, and says at WARNING how many steps, and with them feeds, are gone,
    and what to do.
    """
    assert await lose_at_nine(tmp_path, kind) == (1, 2, 3, 4, 5, 9, 10, 11, 12)
    (record,) = [record for record in caplog.records if "went back" in record.getMessage()]
    assert record.levelno == logging.WARNING
    for part in (
        "from step 8 to step 5",
        "3 steps are undone, and the feeds are gone",
        "state_dict",
    ):
        assert part in record.getMessage()


@KINDS
async def test_lost_feeds_may_end_the_session(tmp_path: Path, kind: str) -> None:
    """`on_lost_feeds="raise"`: with what is gone, and the failure behind it; also if the policy
    recovers from every error.
    """
    with refused(
        ah.errors.FeedsLostError,
        "from step 8 to step 5",
        "3 steps are undone, and the feeds are gone",
    ) as caught:
        await lose_at_nine(tmp_path, kind, on_lost_feeds="raise", on=(Exception,))
    assert isinstance(caught.value.__cause__, ah.UnavailableError)


@pytest.mark.parametrize(
    ("failing", "undone"), [(7, "2 steps are undone"), (6, "1 step is undone")]
)
async def test_steps_without_feeds_are_undone_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: int, undone: str
) -> None:
    """Nothing is lost, as they are made again; `on_lost_feeds` has nothing to raise."""
    fail = fails_once(("step", failing))

    async def step(global_step: int) -> None:
        await fail("step", global_step)

    hooks = [saving(5, background=False), ah.StopAtStepHook(last_step=9)]
    policy = recovery_policy(on_lost_feeds="raise")
    creator = ah.ChiefSessionCreator(step, checkpoint_dir=tmp_path)
    async with ah.AsyncMonitoredSession(creator, hooks, recovery=policy) as session:
        await use_up(session.steps())
    went_back = f"went back from step {failing} to step 5"
    (message,) = [text for text in caplog.messages if went_back in text]
    assert message.endswith(undone)
