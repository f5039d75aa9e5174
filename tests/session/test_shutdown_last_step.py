"""The last step in `close`: the session that a hook got in `after_create_session` stays readable."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiohooks as ah
from tests.support.hooks import PhaseHook
from tests.support.sessions import NO_BACKOFF, counting_graph

pytestmark = pytest.mark.every_python


class LastStepHook(ah.SessionRunHook):
    """Keeps its session, as a hook does that writes the last step when it is closed."""

    session: ah.Session | None = None

    def __init__(self) -> None:
        self.closed_with: list[tuple[type[BaseException] | None, int, Any, bool]] = []

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.session = session

    async def close(self, exc: BaseException | None) -> None:
        await asyncio.sleep(0)
        if self.session is not None:
            step, variables = self.session.global_step.latest.step, self.session.variables.snapshot()
            self.closed_with.append((None if exc is None else type(exc), step, variables["total"], self.session.closed))


async def test_after_a_clean_end() -> None:
    """After a clean end it is the last step, with the variables of that step; the session is closed."""
    hook = LastStepHook()
    async with ah.AsyncMonitoredSession(counting_graph(), [hook]) as session:
        for _ in range(3):
            await session.run("train")
    assert hook.closed_with == [(None, 3, 3, True)]


@pytest.mark.parametrize("phase", ["before_run", "after_run"])
async def test_after_a_failure(phase: str) -> None:
    """After a failure it is the last step that was committed."""

    async def fail(run_context: ah.SessionRunContext, *_: Any) -> None:
        if run_context.global_step == 3:
            raise OSError(phase)

    async def train() -> None:
        async with ah.AsyncMonitoredSession(counting_graph(), [hook, PhaseHook(phase, fail)]) as session:
            for _ in range(3):
                await session.run("train")

    hook = LastStepHook()
    with pytest.raises(OSError, match=phase):
        await train()
    step = 3 if phase == "after_run" else 2
    assert hook.closed_with == [(OSError, step, step, True)]


async def test_after_a_cancelled_run() -> None:
    """A run that is cancelled has committed nothing, so it is the step before."""
    hook, waits = LastStepHook(), asyncio.Event()

    async def wait(run_context: ah.SessionRunContext) -> None:
        if run_context.global_step == 2:
            waits.set()
            await asyncio.Event().wait()

    async def train() -> None:
        async with ah.AsyncMonitoredSession(counting_graph(), [hook, PhaseHook("before_run", wait)]) as session:
            while True:
                await session.run("train")

    task = asyncio.create_task(train())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hook.closed_with == [(asyncio.CancelledError, 1, 1, True)]


@pytest.mark.parametrize("gives_up", [False, True])
async def test_after_a_recovery(gives_up: bool) -> None:
    """The hook has the session of the last recovery; where that gave up, the last one that it was given."""
    hook, failures = LastStepHook(), 2 if gives_up else 1

    async def fail(run_context: ah.SessionRunContext) -> None:
        nonlocal failures
        if run_context.global_step == 3 and failures:
            failures -= 1
            raise ah.AbortedError("lost")

    policy = ah.RecoveryPolicy(max_attempts=1, no_progress_limit=1) if gives_up else NO_BACKOFF
    session = ah.AsyncMonitoredSession(counting_graph(), [hook, PhaseHook("before_run", fail)], recovery=policy)
    try:
        async with session:
            for _ in range(4):
                await session.run("train")
    except ah.AbortedError:
        pass
    assert hook.closed_with == [(ah.AbortedError, 2, 2, True) if gives_up else (None, 4, 4, True)]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_after_an_opening_that_was_not_completed(cancelled: bool) -> None:
    """The hook has the session if the opening came as far as that, however it ended; a restored step counts."""
    hook, waits = LastStepHook(), asyncio.Event()

    async def stay(session: ah.Session, coord: ah.Coordinator) -> None:
        waits.set()
        if not cancelled:
            raise OSError("not opened")
        await asyncio.Event().wait()

    hooks = [hook, PhaseHook("after_create_session", stay)]
    session = ah.AsyncMonitoredSession(counting_graph(), hooks, global_step=ah.MemoryStepStore(7))
    opening = asyncio.create_task(session.__aenter__())
    await waits.wait()
    if cancelled:
        opening.cancel()
    kind = asyncio.CancelledError if cancelled else OSError
    with pytest.raises(kind):
        await opening
    assert hook.closed_with == [(kind, 7, 0, True)]


async def test_without_a_session() -> None:
    """A hook whose session was never created has none, and is closed all the same."""
    hook = LastStepHook()

    async def fail() -> None:
        raise OSError("begin")

    with pytest.raises(OSError, match="begin"):
        await ah.AsyncMonitoredSession(counting_graph(), [hook, PhaseHook("begin", fail)]).__aenter__()
    assert (hook.session, hook.closed_with) == (None, [])
