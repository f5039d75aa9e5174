"""What a session may have to end has a task and a context of its own: whose cancel it was, what is
seen where, what is kept.
"""

from __future__ import annotations

import asyncio
import contextvars
import decimal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import (
    NO_BACKOFF,
    double,
    doubling,
    outcome,
    recovery_policy,
    run_session,
    use_up,
)
from tests.support.waiting import cancel_and_wait, forever, ticks, until_true

pytestmark = pytest.mark.every_python
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="outside")


@pytest.mark.parametrize("how", ["cancels itself", "is cancelled"])
@pytest.mark.parametrize("what", ["until", "a step function", "feeds", "a recovery"])
async def test_a_cancel_by_others_is_not_the_callers(what: str, how: str) -> None:
    """What a session awaits is cancelled, and its caller is not: that is an error that says so."""

    async def work(*_: object) -> None:
        current = asyncio.current_task()
        assert current is not None
        asyncio.get_running_loop().call_soon(current.cancel)
        if how == "cancels itself":
            current.cancel()
        await forever()

    async def feeds() -> AsyncIterator[int]:
        await work()
        yield 1

    lost = FaultInjectionHook(
        {("before_run", 1): ah.AbortedError("lost"), ("after_create_session", 2): work}
    )
    async with ah.AsyncMonitoredSession(
        double, [lost] if what == "a recovery" else [], recovery=NO_BACKOFF
    ) as session:
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "until": lambda: session.until(work()),
            "a step function": lambda: session.run_step_fn(work),
            "feeds": lambda: anext(session.steps("loss", feeds=feeds())),
            "a recovery": lambda: session.run("loss", {"batch": 1}),
        }
        with refused(ah.errors.HookCancelledError, "was cancelled, and not by its caller"):
            await calls[what]()


@pytest.mark.parametrize("where", ["hook", "step", "step function"])
async def test_a_stop_ends_the_wait_for_a_step(where: str) -> None:
    """A wait for the step of any store ends with a stop of the session in whose run it is; a wait
    elsewhere does not.
    """
    other = ah.MemoryStepStore(run="other")

    async def wait(*_: object) -> None:
        await other.wait_for(5)

    async def step() -> dict[str, int]:
        if where == "step":
            await wait()
        return {"loss": 1}

    elsewhere = asyncio.create_task(other.wait_for(5))
    async with ah.AsyncMonitoredSession(
        step, [PhaseHook("before_run", wait)] if where == "hook" else []
    ) as session:
        run = session.run_step_fn(wait) if where == "step function" else session.run("loss")
        waiting = asyncio.create_task(run)
        await until_true(lambda: other.statistics().waiting == 2)
        session.request_stop("enough")
        with pytest.raises(ah.StopRequestedError, match="enough"):
            await waiting
    assert other.statistics().waiting == 1
    await other.advance(5)
    assert await elsewhere == 5


# -- contexts


class Sets(ah.SessionRunHook):
    """Sets the variable in one method, and resets it in another one; waits before that in
    `begin`.
    """

    def __init__(self, sets: str, resets: str) -> None:
        self.calls = {sets: self.set, resets: self.reset}

    def set(self) -> None:
        self.token = variable.set("inside")

    def reset(self) -> None:
        variable.reset(self.token)

    async def begin(self) -> None:
        if "begin" in self.calls:
            await ticks(2)
            self.calls["begin"]()

    async def close(self, exc: BaseException | None) -> None:
        self.calls.get("close", int)()


class SetsInRuns(Sets):
    """The same in runs, in methods that cannot wait."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        self.calls.get("before_run", int)()

    async def after_run(self, *_: object) -> None:
        self.calls.get("after_run", int)()


class WaitsBefore(SetsInRuns):
    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await ticks(2)
        await super().before_run(run_context)


class WaitsAfter(SetsInRuns):
    async def after_run(  # type: ignore[override]
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await ticks(2)
        await super().after_run(run_context, run_values)


class WaitsInBoth(WaitsBefore, WaitsAfter):
    pass


@pytest.mark.parametrize("kind", [SetsInRuns, WaitsBefore, WaitsAfter, WaitsInBoth])
async def test_a_token_of_one_phase_is_valid_in_the_next(kind: type[Sets]) -> None:
    """A variable that `before_run` sets and `after_run` resets: the step sees it, and afterwards it
    is as before.
    """
    seen: list[str] = []

    async def step() -> None:
        seen.append(variable.get())

    async with ah.AsyncMonitoredSession(step, [kind("before_run", "after_run")]) as session:
        for _ in range(2):
            await session.run("step")
            seen.append(variable.get())
    assert seen == ["inside", "outside"] * 2


async def test_a_token_of_the_beginning_is_valid_at_the_end() -> None:
    """A variable that `begin` sets and `close` resets is set in the session's block, and not
    afterwards.
    """
    async with doubling(Sets("begin", "close")) as session:
        assert variable.get() == "inside"
        await session.run("loss")
    assert variable.get() == "outside"


async def test_blocks_of_overlapping_hooks_are_their_own() -> None:
    """A context that a hook enters and leaves is that of no other hook, nor of the caller; what it
    leaves set, the caller has.
    """
    precisions: list[tuple[int, int]] = []

    def hook(number: int) -> PhaseHook:
        async def call(run_context: ah.SessionRunContext) -> None:
            with decimal.localcontext(prec=number):
                await ticks(number)
                precisions.append((number, decimal.getcontext().prec))
            variable.set(f"hook {number}")

        return PhaseHook("before_run", call)

    await run_session(doubling(hook(9), hook(7), hook(8)), 1, "loss")
    assert precisions == [(7, 7), (8, 8), (9, 9)]
    assert (decimal.getcontext().prec, variable.get()) == (28, "hook 8")


# -- what is kept of what a wait has taken


@pytest.mark.parametrize("ends", ["gives up", "is cancelled"])
async def test_an_element_of_a_run_that_is_not_repeated_is_unused(
    ends: str, clock: ManualClock
) -> None:
    """A recovery that gives up, or is cancelled: the element of its run has made no step, and is
    not lost.
    """
    used, made = list[int](), list[Any]()

    async def train(item: int) -> dict[str, int]:
        if item == 2:
            raise ah.AbortedError("lost")
        used.append(item)
        return {"loss": item}

    async def use(session: ah.AsyncMonitoredSession) -> None:
        made.append(session.steps("loss", feeds=range(6), prefetch=1))
        await use_up(made[0])

    policy = (
        recovery_policy(max_attempts=0)
        if ends == "gives up"
        else ah.RecoveryPolicy(backoff=ah.Backoff(5, jitter=False))
    )
    task = asyncio.create_task(outcome(ah.AsyncMonitoredSession(train, recovery=policy), use))
    await until_true(lambda: task.done() or (ends == "is cancelled" and clock.pending))
    await cancel_and_wait(task)
    assert (used, made[0].unused[0]) == ([0, 1], 2)


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
