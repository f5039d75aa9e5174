"""TrackerHook: each metric reaches the tracker once or is counted as lost, and nothing waits for
the tracker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.adapters.trackers import TrackerHook, TrackerStatistics
from aiohooks.adapters.trackers import hook as tracker_hook
from aiohooks.errors import HookTimeoutError
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import invalid
from tests.support.hooks import PhaseHook
from tests.support.sessions import (
    counting,
    going_back,
    make_runs,
    train,
)
from tests.support.trackers import ScriptedTracker
from tests.support.waiting import forever, ticks, until_true

EACH = ah.Every(steps=1)


@pytest.fixture
def hanging() -> Iterator[ScriptedTracker]:
    """A tracker that hangs at step 2, until the test ends at the latest."""
    tracker = ScriptedTracker()
    tracker.hangs_at = 2
    yield tracker
    tracker.release()


def hook_of(tracker: ScriptedTracker, **options: Any) -> TrackerHook:
    """Make a hook that sends the loss of each step."""
    return TrackerHook(tracker, ["loss"], **{"every": EACH, **options})


class Adding(ah.SessionRunHook):
    """Adds metrics in both phases."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        run_context.metrics["lr"] = 0.5

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        run_context.metrics["seen"] = np.float32(run_context.global_step)


async def run_set_back(hook: TrackerHook, *others: Any, runs: int = 6, to: int = 2) -> None:
    """Make runs of a session that is set back from step 4 to step 2."""
    async with going_back(hook, *others, at=5, to=to) as session:
        await make_runs(session, runs, "train")


async def end_hanging(
    session: asyncio.Task[None], tracker: ScriptedTracker, clock: ManualClock, secs: float = 5.0
) -> None:
    """Let the time pass that the end of a session waits for a tracker that hangs."""
    await until_true(lambda: session.done() or (tracker.is_hanging.is_set() and clock.pending))
    await ticks(20)  # the end of the session has a time limit before the hook is closed
    clock.advance(secs)
    await session


async def close_hanging(
    hook: TrackerHook, tracker: ScriptedTracker, clock: ManualClock, runs: int
) -> None:
    """Make so many runs, the tracker hanging, and end the session when it has waited for that."""
    await end_hanging(asyncio.create_task(train(hook, runs=runs)), tracker, clock)


# -- what is sent


async def test_values_and_metrics_of_due_runs_are_sent(clock: ManualClock) -> None:
    """The tracker gets the fetched values and what other hooks added, with step and time, and is
    closed.
    """
    tracker = ScriptedTracker()
    hook = TrackerHook(tracker, {"train/loss": "loss"}, every=ah.Every(steps=2))
    async with counting(hook, Adding()) as session:
        for _ in range(5):
            clock.advance(10)
            await session.run("train")
    assert tracker.metrics == [
        (step, {"lr": 0.5, "seen": step, "train/loss": 10.0}) for step in (2, 4)
    ]
    assert tracker.times[1] - tracker.times[0] == 20
    assert tracker.calls == ["start 0", "log 2", "log 4", "close"]
    assert tracker.closed == [None]
    assert hook.statistics() == TrackerStatistics(sent=2)


async def test_metrics_alone_are_enough() -> None:
    """Without values the metrics of other hooks are sent, a run without any sends nothing; a value
    hides that name.
    """
    tracker = ScriptedTracker()
    await train(TrackerHook(tracker, every=EACH), runs=2)
    assert tracker.calls == ["close"]
    await train(TrackerHook(tracker, every=EACH), Adding(), runs=1)
    await train(TrackerHook(tracker, {"lr": "loss"}, every=EACH), Adding(), runs=2)
    assert tracker.metrics == [(1, {"lr": 0.5, "seen": 1.0}), (2, {"lr": 10.0, "seen": 2.0})]


async def test_a_tracker_with_coroutine_methods_is_refused() -> None:
    """A thread would call them, and never await what they return."""

    class Async(ScriptedTracker):
        async def log_metrics(self, *_: Any) -> None: ...  # type: ignore[override]

    with invalid("has coroutine methods", "write them as `def`"):
        hook_of(Async())


async def test_what_is_not_a_number_is_refused() -> None:
    """A metric that is not one number is an error of the run, which names it."""

    async def add(context: ah.SessionRunContext) -> None:
        context.metrics["gradient"] = np.zeros(3)

    with invalid("'gradient'", "shape (3,)"):
        await train(hook_of(ScriptedTracker()), PhaseHook("before_run", add), runs=1)


# -- a tracker that hangs, fails, loses


