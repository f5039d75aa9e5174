"""Calls leave no object behind: not until a collection where nothing failed, and not after one
where something did.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import aiohooks as ah
from tests.support.checks import without_collections
from tests.support.kinds import Does, DoesNotWrap, Kinds, call
from tests.support.waiting import forever, ticks

pytestmark = pytest.mark.every_python
CALLS = 50
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


async def a_future() -> None:
    """Wait for a future."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def fails() -> None:
    """Fail after a turn."""
    await asyncio.sleep(0)
    raise OSError("lost")


async def is_slow() -> None:
    """Wait until it is cancelled."""
    await forever()


class Answers(Does):
    """Answers where that ends a call, or is kept."""

    async def merge(self, value: Any) -> Any:
        await self.none(value)
        return [value]


class AnswersOnly(Answers, DoesNotWrap):
    """Has no method that wraps, so that it may have a time limit."""


async def repeat(
    call: Callable[[], Awaitable[object]],
    *,
    collect: bool,
    errors: tuple[type[BaseException], ...] = (),
) -> None:
    """Check that many calls leave no object, after a collection or without one; the first ones are
    uncounted.

    A loop and its caches may grow once: what calls leave is left whenever they are made, so one of
    three rounds decides.
    """

    async def once() -> None:
        with contextlib.suppress(*errors):
            await call()
        await ticks(10)

    for _ in range(5):
        await once()
    left: list[int] = []
    with without_collections():
        for _ in range(3):
            before = len(gc.get_objects())
            for _ in range(CALLS):
                await once()
            if collect:
                gc.collect()
            left.append(len(gc.get_objects()) - before)
            if left[-1] < CALLS // 10:
                return
    pytest.fail(f"{CALLS} calls leave so many objects, in each of three rounds: {left}")


@pytest.mark.parametrize("work", [immediately, a_turn, a_future])
@pytest.mark.parametrize(
    "options", [{}, {"timeout": 60.0}, {"on_error": "log"}, {"order": 1}], ids=str
)
@pytest.mark.parametrize("kind", ["none", "first", "merge", "chain", "wrap", "around"])
async def test_of_a_group(kind: str, options: dict[str, Any], work: Work) -> None:
    """A call of each kind, with each option, whether its hooks wait or not."""
    made = AnswersOnly if "timeout" in options else Answers
    composite = ah.compose(Kinds, [ah.configure(made(work), **options), Answers(work)])
    await repeat(lambda: call(composite, kind), collect=False)


@pytest.mark.parametrize(
    "options",
    [{"on_error": "log"}, {"timeout": 0.001}, {"timeout": 0.001, "on_error": "log"}, {}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["none", "first", "merge", "chain", "wrap", "around"])
async def test_of_a_group_with_a_failure(kind: str, options: dict[str, Any]) -> None:
    """A call of each kind in which one hook fails or takes too long, logged or raised."""
    failing = AnswersOnly(is_slow) if "timeout" in options else Answers(fails)
    composite = ah.compose(Kinds, [ah.configure(failing, **options), Answers(a_turn)])
    await repeat(lambda: call(composite, kind), collect=True, errors=(OSError, TimeoutError))


@pytest.mark.parametrize("work", [immediately, a_turn, fails])
async def test_of_a_background_hook(work: Work) -> None:
    """Calls that are made beside what follows, and fail or not."""

    class Queued(Does):
        around = Kinds.around  # type: ignore[assignment]  # an async generator cannot be queued

    async with ah.HookGroup(
        Kinds, [ah.configure(Queued(work), background=True, on_error="log")]
    ) as group:
        await repeat(lambda: group.hooks.none(1), collect=work is fails)


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
