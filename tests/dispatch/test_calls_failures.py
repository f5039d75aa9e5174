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
from tests.support.hooks import HOOKS, five_hooks
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


def kept_by(raised: BaseException) -> list[str]:
    """Return the errors in the context of one, which has no circle."""
    found: list[str] = []
    link = raised.__context__
    while link is not None and len(found) < 100:
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else [link]
        found += [repr(one) for one in members if not isinstance(one, asyncio.CancelledError)]
        link = link.__context__
    return sorted(found)


async def test_errors_that_a_cancel_hides_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """The caller is cancelled and hooks fail in their cleanup: each error is logged, and in the
    context of what is raised.
    """
    errors = {number: OSError(f"hook {number}") for number in HOOKS}

    async def act(number: int, phase: str) -> None:
        if phase == "before_run":
            try:
                await forever()
            finally:
                raise errors[number]

    task = await parked(run_once(five_hooks(act)), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert {id(error) for error in errors.values()} <= {id(error) for error in logged}
    assert set(map(repr, errors.values())) <= set(kept_by(raised.value))


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
