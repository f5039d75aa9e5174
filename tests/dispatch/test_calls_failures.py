"""Failures of a phase: one failure ends it, no hook is left running, and the error names its hook."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.checks import without_collections
from tests.support.hooks import HOOKS, OVERLAPPING_PHASES, five_hooks
from tests.support.sessions import double, run_once
from tests.support.waiting import elapse, forever, ticks, until_true

pytestmark = pytest.mark.every_python

# -- failing


@pytest.mark.parametrize("phase", OVERLAPPING_PHASES)
@pytest.mark.parametrize("fails", HOOKS)
async def test_first_failure_cancels_the_others_and_waits_for_them(phase: str, fails: int) -> None:
    """The failing hook's error reaches the caller as the same object, after all others were cancelled and have ended."""
    error = ValueError("no")
    cancelled: list[int] = []
    ended: list[int] = []

    async def act(number: int, now: str) -> None:
        if now != phase:
            return
        try:
            await ticks(2)
            if number == fails:
                raise error
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            await ticks(3)
            raise
        finally:
            ended.append(number)

    with pytest.raises(ValueError, match="no") as raised:
        await run_once(five_hooks(act))
    assert raised.value is error
    assert error.__notes__[0].startswith(f"raised by NumberedHook#{fails + 1}.{phase} at step ")
    assert sorted(cancelled) == [number for number in HOOKS if number != fails]
    assert sorted(ended) == list(HOOKS)


async def test_hooks_after_one_that_fails_without_suspending_are_not_started() -> None:
    """As long as no hook has suspended, a failure keeps the later ones from starting."""
    started: list[int] = []

    async def act(number: int, phase: str) -> None:
        if phase == "before_run":
            started.append(number)
            if number == 2:
                raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_once(five_hooks(act))
    assert started == [0, 1, 2]


@pytest.mark.parametrize("failing", [(0, 1), (0, 4), (1, 3), (0, 1, 2, 3, 4)], ids=str)
async def test_several_failures_are_one_flat_group(failing: tuple[int, ...]) -> None:
    """Failures of one phase reach the caller as one flat group, in registration order, each with its note."""
    errors = {number: ValueError(f"hook {number}") for number in failing}

    async def act(number: int, phase: str) -> None:
        if phase == "before_run":
            try:
                await asyncio.sleep(0)
                if number != failing[-1]:
                    await asyncio.Event().wait()
            finally:
                if number in errors:
                    raise errors[number]

    with pytest.raises(ExceptionGroup, match=f"{len(failing)} failures in one phase") as raised:
        await run_once(five_hooks(act))
    assert raised.value.exceptions == tuple(errors[number] for number in failing)
    for number, error in errors.items():
        assert error.__notes__[0] == f"raised by NumberedHook#{number + 1}.before_run at step 1"


async def test_a_group_among_several_failures_leaves_its_notes_to_its_members() -> None:
    """The members of a flattened group have the hook's note and the group's own notes."""
    group = ExceptionGroup("two rows are bad", [ValueError(1), ValueError(2)])
    group.add_note("in file rows.csv")
    errors = [group, KeyError("b")]

    async def act(number: int, phase: str) -> None:
        if phase == "before_run" and number < len(errors):
            try:
                await (forever() if number else ticks())
            finally:
                raise errors[number]

    with pytest.raises(ExceptionGroup, match="2 failures in one phase") as raised:
        await run_once(five_hooks(act))
    assert raised.value.exceptions == (*group.exceptions, errors[1])
    for error in group.exceptions:
        assert error.__notes__ == ["in file rows.csv", "raised by NumberedHook#1.before_run at step 1"]


# -- running out of time


@pytest.mark.parametrize("late", [0, 3], ids=["first", "fourth"])
@pytest.mark.parametrize("phase", OVERLAPPING_PHASES)
async def test_a_hook_that_exceeds_its_timeout_fails(phase: str, late: int) -> None:
    """After its timeout a hook is cancelled and HookTimeoutError, which names it, ends the phase; no other hook is late."""
    cancelled: list[int] = []

    async def act(number: int, now: str) -> None:
        if now == phase:
            try:
                await elapse(100)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

    given = [ah.configure(hook, timeout=5 if hook.number == late else 50) for hook in five_hooks(act)]
    with ManualClock() as clock:
        running = asyncio.create_task(run_once(given))
        await until_true(lambda: clock.pending == 2 * len(HOOKS))  # all wait, and have their time limits
        clock.advance(4.99)
        await ticks(5)
        assert cancelled == []
        clock.advance(0.01)
        with pytest.raises(ah.errors.HookTimeoutError, match=rf"Hook#{late + 1}\.{phase} .* 5 s; give it more with configure"):
            await running
        assert sorted(cancelled) == list(HOOKS)


