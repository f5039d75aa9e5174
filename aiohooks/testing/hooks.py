"""Hooks for tests: one that records its calls, and one that fails at chosen calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiohooks.errors import InvalidArgumentError
from aiohooks.session.hook import (
    HOOK_METHODS,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)


class RecordingHook(SessionRunHook):
    """Appends each call to `record` as `(name, phase)`. Hooks that share one list record the order
    among them.

    Attributes:
        name: the hook's name in the record.
        record: the calls.
        results: the results of the fetches, one item for each run.
        closed_with: the arguments of `close`: one item, since it is called once.
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
        """Make a hook that asks for `fetches` and `feed_dict`. With `suspend` every method suspends
        once.
        """
        self.name = name
        if record is None:
            record = []
        self.record: list[tuple[str, str]] = record
        self.results: list[Any] = []
        self.closed_with: list[BaseException | None] = []
        self._args: SessionRunArgs | None = None
        if fetches is not None or feed_dict is not None:
            self._args = SessionRunArgs(fetches, feed_dict)
        self._suspend = suspend

    async def _record_call(self, phase: str) -> None:
        """Record a call of the method `phase`, and suspend if the hook is to."""
        self.record.append((self.name, phase))
        if self._suspend:
            await asyncio.sleep(0)

    async def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Record the call, and ask for the hook's fetches and feeds."""
        await self._record_call("before_run")
        return self._args

    async def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Record the call and the results."""
        self.results.append(run_values.results)
        await self._record_call("after_run")

    async def close(self, exc: BaseException | None) -> None:
        """Record the call and its argument."""
        self.closed_with.append(exc)
        await self._record_call("close")

    def phases(self) -> list[str]:
        """Return the phases of this hook's own calls, in order."""
        return [phase for name, phase in self.record if name == self.name]

    def __repr__(self) -> str:
        return f"RecordingHook({self.name!r})"


def _recording_method(phase: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Return the method `phase` of a `RecordingHook`, which only records its calls."""

    async def method(self: RecordingHook, *_: object) -> None:
        await self._record_call(phase)  # pyright: ignore[reportPrivateUsage]

    method.__name__ = phase
    method.__qualname__ = f"RecordingHook.{phase}"
    method.__doc__ = "Record the call."
    return method


# A hook overrides a method by having it in its class, so each needs a function of its own.
for _phase in HOOK_METHODS:
    if _phase not in vars(RecordingHook):
        setattr(RecordingHook, _phase, _recording_method(_phase))


class FaultInjectionHook(RecordingHook):
    """Raises an error, or calls a plain or async function without arguments, at the n-th call of a
    method.

    Example: `FaultInjectionHook({("before_run", 2): AbortedError("lost")})` loses the second run
    once.
    """

    def __init__(
        self,
        faults: Mapping[tuple[str, int], BaseException | Callable[[], Any]],
        name: str = "fault",
        **options: Any,
    ) -> None:
        """Take `faults` by method and number of the call, counted from 1. `options` as for
        `RecordingHook`.

        Raises:
            InvalidArgumentError: a method does not exist, or a number is below 1.
        """
        super().__init__(name, **options)
        for phase, number in faults:
            if phase not in HOOK_METHODS or number < 1:
                raise InvalidArgumentError(
                    f"({phase!r}, {number!r}) is no call; give a method ({', '.join(HOOK_METHODS)})"
                    " and a number from 1 on"
                )
        self._faults = dict(faults)
        self._counts: dict[str, int] = dict.fromkeys(HOOK_METHODS, 0)

    async def _record_call(self, phase: str) -> None:
        """Record the call, and inject the fault of this call, if any."""
        await super()._record_call(phase)
        self._counts[phase] += 1
        fault = self._faults.get((phase, self._counts[phase]))
        if isinstance(fault, BaseException):
            raise fault
        if fault is not None:
            result = fault()
            if asyncio.iscoroutine(result):
                await result
