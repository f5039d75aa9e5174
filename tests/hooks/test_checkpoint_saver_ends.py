"""CheckpointSaverHook when a save fails, the session fails or is cancelled: no checkpoint is lost or incomplete."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook
from tests.support.checkpoint_files import names, saver_over
from tests.support.hooks import PhaseHook
from tests.support.saving_sessions import (
    Disk,
    HeldSaver,
    Listener,
    array_graph,
    disk_full_error,
    on_disk,
    saving,
    train,
    values_at,
    writes_done,
)
from tests.support.sessions import NO_BACKOFF
from tests.support.waiting import ticks
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

both_ways = pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])


# -- saves that fail


@both_ways
async def test_a_full_disk_ends_the_session_at_the_next_step(tmp_path: Path, background: bool) -> None:
    """With "raise" a run raises the error, once; the good checkpoints remain, and nothing else."""
    disk = Disk()
    saver = saver_over(disk, tmp_path)
    hook = saving(saver, background=background)
    session = ah.AsyncMonitoredSession(array_graph(), [hook])
    steps: list[int] = []

    async def body(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        await writes_done()
        assert hook.saved == 2
        disk.full = True
        while True:
            await session.run("train")
            steps.append(session.global_step.latest.step)
            await writes_done()
            assert hook.failed == 1

    with pytest.raises(ah.errors.CheckpointError, match="step 2 was not saved") as caught:
        await run_block(session, body)
    assert caught.value.errno == errno.ENOSPC
    assert not any("and then" in note for note in caught.value.__notes__)
    assert steps == ([2] if background else [])
    assert (hook.saved, hook.failed) == (2, 1)
    await saver.aclose()
    assert names(tmp_path) == ["step-000000000000.000001", "step-000000000001.000002"]


async def test_a_failed_save_is_logged_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With "log" each is logged with its step and counted, and the next save tries again; the last state is saved."""
    saver = HeldSaver(tmp_path, disk_full_error(), disk_full_error(), None, disk_full_error(), held=False)
    hook = saving(saver, background=False, on_save_error="log")
    await train(array_graph(), [hook], 4)
    assert [(record.getMessage(), record.exc_info is not None) for record in caplog.records] == [
        (f"saving step {step} failed; continuing, because of on_save_error", True) for step in (0, 1, 3)
    ]
    assert (hook.saved, hook.failed, await on_disk(tmp_path)) == (2, 3, [2, 4])
    await saver.aclose()


async def test_so_many_failures_in_a_row_are_too_many(tmp_path: Path) -> None:
    """With a number n, the n-th failure in a row ends the session; fewer are logged, and a successful save resets the count."""
    saver = HeldSaver(
        tmp_path, disk_full_error(), disk_full_error(), None, disk_full_error(), disk_full_error(), disk_full_error(), held=False
    )
    hook = saving(saver, background=False, on_save_error=3)
    with pytest.raises(ah.errors.CheckpointError, match="the disk is full"):
        await train(array_graph(), [hook], 20)
    assert (hook.saved, hook.failed, saver.began) == (1, 5, [0, 1, 2, 3, 4, 5])
    await saver.aclose()


async def test_a_failure_at_the_end_comes_out_of_the_block(tmp_path: Path) -> None:
    """If the last save fails, the block raises the error, once."""
    saver = HeldSaver(tmp_path, disk_full_error(), held=False)
    hook = saving(saver, every=ah.Every(steps=100), save_on_begin=False)
    with pytest.raises(ah.errors.CheckpointError, match="the disk is full") as caught:
        await train(array_graph(), [hook])
    assert not any("and then" in note for note in caught.value.__notes__)
    await saver.aclose()


