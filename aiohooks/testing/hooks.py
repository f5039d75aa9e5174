"""Hooks for tests: one that records its calls, one that fails where it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohooks.errors import InvalidArgumentError
from aiohooks.session.hook import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues

if TYPE_CHECKING:
    from aiohooks.graph.session import Session
    from aiohooks.session.coordinator import Coordinator

_PHASES = ("begin", "after_create_session", "before_run", "after_run", "end", "close")


class RecordingHook(SessionRunHook):
    """Writes each call into `record` as `(name, phase)`; several hooks may share one list, which then has the order.

    It may ask for fetches and feeds; `results` has what it got, one item a run. With `suspend` every method suspends once.
    """

    def __init__(
        self,
        name: str = "hook",
        *,
        record: list[tuple[str, str]] | None = None,
        fetches: Any = None,
        feed_dict: Mapping[Any, Any] | None = None,
        suspend: bool = False,
    ) -> None:
        """Takes its name in the record, and what it asks for."""
        self.name = name
        self.record: list[tuple[str, str]] = [] if record is None else record
        self.results: list[Any] = []
        self.closed_with: list[BaseException | None] = []
        """What `close` was called with; one item, if all is well."""
        self._args = SessionRunArgs(fetches, feed_dict) if fetches is not None or feed_dict is not None else None
        self._suspend = suspend

    async def _called(self, phase: str) -> None:
        self.record.append((self.name, phase))
        if self._suspend:
            await asyncio.sleep(0)

    async def begin(self) -> None:
        """Records it."""
        await self._called("begin")

    async def after_create_session(self, session: Session, coord: Coordinator) -> None:
        """Records it."""
        await self._called("after_create_session")

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Records it, and asks for what it was told to."""
        await self._called("before_run")
        return self._args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Records it, and keeps the results."""
        self.results.append(run_values.results)
        await self._called("after_run")

    async def end(self, session: Session) -> None:
        """Records it."""
        await self._called("end")

    async def close(self, exc: BaseException | None) -> None:
        """Records it, and keeps what the session ended with."""
        self.closed_with.append(exc)
        await self._called("close")

    def phases(self) -> list[str]:
        """Its own calls, in order."""
        return [phase for name, phase in self.record if name == self.name]

    def __repr__(self) -> str:
        return f"RecordingHook({self.name!r})"


class FaultInjectionHook(RecordingHook):
    """Does something at the n-th call of a phase: raises an error, or calls a function without arguments, plain or async.

    Example: `FaultInjectionHook({("before_run", 2): AbortedError("lost")})` loses the second run once.
    """

    def __init__(
        self, faults: Mapping[tuple[str, int], BaseException | Callable[[], Any]], name: str = "fault", **options: Any
    ) -> None:
        """Takes the faults by phase and number of the call, counted from 1; `options` as for `RecordingHook`.

        Raises:
            InvalidArgumentError: a phase that does not exist, or a number below 1.
        """
        super().__init__(name, **options)
        for phase, number in faults:
            if phase not in _PHASES or number < 1:
                raise InvalidArgumentError(f"({phase!r}, {number!r}) is no call; phases are {', '.join(_PHASES)}, from 1 on")
        self._faults = dict(faults)
        self._counts: dict[str, int] = dict.fromkeys(_PHASES, 0)

    async def _called(self, phase: str) -> None:
        await super()._called(phase)
        self._counts[phase] += 1
        fault = self._faults.get((phase, self._counts[phase]))
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            result = fault()
            if asyncio.iscoroutine(result):
                await result
