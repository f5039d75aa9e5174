"""Hooks of one phase and operations of one run overlap, in a defined order and with defined
results.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.dispatch.calls import OrderGroup, RegisteredHook, call_groups
from tests.support.hooks import HOOKS, NumberedHook, five_hooks
from tests.support.sessions import run_once

pytestmark = pytest.mark.every_python

# -- overlapping


async def test_what_cannot_wait_is_called_in_the_callers_task_and_everything_else_has_a_task() -> (
    None
):
    """Hooks start in registration order; one whose code has an `await` has a task of its own from
    its first instruction.
    """
    seen: list[tuple[str, bool]] = []
    caller = asyncio.current_task()

    class Plain(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            seen.append(("plain", asyncio.current_task() is caller))

    class Waits(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            seen.append(("waits", asyncio.current_task() is caller))
            if len(seen) > 10:
                await asyncio.sleep(0)

    await run_once([Plain(), Waits(), Waits(), Plain()])
    assert sorted(seen) == [("plain", True)] * 2 + [("waits", False)] * 2
    if sys.version_info >= (3, 12):
        assert [name for name, _ in seen] == ["plain", "waits", "waits", "plain"]


# -- results do not depend on which hook is quicker


async def test_results_are_merged_in_registration_order() -> None:
    """Whichever hook finishes first, requests are merged in registration order, and each hook gets
    its own result.
    """
    finished: list[int] = []
    answers: dict[int, Any] = {}
    together: list[Any] = []
    turn = [asyncio.Event() for _ in HOOKS]

    async def act(number: int, phase: str) -> ah.SessionRunArgs | None:
        if phase != "before_run":
            return None
        if number < HOOKS[-1]:
            await turn[number + 1].wait()
        finished.append(number)
        turn[number].set()
        return ah.SessionRunArgs({f"hook {number}": "loss"}, options={"who": [number]})

    class Listening(NumberedHook):
        async def after_run(  # type: ignore[override]
            self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
        ) -> None:
            answers[self.number] = run_values.results
            assert run_values.options is not None
            together.append(run_values.options["who"])

    await run_once([Listening(number, act) for number in HOOKS])
    assert finished == [4, 3, 2, 1, 0]
    assert answers == {number: {f"hook {number}": 2} for number in HOOKS}
    assert together == [[0, 1, 2, 3, 4]] * 5


SUSPENDING = {"none": (), "the first": (0,), "every other": (1, 3), "all": tuple(HOOKS)}


@pytest.mark.parametrize("suspends", SUSPENDING.values(), ids=SUSPENDING)
async def test_context_variables_of_hooks_reach_the_step_and_the_caller(
    suspends: tuple[int, ...],
) -> None:
    """A variable set in before_run is seen by the step, by every after_run and by the caller; what
    these set, by the caller.
    """
    by_step = contextvars.ContextVar("set by the step", default=-1)
    after = [
        contextvars.ContextVar(f"set after the run by hook {number}", default=-1)
        for number in HOOKS
    ]
    variables = [contextvars.ContextVar(f"set by hook {number}", default=-1) for number in HOOKS]
    seen: list[tuple[str, list[int]]] = []

    def look(who: str) -> None:
        seen.append((who, [variable.get() for variable in variables]))

    async def act(number: int, phase: str) -> None:
        if phase == "before_run":
            variables[number].set(-2)  # overwritten below, maybe from another task
        if number in suspends:
            await asyncio.sleep(0)
        if phase == "before_run":
            variables[number].set(number)
        elif phase == "after_run":
            look(f"hook {number}")
            after[number].set(by_step.get())

    async def step() -> None:
        look("step")
        by_step.set(1)

    async with ah.AsyncMonitoredSession(step, five_hooks(act)) as session:
        await session.run("step")
        look("caller")
    assert sorted(name for name, _ in seen) == [
        "caller",
        *[f"hook {number}" for number in HOOKS],
        "step",
    ]
    assert [values for _, values in seen] == [list(HOOKS)] * 7
    assert [variable.get() for variable in after] == [1] * 5


# -- an argument of its own for each hook


@pytest.mark.parametrize("waits", [False, True])
async def test_too_few_arguments_are_an_error(waits: bool) -> None:
    """Of hooks that cannot wait, and of others: no call waits for an argument that never comes."""

    class Returns:
        async def on(self, first: int, second: int) -> None: ...

    class Waits:
        async def on(self, first: int, second: int) -> None:
            await asyncio.sleep(0)

    hook = Waits() if waits else Returns()
    hooks = [RegisteredHook(f"hook {number}", ah.configure(hook)) for number in range(2)]
    group = OrderGroup("on", hooks, grace_secs=1.0)
    with pytest.raises((ValueError, IndexError)):
        await call_groups((group,), (1,), seconds=iter([[2]]))
