"""Graphs, steps, feeds and policies of the sessions that tests open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook
from tests.support.hooks import BeforeRunHook
from tests.support.waiting import forever

Use = Callable[[ah.AsyncMonitoredSession], Awaitable[object]]
"""What a test does with an open session."""

NO_BACKOFF = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0))
"""The default policy, without pauses."""


def counting_graph(graph: ah.Graph | None = None) -> ah.Graph:
    """Make a graph with a variable `total` to which `train` adds `x` (1 unless it is fed); `loss`
    is `x` times ten.
    """
    graph = ah.Graph() if graph is None else graph
    graph.placeholder("x", default=1)
    graph.variable("total", 0)

    @graph.operation
    def loss(x: int) -> int:
        return 10 * x

    @graph.train_op(adds_to="total")
    def train(x: int) -> int:
        return x

    return graph


async def do_nothing(*_: object) -> None:
    """Return without suspending."""


async def forever_step() -> None:
    """Wait until cancelled: a step."""
    await forever()


async def same(batch: Any) -> Any:
    """Return the `batch`: a step."""
    return batch


async def double(batch: int = 1) -> dict[str, int]:
    """Return the `batch`, and twice that as `loss`: a step."""
    return {"loss": 2 * batch, "batch": batch}


def counting(*hooks: Any, **options: Any) -> ah.AsyncMonitoredSession:
    """Make a session of a counting graph."""
    return ah.AsyncMonitoredSession(counting_graph(), hooks, **options)


def doubling(*hooks: Any, **options: Any) -> ah.AsyncMonitoredSession:
    """Make a session of the step `double`."""
    return ah.AsyncMonitoredSession(double, hooks, **options)


def failing_step(*errors: BaseException | None) -> Callable[..., Any]:
    """Make a step that raises these, one a call; None, and every later call, succeeds."""
    left = list(errors)

    async def step(batch: int = 1) -> dict[str, int]:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return {"loss": batch}

    return step


def recovery_policy(**options: Any) -> ah.RecoveryPolicy:
    """Make a policy without pauses."""
    return ah.RecoveryPolicy(**{"backoff": ah.Backoff(initial_secs=0), **options})


async def outcome(
    session: ah.AsyncMonitoredSession, use: Use = do_nothing, error: BaseException | None = None
) -> BaseException | None:
    """Enter the session, use it and leave it, by `error` if that is given; return what came out."""
    try:
        async with session:
            await use(session)
            if error is not None:
                raise error
    except BaseException as error:
        return error
    return None


async def use_up(steps: AsyncIterable[Any], used: list[Any] | None = None) -> None:
    """Run a loop of steps to its end; append its values to `used`."""
    async for value in steps:
        if used is not None:
            used.append(value)


async def make_runs(session: ah.AsyncMonitoredSession, count: int, *request: Any) -> None:
    """Make so many runs in an open session."""
    for _ in range(count):
        await session.run(*request)


async def run_session(
    session: ah.AsyncMonitoredSession, count: int, *request: Any
) -> ah.AsyncMonitoredSession:
    """Open the session, make so many runs in it, close it, and return it."""
    async with session:
        await make_runs(session, count, *request)
    return session


async def run_once(hooks: list[Any]) -> None:
    """Run a session with these hooks once."""
    await run_session(ah.AsyncMonitoredSession(double, hooks), 1, "double")


async def run_in_before_run(*calls: Callable[[], Awaitable[Any]]) -> list[BeforeRunHook]:
    """Run a session once, with a hook for each of these functions."""
    hooks = [BeforeRunHook(call) for call in calls]
    await run_once(list(hooks))
    return hooks


async def train(
    *hooks: ah.SessionRunHook, runs: int, start: int | ah.StepStore = 0, feed_dict: Any = None
) -> None:
    """Run `train` of a counting graph so many times, in a session with these hooks that starts at a
    step, or at a store's.
    """
    store = ah.MemoryStepStore(start) if isinstance(start, int) else start
    await run_session(
        ah.AsyncMonitoredSession(counting_graph(), hooks, global_step=store),
        runs,
        "train",
        feed_dict,
    )


@contextlib.asynccontextmanager
async def going_back(
    *hooks: Any, at: int, to: int, start: int = 0
) -> AsyncIterator[ah.AsyncMonitoredSession]:
    """Open a session of a counting graph that is lost before its run number `at`, and recovers at
    the step `to`.
    """
    store = ah.MemoryStepStore(start)

    async def lose() -> None:
        await store.reset(to)
        raise ah.AbortedError("lost")

    faults = FaultInjectionHook({("before_run", at): lose})
    async with ah.AsyncMonitoredSession(
        counting_graph(), [*hooks, faults], global_step=store, recovery=NO_BACKOFF
    ) as session:
        yield session


async def put(queue: asyncio.Queue[int], number: int) -> None:
    """Put so many items into the queue, and finish."""
    for item in range(number):
        await queue.put(item)


class CreatorOf:
    """Creates raw sessions of a subclass, with the given parts."""

    def __init__(
        self, session_class: Callable[..., ah.Session], graph: ah.Graph, **parts: Any
    ) -> None:
        self.graph = graph
        self._session_class = session_class
        self._parts = parts

    async def create_session(self) -> ah.Session:
        return self._session_class(self.graph, **self._parts)


class Source:
    """Numbers from 0, as an async or a plain iterator; says how many were taken, and whether it was
    closed.
    """

    KINDS = ("async", "plain", "thread")

    def __init__(self, count: int = 100, on_take: Callable[[int], object] = int) -> None:
        """Make so many numbers; `on_take` is called with how many were taken."""
        self.count = count
        self.on_take = on_take
        self.taken = 0
        self.closed = False

    def feeds(self, kind: str) -> dict[str, Any]:
        """Return the options of `steps` for feeds of this kind."""
        return {
            "feeds": self.numbers() if kind == "async" else self.plain(),
            "thread": kind == "thread",
        }

    def plain(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.taken += 1
                self.on_take(self.taken)
                yield number
        finally:
            self.closed = True

    async def numbers(self) -> AsyncIterator[int]:
        numbers = self.plain()
        try:
            for number in numbers:
                await asyncio.sleep(0)  # what it does with an element that it has taken
                yield number
        finally:
            await asyncio.sleep(0)
            numbers.close()  # type: ignore[attr-defined]


class Loader:
    """Numbers from 0 that continue from a saved state, as data loaders do."""

    def __init__(self, count: int = 100) -> None:
        self.position = 0
        self.count = count

    async def __aiter__(self) -> AsyncIterator[int]:
        while self.position < self.count:
            await asyncio.sleep(0)
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
