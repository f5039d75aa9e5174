"""EarlyStoppingHook, StopAtStepHook and StopAtTimeHook: when they stop and why, over restarts and
recoveries; the states of the best observation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks._core.clock import set_current_clock
from aiohooks.hooks.stopping import EarlyStoppingHook, StopAtTimeHook
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import invalid, refused
from tests.support.evaluations import stopped_at
from tests.support.hooks import PhaseHook, RestoringHook
from tests.support.sessions import (
    NO_BACKOFF,
    counting,
    counting_graph,
    run_session,
    use_up,
)

pytestmark = pytest.mark.every_python

NAN = math.nan
INF = math.inf


# (values, options, the reason; None if it does not stop)
OBSERVED: list[tuple[list[Any], dict[str, Any], str | None]] = [
    (
        [3, 2, 2],
        {"patience": 1},
        "at step 3: loss = 2, no better for 1 observation; the best was 2 at step 2",
    ),
    (
        [3, 2, 2, 1, 1, 1, 0],
        {"patience": 2},
        "at step 6: loss = 1, no better for 2 observations; the best was 1 at step 4",
    ),
    ([3, 2, 1, 0], {"patience": 1}, None),
    (
        [1, 2, 2, 3, 3, 3],
        {"patience": 2, "mode": "max"},
        "at step 6: loss = 3, no better for 2 observations; the best was 3",
    ),
    (
        [1.0, 0.95, 0.91, 0.8],
        {"patience": 2, "min_delta": 0.1},
        "at step 3: loss = 0.91, no better for 2 observations; the be",
    ),
    ([1.0, 0.8, 0.79, 0.69, 0.6], {"patience": 2, "min_delta": 0.1}, None),
    (
        [1, 2, 2, 2, 2, 2],
        {"patience": ah.Every(steps=5)},
        "at step 6: loss = 2, no better for 5 steps; the best was 1 at step 1",
    ),
    (
        [1] * 20,
        {"patience": 2, "every": ah.Every(steps=5)},
        "at step 15: loss = 1, no better for 2 observations; the best was",
    ),
    (
        [1] * 20,
        {"patience": ah.Every(steps=7), "every": ah.Every(steps=5)},
        "at step 15: loss = 1, no better for 10 steps; ",
    ),
    ([3, 2, 1, 0], {"stopping_threshold": 1}, "at step 3: loss = 1 is as good as the threshold, 1"),
    ([3, 2, 1.01], {"stopping_threshold": 1}, None),
    (
        [0.5, 0.9, 1.0, 0.2],
        {"stopping_threshold": 1.0, "mode": "max"},
        "at step 3: loss = 1 is as good as the threshold, 1",
    ),
    ([3, NAN, 2], {"patience": 5}, "at step 2: loss = nan is not finite"),
    ([3, -INF, 2], {"stopping_threshold": 1}, "at step 2: loss = -inf is not finite"),
]


@pytest.mark.parametrize(("values", "options", "reason"), OBSERVED)
async def test_when_and_why_it_stops(
    values: list[Any], options: dict[str, Any], reason: str | None
) -> None:
    """It stops at the first observation at which a limit is reached; the reason has the step, the
    value, and the limit.
    """
    hook = EarlyStoppingHook("loss", **options)
    step = await stopped_at(values, hook)
    if reason is None:
        assert hook.reason is None
    else:
        assert str(hook.reason).startswith(f"early stopping {reason}")
        assert reason.startswith(f"at step {step}: ")


async def test_the_best_value() -> None:
    """The best value and its step are available, even if it stopped at another one."""
    hook = EarlyStoppingHook("loss", mode="max", patience=3)
    assert repr(hook) == "EarlyStoppingHook('loss', mode='max')"
    await stopped_at([1, 5, 2, 3, 4], hook)
    assert (hook.best, hook.best_step, hook.waited) == (5.0, 2, 3)
    assert repr(hook) == "EarlyStoppingHook('loss', mode='max', best=5 at step 2)"


async def test_nothing_is_fetched_between_observations() -> None:
    """The value is fetched only in the runs of `every`."""
    asked: list[int] = []
    graph = counting_graph()
    store = ah.MemoryStepStore()

    @graph.operation
    def metric() -> float:
        asked.append(store.latest.step + 1)
        return 1.0

    hook = EarlyStoppingHook(graph.node("metric"), patience=100, every=ah.Every(at=(6, 9)))
    await run_session(ah.AsyncMonitoredSession(graph, [hook], global_step=store), 10, "train")
    assert asked == [6, 9]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.array(2.0), np.array([2]), True])
async def test_any_single_number_is_accepted(value: Any) -> None:
    """Numbers of any library are accepted, and so are arrays of one element."""
    hook = EarlyStoppingHook("loss", patience=1)
    await stopped_at([value], hook)
    assert hook.best == float(np.max(value))
    assert type(hook.best) is float


@pytest.mark.parametrize("value", [None, "2", b"2", np.array([1, 2]), [1], 1j, 10**400])
async def test_anything_but_one_number_is_an_error(value: Any) -> None:
    """Anything else is refused, with the value and the step."""
    with invalid("loss is", "at step 1; early stopping needs one number"):
        await stopped_at([value], EarlyStoppingHook("loss", patience=1))


async def test_a_missing_metric_is_a_typed_error() -> None:
    """A name that the step does not return is an error that lists the known names."""
    with refused(ah.errors.FetchError, "'los'", "loss"):
        await stopped_at([1], EarlyStoppingHook("los", patience=1))


# -- observations from elsewhere


@pytest.mark.parametrize(
    ("options", "values", "reason"),
    [
        (
            {"patience": 2},
            [(10, 3.0), (20, 2.0), (30, 2.0), (40, 2.5), (50, 1.0)],
            "at step 40: the value = 2.5, no better for 2 observations; the best was 2 at step 20",
        ),
        (
            {"monitor": "accuracy", "mode": "max", "patience": 1, "every": None},
            [(0, {"accuracy": 0.5, "loss": 1}), (10, {"accuracy": 0.25})],
            "at step 10: accuracy = 0.25, no better for 1 observation; the best was 0.5 at step 0",
        ),
    ],
)
async def test_reports_are_observations(
    options: dict[str, Any], values: list[tuple[int, Any]], reason: str
) -> None:
    """A reported value, or that under `monitor` in a mapping, counts as a fetched one; the stop is
    requested immediately.
    """
    hook = EarlyStoppingHook(**options)
    async with counting(hook) as session:
        for step, value in values:
            assert hook.report(step, value) == session.should_stop()
    assert session.stop_reason == hook.reason == f"early stopping {reason}"


async def test_invalid_reports() -> None:
    """A mapping without the key, or without a `monitor`, and an invalid step are typed errors."""
    hook = EarlyStoppingHook("accuracy", patience=1, every=None)
    with refused(
        ah.errors.FetchError,
        "'accuracy' is not in the mapping reported at step 3; did you mean 'acuracy'?",
    ):
        hook.report(3, {"acuracy": 1})
    with invalid("got a mapping of loss, lr at step 3; say which: monitor=..."):
        EarlyStoppingHook(patience=1).report(3, {"loss": 1, "lr": 2})
    with invalid("step is -1"):
        hook.report(-1, 1.0)


async def test_a_report_before_the_first_run() -> None:
    """A value that is reported while the session is created stops it before its first run."""
    hook = EarlyStoppingHook(stopping_threshold=1)

    async def early(*_: object) -> None:
        assert hook.report(0, 0.5)

    async with counting(PhaseHook("after_create_session", early), hook) as session:
        assert session.should_stop()
        assert session.stop_reason == hook.reason


# -- restarts and recoveries


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_run_that_had_stopped_stops_again(has_ended: bool) -> None:
    """A resumed run stops before its first step, whether it was saved before the end or at it."""
    first, second = (EarlyStoppingHook(stopping_threshold=1) for _ in range(2))
    async with counting(first):
        first.report(1, 0.5)
        state = first.state_dict()
    if has_ended:
        state = first.state_dict()
    async with counting(second, RestoringHook(second, state)) as session:
        assert session.stop_reason == first.reason


async def test_what_is_observed_after_the_end_is_not_in_the_state() -> None:
    """An extra evaluation is no part of the run: the reports of its results change what the hook
    knows, and no checkpoint.
    """
    hook = EarlyStoppingHook(patience=1)
    async with counting(hook) as session:
        evaluated = session.coord.events.evaluated
        await evaluated.emit(1, {}, False)
        hook.report(1, 2.0)
        state = hook.state_dict()
        for step in (2, 3):
            await evaluated.emit(step, {}, True)
            hook.report(step, 3.0)
        assert session.stop_reason == hook.reason is not None
    assert hook.state_dict() == state
    assert hook.waited == 2


async def test_an_old_plateau_does_not_stop() -> None:
    """A plateau before a resumed run does not count: what counts is the age of the current best
    value.
    """
    hook = EarlyStoppingHook(patience=ah.Every(steps=500), every=None)
    await hook.begin()
    reports = [hook.report(step, loss) for step, loss in ((1500, 0.8), (2000, 0.7), (2500, 0.7))]
    assert reports == [False, False, True]
    resumed = EarlyStoppingHook(patience=ah.Every(steps=1000), every=None)
    await resumed.begin()
    resumed.load_state_dict(hook.state_dict())
    assert not resumed.report(3000, 0.65)
    assert (resumed.best, resumed.best_step, resumed.reason) == (0.65, 3000, None)


@pytest.mark.parametrize("other", [{"monitor": "accuracy"}, {"mode": "max"}])
async def test_the_state_of_another_value_is_ignored(
    other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The best of another value, or by another mode, is not compared with; a warning says so."""
    hook = EarlyStoppingHook("loss", patience=2)
    await stopped_at([1, 2], hook)
    second = EarlyStoppingHook(**{"monitor": "loss", "patience": 2, **other})
    await second.begin()
    second.load_state_dict(hook.state_dict())
    assert second.best is None
    assert "early stopping starts its counts again" in caplog.text


