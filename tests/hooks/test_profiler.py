"""ProfilerHook: which runs are profiled, where profiles are written, and that only one is active."""

from __future__ import annotations

import asyncio
import cProfile
import os
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.hooks.profiler import ProfilerHook
from aiohooks.testing import FaultInjectionHook, ManualClock
from tests.support.sessions import NO_BACKOFF, counting_graph, make_runs


def profiled_graph() -> ah.Graph:
    """Return a graph whose operations call functions that a profile shows by name; `look` moves no step."""
    graph = counting_graph()
    graph.train_op(name="work")(lambda: found_in_profile(1))
    graph.operation(name="look")(lambda: found_in_profile(1))
    return graph


def found_in_profile(number: int) -> int:
    """Called once a run."""
    return number + 1


def calls(path: Path | str, function: Callable[..., Any] = found_in_profile) -> int:
    """Return the number of calls of a function in a profile."""
    stats: Any = pstats.Stats(str(path))
    found: int = sum(entry[1] for (_, _, name), entry in stats.stats.items() if name == function.__name__)
    return found


def files(folder: Path) -> list[str]:
    """Return the written steps."""
    return sorted(os.listdir(folder), key=lambda name: int("".join(filter(str.isdigit, name))))


async def run(hooks: list[ah.SessionRunHook], runs: int, fetch: str = "work") -> None:
    """Make so many runs in a session."""
    async with ah.AsyncMonitoredSession(profiled_graph(), hooks, recovery=NO_BACKOFF) as session:
        await make_runs(session, runs, fetch)


async def test_by_steps(tmp_path: Path) -> None:
    """There is a file for each boundary that is crossed, named by the step, from its run alone."""
    hook = ProfilerHook(tmp_path / "new" / "profiles", every=ah.Every(steps=2))
    await run([hook], 5)
    assert files(tmp_path / "new" / "profiles") == ["profile-2.pstats", "profile-4.pstats"]
    assert hook.captures == [str(tmp_path / "new" / "profiles" / f"profile-{step}.pstats") for step in (2, 4)]
    assert [calls(path) for path in hook.captures] == [1, 1]


async def test_the_first_run_is_never_profiled(tmp_path: Path) -> None:
    """The first run of a session does one-time work."""
    await run([ProfilerHook(tmp_path, every=ah.Every(steps=1))], 3)
    assert files(tmp_path) == ["profile-2.pstats", "profile-3.pstats"]


async def test_by_time(tmp_path: Path) -> None:
    """By time, the first run at or after the period is profiled."""
    found: list[list[str]] = []
    with ManualClock() as clock:
        async with ah.AsyncMonitoredSession(profiled_graph(), [ProfilerHook(tmp_path, every=ah.Every(secs=2))]) as session:
            for secs in (0, 1.9, 0.1, 1.9, 0.1):
                clock.advance(secs)
                await session.run("work")
                found.append(files(tmp_path))
    assert [len(names) for names in found] == [0, 0, 1, 1, 2]


async def test_window_steps(tmp_path: Path) -> None:
    """A window covers `window_steps` runs, named by the first; no other begins while it is active."""
    hook = ProfilerHook(tmp_path, every=ah.Every(steps=4), window_steps=6)
    await run([hook], 20)
    assert files(tmp_path) == ["profile-4.pstats", "profile-12.pstats", "profile-20.pstats"]
    assert [calls(path) for path in hook.captures] == [6, 6, 1]  # the last one is shorter because of the end


async def test_max_captures(tmp_path: Path) -> None:
    """A session profiles at most `max_captures` windows; the next session counts again."""
    hook = ProfilerHook(tmp_path, every=ah.Every(steps=2), max_captures=2)
    await run([hook], 12)
    assert files(tmp_path) == ["profile-2.pstats", "profile-4.pstats"]
    await run([hook], 3)
    assert [Path(path).name for path in hook.captures] == ["profile-2.pstats"]


async def test_runs_that_do_not_advance_the_step(tmp_path: Path) -> None:
    """A run that was expected to reach a step and did not leaves no profile."""
    await run([ProfilerHook(tmp_path, every=ah.Every(steps=1))], 5, "look")
    assert files(tmp_path) == []
    assert not active()


def active() -> bool:
    """Return whether this thread is being profiled."""
    if sys.version_info >= (3, 12):
        return sys.monitoring.get_tool(sys.monitoring.PROFILER_ID) is not None
    return sys.getprofile() is not None


@pytest.mark.parametrize("error", [ZeroDivisionError(), asyncio.CancelledError()], ids=repr)
async def test_it_stops_however_the_session_ends(tmp_path: Path, error: BaseException) -> None:
    """A failure or a cancellation inside a window stops the profiling, without a file."""

    async def fail() -> None:
        assert active()
        raise error

    hooks = [ProfilerHook(tmp_path, every=ah.Every(steps=2), window_steps=5), FaultInjectionHook({("after_run", 3): fail})]
    with pytest.raises(ah.errors.HookCancelledError if isinstance(error, asyncio.CancelledError) else type(error)):
        await run(hooks, 5)
    assert not active()
    assert files(tmp_path) == []


async def test_a_recovery_drops_the_window(tmp_path: Path) -> None:
    """A window that a recovery interrupted is not written; the next one is."""
    hook = ProfilerHook(tmp_path, every=ah.Every(steps=3), window_steps=2)
    await run([hook, FaultInjectionHook({("before_run", 4): ah.AbortedError("lost")})], 8)
    assert files(tmp_path) == ["profile-6.pstats"]
    assert calls(hook.captures[0]) == 2


async def test_two_hooks_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While one hook profiles, another skips its window with a warning; the run continues."""
    first = ProfilerHook(tmp_path / "a", every=ah.Every(steps=2), window_steps=2)
    await run([first, ProfilerHook(tmp_path / "b", every=ah.Every(steps=3))], 9)
    assert files(tmp_path / "a") == [f"profile-{step}.pstats" for step in (2, 4, 6, 8)]
    assert files(tmp_path / "b") == []
    assert "step 3 is not profiled: another profiler is active (ProfilerHook(" in caplog.text


@pytest.mark.parametrize("backend", ["cprofile", "pyinstrument"])
async def test_another_profiler_is_left_alone(tmp_path: Path, backend: Any, caplog: pytest.LogCaptureFixture) -> None:
    """If the user is profiling already, the hook logs a warning and that profile stays complete."""
    theirs = cProfile.Profile()
    theirs.enable()
    try:
        await run([ProfilerHook(tmp_path, every=ah.Every(steps=2), backend=backend)], 3)
    finally:
        theirs.disable()
    theirs.dump_stats(tmp_path / "theirs0.pstats")
    assert calls(tmp_path / "theirs0.pstats") == 3
    assert files(tmp_path) == ["theirs0.pstats"]
    assert "step 2 is not profiled: another profiler is active" in caplog.text


async def test_pyinstrument(tmp_path: Path) -> None:
    """The pyinstrument backend writes a page, and leaves nothing running."""
    hook = ProfilerHook(tmp_path, every=ah.Every(steps=2), backend="pyinstrument")
    await run([hook], 3)
    assert files(tmp_path) == ["profile-2.html"]
    assert "<html" in (tmp_path / "profile-2.html").read_text()
    assert not active()


async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The error is the session's; the profiling has stopped, and no partial file is left."""
    (tmp_path / "profile-2.pstats").mkdir()
    with pytest.raises(OSError, match=r"profile-2\.pstats"):
        await run([ProfilerHook(tmp_path, every=ah.Every(steps=2))], 3)
    assert files(tmp_path) == ["profile-2.pstats"]
    assert not active()
