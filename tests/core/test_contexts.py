"""What calls set in their contexts is given back to the caller's, also under nest_asyncio."""

from __future__ import annotations

import subprocess
import sys
from contextvars import Context, ContextVar, copy_context

import pytest

from aiohooks._core.calls import OwnContext, copy_back
from tests.support.waiting import HANG_SECS

pytestmark = pytest.mark.every_python

FIRST: ContextVar[int] = ContextVar("FIRST")
SECOND: ContextVar[int] = ContextVar("SECOND")


def in_a_context(test: object) -> None:
    Context().run(test)  # type: ignore[arg-type]


def test_what_overlapping_calls_set_is_given_back_in_their_order() -> None:
    """The last one wins; what the caller itself has set meanwhile stays."""

    def check() -> None:
        base = copy_context()
        first = base.copy()
        another = base.copy()
        another.run(FIRST.set, 2)
        first.run(FIRST.set, 1)
        first.run(SECOND.set, 1)
        SECOND.set(5)
        copy_back([(base, first), (base, another)])
        assert (FIRST.get(), SECOND.get()) == (2, 5)

    in_a_context(check)


def test_a_token_is_valid_in_the_next_call() -> None:
    """One context for several calls: what is reset in the second is unset for the caller."""

    def check() -> None:
        own = OwnContext()
        token = own.update().run(FIRST.set, 1)
        own.copy_back()
        assert FIRST.get() == 1
        own.update().run(FIRST.reset, token)
        own.copy_back()
        assert FIRST.get(None) is None

    in_a_context(check)


def test_what_a_later_call_has_set_in_the_callers_context_is_kept() -> None:
    """The last call wins, also over one with a context of its own that has ended after it."""

    def check() -> None:
        FIRST.set(0)
        before = copy_context()
        after = before.copy()
        after.run(FIRST.set, 1)
        FIRST.set(2)
        copy_back([(before, after)])
        assert FIRST.get() == 2

    in_a_context(check)


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
