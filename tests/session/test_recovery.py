"""Recovery: which errors are recovered, from where, what is new and what is kept afterwards, and
when it gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.graph.session import Plan
from aiohooks.stores import open_step_store
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook, choose, explore
from tests.support.checks import refused
from tests.support.hooks import PhaseHook, SessionRecorder
from tests.support.sessions import (
    NO_BACKOFF,
    Loader,
    counting,
    double,
    doubling,
    failing_step,
    outcome,
    recovery_policy,
    use_up,
)
from tests.support.waiting import parked, raises_after, ticks

pytestmark = pytest.mark.every_python

LOST = ah.AbortedError("lost")
AWAY = ah.UnavailableError("away")
END = ah.OutOfRangeError("end")
BAD = OSError("bad")
PAUSES = ah.RecoveryPolicy(backoff=ah.Backoff(60, 60, jitter=False))


# -- what is recovered


@pytest.mark.parametrize("phase", ["after_create_session", "before_run", "after_run"])
@pytest.mark.parametrize("error", [LOST, AWAY], ids=repr)
@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_an_error_of_a_hook_is_recovered(phase: str, error: Exception, suspend: bool) -> None:
    """Out of every phase of a run: a new session, `after_create_session` of all hooks, the run
    again, `begin` never.
    """
    sessions = SessionRecorder()
    other = RecordingHook(suspend=suspend)
    # At the creation, the first failure is in the session's own first one.
    fault = FaultInjectionHook({(phase, 1): error}, suspend=suspend)
    async with doubling(sessions, fault, other, recovery=NO_BACKOFF) as session:
        assert await session.run("loss", {"batch": 4}) == 8
        assert [raw.closed for raw in sessions.sessions] == [True, False]
        assert len({*map(id, sessions.coords)}) == 2
        assert session.status().recoveries == 1
    assert all(raw.closed for raw in sessions.sessions)
    assert [(hook.phases().count("begin"), hook.closed_with) for hook in (fault, other)] == [
        (1, [None])
    ] * 2
    assert sessions.attempts == ([1] if phase == "after_create_session" else [1, 2])
    assert session.global_step.latest.step == (2 if phase == "after_run" else 1)


async def test_a_recovery_plans_nothing_again() -> None:
    """The new session has the plans of the one that it replaces; those that it lacks it makes."""

    def count_plans() -> int:
        return sum(type(item) is Plan for item in gc.get_objects())

    sessions = SessionRecorder()
    fault = FaultInjectionHook({("after_run", 2): LOST})
    async with counting(sessions, fault, recovery=NO_BACKOFF) as session:
        await session.run("train")
        planned = count_plans()
        await session.run("train")
        assert (len(sessions.sessions), count_plans()) == (2, planned)
        await session.run(["train", "total"])
        assert count_plans() == planned + 1


async def test_a_store_that_refuses_from_the_start_is_not_retried(tmp_path: Path) -> None:
    """A wrong path, password or permission before the first run is no outage, and comes out as
    itself; later it may be one.
    """
    (tmp_path / "file").write_text("")
    hook = RecordingHook()
    store = open_step_store(f"local://{tmp_path}/file/runs")
    raised = await outcome(counting(hook, recovery=NO_BACKOFF, global_step=store))
    assert isinstance(raised, ah.errors.StoreRefusedError)
    assert not hasattr(raised, "__notes__")
    assert hook.phases() == ["begin", "close"]
    step = failing_step(ah.errors.StoreRefusedError("this one is a replica now"))
    async with ah.AsyncMonitoredSession(step, recovery=NO_BACKOFF) as session:
        assert await session.run("loss") == 1
        assert session.status().recoveries == 1


async def test_the_policy_names_the_errors() -> None:
    """`on` replaces the types of the default policy; subclasses count."""
    step = failing_step(ConnectionResetError("reset"), LOST)
    async with ah.AsyncMonitoredSession(
        step, recovery=recovery_policy(on=(ConnectionError,))
    ) as session:
        with pytest.raises(ah.AbortedError, match="lost"):
            await session.run("loss")
        assert session.status().recoveries == 1


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
    """A group is recovered if each of its errors is recoverable or a clean end, and at least one is
    recoverable.
    """
    assert ah.RecoveryPolicy().recovers(ExceptionGroup("several", errors)) is recovers


# -- pauses


async def test_a_completed_run_ends_the_series(clock: ManualClock) -> None:
    """After a completed run the pauses, and the attempts, start from the beginning."""
    recovery = ah.RecoveryPolicy(max_attempts=1, backoff=ah.Backoff(1, jitter=False))
    async with ah.AsyncMonitoredSession(
        failing_step(LOST, None, LOST, None, LOST), recovery=recovery
    ) as session:
        for _ in range(3):
            running = await parked(session.run("loss"), 20)
            clock.advance(1)
            assert await running == 1
        assert session.status().recoveries == 3


async def test_a_stop_ends_the_pause_and_the_run_is_repeated(clock: ManualClock) -> None:
    """A stop during a recovery ends the pause, and the run is still repeated."""
    async with ah.AsyncMonitoredSession(failing_step(LOST), recovery=PAUSES) as session:
        running = await parked(session.run("loss"), 20)
        assert not running.done()
        session.request_stop("enough")
        assert await running == 1
        with refused(ah.StopRequestedError, "enough"):
            await session.run("loss")
        assert clock.pending == 0


async def train_with_time_limits() -> None:
    """Use all feeds in spite of failures, and of a time limit that ends steps and recoveries
    anywhere.
    """
    used = list[int]()
    phases = RecordingHook()

    async def step(batch: int) -> None:
        await sleep(choose(0, 0.01))
        if choose(False, True):
            raise ah.AbortedError("lost")
        used.append(batch)

    async def feeds() -> AsyncIterator[int]:
        for number in range(4):
            await sleep(choose(0, 0.01))
            yield number

    @ah.hook("after_create_session")
    async def connect(session: ah.Session, coord: ah.Coordinator) -> None:
        await sleep(choose(0, 0.01))

    policy = recovery_policy(max_attempts=1000, backoff=ah.Backoff(0.01))
    async with ah.AsyncMonitoredSession(step, [connect, phases], recovery=policy) as session:
        steps = session.steps((), feeds=feeds(), prefetch=choose(0, 1))
        while not session.should_stop():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(choose(None, 0.015)):
                    await use_up(steps)
                    break
    # A step that was cancelled before its commit is made again.
    assert ([*dict.fromkeys(used)], phases.phases()[-2:]) == ([0, 1, 2, 3], ["end", "close"])


async def test_an_end_after_a_cancelled_recovery_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Where the recovery of a request was cancelled, there is no session to call `end` of the hooks
    with: a warning says so.
    """
    phases = RecordingHook()

    async def step() -> None:
        raise ah.AbortedError("lost")

    async with ah.AsyncMonitoredSession(
        step, [phases], recovery=recovery_policy(backoff=ah.Backoff(3600))
    ) as session:
        request = asyncio.create_task(session.run(()))
        await ticks(10)
        request.cancel()
        await asyncio.wait([request])
    assert phases.phases() == ["begin", "after_create_session", "before_run", "close"]
    assert "its last recovery was cancelled" in caplog.text


