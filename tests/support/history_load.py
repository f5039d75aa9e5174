"""The calls of one process of a history, written to a file before and after each, so that they outlive the process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from aiohooks.errors import AiohooksError, StepTimeoutError
from aiohooks.stores import Position, SharedStepStore
from tests.support.linearizability import Kind, Operation

Mix = Literal["raises", "resets", "advances", "reads"]
"""Which writes there are beside reads and waits: advances, with those of the name; none at all with "reads"."""

EPOCH_STEPS = 10**9
"""The steps of each epoch of the mix "resets": an advance returns only a step, and that then says its epoch."""
_WAIT_SECS = 0.2
_CALLERS = 4


def first_step(epoch: int) -> int:
    """Return the step that the reset to an epoch sets, lower or higher than the one before; different for each epoch."""
    return 0 if epoch == 1 else (epoch * 7919 % 1009 + 1) * EPOCH_STEPS


def epoch_of(step: int, mix: Mix) -> int:
    """Return the epoch of a step."""
    if mix != "resets" or step < EPOCH_STEPS:
        return 1
    return next(epoch for epoch in range(2, 1009) if first_step(epoch) == step - step % EPOCH_STEPS)


class Load:
    """Calls a store's operations at random, by several tasks; one of the processes, which is never killed, is `steady`."""

    def __init__(self, store: SharedStepStore, path: Path, process: int, seed: int, mix: Mix, *, steady: bool) -> None:
        self.store = store
        self.process = process
        self.chance = random.Random(f"{seed} {process}")
        self.mix: Mix = mix
        self.steady = steady
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._left = 0
        self._number = 0
        self._resetting = False  # a reset says by its step which epoch it begins: there is one at a time

    async def run(self, operations: int) -> None:
        """Make so many calls."""
        self._left = operations
        await asyncio.gather(*(self._run_calls() for _ in range(_CALLERS)))

    async def _run_calls(self) -> None:
        while self._left > 0:
            self._left -= 1
            await self.call(*self._draw())

    def _draw(self) -> tuple[Kind, int]:
        latest, kind = self.store.latest, self.chance.random()
        if kind < 0.25 or (self.mix == "reads" and kind < 0.6):
            return "read", 0
        if kind < 0.5 or self.mix == "reads":
            return "wait", latest.step + self.chance.randint(0, 3)
        if kind < 0.55 and self.mix == "raises":
            return "raise", latest.step + self.chance.randint(0, 4)
        if kind < 0.51 and self.mix == "resets" and self.steady and not self._resetting:
            return "reset", first_step(latest.epoch + 1)
        # Only the process that is never killed adds more: what unanswered advances have added is then known by their number.
        return "advance", self.chance.randint(1, 5) if self.steady and self.mix != "resets" else 1

    async def call(self, kind: Kind, amount: int) -> None:
        """Make one call, and write it down."""
        self._number += 1
        number, store = self._number, self.store
        self._write("begin", number, kind, amount, time.monotonic())
        self._resetting = self._resetting or kind == "reset"
        try:
            if kind == "advance":
                step = await store.advance(amount)
                position = Position(epoch_of(step, self.mix), step)
            elif kind == "raise":
                position = Position(1, await store.raise_to(amount))
            elif kind == "reset":
                position = await store.reset(amount)
                self._resetting = False
            elif kind == "read":
                position = await store.value()
            else:
                step = await store.wait_for(amount, timeout=_WAIT_SECS)
                position = Position(epoch_of(step, self.mix), step)
        except StepTimeoutError:
            self._write("none", number)
        except AiohooksError as error:
            self._write("failed", number, str(error))
        else:
            self._write("end", number, time.monotonic(), *position)

    def _write(self, *fields: Any) -> None:
        os.write(self._fd, json.dumps(fields).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def read_history(paths: Iterable[tuple[int, Path]]) -> tuple[list[Operation], int]:
    """Return the operations in the files of processes, and how many calls there were; a wait that timed out is none."""
    history: list[Operation] = []
    calls = 0
    for process, path in paths:
        begun: dict[int, Operation] = {}
        for line in path.read_text().splitlines():
            what, number, *fields = json.loads(line)
            if what == "begin":
                kind, amount, began = fields
                begun[number] = Operation(process, kind, amount, began)
                calls += 1
            elif what == "none":
                del begun[number]
            elif what == "end":
                ended, epoch, step = fields
                one = begun.pop(number)
                history.append(Operation(process, one.kind, one.amount, one.began, ended, Position(epoch, step)))
        history += begun.values()
    return history, calls
