"""A run belongs to the code that it calls, and not to what overlaps with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import HANG_SECS

pytestmark = pytest.mark.every_python


class Calls:
    async def on(self) -> None: ...


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