@pytest.mark.asyncio(loop_factories=["asyncio"])  # what is explored has a loop of its own
async def test_a_loop_continues_after_a_cancel_anywhere_in_a_recovery() -> None:
    """In the pause, in the creation of the session, in a hook's part of it: the next step makes
    another session.
    """
    await explore(train_with_time_limits, seeds=60, disturb=["order", "slow", "choice"])


# -- giving up


async def test_a_session_that_gave_up_says_so() -> None:
    """After recovery gave up every use says so, caused by the last error; a loop ends; leaving is
    neither clean nor a failure.
    """
    hook = RecordingHook()
    async with ah.AsyncMonitoredSession(
        failing_step(LOST), [hook], recovery=recovery_policy(max_attempts=0)
    ) as session:
        with pytest.raises(ah.AbortedError, match="lost"):
            await session.run("loss")
        for _ in range(2):
            says = "recovery has given up on AbortedError('lost')", "leave the session"
            with refused(ah.errors.RecoveryExhaustedError, *says) as caught:
                await session.run("loss")
            assert caught.value.__cause__ is LOST
        assert (session.should_stop(), session.status().failure) == (True, "AbortedError('lost')")
        assert [values async for values in session.steps("loss")] == []
    assert ("end" in hook.phases(), hook.phases().count("close")) == (False, 1)


