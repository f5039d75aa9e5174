"""Rows about groups of hooks: a call of a group, a run beside awaiting everything in turn, a hook
in the background.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohooks as ah
from tests.benchmarks.measure import Counts, Figure, Setup, compared, imported, repeated
from tests.benchmarks.rows_hooks import HOOKS, WAIT_SECS, NoOpHook


class Events:
    """A lifecycle of another author's: it derives from nothing of ours."""

    async def on_event(self, event: str) -> None:
        """Called for each event."""


class Silent(Events):
    """Cannot wait."""

    async def on_event(self, event: str) -> None:
        pass


class Seldom(Events):
    """May wait, and does not."""

    async def on_event(self, event: str) -> None:
        if event == "failed":
            await asyncio.sleep(0)


class Suspending(Events):
    """Gives the loop a turn."""

    async def on_event(self, event: str) -> None:
        await asyncio.sleep(0)


def calling(hooks: list[Events]) -> Callable[[], Awaitable[None]]:
    """Return a function that calls a group of these hooks once."""
    call: Any = ah.compose(Events, hooks).on_event
    return partial(call, "started")


def bar(new: float, old: float, uvloop: float) -> float:
    """Choose the bar: of Python 3.12 and newer, on which tasks start eagerly, of 3.11, or of
    uvloop.
    """
    if type(asyncio.get_running_loop()).__module__.partition(".")[0] == "uvloop":
        return uvloop
    return new if sys.version_info >= (3, 12) else old


@asynccontextmanager
async def against_aiosignal(counts: Counts) -> AsyncIterator[Setup]:
    """Hooks that cannot wait: all that a group promises, beside a dispatcher that awaits one after
    the other.
    """
    aiosignal = imported("aiosignal", "aiosignal")
    hooks: list[Events] = [Silent() for _ in range(HOOKS)]
    signal = aiosignal.Signal(None)
    signal.extend(hook.on_event for hook in hooks)
    signal.freeze()
    yield compared(
        "a group of 5 hooks that cannot wait / aiosignal calls the same five in turn",
        1.1,
        repeated(calling(hooks)),
        repeated(partial(signal.send, "started")),
    )


@asynccontextmanager
async def silent_group(counts: Counts) -> AsyncIterator[Setup]:
    """Hooks that do not wait, beside gathering them, and awaiting them in turn."""
    hooks: list[Events] = [Silent() for _ in range(HOOKS)]
    seldom: list[Events] = [Seldom() for _ in range(HOOKS)]

    async def gathered(hooks: list[Events]) -> None:
        await asyncio.gather(*[hook.on_event("started") for hook in hooks])

    async def in_turn() -> None:
        for hook in hooks:
            await hook.on_event("started")

    yield Setup(
        {
            "group": repeated(calling(hooks)),
            "gather": repeated(partial(gathered, hooks)),
            "in turn": repeated(in_turn),
            "seldom": repeated(calling(seldom)),
            "seldom gathered": repeated(partial(gathered, seldom)),
        },
        [
            Figure(
                "a group of 5 hooks that cannot wait / asyncio.gather of the same five",
                0.06,
                "group",
                "gather",
            ),
            Figure("the same / awaiting the five in turn", None, "group", "in turn"),
            Figure(
                "a group of 5 hooks with an await that is not reached / asyncio.gather of the same"
                " five",
                bar(0.3, 0.9, 0.45 if sys.version_info >= (3, 12) else 0.95),
                "seldom",
                "seldom gathered",
            ),
        ],
    )


@asynccontextmanager
async def suspending_group(counts: Counts) -> AsyncIterator[Setup]:
    """Hooks that suspend once, beside starting them in an `asyncio.TaskGroup`."""
    hooks: list[Events] = [Suspending() for _ in range(HOOKS)]

    async def task_group() -> None:
        async with asyncio.TaskGroup() as tasks:
            for hook in hooks:
                tasks.create_task(hook.on_event("started"))

    yield compared(
        "a group of 5 hooks that suspend once / an asyncio.TaskGroup of the same five",
        bar(0.95, 1.05, 1.1),
        repeated(calling(hooks)),
        repeated(task_group),
    )


