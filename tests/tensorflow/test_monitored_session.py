"""TensorFlow's own tests of its monitored session (71-171 in the table): running, what hooks see of
it, stopping.
"""

from __future__ import annotations

import asyncio
import traceback

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, RecordingHook
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting, counting_graph, run_session

pytestmark = pytest.mark.every_python

# -- making one, and running


async def test_the_traceback_ends_where_the_error_was_raised() -> None:
    """An error of an operation is the same object outside, and its traceback still ends in the
    user's function.
    """
    error = ValueError("bad batch")
    graph = ah.Graph()

    @graph.train_op
    async def train() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(ValueError, match="bad batch") as caught:
        await run_session(
            ah.AsyncMonitoredSession(graph, [RecordingHook(suspend=True)]), 1, "train"
        )
    assert caught.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "train"


# -- should_stop


async def test_a_failed_run_is_no_stop() -> None:
    """An error of a run that the body catches is no stop: the next run works, and the end is
    clean.
    """
    hook = FaultInjectionHook({("before_run", 1): OSError("once")})
    async with counting(hook) as session:
        with pytest.raises(OSError, match="once"):
            await session.run("train")
        assert not session.should_stop()
        assert not session.coord.should_stop()
        assert await session.run("train") == 1
    assert hook.phases()[-2:] == ["end", "close"]


# -- the singular one


async def test_the_raw_session() -> None:
    """`raw_session()` is the session that hooks get; None when it is closed."""
    given: list[ah.Session] = []

    async def keep(session: ah.Session, coord: ah.Coordinator) -> None:
        given.append(session)

    session = ah.session.AsyncSingularMonitoredSession(
        counting_graph(), [PhaseHook("after_create_session", keep)]
    )
    async with session:
        raw = session.raw_session()
        assert isinstance(raw, ah.Session)
        assert given == [raw]
        assert await raw.run("loss") == 10
    assert session.raw_session() is None
    assert given[0].closed
