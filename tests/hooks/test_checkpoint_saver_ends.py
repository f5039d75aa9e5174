"""CheckpointSaverHook when a save fails, the session fails or is cancelled: no checkpoint is lost
or incomplete.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook
from tests.support.checkpoint_files import names, saver_over
from tests.support.saving_sessions import (
    Disk,
    HeldSaver,
    array_graph,
    disk_full_error,
    on_disk,
    saving,
    train,
    writes_done,
)
from tests.support.sessions import Loader, outcome
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

both_ways = pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])


# -- saves that fail


@both_ways
async def test_a_full_disk_ends_the_session_at_the_next_step(
    tmp_path: Path, background: bool
) -> None:
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


FULL = [True, True, False, True, True, True]
"""Whether the disk is full, save by save; after that it is not."""


async def test_a_failed_save_may_be_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `on_error="log"` no failure ends the session, and the next save tries again."""
    saver = HeldSaver(tmp_path, *(disk_full_error() if one else None for one in FULL), held=False)
    hook = saving(saver, background=False)
    await train(array_graph(), [ah.configure(hook, on_error="log")], 7)
    assert (await on_disk(tmp_path), hook.saved, hook.failed) == ([2, 6, 7], 3, 5)
    assert "CheckpointSaverHook.after_run" in caplog.text
    await saver.aclose()


@pytest.mark.parametrize(("fails", "steps"), [(False, [1]), (True, [])])
async def test_a_failure_that_no_run_has_raised(
    tmp_path: Path, fails: bool, steps: list[int]
) -> None:
    """It is raised at the end, after the last state was saved: there may be room again; or it is a
    note on the block's error.
    """
    error = ValueError("the body") if fails else None  # a new one for each test, as it gets a note
    saver = HeldSaver(tmp_path, disk_full_error())
    hook = saving(saver, every=ah.Every(at=[1]), save_on_begin=False)

    async def body(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        saver.let(2)
        if error is not None:
            raise error

    with pytest.raises(ah.errors.CheckpointError if error is None else ValueError) as caught:
        await run_block(ah.AsyncMonitoredSession(array_graph(), [hook]), body)
    notes = [note for note in getattr(caught.value, "__notes__", ()) if "the disk is full" in note]
    assert notes == ([] if error is None else [f"and then: {disk_full_error()!r}"])
    assert (await on_disk(tmp_path), hook.saved, hook.failed) == (steps, len(steps), 1)
    await saver.aclose()


async def test_a_state_that_cannot_be_saved_fails_the_save(tmp_path: Path) -> None:
    """The error for a value without an exact form on disk names the variable; the first save fails
    the start of the session.
    """
    graph = ah.Graph()
    graph.variable("names", {"a"})
    with pytest.raises(ah.errors.InvalidArgumentError, match=r"names.*set.*plain data"):
        async with ah.AsyncMonitoredSession(graph, [saving(tmp_path, background=False)]):
            raise AssertionError("it was entered")


# -- sessions that fail


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    ("save_on_error", "fails", "steps"),
    [
        (True, ("before_run", 4), [0, 2, 3]),
        (False, ("before_run", 4), [0, 2]),
        (True, ("before_run", 3), [0, 2]),  # it was saved already
        (True, ("begin", 1), []),  # there is no session yet
    ],
)
async def test_the_last_state_before_an_error(
    tmp_path: Path, save_on_error: bool, fails: Any, steps: list[int], error: BaseException
) -> None:
    """With `save_on_error` the steps since the last save are not lost, whatever ended the session;
    none is saved twice.
    """
    hook = saving(tmp_path, every=ah.Every(steps=2), save_on_error=save_on_error)
    with pytest.raises(type(error)):
        await train(array_graph(), [FaultInjectionHook({fails: error}), hook], 5)
    assert (await on_disk(tmp_path), hook.saved) == (steps, len(steps))


async def test_a_failed_save_is_tried_once_more_after_the_error(tmp_path: Path) -> None:
    """If the session ends because a save failed, `save_on_error` saves its step, if there is room
    again.
    """
    saver = HeldSaver(tmp_path, disk_full_error(), held=False)
    hook = saving(saver, save_on_begin=False, background=False, save_on_error=True)
    with pytest.raises(ah.errors.CheckpointError, match="the disk is full"):
        await train(array_graph(), [hook], 3)
    assert await on_disk(tmp_path) == [1]
    await saver.aclose()


@pytest.mark.parametrize("is_changed", [True, False])
async def test_a_tracked_object_that_has_changed_before_an_error(
    tmp_path: Path, is_changed: bool
) -> None:
    """It is saved although the step is, like at a normal end; without a change nothing is."""
    counter = Loader(5)
    creator = ah.ChiefSessionCreator(
        array_graph(), scaffold=ah.Scaffold(tracked={"counter": counter}), checkpoint_dir=tmp_path
    )
    hook = ah.CheckpointSaverHook(every=ah.Every(steps=1), background=False, save_on_error=True)
    saved: list[int] = []

    async def use(session: ah.AsyncMonitoredSession) -> None:
        await session.run("train")
        saved.append(hook.saved)
        if is_changed:
            counter.position = 3

    error = ValueError("the block")
    assert await outcome(ah.AsyncMonitoredSession(creator, [hook]), use, error) is error
    assert [hook.saved] == [saved[0] + is_changed]
