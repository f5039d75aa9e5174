"""The failure of a background task leaves the session, unless code outside of the session's own
tasks has got it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import logged_errors
from tests.support.hooks import PhaseHook
from tests.support.sessions import doubling, outcome
from tests.support.waiting import forever, raises_after, ticks

pytestmark = pytest.mark.every_python


@pytest.fixture
def failure() -> OSError:
    """The failure of a background task."""
    return OSError("the upload failed")


# -- who else waits when a task fails, and gets the failure


async def waits_in_session(session: ah.AsyncMonitoredSession) -> None:
    await session.until(forever())


async def gives_up(session: ah.AsyncMonitoredSession) -> None:
    """Handles the failure of the other task, which is not its business."""
    with pytest.raises(OSError, match="upload"):
        await session.until(forever())


OTHERS = [waits_in_session, gives_up]


# -- what the block does meanwhile


async def works(session: ah.AsyncMonitoredSession) -> None:
    """The block waits for something of its own."""
    await ticks(30)


async def leaves(session: ah.AsyncMonitoredSession) -> None:
    """`end` of the hook takes longer than the task."""


async def closes(session: ah.AsyncMonitoredSession) -> None:
    await session.aclose()


@pytest.mark.parametrize("body", [works, leaves, closes])
@pytest.mark.parametrize("other", [None, *OTHERS])
@pytest.mark.parametrize("owner", ["session", "coord"])
async def test_a_failure_that_only_tasks_of_the_session_have_got_leaves_it(
    body: Callable[[Any], Awaitable[None]],
    other: Callable[[Any], Awaitable[None]] | None,
    owner: str,
    failure: OSError,
) -> None:
    """Whatever the other background tasks do with it, and wherever the block is."""

    async def use(session: ah.AsyncMonitoredSession) -> None:
        starts: Any = session if owner == "session" else session.coord
        starts.start_soon(raises_after(10, failure), name="upload")
        if other is not None:
            starts.start_soon(other, session)
        await body(session)

    async def end(session: object) -> None:
        await ticks(30)

    assert await outcome(doubling(PhaseHook("end", end)), use) is failure


END_ERRORS = [ah.errors.OutOfRangeError("end of the input"), ValueError("of the hook")]


@pytest.mark.parametrize("error", END_ERRORS, ids=repr)
@pytest.mark.parametrize("is_caught", [False, True])
@pytest.mark.parametrize("body", [leaves, closes])
async def test_an_error_of_end_hides_no_failure(
    body: Callable[[Any], Awaitable[None]],
    is_caught: bool,
    error: Exception,
    failure: OSError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A task fails while `end` does: its failure is raised, also if the block would swallow or
    handle the error of `end`, which is noted and logged.
    """

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(raises_after(10, failure))
        with contextlib.suppress(type(error) if is_caught else ZeroDivisionError):
            await body(session)

    assert await outcome(doubling(PhaseHook("end", raises_after(30, error))), use) is failure
    assert f"and then: {error!r}" in failure.__notes__
    assert error in logged_errors(caplog)


async def test_errors_of_end_keep_the_failure_that_is_among_them(failure: OSError) -> None:
    """One hook passes the failure on, and another one fails: both are raised, each once."""

    async def wait(_: object) -> None:
        await session.until(forever())

    error = ValueError("of the hook")
    hooks = [PhaseHook("end", wait), PhaseHook("end", raises_after(30, error))]
    session = doubling(*hooks)

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(raises_after(10, failure))

    raised: Any = await outcome(session, use)
    assert raised.exceptions == (failure, error)
    assert not any("background task had failed" in note for note in failure.__notes__)


@pytest.mark.parametrize("starter", ["a background task", "a hook"])
@pytest.mark.parametrize("is_closing", [False, True], ids=["closed", "closing"])
@pytest.mark.parametrize("error", [None, ValueError("of the block")], ids=repr)
async def test_a_failure_that_what_the_session_has_started_gets_by_closing_it_leaves_the_session(
    error: Exception | None, is_closing: bool, starter: str, failure: OSError
) -> None:
    """Tasks that a background task or a hook has started call `aclose`, and get the failure: so
    does the block, as its error or as a note of its own one.
    """
    closings = list[asyncio.Task[None]]()

    async def close() -> None:
        await ticks(10)
        with pytest.raises(OSError, match="upload"):
            await session.aclose()

    async def start(_: object = None) -> None:
        closings.extend(asyncio.create_task(close()) for _ in range(2))

    async def use(_: object) -> None:
        if starter == "a hook":
            await session.run("loss")
        else:
            session.start_soon(start)
        session.start_soon(raises_after(3, failure))
        await ticks(15 if is_closing else 60)

    hooks = [PhaseHook("close", lambda _: ticks(20))]
    if starter == "a hook":
        hooks.append(PhaseHook("before_run", start))
    session = doubling(*hooks)
    assert await outcome(session, use, error) is (error or failure)
    await asyncio.gather(*closings)
    await session.aclose()
    note = f"a background task had failed: {failure!r}"
    assert error is None or note in error.__notes__


async def test_a_clean_end_of_the_opening_hides_no_failure(failure: OSError) -> None:
    """A hook's task fails, and then a hook ends the opening by what another session around this one
    would swallow.
    """

    class Worker(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            coord.start_soon(raises_after(3, failure))
            await ticks(30)
            raise ah.errors.OutOfRangeError("no input")

    assert await outcome(doubling(Worker())) is failure
