"""WatchdogHook: an activity that takes too long is reported with its phase and name, and ended if
configured.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from aiohooks.hooks.evaluator import EvaluatorHook
from aiohooks.hooks.waiting import GlobalStepWaiterHook
from aiohooks.hooks.watchdog import WatchdogHook
from aiohooks.session.hook import HOOK_METHODS
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, do_nothing, doubling, run_session
from tests.support.waiting import Gate, parked, until_true


def found(watchdog: WatchdogHook) -> list[tuple[str, str, float]]:
    return [(stall.phase, stall.what, stall.secs) for stall in watchdog.stalls]


async def test_a_hook_that_hangs_is_named_once(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """At the limit, and not before, one report names the hook, and shows where it and all tasks of
    the session wait.
    """
    gate = Gate()
    watchdog = WatchdogHook(30)

    async def refresh() -> None:
        await gate.pass_through()

    hooks = [
        watchdog,
        PhaseHook("before_run", do_nothing),
        PhaseHook("before_run", gate.pass_through),
    ]
    async with doubling(*hooks, name="trainer") as session:
        session.start_soon(refresh, name="refresh")
        run = asyncio.create_task(session.run("loss"), name="the run")
        stranger = await parked(gate.pass_through(), 20, name="a stranger")
        clock.advance(29.9)
        assert found(watchdog) == []
        clock.advance(0.1)
        assert found(watchdog) == [("first step", "PhaseHook#2.before_run at step 1", 30)]
        clock.advance(1000)
        gate.opened.set()
        await asyncio.gather(run, stranger)
        clock.advance(1000)
    assert len(watchdog.stalls) == 1
    (record,) = [record for record in caplog.records if record.name == "aiohooks.hooks"]
    assert record.levelno == logging.ERROR
    text = record.getMessage()
    assert text.startswith(
        "the session stalls: first step: PhaseHook#2.before_run at step 1 for 30 s, at"
        " Gate.pass_through"
    )
    assert "the limit is 30 s" in text
    assert "session trainer: step 0, in run 1 for 30 s" in text
    assert "background task 'refresh'" in text
    _, why = text.split("\nwhy:\n")
    assert "session 'trainer'" in why
    assert "task 'a stranger'" in why


@pytest.mark.parametrize("phase", HOOK_METHODS)
async def test_every_phase_is_watched(phase: str, clock: ManualClock) -> None:
    """A hook that hangs in any method, from `begin` to `close`, is found."""
    gate = Gate()
    watchdog = WatchdogHook(5)

    async def main() -> None:
        # `begin` and `end` go in this order, `close` in reverse.
        watched = PhaseHook(phase, gate.pass_through)
        await run_session(
            doubling(watchdog, watched, stop_grace_period_secs=60),
            1,
            "loss",
        )

    task = await parked(main(), 20)
    clock.advance(11)
    (stall,) = watchdog.stalls
    assert "Gate.pass_through" in stall.report
    if phase != "begin":  # before there is a coordinator the hook of the await is not known
        assert stall.what.startswith(f"PhaseHook.{phase}")
    gate.opened.set()
    await task
    assert clock.pending == 0


async def test_the_first_step_has_a_limit_of_its_own(clock: ManualClock) -> None:
    """The first run of each created session may take longer; the later ones have the limit of a
    step.
    """
    gate = Gate()

    async def step() -> None:
        await gate.pass_through()

    watchdog = WatchdogHook(10, first_step_secs=100)
    faults = FaultInjectionHook({("before_run", 3): ah.AbortedError("lost")})
    async with ah.AsyncMonitoredSession(step, [watchdog, faults], recovery=NO_BACKOFF) as session:
        for _ in range(3):
            gate.opened.clear()
            run = await parked(session.run("step"), 30)
            clock.advance(50)
            gate.opened.set()
            await run
        assert found(watchdog) == [("step", "operation 'step' at step 2", 10)]
        assert session.status().recoveries == 1


class SlowListener(CheckpointSaverListener):
    """Waits in each save."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    async def before_save(self, *_: object) -> None:
        await self.gate.pass_through()


def saving(gate: Gate, folder: Path) -> ah.SessionRunHook:
    return CheckpointSaverHook(
        folder, every=ah.Every(steps=1), listeners=[SlowListener(gate)], save_on_begin=False
    )


def evaluating(gate: Gate, folder: Path) -> ah.SessionRunHook:
    return EvaluatorHook(gate.pass_through, every=ah.Every(steps=1), at_end=False)


def other(gate: Gate, folder: Path) -> ah.SessionRunHook:
    return PhaseHook("after_run", gate.pass_through)


@pytest.mark.parametrize(
    ("make", "limits", "phase", "secs"),
    [
        (saving, {}, "first step", 10),
        (evaluating, {"first_step_secs": 300}, "first step", 300),
        (evaluating, {"first_step_secs": 1e9}, None, 1000),
        (other, {}, "first step", 10),
    ],
)
async def test_hooks_that_hold_up_a_step(
    make: Any,
    limits: dict[str, Any],
    phase: str | None,
    secs: float,
    clock: ManualClock,
    tmp_path: Path,
) -> None:
    """A save or an evaluation has the limit of its step, and none if that is infinite."""
    gate = Gate()
    watchdog = WatchdogHook(10, **limits)
    async with doubling(watchdog, make(gate, tmp_path)) as session:
        run = asyncio.create_task(session.run("loss"))
        await until_true(
            lambda: any("after_run" in activity.what for activity in session.status().doing)
        )
        clock.advance(secs - 1)
        assert found(watchdog) == []
        clock.advance(1)
        assert [(stall.phase, stall.secs) for stall in watchdog.stalls] == (
            [] if phase is None else [(phase, secs)]
        )
        gate.opened.set()
        await run


async def test_a_stop_ends_the_waits(clock: ManualClock) -> None:
    """With "stop" a wait that stalls ends cleanly, and the reason names the wait."""
    watchdog = WatchdogHook(10, wait_secs=20, on_stall="stop")
    steps = ah.MemoryStepStore(run="digits")
    async with doubling(watchdog, GlobalStepWaiterHook(7), global_step=steps) as session:
        run = await parked(session.run("loss"), 20)
        clock.advance(21)
        with pytest.raises(
            ah.StopRequestedError,
            match=r"wait: GlobalStepWaiterHook.before_run .* step 7 of digits",
        ):
            await run
    assert str(session.stop_reason).startswith(
        "the session stalls: wait: GlobalStepWaiterHook.before_run"
    )


async def test_the_hook_may_be_used_again(clock: ManualClock) -> None:
    """A second session starts without stalls."""
    watchdog = WatchdogHook(10, wait_secs=10)
    await watchdog.close(None)  # before a session
    for _ in range(2):
        async with doubling(watchdog) as session:
            await session.run("loss")
            clock.advance(25)
            assert len(watchdog.stalls) == 1
        assert clock.pending == 0
    assert repr(watchdog) == "WatchdogHook(10, on_stall='report', stalls: 1)"
