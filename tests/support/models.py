"""Small graphs, steps and hooks that several test files use."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import aiohooks as ah

QUICK = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0))
"""The default policy, without pauses."""


def counting_graph(graph: ah.Graph | None = None) -> ah.Graph:
    """A variable `total` to which `train` adds `x` (1 unless it is fed); `loss` is `x` times ten."""
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


async def double(batch: int = 1) -> dict[str, int]:
    """A step: returns its `batch`, and twice that as `loss`."""
    return {"loss": 2 * batch, "batch": batch}


def policy(**options: Any) -> ah.RecoveryPolicy:
    """A policy without pauses."""
    return ah.RecoveryPolicy(**{"backoff": ah.Backoff(initial_secs=0), **options})


def failing_step(*errors: BaseException | None) -> Callable[..., Any]:
    """A step that raises these, one a call; None, and all that follows, succeeds."""
    left = list(errors)

    async def step(batch: int = 1) -> dict[str, int]:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return {"loss": batch}

    return step


def drop(things: list[Any]) -> None:
    """Lets go of these, and collects what nobody holds any more."""
    things.clear()
    gc.collect()


async def ticks(count: int = 5) -> None:
    """Lets the other tasks of the loop go on, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until_true(condition: Callable[[], object], ticks: int = 10_000) -> None:
    """Lets the others go on until the condition holds; it must come to hold without any time passing by the clock."""
    for _ in range(ticks):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to hold")


class Asking(ah.SessionRunHook):
    """Gives one answer in every `before_run`, and keeps what `after_run` got."""

    def __init__(self, fetches: Any = None, feed_dict: Any = None, options: Any = None) -> None:
        self.answer: Any = ah.SessionRunArgs(fetches, feed_dict, options)
        self.values: list[ah.SessionRunValues] = []

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        answer: ah.SessionRunArgs | None = self.answer
        return answer

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self.values.append(run_values)


class Calling(ah.SessionRunHook):
    """Awaits one function, with the phase's own arguments, in one phase."""

    def __init__(self, phase: str, call: Callable[..., Awaitable[Any]]) -> None:
        self.calls = 0
        self._phase = phase
        self._call = call

    async def _run(self, phase: str, *args: Any) -> Any:
        if phase == self._phase:
            self.calls += 1
            return await self._call(*args)
        return None

    async def begin(self) -> None:
        await self._run("begin")

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        await self._run("after_create_session", session, coord)

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        answer: ah.SessionRunArgs | None = await self._run("before_run", run_context)
        return answer

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await self._run("after_run", run_context, run_values)

    async def end(self, session: ah.Session) -> None:
        await self._run("end", session)

    async def close(self, exc: BaseException | None) -> None:
        await self._run("close", exc)


class Sessions(ah.SessionRunHook):
    """Keeps every session and coordinator that it is told of."""

    def __init__(self) -> None:
        self.sessions: list[ah.Session] = []
        self.coords: list[ah.Coordinator] = []
        self.attempts: list[int] = []

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.sessions.append(session)
        self.coords.append(coord)

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        self.attempts.append(run_context.attempt)


@contextlib.contextmanager
def refused(error: type[ah.AiohooksError], *says: str) -> Iterator[pytest.ExceptionInfo[ah.AiohooksError]]:
    """The block raises exactly `error`, whose message says all of these, in this order."""
    pattern = "(?s)" + ".*".join(map(re.escape, says))
    with pytest.raises(error, match=pattern) as caught:
        yield caught
    assert caught.type is error