# -- the states of the best observation

LOSSES = [5, 3, 4, 1, 2, 2, 2]
BEST_STEP = 4


class Model:
    """Changes in place at every step, as a torch module does."""

    def __init__(self) -> None:
        self.weights = np.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights[:] = state["weights"]

    async def step(self, value: float) -> dict[str, float]:
        self.weights += 1
        return {"loss": value}


async def train(session: ah.AsyncMonitoredSession) -> None:
    await use_up(session.steps("loss", feeds=LOSSES[session.global_step.latest.step :]))


async def test_the_best_states_survive_a_restart_and_a_recovery(tmp_path: Path) -> None:
    """They are in the checkpoint: the best observation may be one of a process before."""
    for last, faults in (
        (5, {}),
        (len(LOSSES), {("before_run", 2): ah.errors.AbortedError("lost")}),
    ):
        model = Model()
        stopping = EarlyStoppingHook("loss", patience=100, restore_best={"model": model})
        creator = ah.ChiefSessionCreator(
            model.step, scaffold=ah.Scaffold(tracked={"model": model}), checkpoint_dir=tmp_path
        )
        saver = ah.CheckpointSaverHook(every=ah.Every(steps=1), background=False)
        hooks = [stopping, ah.StopAtStepHook(last_step=last), saver, FaultInjectionHook(faults)]
        async with ah.AsyncMonitoredSession(creator, hooks, recovery=NO_BACKOFF) as session:
            assert model.weights.tolist() == ([5, 5] if faults else [0, 0])
            await train(session)
        assert session.status().recoveries == len(faults)
        assert model.weights.tolist() == [BEST_STEP, BEST_STEP]


