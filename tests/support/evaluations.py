"""Helpers of the tests of evaluations and early stopping: evaluations that wait, losses by list, a
restore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.evaluator import Evaluation, EvaluatorHook
from aiohooks.hooks.stopping import EarlyStoppingHook
from tests.support.sessions import train

both_modes = pytest.mark.parametrize("mode", ["inline", "background"])


async def total(evaluation: Evaluation) -> Any:
    """Evaluate: return the sum that `train` had made at that step."""
    return evaluation.variables["total"]


class GatedEvaluation:
    """An evaluation like `total` that waits for `release`; records the steps that began, ended and
    were cancelled.
    """

    def __init__(self) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self._permits = asyncio.Semaphore(0)

    def release(self, count: int = 1) -> None:
        """Let so many evaluations end."""
        for _ in range(count):
            self._permits.release()

    async def __call__(self, evaluation: Evaluation) -> Any:
        self.began.append(evaluation.step)
        try:
            await self._permits.acquire()
        except asyncio.CancelledError:
            self.cancelled.append(evaluation.step)
            raise
        self.ended.append(evaluation.step)
        return evaluation.variables["total"]


def failing(*errors: BaseException | None) -> Callable[[Evaluation], Awaitable[Any]]:
    """Return an evaluation that raises each of these that is not None, in turn; then it
    succeeds.
    """
    left = list(errors)

    async def evaluate(evaluation: Evaluation) -> Any:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return evaluation.variables["total"]

    return evaluate


async def results_of(
    hook: EvaluatorHook, runs: int, *others: ah.SessionRunHook, start: int = 0
) -> dict[int, Any]:
    """Return the hook's results after a session of so many runs."""
    await train(hook, *others, runs=runs, start=start)
    return hook.results


def giving(values: Iterable[Any]) -> Any:
    """Return a step whose `loss` is each of these in turn."""
    left = iter(values)

    async def step() -> dict[str, Any]:
        return {"loss": next(left)}

    return step


async def stopped_at(values: list[Any], hook: EarlyStoppingHook) -> int | None:
    """Return the step at which the hook stopped a session with these values of `loss`; None if it
    did not.
    """
    async with ah.AsyncMonitoredSession(giving(values), [hook]) as session:
        for _ in values:
            if session.should_stop():
                break
            await session.run("step")
        assert session.stop_reason == hook.reason
    return session.global_step.latest.step if hook.reason is not None else None
