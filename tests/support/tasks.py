"""What tests give to the launchers to run: functions of a module, which other processes can import."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohooks import open_step_store
from aiohooks.distributed import Task

SCALE = 20
KILLED_AFTER = 3
"""So many steps after its start a task is killed."""


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


async def staggered(task: Task, last: int, kills: Sequence[int] = (), faults: Sequence[int] = ()) -> tuple[int, int]:
    """Starts at its step and counts on to the last; says the step that was asked for, and the one at which it started.

    At each step at which somebody may start the chief goes on only when that one has. So who starts late, or waits for one
    step more, is stuck; there is no other clock in this. The tasks `kills` kill their own processes, in their first attempts,
    `KILLED_AFTER` steps after their starts: there the chief goes on when they have started again. At the steps of `faults` it
    goes on when somebody else, who makes something fail there, has counted that as a start, in the run `starts_of` this one.
    """
    wanted = first_step(task.task_id)
    dies_at = wanted + KILLED_AFTER if task.task_id in kills and task.attempt == 1 else last
    stops = [*map(first_step, range(1, task.num_workers + 1)), *(first_step(each) + KILLED_AFTER for each in kills), *faults]
    async with open_step_store(run=starts_of(task.store.run), on_lost="keep") as starts:
        with task.store.publisher(task.name):
            at = await task.store.wait_for(wanted)
            if not task.is_chief or task.attempt > 1:
                await starts.advance()
            while (step := task.store.latest.step) < last:
                if step >= dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                due = sum(step >= stop for stop in stops)
                await starts.wait_for(due)
                if task.is_chief or due == len(stops):
                    await task.store.advance()
                else:
                    await task.store.wait_for(step + 1)
    return wanted, at


def starts_of(run: str) -> str:
    """The run in which the starts of the tasks of a run are counted."""
    return f"{run} started"


def check_staggered(started: Sequence[tuple[int, int]], killed: Sequence[int] = ()) -> None:
    """Each has started at the first step it might, and a killed one again where it was killed."""
    assert [wanted for wanted, _ in started] == [0, 13, 21, 27]
    assert [at for _, at in started] == [
        wanted + (KILLED_AFTER if task_id in killed else 0) for task_id, (wanted, _) in enumerate(started)
    ]


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


async def calls_itself(task: Task) -> str:
    """The name under which others hear of what this process does; leaves a step behind."""
    await task.store.advance()
    running = asyncio.current_task()
    assert running is not None
    return running.get_name()
