"""Hooks that record what they get, or call a function of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohooks as ah
from tests.support.waiting import uncancellable


class RequestingHook(ah.SessionRunHook):
    """Returns the same request in every `before_run`, and keeps what `after_run` got."""

    def __init__(self, fetches: Any = None, feed_dict: Any = None, options: Any = None) -> None:
        self.request: Any = ah.SessionRunArgs(fetches, feed_dict, options)
        self.values: list[ah.SessionRunValues] = []

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        request: ah.SessionRunArgs | None = self.request
        return request

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        self.values.append(run_values)


class RestoringHook(ah.SessionRunHook):
    """Restores another hook's state when a session does: after `begin`, before it is created."""

    def __init__(self, hook: Any, state: Any) -> None:
        self.hook, self.state = hook, state

    async def begin(self) -> None:
        self.hook.load_state_dict(self.state)


class Stubborn(ah.SessionRunHook):
    """Ignores its cancellation in `before_run`, until it is `released`."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await uncancellable(self.released)


class EveryPhaseHook(ah.SessionRunHook):
    """Awaits `in_phase` in each phase, with its name and its own arguments; `before_run` returns
    the result.
    """

    async def in_phase(self, phase: str, *args: Any) -> Any:
        """Do what a subclass does in each phase."""
        raise NotImplementedError

    async def begin(self) -> None:
        await self.in_phase("begin")

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        await self.in_phase("after_create_session", session, coord)

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs | None:
        answer: ah.SessionRunArgs | None = await self.in_phase("before_run", run_context)
        return answer

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await self.in_phase("after_run", run_context, run_values)

    async def end(self, session: ah.Session) -> None:
        await self.in_phase("end", session)

    async def close(self, exc: BaseException | None) -> None:
        await self.in_phase("close", exc)


class PhaseHook(EveryPhaseHook):
    """Awaits one function, with the phase's own arguments, in one phase."""

    def __init__(self, phase: str, call: Callable[..., Awaitable[Any]]) -> None:
        self.calls = 0
        self._phase = phase
        self._call = call

    async def in_phase(self, phase: str, *args: Any) -> Any:
        if phase == self._phase:
            self.calls += 1
            return await self._call(*args)
        return None


class BeforeRunHook(ah.SessionRunHook):
    """Calls a function in `before_run`, and records whether that has ended, and how often the hook
    was closed.
    """

    def __init__(self, call: Callable[[], Awaitable[Any]]) -> None:
        self.call = call
        self.ended = False
        self.closed = 0

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        try:
            await self.call()
        finally:
            self.ended = True

    async def close(self, exc: BaseException | None) -> None:
        self.closed += 1


class SessionRecorder(ah.SessionRunHook):
    """Keeps every session and coordinator that it gets, and the attempt of each run."""

    def __init__(self) -> None:
        self.sessions: list[ah.Session] = []
        self.coords: list[ah.Coordinator] = []
        self.attempts: list[int] = []

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.sessions.append(session)
        self.coords.append(coord)

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        self.attempts.append(run_context.attempt)


class EndRecorder(ah.SessionRunHook):
    """Records the calls at the beginning and the end of a session, with the error."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def begin(self) -> None:
        self.calls.append("begin")

    async def end(self, session: Any) -> None:
        self.calls.append("end")

    async def close(self, exc: BaseException | None) -> None:
        self.calls.append(f"close({type(exc).__name__})")


class NotedRates(ah.hooks.StepCounterHook):
    """Calls a function with the step of each rate, and the rate."""

    def __init__(self, every: ah.Every, note: Callable[[int, float], object]) -> None:
        super().__init__(every)
        self.note = note

    async def after_run(self, run_context: ah.SessionRunContext, run_values: Any) -> None:
        earlier = self.steps_per_sec
        self.steps_per_sec = None
        await super().after_run(run_context, run_values)
        if self.steps_per_sec is None:
            self.steps_per_sec = earlier
        else:
            self.note(run_context.global_step, self.steps_per_sec)
