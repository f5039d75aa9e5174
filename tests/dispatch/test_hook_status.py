"""`status()`: what has become of each hook's calls; background calls that are dropped; disabled
hooks that are tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiohooks as ah
from aiohooks.testing import ManualClock
from tests.support.kinds import Kinds, Next, call
from tests.support.sessions import doubling, make_runs
from tests.support.waiting import forever, parked

pytestmark = pytest.mark.every_python


class Quick:
    """Implements everything without a wait; fails while `error` is set."""

    error: Exception | None = None
    answer: int | None = None
    made = 0

    def make(self) -> int | None:
        self.made += 1
        if self.error is not None:
            raise self.error
        return self.answer

    async def none(self, number: int) -> None:
        self.make()

    async def first(self, number: int) -> int | None:
        return self.make()

    async def wrap(self, number: int, call_next: Next) -> Any:
        self.make()
        return await call_next(number)

    def plain(self, number: int) -> None:
        self.make()


class Slow(Quick):
    """Waits in everything that may."""

    async def none(self, number: int) -> None:
        await asyncio.sleep(0)
        self.make()

    async def first(self, number: int) -> int | None:
        await asyncio.sleep(0)
        return self.make()


class Around(Quick):
    """Wraps what observes."""

    async def none(self, number: int) -> AsyncIterator[None]:  # type: ignore[override]
        self.make()
        yield


@pytest.mark.parametrize(
    "made", [[Quick, Quick], [Slow, Slow], [Quick, Slow], [Around, Quick], [Around, Slow]]
)
@pytest.mark.parametrize("kind", ["none", "first", "wrap", "plain"])
async def test_every_call_is_made_once(kind: str, made: list[type[Quick]]) -> None:
    """Also those before the group has changed, and also where a call fails: then not those that it
    kept from being made.
    """
    first, second = (kind_of_hook() for kind_of_hook in made)
    group = ah.HookGroup(Kinds, [first, second])
    for _ in range(3):
        await call(group.hooks, kind)
    third = Quick()
    group.add(third)
    await call(group.hooks, kind)
    group.remove(third)
    await call(group.hooks, kind)
    assert [(status.failures, status.last_error) for status in group.status()] == [(0, None)] * 2
    assert (first.made, third.made) == (5, 1)
    first.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        await call(group.hooks, kind)
    status, behind = group.status()
    assert status[1:3] == (1, "ValueError('no')")
    assert behind[1:3] == (0, None)
    assert (first.made, second.made) == (6, 5)
    first.error = None
    first.answer = 1
    if kind == "first":  # the answer of the first keeps the second from being asked
        assert await call(group.hooks, kind) == 1
        assert (first.made, second.made) == (7, 5)


async def test_what_the_end_drops_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """After the grace period the active call, which was made, is cancelled, and those behind it are
    not made; all of them are dropped, with a warning.
    """

    class Stuck(Quick):
        async def none(self, number: int) -> None:
            await forever()

    group = ah.HookGroup(Kinds, [ah.configure(Stuck(), background=True)], grace_secs=1)

    async def use() -> None:
        async with group:
            for _ in range(5):
                await group.hooks.none(1)

    with ManualClock() as clock:
        leaving = await parked(use(), 20)
        clock.advance(1)
        await leaving
    assert group.status() == [("Stuck", 0, None, 5, None, 0)]
    assert caplog.messages == ["5 background calls of Stuck are left, and are dropped"]


async def test_a_hook_that_a_concurrent_call_disables_keeps_no_call_from_what_it_wraps() -> None:
    """Each call is decided before the first one fails, and made without the hook."""

    class Tool:
        @ah.point("wrap")
        async def wrap(self, number: int, call_next: Next) -> Any: ...

        async def none(self, number: int) -> None: ...

    wrapping, around, behind = Quick(), Around(), Quick()
    wrapping.error = around.error = ConnectionError("down")

    async def tool(number: int) -> int:
        return number

    configured = ah.configure(wrapping, on_error="log", disable_after=1)
    hooks = ah.compose(Tool, [configured])
    calls = (hooks.wrap(number, tool) for number in range(4))
    assert await asyncio.gather(*calls) == [0, 1, 2, 3]
    hooks = ah.compose(Tool, [ah.configure(around, on_error="log", disable_after=1), behind])
    await asyncio.gather(*(hooks.none(number) for number in range(4)))
    assert (wrapping.made, around.made, behind.made) == (1, 1, 4)


async def test_hooks_of_one_name_are_told_apart() -> None:
    """By the module of the second class, or if it is of the same module, by a number.

    A function and a hook with a name of its own have no class that could tell them apart.
    """
    foreign: Any = type("Quick", (Quick,), {"__module__": "other.plugin"})
    named = [ah.configure(made(), name="audit") for made in (Quick, foreign)]
    group = ah.HookGroup(Kinds, [Quick(), Quick(), foreign(), foreign(), *named])

    def Quick_(value: Any) -> None: ...

    Quick_.__name__ = "Quick"
    group.on(Kinds.none, Quick_)
    names = [status.name for status in group.status()]
    assert names == [
        *("Quick", "Quick#2", "other.plugin.Quick", "Quick#4"),
        *("audit", "audit#2", "Quick#5"),
    ]


def test_an_attribute_of_a_hook_is_not_its_name() -> None:
    """Such as `__name__`, whatever it is."""

    class Proxy(Quick):
        def __init__(self) -> None:
            self.__name__ = 5

    group = ah.HookGroup(Kinds, [Proxy()])
    assert repr(group) == "<HookGroup Kinds: Proxy>"


# -- in a session


class Audit(ah.SessionRunHook):
    """Fails after a run."""

    async def after_run(self, *_: object) -> None:
        await asyncio.sleep(0)
        raise ConnectionError("down")


async def test_the_status_of_a_session_has_its_hooks() -> None:
    """Its text has those whose calls have failed or were dropped."""
    hooks: Any = [ah.SessionRunHook(), ah.configure(Audit(), on_error="log", disable_after=2)]
    async with doubling(*hooks) as session:
        assert "failed" not in str(session.status())
        await make_runs(session, 3, "loss")
        plain, audit = session.status().hooks
        assert plain == ("SessionRunHook", 0, None, 0, None, 0)
        assert audit[:4] == ("Audit", 2, "ConnectionError('down')", 1)
        assert "HookStatus(name='Audit', failures=2, " in str(session.status())


async def test_a_disabled_hook_is_closed() -> None:
    """What its `begin` has opened is released; nothing else of it is called."""
    phases = list[str]()

    class Connected(Audit):
        async def begin(self) -> None:
            phases.append("begin")

        async def end(self, session: ah.Session) -> None:
            phases.append("end")

        async def close(self, exc: BaseException | None) -> None:
            phases.append("close")

    async with doubling(ah.configure(Connected(), on_error="log", disable_after=1)) as session:
        await make_runs(session, 2, "loss")
        assert session.status().hooks[0].failures == 1
    assert phases == ["begin", "close"]
