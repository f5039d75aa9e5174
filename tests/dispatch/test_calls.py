"""Hooks of one phase overlap, in a defined order; what failed calls held is freed."""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.dispatch.calls import OrderGroup, RegisteredHook, call_groups, hook_call
from tests.support.checks import without_collections
from tests.support.kinds import Does, Kinds
from tests.support.sessions import run_once
from tests.support.waiting import ticks

pytestmark = pytest.mark.every_python

# -- overlapping


async def test_what_cannot_wait_is_called_in_the_callers_task_and_everything_else_has_a_task() -> (
    None
):
    """Hooks start in registration order; one whose code has an `await` has a task of its own from
    its first instruction.
    """
    seen: list[tuple[str, bool]] = []
    caller = asyncio.current_task()

    class Plain(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            seen.append(("plain", asyncio.current_task() is caller))

    class Waits(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            seen.append(("waits", asyncio.current_task() is caller))
            if len(seen) > 10:
                await asyncio.sleep(0)

    await run_once([Plain(), Waits(), Waits(), Plain()])
    assert sorted(seen) == [("plain", True)] * 2 + [("waits", False)] * 2
    if sys.version_info >= (3, 12):
        assert [name for name, _ in seen] == ["plain", "waits", "waits", "plain"]


# -- an argument of its own for each hook


@pytest.mark.parametrize("waits", [False, True])
async def test_too_few_arguments_are_an_error(waits: bool) -> None:
    """Of hooks that cannot wait, and of others: no call waits for an argument that never comes."""

    class Returns:
        async def on(self, first: int, second: int) -> None: ...

    class Waits:
        async def on(self, first: int, second: int) -> None:
            await asyncio.sleep(0)

    hook = Waits() if waits else Returns()
    hooks = [RegisteredHook(f"hook {number}", ah.configure(hook)) for number in range(2)]
    group = OrderGroup([hook_call(registered, "on") for registered in hooks], grace_secs=1.0)
    with pytest.raises((ValueError, IndexError)):
        await call_groups((group,), (1,), second_args=iter([[2]]))


# -- what calls leave behind


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
        held_object = Held()
        held.add(held_object)
        raise OSError("lost")

    with without_collections():
        task = asyncio.create_task(call(fail))
        await asyncio.wait([task])
        assert isinstance(task.exception(), OSError)
        assert held
        del task
        await ticks()
        assert not held
