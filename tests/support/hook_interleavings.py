"""Small scenarios of hooks with tools that cancel their task, to be run in every order (see `tests.support.interleavings`)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohooks as ah
from aiohooks.testing.clock import ManualClock
from tests.support.interleavings import Violation, explore
from tests.support.tools_of_hooks import Act, Tool

LOST = "the cancel is lost"


class HookError(Exception):
    """The failure of a hook."""


class Calls:
    """The lifecycle of the hooks."""

    async def on(self) -> None: ...


class Asked:
    """The lifecycle of hooks that answer."""

    @ah.point("race")
    async def ask(self) -> str | None: ...


class Hook:
    """Uses the scenario's tool, and suspends in it."""

    def __init__(self, scenario: HookScenario) -> None:
        self.scenario = scenario

    async def on(self) -> None:
        await self.scenario.use(self.act)

    async def act(self) -> None:
        await asyncio.sleep(0)


class FailingHook(Hook):
    """Raises the scenario's error."""

    async def act(self) -> None:
        await asyncio.sleep(0)
        raise self.scenario.error


class HookScenario:
    """One task calls hooks, another one cancels it once; `made` are the classes of the hooks."""

    made: tuple[type[Hook], ...] = (Hook, Hook)

    def __init__(self, tool: Tool, *, may_lose_cancels: bool = False) -> None:
        self.tool = tool
        self.may_lose_cancels = may_lose_cancels
        self.error = HookError()
        self.clock = ManualClock()
        self.active = 0
        self.is_cancelled = False
        self.caller: asyncio.Task[Any] | None = None
        self.hooks = [one(self) for one in self.made]

    async def use(self, act: Act) -> None:
        self.active += 1
        try:
            await self.tool(act)
        finally:
            self.active -= 1

    async def call(self) -> None:
        """Call the hooks."""
        await ah.compose(Calls, self.hooks).on()

    def actors(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, Any]]]:
        async def caller() -> None:
            self.caller = asyncio.current_task()
            with self.clock:
                try:
                    await self.call()
                finally:
                    assert not self.active, "a hook is still active after the call"

        async def canceller() -> None:
            if self.caller is not None:
                self.is_cancelled = self.caller.cancel()

        return {"caller": caller, "canceller": canceller}

    def at_rest(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None:
        caller = tasks["caller"]
        assert caller.done(), "the caller hangs"
        assert not self.active, "a hook is still active"
        if caller.cancelled():
            assert self.is_cancelled, "the caller is cancelled, and not by the canceller"
            return
        if self.is_cancelled and self.may_lose_cancels:
            return
        assert not self.is_cancelled, f"{LOST}, for {caller.exception()!r}"
        assert caller.exception() is (self.error if FailingHook in self.made else None), f"raised: {caller.exception()!r}"

    async def finish(self) -> None:
        assert not self.clock.pending

    def finished(self, tasks: Mapping[str, asyncio.Task[Any]]) -> None: ...


class BesideAFailure(HookScenario):
    """Another hook fails while the tool is in use, or after."""

    made = (Hook, FailingHook)


class AfterAFailure(HookScenario):
    """The one in the caller's task fails."""

    made = (FailingHook, Hook)


class InARace(HookScenario):
    """The hook that ends first has the answer, and the other one is cancelled."""

    async def call(self) -> None:
        assert await ah.compose(Asked, [Answering(hook) for hook in self.hooks]).ask() == "answer"


class InASession(HookScenario):
    """The hooks are those of a run."""

    async def call(self) -> None:
        async def step() -> None: ...

        async with ah.AsyncMonitoredSession(step, [BeforeRun(hook) for hook in self.hooks]) as session:
            await session.run("step")


class InASessionBesideAFailure(InASession):
    """A hook of the run fails."""

    made = (Hook, FailingHook)


class BeforeRun(ah.SessionRunHook):
    """Calls a hook of the scenario."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await self.hook.on()


class Answering(Asked):
    """Calls a hook of the scenario, and answers."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    async def ask(self) -> str | None:
        await self.hook.on()
        return "answer"


class PlainAwait(HookScenario):
    """One hook, awaited without this library."""

    made = (Hook,)

    async def call(self) -> None:
        await self.hooks[0].on()


class PlainAwaitOfAFailure(PlainAwait):
    """One hook that fails."""

    made = (FailingHook,)


SCENARIOS: tuple[type[HookScenario], ...] = (
    HookScenario, BesideAFailure, AfterAFailure, InARace, InASession, InASessionBesideAFailure,
)  # fmt: skip


@functools.cache
def loses_cancels(tool: Tool) -> bool:
    """Return whether the tool loses a cancel that comes together with its own, under a plain `await`."""
    for scenario in (PlainAwait, PlainAwaitOfAFailure):
        try:
            explore(lambda: scenario(tool))  # noqa: B023 - called before it changes
        except Violation as violation:
            if LOST not in str(violation):
                raise
            return True
    return False
