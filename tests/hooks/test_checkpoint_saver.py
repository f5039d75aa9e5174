"""CheckpointSaverHook: when it saves, what happens meanwhile, what it saves, and failures of saves
and sessions.
"""

from __future__ import annotations

import errno
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checkpoint_files import names, saver_over
from tests.support.checks import drop, invalid
from tests.support.hooks import PhaseHook
from tests.support.saving_sessions import (
    EVERY_STEP,
    Disk,
    HeldSaver,
    Listener,
    array_graph,
    disk_full_error,
    on_disk,
    saving,
    state_at,
    train,
    writes_done,
)
from tests.support.sessions import NO_BACKOFF, Loader, make_runs, outcome
from tests.support.waiting import (
    forever,
    parked,
    pass_time,
    result_without_suspending,
    until_true,
)
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

both_ways = pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])


class HangingListener(ah.hooks.CheckpointSaverListener):
    """Never returns from `after_save`, and notes the steps at which that has ended."""

    def __init__(self) -> None:
        self.begun = False
        self.ended = list[int]()

    async def after_save(self, _: ah.Session, global_step: int) -> None:
        self.begun = True
        try:
            await forever()
        finally:
            self.ended.append(global_step)


# -- when


@both_ways
@pytest.mark.parametrize(
    ("options", "runs", "steps"),
    [
        ({}, 5, [0, 2, 4, 5]),
        ({}, 4, [0, 2, 4]),
        ({}, 0, [0]),
        ({"save_on_begin": False}, 5, [2, 4, 5]),
        ({"save_on_begin": False}, 0, [0]),
        ({"save_on_end": False}, 5, [0, 2, 4]),
        ({"save_on_begin": False, "save_on_end": False}, 1, []),
    ],
)
async def test_which_steps_are_saved(
    tmp_path: Path, options: dict[str, bool], runs: int, steps: list[int], background: bool
) -> None:
    """The beginning, each crossing of `every` and the end; no step twice."""
    hook = saving(tmp_path / "here", every=ah.Every(steps=2), background=background, **options)
    await train(array_graph(), [hook], runs)
    assert await on_disk(tmp_path / "here") == steps
    assert (hook.saved, hook.failed) == (len(steps), 0)
    assert (hook.latest is None) == (not steps)
    assert hook.latest is None or hook.latest.step == steps[-1]


class Dial:
    """A tracked object that a program turns between steps."""

    def __init__(self) -> None:
        self.weights = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


class CountingHook(ah.SessionRunHook):
    """Keeps the number of its calls."""

    def __init__(self) -> None:
        self.counts = {"after_run": 0, "end": 0}

    async def after_run(self, run_context: ah.SessionRunContext, values: Any) -> None:
        self.counts["after_run"] += 1

    def state_dict(self) -> dict[str, int]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = {**state}


class CountingEndHook(CountingHook):
    """Counts its `end`, too."""

    async def end(self, session: ah.Session) -> None:
        self.counts["end"] += 1


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(
    ("turned_by", "hook", "saves"),
    [
        ("no one", CountingHook(), 1),
        ("block", CountingHook(), 2),
        ("end", CountingHook(), 2),
        ("no one", CountingEndHook(), 2),
    ],
)
async def test_the_last_save_has_what_changed_without_a_step(
    tmp_path: Path, turned_by: str, hook: CountingHook, saves: int, steps: int
) -> None:
    """A tracked object or a hook that has changed since the save of the last step is saved again,
    and nothing is saved twice.
    """
    dial = Dial()
    hook.counts = {"after_run": 0, "end": 0}

    async def turn(session: ah.Session) -> None:
        dial.weights[1] += turned_by == "end"

    saver = saving(None, every=ah.Every(steps=4))
    creator = ah.ChiefSessionCreator(
        array_graph(), checkpoint_dir=tmp_path, scaffold=ah.Scaffold(tracked={"dial": dial})
    )
    hooks = [saver, hook, PhaseHook("end", turn)]
    async with ah.AsyncMonitoredSession(creator, hooks) as session:
        await make_runs(session, steps, "train")
        dial.weights[1] += turned_by == "block"
    assert saver.saved == saves + bool(steps)
    async with ah.checkpoint.Saver(tmp_path) as reader:
        restored = await reader.restore()
    assert restored is not None
    assert restored.state["tracked"]["dial"]["weights"].tolist() == dial.weights.tolist()
    assert restored.state["hooks"][type(hook).__name__] == hook.counts


