"""Hooks, steps and cleanups that ignore a cancellation, or are cancelled by others."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock, RecordingHook
from tests.support.checks import refused
from tests.support.hooks import PhaseHook
from tests.support.sessions import counting_graph, double
from tests.support.waiting import ticks, until_true


class UncancellableHook:
    """Waits for its own event, and swallows every cancellation of the waiting task."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.released = asyncio.Event()
        self.cancels = 0
        self.done = False
        self.error: Exception | None = None
        """What it raises at its end."""

    async def wait(self, *_: object) -> None:
        """Waits, and counts the cancellations that it swallows."""
        self.waiting.set()
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancels += 1
        self.done = True
        if self.error is not None:
            raise self.error


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_an_uncancellable_hook_has_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    """A hook that ignores its cancellation is given the grace period, named in a warning, and left behind."""
    uncancellable = UncancellableHook()

    async def fails(run_context: ah.SessionRunContext) -> None:
        await ticks(2)
        raise OSError("broken")

    with ManualClock() as clock:
        hooks = [PhaseHook("before_run", fails), PhaseHook("before_run", uncancellable.wait)]
        async with ah.AsyncMonitoredSession(double, hooks, stop_grace_period_secs=9) as session:
            running = asyncio.create_task(session.run("loss"))
            await until_true(lambda: uncancellable.cancels)
            clock.advance(8.9)
            await ticks()
            assert not running.done()
            clock.advance(0.1)
            with pytest.raises(OSError, match="broken"):
                await running
            assert warnings_of(caplog) == [
                "PhaseHook#2.before_run at step 1 still runs 9 s after its cancellation; continuing without it"
            ]
            uncancellable.released.set()
            await until_true(lambda: uncancellable.done)


