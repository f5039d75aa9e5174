"""Effects of a call of a HookGroup: handed over once and together, if the call succeeds; in a
session's run, part of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

import aiohooks as ah
from aiohooks.dispatch.effects import Effect, Recording
from aiohooks.errors import EffectError, InvalidArgumentError
from tests.support.sessions import run_session

pytestmark = pytest.mark.every_python


class Points:
    """A lifecycle with a method of each kind."""

    async def called(self, fails: bool = False) -> None: ...

    def plain(self) -> None: ...


class Quick:
    """Never waits."""

    async def called(self, fails: bool = False) -> None:
        ah.effect("quick", {"fails": fails})

    def plain(self) -> None:
        ah.effect("plain")


class Waiting:
    """Waits, and fails if it is to."""

    async def called(self, fails: bool = False) -> None:
        await asyncio.sleep(0)
        ah.effect("waiting")
        if fails:
            raise ValueError("failed")


def group(given: list[tuple[ah.dispatch.Effect, ...]], *hooks: object) -> ah.HookGroup[Points]:
    return ah.HookGroup(Points, hooks, name="points", effects=given.append)


def kinds(given: list[tuple[ah.dispatch.Effect, ...]]) -> list[list[str]]:
    return [[one.kind for one in effects] for effects in given]


async def test_a_call_hands_its_effects_over_together() -> None:
    """Once for each call that has any, in order, with unique keys; by a method of `hooks` or by
    `call`.
    """
    given: list[tuple[ah.dispatch.Effect, ...]] = []
    points = group(given, Quick(), Waiting())
    await points.hooks.called()
    await points.call(Points.called)
    points.hooks.plain()
    assert kinds(given) == [["quick", "waiting"], ["quick", "waiting"], ["plain"]]
    assert given[0][0].payload == {"fails": False}
    keys = [one.key for effects in given for one in effects]
    assert len({*keys}) == 5
    assert all(key.startswith("points/") for key in keys)


async def test_a_call_that_fails_hands_nothing_over() -> None:
    """Neither the effects of the hook that failed nor those of the others; the next call has its
    own.
    """
    given: list[tuple[ah.dispatch.Effect, ...]] = []
    hooks = group(given, Quick(), Waiting()).hooks
    with pytest.raises(ValueError, match="failed"):
        await hooks.called(fails=True)
    assert given == []
    await hooks.called()
    assert kinds(given) == [["quick", "waiting"]]


async def test_an_await_of_the_key_changes_nothing() -> None:
    """`await ah.effect(...)` returns the same text."""
    keys: list[str] = []

    class Awaits:
        async def called(self, fails: bool = False) -> None:
            keys.append(await ah.effect("awaited"))
            keys.append(ah.effect("plain"))

    given: list[tuple[ah.dispatch.Effect, ...]] = []
    await group(given, Awaits()).hooks.called()
    assert keys == [one.key for one in given[0]]


async def test_concurrent_calls_have_their_own() -> None:
    """One that fails takes nothing from another."""
    given: list[tuple[ah.dispatch.Effect, ...]] = []
    hooks = group(given, Waiting()).hooks
    await asyncio.gather(
        hooks.called(), hooks.called(fails=True), hooks.called(), return_exceptions=True
    )
    assert kinds(given) == [["waiting"], ["waiting"]]


async def test_a_method_of_either_kind_records_until_it_was_awaited() -> None:
    """Its hooks may wait, though it is no coroutine function."""
    given: list[tuple[ah.dispatch.Effect, ...]] = []

    class Either:
        def either(self) -> Awaitable[None] | None: ...

    class Waits(Either):
        async def either(self) -> None:
            await asyncio.sleep(0)
            ah.effect("either")

    hooks = ah.HookGroup(Either, [Waits()], effects=given.append).hooks
    answer = hooks.either()
    assert given == []
    assert answer is not None
    await answer
    assert kinds(given) == [["either"]]


async def test_an_error_of_effects_is_that_of_the_call() -> None:
    """What was to be handed over is not lost in silence."""

    def refuse(effects: object) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        await ah.HookGroup(Points, [Quick()], effects=refuse).hooks.called()


async def test_effects_is_a_plain_function() -> None:
    """A coroutine function would not be awaited by plain methods."""

    async def hand_over(effects: object) -> None: ...

    with pytest.raises(InvalidArgumentError, match="a coroutine function; give a plain one"):
        ah.HookGroup(Points, effects=hand_over)


async def test_the_kind_is_a_text() -> None:
    """A group has no handlers, so that it takes any."""

    class Wrong:
        async def called(self, fails: bool = False) -> None:
            ah.effect(3)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    with pytest.raises(InvalidArgumentError, match="kind of an effect is 3; give a str"):
        await group([], Wrong()).hooks.called()


async def test_without_effects_nothing_can_be_recorded_outside_of_a_run() -> None:
    """The error says what to do."""
    with pytest.raises(
        EffectError, match=r"outside of a run; .* or in a call of a HookGroup with effects="
    ):
        await ah.HookGroup(Points, [Quick()]).hooks.called()


async def test_in_a_run_the_group_records_for_the_session() -> None:
    """Without `effects=` as part of the run; with it, for itself, and the run's own context still
    records for the run.
    """
    got: list[str] = []
    given: list[tuple[ah.dispatch.Effect, ...]] = []

    async def deliver(effect: ah.dispatch.Effect) -> None:
        got.append(effect.key)

    class InRun(ah.SessionRunHook):
        async def after_run(self, run_context: ah.SessionRunContext, run_values: object) -> None:
            class Inner:
                async def called(self, fails: bool = False) -> None:
                    ah.effect("own")
                    run_context.effect("run")

            await group(given, Inner()).hooks.called()

    async def step() -> None:
        await ah.HookGroup(Points, [Quick(), Waiting()]).hooks.called()

    handlers = dict.fromkeys(("quick", "waiting", "run"), deliver)
    await run_session(
        ah.AsyncMonitoredSession(step, [InRun(), ah.EffectsHook(handlers, when="commit", run="r")]),
        1,
        (),
    )
    assert sorted(got) == ["r/1/InRun/1", "r/1/step.Waiting/1", "r/1/step/1"]
    assert kinds(given) == [["own"]]


def test_an_attempt_that_begins_meanwhile_does_not_get_an_effect_of_the_last_one() -> None:
    """A thread records for the attempt that it has begun to record for."""
    taken: list[Effect] = []

    def find() -> tuple[str, int]:
        recording.context = "second"
        return "step", 0

    recording = Recording("r", take=taken.extend)
    recording.context, recording.turn = "first", (find,)
    recording.add("publish", None)
    recording.committed = recording.context
    recording.end()
    assert (recording.context, taken) == ("second", [])
