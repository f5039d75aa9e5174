"""The step store of one process: in the memory of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from aiohooks.stores._protocol import MAX_STEP, Position, Snapshot, Term, checked_step
from aiohooks.stores.base import StepStore


class MemoryStepStore(StepStore):
    """A step kept in memory, for the sessions and tasks of one event loop.

    Only waits suspend.
    """

    inline = True

    def __init__(self, step: int = 0, *, run: str = "default") -> None:
        """Start at `step`, in epoch 1. `run` is the name in messages."""
        super().__init__(Position(1, checked_step(step, "step")), run=run)
        self._lead_lock = asyncio.Lock()

    async def value(self) -> Position:
        """See `StepStore.value`. It is the same as `latest`, and does not suspend."""
        self._check_loop()
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; does not suspend."""
        self._check_loop()
        return self.advance_nowait(by)

    async def raise_to(self, step: int) -> int:
        """See `StepStore.raise_to`; does not suspend."""
        step = checked_step(step, "raise to step")
        self._check_loop()
        self._waits.observe(Position(self._waits.latest.epoch, step))
        return self._waits.latest.step

    async def reset(self, step: int) -> Position:
        """See `StepStore.reset`; does not suspend."""
        step = checked_step(step, "reset to step")
        self._check_loop()
        position = Position(self._waits.latest.epoch + 1, step)
        self._waits.observe(position)
        return position

    @contextlib.asynccontextmanager
    async def lead(self) -> AsyncGenerator[Term]:
        self._check_loop()
        async with self._lead_lock:
            term = self._waits.snapshot.term + 1
            self._waits.observe_run(Snapshot(self.latest, term))
            yield Term(term)

    async def mark_initialised(self) -> None:
        self._check_loop()
        if not self._lead_lock.locked():
            raise self._not_leading_error()
        self._waits.observe_run(self._waits.snapshot._replace(ready=True))

    def advance_nowait(self, by: int = 1) -> int:
        # Each session calls this once per step, so it is optimized: calls only where needed.
        if type(by) is not int or by < 1:
            by = checked_step(by, "advance by", least=1)
        if self._loop is None:  # not in use yet, or closed
            self._check_loop()
        waits = self._waits
        epoch, step = waits.latest
        step += by
        # The lowest threshold is never above MAX_STEP + 1, so this includes the check of the step.
        if step < waits.waiters.lowest:
            # The same as Position(epoch, step), in half the time.
            new = tuple.__new__(Position, (epoch, step))  # pyright: ignore[reportUnknownMemberType]
            waits.latest = new
        elif step > MAX_STEP:
            checked_step(step, f"advance by {by} would lead to step")  # raises
        else:
            waits.latest = Position(epoch, step)
            waits.wake()
        return step
