"""Background calls of a group and of a session: in order, beside what follows, bounded, and none is
lost.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.sessions import counting
from tests.support.waiting import advance_clock, parked, pass_time, ticks, until_true

pytestmark = pytest.mark.every_python


class Lifecycle:
    async def on(self, number: int) -> None: ...

    @ah.point("first")
    async def ask(self) -> int | None: ...


class Observer:
    """Calls a function, and records the numbers of its calls that have begun and ended."""

    def __init__(self, call: Callable[[int], Awaitable[Any]]) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self._call = call

    async def on(self, number: int) -> None:
        self.began.append(number)
        await self._call(number)
        self.ended.append(number)

    async def ask(self) -> int | None:
        return 5


async def test_a_call_that_raises_an_earlier_failure_is_made_for_every_hook() -> None:
    """The failure is raised when all hooks, of all orders, have got the call. It joins failures in
    other queues; if the call itself fails, it is raised by the next one.
    """

    async def fails(number: int) -> None:
        await asyncio.sleep(0)
        if number == 0:
            raise ValueError("the first call")

    async def slow(number: int) -> None:
        await ticks(3)
        if number == 1:
            raise OSError("the second call")

    audits = [Observer(fails), Observer(fails)]
    healthy = [Observer(slow), Observer(slow)]
    hooks = [ah.configure(audit, background=True) for audit in audits]
    group = ah.HookGroup(Lifecycle, [*hooks, healthy[0], ah.configure(healthy[1], order=1)])
    async with group:
        await group.hooks.on(0)
        await ticks(10)
        with pytest.raises(OSError, match="the second call"):
            await group.hooks.on(1)
        with pytest.raises(ExceptionGroup, match="2 background calls failed"):
            await group.hooks.on(2)
        await group.hooks.on(3)
    assert [audit.ended for audit in audits] == [[1, 2, 3], [1, 2, 3]]
    assert [hook.ended for hook in healthy] == [[0, 2, 3], [0, 2, 3]]


@pytest.mark.parametrize("hooks", [1, 2])
async def test_a_call_that_a_full_queue_would_wait_for_has_a_place(hooks: int) -> None:
    """A background hook may call its own group, however full its queue, or that of a hook which
    waits for it, is.
    """
    made: list[int] = []

    class CallsAgain:
        async def on(self, number: int) -> None:
            made.append(number)
            if number == 0:
                for child in (1, 2, 3):
                    await group.hooks.on(child)

    given = [ah.configure(CallsAgain(), background=True, max_pending=1) for _ in range(hooks)]
    async with ah.HookGroup(Lifecycle, given) as group:
        await group.hooks.on(0)
        await until_true(lambda: not any(status.pending for status in group.status()))
    assert sorted(made) == sorted([0, *[1, 2, 3] * hooks] * hooks)


@pytest.mark.parametrize("once", [False, True])
async def test_the_failure_of_a_hook_that_was_removed_is_raised_at_the_end(once: bool) -> None:
    """Also if nothing else refers to the hook."""

    async def fails(number: int) -> None:
        await ticks(1)
        raise OSError("lost")

    async def use() -> None:
        async with ah.HookGroup(Lifecycle) as group:
            group.on(Lifecycle.on, fails, background=True, once=once)
            await group.hooks.on(1)
            await ticks(10)
            if not once:
                group.remove(fails)
            gc.collect()

    with pytest.raises(OSError, match="lost"):
        await use()


async def test_a_hook_that_its_own_call_removes_is_exited_after_the_call() -> None:
    """It is no part of that call, though the call has started its exit."""
    events: list[str] = []

    class Connection:
        async def __aenter__(self) -> None:
            events.append("enter")

        async def __aexit__(self, *details: object) -> None:
            events.append("exit")

        async def on(self, number: int) -> None:
            group.remove(self)
            await ticks(20)
            events.append("end of the call")

    async with ah.HookGroup(Lifecycle, [ah.configure(Connection(), background=True)]) as group:
        await group.hooks.on(1)
        await ticks(60)
    assert events == ["enter", "end of the call", "exit"]


# -- in a session


class Watching(ah.SessionRunHook):
    """Records the runs that it has seen the end of, when a gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.steps: list[int] = []
        self.events: list[str] = []

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs("loss")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await self.gate.wait()
        self.steps.append(run_context.global_step)
        self.events.append(f"after_run {run_values.results}")

    async def end(self, session: ah.Session) -> None:
        self.events.append("end")

    async def close(self, exc: BaseException | None) -> None:
        self.events.append("close")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


async def test_a_stop_ends_the_wait_for_a_hook_that_hangs(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A full queue of a hook that hangs makes the run wait, which is logged with the hook and the
    size of the queue. A stop ends the wait; what the end of the session drops is
    logged with its number.
    """
    hook = Watching()
    configured = ah.configure(hook, background=True, max_pending=2)
    async with counting(configured, stop_grace_period_secs=5) as session:
        for _ in range(2):
            await session.run("train")
        third = await parked(session.run("train"))
        await ticks(20)
        await advance_clock(clock, 1)
        log = "a caller has waited 1 s for the background calls of Watching"
        assert caplog.messages == [f"{log}: 2 items are pending, of at most 2"]
        session.request_stop("enough")
        await third
        assert (session.global_step.latest.step, session.status().hooks[0].pending) == (3, 3)
        closing = await parked(session.aclose())
        await pass_time(clock, 5)
        await closing
    assert caplog.messages[-1] == "3 background calls of Watching are left, and are dropped"
    assert hook.steps == []


async def test_a_checkpoint_has_the_state_of_a_background_hook(tmp_path: Path) -> None:
    """A save waits for the background calls of the hooks that it holds: the restored state has seen
    every run before it.
    """
    hook = Watching()
    saving = asyncio.Event()

    class Listener(ah.hooks.CheckpointSaverListener):
        async def before_save(self, session: ah.Session, global_step: int) -> None:
            if global_step:
                saving.set()

    class Foreground(ah.SessionRunHook):
        def state_dict(self) -> dict[str, Any]:
            return {"waited": 1}

        def load_state_dict(self, state: Any) -> None: ...

    saver = ah.CheckpointSaverHook(
        tmp_path, every=ah.Every(steps=1), save_on_end=False, listeners=[Listener()]
    )
    hooks: list[Any] = [ah.configure(hook, background=True), Foreground(), saver]
    async with counting(*hooks) as session:
        run = asyncio.create_task(session.run("train"))
        await saving.wait()
        await ticks(20)
        assert not run.done()
        hook.gate.set()
        await run
    restored = await ah.checkpoint.Saver(tmp_path, read_only=True).restore()
    assert restored is not None
    assert restored.state["hooks"]["Watching"] == {"steps": [1]}
