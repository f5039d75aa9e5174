"""`Every`: when something is due, by steps, by seconds, or at given steps."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiohooks.errors import NotReadyError
from aiohooks.hooks.every import Every, EveryTimer

pytestmark = pytest.mark.every_python


def test_a_step_that_was_reset_is_due_again_after_a_restart() -> None:
    """After a reset to a lower step nothing is due; restarted from there, the boundaries count again."""
    timer = Every(steps=10).timer()
    timer.start(0, 0.0)
    timer.mark(100, 0.0)
    assert not timer.due(50, 0.0)
    assert not timer.due(100, 0.0)
    timer.start(50, 0.0)
    assert timer.due(60, 0.0)


# --- seconds


def test_due_by_seconds() -> None:
    """Seconds count from the last mark, not from a grid."""
    timer = Every(secs=60).timer()
    timer.start(0, 1000.0)
    assert not timer.due(1, 1059.9)
    assert timer.due(2, 1060.0)
    assert timer.due(3, 1090.0)
    assert timer.mark(3, 1090.0) == (90.0, 3)
    assert not timer.due(4, 1149.0)
    assert timer.due(4, 1150.0)
    assert timer.mark(4, 1150.0) == (60.0, 1)


def test_seconds_wait_for_after() -> None:
    """However much time has passed, nothing is due at `after` or before it."""
    timer = Every(secs=1, after=10).timer()
    timer.start(0, 0.0)
    assert not timer.due(10, 100.0)
    assert timer.due(11, 100.0)


# --- several units


def test_whichever_unit_comes_first() -> None:
    """With several units, any of them makes it due, and a mark restarts all of them."""
    every = Every(steps=100, secs=60, at=(5,))
    timer = every.timer()
    timer.start(0, 0.0)
    assert not timer.due(4, 59.0)
    assert timer.due(5, 0.0)
    timer.mark(5, 30.0)
    assert not timer.due(50, 89.0)
    assert timer.due(50, 90.0)
    timer.mark(50, 90.0)
    assert timer.due(100, 91.0)


# --- the timer


def test_due_changes_nothing() -> None:
    """`due` may be called any number of times."""
    timer = Every(steps=10).timer()
    timer.start(0, 0.0)
    assert [timer.due(10, 0.0) for _ in range(3)] == [True] * 3


def test_timer_must_be_started() -> None:
    """Before `start` the timer does not know where to count from: an error says so."""
    timer = Every(steps=10).timer()
    with pytest.raises(NotReadyError, match=r"EveryTimer of Every\(steps=10.*not started.*call start"):
        timer.due(10, 0.0)
    with pytest.raises(NotReadyError, match="call start"):
        timer.mark(10, 0.0)
    timer.start(3, 0.0)
    assert "last at step 3" in repr(timer)


def test_resume_starts_once_and_then_moves_back_only() -> None:
    """The first `resume` starts the timer; later ones move the step back, never forward, and leave the time."""
    timer = Every(steps=10, secs=5).timer()
    assert timer.last_step is None
    timer.resume(20, 1.0)
    timer.resume(25, 3.0)
    assert (timer.last_step, timer.due(21, 5.9), timer.due(21, 6.0)) == (20, False, True)
    timer.resume(8, 4.0)
    assert (timer.last_step, timer.due(10, 4.0), timer.due(9, 6.0)) == (8, True, True)


def test_every_is_a_value() -> None:
    """Equal schedules are equal, can be keys, and cannot change; each timer is separate."""
    assert Every(at=[1, 2], secs=3) == Every(at=(1, 2), secs=3)
    assert len({Every(steps=1), Every(steps=1), Every(secs=1)}) == 2
    with pytest.raises(AttributeError):
        Every(steps=1).steps = 2  # type: ignore[misc]
    every = Every(steps=1)
    assert isinstance(every.timer(), EveryTimer)
    assert every.timer() is not every.timer()


# --- bad values


def test_units_are_keywords_only() -> None:
    """`Every(10)` is ambiguous between steps and seconds: it is refused."""
    with pytest.raises(TypeError):
        Every(10)  # type: ignore[call-arg]


# --- in general


@given(
    period=st.integers(1, 20) | st.none(),
    after=st.integers(0, 30),
    at=st.lists(st.integers(1, 200), unique=True).map(sorted),
    start=st.integers(0, 50),
    jumps=st.lists(st.integers(1, 40), max_size=30),
)
def test_due_exactly_when_a_boundary_is_passed(
    period: int | None, after: int, at: list[int], start: int, jumps: list[int]
) -> None:
    """For any jumps: a step is due iff a boundary lies after the last due step and not after this one."""
    boundaries = {step for step in at if step > after} | (set() if period is None else {*range(after + period, 3000, period)})
    assume(period is not None or at)
    timer = Every(steps=period, at=at, after=after).timer()
    timer.start(start, 0.0)
    last = step = start
    for jump in jumps:
        step += jump
        passed = [boundary for boundary in boundaries if last < boundary <= step]
        assert timer.due(step, 0.0) == bool(passed)
        if passed:
            assert timer.mark(step, 0.0) == (0.0, step - last)
            last = step
