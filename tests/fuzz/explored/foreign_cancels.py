"""Scenarios with code of others in hooks, steps, waits and background tasks: it cancels its own task, or swallows a cancel.

It has a task of its own, in which it may do what it likes: the caller's cancel comes out, however often its own is swallowed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

import aiohooks as ah
from tests.fuzz.explored.fixture import Action, Body, Broken, Fixture, Worse, fails, scenario, soon
from tests.support.waiting import forever

Tool = Callable[[Fixture], Awaitable[None]]


async def fail(fixture: Fixture, name: str = "~inner", error: type[BaseException] = Worse) -> None:
    async def failing() -> None:
        await soon()
        raise error

    await fixture.probe.watch(name, failing)


async def group_whose_child_fails(fixture: Fixture) -> None:
    """The child fails in `__aexit__`: before Python 3.13 the cancel count stays one too high."""
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(fixture))


async def group_whose_body_waits(fixture: Fixture) -> None:
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(fixture))
            await forever()


async def group_whose_child_cleans_up(fixture: Fixture) -> None:
    """Another child still waits in its cleanup when the group is being left."""

    async def cleans_up() -> None:
        try:
            await forever()
        finally:
            await fixture.pause("cleanup", 2)

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail(fixture))
            group.create_task(fixture.probe.watch("~inner", cleans_up))


async def timeout_that_expires(fixture: Fixture) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            await forever()


async def timeout_that_does_not_expire(fixture: Fixture) -> None:
    async with asyncio.timeout(3600):
        await fixture.pause("in time", 2)


async def timeout_that_leaves_its_cancel(fixture: Fixture) -> None:
    """What async_timeout 4.0.2 does: it cancels the task, and never takes that back."""
    task = asyncio.current_task()
    assert task is not None
    expired = False

    def expire() -> None:
        nonlocal expired
        expired = task.cancel()

    timer = asyncio.get_running_loop().call_soon(expire)
    try:
        await forever()
    except asyncio.CancelledError:
        if not expired:
            raise
    finally:
        timer.cancel()


async def scope_of_anyio(fixture: Fixture) -> None:
    with anyio.CancelScope() as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        await forever()


async def scope_of_anyio_in_cleanup(fixture: Fixture) -> None:
    with anyio.move_on_after(0):
        try:
            await forever()
        finally:
            with anyio.CancelScope(shield=True):
                await fixture.pause("cleanup", 2)


async def group_of_anyio(fixture: Fixture) -> None:
    with contextlib.suppress(ExceptionGroup):
        async with anyio.create_task_group() as group:
            group.start_soon(fail, fixture)
            await forever()


async def swallowed_cancel(fixture: Fixture) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await fixture.pause("swallows", 3)
    await fixture.pause("swallows on", 1)


async def cleanup_of_a_task(fixture: Fixture) -> None:
    """The most usual one: a cancel that comes while it awaits the task is swallowed with that of the task."""
    task = asyncio.ensure_future(fixture.probe.watch("~inner", fixture.pause, "inner", 9))
    try:
        await soon()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Calls:
    async def on(self) -> None: ...


async def hook_group_that_fails(fixture: Fixture) -> None:
    class Failing:
        async def on(self) -> None:
            await fail(fixture)

    class Waiting:
        async def on(self) -> None:
            await forever()

    with contextlib.suppress(Worse):
        await ah.compose(Calls, [Waiting(), Failing()]).on()


async def nested_session(fixture: Fixture) -> None:
    class Failing(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            await fail(fixture)

    class Waiting(ah.SessionRunHook):
        async def before_run(self, run_context: ah.SessionRunContext) -> None:
            await forever()

    async def step() -> None: ...

    with contextlib.suppress(Worse):
        async with ah.AsyncMonitoredSession(step, [Waiting(), Failing()]) as session:
            await session.run("step")


TOOLS: tuple[Tool, ...] = (
    group_whose_child_fails,
    group_whose_body_waits,
    group_whose_child_cleans_up,
    timeout_that_expires,
    timeout_that_does_not_expire,
    timeout_that_leaves_its_cancel,
    scope_of_anyio,
    scope_of_anyio_in_cleanup,
    group_of_anyio,
    swallowed_cancel,
    cleanup_of_a_task,
    hook_group_that_fails,
    nested_session,
)


def use(fixture: Fixture, tool: Tool, *labels: str) -> None:
    """Let the hooks' methods and the operations of these labels use the tool."""
    for label in labels:
        fixture.actions[label] = using(fixture, tool, label)


def using(fixture: Fixture, tool: Tool, label: str) -> Action:
    return lambda _: fixture.probe.foreign_code(label, lambda: tool(fixture))


IN_HOOKS = ("h0.begin", "h0.after_create_session", "h0.before_run", "h1.before_run", "h1.after_run", "h0.end")


def in_hooks(tool: Tool, *labels: str) -> Body:
    async def body(fixture: Fixture) -> None:
        use(fixture, tool, *labels)
        await fixture.train(runs=1)

    return body


def in_steps(tool: Tool) -> Body:
    async def body(fixture: Fixture) -> None:
        use(fixture, tool, "left", "right", "train")

        async def fn(step_context: ah.session.StepContext) -> None:
            await fixture.probe.foreign_code("step_fn", lambda: tool(fixture))
            await step_context.run_with_hooks("train")

        async with fixture.open() as session:
            await fixture.probe.watch("step_fn", session.run_step_fn, fn)
            await fixture.run(session)

    return body


def in_waits(tool: Tool) -> Body:
    async def body(fixture: Fixture) -> None:
        async def work() -> None:
            await fixture.probe.foreign_code("~work", lambda: tool(fixture))
            done.set()

        async def wait() -> None:
            await fixture.probe.foreign_code("until", lambda: tool(fixture))
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
        use(fixture, tool, "h0.before_run", "h1.before_run")

        async with fixture.open() as session:
            session.start_soon(fail, fixture, "~worker", Broken)
            await fixture.run(session)
            await session.until(forever())

    return body


for _tool in TOOLS:
    _name = _tool.__name__.replace("_", " ")
    scenario(f"hooks with a {_name}", hooks=2)(in_hooks(_tool, *IN_HOOKS))
    scenario(f"steps with a {_name}", hooks=1)(in_steps(_tool))
    scenario(f"waits with a {_name}", hooks=1)(in_waits(_tool))
    scenario(f"a hook fails beside a {_name}", hooks=3, expect=Broken)(beside_a_failure(_tool))
    scenario(f"a background task fails beside a {_name}", hooks=2, expect=Broken)(with_a_stop(_tool))


# -- an error of the tool comes out


async def group_that_raises(fixture: Fixture) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail(fixture))
        await forever()


async def timeout_that_raises(fixture: Fixture) -> None:
    async with asyncio.timeout(0):
        await forever()


async def group_of_anyio_that_raises(fixture: Fixture) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(fail, fixture)
        await forever()


for _tool in (group_that_raises, timeout_that_raises, group_of_anyio_that_raises):
    _expect: Any = TimeoutError if _tool is timeout_that_raises else ExceptionGroup
    for _label in ("h0.before_run", "h1.after_run", "right"):
        _name = f"a {_tool.__name__.replace('_', ' ')} in {_label}"
        scenario(_name, hooks=2, expect=_expect)(in_hooks(_tool, _label))


@scenario("a failing hook's own group, with a child that cleans up", hooks=2, expect=(Broken, ExceptionGroup))
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