async def test_a_session_does_not_wait_for_a_tracker_that_hangs(
    hanging: ScriptedTracker,
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metrics that do not fit into the queue, and those left at the end, are lost; the thread ends
    with the call that hangs.
    """
    monkeypatch.setattr(tracker_hook, "MAX_QUEUE", 3)
    hook = hook_of(hanging)
    await close_hanging(hook, hanging, clock, runs=20)
    assert hanging.steps == [1]
    error = "the session has ended, and it did not answer for 5.0 s"
    assert hook.statistics() == TrackerStatistics(sent=1, lost=19, error=error)
    assert clock.now() == 5.0
    assert "ScriptedTracker() has not ended 5.0 s after the session" in caplog.text
    messages = [text for text in caplog.messages if "are lost" in text]
    assert len(messages) == 2
    assert "3 wait already" in messages[0]
    assert "of 10 steps" in messages[1]
    hanging.release()
    assert hanging.calls == ["start 0", "log 1", "log 2", "close"]
    assert hook.statistics().sent == 1


@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), SystemExit(1)], ids=["an error", "SystemExit"]
)
async def test_a_tracker_that_fails_stops_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics that it does not take are counted, and reported at the first, the tenth and the
    hundredth step.
    """
    tracker = ScriptedTracker({0: error})
    hook = hook_of(tracker)
    await train(hook, runs=120)
    assert hook.statistics() == TrackerStatistics(
        lost=120, error=f"{type(error).__name__}: {error}"
    )
    messages = [text for text in caplog.messages if "are lost" in text]
    assert [message.split("the metrics of ")[1].split(" steps")[0] for message in messages] == [
        "1",
        "10",
        "100",
    ]
    assert all(str(error) in message for message in messages)


async def test_start_is_tried_again_with_the_next_metrics() -> None:
    """A tracker that cannot be reached at first gets what comes when it can be."""
    tracker = ScriptedTracker({-1: ConnectionError("not yet")})
    hook = hook_of(tracker)

    async def reach(context: ah.SessionRunContext, values: object) -> None:
        if context.global_step == 3:
            await until_true(lambda: hook.statistics().lost == 2)
            del tracker.failures[-1]

    await train(hook, PhaseHook("after_run", reach), runs=4)
    assert tracker.steps == [3, 4]


async def test_a_close_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged."""
    tracker = ScriptedTracker({0: OSError("no room")})
    await train(hook_of(tracker), runs=3)
    assert "ScriptedTracker() was not closed: OSError('no room')" in caplog.text


# -- how sessions end


async def test_a_tracker_learns_how_the_session_ended() -> None:
    """`close` gets the error that ended it; without a session there is no thread, and the tracker
    is not used.
    """
    tracker, error = ScriptedTracker(), ZeroDivisionError()
    for fault in (("before_run", 3), ("begin", 1)):
        with pytest.raises(ZeroDivisionError):
            await train(hook_of(tracker), FaultInjectionHook({fault: error}), runs=5)
    assert tracker.steps == [1, 2]
    assert tracker.closed == [error]
    assert len(tracker.threads) == 1


@pytest.mark.every_python
@pytest.mark.parametrize("end", ["cancelled", "cancelled twice at the end", "a short grace period"])
async def test_what_cuts_the_end_loses_nothing(
    hanging: ScriptedTracker, clock: ManualClock, end: str
) -> None:
    """It passes through, waits as long for a tracker that hangs as a clean end or its own limit,
    and the metrics that are left are counted.
    """
    parked = asyncio.Event()

    async def wait() -> None:
        parked.set()
        await (forever() if end == "cancelled" else asyncio.sleep(0))

    short = end == "a short grace period"
    hook = hook_of(hanging, drain_secs=60 if short else 5)

    async def run() -> None:
        hooks = [hook, FaultInjectionHook({("before_run", 4): wait})]
        grace_secs = 1.0 if short else 10.0
        async with counting(*hooks, stop_grace_period_secs=grace_secs) as session:
            await make_runs(session, 4, "train")

    session = asyncio.create_task(run())
    await parked.wait()
    if end == "cancelled":
        session.cancel()
    await until_true(lambda: hanging.is_hanging.is_set() and clock.pending)
    if end == "cancelled twice at the end":
        await ticks(20)
        for _ in range(2):
            session.cancel()
            await asyncio.sleep(0)
    with pytest.raises(HookTimeoutError if short else asyncio.CancelledError):
        await end_hanging(session, hanging, clock, 1.0 if short else 5.0)
    assert hook.statistics().lost == (2 if end == "cancelled" else 3)
    hanging.release()
    assert isinstance(hanging.closed[0], asyncio.CancelledError) == (end == "cancelled")


# -- recoveries and restarts


async def test_a_recovery_that_does_not_set_back_changes_nothing() -> None:
    """The tracker is not started again."""
    tracker = ScriptedTracker()
    await run_set_back(hook_of(tracker), runs=5, to=4)
    assert tracker.calls == ["start 0", "log 1", "log 2", "log 3", "log 4", "log 5", "close"]


async def test_queued_steps_that_are_made_again_are_dropped(hanging: ScriptedTracker) -> None:
    """What waits when a recovery sets the run back is sent once."""

    async def release(session: ah.Session, coord: ah.Coordinator) -> None:
        if hanging.is_hanging.is_set():
            hanging.hangs_at = None
            hanging.released.set()

    class Counts(ah.SessionRunHook):
        runs = 0

        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            await until_true(lambda: run_context.global_step < 3 or hanging.is_hanging.is_set())
            self.runs += 1
            run_context.metrics["run"] = self.runs

    releases = ah.configure(
        PhaseHook("after_create_session", release), order=91
    )  # after the hook, which is set back first
    await run_set_back(hook_of(hanging), Counts(), releases)
    assert [(step, metrics["run"]) for step, metrics in hanging.metrics] == [
        (1, 1),
        (2, 2),
        (3, 6),
        (4, 7),
    ]
