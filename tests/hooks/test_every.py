"""`Every`: when something is due, by steps, by seconds, or at given steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiohooks.errors import NotReadyError
from aiohooks.hooks.every import Every, EveryTimer

pytestmark = pytest.mark.every_python


def due_steps(every: Every, steps: list[int], *, start: int = 0, secs_per_step: float = 0.0) -> list[int]:
    """Return the steps at which it was due and marked."""
    timer = every.timer()
    timer.start(start, start * secs_per_step)
    found: list[int] = []
    for step in steps:
        now = step * secs_per_step
        if timer.due(step, now):
            timer.mark(step, now)
            found.append(step)
    return found


# --- steps


def test_due_at_each_multiple() -> None:
    """Counted one by one, the multiples are due."""
    assert due_steps(Every(steps=10), list(range(1, 35))) == [10, 20, 30]


def test_due_when_a_boundary_is_jumped_over() -> None:
    """A step that passes a boundary is due as if it had reached it; several passed boundaries are due once."""
    assert due_steps(Every(steps=25), [24, 26, 49, 50, 120, 124, 125]) == [26, 50, 120, 125]


def test_boundaries_do_not_drift() -> None:
    """Being late once does not move the later boundaries."""
    assert due_steps(Every(steps=10), [13, 19, 20, 21, 30]) == [13, 20, 30]


def test_start_in_the_middle() -> None:
    """After a restart from step 95 the next boundary is 100; the one at the start is not repeated."""
    assert due_steps(Every(steps=10), [96, 99, 100, 110], start=95) == [100, 110]
    assert due_steps(Every(steps=10), [100, 101, 110], start=100) == [110]


def test_steps_are_counted_from_after() -> None:
    """`after` is where counting begins: nothing is due at it or before it."""
    assert due_steps(Every(steps=10, after=5), list(range(1, 40))) == [15, 25, 35]
    assert due_steps(Every(steps=10, after=15), [5, 14, 15, 16, 26, 36]) == [26, 36]
    assert due_steps(Every(steps=3, after=4), [2, 20], start=1) == [20]


def test_a_step_that_was_reset_is_due_again_after_a_restart() -> None:
    """After a reset to a lower step nothing is due; restarted from there, the boundaries count again."""
    timer = Every(steps=10).timer()
    timer.start(0, 0.0)
    timer.mark(100, 0.0)
    assert not timer.due(50, 0.0)
    assert not timer.due(100, 0.0)
    timer.start(50, 0.0)
    assert timer.due(60, 0.0)


# --- at


def test_due_at_listed_steps() -> None:
    """Each listed step is due once, when it is reached or passed."""
    assert due_steps(Every(at=(10, 50)), list(range(1, 100))) == [10, 50]
    assert due_steps(Every(at=[10, 50]), [9, 12, 40, 60]) == [12, 60]
    assert due_steps(Every(at=(10, 50)), [5, 60, 70]) == [60]
    assert due_steps(Every(at=(10, 50), after=10), [10, 20, 50]) == [50]
    assert due_steps(Every(at=(10, 50), after=30), [40, 50]) == [50]


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
    period=st.integers(1, 20),
    after=st.integers(0, 30),
    at=st.lists(st.integers(1, 200), unique=True).map(sorted),
    start=st.integers(0, 50),
    jumps=st.lists(st.integers(1, 40), max_size=30),
)
def test_due_exactly_when_a_boundary_is_passed(period: int, after: int, at: list[int], start: int, jumps: list[int]) -> None:
    """For any jumps: a step is due iff a boundary lies after the last due step and not after this one."""
    boundaries = {step for step in at if step > after} | set(range(after + period, 3000, period))
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
