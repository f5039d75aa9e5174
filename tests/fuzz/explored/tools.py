"""Scenarios with code of others in hooks, steps, waits and background tasks: it cancels its own
task, or swallows a cancel.

It has a task of its own, in which it may do what it likes: the caller's cancel comes out, however
often its own is swallowed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio

import aiohooks as ah
from tests.fuzz.explored.fixture import Action, Body, Broken, Fixture, Worse, fails, scenario, soon
from tests.support import tools_of_hooks
from tests.support.tools_of_hooks import Act, Tool, fail
from tests.support.waiting import forever


async def group_whose_child_cleans_up(act: Act) -> None:
    """Another child still waits in its cleanup when the group is being left."""

    async def cleans_up() -> None:
        try:
            await forever()
        finally:
            await act()

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(cleans_up())


async def scope_in_cleanup(act: Act) -> None:
    with anyio.move_on_after(0):
        try:
            await forever()
        finally:
            with anyio.CancelScope(shield=True):
                await act()


async def swallowed_cancel(act: Act) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await act()
        await act()
    await soon()


async def cleanup_of_a_task(act: Act) -> None:
    """The most usual one: a cancel that comes while it awaits the task is swallowed with that of
    the task.
    """
    task = asyncio.ensure_future(forever())
    try:
        await act()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


TOOLS: tuple[Tool, ...] = (
    *tools_of_hooks.TOOLS,
    group_whose_child_cleans_up,
    scope_in_cleanup,
    swallowed_cancel,
    cleanup_of_a_task,
)
IN_HOOKS = (
    "h0.begin",
    "h0.after_create_session",
    "h0.before_run",
    "h1.before_run",
    "h1.after_run",
    "h0.end",
)


def using(fixture: Fixture, tool: Tool, label: str) -> Action:
    """Return an action that uses the tool."""
    return lambda _: fixture.probe.foreign_code(
        label, partial(tool, partial(fixture.pause, f"{label} in a tool", 1))
    )


def use(fixture: Fixture, tool: Tool, *labels: str) -> None:
    """Let the hooks' methods and the operations of these labels use the tool."""
    for label in labels:
        fixture.actions[label] = using(fixture, tool, label)


def in_hooks(tool: Tool, *labels: str) -> Body:
    async def body(fixture: Fixture) -> None:
        use(fixture, tool, *labels)
        await fixture.train(runs=1)

    return body


def in_steps(tool: Tool) -> Body:
    async def body(fixture: Fixture) -> None:
        use(fixture, tool, "left", "right", "train")

        async def fn(step_context: ah.session.StepContext) -> None:
            await using(fixture, tool, "step_fn")(1)
            await step_context.run_with_hooks("train")

        async with fixture.open() as session:
            await fixture.probe.watch("step_fn", session.run_step_fn, fn)
            await fixture.run(session)

    return body


def in_waits(tool: Tool) -> Body:
    async def body(fixture: Fixture) -> None:
        async def work() -> None:
            await using(fixture, tool, "~work")(1)
            done.set()

        async def wait() -> None:
            await using(fixture, tool, "until")(1)
            await done.wait()

        done = asyncio.Event()
        async with fixture.open() as session:
            session.start_soon(fixture.probe.watch, "~work", work)
            await session.until(wait())
            await fixture.run(session)

    return body


def beside_a_failure(tool: Tool) -> Body:
    """A hook fails around the time at which others use the tool."""

    async def body(fixture: Fixture) -> None:
        use(fixture, tool, "h0.before_run", "h1.before_run")
        fixture.actions["h2.before_run"] = fails(Broken)
        await fixture.train(runs=1)

    return body


def with_a_stop(tool: Tool) -> Body:
    """A background task fails around the time at which a run's hooks use the tool."""

    async def body(fixture: Fixture) -> None:
        async def failing() -> None:
            await soon()
            raise Broken

        use(fixture, tool, "h0.before_run", "h1.before_run")
        async with fixture.open() as session:
            session.start_soon(fixture.probe.watch, "~worker", failing)
            await fixture.run(session)
            await session.until(forever())

    return body


def name_of(tool: Callable[..., Awaitable[None]]) -> str:
    return tool.__name__.replace("_", " ")


for _tool in TOOLS:
    _name = name_of(_tool)
    scenario(f"hooks with a {_name}", hooks=2)(in_hooks(_tool, *IN_HOOKS))
    scenario(f"steps with a {_name}", hooks=1)(in_steps(_tool))
    scenario(f"waits with a {_name}", hooks=1)(in_waits(_tool))
    scenario(f"a hook fails beside a {_name}", hooks=3, expect=Broken)(beside_a_failure(_tool))
    scenario(f"a background task fails beside a {_name}", hooks=2, expect=Broken)(
        with_a_stop(_tool)
    )


# -- an error of the tool comes out


async def group_that_raises(act: Act) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        await forever()


async def timeout_that_raises(act: Act) -> None:
    async with asyncio.timeout(0):
        await forever()


async def anyio_group_that_raises(act: Act) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(fail)
        await forever()


for _tool in (group_that_raises, timeout_that_raises, anyio_group_that_raises):
    _expect: Any = TimeoutError if _tool is timeout_that_raises else ExceptionGroup
    for _label in ("h0.before_run", "h1.after_run", "right"):
        scenario(f"a {name_of(_tool)} in {_label}", hooks=2, expect=_expect)(
            in_hooks(_tool, _label)
        )


@scenario(
    "a failing hook's own group, with a child that cleans up",
    hooks=2,
    expect=(Broken, ExceptionGroup),
)
async def group_in_cleanup(fixture: Fixture) -> None:
    async def group() -> None:
        async def cleans_up_badly() -> None:
            try:
                await forever()
            finally:
                await soon()
                raise Worse

        async with asyncio.TaskGroup() as own:
            own.create_task(fixture.probe.watch("~inner", cleans_up_badly))

    fixture.actions["h0.before_run"] = lambda _: fixture.probe.foreign_code("h0.before_run", group)
    fixture.actions["h1.before_run"] = fails(Broken)
    await fixture.train(runs=1)
