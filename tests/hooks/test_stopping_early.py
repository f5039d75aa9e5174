"""EarlyStoppingHook: when it stops, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.hooks.stopping import EarlyStoppingHook
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.evaluations import giving, stopped_at
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph

pytestmark = pytest.mark.every_python

NAN, INF = math.nan, math.inf


# (values, options, the step at which it stops)
PATIENCE: list[tuple[list[Any], dict[str, Any], int | None]] = [
    ([3, 2, 2, 1, 1, 1, 0], {"patience": 2}, 6),
    ([3, 2, 1, 0], {"patience": 1}, None),
    ([1, 2, 0.5, 2, 2], {"patience": 2}, 5),
    ([1, 2, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 6),
    ([1, 2, 3, 2, 2], {"patience": 2, "mode": "max"}, 5),
    ([1.0, 0.95, 0.91, 0.8, 0.79], {"patience": 2, "min_delta": 0.1}, 3),
    ([1.0, 0.8, 0.79, 0.69, 0.6], {"patience": 2, "min_delta": 0.1}, None),
    ([100, 99.5, 99.1, 98], {"patience": 2, "min_delta": 0.01, "min_delta_mode": "rel"}, 3),
    ([100, 98.5, 97.5, 96], {"patience": 2, "min_delta": 0.01, "min_delta_mode": "rel"}, None),
    ([-100, -100.5, -100.9], {"patience": 2, "min_delta": 0.01, "min_delta_mode": "rel"}, 3),
    ([-1, -2, -2, -2], {"patience": 2}, 4),
    ([9, 9, 9, 3, 3, 3], {"patience": 2, "start_from_step": 4}, 6),
    ([1, 2, 2, 2, 2, 2, 2], {"patience_steps": 5}, 6),
    ([1] * 20, {"patience": 2, "every": ah.Every(steps=5)}, 15),
    ([1] * 20, {"patience_steps": 7, "every": ah.Every(steps=5)}, 15),
    ([1] * 9, {"patience": 3, "patience_steps": 2}, 3),
]

THRESHOLDS: list[tuple[list[Any], dict[str, Any], int | None]] = [
    ([3, 2, 1, 0], {"stopping_threshold": 1}, 3),
    ([3, 2, 1.01], {"stopping_threshold": 1}, None),
    ([0.5, 0.9, 1.0, 0.2], {"stopping_threshold": 1.0, "mode": "max"}, 3),
    ([3, 10, 11, 3], {"divergence_threshold": 10}, 3),
    ([3, -10, -11], {"divergence_threshold": -10, "mode": "max"}, 3),
    ([3, NAN, 2], {"patience": 5}, 2),
    ([3, INF, 2], {"patience": 5}, 2),
    ([3, -INF, 2], {"patience": 5}, 2),
    ([3, NAN, 2, NAN, NAN], {"patience": 2, "check_finite": False}, 5),
    ([NAN, NAN, 1], {"patience": 2, "check_finite": False}, 2),
    ([NAN, NAN, NAN], {"patience_steps": 2, "check_finite": False}, 3),
    ([NAN, 2], {"patience": 5, "start_from_step": 2}, None),
    ([INF, 2, 2, 2], {"patience": 3, "check_finite": False}, None),
]


@pytest.mark.parametrize(("values", "options", "at"), PATIENCE + THRESHOLDS)
async def test_when_it_stops(values: list[Any], options: dict[str, Any], at: int | None) -> None:
    """It stops at the first observation at which one of its limits is reached, and not before."""
    assert await stopped_at(values, EarlyStoppingHook("loss", **options)) == at


@pytest.mark.parametrize(
    ("values", "options", "reason"),
    [
        ([3, 2, 2], {"patience": 1}, "at step 3: loss = 2, no better for 1 observation; the best was 2 at step 2"),
        ([3, 3, 3], {"patience": 2}, "at step 3: loss = 3, no better for 2 observations; the best was 3 at step 1"),
        ([3, 3, 3], {"patience_steps": 2}, "at step 3: loss = 3, no better for 2 steps; the best was 3 at step 1"),
        (
            [NAN],
            {"patience": 1, "check_finite": False},
            "at step 1: loss = nan, no better for 1 observation; there was no good one",
        ),
        ([0.25], {"stopping_threshold": 0.5}, "at step 1: loss = 0.25 is as good as the threshold, 0.5"),
        ([0.75], {"divergence_threshold": 0.5}, "at step 1: loss = 0.75 is worse than the divergence threshold, 0.5"),
        ([INF], {"patience": 1}, "at step 1: loss = inf is not finite"),
    ],
)
async def test_the_reason(values: list[Any], options: dict[str, Any], reason: str) -> None:
    """The reason has the step, the value, and the limit; it is also the session's reason."""
    hook = EarlyStoppingHook("loss", **options)
    await stopped_at(values, hook)
    assert hook.reason == f"early stopping {reason}"


