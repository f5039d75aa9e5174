"""What the tests of sessions that save and restore share: models to train, disks that are held up or full, listeners."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt

import aiohooks as ah

EVERY_STEP = ah.Every(steps=1)


def array_graph(size: int = 4) -> ah.Graph:
    """Weights that `train` changes in a way that depends on the step and on every bit of them; `look` changes nothing."""
    graph = ah.Graph()
    graph.variable("weights", lambda: np.linspace(0.1, 1.0, size))

    @graph.train_op(updates="weights")
    def train(weights: npt.NDArray[np.float64], global_step: int) -> npt.NDArray[np.float64]:
        return np.sin(weights * 1.7 + np.random.default_rng(global_step).random(len(weights)))

    graph.operation(name="look")(lambda: 42)
    return graph


async def train(source: Any, hooks: Any = (), runs: int = 1, **options: Any) -> ah.AsyncMonitoredSession:
    """A session of so many runs of `train` that ended, or was stopped."""
    async with ah.AsyncMonitoredSession(source, hooks, **options) as session:
        for _ in range(runs):
            if session.should_stop():
                break
            await session.run("train")
    return session


async def on_disk(path: Path) -> list[int]:
    """The steps of the checkpoints in a directory, in the order in which they were saved."""
    there = await ah.Saver(path, read_only=True).checkpoints()
    return [each.step for each in reversed(there)]


async def values_at(path: Path, step: int | None = None) -> Any:
    """The variables in the newest checkpoint, or in that of a step."""
    restored = await ah.Saver(path, read_only=True).restore(step)
    assert restored is not None
    return restored.state["variables"]


class Listener(ah.CheckpointSaverListener):
    """Writes down what it is told; asks for a stop, or fails, where it is told to.

    Args:
        wishes: what `after_save` returns, by step.
        fails: what it raises, by step.
        record: where to write; its own list, if left out.
        name: what it calls itself there.
    """

    def __init__(
        self,
        wishes: Mapping[int, Any] | None = None,
        fails: Mapping[int, BaseException] | None = None,
        record: list[str] | None = None,
        name: str = "",
    ) -> None:
        self.record: list[str] = [] if record is None else record
        self.saved: list[int] = []
        self._wishes, self._fails, self._name = wishes or {}, fails or {}, name
        self._changed = asyncio.Event()

    async def begin(self) -> None:
        self.record.append(f"{self._name}begin")

    async def before_save(self, session: ah.Session, global_step: int) -> None:
        self.record.append(f"{self._name}before_save({global_step})")

    async def after_save(self, session: ah.Session, global_step: int) -> object:
        self.record.append(f"{self._name}after_save({global_step})")
        self.saved.append(global_step)
        self._changed.set()
        if global_step in self._fails:
            raise self._fails[global_step]
        return self._wishes.get(global_step)

    async def end(self, session: ah.Session, global_step: int) -> None:
        self.record.append(f"{self._name}end({global_step})")

    async def wait_saved(self, step: int) -> None:
        """Waits until that step is durable and this was told."""
        while step not in self.saved:
            self._changed.clear()
            await self._changed.wait()
        await asyncio.sleep(0)  # what is behind it is done then, too


class HeldSaver(ah.Saver):
    """Begins to write when it is let; fails with these errors, one a save, where one is not None."""

    def __init__(self, checkpoint_dir: Path, *errors: Exception | None, held: bool = True, **options: Any) -> None:
        super().__init__(checkpoint_dir, **options)
        self.began: list[int] = []
        self.ended: list[int] = []
        self._errors = list(errors)
        self._let = asyncio.Semaphore(0 if held else 1_000_000)

    def let(self, count: int = 1) -> None:
        """Lets so many saves go on."""
        for _ in range(count):
            self._let.release()

    async def save(
        self, state: Mapping[str, Any], step: int, *, metrics: Mapping[str, SupportsFloat] | None = None
    ) -> ah.checkpoint.Checkpoint:
        assert len(self.began) == len(self.ended), "two saves at once"
        self.began.append(step)
        try:
            await self._let.acquire()
            error = self._errors.pop(0) if self._errors else None
            if error is not None:
                raise error
            return await super().save(state, step, metrics=metrics)
        finally:
            self.ended.append(step)


class Disk:
    """Stands in for `os` under a Saver: writing waits in its thread while `held`, and fails while `full`."""

    def __init__(self, *, held: bool = False, full: bool = False) -> None:
        self.full = full
        self.reached = threading.Event()
        self.free = threading.Event()
        if not held:
            self.free.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: Any) -> int:
        """Writes when it may."""
        self.reached.set()
        self.free.wait()
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data)

    async def is_reached(self) -> None:
        """Waits until somebody writes."""
        await asyncio.to_thread(self.reached.wait)


def full() -> ah.AiohooksError:
    """What a save on a full disk fails with."""
    return ah.errors.CheckpointError(errno.ENOSPC, "the disk is full")


def saving(saver: Any, **options: Any) -> ah.CheckpointSaverHook:
    """A hook that saves after every step, unless it is told otherwise."""
    options.setdefault("every", EVERY_STEP)
    return ah.CheckpointSaverHook(saver, **options)
