"""Functions for launchers to run: of a module, so that other processes can import them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohooks import open_step_store
from aiohooks.distributed import Task
from aiohooks.distributed.task import TaskSpec
from aiohooks.errors import StepResetError, StoreResetError
from aiohooks.stores import SharedStepStore, StepStore

SCALE = 20
KILLED_AFTER = 3
"""The number of steps after its start at which a task is killed."""


@dataclasses.dataclass(frozen=True)
class SpecOfStore(TaskSpec):
    """A spec whose store is always the same one, which stays open."""

    store: Any = None

    @classmethod
    def of(cls, spec: TaskSpec, store: StepStore) -> SpecOfStore:
        """Return a copy of the spec with this store."""
        fields = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
        return cls(**fields, store=store)

    def open_store(self) -> Any:
        return contextlib.nullcontext(self.store)


def first_step(task_id: int) -> int:
    """Return the step at which a task starts."""
    return int(SCALE * math.log(task_id + 1))


async def about(task: Task) -> dict[str, Any]:
    """Return the attributes of the task."""
    return {
        "task_id": task.task_id,
        "is_chief": task.is_chief,
        "num_workers": task.num_workers,
        "name": task.name,
        "attempt": task.attempt,
        "checkpoint_dir": task.checkpoint_dir,
        "run": task.store.run,
        "pid": os.getpid(),
        "step": await task.store.advance(),
    }


async def finds_the_run(task: Task) -> str:
    """Open the run again, by its environment variables."""
    async with open_step_store() as store:
        assert store.run == task.store.run
        assert isinstance(store, SharedStepStore)
        return type(store._engine).__name__


async def signals_the_launcher(task: Task, pid: int) -> None:
    """Send SIGTERM to the launcher, and wait to be ended."""
    os.kill(pid, signal.SIGTERM)
    await asyncio.get_running_loop().create_future()


async def dies_with_helpers(task: Task) -> None:
    """Leave a forked process and a started program behind, and be killed."""
    with warnings.catch_warnings(action="ignore"):  # Python warns that this process has threads
        child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    os.posix_spawn("/bin/sleep", ["sleep", "3600"], {})  # noqa: ASYNC221 - not awaited
    os.kill(os.getpid(), signal.SIGKILL)


async def staggered(task: Task, last: int, kills: Sequence[int] = ()) -> tuple[int, int]:
    """Start at the task's step and advance to the last; return the wanted first step, and the one
    at which it started.

    At each step at which a task may start, the chief continues only after that task has started, so
    a task that starts late, or waits for one step more, hangs the run: no clock is needed. The
    tasks `kills` kill their own processes, in their first attempts, `KILLED_AFTER` steps after
    their starts; there the chief continues after they have started again.
    """
    wanted = first_step(task.task_id)
    dies_at = wanted + KILLED_AFTER if task.task_id in kills and task.attempt == 1 else last
    stops = [
        *map(first_step, range(1, task.num_workers + 1)),
        *(first_step(each) + KILLED_AFTER for each in kills),
    ]
    async with open_step_store(run=f"{task.store.run} started", on_lost="keep") as starts:
        with task.store.publisher(task.name):
            at = await task.store.wait_for(wanted)
            if not task.is_chief or task.attempt > 1:
                await _count_start(starts)
            while (step := task.store.latest.step) < last:
                if step >= dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                due = sum(step >= stop for stop in stops)
                await _wait_for_starts(starts, due)
                if task.is_chief or due == len(stops):
                    try:
                        await task.store.advance()
                    except StoreResetError:
                        # The engine has lost the run. It continues where this process knew it.
                        task.store.acknowledge_loss()
                else:
                    await task.store.wait_for(step + 1)
    return wanted, at


async def _count_start(starts: StepStore) -> None:
    """Count the start of a task, again if the engine has lost the count."""
    while True:
        await _restore_count(starts)
        try:
            await starts.advance()
        except StoreResetError:
            continue
        return


async def _wait_for_starts(starts: StepStore, count: int) -> None:
    """Wait until so many tasks have started, also if the engine loses the count meanwhile."""
    while True:
        await _restore_count(starts)
        try:
            await starts.wait_for(count, on_reset="raise")
        except StepResetError:
            continue
        return


async def _restore_count(starts: StepStore) -> None:
    """If the engine has lost the count, raise it to the one that this process has known.

    The run continues with what the first process knows that connects again, which may be less.
    """
    loss = starts.acknowledge_loss()
    if loss is not None:
        _, step = loss.old
        await starts.raise_to(step)


def check_staggered(started: Sequence[tuple[int, int]], killed: Sequence[int] = ()) -> None:
    """Check that each task has started at its first step, and a killed one again where it was
    killed.
    """
    assert [wanted for wanted, _ in started] == [0, 13, 21, 27]
    assert [at for _, at in started] == [
        wanted + (KILLED_AFTER if task_id in killed else 0)
        for task_id, (wanted, _) in enumerate(started)
    ]


async def dies(task: Task, how: str, attempts: int) -> int:
    """Let worker 1 die in its first attempts; return the number of the attempt."""
    if task.task_id == 1 and task.attempt <= attempts:
        if how != "kill":
            os._exit(3 if how == "exit" else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    return task.attempt


async def fails(task: Task) -> None:
    """Let worker 1 fail; the others wait indefinitely."""
    if task.task_id == 1:
        raise ValueError("the data are bad")
    await asyncio.get_running_loop().create_future()


async def waits_forever(task: Task, *args: object) -> None:
    """Wait indefinitely."""
    await asyncio.get_running_loop().create_future()


async def writes_its_pid(task: Task, pipe: str) -> None:
    """Write the process id into a named pipe, and wait indefinitely."""
    Path(pipe).write_text(f"{os.getpid()}\n")  # noqa: ASYNC240
    await asyncio.get_running_loop().create_future()


async def returns_a_lock(task: Task) -> object:
    """Return an object that cannot be pickled."""
    import threading

    return threading.Lock()


async def returns_its_name(task: Task) -> str:
    """Make a step, and return the name of the asyncio task, which messages of its sessions have."""
    await task.store.advance()
    running = asyncio.current_task()
    assert running is not None
    return running.get_name()