async def test_patience_in_seconds() -> None:
    """Seconds since the best value are those of the current clock."""
    with ManualClock() as clock:
        hook = EarlyStoppingHook("loss", patience_secs=10)
        async with ah.AsyncMonitoredSession(giving([3, 2, 2, 2, 2]), [hook]) as session:
            for secs in (100, 4, 5, 4, 1):
                assert not session.should_stop()
                clock.advance(secs)
                await session.run("step")
        assert hook.reason == "early stopping at step 5: loss = 2, no better for 10 s; the best was 2 at step 2"


async def test_the_best_value() -> None:
    """The best value and its step are available, even if it stopped at another one."""
    hook = EarlyStoppingHook("loss", mode="max", patience=3)
    await stopped_at([1, 5, 2, 3, 4], hook)
    assert (hook.best, hook.best_step, hook.waited) == (5.0, 2, 3)
    assert repr(hook) == "EarlyStoppingHook('loss', mode='max', best=5 at step 2)"


async def test_nothing_is_fetched_between_observations() -> None:
    """The value is fetched only in the runs of `every`, and not before `start_from_step`."""
    asked: list[int] = []
    graph, store = counting_graph(), ah.MemoryStepStore()

    @graph.operation
    def metric() -> float:
        asked.append(store.latest.step + 1)
        return 1.0

    hook = EarlyStoppingHook(graph.node("metric"), patience=100, every=ah.Every(steps=3), start_from_step=5)
    async with ah.AsyncMonitoredSession(graph, [hook], global_step=store) as session:
        for _ in range(10):
            await session.run("train")
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
    with refused(ah.errors.InvalidArgumentError, "loss is", "at step 1; early stopping needs one number"):
        await stopped_at([value], EarlyStoppingHook("loss", patience=1))


async def test_a_missing_metric_is_a_typed_error() -> None:
    """A name that the step does not return is an error that lists the known names."""
    with refused(ah.errors.FetchError, "'los'", "loss"):
        await stopped_at([1], EarlyStoppingHook("los", patience=1))


# -- observations from elsewhere


async def reported(hook: EarlyStoppingHook, values: Iterable[tuple[int, Any]]) -> str | None:
    """Return the session's stop reason after these reports."""
    async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
        for step, value in values:
            assert hook.report(step, value) == session.should_stop()
    return session.stop_reason


async def test_reports_are_observations() -> None:
    """A reported value counts as a fetched one; the stop is requested immediately."""
    hook = EarlyStoppingHook(patience=2)
    why = await reported(hook, [(10, 3.0), (20, 2.0), (30, 2.0), (40, 2.5), (50, 1.0)])
    assert why == "early stopping at step 40: the value = 2.5, no better for 2 observations; the best was 2 at step 20"
    assert hook.reason == why
    assert (hook.best, hook.best_step) == (1.0, 50)


async def test_reports_of_mappings() -> None:
    """With `monitor` the value is taken from a mapping; without `every` nothing is fetched."""
    hook = EarlyStoppingHook("accuracy", mode="max", patience=1, every=None)
    values = [(0, {"accuracy": 0.5, "loss": 1}), (10, {"accuracy": 0.25})]
    assert await reported(hook, values) == (
        "early stopping at step 10: accuracy = 0.25, no better for 1 observation; the best was 0.5 at step 0"
    )


async def test_reports_before_start_from_step_are_ignored() -> None:
    """Reports of steps before `start_from_step` are not observations, but must be numbers."""
    hook = EarlyStoppingHook(patience=1, start_from_step=10)
    why = await reported(hook, [(1, 0.0), (9, NAN), (10, 3.0), (11, 4.0)])
    assert why == "early stopping at step 11: the value = 4, no better for 1 observation; the best was 3 at step 10"


async def test_invalid_reports() -> None:
    """A mapping without the key, or without a `monitor`, and an invalid step are typed errors."""
    hook = EarlyStoppingHook("accuracy", patience=1, every=None)
    with refused(ah.errors.FetchError, "'accuracy' is not in the mapping reported at step 3; did you mean 'acuracy'?"):
        hook.report(3, {"acuracy": 1})
    with refused(ah.errors.InvalidArgumentError, "got a mapping of loss, lr at step 3; say which: monitor=..."):
        EarlyStoppingHook(patience=1).report(3, {"loss": 1, "lr": 2})
    with refused(ah.errors.InvalidArgumentError, "step is -1"):
        hook.report(-1, 1.0)


async def test_a_report_before_the_first_run() -> None:
    """A value that is reported while the session is created stops it before its first run."""
    hook = EarlyStoppingHook(stopping_threshold=1)

    async def early(*_: object) -> None:
        assert hook.report(0, 0.5)

    async with ah.AsyncMonitoredSession(counting_graph(), [PhaseHook("after_create_session", early), hook]) as session:
        assert session.should_stop()
        assert session.stop_reason == hook.reason


MODES: tuple[Literal["min", "max"], ...] = ("min", "max")


def test_repr() -> None:
    """The repr shows what is monitored and how."""
    assert [repr(EarlyStoppingHook("loss", mode=mode, patience=1)) for mode in MODES] == [
        "EarlyStoppingHook('loss', mode='min')",
        "EarlyStoppingHook('loss', mode='max')",
    ]