async def test_an_object_that_was_renamed_is_refused_when_the_session_opens() -> None:
    """Its best state belongs to another name, and would be missed after the last step."""
    hook = EarlyStoppingHook("loss", patience=2, restore_best={"model": Model()})
    await stopped_at([1, 2], hook)
    renamed = EarlyStoppingHook("loss", patience=2, restore_best={"network": Model()})
    await renamed.begin()
    with invalid("best states of ['model']", "restore_best has ['network']"):
        renamed.load_state_dict(hook.state_dict())


async def test_states_of_an_evaluation_elsewhere() -> None:
    """What was evaluated is given with the value: the model has changed since."""
    model = Model()
    stopping = EarlyStoppingHook(patience=100, every=None, restore_best={"model": model})
    async with ah.AsyncMonitoredSession(model.step, [stopping]) as session:
        async for _ in session.steps("loss", feeds=[1.0] * 5):
            stopping.report(1, 0.5, {"model": {"weights": np.array([1.0, 1.0])}})
            stopping.report(2, 0.75, {"model": {"weights": np.array([2.0, 2.0])}})
        with invalid("states has the best states of ['weights']", "['model']"):
            stopping.report(1, 0.5, {"weights": {}})
        with invalid("states is 5"):
            stopping.report(1, 0.5, 5)  # type: ignore[arg-type]
    assert model.weights.tolist() == [1, 1]


