"""What tests give to the launchers to run: functions of a module, which other processes can import."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from pathlib import Path
from typing import Any

from aiohooks import open_step_store
from aiohooks.distributed import Task

SCALE = 20


def first_step(task_id: int) -> int:
    """The step that a task waits for."""
    return int(SCALE * math.log(task_id + 1))


async def about(task: Task) -> dict[str, Any]:
    """Says what it was given."""
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
    """Opens the run once more, by its environment."""
    async with open_step_store() as store:
        assert store.run == task.store.run
        return type(store).__name__


async def staggered(task: Task, last: int, kills: int = -1) -> tuple[int, int]:
    """Starts at its step and counts on to the last; says the step that was asked for, and the one at which it started.

    At each step at which somebody may start the chief goes on only when that one has. So who starts late, or waits for one
    step more, is stuck; there is no other clock in this. The task `kills` kills its own process, in its first attempt, three
    steps after its start.
    """
    wanted = first_step(task.task_id)
    async with open_step_store(run=f"{task.store.run} started", on_lost="keep") as started:
        with task.store.publisher(task.name):
            at = await task.store.wait_for(wanted)
            await started.raise_to(task.task_id)
            while (step := task.store.latest.step) < last:
                due = sum(step >= first_step(other) for other in range(1, task.num_workers + 1))
                await started.wait_for(due)
                if task.task_id == kills and task.attempt == 1 and step >= wanted + 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                if task.is_chief or due == task.num_workers:
                    await task.store.advance()
                else:
                    await task.store.wait_for(step + 1)
    return wanted, at


async def dies(task: Task, how: str, attempts: int) -> int:
    """A worker dies in its first attempts; says how many there were."""
    if task.task_id == 1 and task.attempt <= attempts:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return task.attempt


async def fails(task: Task) -> None:
    """A worker fails, the others wait for ever."""
    if task.task_id == 1:
        raise ValueError("the data are bad")
    await asyncio.get_running_loop().create_future()


async def tells_its_pid(task: Task, pipe: str) -> None:
    """Writes it into a named pipe, and waits for ever."""
    Path(pipe).write_text(f"{os.getpid()}\n")  # noqa: ASYNC240
    await asyncio.get_running_loop().create_future()


async def returns_a_lock(task: Task) -> object:
    """Returns what cannot travel."""
    import threading

    return threading.Lock()