@pytest.mark.parametrize(("own", "grace"), [(None, 3), (5, 5)])
async def test_an_uncancellable_operation_has_the_grace_period(
    own: float | None, grace: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Operations have the grace period of the monitored session, unless the raw session was given its own."""
    uncancellable, graph = UncancellableHook(), ah.Graph()

    @graph.operation
    async def fails() -> None:
        await ticks(2)
        raise OSError("broken")

    @graph.operation
    async def waits() -> None:
        await uncancellable.wait()

    class Creator:
        def __init__(self) -> None:
            self.graph = graph

        async def create_session(self) -> ah.Session:
            return ah.Session(graph, grace_secs=own)

    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(Creator(), stop_grace_period_secs=3) as session:
            run = asyncio.create_task(session.run(["fails", "waits"]))
            await until_true(lambda: uncancellable.cancels)
            clock.advance(grace - 1)
            await ticks(5)
            assert not run.done()
            clock.advance(1)
            with pytest.raises(OSError, match="broken"):
                await run
            assert any(f"still runs {grace}" in text for text in warnings_of(caplog))
            uncancellable.released.set()
            await until_true(lambda: uncancellable.done)


@pytest.mark.parametrize("place", [None, 0, 1], ids=["alone", "first", "behind another one"])
async def test_a_hook_that_swallows_its_callers_cancel(place: int | None) -> None:
    """The cancel of the caller wins over what a hook does with its own, wherever the hook is in the list."""

    async def swallows(run_context: ah.SessionRunContext) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    hooks: list[ah.SessionRunHook] = [] if place is None else [RecordingHook(suspend=True)]
    hooks.insert(place or 0, PhaseHook("before_run", swallows))
    async with ah.AsyncMonitoredSession(double, hooks) as session:
        running = asyncio.create_task(session.run("loss"))
        await ticks()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert session.global_step.latest.step == 0


async def test_a_closing_that_takes_too_long_after_a_cancel(caplog: pytest.LogCaptureFixture) -> None:
    """A caller is cancelled while hooks close: they have the grace period; then they are cancelled, and named if they ignore it.

    The cancellation comes out, and what could be closed is closed; an error that comes after that is logged.
    """
    uncancellable, hook = UncancellableHook(), RecordingHook()
    uncancellable.error = OSError("too late")
    with ManualClock() as clock:

        async def main() -> None:
            hooks: list[ah.SessionRunHook | ah.dispatch.HookRegistration] = [
                hook,
                ah.configure(PhaseHook("close", uncancellable.wait), timeout=1000),
            ]
            async with ah.AsyncMonitoredSession(double, hooks, stop_grace_period_secs=9, name="trainer"):
                pass

        ending = asyncio.create_task(main())
        await ticks(20)
        ending.cancel()
        await ticks(20)
        assert not ending.done()
        clock.advance(9)
        await until_true(lambda: uncancellable.cancels)
        assert not ending.done()
        clock.advance(9)
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert warnings_of(caplog)[-1:] == [
            "the end of session 'trainer' still runs 9 s after its cancellation; continuing without it"
        ]
        uncancellable.released.set()
        await until_true(lambda: hook.closed_with and "OSError: too late" in caplog.text)
        await ticks()


async def test_a_close_that_is_cut_off_does_not_keep_others_from_closing() -> None:
    """A `close` that is cancelled, because the grace period of a cancelled caller is over, is followed by the others'."""
    hook = RecordingHook()
    with ManualClock() as clock:

        async def hangs(exc: BaseException | None) -> None:
            await asyncio.Event().wait()

        async def main() -> None:
            hooks: list[ah.SessionRunHook | ah.dispatch.HookRegistration] = [
                hook,
                ah.configure(PhaseHook("close", hangs), timeout=1000),
            ]
            async with ah.AsyncMonitoredSession(double, hooks, stop_grace_period_secs=9):
                pass

        ending = asyncio.create_task(main())
        await ticks(20)
        ending.cancel()
        await ticks(20)
        clock.advance(9)
        with pytest.raises(asyncio.CancelledError):
            await ending
    assert hook.closed_with == [None]


async def test_a_background_call_that_is_uncancellable_does_not_keep_hooks_from_closing() -> None:
    """The grace period of a cancelled caller ends while the session waits for a background call: hooks are closed."""
    uncancellable, hook = UncancellableHook(), RecordingHook()
    with ManualClock() as clock:

        async def main() -> None:
            observer = ah.configure(PhaseHook("after_run", uncancellable.wait), background=True)
            async with ah.AsyncMonitoredSession(double, [hook, observer], stop_grace_period_secs=9) as session:
                await session.run("loss")
                raise OSError("broken")

        ending = asyncio.create_task(main())
        await ticks(20)
        clock.advance(5)
        ending.cancel()
        await ticks(20)
        clock.advance(4)  # the call is cancelled
        await until_true(lambda: uncancellable.cancels)
        assert hook.closed_with == []
        clock.advance(5)  # the closing is cancelled
        await asyncio.wait([ending])
        assert ending.cancelled()
        assert repr(hook.closed_with) == "[OSError('broken')]"
        uncancellable.released.set()
        await until_true(lambda: uncancellable.done)
        await ticks()


async def test_a_closing_that_others_cancel_continues() -> None:
    """A third party that cancels the closing does not keep the session from being closed; the hook's part is reported."""
    hook = RecordingHook()

    async def cancels_itself(exc: BaseException | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    with refused(ah.errors.HookCancelledError, "PhaseHook.close was cancelled") as raised:
        async with ah.AsyncMonitoredSession(double, [hook, PhaseHook("close", cancels_itself)]):
            pass
    assert hook.closed_with == [None]
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)


async def test_a_part_that_was_cancelled_by_others_does_not_cancel_the_block() -> None:
    """A raw session whose closing was cancelled by a third party: the caller was not, and the rest is closed."""
    hook = RecordingHook()

    class Cut(ah.Session):
        async def aclose(self) -> None:
            await super().aclose()
            raise asyncio.CancelledError

    class Creator:
        graph = counting_graph()

        async def create_session(self) -> ah.Session:
            return Cut(self.graph)

    async with ah.AsyncMonitoredSession(Creator(), [hook]) as session:
        await session.run("loss")
    assert hook.closed_with == [None]


async def test_a_part_that_others_have_cut_off_is_done_again() -> None:
    """Such as the step store's last word to other processes."""
    flushes: list[float | None] = []

    class Store(ah.MemoryStepStore):
        async def flush(self, timeout: float | None = None) -> None:
            flushes.append(timeout)
            if len(flushes) == 1:
                raise asyncio.CancelledError

    async with ah.AsyncMonitoredSession(double, global_step=Store()):
        pass
    assert len(flushes) == 2


async def test_a_failed_end_waits_for_a_task_that_ignores_its_cancel_for_the_grace_period() -> None:
    """And no longer: the task had no time before its cancel."""
    uncancellable = UncancellableHook()
    with ManualClock() as clock:

        async def main() -> None:
            async with ah.AsyncMonitoredSession(double, stop_grace_period_secs=9) as session:
                session.start_soon(uncancellable.wait)
                await ticks()
                raise OSError("broken")

        ending = asyncio.create_task(main())
        await until_true(lambda: uncancellable.cancels)
        await ticks(20)
        clock.advance(8.9)
        await ticks(20)
        assert not ending.done()
        clock.advance(0.1)
        with pytest.raises(OSError, match="broken"):
            await ending
        uncancellable.released.set()
        await until_true(lambda: uncancellable.done)
        await ticks()


async def test_a_background_task_is_cancelled_once() -> None:
    """By the failure of the block; a cancel of its end does not interrupt the cleanup of the task."""
    uncancellable = UncancellableHook()

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double) as session:
            session.start_soon(uncancellable.wait)
            await ticks()
            raise OSError("broken")

    ending = asyncio.create_task(main())
    await until_true(lambda: uncancellable.cancels)
    ending.cancel()
    await ticks(20)
    assert uncancellable.cancels == 1
    uncancellable.released.set()
    with pytest.raises(asyncio.CancelledError):
        await ending


