"""What the plays of the cancel sweep have in common: the list of them, how things fail in them, and helpers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

import aiohooks as ah
from tests.fuzz.stage import Act, Stage, StageScenario, soon

SCENARIOS: list[StageScenario] = []

Play = Callable[[Any], Awaitable[None]]


class Broken(Exception):
    """What a play fails with."""


class Worse(Exception):
    """What another part of it fails with."""


def scenario(name: str, **options: Any) -> Callable[[Play], Play]:
    """Adds a play to the list."""

    def add(play: Play) -> Play:
        SCENARIOS.append(StageScenario(name, play, **options))
        return play

    return add


def fails(error: type[BaseException], *, at: int = 1, until: int | None = None) -> Act:
    """An act that raises at its `at`-th call, or at all from `at` to `until`."""

    async def act(call: int) -> None:
        if at <= call <= (at if until is None else until):
            raise error(f"call {call}")

    return act


async def two_steps(stage: Stage) -> None:
    async with stage.open() as session:
        for _ in range(2):
            await stage.run(session)


def let_time_pass(stage: Stage, ticks: int, secs: float) -> None:
    """Moves the manual clock at every tick of the loop from now on, until the operation has ended."""
    stage.clock.advance(secs)
    if ticks and not stage.left:
        asyncio.get_running_loop().call_soon(let_time_pass, stage, ticks - 1, secs)


async def advance_slowly(stage: Stage, steps: int) -> None:
    """Another worker: commits variables and step as a session does."""
    session = ah.Session(stage.graph, global_step=stage.store, variables=stage.variables)
    for _ in range(steps):
        await soon()
        await session.run("push")
    await session.aclose()


async def finish(fn: Callable[[], Awaitable[Any]]) -> None:
    """Awaits `fn()` to its end although the caller is cancelled, as a careful user's `finally` does."""
    with anyio.CancelScope(shield=True):
        task = asyncio.ensure_future(fn())
        cancel: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancel = error
        if cancel is not None:
            raise cancel
        task.result()