def test_an_object_without_a_state_is_refused() -> None:
    """By its name."""
    wrong: Any = {"model": 3}
    with invalid("restore_best['model'] is 3", "load_state_dict"):
        EarlyStoppingHook("loss", patience=1, restore_best=wrong)


# -- StopAtStepHook and StopAtTimeHook


class BusyClock(ManualClock):
    """A clock whose timers are late: the event loop had no time for them."""

    def call_later(self, secs: float, callback: Callable[[], object]) -> Any:
        return super().call_later(secs + 1e9, callback)


async def seconds_run(hook: StopAtTimeHook, clock: ManualClock) -> tuple[int, str | None]:
    """Return how many runs of one second each are made until the stop, and its reason."""
    runs = 0
    async with counting(hook) as session:
        while not session.should_stop():
            runs += 1
            await session.run("train")
            clock.advance(1)
    return runs, session.stop_reason


@pytest.mark.parametrize(
    ("start", "by", "reason"),
    [
        (59, 1, "step 60 reached the last step, 60"),
        (59, 3, "step 62 reached the last step, 60"),
        (60, 0, "step 60 reached the last step, 60"),
        (61, 0, "step 61 reached the last step, 60"),
    ],
)
async def test_the_reason_of_a_stop_at_a_step(start: int, by: int, reason: str) -> None:
    """The reason names the last step, and the present one if that is a later one: sessions may
    share the step.
    """
    steps = ah.MemoryStepStore(start)
    async with counting(ah.StopAtStepHook(last_step=60), global_step=steps) as session:
        if by:
            await steps.raise_to(start + by - 1)
            await session.run("train")
        assert session.stop_reason == reason


@pytest.mark.parametrize(
    ("secs", "runs", "reason"),
    [
        (10, 10, "the time is up: 10 s"),
        (7.5, 8, "the time is up: 7.5 s"),
        (0, 0, "the time is up: 0 s"),
    ],
)
async def test_when_and_why_the_time_is_up(secs: float, runs: int, reason: str) -> None:
    """Runs begin until the time is up, in seconds of the clock."""
    with ManualClock(now=500.0) as clock:
        hook = StopAtTimeHook(secs)
        for _ in range(2):  # the same object has its whole time again in the next session
            assert await seconds_run(hook, clock) == (runs, reason)
        assert clock.pending == 0


async def test_no_run_begins_late_in_a_busy_loop() -> None:
    """If the timer was late, the hook itself refuses the run: nothing is run, and the end is
    clean.
    """
    restore = set_current_clock(clock := BusyClock())
    try:
        late = StopAtTimeHook(secs=10)
        async with counting(late) as session:
            await session.run("train")
            clock.advance(10)
            assert not session.should_stop()
            await session.run("train")
            raise AssertionError("it ran")
        assert session.global_step.latest.step == 1
        assert session.stop_reason == "the time is up: 10 s"

        async def slow() -> None:
            clock.advance(10)

        async with ah.AsyncMonitoredSession(slow, [StopAtTimeHook(secs=10)]) as session:
            await session.run("slow")
            assert session.should_stop()
    finally:
        restore()
