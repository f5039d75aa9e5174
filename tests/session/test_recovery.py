"""Recovery: which errors are recovered, from where, and what is new and what is kept afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import aiohooks as ah
from aiohooks.stores import open_step_store
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.hooks import PhaseHook, SessionRecorder
from tests.support.sessions import NO_BACKOFF, counting_graph, double, failing_step, recovery_policy
from tests.support.waiting import ticks, until_true

pytestmark = pytest.mark.every_python

PHASES = ("after_create_session", "before_run", "after_run")


# -- what is recovered


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("error", [ah.AbortedError("lost"), ah.UnavailableError("away")], ids=repr)
@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_an_error_of_a_hook_is_recovered(phase: str, error: Exception, suspend: bool) -> None:
    """Out of every phase of a run: a new session, `after_create_session` of all hooks, the run again, `begin` never."""
    sessions, other = SessionRecorder(), RecordingHook(suspend=suspend)
    # At the creation, the first failure is in the session's own first one.
    fault = FaultInjectionHook({(phase, 1): error}, suspend=suspend)
    async with ah.AsyncMonitoredSession(double, [sessions, fault, other], recovery=NO_BACKOFF) as session:
        assert await session.run("loss", {"batch": 4}) == 8
        assert [one.closed for one in sessions.sessions] == [True, False]
        assert session.status().recoveries == 1
    assert all(one.closed for one in sessions.sessions)
    for hook in (fault, other):
        assert hook.phases().count("begin") == 1
        assert hook.closed_with == [None]
    assert sessions.attempts == ([1] if phase == "after_create_session" else [1, 2])
    assert session.global_step.latest.step == (2 if phase == "after_run" else 1)


async def test_an_error_of_the_run_is_recovered() -> None:
    """The run that failed is repeated with the same fetches and feeds; variables and step are as they were before it."""
    graph, sessions = counting_graph(), SessionRecorder()
    calls: list[int] = []

    async def risky(x: int) -> int:
        calls.append(x)
        await asyncio.sleep(0)
        if len(calls) == 2:
            raise ah.UnavailableError("away")
        return x

    graph.operation(risky)
    async with ah.AsyncMonitoredSession(graph, [sessions], recovery=NO_BACKOFF) as session:
        for x in (1, 10, 100):
            assert await session.run(["train", "risky"], {"x": x}) == [x, x]
        assert await session.run("total") == 111
    assert calls == [1, 10, 10, 100]
    assert session.global_step.latest.step == 3
    assert sessions.attempts == [1, 1, 2, 1, 1]
    assert len(sessions.sessions) == len(set(map(id, sessions.coords))) == 2


async def test_an_error_of_the_creation_is_recovered() -> None:
    """A creator that fails is called again, before any hook gets a session."""
    graph, record = counting_graph(), RecordingHook()

    class Creator:
        calls = 0
        graph = counting_graph()

        async def create_session(self) -> ah.Session:
            self.calls += 1
            if self.calls < 3:
                raise ah.UnavailableError("not yet")
            return ah.Session(self.graph)

    creator = Creator()
    async with ah.AsyncMonitoredSession(creator, [record], recovery=NO_BACKOFF) as session:
        await session.run("train")
        assert session.status().recoveries == 2
    assert creator.calls == 3
    assert record.phases() == ["begin", "after_create_session", "before_run", "after_run", "end", "close"]
    assert not graph.finalized


async def test_a_store_that_refuses_from_the_start_is_not_retried(tmp_path: Path) -> None:
    """A wrong path, password or permission before the first run is no outage; its error comes out immediately, as itself."""
    (tmp_path / "file").write_text("")
    hook = RecordingHook()
    with pytest.raises(ah.errors.StoreRefusedError) as caught:
        async with ah.AsyncMonitoredSession(
            counting_graph(), [hook], recovery=NO_BACKOFF, global_step=open_step_store(f"local://{tmp_path}/file/runs")
        ):
            raise AssertionError("entered")
    assert not hasattr(caught.value, "__notes__")
    assert hook.phases() == ["begin", "close"]


async def test_a_store_that_refuses_later_is_recovered_from() -> None:
    """A server may be moving, or be given its password too late."""
    refusals = iter([ah.errors.StoreRefusedError("this one is a replica now")])

    async def step() -> dict[str, int]:
        for refusal in refusals:
            raise refusal
        return {"loss": 1}

    async with ah.AsyncMonitoredSession(step, recovery=NO_BACKOFF) as session:
        assert await session.run("loss") == 1
        assert session.status().recoveries == 1


async def test_the_policy_names_the_errors() -> None:
    """`on` replaces the types of the default policy; subclasses count."""
    step = failing_step(ConnectionResetError("reset"), ah.AbortedError("lost"))
    async with ah.AsyncMonitoredSession(step, recovery=recovery_policy(on=(ConnectionError,))) as session:
        with pytest.raises(ah.AbortedError, match="lost"):
            await session.run("loss")
        assert session.status().recoveries == 1


@pytest.mark.parametrize("error", [ah.AbortedError("lost"), ah.UnavailableError("away")], ids=repr)
async def test_a_singular_session_never_recovers(error: Exception) -> None:
    """Every error of a singular session reaches the caller; its raw session is available while it is open."""
    hook = RecordingHook()

    session = ah.AsyncSingularMonitoredSession(failing_step(error), [hook])
    raw: list[ah.Session | None] = []

    async def use() -> None:
        async with session:
            raw.append(session.raw_session())
            await session.run("loss")

    with pytest.raises(type(error)) as caught:
        await use()
    assert caught.value is error
    assert session.raw_session() is None
    assert raw[0] is not None
    assert raw[0].closed
    assert hook.phases() == ["begin", "after_create_session", "before_run", "close"]


LOST, END, BAD = ah.AbortedError("lost"), ah.OutOfRangeError("end"), OSError("bad")


@pytest.mark.parametrize(
    ("errors", "recovers"),
    [
        ([LOST], True),
        ([LOST, LOST], True),
        ([LOST, END], True),
        ([END, END], False),
        ([LOST, BAD], False),
        ([ExceptionGroup("inner", [LOST, END]), LOST], True),
        ([ExceptionGroup("inner", [LOST, BAD]), LOST], False),
    ],
)
def test_which_groups_are_recovered(errors: list[Exception], recovers: bool) -> None:
    """A group is recovered if each of its errors is recoverable or a clean end, and at least one is recoverable."""
    assert ah.RecoveryPolicy().recovers(ExceptionGroup("several", errors)) is recovers


async def test_several_hooks_that_are_lost_are_recovered_together() -> None:
    """Two hooks that fail in one phase are one recovery."""

    async def lose(run_context: ah.SessionRunContext) -> None:
        try:
            await asyncio.sleep(0)
        finally:
            if run_context.attempt == 1:
                raise ah.AbortedError("lost")

    hooks = [PhaseHook("before_run", lose), PhaseHook("before_run", lose)]
    async with ah.AsyncMonitoredSession(double, hooks, recovery=NO_BACKOFF) as session:
        assert await session.run("loss") == 2
        assert session.status().recoveries == 1


# -- background tasks


async def test_a_background_task_that_is_lost_is_recovered() -> None:
    """A task of the created session that fails with a recoverable error ends the run; it is recovered and repeated.

    Recovery ends the session's own tasks, and the hook starts them anew; tasks of the monitored session live on.
    """
    started: list[asyncio.Task[None]] = []
    proceed = asyncio.Event()

    async def background() -> None:
        await asyncio.Event().wait()

    async def lose() -> None:
        raise ah.AbortedError("lost in the background")

    async def start(session: ah.Session, coord: ah.Coordinator) -> None:
        started.append(coord.start_soon(background))
        if len(started) == 1:
            coord.start_soon(lose)
        else:
            proceed.set()

    async def step() -> dict[str, int]:
        await proceed.wait()
        return {"loss": 5}

    async with ah.AsyncMonitoredSession(step, [PhaseHook("after_create_session", start)], recovery=NO_BACKOFF) as session:
        lives = session.start_soon(background)
        assert await session.run("loss") == 5
        assert [task.cancelled() for task in started] == [True, False]
        assert not lives.done()
        assert not session.should_stop()
        for task in (lives, started[1]):
            task.cancel()


async def test_a_task_of_the_whole_session_is_not_recovered() -> None:
    """What `session.start_soon` started cannot be started again: its failure, of whatever type, ends the session."""
    error = ah.AbortedError("lost")

    async def lose() -> None:
        raise error

    async def step() -> None:
        await asyncio.Event().wait()

    session = ah.AsyncMonitoredSession(step, recovery=NO_BACKOFF)

    async def use() -> None:
        async with session:
            session.start_soon(lose)
            await session.run("step")

    with pytest.raises(ah.AbortedError, match="lost") as caught:
        await use()
    assert caught.value is error
    assert session.status().recoveries == 0


async def test_a_stop_outlives_a_recovery() -> None:
    """A stop requested of the coordinator of a lost session is recorded after the recovery, with its reason."""

    async def ask(run_context: ah.SessionRunContext) -> None:
        if run_context.attempt == 1:
            run_context.request_stop("the hook says so")
            raise ah.AbortedError("lost")

    async with ah.AsyncMonitoredSession(double, [PhaseHook("before_run", ask)], recovery=NO_BACKOFF) as session:
        assert await session.run("loss") == 2
        assert session.should_stop()
        assert session.coord.should_stop()
    assert session.stop_reason == "the hook says so"


async def test_a_run_after_an_interrupted_recovery_has_a_session(clock: ManualClock) -> None:
    """A run that is cancelled in the pause before a new session leaves none behind; the next run creates it."""
    sessions = SessionRecorder()
    fault = FaultInjectionHook({("before_run", 1): ah.UnavailableError("away")})
    policy = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=5))
    async with ah.AsyncMonitoredSession(double, [sessions, fault], recovery=policy) as session:
        running = asyncio.create_task(session.run("loss"))
        await until_true(lambda: sessions.sessions[0].closed)
        await ticks(10)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert await session.run("loss", {"batch": 4}) == 8
        assert [one.closed for one in sessions.sessions] == [True, False]
