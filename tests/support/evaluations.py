"""What the tests of the hooks that evaluate and decide share: evaluations held up by hand, losses by list, a restore."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.hooks.stopping import EarlyStoppingHook
from tests.support.sessions import counting_graph


async def total(evaluation: Evaluation) -> Any:
    """An evaluation: the sum that `train` has made, as it was at that step."""
    return evaluation.variables["total"]


class Gate:
    """An evaluation like `total` that ends when it is let through; keeps the steps that began, ended and were cancelled."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self._let = asyncio.Semaphore(0)

    def let(self, count: int = 1) -> None:
        """Lets so many through."""
        for _ in range(count):
            self._let.release()

    async def __call__(self, evaluation: Evaluation) -> Any:
        self.began.append(evaluation.step)
        try:
            await self._let.acquire()
        except asyncio.CancelledError:
            self.cancelled.append(evaluation.step)
            raise
        self.ended.append(evaluation.step)
        return evaluation.variables["total"]


def failing(*errors: BaseException | None) -> Callable[[Evaluation], Awaitable[Any]]:
    """An evaluation that raises each of these in turn, where it is not None; after them it succeeds."""
    left = list(errors)

    async def evaluate(evaluation: Evaluation) -> Any:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return evaluation.variables["total"]

    return evaluate


async def train(hook: EvaluatorHook, runs: int, *others: ah.SessionRunHook, start: int = 0) -> dict[int, Any]:
    """What the hook found in a session of so many runs."""
    store = ah.MemoryStepStore(start)
    async with ah.AsyncMonitoredSession(counting_graph(), [hook, *others], global_step=store) as session:
        for _ in range(runs):
            await session.run("train")
    return hook.results


def giving(values: Iterable[Any]) -> Any:
    """A step whose `loss` is each of these in turn."""
    left = iter(values)

    async def step() -> dict[str, Any]:
        return {"loss": next(left)}

    return step


async def stopped_at(values: list[Any], hook: EarlyStoppingHook) -> int | None:
    """The step at which the hook stopped a session whose `loss` is each of these in turn; None if it did not."""
    async with ah.AsyncMonitoredSession(giving(values), [hook]) as session:
        for _ in values:
            if session.should_stop():
                break
            await session.run("step")
        assert session.stop_reason == hook.reason
    return session.global_step.latest.step if hook.reason is not None else None


class Restoring(ah.SessionRunHook):
    """Hands a state to the hook before it in the list, where a restore does: after `begin`, before there is a session."""

    def __init__(self, hook: Any, state: dict[str, Any]) -> None:
        self.hook, self.state = hook, state

    async def begin(self) -> None:
        self.hook.load_state_dict(self.state)
