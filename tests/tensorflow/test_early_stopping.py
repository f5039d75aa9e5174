"""TensorFlow's own tests of the estimator's early stopping (289-298 in the table) and of its limit
in seconds (299).
"""

from __future__ import annotations

from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.stopping import EarlyStoppingHook, StopAtTimeHook
from aiohooks.testing import ManualClock
from tests.support.checks import invalid
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting

pytestmark = pytest.mark.every_python

# What the original's tests have in their event files: the step, and what was found there.
RECORDS = {
    1000: {"loss": 1.0, "accuracy": 0.5},
    1500: {"loss": 0.8, "accuracy": 0.6},
    2000: {"loss": 0.7, "accuracy": 0.7},
    2500: {"loss": 0.7, "accuracy": 0.7},
    3000: {"loss": 0.65, "accuracy": 0.7},
    3500: {"loss": 0.65, "accuracy": 0.7},
}


def reports(monitor: str = "loss", **options: Any) -> EarlyStoppingHook:
    """A hook that receives results and fetches nothing."""
    return EarlyStoppingHook(monitor=monitor, every=None, **options)


HIGH: dict[str, Any] = {"monitor": "accuracy", "mode": "max"}
LONG = ah.Every(steps=9000)


@pytest.mark.parametrize(
    ("hooks", "first", "expected"),
    [
        # A value above (below) the threshold; one that is never reached, or only before the first
        # step that is reported.
        ([reports(**HIGH, stopping_threshold=0.8)], 0, False),
        ([reports(**HIGH, stopping_threshold=0.6)], 4000, False),
        ([reports(**HIGH, stopping_threshold=0.6)], 0, True),
        ([reports(stopping_threshold=0.6)], 0, False),
        ([reports(stopping_threshold=0.7)], 4000, False),
        ([reports(stopping_threshold=0.7)], 0, True),
        # So many steps without a larger (smaller) value; an equal value is none.
        *[
            ([reports(**HIGH, patience=ah.Every(steps=steps))], 0, steps < 2000)
            for steps in (500, 1000, 1500, 2000)
        ],
        *[([reports(patience=ah.Every(steps=steps))], 0, steps < 1000) for steps in (500, 1000)],
        ([reports(patience=ah.Every(steps=500))], 3500, False),
        # Any of several.
        *[
            (
                [
                    reports(**HIGH, stopping_threshold=good, name="a"),
                    reports(**HIGH, patience=long, name="b"),
                ],
                0,
                expected,
            )
            for good, long, expected in (
                (0.95, LONG, False),
                (0.5, LONG, True),
                (0.95, ah.Every(steps=1000), True),
            )
        ],
    ],
)
async def test_what_stops(hooks: list[EarlyStoppingHook], first: int, expected: bool) -> None:
    """A session stops when one of its hooks does, which receives the records as an evaluator passes
    them.
    """
    async with counting(*hooks) as session:
        for step, record in RECORDS.items():
            for hook in hooks if step >= first else ():
                hook.report(step, record)
        if not session.should_stop():
            await session.run("loss")
    assert (session.should_stop() and session.stop_reason is not None) is expected


async def test_an_old_plateau_does_not_stop() -> None:
    """A plateau before a resumed run does not count: what counts is the age of the current best
    value.
    """
    hook = reports(patience=ah.Every(steps=500))
    await hook.begin()
    for step in (1000, 1500, 2000):
        hook.report(step, RECORDS[step])
    assert hook.report(2500, RECORDS[2500])
    resumed = reports(patience=ah.Every(steps=1000))
    await resumed.begin()
    resumed.load_state_dict(hook.state_dict())
    assert not resumed.report(3000, RECORDS[3000])
    assert (resumed.best, resumed.best_step, resumed.reason) == (0.65, 3000, None)


@pytest.mark.parametrize("wanted", [False, True])
async def test_any_function_may_decide(wanted: bool) -> None:
    """A function of your own that decides becomes a hook, by steps, without any option in
    seconds.
    """
    asked: list[int] = []

    def decide(context: ah.SessionRunContext, values: ah.SessionRunValues) -> None:
        asked.append(context.global_step)
        if wanted:
            context.request_stop(f"enough at {context.global_step}")

    hook = ah.hook("after_run", every=ah.Every(steps=100))(decide)
    async with counting(hook, global_step=ah.MemoryStepStore(98)) as session:
        for _ in range(4):
            if not session.should_stop():
                await session.run("train")
        assert session.should_stop() is wanted
    assert asked == [100]


@pytest.mark.parametrize("not_a_hook", [5, None, "stop"])
def test_what_decides_must_be_a_function(not_a_hook: Any) -> None:
    """Anything but a function is refused when the hook is made."""
    with invalid("give"):
        ah.hook("after_run")(not_a_hook)


def test_both_periods_are_one() -> None:
    """Steps and seconds may both be given: whichever comes first. Nothing is set unless you set
    it.
    """
    for every in (ah.Every(steps=10), ah.Every(steps=10, secs=60)):
        EarlyStoppingHook("loss", patience=1, every=every)


async def test_stop_and_its_reason_follow_the_observations() -> None:
    """No stop before the function decides; then it is recorded, with the reason, in the run that
    saw it.
    """
    loss = {"value": 1.0}

    async def step() -> dict[str, float]:
        return {"loss": loss["value"]}

    hook = EarlyStoppingHook("loss", stopping_threshold=0.5)
    async with ah.AsyncMonitoredSession(step, [hook]) as session:
        await session.run("step")
        assert (session.should_stop(), hook.reason) == (False, None)
        loss["value"] = 0.25
        await session.run("step")
        assert (session.should_stop(), session.stop_reason) == (True, hook.reason)


async def test_workers_see_the_stop() -> None:
    """A task that observes the training stops it by the coordinator: the current run is the last
    one.
    """
    hook = EarlyStoppingHook(stopping_threshold=0.5)

    async def tell(*_: object) -> None:
        if hook.report(1, 0.25):
            seen.append(1)

    seen: list[int] = []
    async with counting(hook, PhaseHook("before_run", tell)) as session:
        assert await session.run("train") == 1
        assert session.should_stop()
    assert seen == [1]


async def test_stops_after_so_many_seconds() -> None:
    """Counted from the beginning of the session and not from the making of the hook: not at 0, 500
    and 900 s, but at 1100 s.
    """
    with ManualClock() as clock:
        hook = StopAtTimeHook(secs=1000)
        clock.advance(5000)
        async with counting(hook) as session:
            for secs in (0, 500, 400):
                clock.advance(secs)
                await session.run("train")
                assert not session.should_stop()
            clock.advance(200)
            assert session.should_stop()
        assert session.stop_reason == "the time is up: 1000 s"
