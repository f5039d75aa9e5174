"""TensorFlow's own tests of the hooks that count (6-17 and 41-47 in the table): stopping, logging,
steps per second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.hooks import NotedRates
from tests.support.sessions import NO_BACKOFF, counting_graph, make_runs
from tests.tensorflow.blocks import train

pytestmark = pytest.mark.every_python


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    """What the hooks have logged at this level since the last look."""
    found = [
        record.getMessage()
        for record in caplog.records
        if record.name == "aiohooks.hooks" and record.levelno == level
    ]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def log_at_info(caplog: pytest.LogCaptureFixture) -> None:
    """Hooks log at level info."""
    caplog.set_level(logging.INFO, logger="aiohooks.hooks")


def training_graph() -> ah.Graph:
    """Make a graph whose `train` advances the step; `look` does not."""
    graph = counting_graph()
    graph.operation(name="look")(lambda: 42)
    return graph


# -- stopping at a step


async def test_stop_at_a_step_over_a_restart() -> None:
    """`last_step` counts over restarts, `num_steps` from where the session starts; the number of
    runs is exact.
    """
    steps = ah.MemoryStepStore()
    variables = ah.Variables()
    runs: list[int] = []
    for hook in (
        ah.StopAtStepHook(last_step=3),
        ah.StopAtStepHook(last_step=5),
        ah.StopAtStepHook(num_steps=4),
    ):
        async with ah.AsyncMonitoredSession(
            training_graph(), [hook], global_step=steps, variables=variables
        ) as session:
            runs.append(0)
            while not session.should_stop():
                await session.run("train")
                runs[-1] += 1
    assert runs == [3, 2, 4]
    assert variables.snapshot() == {"total": 9}


async def test_a_recovery_does_not_move_the_last_step() -> None:
    """`num_steps` are completed steps: a failed run does not count, its completed steps do."""
    hook = FaultInjectionHook(
        {("before_run", 2): ah.AbortedError("lost"), ("after_run", 3): ah.AbortedError("lost")}
    )
    async with ah.AsyncMonitoredSession(
        training_graph(),
        [ah.StopAtStepHook(num_steps=5), hook],
        recovery=NO_BACKOFF,
        global_step=ah.MemoryStepStore(100),
    ) as session:
        while not session.should_stop():
            await session.run("train")
        assert session.global_step.latest.step == 105


# -- logging values


async def log_of(
    caplog: pytest.LogCaptureFixture, hook: ah.LoggingHook, runs: Iterable[Any], **options: Any
) -> list[str]:
    """Return what one session logs, with "|" where its block ended; a number among the runs is
    seconds that pass.
    """
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(training_graph(), [hook], **options) as session:
            for run in runs:
                if isinstance(run, str):
                    await session.run(run)
                else:
                    clock.advance(run)
            found = lines(caplog)
    return [*found, "|", *lines(caplog)]


async def test_log_at_the_end_only(caplog: pytest.LogCaptureFixture) -> None:
    """With `at_end` alone nothing is logged before the end, and one line then, with the values of
    the end.
    """
    hook = ah.LoggingHook(["total"], at_end=True)
    assert await log_of(caplog, hook, ["train"] * 3) == ["|", "step 3: total = 3"]


@pytest.mark.parametrize("at_end", [False, True])
async def test_log_every_so_many_steps(caplog: pytest.LogCaptureFixture, at_end: bool) -> None:
    """The first run is logged, then each crossing of a multiple; the end only on request. Another
    session starts over.
    """
    hook = ah.LoggingHook({"t": "train"}, every=ah.Every(steps=10), at_end=at_end)
    for _ in range(2):
        found = await log_of(caplog, hook, ["train"] * 32)
        wanted = [
            "step 1: t = 1",
            *[f"step {step}: t = 1 (0.000 sec)" for step in (10, 20, 30)],
            "|",
        ]
        assert found[:5] == wanted
        # The line of the end is a run of its own, here one more step.
        assert found[5:] == (["step 32: t = 1 (0.000 sec)"] if at_end else [])


@pytest.mark.parametrize("at_end", [False, True])
async def test_log_every_so_many_seconds(caplog: pytest.LogCaptureFixture, at_end: bool) -> None:
    """The first run is logged, then the first one after each period; runs at the same time are
    not.
    """
    hook = ah.LoggingHook({"x": "x"}, every=ah.Every(secs=1), at_end=at_end)
    found = await log_of(caplog, hook, ["train", "train", 0.75, "train", 0.25, "train", "train"])
    wanted = ["step 1: x = 1", "step 4: x = 1 (1.000 sec)", "|"]
    assert found == [*wanted, *(["step 5: x = 1 (0.000 sec)"] if at_end else [])]


async def test_log_what_the_formatter_makes(caplog: pytest.LogCaptureFixture) -> None:
    """The formatter gets the values by tag, and what it returns is logged as it is."""
    hook = ah.LoggingHook(
        {"b": "x", "a": "loss"},
        every=ah.Every(steps=10),
        formatter=lambda values: f"100 % {values}",
    )
    assert await log_of(caplog, hook, ["train"]) == ["100 % {'b': 1, 'a': 10}", "|"]


# -- steps per second


async def rates(every: ah.Every, runs: int) -> list[tuple[int, float]]:
    """Return the steps and rates that a counter reports, at two runs a second."""
    found: list[tuple[int, float]] = []
    with ManualClock() as clock:
        hook = NotedRates(every, lambda step, rate: found.append((step, rate)))
        async with ah.AsyncMonitoredSession(training_graph(), [hook]) as session:
            for _ in range(runs):
                clock.advance(0.5)
                await session.run("train")
        assert hook.steps_per_sec == (found[-1][1] if found else None)
    return found


async def test_count_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    """It reports at each multiple, from the first one on, and logs what it reports; no warning."""
    assert await rates(ah.Every(steps=10), 30) == [(10, 2), (20, 2), (30, 2)]
    assert lines(caplog) == [f"global_step/sec: 2 (at step {step})" for step in (10, 20, 30)]
    assert lines(caplog, logging.WARNING) == []


async def test_count_every_so_many_seconds() -> None:
    """It reports at the first run when the seconds are over."""
    assert await rates(ah.Every(secs=0.9), 6) == [(2, 2), (4, 2), (6, 2)]


async def test_a_step_that_does_not_move_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Runs that do not advance the step are warned about, at most five times in each session of
    each hook.
    """
    hooks = [ah.hooks.StepCounterHook(), ah.hooks.StepCounterHook()]
    for _ in range(2):
        async with ah.AsyncMonitoredSession(training_graph(), hooks) as session:
            await make_runs(session, 9, "look")
        found = lines(caplog, logging.WARNING)
        assert len(found) == 10
        assert all("the global step (0) has not been increased" in line for line in found)


async def test_no_rate_where_no_time_passed(caplog: pytest.LogCaptureFixture) -> None:
    """Where the clock stood still there is no rate, and nothing is reported."""
    with ManualClock():
        hook = ah.hooks.StepCounterHook(ah.Every(steps=1))
        async with ah.AsyncMonitoredSession(training_graph(), [hook]) as session:
            await train(3)(session)
    assert hook.steps_per_sec is None
    assert lines(caplog) == []


async def test_a_counter_starts_anew_in_each_session() -> None:
    """The time between two sessions belongs to neither, and a recovery does not start it again."""
    found: list[tuple[int, float]] = []
    with ManualClock() as clock:
        hook = NotedRates(ah.Every(steps=2), lambda step, rate: found.append((step, rate)))
        steps = ah.MemoryStepStore()
        for _ in range(2):
            lost = FaultInjectionHook({("before_run", 2): ah.AbortedError("lost")})
            async with ah.AsyncMonitoredSession(
                training_graph(), [hook, lost], global_step=steps, recovery=NO_BACKOFF
            ) as session:
                for _ in range(2):
                    clock.advance(1)
                    await session.run("train")
            clock.advance(1000)
    assert found == [(2, 1.0), (4, 1.0)]
