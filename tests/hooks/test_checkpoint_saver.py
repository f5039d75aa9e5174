"""CheckpointSaverHook: when it saves, what happens meanwhile, and what it saves."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiohooks as ah
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.checks import drop, invalid
from tests.support.hooks import PhaseHook
from tests.support.saving_sessions import (
    EVERY_STEP,
    HeldSaver,
    Listener,
    array_graph,
    on_disk,
    saving,
    state_at,
    train,
    writes_done,
)
from tests.support.sessions import NO_BACKOFF, make_runs
from tests.support.waiting import parked, result_without_suspending, until_true
from tests.tensorflow.blocks import run_block

pytestmark = pytest.mark.every_python

both_ways = pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])


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
    saver, listener = HeldSaver(tmp_path, held=background), Listener()
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
    there, here = tmp_path / "there", tmp_path / "here"
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
async def test_a_listener_whose_input_ends_is_no_clean_end(
    tmp_path: Path, background: bool
) -> None:
    """An error that would end a session cleanly is a failure where a listener raises it."""
    listener = Listener(fails={1: ah.OutOfRangeError("no more data to evaluate")})
    hook = saving(tmp_path, listeners=[listener], background=background)
    with pytest.raises(RuntimeError, match="after_save of a listener raised OutOfRange") as caught:
        await train(array_graph(), [hook], 3)
    assert isinstance(caught.value.__cause__, ah.OutOfRangeError)
