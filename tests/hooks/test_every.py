"""`Every`: when something is due, by steps, by seconds, or at given steps."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiohooks.errors import NotReadyError
from aiohooks.hooks.every import Every
from aiohooks.testing import ManualClock

pytestmark = pytest.mark.every_python


# Calls of a timer, one after another: the method, the step, the time, the answer.
CALLS: list[tuple[Every, list[tuple[str, int, float, object]]]] = [
    (  # seconds count from the last mark, not from a grid
        Every(secs=60),
        [
            ("start", 0, 1000.0, None),
            ("due", 1, 1059.5, False),
            ("due", 3, 1090.0, True),
            ("mark", 3, 1090.0, (90.0, 3)),
            ("due", 4, 1149.0, False),
            ("due", 4, 1150.0, True),
            ("mark", 4, 1150.0, (60.0, 1)),
        ],
    ),
    # after a reset to a lower step nothing is due; restarted from there, the boundaries count again
    (
        Every(steps=10),
        [
            ("start", 0, 0.0, None),
            ("due", 10, 0.0, True),
            ("due", 10, 0.0, True),  # which changes nothing
            ("mark", 100, 0.0, (0.0, 100)),
            ("due", 50, 0.0, False),
            ("due", 100, 0.0, False),
            ("start", 50, 0.0, None),
            ("due", 60, 0.0, True),
        ],
    ),
    # the first `resume` starts the timer; later ones move the step back, never forward, and leave
    # the time
    (
        Every(steps=10, secs=5),
        [
            ("resume", 20, 1.0, None),
            ("resume", 25, 3.0, None),
            ("due", 21, 5.5, False),
            ("resume", 8, 5.5, None),
            ("due", 10, 5.5, True),
            ("due", 9, 5.5, False),
            ("due", 9, 6.0, True),
        ],
    ),
    # With several units, any of them makes it due, and a mark restarts all of them.
    (
        Every(steps=100, secs=60, at=(5,)),
        [
            ("start", 0, 0.0, None),
            ("due", 4, 29.0, False),
            ("due", 5, 30.0, True),
            ("mark", 5, 30.0, (30.0, 5)),
            ("due", 50, 89.0, False),
            ("due", 50, 90.0, True),
            ("mark", 50, 90.0, (60.0, 45)),
            ("due", 100, 91.0, True),
        ],
    ),
]


@pytest.mark.parametrize(("every", "calls"), CALLS)
def test_when_it_is_due(every: Every, calls: list[tuple[str, int, float, object]]) -> None:
    """By steps and by the session's clock, also after a reset, and after a recovery that moves the
    step back.
    """
    with ManualClock() as clock:
        began = clock.now()
        timer = every.timer()
        for method, step, now, answer in calls:
            clock.advance(began + now - clock.now())
            assert getattr(timer, method)(step) == answer, (method, step, now)


def test_timer_must_be_started() -> None:
    """Before `start` the timer does not know where to count from: an error says so."""
    with ManualClock():
        timer = Every(steps=10).timer()
        assert timer.last_step is None
        with pytest.raises(
            NotReadyError, match=r"EveryTimer of Every\(steps=10.*not started.*call start"
        ):
            timer.due(10)
        with pytest.raises(NotReadyError, match="call start"):
            timer.mark(10)
        timer.start(3)
        assert timer.last_step == 3
        assert "last at step 3" in repr(timer)


def test_every_is_a_value() -> None:
    """Equal schedules are equal, can be keys, and cannot change; each timer is separate; a bare
    number is ambiguous.
    """
    assert Every(at=[1, 2], secs=3) == Every(at=(1, 2), secs=3)
    assert len({Every(steps=1), Every(steps=1), Every(secs=1)}) == 2
    with pytest.raises(AttributeError):
        Every(steps=1).steps = 2  # type: ignore[misc]
    every = Every(steps=1)
    assert every.timer() is not every.timer()
    with pytest.raises(TypeError):
        Every(10)  # type: ignore[call-arg]


@given(
    period=st.integers(1, 20) | st.none(),
    at=st.lists(st.integers(1, 200), unique=True).map(sorted),
    start=st.integers(0, 50),
    jumps=st.lists(st.integers(1, 40), max_size=30),
)
def test_due_exactly_when_a_boundary_is_passed(
    period: int | None, at: list[int], start: int, jumps: list[int]
) -> None:
    """For any jumps: a step is due iff a boundary lies after the last due step and not after this
    one.
    """
    boundaries = {*at, *(() if period is None else range(period, 3000, period))}
    assume(period is not None or at)
    with ManualClock():
        timer = Every(steps=period, at=at[::-1]).timer()
        timer.start(start)
        last = step = start
        for jump in jumps:
            step += jump
            passed = [boundary for boundary in boundaries if last < boundary <= step]
            assert timer.due(step) == bool(passed)
            if passed:
                assert timer.mark(step) == (0.0, step - last)
                last = step