@pytest.mark.parametrize("between", ["an earlier step", "a run that does not train"])
async def test_a_step_that_fails_again_and_again_is_given_up(between: str) -> None:
    """`max_attempts` is how often recoveries may lead to no progress, also when sessions, or
    earlier steps, succeed between.
    """
    graph = ah.Graph()
    failures = list[int]()

    @graph.train_op
    async def train(global_step: int) -> int:
        if global_step == 2:
            failures.append(global_step)
            raise ah.AbortedError(f"failure {len(failures)}")
        return global_step

    graph.operation(name="look")(lambda: 1)

    async def use(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(50):
            await session.run("look" if between == "a run that does not train" else [])
            await session.run("train")

    hooks = [RecordingHook(fetches="look")]
    policy = recovery_policy(max_attempts=2)
    raised = await outcome(ah.AsyncMonitoredSession(graph, hooks, recovery=policy), use)
    assert isinstance(raised, ah.AbortedError)
    assert raised.__notes__[1:] == [
        "recovery gave up: 2 attempts are used up; what failed, oldest first:",
        *(f"  the run of step 3: AbortedError('failure {number}')" for number in (1, 2, 3)),
    ]


# -- a run that had been committed is repeated, unless its feeds are tracked


def training(
    step: Callable[..., Any], feeds: Loader, *hooks: Any, **options: Any
) -> ah.AsyncMonitoredSession:
    """Make a session of a step that tracks these feeds."""
    policy = recovery_policy(**options.pop("policy", {}))
    creator = ah.ChiefSessionCreator(
        step, scaffold=ah.Scaffold(tracked={"feeds": feeds}), **options
    )
    return ah.AsyncMonitoredSession(creator, hooks, recovery=policy)


@pytest.mark.parametrize("are_tracked", [False, True], ids=["not tracked", "tracked"])
@pytest.mark.parametrize("suspend", [False, True], ids=["in-turn", "suspended"])
async def test_after_run_of_a_committed_run_fails(are_tracked: bool, suspend: bool) -> None:
    """The run is repeated and counts twice; with tracked feeds its values are returned and nothing
    does. The loop continues in either case.

    A later run that fails before its commit does not return what this one committed.
    """
    fed = list[int]()
    losses = list[int]()
    numbers = Loader(3)

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": 10 * batch}

    faults = {("after_run", 2): LOST, ("before_run", 3 if are_tracked else 4): LOST}
    hooks = [FaultInjectionHook(faults, suspend=suspend), RecordingHook(suspend=suspend)]
    async with training(step, numbers, *hooks) as session:
        feeds: Any = numbers if are_tracked else range(3)
        await use_up(session.steps("loss", feeds=feeds), losses)
        assert session.status().recoveries == 2
    assert losses == [0, 10, 20]
    assert fed == ([0, 1, 2] if are_tracked else [0, 1, 1, 2])
    assert session.global_step.latest.step == len(fed)


async def test_a_hook_that_fails_after_every_commit_is_given_up() -> None:
    """A run that is returned after a recovery is no completed one: failures in a row use up the
    attempts.
    """
    lost = ah.AbortedError("lost")
    numbers = Loader(9)
    hooks = [PhaseHook("after_run", raises_after(0, lost))]
    session = training(double, numbers, *hooks, policy={"max_attempts": 3})
    use = lambda session: use_up(session.steps("loss", feeds=numbers))  # noqa: E731
    assert await outcome(session, use) is lost
    assert session.global_step.latest.step == 4
    assert [note for note in lost.__notes__ if "the run of step" in note] == [
        f"  the run of step {step}: AbortedError('lost')" for step in (1, 2, 3, 4)
    ]


async def test_a_step_function_is_repeated() -> None:
    """`run_step_fn` repeats its function: what of it is done, only the function knows."""
    attempts = 0

    async def step_fn(context: ah.session.StepContext) -> Any:
        nonlocal attempts
        attempts += 1
        return await context.run_with_hooks("train")

    hooks = [FaultInjectionHook({("after_run", 1): LOST})]
    async with counting(*hooks, recovery=recovery_policy()) as session:
        assert await session.run_step_fn(step_fn) == 1
    assert (attempts, session.global_step.latest.step) == (2, 2)


async def test_a_commit_of_an_epoch_that_has_ended_is_repeated() -> None:
    """The step store was reset meanwhile, to a later step: the commit belongs to the steps before
    the reset.
    """
    fed = list[int]()
    numbers = Loader(1)
    store = ah.MemoryStepStore()

    async def step(batch: int) -> dict[str, int]:
        fed.append(batch)
        return {"loss": batch}

    async def reset() -> None:
        await store.reset(5)

    hooks = [FaultInjectionHook({("after_run", 1): LOST, ("after_create_session", 2): reset})]
    async with training(step, numbers, *hooks, global_step=store) as session:
        await use_up(session.steps("loss", feeds=numbers))
    assert fed == [0, 0]
