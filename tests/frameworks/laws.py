"""Tests of what holds for hooks of every framework, in its own runner: they overlap, errors and
cancels pass, time limits hold.

A folder for each environment has a `test_laws.py` that imports these tests and their frameworks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

import pytest

import aiohooks as ah
from aiohooks.errors import HookTimeoutError
from aiohooks.testing import ManualClock
from tests.frameworks.runners import RUNNERS, Runner
from tests.support.waiting import cancel_and_wait, fail, forever, ticks, until_true


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each framework of the environment to the tests of a module that imports these."""
    if "framework" in metafunc.fixturenames:
        metafunc.parametrize("framework", list(RUNNERS.values()), ids=list(RUNNERS))


class Three:
    """Three hooks of a framework: each begins, waits until all have begun, does what is given, and
    ends.
    """

    def __init__(self, framework: Runner, *actions: Callable[[], Awaitable[None]]) -> None:
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        self.all_begun = asyncio.Event()
        self.hooks = [framework.hook(self._body(number, act)) for number, act in enumerate(actions)]

    def _body(
        self, number: int, act: Callable[[], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        async def body() -> None:
            self.begun.add(number)
            if len(self.begun) == 3:
                self.all_begun.set()
            try:
                await self.all_begun.wait()
                await act()
            finally:
                await asyncio.sleep(0)
                self.ended.add(number)

        return body


async def started(three: Three, run: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
    """Start the run, and return when all hooks have begun, or it has ended before."""
    running = asyncio.create_task(run)
    running.add_done_callback(lambda _: three.all_begun.set())
    await three.all_begun.wait()
    await ticks()
    return running


async def nothing() -> None:
    """Return immediately."""


async def reported(run: Awaitable[object], caplog: pytest.LogCaptureFixture) -> list[BaseException]:
    """Return what has failed: what is raised or logged, and all that this was made of."""
    left: list[BaseException | None] = []
    try:
        await run
    except Exception as error:
        left.append(error)
    left += [record.exc_info[1] for record in caplog.records if record.exc_info]
    found: list[BaseException] = []
    while left:
        one = left.pop()
        if one is not None and one not in found:
            found.append(one)
            left += [
                one.__cause__,
                one.__context__,
                *(one.exceptions if isinstance(one, BaseExceptionGroup) else ()),
            ]
    return found


async def test_hooks_overlap(framework: Runner) -> None:
    """Each of three hooks waits until all have begun, and the framework's own result comes out."""
    three = Three(framework, nothing, nothing, nothing)
    assert await framework.run(three.hooks) == framework.result
    assert three.ended == {0, 1, 2}


async def test_an_error_is_reported(framework: Runner, caplog: pytest.LogCaptureFixture) -> None:
    """The error of one hook is what the framework reports, with a note; the others have been
    cancelled and have ended.
    """
    error = LookupError("no such city")
    three = Three(framework, forever, lambda: fail(error), forever)
    assert error in await reported(framework.run(three.hooks), caplog)
    assert "raised by" in error.__notes__[0]
    assert three.ended == {0, 1, 2}


async def test_a_cancel_from_outside_ends_the_hooks(framework: Runner) -> None:
    """A cancel of what runs the framework ends all hooks."""
    three = Three(framework, forever, forever, forever)
    running = await started(three, framework.run(three.hooks))
    assert await cancel_and_wait(running)
    await until_true(lambda: three.ended == {0, 1, 2})
    await ticks(20)  # what openai-agents has cancelled ends later


@pytest.mark.parametrize("on_error", ["raise", "log"])
async def test_a_time_limit_holds(
    framework: Runner,
    on_error: Literal["raise", "log"],
    clock: ManualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hook that hangs is cut off: the framework reports that, or it is logged and the framework
    continues.
    """
    hanging = [forever]  # at its first call
    three = Three(framework, nothing, lambda: hanging.pop()() if hanging else nothing(), nothing)
    hooks = [
        three.hooks[0],
        ah.configure(three.hooks[1], timeout=2.0, on_error=on_error),
        three.hooks[2],
    ]
    running = await started(three, framework.run(hooks))
    clock.advance(2.0)
    if on_error == "log":
        assert await running == framework.result
    assert HookTimeoutError in map(type, await reported(running, caplog))
    assert three.ended == {0, 1, 2}
