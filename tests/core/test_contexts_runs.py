"""A run belongs to the code that it calls, and not to what overlaps with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

import aiohooks as ah
from tests.support.hooks import BeforeRunHook
from tests.support.sessions import doubling
from tests.support.waiting import HANG_SECS, ticks

pytestmark = pytest.mark.every_python


class Calls:
    async def on(self) -> None: ...


class Running:
    """Runs a session, after some turns of the loop."""

    def __init__(self, session: ah.AsyncMonitoredSession, turns: int) -> None:
        self.session, self.turns = session, turns

    async def on(self) -> None:
        await ticks(self.turns)
        await self.session.run("double")


async def slow_double(batch: int = 1) -> dict[str, int]:
    await asyncio.sleep(0)
    return {"loss": 2 * batch}


@pytest.mark.parametrize("turns", [(0, 0), (0, 1), (1, 0), (2, 2)], ids=str)
@pytest.mark.parametrize("how", ["hooks", "group", "operations"])
async def test_overlapping_hooks_run_one_other_session(turns: tuple[int, int], how: str) -> None:
    """Two hooks of a session, two hooks of a group or two operations that overlap each make a run
    of one other session.
    """
    async with ah.AsyncMonitoredSession(slow_double, name="other") as other:
        calls = [Running(_Named(other), count) for count in turns]  # type: ignore[arg-type]
        if how == "group":
            await ah.compose(Calls, calls).on()
        elif how == "hooks":
            async with doubling(*[BeforeRunHook(one.on) for one in calls]) as session:
                await session.run("double")
        else:
            graph = ah.Graph()
            for number, one in enumerate(calls):
                graph.operation(name=f"operation{number}")(one.on)
            async with ah.AsyncMonitoredSession(graph) as session:
                await session.run(["operation0", "operation1"])
        await other.run("loss")
        assert other.global_step.latest.step == 3


class _Named:
    """A session whose step is fetched by another name."""

    def __init__(self, session: ah.AsyncMonitoredSession) -> None:
        self.run = lambda _: session.run("loss")


def test_hooks_under_nest_asyncio() -> None:
    """A hook that runs the loop again from inside it, with nest_asyncio, neither hangs nor disturbs
    the hooks beside it.

    Variables that hooks set are the caller's.
    """
    program = """
import asyncio, contextvars, nest_asyncio, aiohooks as ah

variables = [contextvars.ContextVar(name, default=0) for name in "ab"]

class Calls:
    async def on(self) -> None: ...

class Nested:
    async def on(self):
        await asyncio.sleep(0)
        asyncio.get_event_loop().run_until_complete(asyncio.sleep(0.01))
        variables[0].set(variables[0].get() + 1)

class Waiting:
    async def on(self):
        for _ in range(5):
            await asyncio.sleep(0.001)
        variables[1].set(variables[1].get() + 1)

async def main():
    for hooks in ([Nested(), Waiting()], [Waiting(), Nested()]):
        await ah.compose(Calls, hooks).on()
    print([variable.get() for variable in variables])

nest_asyncio.apply()
asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECS,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("[2, 2]\n", 0), ran.stderr
