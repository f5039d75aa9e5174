"""The step store of one process: in the memory of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import AsyncGenerator
from typing import ClassVar

from aiohooks.errors import safe_str
from aiohooks.stores._protocol import (
    MAX_STEP,
    LastExit,
    Member,
    Position,
    RunReport,
    Snapshot,
    Term,
    checked_step,
    report_of,
)
from aiohooks.stores.base import StepStore


class MemoryStepStore(StepStore):
    """A step kept in memory, for the sessions and tasks of one event loop. Only the waits ever
    suspend.
    """

    inline: ClassVar[bool] = True

    def __init__(self, step: int = 0, *, run: str = "default") -> None:
        """Start at `step`, in epoch 1; `run` is the name in messages."""
        super().__init__(Position(1, checked_step(step, "step")), run=run)
        self._terms = 0
        self._lead = asyncio.Lock()

    async def value(self) -> Position:
        """Return the position; the same as `latest`."""
        self._enter()
        return self._waits.latest

    async def advance(self, by: int = 1) -> int:
        """See `StepStore.advance`; does not suspend."""
        self._enter()
        return self.advance_nowait(by)

    async def raise_to(self, step: int) -> int:
        """See `StepStore.raise_to`; does not suspend."""
        step = checked_step(step, "raise to step")
        self._enter()
        self._observe(Position(self._waits.latest.epoch, step))
        return self._waits.latest.step

    async def reset(self, step: int) -> Position:
        """See `StepStore.reset`; does not suspend."""
        step = checked_step(step, "reset to step")
        self._enter()
        position = Position(self._waits.latest.epoch + 1, step)
        self._observe(position)
        return position

    @contextlib.asynccontextmanager
    async def lead(self, ttl: float | None = None) -> AsyncGenerator[Term]:
        """See `StepStore.lead`; `ttl` is ignored: the lease ends with the block."""
        self._enter()
        async with self._lead:
            self._terms += 1
            self._waits.set_initialised(False)
            yield Term(self._terms)

    async def mark_initialised(self) -> None:
        self._enter()
        if not self._lead.locked():
            raise self._not_leading_error()
        self._waits.set_initialised(True)

    async def inspect(self) -> RunReport | None:
        """See `StepStore.inspect`; does not suspend."""
        self._enter()
        waits = self._waits
        process = f"{socket.gethostname()}:{os.getpid()}"
        members = [
            Member(f"{process}/{publisher.name}", publisher.name, math.inf, publisher.waits_for)
            for publisher in waits.publishers.here
        ]
        if self._lead.locked():
            members.append(Member(f"{process}/", "chief", math.inf, term=self._terms))
        last_exit = None
        if (left := waits.publishers.last_exit) is not None:
            error = (
                "" if left.error is None else f"{type(left.error).__name__}: {safe_str(left.error)}"
            )
            last_exit = LastExit(1, left.name, left.step, error, lost=False)
        snapshot = Snapshot(
            waits.latest, self._terms, "", waits.is_initialised, 0, tuple(members), last_exit
        )
        waiting = () if waits.threshold is None else (waits.threshold,)
        return report_of(self.run, snapshot, waiting)

    def advance_nowait(self, by: int = 1) -> int:
        # Once per step of every session: written to be quick.
        if type(by) is not int or by < 1:
            by = checked_step(by, "advance by", least=1)
        if self._loop is None:  # not in use yet, or closed
            self._enter()
        waits = self._waits
        epoch, step = waits.latest
        step += by
        if step < waits.waiters.lowest:
            # What Position(...) does, in half the time.
            new = tuple.__new__(Position, (epoch, step))  # pyright: ignore[reportUnknownMemberType]
            waits.latest = new
        elif step > MAX_STEP:  # the lowest threshold is never above MAX_STEP + 1
            checked_step(step, f"advance by {by} would lead to step")
        else:
            waits.latest = Position(epoch, step)
            waits.wake()
        return step