@pytest.mark.parametrize("sequential", [False, True])
async def test_a_save_has_what_hooks_of_a_higher_order_keep_of_its_run(
    tmp_path: Path, sequential: bool
) -> None:
    """Whatever the order of the saver: a resumed run misses nothing."""
    hook = CountingHook()
    saver = saving(tmp_path, every=EVERY_STEP, save_on_end=False)
    hooks: list[Any] = [saver, ah.configure(hook, order=200)]
    if sequential:
        hooks = ah.in_order([saver, hook])
    async with ah.AsyncMonitoredSession(array_graph(), hooks) as session:
        await make_runs(session, 3, "train")
    state = await state_at(tmp_path, 3)
    assert state["hooks"]["CountingHook"]["after_run"] == 3


# -- in the background


@both_ways
async def test_one_is_written_at_a_time(
    tmp_path: Path, background: bool, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that is due during a write waits for it, inside its step, which is logged after a
    second; in the foreground every step waits for its own.
    """
    saver, listener = HeldSaver(tmp_path), Listener()  # asserts that there is one at a time
    hook = saving(
        saver, background=background, listeners=[listener], save_on_begin=False, save_on_end=False
    )
    async with saver, ah.AsyncMonitoredSession(array_graph(), [hook]) as session:
        if background:
            await session.run("train")
        run = await parked(session.run("train"), 20)
        assert (saver.began, session.global_step.latest.step, run.done()) == (
            [1],
            1 + background,
            False,
        )
        clock.advance(1)
        log = "a caller has waited 1 s for the save of step 1"
        assert caplog.messages == [log][:background]
        saver.let()
        await run
        assert (listener.saved, saver.began) == (([1], [1, 2]) if background else ([1], [1]))
        saver.let()
    assert await on_disk(tmp_path) == [1, 2][: 1 + background]


async def test_a_run_during_a_write_does_not_suspend(tmp_path: Path) -> None:
    """Where steps never wait, a step during a write costs what any other step does: no turn of the
    event loop.
    """
    saver = HeldSaver(tmp_path)
    hook = saving(saver, every=ah.Every(at=[1]), save_on_begin=False, save_on_end=False)
    async with saver, ah.AsyncMonitoredSession(array_graph(), [hook], yield_secs=None) as session:
        await session.run("train")
        result_without_suspending(session.run("train"))
        assert hook.saved == 0
        saver.let()
    assert hook.saved == 1


@both_ways
async def test_old_values_are_released_after_the_write(tmp_path: Path, background: bool) -> None:
    """After the write nothing refers to the values of an earlier step, not even an idle worker
    thread.
    """
    saver = HeldSaver(tmp_path, held=background)
    listener = Listener()
    hook = saving(
        saver,
        every=ah.Every(steps=2),
        background=background,
        listeners=[listener],
        save_on_begin=False,
    )
    async with saver, ah.AsyncMonitoredSession(array_graph(1000), [hook]) as session:
        kept: list[Any] = []
        for _ in range(2):
            kept.append(await session.run("weights"))
            await session.run("train")
        kept.append(await session.run("weights"))
        of_steps = list(map(weakref.ref, kept))
        await session.run("train")
        drop(kept)
        assert [ref() is not None for ref in of_steps[:2]] == [False, False]
        if background:
            assert of_steps[2]() is not None
        saver.let(2)
        await listener.wait_saved(2)
        gc.collect()
        await until_true(
            lambda: of_steps[2]() is None
        )  # the thread releases its arguments right after its result is set


# -- where


async def test_the_directory(tmp_path: Path) -> None:
    """With the creator's directory, or none, there is one writer; another one is saved to, and the
    creator's restored from.
    """
    there = tmp_path / "there"
    here = tmp_path / "here"
    for where in (None, there, ah.checkpoint.Saver(there)):
        await train(ah.ChiefSessionCreator(array_graph(), checkpoint_dir=there), [saving(where)])
    assert (await on_disk(there))[-1] == 3
    await train(ah.ChiefSessionCreator(array_graph(), checkpoint_dir=there), [saving(here)], 2)
    assert ((await on_disk(there))[-1], await on_disk(here)) == (3, [4, 5])


async def test_no_directory_at_all() -> None:
    """If neither the hook nor the creator has one, the session does not begin."""
    with invalid("CheckpointSaverHook has no directory", "ChiefSessionCreator(checkpoint_dir=...)"):
        await train(array_graph(), [ah.CheckpointSaverHook()])


async def test_a_session_that_begins_without_what_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says that the session does not continue from the checkpoints in the directory, and
    how to; once.
    """
    await train(array_graph(), [saving(tmp_path)], 3)
    assert caplog.messages == []
    faults = FaultInjectionHook({("before_run", 2): ah.AbortedError("lost")})
    hook = ah.configure(saving(tmp_path), on_error="log")
    await train(array_graph(), [faults, hook], 2, recovery=NO_BACKOFF)
    (warning,) = [message for message in caplog.messages if "checkpoint" in message]
    assert (
        f"{tmp_path} has a checkpoint of step 3, and this session begins at step 0 without it"
        in warning
    )
    assert "ChiefSessionCreator(graph, checkpoint_dir=...)" in warning
    caplog.clear()
    await train(ah.ChiefSessionCreator(array_graph(), checkpoint_dir=tmp_path), [saving(None)], 1)
    assert caplog.messages == []


# -- listeners: the order of their calls, and their requests to stop


@both_ways
async def test_the_order_of_the_calls(tmp_path: Path, background: bool) -> None:
    """The listeners are called in order: begin, around each save, end; `after_save` when the
    checkpoint is durable.
    """
    record: list[str] = []
    there: list[list[int]] = []

    class Looking(Listener):
        async def after_save(self, session: ah.Session, global_step: int) -> object:
            there.append(await on_disk(tmp_path))
            return await super().after_save(session, global_step)

    listeners = [Looking(record=record, name="a."), Listener(record=record, name="b.")]
    hook = saving(tmp_path, every=ah.Every(steps=2), listeners=listeners, background=background)
    await train(array_graph(), [hook], 3)
    saves = [
        f"{name}{phase}_save({step})"
        for step in (0, 2, 3)
        for phase in ("before", "after")
        for name in ("a.", "b.")
    ]
    assert record == ["a.begin", "b.begin", *saves, "a.end(3)", "b.end(3)"]
    assert there == [[0], [0, 2], [0, 2, 3]]


@both_ways
@pytest.mark.parametrize(("step", "runs"), [(0, 0), (2, 2)])
async def test_a_stop_request_is_honoured(
    tmp_path: Path, step: int, runs: int, background: bool
) -> None:
    """No run begins after the listener returned, at the first save as at any other."""
    listener = Listener({step: "enough"})
    hook = saving(tmp_path, listeners=[listener], background=background)
    async with ah.AsyncMonitoredSession(array_graph(), [hook]) as session:
        for number in range(10):
            await listener.wait_saved(number)
            if session.should_stop():
                break
            await session.run("train")
    assert (session.global_step.latest.step, session.stop_reason) == (runs, "enough")


async def test_a_stop_request_at_the_last_save_is_honoured(tmp_path: Path) -> None:
    """The session has the reason, and a request without a reason gets one."""
    session = await train(
        array_graph(), [saving(tmp_path, every=ah.Every(secs=1e6), listeners=[Listener({1: True})])]
    )
    assert session.stop_reason == "a listener requested it after saving step 1"


class Failing(ah.hooks.CheckpointSaverListener):
    """Fails before the save of step 2."""

    async def before_save(self, session: ah.Session, global_step: int) -> None:
        if global_step == 2:
            raise ValueError("not now")


@pytest.mark.parametrize(
    ("listener", "says", "steps", "last"),
    [
        (Failing(), "not now", [0, 1], 2),
        (Listener(fails={2: ValueError("not well")}), "not well", [0, 1, 2], 3),
    ],
)
async def test_an_error_of_a_listener_is_raised(
    tmp_path: Path,
    listener: ah.hooks.CheckpointSaverListener,
    says: str,
    steps: list[int],
    last: int,
) -> None:
    """Before a save in that run, which is not saved; after one in the next at the latest."""
    hook = saving(tmp_path, listeners=[listener])
    session = ah.AsyncMonitoredSession(array_graph(), [hook])

    async def body(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(3):
            await session.run("train")
            await writes_done()

    with pytest.raises(ValueError, match=says):
        await run_block(session, body)
    assert (await on_disk(tmp_path), session.global_step.latest.step, hook.failed) == (
        steps,
        last,
        0,
    )


@both_ways
@pytest.mark.parametrize("method", ["run", "aclose"])
async def test_a_listener_cannot_run_or_end_the_session(
    tmp_path: Path, background: bool, method: str
) -> None:
    """Either would wait for the write whose listener waits for it."""

    class Nested(ah.hooks.CheckpointSaverListener):
        async def after_save(self, _: ah.Session, global_step: int) -> None:
            if global_step:
                await (session.run("loss") if method == "run" else session.aclose())

    hook = saving(tmp_path, every=EVERY_STEP, background=background, listeners=[Nested()])
    session = ah.AsyncMonitoredSession(array_graph(), [hook])

    async def use() -> None:
        async with session:
            await session.run("train")
            await writes_done()
            await session.run("train")

    with pytest.raises(ah.errors.NestedRunError, match=f"{method} was called from inside a run"):
        await use()


async def test_a_listener_that_hangs_does_not_outlive_its_session(tmp_path: Path) -> None:
    """At the end of the grace period its task is cancelled."""
    listener = HangingListener()
    hook = saving(tmp_path, every=EVERY_STEP, save_on_begin=False, listeners=[listener])
    with ManualClock() as clock:

        async def use() -> None:
            async with ah.AsyncMonitoredSession(array_graph(), [hook]) as session:
                await session.run("train")
                raise ValueError("the block fails")

        using = await parked(use(), 50)
        await until_true(lambda: listener.begun)
        await pass_time(clock, 40)
        with pytest.raises(ValueError, match="the block fails"):
            await using
    assert listener.ended == [1]


async def test_a_requested_save_is_made_at_the_end(tmp_path: Path) -> None:
    """Also without `save_on_end`."""
    hook = saving(tmp_path, save_on_begin=False, save_on_end=False)
    async with ah.AsyncMonitoredSession(array_graph(), [hook]) as session:
        await session.run("train")
        session.coord.events.request_save()
    assert await on_disk(tmp_path) == [1]


@both_ways
async def test_a_listener_whose_input_ends_is_no_clean_end(
    tmp_path: Path, background: bool
) -> None:
    """An error that would end a session cleanly is a failure where a listener raises it."""
    listener = Listener(fails={1: ah.OutOfRangeError("no more data to evaluate")})
    hook = saving(tmp_path, listeners=[listener], background=background)
    with pytest.raises(RuntimeError, match="after_save of a listener raised OutOfRange") as caught:
        await train(array_graph(), [hook], 3)
    assert isinstance(caught.value.__cause__, ah.OutOfRangeError)


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
    saver = HeldSaver(
        tmp_path, *(disk_full_error() if is_full else None for is_full in FULL), held=False
    )
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
