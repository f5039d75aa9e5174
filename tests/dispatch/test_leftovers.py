"""Calls leave no object behind: not until a collection where nothing failed, and not after one
where something did.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import without_collections
from tests.support.kinds import Does, Kinds
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python
Work = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log nothing: pytest keeps the records."""
    monkeypatch.setattr(logging.getLogger("aiohooks"), "disabled", True)


async def immediately() -> None:
    """Wait for nothing, behind an `await`."""


async def a_turn() -> None:
    """Wait for one turn of the loop."""
    await asyncio.sleep(0)


async def fails() -> None:
    """Fail after a turn."""
    await asyncio.sleep(0)
    raise OSError("lost")


class Answers(Does):
    """Answers where that ends a call, or is kept."""

    async def merge(self, value: Any) -> Any:
        await self.none(value)
        return [value]


# -- without a collection


class Held:
    """What a call that fails refers to."""


async def a_wrapped_call(fail: Work) -> None:
    await ah.compose(Kinds, [Answers(immediately), Answers(a_turn)]).wrap(1, lambda _: fail())


async def the_end_of_a_group(fail: Work) -> None:
    class Leaving:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *_: object) -> None:
            await fail()

        async def none(self, value: int) -> None: ...

    async with ah.HookGroup(Kinds, [Leaving()]):
        pass


@pytest.mark.parametrize("call", [a_wrapped_call, the_end_of_a_group])
async def test_what_a_failed_call_held_is_freed_with_its_error(
    call: Callable[[Work], Coroutine[Any, Any, None]],
) -> None:
    """Without the garbage collector: there is no reference cycle."""
    held: weakref.WeakSet[Held] = weakref.WeakSet()

    async def fail() -> None:
        one = Held()
        held.add(one)
        raise OSError("lost")

    with without_collections():
        task = asyncio.create_task(call(fail))
        await asyncio.wait([task])
        assert isinstance(task.exception(), OSError)
        assert held
        del task
        await ticks()
        assert not held