async def test_the_last_state_is_saved_although_a_save_failed(tmp_path: Path) -> None:
    """A failure that no run has raised is raised at the end, after the last state was saved: the disk may have room again."""
    saver = HeldSaver(tmp_path, disk_full_error())
    hook = saving(saver, every=ah.Every(at=[1]), save_on_begin=False)

    async def body(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        saver.let(2)

    with pytest.raises(ah.errors.CheckpointError, match="the disk is full"):
        await run_block(ah.AsyncMonitoredSession(array_graph(), [hook]), body)
    assert (await on_disk(tmp_path), hook.saved, hook.failed) == ([1], 1, 1)
    await saver.aclose()


async def test_a_failure_not_raised_before_is_raised_by_close(tmp_path: Path) -> None:
    """If the block fails with another error, the failed save is a note on it."""
    saver = HeldSaver(tmp_path, disk_full_error())
    hook = saving(saver, every=ah.Every(at=[1]), save_on_begin=False)
    session = ah.AsyncMonitoredSession(array_graph(), [hook])

    async def body(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        saver.let()
        raise ValueError("the body")

    with pytest.raises(ValueError, match="the body") as caught:
        await run_block(session, body)
    assert [note for note in caught.value.__notes__ if "the disk is full" in note] == [f"and then: {disk_full_error()!r}"]
    await saver.aclose()


async def test_a_failure_survives_a_recovery(tmp_path: Path) -> None:
    """A save fails, and the session is lost and replaced before a run could raise that: the next run raises it."""
    saver = HeldSaver(tmp_path, disk_full_error())
    hook = saving(saver, every=ah.Every(at=[1]), save_on_begin=False)
    faults = FaultInjectionHook({("before_run", 2): ah.AbortedError("lost")})
    sessions: list[ah.Session] = []

    async def let(session: ah.Session, coord: ah.Coordinator) -> None:
        sessions.append(session)
        if len(sessions) == 2:
            saver.let()

    with pytest.raises(ah.errors.CheckpointError, match="the disk is full"):
        await train(array_graph(), [faults, PhaseHook("after_create_session", let), hook], 3, recovery=NO_BACKOFF)
    assert len(sessions) == 2
    await saver.aclose()


async def test_a_state_that_cannot_be_saved_fails_the_save(tmp_path: Path) -> None:
    """The error for a value without an exact form on disk names the variable."""
    graph = ah.Graph()
    graph.variable("names", {"a"})
    with pytest.raises(ah.errors.InvalidArgumentError, match=r"names.*set.*sorted"):
        await train(graph, [saving(tmp_path, background=False)], 0)


async def test_a_cancelled_write_is_a_failed_save(tmp_path: Path) -> None:
    """If foreign code cancels the task of a write, the save counts as failed, and the error names its step."""
    saver = HeldSaver(tmp_path)
    hook = saving(saver, every=ah.Every(at=[1]), save_on_begin=False)
    session = ah.AsyncMonitoredSession(array_graph(), [hook])

    async def body(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        (write,) = [task for task in asyncio.all_tasks() if task.get_name() == "save of step 1"]
        write.cancel()
        await asyncio.wait([write])
        saver.let()
        await session.run("train")

    with pytest.raises(ah.errors.HookCancelledError, match="the save of step 1 was cancelled"):
        await run_block(session, body)
    assert (hook.saved, hook.failed) == (0, 1)


# -- sessions that fail


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("save_on_error", [True, False])
async def test_the_last_state_before_an_error(tmp_path: Path, save_on_error: bool, error: BaseException) -> None:
    """With `save_on_error` the steps since the last save are not lost, whatever ended the session."""
    hook = saving(tmp_path, every=ah.Every(steps=2), save_on_error=save_on_error)
    faults = FaultInjectionHook({("before_run", 4): error})
    with pytest.raises(type(error)):
        await train(array_graph(), [faults, hook], 5)
    assert await on_disk(tmp_path) == ([0, 2, 3] if save_on_error else [0, 2])


async def test_the_last_state_before_a_cancellation(tmp_path: Path) -> None:
    """With `save_on_error` a cancelled session is saved, too, before the cancellation is raised."""
    arrived = asyncio.Event()

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(3):
            await session.run("train")
        arrived.set()
        await asyncio.Event().wait()

    hook = saving(tmp_path, every=ah.Every(steps=2), save_on_error=True)
    task = asyncio.create_task(run_block(ah.AsyncMonitoredSession(array_graph(), [hook]), body))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await on_disk(tmp_path) == [0, 2, 3]


@pytest.mark.parametrize("failing", [1, 3])
async def test_no_step_is_saved_twice_by_an_error(tmp_path: Path, failing: int) -> None:
    """Nothing is saved if the last step was saved already, or if there is no session yet."""
    hook = saving(tmp_path, every=ah.Every(steps=2), save_on_error=True)
    with pytest.raises(ValueError, match="x"):
        await train(array_graph(), [FaultInjectionHook({("before_run", failing): ValueError("x")}), hook], 5)
    assert hook.saved == {1: 1, 3: 2}[failing]
    with pytest.raises(ValueError, match="x"):
        await train(array_graph(), [hook, FaultInjectionHook({("begin", 1): ValueError("x")})])
    assert hook.saved == 0


async def test_a_failed_save_is_tried_once_more_after_the_error(tmp_path: Path) -> None:
    """If the session ends because a save failed, `save_on_error` saves its step, if there is room again."""
    saver = HeldSaver(tmp_path, disk_full_error(), held=False)
    hook = saving(saver, save_on_begin=False, background=False, save_on_error=True)
    with pytest.raises(ah.errors.CheckpointError, match="the disk is full"):
        await train(array_graph(), [hook], 3)
    assert await on_disk(tmp_path) == [1]
    await saver.aclose()


async def test_a_partly_restored_state_is_not_saved(tmp_path: Path) -> None:
    """If a recovery resets the step and a tracked object then fails to load, `save_on_error` saves nothing."""

    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("cannot load")

    scaffold = ah.Scaffold(tracked={"loader": Loader()})
    creator = ah.ChiefSessionCreator(array_graph(), scaffold=scaffold, checkpoint_dir=tmp_path)
    hook = saving(None, every=ah.Every(steps=2), save_on_error=True)
    faults = FaultInjectionHook({("before_run", 4): ah.AbortedError("lost")})
    with pytest.raises(ValueError, match="cannot load"):
        await train(creator, [faults, hook], 5, recovery=NO_BACKOFF)
    assert await on_disk(tmp_path) == [0, 2]


# -- sessions that are cancelled


@both_ways
async def test_cancelled_while_it_writes(tmp_path: Path, background: bool) -> None:
    """The thread finishes the write: the checkpoint is complete, and no task, thread, file or lock is left."""
    disk = Disk(held=True)
    saver = saver_over(disk, tmp_path)
    hook = saving(saver, every=ah.Every(at=[2]), save_on_begin=False, background=background)

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(3):
            await session.run("train")
        await asyncio.Event().wait()

    task = asyncio.create_task(run_block(ah.AsyncMonitoredSession(array_graph(), [hook]), body))
    await disk.wait_reached()
    task.cancel()
    await ticks(20)
    assert not task.done()
    disk.free.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await saver.aclose()
    assert names(tmp_path) == ["step-000000000002.000001"]
    assert (await ah.Saver(tmp_path, read_only=True).verify())[0][1] is None


@pytest.mark.parametrize(("full", "times", "steps"), [(True, 1, []), (False, 20, [0, 1])], ids=["full disk", "repeatedly"])
async def test_cancelled_at_the_end_while_it_writes(tmp_path: Path, full: bool, times: int, steps: list[int]) -> None:
    """However often the caller is cancelled it waits for the write; if that fails, nothing of it is left."""
    disk = Disk(held=True, full=full)
    saver = saver_over(disk, tmp_path)
    hook = saving(saver, save_on_error=not full)
    task = asyncio.create_task(train(array_graph(), [hook]))
    await disk.wait_reached()
    for _ in range(times):
        task.cancel()
        await ticks(2)
    await ticks(20)
    assert not task.done()
    disk.free.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await saver.aclose()
    assert (await on_disk(tmp_path), hook.failed) == (steps, int(full))
    assert len(names(tmp_path)) == len(steps)


async def test_the_write_of_a_lost_session_finishes_first(tmp_path: Path) -> None:
    """If a session is lost while its checkpoint is written, the new one begins after the write, at that checkpoint."""
    saver, listener = HeldSaver(tmp_path), Listener()
    record: list[str] = listener.record

    class Recording(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            record.append(f"a session at step {session.global_step.latest.step}")
            saver.let(10)

    faults = FaultInjectionHook({("before_run", 3): ah.AbortedError("lost")})
    hook = saving(saver, every=ah.Every(steps=2), listeners=[listener])
    await train(array_graph(), [faults, Recording(), hook], 3, recovery=NO_BACKOFF)
    assert record == [
        "begin",
        "a session at step 0",
        *("before_save(0)", "after_save(0)", "before_save(2)"),
        "a session at step 2",
        *("after_save(2)", "before_save(3)", "after_save(3)", "end(3)"),
    ]
    assert (await values_at(tmp_path)).keys() == {"weights"}
    await saver.aclose()