@asynccontextmanager
async def making_groups(counts: Counts) -> AsyncIterator[Setup]:
    """Making a group, as programs do for each request, beside asking for the signatures of its
    hooks; and of many hooks.
    """
    few, many = 100, 4_000

    async def make(number: int) -> None:
        ah.compose(Events, [Silent() for _ in range(number)])

    async def signatures() -> None:
        for _ in range(HOOKS):
            inspect.signature(Silent.on_event)

    yield Setup(
        {
            "group": repeated(partial(make, HOOKS)),
            "signatures": repeated(signatures),
            "few": repeated(partial(make, few)),
            "many": repeated(partial(make, many)),
        },
        [
            Figure(
                "making a group of 5 hooks of a class seen before / five calls of"
                " inspect.signature",
                3.0,
                "group",
                "signatures",
            ),
            Figure(
                "one hook of a group of 4,000 / of 100",
                1.5,
                lambda times: times["many"] / many,
                lambda times: times["few"] / few,
            ),
        ],
    )


async def step(batch: float) -> float:
    """The step of a session."""
    return batch


@asynccontextmanager
async def run_in_turn(counts: Counts) -> AsyncIterator[Setup]:
    """A run with hooks that do nothing, beside awaiting the step and the ten coroutines one after
    the other.
    """
    hooks = [NoOpHook() for _ in range(HOOKS)]
    context = ah.SessionRunContext(ah.SessionRunArgs(), ah.Session(ah.Graph()))
    values = ah.SessionRunValues(None, None, None)

    async def by_hand() -> None:
        for hook in hooks:
            await hook.before_run(context)
        await step(1.0)
        for hook in hooks:
            await hook.after_run(context, values)

    async with ah.AsyncMonitoredSession(step, hooks) as session:
        yield compared(
            "a run with 5 no-op hooks / awaiting the step and the ten coroutines in turn",
            7.0,
            repeated(partial(session.run, "step", {"batch": 1.0})),
            repeated(by_hand),
        )


class Observer(ah.SessionRunHook):
    """Takes as long for each run as the step itself."""

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await asyncio.sleep(WAIT_SECS)


async def slow_feeds(number: int) -> AsyncIterator[float]:
    """Feeds that take as long as the step."""
    for _ in range(number):
        await asyncio.sleep(WAIT_SECS)
        yield 1.0


async def fed_step(batch: float) -> float:
    """A step that waits, with what it is fed."""
    await asyncio.sleep(WAIT_SECS)
    return batch


@asynccontextmanager
async def feeds_ahead(counts: Counts) -> AsyncIterator[Setup]:
    """A loop whose feeds and observer take as long as its step, all of them overlapping, beside the
    steps alone.
    """
    steps = min(100, counts.woken)  # fewer where it is only tried

    async def loop() -> None:
        hooks: list[Any] = [ah.configure(Observer(), background=True)]
        async with ah.AsyncMonitoredSession(fed_step, hooks) as session:
            async for _ in session.steps(feeds=slow_feeds(steps), prefetch=1):
                pass

    async def alone() -> None:
        for _ in range(steps):
            await fed_step(1.0)

    async def in_turn() -> None:
        async for batch in slow_feeds(steps):
            await fed_step(batch)
            await asyncio.sleep(WAIT_SECS)

    yield Setup(
        {"loop": repeated(loop), "alone": repeated(alone), "in turn": repeated(in_turn)},
        [
            Figure(
                "step, feed and observer of 10 ms each, 100 steps with prefetch=1 and"
                " background=True / the steps alone",
                1.15,
                "loop",
                "alone",
            ),
            Figure("the same / feed, step and observer in turn", 0.45, "loop", "in turn"),
        ],
        most_times=1,
        most_rounds=5,
    )
