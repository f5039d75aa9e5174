"""Bugs on purpose, in small coroutines: the sweep must find each, or it proves nothing. Correct ones stand beside them.

The numbers in brackets are those of the mutant zoo in `reference/reliability.md` B.4, the names those of its section E.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

import aiohooks as ah
from tests.fuzz.driver import HANG_SECS, Probe
from tests.fuzz.engine import Scenario
from tests.fuzz.stage import soon

Body = Callable[[Probe], Awaitable[None]]


@dataclass(frozen=True)
class Small:
    """A scenario made of one coroutine function, without a library."""

    fn: Body
    hang_secs: float = HANG_SECS

    @property
    def name(self) -> str:
        return self.fn.__name__

    def __call__(self, probe: Probe, rng: Random) -> SmallRun:
        return SmallRun(self.fn, probe)


@dataclass(frozen=True)
class SmallRun:
    fn: Body
    probe: Probe

    async def operation(self) -> None:
        await self.fn(self.probe)

    def look(self) -> None:
        """Nothing must hold meanwhile."""

    def status(self) -> list[str]:
        return []


SOUND: list[Scenario] = []
"""Correct ones: nothing may be found."""
FAULTY: dict[str, tuple[Scenario, str]] = {}
"""By name: the scenario, and what must be found."""


def sound(fn: Body) -> Body:
    SOUND.append(Small(fn))
    return fn


def faulty(finding: str) -> Callable[[Body], Body]:
    def add(fn: Body) -> Body:
        FAULTY[fn.__name__] = (Small(fn), finding)
        return fn

    return add


@sound
async def work(probe: Probe) -> None:
    for _ in range(2):
        await asyncio.sleep(0)
        await soon()


@sound
async def work_and_clean_up(probe: Probe) -> None:
    try:
        await work(probe)
    finally:
        await soon()


@sound
async def fail(probe: Probe) -> None:
    await work(probe)
    raise ValueError


@sound
async def delegate(probe: Probe) -> None:
    """What `run_all` of the reference does, for one child."""
    child = asyncio.get_running_loop().create_task(probe.watch("child", work, probe))
    cancel: asyncio.CancelledError | None = None
    while not child.done():
        try:
            await asyncio.wait([child])
        except asyncio.CancelledError as error:
            cancel = cancel or error
            child.cancel()
    if cancel is not None:
        raise cancel
    if child.cancelled():
        raise ah.errors.HookCancelledError
    child.result()


@faulty("I7: cancelled")
async def swallows(probe: Probe) -> None:
    try:
        await work(probe)
    except asyncio.CancelledError:
        return


@faulty("I7: cancelled")
async def error_wins_over_outer_cancel(probe: Probe) -> None:
    """(6, E-12)."""
    try:
        await work(probe)
    finally:
        raise ValueError


@faulty("I7: cancelled")
async def loses_the_cancel_that_meets_a_result(probe: Probe) -> None:
    """(E-1): what `wait_for` of 3.11 does."""
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: future.done() or future.set_result(None))
    try:
        await future
    except asyncio.CancelledError:
        if future.cancelled():
            raise


@faulty("I8: cancelling() grew by 0 over 1")
async def takes_back_what_is_not_its_own(probe: Probe) -> None:
    """(24)."""
    try:
        await work(probe)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        asyncio.Task.uncancel(task)  # past the counting
        raise


@faulty("I7: raised CancelledError")
async def interrupts_itself_and_forgets(probe: Probe) -> None:
    """A cancel of its own that comes out."""
    task = asyncio.current_task()
    assert task is not None
    await work(probe)
    asyncio.Task.cancel(task)  # past the counting
    await soon()


@faulty("I9: task 'orphan' outlived")
async def leaves_a_task(probe: Probe) -> None:
    """(2, 31): the child is cancelled, and not awaited."""
    child = asyncio.get_running_loop().create_task(probe.watch("child", work, probe), name="orphan")
    try:
        await asyncio.wait([child])
    finally:
        child.cancel()


@faulty("never retrieved")
async def drops_an_error(probe: Probe) -> None:
    """(15)."""
    child = asyncio.get_running_loop().create_task(probe.watch("child", fail, probe))
    await asyncio.wait([child])


@faulty("was never awaited")
async def drops_a_coroutine(probe: Probe) -> None:
    later = work(probe)
    await soon()
    await later


@faulty("I36: hangs")
async def waits_for_a_first_exception_only(probe: Probe) -> None:
    """(5, E-11): a cancelled child wakes nobody."""
    loop = asyncio.get_running_loop()
    children = [loop.create_task(probe.watch("child", work, probe)), loop.create_task(asyncio.Event().wait())]
    try:
        await asyncio.wait(children, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for child in children:
            child.cancel()
        await asyncio.wait(children)


@faulty("I36: 1001 suspensions")
async def tries_for_ever(probe: Probe) -> None:
    """(22): an `except` that is too wide around a wait."""
    done = False
    while not done:
        try:
            await soon()
            done = not probe.fired
        except asyncio.CancelledError:
            await asyncio.sleep(0)
