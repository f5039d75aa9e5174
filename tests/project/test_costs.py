"""What a run, a call of a group and an advance cost, counted in calls of the library's functions:
the same on every machine.

Each number is an upper bound, a little above what it was when it was written. A change that needs
more calls spares some, or raises the bound and says why. tests/benchmarks measures times, beside
other libraries; this is noticed immediately.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.sessions import doubling
from tests.support.waiting import parked, ticks

pytestmark = pytest.mark.every_python
TIMES = 20
LIBRARY = os.path.dirname(ah.__file__)
OF_THE_CHECK = tuple(
    os.path.join(LIBRARY, name) for name in ("testing", os.path.join("_why", "tasks.py"))
)
"""What notes where tasks are started, for the check for leaks."""


async def calls_of(call: Callable[[], Awaitable[object]]) -> float:
    """Return how often a function of the library, or a coroutine of one, begins or continues during
    one call, on average.
    """
    for _ in range(TIMES):
        await call()  # what is made once is made now
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        file = frame.f_code.co_filename
        count += event == "call" and file.startswith(LIBRARY) and not file.startswith(OF_THE_CHECK)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        for _ in range(TIMES):
            await call()
    finally:
        sys.setprofile(before)
    return count / TIMES


class Idle(ah.SessionRunHook):
    """Has the methods of a step, and does nothing."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Fetches nothing."""

    async def after_run(self, *_: object) -> None:
        """Keeps nothing."""


class Waits(Idle):
    """Lets others run once before each step."""

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        """Suspend."""
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("hooks", "most"),
    [([], 19), ([Idle], 25), ([Idle] * 5, 25), ([Waits], 61), ([Waits] * 5, 133)],
    ids=["none", "one", "five", "one that waits", "five that wait"],
)
async def test_a_run_with_hooks(hooks: list[type[Idle]], most: int) -> None:
    """Hooks that do not wait cost no calls of the library, however many there are; each that waits
    has a task of its own.
    """
    async with doubling(*[kind() for kind in hooks]) as session:
        found = await calls_of(lambda: session.run("loss"))
    assert 10 < found <= most, found


async def test_runs_with_other_fetches_in_turn() -> None:
    """The plan of each set of fetches is made once."""
    async with doubling() as session:

        async def run_both() -> None:
            await session.run("loss")
            await session.run("double")

        found = await calls_of(run_both)
    assert 20 < found <= 36, found


class CountingClock(ManualClock):
    """Counts the timers."""

    timers = 0

    def call_later(self, secs: float, callback: Callable[[], object]) -> Any:
        self.timers += 1
        return super().call_later(secs, callback)


@pytest.mark.parametrize("count", range(5))
async def test_a_timeout_costs_nothing_where_a_method_cannot_wait(count: int) -> None:
    """A hook with a time limit that cannot wait makes no timer, also beside hooks that wait; each
    of these makes one.
    """
    hooks = [*(Waits() for _ in range(count)), Idle(), Idle()]
    with CountingClock() as clock:
        async with doubling(*(ah.configure(hook, timeout=5) for hook in hooks)) as session:
            before = clock.timers
            await session.run("loss")
            assert clock.timers == before + count


async def test_a_run_with_a_hook_that_fetches() -> None:
    """The fetches of a hook are merged once, also if its first request has feeds as well."""

    class Fetches(Idle):
        args = ah.SessionRunArgs("loss", {"batch": 1.0})

        async def before_run(self, run_context: ah.SessionRunContext) -> Any:
            return self.args

    hook = Fetches()
    async with doubling(hook) as session:
        await session.run("loss")
        hook.args = ah.SessionRunArgs("loss")
        found = await calls_of(lambda: session.run("loss", {"batch": 1.0}))
    assert 10 < found <= 27, found


@pytest.mark.parametrize(("count", "most"), [(1, 80), (5, 136)])
async def test_a_recorded_run(count: int, most: int, tmp_path: Path) -> None:
    """What notifies the profiler of a hook's calls is made once, and not for each run."""
    hooks = [
        ah.hooks.ProfilerHook(tmp_path, every=ah.Every(at=(3,)), window_steps=99),
        *(Idle() for _ in range(count)),
    ]
    async with doubling(*hooks) as session:
        for _ in range(3):
            await session.run("loss", {"batch": 1.0})
        found = await calls_of(lambda: session.run("loss"))
    assert 10 < found <= most, found


@pytest.mark.parametrize(("count", "most"), [(1, 4), (5, 4)])
async def test_a_call_of_a_group(count: int, most: int) -> None:
    """Hooks that do not wait cost no calls of the library."""

    class Listener:
        async def on_item(self) -> None: ...

    class Counter(Listener):
        async def on_item(self) -> None: ...

    async with ah.HookGroup(Listener, [Counter() for _ in range(count)]) as group:
        found = await calls_of(lambda: group.hooks.on_item())
    assert 0 < found <= most, found


@pytest.mark.parametrize("count", [8, 64])
async def test_a_hook_that_is_added_entered_and_removed(count: int) -> None:
    """Its cost does not grow with the number of hooks."""

    class Called:
        async def on(self) -> None: ...

    class Entered:
        async def on(self) -> None: ...

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *details: object) -> None: ...

    async def function() -> None: ...

    async def make() -> None:
        hooks = [Entered() for _ in range(count)]
        async with ah.HookGroup(Called, hooks) as group:
            for hook in hooks:
                group.on(Called.on, function)
                group.remove(hook)

    found = await calls_of(make) / count
    assert found <= 250, found


@pytest.mark.parametrize(("together", "most"), [(1, 17), (50, 11)])
async def test_an_advance_that_wakes_a_waiter(together: int, most: int) -> None:
    """Advances in one turn share what follows them."""
    store = ah.MemoryStepStore()
    rounds = 2 * TIMES
    waits = [await parked(store.wait_for(step)) for step in range(1, together * rounds + 1)]

    async def advance() -> None:
        for _ in range(together):
            await store.advance()
        await ticks(3)

    found = await calls_of(advance)
    assert all(wait.done() for wait in waits)
    assert 5 < found / together <= most, found
