"""What is logged when the end of a session, or a `join`, waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.hooks import PhaseHook
from tests.support.sessions import double
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged, without the lines of code."""
    return [record.getMessage().partition(".<locals>")[0] for record in caplog.records]


async def closing(
    hooks: Sequence[ah.SessionRunHook | ah.dispatch.HookRegistration],
    use: Callable[[ah.AsyncMonitoredSession], Awaitable[object]],
) -> None:
    """Open a session, use it, and leave it."""
    async with ah.AsyncMonitoredSession(double, hooks, name="trainer") as session:
        await use(session)


async def test_background_tasks_that_are_waited_for_are_logged(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """After a second a warning names the session, the tasks and where they wait, once."""
    queue: asyncio.Queue[int] = asyncio.Queue(1)

    async def produce() -> None:
        while True:
            await queue.put(1)

    async def use(session: ah.AsyncMonitoredSession) -> None:
        session.start_soon(produce)
        await ticks()

    ending = asyncio.create_task(closing([], use))
    await ticks(20)
    clock.advance(0.9)
    assert messages(caplog) == []
    clock.advance(0.1)
    (first,) = messages(caplog)
    assert first.startswith("session 'trainer', closing: has waited 1 s for background task 'produce', at ")
    assert "Queue.put" in caplog.text
    clock.advance(8)
    assert len(caplog.records) == 1
    clock.advance(1)
    await ending
    assert len(caplog.records) == 1
    assert clock.pending == 0


@pytest.mark.parametrize("phase", ["end", "close"])
async def test_a_hook_that_is_waited_for_is_logged(phase: str, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """A hook whose `end` or `close` takes longer than a second is named, and then the next one."""
    gates = [asyncio.Event(), asyncio.Event()]
    entered: list[int] = []

    def waits(number: int) -> Callable[..., Awaitable[None]]:
        async def wait(*_: object) -> None:
            entered.append(number)
            await gates[number].wait()

        return wait

    hooks: list[ah.SessionRunHook] = [PhaseHook(phase, waits(number)) for number in range(2)]
    names = {number: f"PhaseHook#{number + 1}.{phase}" for number in range(2)}
    ending = asyncio.create_task(closing(hooks, lambda session: session.run("loss")))
    for count in (1, 2):
        while len(entered) < count:
            await ticks(1)
        clock.advance(1)
        text = messages(caplog)[-1]
        assert text.startswith(f"session 'trainer', closing: has waited {count} s for {names[entered[-1]]}")
        assert len(caplog.records) == count
        gates[entered[-1]].set()
    await ending
    assert clock.pending == 0


async def test_background_calls_of_a_hook_that_are_waited_for_are_logged(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Their number, and the hook's name."""
    gate = asyncio.Event()

    async def wait(*_: object) -> None:
        await gate.wait()

    observer = ah.configure(PhaseHook("after_run", wait), background=True)

    async def use(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(2):
            await session.run("loss")

    ending = asyncio.create_task(closing([observer], use))
    await ticks(20)
    clock.advance(1)
    (text,) = messages(caplog)
    assert text.startswith("session 'trainer', closing: has waited 1 s for 2 background calls of PhaseHook")
    gate.set()
    await ending


async def test_a_last_run_that_is_waited_for_is_logged(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """The run of another task that keeps a session from closing is named after a second."""
    gate = asyncio.Event()

    async def step() -> None:
        await gate.wait()

    async with ah.AsyncMonitoredSession(step, name="trainer") as session:
        running = asyncio.create_task(session.run("step"))
        await ticks()
        ending = asyncio.create_task(session.aclose())
        await ticks()
        clock.advance(1)
        (text,) = messages(caplog)
        assert text.startswith("session 'trainer', closing: has waited 1 s for ")
        assert "step" in text
        gate.set()
        await running
        await ending


async def test_a_recovery_that_waits_says_so(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """A task that delays the replacement of its session by its cleanup is named after a second."""
    gate = asyncio.Event()

    async def cleans_up() -> None:
        try:
            await forever()
        finally:
            await gate.wait()

    async def starts(session: ah.Session, coord: ah.Coordinator) -> None:
        if not gate.is_set():
            coord.start_soon(cleans_up)
            await ticks()
            raise ah.AbortedError("lost")

    policy = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0))

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double, [PhaseHook("after_create_session", starts)], recovery=policy, name="trainer"):
            pass

    opening = asyncio.create_task(use())
    await ticks(20)
    clock.advance(1)
    gate.set()
    await opening
    assert messages(caplog)[0] == "session 'trainer': recovering from AbortedError('lost')"
    assert messages(caplog)[1].startswith("session 'trainer', recovering: has waited 1 s for background task 'cleans_up', at ")


async def test_a_join_that_waits_after_a_stop_says_so(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """`join` names the tasks that are still active a second after the stop; before the stop it says nothing."""
    coord = ah.Coordinator()
    coord.start_soon(forever, name="reader")
    joining = asyncio.create_task(coord.join())
    await ticks()
    clock.advance(5)
    assert messages(caplog) == []
    coord.request_stop("enough")
    await ticks(10)
    clock.advance(1)
    (text,) = messages(caplog)
    assert text.startswith("coordinator, joining: has waited 1 s for background task 'reader', at forever")
    clock.advance(9)
    await joining


@pytest.mark.plain_tasks
async def test_an_unnamed_session_is_named_after_its_task(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """A session without a name has that of the task that entered it."""

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double) as session:
            session.start_soon(forever)

    ending = asyncio.create_task(use(), name="reader of shard 3")
    await ticks(20)
    clock.advance(10)
    await ending
    assert messages(caplog)[0].startswith("session 'reader of shard 3', closing: has waited ")


async def test_the_default_grace_period(clock: ManualClock) -> None:
    """Where no grace period is given it is 10 seconds: of a session, a `join`."""
    ended: list[str] = []
    coord = ah.Coordinator()

    async def join() -> None:
        coord.start_soon(forever)
        coord.request_stop()
        await coord.join()
        ended.append("join")

    async def use() -> None:
        async with ah.AsyncMonitoredSession(double) as session:
            session.start_soon(forever)
        ended.append("session")

    tasks = [asyncio.create_task(join()), asyncio.create_task(use())]
    await ticks(20)
    clock.advance(9.9)
    await ticks(20)
    assert ended == []
    clock.advance(0.1)
    await asyncio.wait(tasks)
    assert sorted(ended) == ["join", "session"]
