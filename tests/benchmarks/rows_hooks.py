"""Rows about hooks: a hooked run against the same work with `asyncio.gather`, and what a hook adds
to a run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohooks as ah
from aiohooks.session.status import WHY_VARIABLE
from aiohooks.session.why import enable_why
from tests.benchmarks.measure import Counts, Figure, Setup, compared, repeated
from tests.support.hangs import disable_why

HOOKS = 5
WAIT_SECS = 0.010
NAMES = ("loss", "accuracy", "norm", "scale", "rate")


class SilentHook(ah.SessionRunHook):
    """Overrides nothing."""


class NoOpHook(ah.SessionRunHook):
    """Overrides both phases and does nothing."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        pass

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        pass


class FetchingHook(ah.SessionRunHook):
    """Fetches a value and keeps it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: Any = None

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs(self.name)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        self.seen = run_values.results


class SuspendingHook(ah.SessionRunHook):
    """Suspends once in both phases."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(0)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await asyncio.sleep(0)


class SuspendingFetchingHook(FetchingHook):
    """Suspends once in both phases, and fetches a value."""

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        await asyncio.sleep(0)
        return ah.SessionRunArgs(self.name)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await asyncio.sleep(0)
        self.seen = run_values.results


class WaitingHook(ah.SessionRunHook):
    """Waits a while before each run."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await asyncio.sleep(WAIT_SECS)


async def loss(batch: float) -> float:
    """The operation behind every fetched value."""
    return batch


async def train(loss: float) -> None:
    """The train operation."""


def graph_of(names: Sequence[str]) -> ah.Graph:
    """Make a graph of a placeholder, an operation for each name, and the train operation, which
    needs the first of them.
    """
    graph = ah.Graph()
    graph.placeholder("batch")
    for name in names:
        graph.operation(name=name)(loss)
    graph.train_op(train)
    return graph


class ByHand:
    """The same work without the library: two gathers, and between them the graph's functions
    awaited one by one.

    What a hook gets in `after_run` is put together by the fetch it asked for; the context is made
    once, not for each run.
    """

    def __init__(self, hooks: Sequence[ah.SessionRunHook], names: Sequence[str]) -> None:
        self.hooks = hooks
        self.names = names
        self.step = 0
        self.context = ah.SessionRunContext(ah.SessionRunArgs(), ah.Session(ah.Graph()))

    async def run(self, batch: float) -> None:
        """One step."""
        context = self.context
        requests = await asyncio.gather(*[hook.before_run(context) for hook in self.hooks])
        values: dict[str | None, float | None] = {None: None}
        for name in self.names:
            values[name] = await loss(batch)
        await train(batch)
        self.step += 1
        await asyncio.gather(
            *[
                hook.after_run(
                    context,
                    ah.SessionRunValues(
                        None if request is None else values[request.fetches], None, None
                    ),
                )
                for hook, request in zip(self.hooks, requests, strict=True)
            ]
        )


async def opened(
    stack: AsyncExitStack, hooks: Sequence[ah.SessionRunHook], names: Sequence[str] = NAMES[:1]
) -> Callable[[], Awaitable[Any]]:
    """Open a session over `graph_of(names)` until the stack ends; return a function that makes one
    run.
    """
    session = await stack.enter_async_context(ah.AsyncMonitoredSession(graph_of(names), hooks))
    return partial(session.run, "train", {"batch": 1.0})


def fetching(names: Sequence[str]) -> list[ah.SessionRunHook]:
    """Make five hooks, each with a name to fetch."""
    return [FetchingHook(names[number % len(names)]) for number in range(HOOKS)]


@asynccontextmanager
async def hooked_run(counts: Counts) -> AsyncIterator[Setup]:
    """Hooks that never suspend, against gathering their coroutines."""
    async with AsyncExitStack() as stack:
        yield Setup(
            {
                "one each": repeated(await opened(stack, fetching(NAMES), NAMES)),
                "one each by hand": repeated(partial(ByHand(fetching(NAMES), NAMES).run, 1.0)),
                "one for all": repeated(await opened(stack, fetching(NAMES[:1]))),
                "one for all by hand": repeated(
                    partial(ByHand(fetching(NAMES[:1]), NAMES[:1]).run, 1.0)
                ),
            },
            [
                Figure(
                    "5 hooks, both phases, each fetches its own value / gather and the graph by"
                    " hand",
                    0.25,
                    "one each",
                    "one each by hand",
                ),
                Figure(
                    "the same, all fetch the same value", 0.25, "one for all", "one for all by hand"
                ),
            ],
        )


@asynccontextmanager
async def silent_hooks(counts: Counts) -> AsyncIterator[Setup]:
    """A method that is not overridden costs nothing."""
    async with AsyncExitStack() as stack:
        yield compared(
            "5 silent hooks / no hooks",
            1.05,
            repeated(await opened(stack, [SilentHook() for _ in range(HOOKS)])),
            repeated(await opened(stack, [])),
        )


@asynccontextmanager
async def no_effects(counts: Counts) -> AsyncIterator[Setup]:
    """Where effects could be recorded and none is."""

    async def deliver(effect: ah.hooks.Effect) -> None:
        pass

    hooks = [
        ah.hooks.EffectsHook({"publish": deliver, "charge": deliver}, run="r", when="commit"),
        *(NoOpHook() for _ in range(HOOKS)),
    ]
    async with AsyncExitStack() as stack:
        yield compared(
            "5 no-op hooks and an EffectsHook without effects / 6 no-op hooks",
            1.2,
            repeated(await opened(stack, hooks)),
            repeated(await opened(stack, [NoOpHook() for _ in range(HOOKS + 1)])),
        )


@asynccontextmanager
async def asked_why(counts: Counts) -> AsyncIterator[Setup]:
    """A process that can be asked why it waits, and is not."""
    async with AsyncExitStack() as stack:
        run = repeated(await opened(stack, [NoOpHook() for _ in range(HOOKS)]))

        async def can_be_asked(times: int) -> float:
            os.environ[WHY_VARIABLE] = "1"
            enable_why()
            try:
                return await warm(times)
            finally:
                del os.environ[WHY_VARIABLE]
                disable_why()

        async def warm(times: int) -> float:
            await run(times)  # what it took to make the thread and the socket is over then
            return await run(times)

        yield compared(
            "5 no-op hooks in a process that can be asked why it waits / in one that cannot",
            1.01,
            can_be_asked,
            warm,
        )


@asynccontextmanager
async def marginal_cost(counts: Counts) -> AsyncIterator[Setup]:
    """The cost of one more hook: the slope between 5 and 15 hooks."""
    more = 10
    hooks = [NoOpHook() for _ in range(more)]
    context = ah.SessionRunContext(ah.SessionRunArgs(), ah.Session(ah.Graph()))
    values = ah.SessionRunValues(None, None, None)

    async def by_hand() -> None:
        for hook in hooks:
            await hook.before_run(context)
            await hook.after_run(context, values)

    async with AsyncExitStack() as stack:
        yield Setup(
            {
                "few": repeated(await opened(stack, [NoOpHook() for _ in range(HOOKS)])),
                "many": repeated(await opened(stack, [NoOpHook() for _ in range(HOOKS + more)])),
                "by hand": repeated(by_hand),
            },
            [
                Figure(
                    "one no-op hook more, both phases / awaiting its two coroutines by hand",
                    3.0,
                    lambda times: (times["many"] - times["few"]) / more,
                    lambda times: times["by hand"] / more,
                )
            ],
        )


@asynccontextmanager
async def suspending_hooks(counts: Counts) -> AsyncIterator[Setup]:
    """Hooks that all suspend, against gathering their coroutines."""
    quiet: list[ah.SessionRunHook] = [SuspendingHook() for _ in range(HOOKS)]
    fetching: list[ah.SessionRunHook] = [SuspendingFetchingHook(name) for name in NAMES]
    async with AsyncExitStack() as stack:
        yield Setup(
            {
                "run": repeated(await opened(stack, quiet)),
                "run by hand": repeated(partial(ByHand(quiet, NAMES[:1]).run, 1.0)),
                "fetching": repeated(await opened(stack, fetching, NAMES)),
                "fetching by hand": repeated(partial(ByHand(fetching, NAMES).run, 1.0)),
            },
            [
                Figure(
                    "5 hooks suspend in both phases / gather and the graph by hand",
                    0.95,
                    "run",
                    "run by hand",
                ),
                Figure(
                    "the same, each fetches its own value",
                    0.95,
                    "fetching",
                    "fetching by hand",
                ),
            ],
        )


@asynccontextmanager
async def waiting_hooks(counts: Counts) -> AsyncIterator[Setup]:
    """Hooks that wait overlap: a run takes as long as the slowest of them."""
    async with AsyncExitStack() as stack:
        yield Setup(
            {"run": repeated(await opened(stack, [WaitingHook() for _ in range(HOOKS)]))},
            [
                Figure(
                    "a run with 5 hooks that wait 10 ms in before_run / 10 ms",
                    1.3,
                    "run",
                    lambda times: WAIT_SECS,
                )
            ],
            most_times=1,
            most_rounds=100,
        )
