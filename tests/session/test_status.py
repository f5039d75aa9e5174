"""`session.status()`: active hooks and operations, waits and their start, at every stage of a
session's life.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import re
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.session.hook import HOOK_METHODS
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, double, doubling, outcome
from tests.support.waiting import Gate, parked, ticks

pytestmark = pytest.mark.every_python


def named(status: ah.session.SessionStatus) -> list[tuple[str, float | None]]:
    return [(activity.what, activity.secs) for activity in status.doing]


def only(activities: tuple[ah.session.Activity, ...], *where: str) -> ah.session.Activity:
    """Return the only activity, which waits at a place with these words."""
    (activity,) = activities
    assert activity.where is not None
    assert all(words in activity.where for words in where), activity.where
    return activity


@pytest.mark.parametrize("phase", HOOK_METHODS)
async def test_the_active_hook_is_named(phase: str, clock: ManualClock) -> None:
    """In every phase the status names the hook that is active, since when, and the line at which it
    waits.
    """
    clock.advance(100)
    gate = Gate()
    hook = PhaseHook(phase, gate.pass_through)
    session = doubling(ah.SessionRunHook(), hook, name="chief")
    task = await parked(outcome(session, lambda session: session.run("loss")), 20)
    clock.advance(3.5)
    status = session.status()
    doing = only(
        status.doing, f"Gate.pass_through ({Gate.pass_through.__code__.co_filename}:", "Event.wait"
    )
    assert doing.what.startswith(f"PhaseHook.{phase}")
    assert (doing.secs, doing.hook, doing.kind) == (3.5, hook, "hook")
    assert str(doing) in str(status)
    assert status.summary in str(status)
    assert re.search("(run 1|opening|closing|block)( for 3.5 s)?$", status.summary)
    gate.opened.set()
    assert await task is None
    assert session.status().doing == ()


async def test_a_wait_for_a_step_says_which(clock: ManualClock) -> None:
    """A wait for a step is shown with the step, for how long."""
    steps = ah.MemoryStepStore(3, run="digits")
    with steps.publisher("chief"):
        async with doubling(
            ah.hooks.GlobalStepWaiterHook(10), global_step=steps, name="worker"
        ) as session:
            run = await parked(session.run("loss"))
            await ticks()
            clock.advance(60)
            (doing,) = session.status().doing
            assert (doing.awaits, doing.kind) == ("step 10 of digits", "step")
            text = (
                "GlobalStepWaiterHook.before_run at step 4 for 60 s, waiting for step 10 of digits"
            )
            assert text in str(session.status())
            await steps.raise_to(10)
            await run


async def test_the_run_is_named_where_none_of_its_calls_waits(clock: ManualClock) -> None:
    """A step that asks, and has not waited yet, finds the run, and how long ago that has begun to
    wait.
    """

    async def step() -> Any:
        clock.advance(3)
        return named(session.status())

    async with ah.AsyncMonitoredSession(
        step, [PhaseHook("before_run", lambda _: ticks())]
    ) as session:
        assert await session.run("step") == [("run 1", 3.0)]


async def test_the_status_counts() -> None:
    """The session's state, step and runs, those that wait for the lock, the stop, recoveries and a
    failure, also in the text.
    """

    def counts() -> tuple[object, ...]:
        status = session.status()
        return tuple(getattr(status, field.name) for field in dataclasses.fields(status)[:8])

    gate = Gate()
    faults = FaultInjectionHook({("before_run", 1): ah.AbortedError("lost")})
    hooks = [faults, PhaseHook("after_run", gate.pass_through)]
    session = doubling(*hooks, recovery=NO_BACKOFF)
    assert counts() == ("new", None, 0, False, 0, None, 0, None)
    assert repr(session) == "<AsyncMonitoredSession new, <hooks: FaultInjectionHook, PhaseHook>>"
    assert (
        repr(ah.session.AsyncSingularMonitoredSession(double))
        == "<AsyncSingularMonitoredSession new, <hooks: none>>"
    )

    async def use(_: object) -> None:
        runs = [await parked(session.run("loss")) for _ in range(3)]
        await ticks(30)
        session.request_stop("enough")
        assert counts() == ("open", 1, 1, True, 2, "enough", 1, None)
        for line in (
            "waiting for their turn to run: 2",
            "recoveries: 1",
            "stopping: enough",
        ):
            assert line in str(session.status())
        gate.opened.set()
        await asyncio.gather(*runs, return_exceptions=True)
        session.coord.request_stop(OSError("died"))
        assert counts() == ("open", 1, 1, False, 0, "enough", 1, "OSError('died')")
        assert "failed: OSError('died')" in str(session.status())

    assert repr(await outcome(session, use)) == "OSError('died')"
    assert session.status().state == "closed"


async def test_a_coordinator_has_the_status_too(clock: ManualClock) -> None:
    """The coordinator that hooks get has the same status; alone it has an empty one."""
    assert ah.Coordinator().status() is None
    seen: list[Any] = []

    async def see(session: ah.Session, coord: ah.Coordinator) -> None:
        seen.append(coord.status())

    async with doubling(PhaseHook("after_create_session", see), name="me") as session:
        assert session.coord.status() == session.status()
    assert (seen[0].state, seen[0].name) == ("opening", "me")


async def test_a_closed_session_refers_to_no_task() -> None:
    """It may be kept for its status: the task that had it, with all that this refers to, is
    freed.
    """
    session = doubling()
    use: Callable[[Any], Awaitable[object]] = lambda session: session.run("loss")  # noqa: E731
    task = asyncio.create_task(outcome(session, use))
    freed = weakref.ref(task)
    await asyncio.wait([task])
    del task
    gc.collect()
    assert freed() is None
    assert session.status().state == "closed"
