"""Failures of a phase: one failure ends it, no hook is left running, and the error names its
hook.
"""

from __future__ import annotations

import asyncio
import weakref

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import without_collections
from tests.support.hooks import five_hooks
from tests.support.sessions import doubling, run_once
from tests.support.waiting import elapse, forever, parked, ticks

pytestmark = pytest.mark.every_python


async def test_a_group_among_several_failures_leaves_its_notes_to_its_members() -> None:
    """The members of a flattened group have the hook's note and the group's own notes."""
    group = ExceptionGroup("two rows are bad", [ValueError(1), ValueError(2)])
    group.add_note("in file rows.csv")
    errors = [group, KeyError("b")]

    async def act(number: int, phase: str) -> None:
        if phase == "before_run" and number < len(errors):
            try:
                await (forever() if number else ticks())
            finally:
                raise errors[number]

    with pytest.raises(ExceptionGroup, match="2 calls failed") as raised:
        await run_once(five_hooks(act))
    assert raised.value.exceptions == (*group.exceptions, errors[1])
    for error in group.exceptions:
        assert error.__notes__ == [
            "in file rows.csv",
            "raised by NumberedHook#1.before_run at step 1",
        ]


@pytest.mark.plain_tasks
@pytest.mark.parametrize("how", ["inline", "own", "child", "cancelled", "time limit"])
async def test_failed_runs_leave_no_reference_cycles(how: str) -> None:
    """What a failed run referred to is freed when its error is, without the garbage collector."""

    class Big:
        pass

    big: weakref.ref[Big]

    async def act(number: int, phase: str) -> None:
        nonlocal big
        if phase == "before_run" and number == (3 if how == "child" else 0):
            held = Big()
            big = weakref.ref(held)
            if how in ("cancelled", "time limit"):
                await elapse(100)
            elif how != "inline":
                await ticks()
            raise ValueError("no")
        if how == "child":
            await asyncio.sleep(0)

    hooks = [
        ah.configure(hook, timeout=5 if how == "time limit" else None) for hook in five_hooks(act)
    ]
    with without_collections(), ManualClock() as clock:
        async with doubling(*hooks) as session:
            for _ in range(3):
                task = await parked(session.run("double"), 3)
                if how == "cancelled":
                    task.cancel()
                elif how == "time limit":
                    clock.advance(5)
                await asyncio.wait([task])
                assert (
                    task.cancelled()
                    if how == "cancelled"
                    else isinstance(task.exception(), (ValueError, TimeoutError))
                )
                del task
                await ticks()
                assert big() is None