async def test_a_hook_in_time_leaves_no_timer() -> None:
    """A time limit ends with the call that it limits."""

    async def act(number: int, phase: str) -> None:
        await ticks(number)

    with ManualClock() as clock:
        await run_once([ah.configure(hook, timeout=5) for hook in five_hooks(act)])
        assert clock.pending == 0


# -- being cancelled


@pytest.mark.parametrize("victim", HOOKS)
async def test_a_cancel_by_a_third_party_is_reported(victim: int) -> None:
    """A third party cancels what a hook awaits, or the hook's own task: an error that says so, never a silent success."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    caller = asyncio.current_task()
    tasks: list[asyncio.Task[Any] | None] = [None] * len(HOOKS)

    async def act(number: int, phase: str) -> None:
        if phase == "before_run":
            tasks[number] = asyncio.current_task()
            await (future if number == victim else ticks(8))

    def strike() -> None:
        task = tasks[victim]
        assert task is not None
        if task is caller:
            future.cancel()
        else:
            task.cancel("by a third party")

    async def strike_soon() -> None:
        await ticks(3)
        strike()

    striking = asyncio.create_task(strike_soon())
    with pytest.raises(
        ah.errors.HookCancelledError, match=rf"Hook#{victim + 1}\.before_run at step 1 was cancelled, and not by"
    ) as raised:
        await run_once(five_hooks(act))
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)
    await striking
    assert caller is not None
    assert caller.cancelling() == 0


# -- nothing is lost, nothing is kept


async def test_errors_that_a_cancel_hides_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """The caller is cancelled and hooks fail in their cleanup: each error is logged, and in the context of what is raised."""
    errors = {number: OSError(f"hook {number}") for number in HOOKS}

    async def act(number: int, phase: str) -> None:
        if phase == "before_run":
            try:
                await asyncio.Event().wait()
            finally:
                raise errors[number]

    task = asyncio.create_task(run_once(five_hooks(act)))
    await ticks(10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert {id(error) for error in errors.values()} <= {id(error) for error in logged}
    chain: list[BaseException] = []
    link = raised.value.__context__
    while link is not None:
        chain += link.exceptions if isinstance(link, BaseExceptionGroup) else [link]
        link = link.__context__
    assert all(error in chain for error in errors.values())


async def test_errors_of_one_tick_are_all_in_the_context() -> None:
    """A cancel comes in the tick of a failure, and another hook fails in its cleanup: no error is lost, and no circle is made."""
    caller: asyncio.Task[object]

    async def act(number: int, phase: str) -> None:
        if phase == "before_run" and number == 0:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise OSError("cleanup") from None
        elif phase == "before_run" and number == 1:
            await ticks(2)
            asyncio.get_running_loop().call_soon(caller.cancel)
            raise ValueError("failed")

    caller = asyncio.create_task(run_once(five_hooks(act)))
    with pytest.raises(asyncio.CancelledError) as raised:
        await caller
    links: list[BaseException] = []
    link: BaseException | None = raised.value
    while link is not None and len(links) < 100:
        links.append(link)
        link = link.__context__
    assert link is None
    kept = [one for link in links for one in (link.exceptions if isinstance(link, BaseExceptionGroup) else [link])]
    assert sorted(repr(one) for one in kept if not isinstance(one, asyncio.CancelledError)) == [
        "OSError('cleanup')",
        "ValueError('failed')",
    ]


@pytest.mark.plain_tasks
@pytest.mark.parametrize("how", ["inline", "own", "child", "cancelled", "time limit"])
async def test_failed_runs_leave_no_reference_cycles(how: str) -> None:
    """What a failed run referred to is freed when its error is, without the garbage collector."""

    class Big:
        pass

    big: weakref.ref[Big]

    async def act(number: int, phase: str) -> None:
        nonlocal big
        if phase == "before_run" and number == (3 if how == "child" else 0):
            held = Big()
            big = weakref.ref(held)
            if how in ("cancelled", "time limit"):
                await elapse(100)
            elif how != "inline":
                await ticks()
            raise ValueError("no")
        if how == "child":
            await asyncio.sleep(0)

    hooks = [ah.configure(hook, timeout=5 if how == "time limit" else None) for hook in five_hooks(act)]
    with without_collections(), ManualClock() as clock:
        async with ah.AsyncMonitoredSession(double, hooks) as session:
            for _ in range(3):
                task = asyncio.create_task(session.run("double"))
                await ticks(3)
                if how == "cancelled":
                    task.cancel()
                elif how == "time limit":
                    clock.advance(5)
                await asyncio.wait([task])
                assert task.cancelled() if how == "cancelled" else isinstance(task.exception(), (ValueError, TimeoutError))
                del task
                await ticks()
                assert big() is None
