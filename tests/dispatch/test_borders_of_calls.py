"""Borders of calls: left-out defaults, what is wrapped, other loops, generators."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="empty-body, var-annotated"
# Annotations say how results are combined, and most classes here have none.

from __future__ import annotations

import asyncio
import contextvars

import pytest

import aiohooks as ah
from aiohooks.errors import InvalidHookError
from tests.support.waiting import ticks


class Events:
    async def on_event(self, event) -> None: ...

    @ah.point(ah.wrap(argument="call_next"))
    async def handle(self, event, call_next, data=None, *, depth=0): ...


class Waits:
    async def on_event(self, event):
        await asyncio.sleep(0)


async def final(event, data=None, *, depth=0):
    return event, data, depth


def test_a_class_without_new_objects_is_refused() -> None:
    """Its object could not stand for the hooks, which were never called."""

    class Only:
        made = None

        def __new__(cls):
            Only.made = Only.made or super().__new__(cls)
            return Only.made

        async def on_event(self, event) -> None: ...

    Only()
    with pytest.raises(InvalidHookError, match="its __new__ returns"):
        ah.compose(Only, [Waits()])


async def test_a_generator_that_fits_in_a_group_is_refused_by_a_session() -> None:
    """A session awaits its hooks, also of a class that a group has seen."""

    class Around(ah.SessionRunHook):
        async def before_run(self, run_context):
            yield

    around = Around()
    ah.HookGroup(ah.SessionRunHook, [around])
    with pytest.raises(InvalidHookError, match="is an async generator, but"):
        ah.AsyncMonitoredSession(final, [around])


async def test_a_group_is_not_its_own_hook() -> None:
    """What is refused changes nothing."""
    inner = ah.HookGroup(Events)
    outer = ah.HookGroup(Events, [inner.hooks])
    with pytest.raises(InvalidHookError, match="would never end"):
        inner.add(inner.hooks)
    called = []
    inner.on(Events.on_event)(called.append)
    await outer.hooks.on_event("started")
    assert called == ["started"]


async def test_what_a_removed_hook_resets_is_reset_for_the_caller() -> None:
    """The block sees what its exit has set, though that runs in a task."""
    variable = contextvars.ContextVar("variable", default="default")

    class Sets(Waits):
        async def __aenter__(self):
            self.token = variable.set("set")

        async def __aexit__(self, *_):
            variable.reset(self.token)

    hook = Sets()
    async with ah.HookGroup(Events, [hook]) as group:
        assert variable.get() == "set"
        group.remove(hook)
        await ticks()
    assert variable.get() == "default"