async def test_background_tasks_are_waited_for_after_others_have_cancelled_the_wait() -> None:
    """Such as a framework that cancels all tasks: the block ends when its own background tasks have."""
    gate = asyncio.Event()

    async def main() -> None:
        async with ah.AsyncMonitoredSession(double) as session:
            session.start_soon(gate.wait)

    ending = asyncio.create_task(main())
    await ticks(20)
    (closing,) = [task for task in asyncio.all_tasks() if task.get_name().startswith("the end of session")]
    closing.cancel()
    await ticks(20)
    assert not ending.done()
    gate.set()
    await ending


@pytest.mark.parametrize("task_ends", [False, True], ids=["cancelled", "by-itself"])
async def test_background_tasks_of_a_cancelled_end(task_ends: bool) -> None:
    """A caller that is cancelled during the grace period of tasks: they are cancelled immediately, and all is closed."""
    hook = RecordingHook()
    with ManualClock() as clock:
        gate = asyncio.Event()

        async def main() -> None:
            async with ah.AsyncMonitoredSession(double, [hook], stop_grace_period_secs=9) as session:
                session.start_soon(gate.wait)

        ending = asyncio.create_task(main())
        await ticks(20)
        assert not ending.done()
        if task_ends:
            gate.set()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert clock.now() == 0
    assert hook.phases().count("close") == 1


async def test_closing_is_cancelled_while_another_task_runs() -> None:
    """The closing task is cancelled while it waits for the run of another task: that run is ended, and all is closed."""
    hook = RecordingHook()

    async def step() -> None:
        await asyncio.Event().wait()

    with ManualClock() as clock:
        session = ah.AsyncMonitoredSession(step, [hook])
        await session.__aenter__()
        running = asyncio.create_task(session.run("step"))
        await ticks()
        closing = asyncio.create_task(session.aclose())
        await ticks()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with refused(ah.errors.SessionClosedError, "the session was closed during this run"):
            await running
        assert clock.now() == 0
    assert session.status().state == "closed"
    assert hook.phases()[-1] == "close"
    assert "end" not in hook.phases()


async def test_an_uncancellable_run_does_not_block_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """A run that ignores its cancellation has the grace period twice; the session closes without it, and says so."""
    uncancellable = UncancellableHook()

    async def step() -> None:
        await uncancellable.wait()

    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(step, stop_grace_period_secs=9, name="trainer") as session:
            running = asyncio.create_task(session.run("step"))
            await ticks()
            closing = asyncio.create_task(session.aclose())
            await ticks()
            clock.advance(9)
            await until_true(lambda: uncancellable.cancels)
            assert not closing.done()
            clock.advance(9)
            await closing
        assert warnings_of(caplog)[-1:] == ["session 'trainer': run still active 9 s after its cancellation; closing anyway"]
        uncancellable.released.set()
        await until_true(lambda: uncancellable.done)
        with pytest.raises(ah.errors.SessionClosedError, match="closed during this run"):
            await running


@pytest.mark.parametrize("where", ["create_session", "after_create_session"])
@pytest.mark.parametrize("interrupted", [False, True], ids=["in a recovery", "after an interrupted recovery"])
async def test_a_raw_session_that_is_created_too_late_is_closed(where: str, interrupted: bool) -> None:
    """Its creation ignores the cancellation until the monitored session is closed: it is closed, and not used."""
    uncancellable, graph, created, hook = UncancellableHook(), ah.Graph(), list[ah.Session](), RecordingHook()

    @graph.train_op
    async def step() -> None: ...

    class Creator:
        def __init__(self) -> None:
            self.graph = graph

        async def create_session(self) -> ah.Session:
            if created and where == "create_session":
                await uncancellable.wait()
            created.append(ah.Session(graph))
            return created[-1]

    async def wait(session: ah.Session, coord: ah.Coordinator) -> None:
        if len(created) == 2 and where == "after_create_session":
            await uncancellable.wait()

    lost = FaultInjectionHook({("before_run", 1): ah.UnavailableError("away")})
    policy = ah.RecoveryPolicy(backoff=ah.Backoff(5 if interrupted else 0, jitter=False))
    with ManualClock() as clock:
        hooks = [hook, lost, PhaseHook("after_create_session", wait)]
        async with ah.AsyncMonitoredSession(Creator(), hooks, recovery=policy, stop_grace_period_secs=9) as session:
            running = asyncio.create_task(session.run("step"))
            if interrupted:
                await until_true(lambda: created[0].closed and clock.pending)
                running.cancel()
                await asyncio.wait([running])
                running = asyncio.create_task(session.run("step"))
            await uncancellable.waiting.wait()
            closing = asyncio.create_task(session.aclose())
            while not closing.done():
                clock.advance(1)
                await ticks()
        calls = hook.phases()
        uncancellable.released.set()
        await until_true(lambda: uncancellable.done)
        with pytest.raises(ah.errors.SessionClosedError, match=r"the session was closed (during this run|while a raw session)"):
            await running
    assert [one.closed for one in created] == [True, True]
    assert (calls[-1], hook.phases()) == ("close", calls)
