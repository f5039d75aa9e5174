"""Shared by the tests of sessions that save and restore: graphs, hooks with a state, savers and
disks that block or fail.
"""

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
    """Return a graph in which `train` changes weights depending on the step and every bit of them;
    `look` changes nothing.
    """
    graph = ah.Graph()
    graph.variable("weights", lambda: np.linspace(0.1, 1.0, size))

    @graph.train_op(updates="weights")
    def train(weights: npt.NDArray[np.float64], global_step: int) -> npt.NDArray[np.float64]:
        return np.sin(weights * 1.7 + np.random.default_rng(global_step).random(len(weights)))

    graph.operation(name="look")(lambda: 42)
    return graph


async def train(
    source: Any, hooks: Any = (), runs: int = 1, **options: Any
) -> ah.AsyncMonitoredSession:
    """Return a session after so many runs of `train`, or a stop."""
    async with ah.AsyncMonitoredSession(source, hooks, **options) as session:
        for _ in range(runs):
            if session.should_stop():
                break
            await session.run("train")
    return session


def chief(path: Any, graph: ah.Graph | None = None, **options: Any) -> ah.ChiefSessionCreator:
    """Return a creator that restores from a directory or saver."""
    return ah.ChiefSessionCreator(
        array_graph() if graph is None else graph, checkpoint_dir=path, **options
    )


class Remembering(ah.SessionRunHook):
    """A hook or tracked object whose state is a count of runs. It records its calls."""

    def __init__(self, name: str = "", record: list[str] | None = None) -> None:
        self.name = name
        self.count = 0
        self.record: list[str] = [] if record is None else record

    async def begin(self) -> None:
        self.count = 0
        self.record.append("begin")

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.record.append(
            f"after_create_session with {self.count} at step {session.global_step.latest.step}"
        )

    async def after_run(self, *_: object) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.record.append(f"{self.name or 'load'} {self.count}")


async def on_disk(path: Path) -> list[int]:
    """Return the steps of the checkpoints in a directory, in the order of their saves."""
    there = await ah.checkpoint.Saver(path, read_only=True).checkpoints()
    return [each.step for each in reversed(there)]


async def state_at(path: Path, step: int | None = None) -> Any:
    """Return the state in the newest checkpoint, or in that of a step."""
    restored = await ah.checkpoint.Saver(path, read_only=True).restore(step)
    assert restored is not None
    return restored.state


async def values_at(path: Path, step: int | None = None) -> Any:
    """Return the variables in the newest checkpoint, or in that of a step."""
    return (await state_at(path, step))["variables"]


class Listener(ah.hooks.CheckpointSaverListener):
    """Records its calls.

    Args:
        returns: what `after_save` returns, by step.
        fails: what it raises, by step.
        record: the list to append to; a new one by default.
        name: a prefix of its records.
    """

    def __init__(
        self,
        returns: Mapping[int, Any] | None = None,
        fails: Mapping[int, BaseException] | None = None,
        record: list[str] | None = None,
        name: str = "",
    ) -> None:
        self.record: list[str] = [] if record is None else record
        self.saved: list[int] = []
        self._returns, self._fails, self._name = returns or {}, fails or {}, name
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
        return self._returns.get(global_step)

    async def end(self, session: ah.Session, global_step: int) -> None:
        self.record.append(f"{self._name}end({global_step})")

    async def wait_saved(self, step: int) -> None:
        """Wait until `after_save` of that step was called."""
        while step not in self.saved:
            self._changed.clear()
            await self._changed.wait()
        await asyncio.sleep(0)  # the caller of after_save continues, too


class HeldSaver(ah.checkpoint.Saver):
    """Blocks each save until `let` is called. The n-th save raises the n-th of `errors`, unless it
    is None.
    """

    def __init__(
        self, checkpoint_dir: Path, *errors: Exception | None, held: bool = True, **options: Any
    ) -> None:
        super().__init__(checkpoint_dir, **options)
        self.began: list[int] = []
        self.ended: list[int] = []
        self._errors = list(errors)
        self._let = asyncio.Semaphore(0 if held else 1_000_000)

    def let(self, count: int = 1) -> None:
        """Let so many saves continue."""
        for _ in range(count):
            self._let.release()

    async def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> ah.checkpoint.Checkpoint:
        assert len(self.began) == len(self.ended), "two overlapping saves"
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
    """Replaces `os` in a Saver: a write blocks its thread until `free` is set if `held`, and fails
    while `full`.
    """

    def __init__(self, *, held: bool = False, full: bool = False) -> None:
        self.full = full
        self.reached = threading.Event()
        self.free = threading.Event()
        if not held:
            self.free.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: Any) -> int:
        """Write, or fail, when `free` is set."""
        self.reached.set()
        self.free.wait()
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data)


def disk_full_error() -> ah.AiohooksError:
    """Return the error of a save on a full disk."""
    return ah.errors.CheckpointError(errno.ENOSPC, "the disk is full")


async def writes_done() -> None:
    """Wait until no CheckpointSaverHook is writing."""
    while writes := [
        task for task in asyncio.all_tasks() if task.get_name().startswith("save of step ")
    ]:
        await asyncio.wait(writes)


def saving(saver: Any, **options: Any) -> ah.CheckpointSaverHook:
    """Return a hook that saves after every step by default."""
    options.setdefault("every", EVERY_STEP)
    return ah.CheckpointSaverHook(saver, **options)
