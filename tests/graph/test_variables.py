"""Variables: the values of a graph's variables, a session's own or shared."""

from __future__ import annotations

import asyncio

import pytest

import aiohooks as ah
from aiohooks.graph.graph import values_of
from aiohooks.testing import ManualClock
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph, run_session
from tests.support.waiting import advance_clock, parked, ticks

pytestmark = pytest.mark.every_python


async def test_shared_variables_outlive_their_sessions() -> None:
    """Sessions that share variables, whose repr says what is there, continue from each other's
    values, also at the same time.
    """
    graph = counting_graph()
    variables = ah.Variables()
    assert (variables.ready, repr(variables)) == (False, "<Variables none, not ready>")
    async with ah.AsyncMonitoredSession(graph, variables=variables) as first:
        await first.run("train")
        await run_session(
            ah.AsyncMonitoredSession(graph, variables=variables), 1, "train", {"x": 10}
        )
        assert await first.run("total") == 11
    assert (variables.ready, repr(variables)) == (True, "<Variables total, ready>")
    async with ah.AsyncMonitoredSession(graph, variables=variables) as three:
        assert await three.run("total") == 11
        assert three.global_step.latest.step == 0


async def test_a_graph_with_more_variables_brings_their_initial_values() -> None:
    """Shared variables that are ready get the initial values of those they have not had, and keep
    the others.
    """
    graph = counting_graph()
    variables = ah.Variables()
    await run_session(ah.AsyncMonitoredSession(graph, variables=variables), 1, "train")

    async def add() -> None:
        ah.graph.get_default_graph().variable("extra", lambda: 7)

    async with ah.AsyncMonitoredSession(
        graph, [PhaseHook("begin", add)], variables=variables
    ) as session:
        assert await session.run(["total", "extra"]) == [1, 7]
    assert variables.snapshot() == {"total": 1, "extra": 7}


async def test_a_snapshot_is_consistent() -> None:
    """A later commit does not change a snapshot, and changing a snapshot changes no variable."""
    session = ah.Session(counting_graph())
    before = session.variables.snapshot()
    await session.run("train")
    assert before == {"total": 0}
    before["total"] = 99
    assert session.variables.snapshot() == {"total": 1}


async def test_assigning_is_all_or_nothing() -> None:
    """`assign` sets all values of a mapping together; an unknown name changes nothing, and the
    error suggests a variable.
    """
    session = ah.Session(counting_graph())
    with refused(
        ah.errors.FetchError,
        "'totl' is not a variable",
        "did you mean 'total'?",
        "known are: total",
    ):
        session.variables.assign({"total": 5, "totl": 5})
    assert await session.run("total") == 0
    session.variables.assign({"total": 5})
    assert await session.run("total") == 5
    with refused(ah.errors.FetchError, "'w' is not a variable", "nothing is known by name here"):
        ah.Variables().assign({"w": 1})
    with refused(ah.errors.InvalidArgumentError, "values is None"):
        session.variables.assign(None)  # type: ignore[arg-type]


async def test_waiting_ends_at_its_deadline_exactly() -> None:
    """A wait that is not served ends when its time is up and not before."""
    with ManualClock() as clock:
        variables = ah.Variables()
        waiting = await parked(variables.wait_ready(100), 5)
        await advance_clock(clock, 99.9)
        assert not waiting.done()
        clock.advance(0.1)
        with refused(
            ah.errors.SessionNotReadyError,
            "not initialized within 100 s",
            "a chief running that shares these Variables",
        ):
            await waiting
        assert isinstance(waiting.exception(), TimeoutError)
        assert clock.pending == 0
    with refused(ah.errors.SessionNotReadyError, "not initialized within 0 s"):
        await variables.wait_ready(0)


async def test_waits_end_with_the_error_of_a_failed_chief() -> None:
    """If the session that initialises fails before it is done, waits end with its error, also those
    that begin later.
    """
    graph = counting_graph()
    variables = ah.Variables()
    error = OSError("no data")

    async def fail(session: ah.Session) -> None:
        await ticks()
        raise error

    waiting = asyncio.create_task(variables.wait_ready())
    creator = ah.ChiefSessionCreator(graph, variables=variables, scaffold=ah.Scaffold(init_fn=fail))
    with pytest.raises(OSError, match="no data"):
        async with ah.AsyncMonitoredSession(creator):
            pass
    for wait in (waiting, variables.wait_ready()):
        with refused(
            ah.errors.PublisherFailedError,
            "should have initialized the variables failed",
            "no data",
        ) as caught:
            await wait
        assert caught.value.__cause__ is error
    assert not variables.ready
    async with ah.AsyncMonitoredSession(graph, variables=variables):
        await variables.wait_ready()


def test_initial_values_are_set_all_or_none() -> None:
    """An initial value that cannot be made leaves the variables without those of the same graph."""

    def load() -> int:
        raise OSError("no such file")

    graph = counting_graph()
    variables = ah.Variables()
    graph.variable("weights", load)
    with pytest.raises(OSError, match="no such file"):
        ah.Session(graph, variables=variables)
    assert variables.snapshot() == {}


async def test_one_session_initialises_shared_variables() -> None:
    """The others wait until it has, or take its place if it fails; then no session initialises them
    again.
    """
    values = values_of(ah.Variables())
    assert await values.claim()
    values.initialize({"half": 1})
    second = asyncio.create_task(values.claim())
    third = asyncio.create_task(values.claim())
    await ticks()
    assert not second.done()
    values.discard()
    assert await second
    assert values.missing(["half"]) == ["half"]
    await ticks()
    assert not third.done()
    values.mark_ready()
    assert not await third
    assert not await values.claim()
