"""TimelineHook: the lanes and times of scripted sessions, windows, limits, and what a failing disk does."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._aio.clock import sleep
from aiohooks.errors import AbortedError
from aiohooks.testing import ManualClock
from tests.support.hooks import Stubborn
from tests.support.saving_sessions import HeldSaver, array_graph
from tests.support.sessions import NO_BACKOFF, double, make_runs, use_up
from tests.support.traces import Slow, Times, checked_events, played, trace_lanes
from tests.support.waiting import cancel_and_wait, forever, parked, ticks, until_true

pytestmark = pytest.mark.every_python


class Upload(Slow):
    """A hook with a lane of its own."""


class Audit(Slow):
    """A hook with a lane of its own."""


async def train_step(batch: int = 1) -> dict[str, int]:
    """Take ten milliseconds."""
    await sleep(0.010)
    return {"loss": batch}


async def batches(count: int, secs: float) -> AsyncIterator[int]:
    """Take so long for each."""
    for batch in range(count):
        await sleep(secs)
        yield batch


async def run(source: Any, hooks: list[Any], runs: int = 1, fetch: str = "loss", **options: Any) -> None:
    """Make so many runs in a session."""
    async with ah.AsyncMonitoredSession(source, hooks, **options) as session:
        await make_runs(session, runs, fetch)


# -- lanes


async def operations(hooks: list[Any], clock: ManualClock) -> None:
    """Run a graph with two operations that overlap and a plain one."""
    graph = ah.Graph()

    @graph.operation
    async def left() -> int:
        await sleep(0.005)
        return 1

    @graph.operation
    async def right() -> int:
        await sleep(0.003)
        return 2

    @graph.train_op
    def both(left: int, right: int) -> int:
        clock.advance(0.002)
        return left + right

    await run(graph, hooks, fetch="both")


async def steps_of(hooks: list[Any], feeds: Any, prefetch: int = 0) -> None:
    """Run a step for each of the feeds."""
    async with ah.AsyncMonitoredSession(train_step, hooks) as session:
        await use_up(session.steps("loss", feeds=feeds, prefetch=prefetch))


def blocking(clock: ManualClock) -> Iterator[int]:
    """Block for each of two feeds."""
    for batch in range(2):
        clock.advance(0.005)
        yield batch


async def recovering(hooks: list[Any], clock: ManualClock) -> None:
    """Fail in the first attempt, and take some time to recover."""
    failures: list[Exception] = [AbortedError("lost")]

    async def step() -> dict[str, int]:
        await sleep(0.005)
        if failures:
            raise failures.pop()
        return {"loss": 1}

    class Restores(ah.SessionRunHook):
        async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
            await sleep(0.003)

    await run(step, [*hooks, Restores()], recovery=NO_BACKOFF)


def train_steps(*times: int, secs: int = 10) -> Times:
    """Return the bars of the operation at these times."""
    return [("train_step", began, secs) for began in times]


LANES: dict[str, tuple[Callable[[list[Any], ManualClock], Any], dict[str, Times]]] = {
    "hooks that overlap": (
        lambda hooks, clock: run(train_step, [*hooks, Upload(before=4, after=6, end=3), Audit(before=8)], runs=2),
        {
            "steps": [("step 1", 0, 24), ("step 2", 24, 24)],
            "train_step": train_steps(8, 32),
            "Upload": [("before_run", 0, 4), ("after_run", 18, 6), ("before_run", 24, 4), ("after_run", 42, 6), ("end", 48, 3)],
            "Audit": [("before_run", 0, 8), ("before_run", 24, 8)],
        },
    ),
    "operations that overlap, and a plain one": (
        operations,
        {"steps": [("step 1", 0, 7)], "left": [("left", 0, 5)], "right": [("right", 0, 3)], "both": [("both", 5, 2)]},
    ),
    "taking a value out of a result has none": (
        lambda hooks, clock: run(train_step, hooks),
        {"steps": [("step 1", 0, 10)], "train_step": train_steps(0)},
    ),
    "feeds that are waited for in turn": (
        lambda hooks, clock: steps_of(hooks, batches(3, 0.007)),
        {
            "steps": [("step 1", 7, 10), ("step 2", 24, 10), ("step 3", 41, 10)],
            "feeds": [("next feed", 0, 7), ("next feed", 17, 7), ("next feed", 34, 7)],
            "train_step": train_steps(7, 24, 41),
        },
    ),
    "feeds that are taken ahead": (
        lambda hooks, clock: steps_of(hooks, batches(3, 0.007), prefetch=1),
        {
            "steps": [("step 1", 7, 10), ("step 2", 17, 10), ("step 3", 27, 10)],
            "feeds": [("next feed", 0, 7)],
            "feeds taken ahead": [("take a feed", 0, 7), ("take a feed", 7, 7), ("take a feed", 17, 7)],
            "train_step": train_steps(7, 17, 27),
        },
    ),
    "plain feeds that block": (
        lambda hooks, clock: steps_of(hooks, blocking(clock)),
        {
            "steps": [("step 1", 5, 10), ("step 2", 20, 10)],
            "feeds": [("next feed", 0, 5), ("next feed", 15, 5)],
            "train_step": train_steps(5, 20),
        },
    ),
    "background calls": (
        lambda hooks, clock: run(train_step, [*hooks, ah.configure(Upload(after=7), background=True)], runs=2),
        {
            "steps": [("step 1", 0, 10), ("step 2", 10, 10)],
            "train_step": train_steps(0, 10),
            "Upload in the background": [("after_run", 10, 7), ("after_run", 20, 7)],
        },
    ),
    "a recovery": (
        recovering,
        {
            "steps": [("step 1", 3, 5), ("step 1, attempt 2", 11, 5)],
            "step": [("step", 3, 5), ("step", 11, 5)],
            "Restores": [("after_create_session", 0, 3), ("after_create_session", 8, 3)],
            "recoveries": [("recovery from AbortedError", 8, 3)],
        },
    ),
}


@pytest.mark.parametrize("name", LANES)
async def test_lanes(name: str, clock: ManualClock, tmp_path: Path) -> None:
    """Each part has a lane of its own, with the times of its calls; what overlaps does so in the trace; failures have errors."""
    path = tmp_path / "trace.json"
    play, lanes = LANES[name]
    await played(clock, play([ah.TimelineHook(path)], clock))
    assert trace_lanes(path) == lanes
    events = checked_events(path)
    marks = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    recovers = name == "a recovery"
    assert marks == ([("recovery from AbortedError", pytest.approx(8000))] if recovers else [])
    errors = {event["args"]["error"] for event in events if "error" in event.get("args", {})}
    assert errors == ({"AbortedError('lost')"} if recovers else set())


async def test_how_long_the_loop_is_held(clock: ManualClock, tmp_path: Path) -> None:
    """A call's time before its first wait, in which nothing else ran, is noted: all of it, if it does not wait."""

    class Blocks(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            clock.advance(0.003)

        async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
            clock.advance(0.001)
            await sleep(0.004)

    path = tmp_path / "trace.json"
    await played(clock, run(double, [ah.TimelineHook(path), Blocks()]))
    held = {event["name"]: (event["dur"], event["args"]["held_us"]) for event in checked_events(path) if "args" in event
            and "held_us" in event["args"]}  # fmt: skip
    assert held["before_run"] == (pytest.approx(3000), pytest.approx(3000))
    assert held["after_run"] == (pytest.approx(5000), pytest.approx(1000))


async def test_checkpoint_writes(clock: ManualClock, tmp_path: Path) -> None:
    """The write of a checkpoint has a lane, beside the steps that follow meanwhile; one that fails has its error."""
    path = tmp_path / "trace.json"
    graph = array_graph()
    graph.operation(name="wait")(train_step)
    saver = HeldSaver(tmp_path / "held", OSError("no space"), OSError("no space"))  # what is written takes real time
    hook = ah.CheckpointSaverHook(saver, every=ah.Every(steps=2), save_on_begin=False, save_on_end=False, on_save_error="log")

    async def loop() -> None:
        async with ah.AsyncMonitoredSession(graph, [ah.TimelineHook(path), hook]) as session:
            for step in range(1, 6):
                await session.run(["train", "wait"])
                if step in (3, 5):
                    saver.let()

    await played(clock, loop())
    assert trace_lanes(path)["checkpoint writes"] == [("save of step 2", 20, 10), ("save of step 4", 40, 10)]
    failed = [event for event in checked_events(path) if "error" in event.get("args", {})]
    assert [(event["name"], event["args"]["error"]) for event in failed] == [
        ("save of step 2", "OSError('no space')"),
        ("save of step 4", "OSError('no space')"),
    ]
    await run(array_graph(), [ah.TimelineHook(path), ah.CheckpointSaverHook(tmp_path / "real")], fetch="train")
    written = [event for event in checked_events(path) if event.get("cat") == "save"]
    assert [(event["name"], "args" in event) for event in written] == [("save of step 0", False), ("save of step 1", False)]


async def test_waits(clock: ManualClock, tmp_path: Path) -> None:
    """Waits that a stop ends have a lane, with what they wait for: a step, a turn to run, room in a version gate."""
    path = tmp_path / "trace.json"
    store, versions = ah.MemoryStepStore(run="shared"), ah.MemoryStepStore(1)
    gate = ah.VersionGate(versions, max_lag=0)

    async def admitted(session: ah.AsyncMonitoredSession) -> None:
        for _ in range(2):
            async with gate.admit(until=session.until) as ticket:
                ticket.use()

    async def session_of_two() -> None:
        hooks = [ah.TimelineHook(path), ah.GlobalStepWaiterHook(5)]
        async with ah.AsyncMonitoredSession(train_step, hooks, global_step=store) as session:
            first = await parked(session.run("loss"))
            second = await parked(session.run("loss"))
            await sleep(0.006)
            with store.publisher("other"):
                await store.advance(5)
                await asyncio.gather(first, second)
            task = session.start_soon(admitted, session)
            await session.until(sleep(0.002))
            await versions.advance()
            await task

    await played(clock, session_of_two())
    found = trace_lanes(path)
    waits = sorted((*times, name) for lane, bars in found.items() if lane.startswith("waits") for name, *times in bars)
    assert found["GlobalStepWaiterHook"] == [("before_run", 0, 6)]
    assert [wait[:2] for wait in waits] == [(0, 6), (0, 16), (26, 2), (26, 2)]
    for text in ("step 5", "turn to run", "admitted", "sleep"):
        assert any(text in str(wait[2]) for wait in waits), text


async def test_a_cancelled_run(clock: ManualClock, tmp_path: Path) -> None:
    """The file is written when the session is cancelled; what was cancelled has that as its error."""
    path = tmp_path / "trace.json"

    async def step() -> None:
        await forever()

    async def cancelled() -> None:
        task = await parked(run(step, [ah.TimelineHook(path)], fetch="step"))
        await sleep(0.009)
        assert await cancel_and_wait(task)

    await played(clock, cancelled())
    errors = {event["name"]: event["args"]["error"] for event in checked_events(path) if "error" in event.get("args", {})}
    assert errors == {"step 1": "CancelledError()", "step": "CancelledError()"}
    assert trace_lanes(path)["steps"] == [("step 1", 0, 9)]


async def test_a_hook_that_is_left_running(clock: ManualClock) -> None:
    """A hook that ignores its cancellation has a bar up to its own end, or none; its next call gets a second lane."""
    timeline = ah.TimelineHook()
    stubborn = Stubborn()

    hooks: list[Any] = [timeline, Upload(before=1), ah.configure(stubborn, timeout=0.002, on_error="log")]
    found: list[dict[str, list[float | None]]] = []

    async def loop() -> None:
        async with ah.AsyncMonitoredSession(double, hooks, stop_grace_period_secs=0.001) as session:
            await make_runs(session, 2, "loss")
            for _ in range(2):
                lanes = [lane for lane in timeline.lanes().lanes if "Stubborn" in lane.name]
                found.append({lane.name: [lane.bars[0].began, lane.bars[0].secs] for lane in lanes})
                stubborn.released.set()
                await ticks()

    try:
        await played(clock, loop())
    finally:
        stubborn.released.set()
    assert found == [
        {"Stubborn": [0, None], "Stubborn (2)": [pytest.approx(0.003), None]},
        {"Stubborn": [0, pytest.approx(0.006)], "Stubborn (2)": [pytest.approx(0.003), pytest.approx(0.003)]},
    ]


async def test_nothing_is_observed_after_the_session(clock: ManualClock) -> None:
    """The hook takes itself out of the session's observers at its end, and can be used again."""
    timeline = ah.TimelineHook()
    assert (timeline.captures, timeline.lanes().lanes) == ([], ())
    for runs in (2, 3):
        session = ah.AsyncMonitoredSession(train_step, [timeline])

        async def loop(session: ah.AsyncMonitoredSession = session, runs: int = runs) -> None:
            async with session:
                await make_runs(session, runs, "loss")
                assert [lane.name for lane in timeline.lanes().lanes] == ["steps", "train_step"]
                assert len(timeline.lanes().lanes[0].bars) == runs

        await played(clock, loop())
        assert session.coord.observers == []


async def test_the_last_steps_while_it_runs(clock: ManualClock) -> None:
    """`lanes(n)` is what the last n steps leave of `lanes()`, with times from their beginning; it begins at that time."""
    clock.advance(1e6)
    timeline = ah.TimelineHook()

    async def loop() -> None:
        async with ah.AsyncMonitoredSession(train_step, [timeline, Upload(before=5)]) as session:
            await make_runs(session, 3, "loss")
            whole, last = timeline.lanes(), timeline.lanes(2)
            assert whole.unix_time is not None
            assert abs(whole.unix_time - time.time()) < 3600
            assert last.unix_time == pytest.approx(whole.unix_time + 0.015, abs=1e-3)
            assert (whole.first_step, last.first_step, timeline.lanes(3), timeline.lanes(9)) == (1, 2, whole, whole)
            bars = [
                [(bar.name, round(bar.began, 6), round(bar.secs or 0, 6)) for bar in lane.bars if bar.secs] for lane in last.lanes
            ]
            assert bars == [
                [("step 2", 0, 0.015), ("step 3", 0.015, 0.015)],
                [("train_step", 0.005, 0.01), ("train_step", 0.02, 0.01)],
                [("before_run", 0, 0.005), ("before_run", 0.015, 0.005)],
            ]

    await played(clock, loop())


# -- windows and limits


def was_captured(hook: ah.TimelineHook, count: int) -> bool:
    """Return whether so many files are written."""
    return len(hook.captures) == count


async def test_without_every_the_last_steps_are_kept(clock: ManualClock, tmp_path: Path) -> None:
    """The file has the last `window_steps` steps, with times from the first of these."""
    path = tmp_path / "new" / "trace-{step}.json"
    hook = ah.TimelineHook(path, window_steps=2)
    await played(clock, run(train_step, [hook, Upload(before=5)], runs=7))
    assert hook.captures == [str(tmp_path / "new" / "trace-6.json")]
    assert trace_lanes(tmp_path / "new" / "trace-6.json") == {
        "steps": [("step 6", 0, 15), ("step 7", 15, 15)],
        "train_step": [("train_step", 5, 10), ("train_step", 20, 10)],
        "Upload": [("before_run", 0, 5), ("before_run", 15, 5)],
    }


async def test_windows(clock: ManualClock, tmp_path: Path) -> None:
    """With `every`, a window begins on each crossing, at most `max_captures` times; an incomplete one is written at the end."""
    hook = ah.TimelineHook(tmp_path / "{step}.json", every=ah.Every(steps=3), window_steps=2)
    limited = ah.TimelineHook(tmp_path / "limited.json", every=ah.Every(steps=3), window_steps=2, max_captures=1)
    async with ah.AsyncMonitoredSession(train_step, [hook, limited]) as session:
        for step in range(1, 10):
            await played(clock, session.run("loss"))
            if step in (5, 8):
                await until_true(partial(was_captured, hook, step // 3))
    assert [Path(path).name for path in hook.captures] == ["3.json", "6.json", "9.json"]
    assert trace_lanes(tmp_path / "6.json")["steps"] == [("step 6", 0, 10), ("step 7", 10, 10)]
    assert trace_lanes(tmp_path / "9.json")["steps"] == [("step 9", 0, 10)]
    assert trace_lanes(tmp_path / "limited.json")["steps"] == [("step 3", 0, 10), ("step 4", 10, 10)]


async def test_outside_of_windows_runs_are_not_observed(clock: ManualClock, tmp_path: Path) -> None:
    """Between windows no run has an observer, so its hooks and operations cost what they cost without the hook."""
    seen: list[int] = []

    class Looks(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            from aiohooks._aio.contexts import current_run

            scope = current_run()
            assert scope is not None
            seen.append(len(scope.observers))

    await played(clock, run(train_step, [ah.TimelineHook(tmp_path / "t.json", every=ah.Every(steps=4)), Looks()], runs=3))
    assert seen == [0, 0, 0]
    assert not (tmp_path / "t.json").exists()


async def test_activities_that_began_before_the_window(clock: ManualClock, tmp_path: Path) -> None:
    """What began before the window and ends in it has the part that is in it."""
    path = tmp_path / "trace.json"
    hook = ah.TimelineHook(path, every=ah.Every(at=(2,)), window_steps=2)
    await played(clock, run(train_step, [hook, ah.configure(Upload(after=15), background=True)], runs=3))
    assert trace_lanes(path)["Upload in the background"] == [("after_run", 0, 15), ("after_run", 15, None)]


async def test_memory_is_bounded(clock: ManualClock, tmp_path: Path) -> None:
    """Beyond `max_events` the oldest activities are dropped, and the file says how many; lanes are limited too."""
    path = tmp_path / "trace.json"
    hook = ah.TimelineHook(path, max_events=6)
    await played(clock, run(train_step, [hook], runs=9))
    found = trace_lanes(path)
    assert found["steps"] == [(f"step {step}", 10 * step - 10, 10) for step in (7, 8, 9)]
    assert json.loads(path.read_text())["otherData"]["dropped"] == 12

    async def many_waits() -> None:
        async with ah.AsyncMonitoredSession(train_step, [ah.TimelineHook(path)]) as session:
            await asyncio.gather(*(session.until(sleep(0.001)) for _ in range(300)))

    await played(clock, many_waits())
    assert len(trace_lanes(path)) == 200
    assert json.loads(path.read_text())["otherData"]["dropped"] == 100


async def test_dropped_activities_leave_the_window_too(clock: ManualClock, tmp_path: Path) -> None:
    """What was dropped before the first step of the window is not counted."""
    path = tmp_path / "trace.json"

    class Busy(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            clock.advance(0.001)
            for _ in range(10 if run_context.global_step == 1 else 0):
                await run_context.session.run("double", {"batch": 1})

    await run(double, [ah.TimelineHook(path, window_steps=2, max_events=9), Busy()], runs=6)
    assert json.loads(path.read_text())["otherData"]["dropped"] == 0


# -- the disk


def failing(times: int) -> Callable[[str, str], None]:
    """Return a `rename` that fails so many times, as on a full disk."""
    left = [times]

    def replace(source: str, target: str) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(source, target)

    return replace


async def test_a_full_disk_does_not_end_the_run(
    clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A window that cannot be written is logged and counted, nothing of it is left, and the next one is written."""
    monkeypatch.setattr(os, "replace", failing(1))
    hook = ah.TimelineHook(tmp_path / "{step}.json", every=ah.Every(steps=3), window_steps=1)
    async with ah.AsyncMonitoredSession(train_step, [hook]) as session:
        for _ in range(4):
            await played(clock, session.run("loss"))
        await until_true(lambda: "No space left" in caplog.text)
        for _ in range(4):
            await played(clock, session.run("loss"))
    assert os.listdir(tmp_path) == ["6.json"]
    assert hook.captures == [str(tmp_path / "6.json")]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 2
    assert messages[0].endswith("{step}.json cannot be written; continuing without these records")
    assert messages[1].endswith("1 records were lost to failed writes")


async def test_a_full_disk_can_end_the_run(clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `on_write_error="raise"` a failed write comes out of a later run, or at the end."""
    monkeypatch.setattr(os, "replace", failing(2))
    hook = ah.TimelineHook(tmp_path / "trace.json", on_write_error="raise")
    with pytest.raises(OSError, match="No space left"):
        await played(clock, run(train_step, [hook]))
    hook = ah.TimelineHook(tmp_path / "trace.json", every=ah.Every(steps=2), window_steps=1, on_write_error="raise")

    async def endless() -> None:
        async with ah.AsyncMonitoredSession(train_step, [hook]) as session:
            while True:
                await session.run("loss")

    with pytest.raises(OSError, match="No space left"):
        await played(clock, endless())


async def test_a_slow_disk_delays_no_run(clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a window is written, runs continue and no other window begins."""
    held = threading.Event()

    def slow(source: str, target: str) -> None:
        held.wait()
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", slow)
    hook = ah.TimelineHook(tmp_path / "{step}.json", every=ah.Every(steps=2), window_steps=1)
    async with ah.AsyncMonitoredSession(train_step, [hook]) as session:
        for _ in range(7):
            await played(clock, session.run("loss"))
        held.set()
        await until_true(lambda: hook.captures)
        for _ in range(2):
            await played(clock, session.run("loss"))
        await until_true(lambda: len(hook.captures) == 2)
        await played(clock, session.run("loss"))
    assert [Path(path).name for path in hook.captures] == ["2.json", "8.json", "10.json"]
