"""TensorFlow's own tests of the coordinator (172-189 in the table) that
tests/session/test_coordinator.py does not have.
"""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from tests.support.waiting import fail

pytestmark = pytest.mark.every_python


async def fail_when_stopped(coord: ah.Coordinator, error: BaseException) -> None:
    """Wait for the stop, then fail."""
    await coord.wait_for_stop()
    raise error


# -- errors


@pytest.mark.parametrize("how", ["task", "request_stop", "stop_on_exception"])
async def test_join_raises_the_first_error(how: str) -> None:
    """The first error is raised by every `join` and by `raise_requested_exception`, the same
    object; a later one is noted.
    """
    coord, first, second = ah.Coordinator(), OSError("first"), OSError("second")
    coord.start_soon(coord.wait_for_stop)
    coord.start_soon(fail_when_stopped, coord, second)
    if how == "task":
        coord.start_soon(fail, first)
    elif how == "request_stop":
        coord.request_stop(first)
    else:
        with coord.stop_on_exception():
            raise first
    for _ in range(2):
        with pytest.raises(OSError, match="first") as caught:
            await coord.join()
        assert caught.value is first
    with pytest.raises(OSError, match="first"):
        coord.raise_requested_exception()
    assert coord.errors == [first, second]
    assert "second" in first.__notes__[-1]


@pytest.mark.parametrize("stopped", [False, True])
async def test_an_error_reported_after_the_join_is_raised_immediately(stopped: bool) -> None:
    """It would not be seen otherwise: it is raised where it is reported."""
    coord, late = ah.Coordinator(), OSError("late")
    if stopped:
        coord.request_stop()
    await coord.join()
    with pytest.raises(OSError, match="late") as caught:
        coord.request_stop(late)
    assert caught.value is late
    with pytest.raises(OSError, match="late"), coord.stop_on_exception():
        raise late
    coord.request_stop("a plain stop is fine")
    coord.request_stop(ah.OutOfRangeError("and so is a clean end"))


@pytest.mark.parametrize(
    "kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit], ids=lambda kind: kind.__name__
)
async def test_stop_on_exception_swallows_errors_only(kind: type[BaseException]) -> None:
    """A cancellation, a KeyboardInterrupt and a SystemExit pass through the block as they are, and
    stop nothing.
    """
    coord = ah.Coordinator()
    with pytest.raises(kind), coord.stop_on_exception():
        raise kind
    assert not coord.should_stop()
