"""ProfilerHook: the tracks and times of scripted sessions, its windows, and what a failing disk
does.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks._core.clock import sleep
from aiohooks.errors import AbortedError
from aiohooks.testing import ManualClock
from tests.support.hooks import PhaseHook
from tests.support.saving_sessions import HeldSaver, array_graph
from tests.support.sessions import NO_BACKOFF, double, doubling, make_runs, use_up
from tests.support.traces import Slow, Times, checked_events, played, trace_tracks
from tests.support.waiting import until_true

pytestmark = pytest.mark.every_python


class Upload(Slow):
    """A hook with a track of its own."""


class Audit(Slow):
    """A hook with a track of its own."""


async def train_step(batch: int = 1) -> dict[str, int]:
    """Take ten milliseconds."""
    await sleep(0.010)
    return {"loss": batch}


async def batches(count: int, secs: float) -> AsyncIterator[int]:
    """Take so long for each."""
    for batch in range(count):
        await sleep(secs)
        yield batch


async def run(
    source: Any, hooks: list[Any], runs: int = 2, fetch: str = "loss", **options: Any
) -> None:
    """Make so many runs in a session."""
    async with ah.AsyncMonitoredSession(source, hooks, **options) as session:
        await make_runs(session, runs, fetch)


def recording(folder: Path, steps: int = 1, **options: Any) -> ah.hooks.ProfilerHook:
    """Return a hook that records so many runs from the second on."""
    return ah.hooks.ProfilerHook(folder, every=ah.Every(at=(2,)), window_steps=steps, **options)


def written(folder: Path) -> list[str]:
    """Return the names of the files, by their steps."""
    return sorted(os.listdir(folder), key=lambda name: int("".join(filter(str.isdigit, name))))


# -- tracks


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


async def recovering(hooks: list[Any], clock: ManualClock) -> None:
    """Fail in the second run, and take some time to recover."""
    failures: list[Exception | None] = [None, AbortedError("lost"), None]

    async def step() -> dict[str, int]:
        await sleep(0.005)
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        return {"loss": 1}

    restores = PhaseHook("after_create_session", lambda *_: sleep(0.003))
    await run(step, [*hooks, restores], recovery=NO_BACKOFF)


def train_steps(*times: int) -> Times:
    """Return the slices of the step function at these times."""
    return [("train_step", began, 10) for began in times]


TRACKS: dict[str, tuple[int, Callable[[list[Any], ManualClock], Any], dict[str, Times]]] = {
    "hooks that overlap": (
        2,
        lambda hooks, clock: run(
            train_step, [*hooks, Upload(before=4, after=6), Audit(before=8)], 3
        ),
        {
            "steps": [("step 2", 0, 24), ("step 3", 24, 24)],
            "train_step": train_steps(8, 32),
            "Upload": [
                ("before_run", 0, 4),
                ("after_run", 18, 6),
                ("before_run", 24, 4),
                ("after_run", 42, 6),
            ],
            "Audit": [("before_run", 0, 8), ("before_run", 24, 8)],
        },
    ),
    "operations that overlap, and a plain one": (
        1,
        operations,
        {
            "steps": [("step 2", 0, 7)],
            "left": [("left", 0, 5)],
            "right": [("right", 0, 3)],
            "both": [("both", 5, 2)],
        },
    ),
    "feeds one after another": (
        2,
        lambda hooks, clock: steps_of(hooks, batches(3, 0.007)),
        {
            "steps": [("step 2", 0, 10), ("step 3", 17, 10)],
            "feeds": [("next feed", 10, 7)],
            "train_step": train_steps(0, 17),
        },
    ),
    "prefetched feeds": (
        2,
        lambda hooks, clock: steps_of(hooks, batches(4, 0.007), prefetch=1),
        {
            "steps": [("step 2", 0, 10), ("step 3", 10, 10)],
            "prefetched feeds": [("take a feed", 0, 7), ("take a feed", 10, 7)],
            "train_step": train_steps(0, 10),
        },
    ),
    "background calls": (
        2,
        lambda hooks, clock: run(
            train_step, [*hooks, ah.configure(Upload(after=7), background=True)], 3
        ),
        {
            "steps": [("step 2", 0, 10), ("step 3", 10, 10)],
            "train_step": train_steps(0, 10),
            # That of the first run had begun before the window.
            "Upload in the background": [("after_run", 0, 7), ("after_run", 10, 7)],
        },
    ),
    "a recovery": (
        2,
        recovering,
        {
            "steps": [("step 2", 0, 5), ("step 2, attempt 2", 8, 5)],
            "step": [("step", 0, 5), ("step", 8, 5)],
            "PhaseHook": [("after_create_session", 5, 3)],
            "recoveries": [("recovery from AbortedError", 5, 3)],
        },
    ),
}


@pytest.mark.parametrize("name", TRACKS)
async def test_tracks(name: str, clock: ManualClock, tmp_path: Path) -> None:
    """Each part has a track with the times of its calls; what overlaps does so in the file;
    failures have errors.
    """
    steps, play, tracks = TRACKS[name]
    await played(clock, play([recording(tmp_path, steps)], clock))
    path = tmp_path / "timeline-2.json"
    assert trace_tracks(path) == tracks
    errors = {
        event["args"]["error"] for event in checked_events(path) if "error" in event.get("args", {})
    }
    assert errors == ({"AbortedError('lost')"} if name == "a recovery" else set())


async def test_how_long_the_loop_is_held(clock: ManualClock, tmp_path: Path) -> None:
    """A call's time before its first wait, in which nothing else ran, is noted: all of it, if it
    does not wait.
    """

    class Blocks(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            clock.advance(0.003)

        async def after_run(self, *_: object) -> None:
            clock.advance(0.001)
            await sleep(0.004)

    await played(clock, run(double, [recording(tmp_path), Blocks()]))
    events = checked_events(tmp_path / "timeline-2.json")
    (number,) = (
        event["tid"]
        for event in events
        if event["ph"] == "M" and event["args"].get("name") == "Blocks"
    )
    calls = [event for event in events if event["tid"] == number and event["ph"] == "X"]
    held = {event["name"]: (event["dur"], event["args"]["held_us"]) for event in calls}
    assert held["before_run"] == (pytest.approx(3000), pytest.approx(3000))
    assert held["after_run"] == (pytest.approx(5000), pytest.approx(1000))


async def test_checkpoint_writes(clock: ManualClock, tmp_path: Path) -> None:
    """The write of a checkpoint has a track, while steps follow; one that fails has its error."""
    graph = array_graph()
    graph.operation(name="wait")(train_step)
    saver = HeldSaver(
        tmp_path / "held", OSError("no space"), OSError("no space")
    )  # what is written takes real time
    hook = ah.configure(
        ah.CheckpointSaverHook(
            saver, every=ah.Every(steps=2), save_on_begin=False, save_on_end=False
        ),
        on_error="log",
    )

    async def loop() -> None:
        async with ah.AsyncMonitoredSession(graph, [recording(tmp_path, 4), hook]) as session:
            for step in range(1, 6):
                await session.run(["train", "wait"])
                if step in (3, 5):
                    saver.let()

    await played(clock, loop())
    path = tmp_path / "timeline-2.json"
    assert trace_tracks(path)["checkpoint writes"] == [
        ("save of step 2", 10, 10),
        # The error of the first save took the place of one at step 4.
        ("save of step 5", 40, None),
    ]
    failed = [event for event in checked_events(path) if "error" in event.get("args", {})]
    assert [(event["name"], event["args"]["error"]) for event in failed] == [
        ("save of step 2", "OSError('no space')")
    ]


# -- windows and limits


def has_captures(hook: ah.hooks.ProfilerHook, count: int) -> bool:
    """Return whether so many files have been written."""
    # The next window may begin when the session has been notified that the file is written.
    return len(hook.captures) == count and not hook._writer.items


async def test_by_steps(tmp_path: Path) -> None:
    """There is a file for each boundary that is crossed, named by the step, with its run alone."""
    hook = ah.hooks.ProfilerHook(tmp_path / "new" / "traces", every=ah.Every(steps=2))
    before = time.time()
    async with doubling(hook) as session:
        for step in range(1, 6):
            await session.run("loss", {"batch": 1.0})
            await until_true(functools.partial(has_captures, hook, step // 2))
    assert written(tmp_path / "new" / "traces") == ["timeline-2.json", "timeline-4.json"]
    assert hook.captures == [
        str(tmp_path / "new" / "traces" / f"timeline-{step}.json") for step in (2, 4)
    ]
    content = json.loads(
        (tmp_path / "new" / "traces" / "timeline-4.json").read_text(encoding="utf-8")
    )
    steps = [event["name"] for event in content["traceEvents"] if event.get("cat") == "step"]
    assert steps == ["step 4"]
    assert before <= content["otherData"]["unix_time"] <= time.time()


async def test_the_first_run_is_never_recorded(tmp_path: Path) -> None:
    """The first run of a session does one-time work."""
    hook = ah.hooks.ProfilerHook(tmp_path, every=ah.Every(steps=1))
    await run(double, [hook], 1)
    assert not written(tmp_path)
    await run(double, [hook], 2)
    assert written(tmp_path) == ["timeline-2.json"]


async def test_runs_that_do_not_advance_the_step(tmp_path: Path) -> None:
    """A run that was expected to reach a step and did not leaves no file."""
    graph = ah.Graph()
    graph.train_op(name="work")(lambda: 1)
    graph.operation(name="look")(lambda: 1)
    await run(graph, [ah.hooks.ProfilerHook(tmp_path, every=ah.Every(steps=1))], 5, "look")
    assert not written(tmp_path)


async def test_outside_of_windows_runs_are_not_observed(tmp_path: Path) -> None:
    """Between windows no run has an observer, so its hooks and operations cost what they cost
    without the hook.
    """
    counts: list[int] = []

    class Looks(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            from aiohooks._core.activity import current_run

            scope = current_run()
            assert scope is not None
            counts.append(len(scope.observers))

    await run(double, [ah.hooks.ProfilerHook(tmp_path, every=ah.Every(steps=4)), Looks()], 5)
    assert counts == [0, 0, 0, 1, 0]


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A window that cannot be written is logged, nothing of it is left, and the next one is
    written.
    """
    monkeypatch.setattr(os, "replace", failing(1))
    hook = ah.hooks.ProfilerHook(tmp_path, every=ah.Every(steps=3))
    async with doubling(hook) as session:
        await make_runs(session, 4, "loss")
        await until_true(lambda: "No space left" in caplog.text and not hook._writer.items)
        await make_runs(session, 4, "loss")
    assert written(tmp_path) == ["timeline-6.json"]
    assert hook.captures == [str(tmp_path / "timeline-6.json")]
    path = tmp_path / "timeline-3.json"
    assert caplog.messages == [f"the trace {path} cannot be written; continuing"]
