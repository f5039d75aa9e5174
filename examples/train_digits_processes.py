"""The processes of train_digits.py: chief and workers, each with a copy of the model, one global step over all of them.

Each trains its own copy, on its own part of the images, as long as it likes: nobody waits for anybody. Now and then a worker
puts its weights into a directory that all of them see, and takes the mean that it finds there. The chief makes that mean, of
its own weights and those of all workers, and goes on from it. So there is one who says what the model is: the chief's is what
is saved, evaluated, and restored; a worker that dies leaves its last weights, and one that is started again begins with the
mean. The other way round, with every worker averaging for itself, there would be as many models as workers.
"""

import argparse
import asyncio
import os
import tempfile
from pathlib import Path

import numpy as np
from train_digits import Array, build_graph, hooks_of_the_chief, load_images, show_log, train

import aiohooks as ah
from aiohooks.distributed import Task

EXCHANGE_EVERY = 25  # of one's own steps


class Averaging(ah.SessionRunHook):
    """Puts this one's weights where the others see them, and takes the mean; the chief makes it."""

    def __init__(self, directory: Path, task: Task) -> None:
        """Is due every few steps that this process makes itself."""
        self.task = task
        self.own = directory / f"weights-{task.task_id}.npy"
        self.mean = directory / "mean.npy"
        self.runs = 0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        await self.take_mean(session)

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self.runs += 1
        if self.runs % EXCHANGE_EVERY == 0:
            await self.exchange(run_context.session)

    async def end(self, session: ah.Session) -> None:
        await self.exchange(session)

    async def exchange(self, session: ah.Session) -> None:
        weights = session.variables.snapshot()["weights"]
        await asyncio.to_thread(put, self.own, weights)
        if self.task.is_chief:
            all_weights = await asyncio.to_thread(lambda: [np.load(file) for file in self.own.parent.glob("weights-*.npy")])
            await asyncio.to_thread(put, self.mean, np.mean(all_weights, axis=0))
        await self.take_mean(session)

    async def take_mean(self, session: ah.Session) -> None:
        if self.mean.exists():
            # Between two steps, so no step sees a part of it.
            session.variables.assign({"weights": await asyncio.to_thread(np.load, self.mean)})


def put(file: Path, weights: Array) -> None:
    """Whoever reads the file finds all of it: the old weights or the new ones."""
    aside = file.with_suffix(f".{os.getpid()}")
    with aside.open("wb") as opened:
        np.save(opened, weights)
    aside.replace(file)


async def work(task: Task, directory: str, options: argparse.Namespace) -> tuple[int, int, float]:
    """One process; returns how many steps it made, the step that it saw last, and the accuracy of its model."""
    show_log()
    images, held_out = load_images(options.seed)
    part = {name: array[task.task_id :: options.workers] for name, array in images.items()}
    await all_are_here(task)
    graph, variables = build_graph(), ah.Variables()
    hooks: list[ah.SessionRunHook] = [Averaging(Path(directory), task)]
    if task.is_chief:
        hooks += hooks_of_the_chief(options)
        # Takes the lead of the store, and the model of the newest checkpoint.
        chief = ah.ChiefSessionCreator(graph, checkpoint_dir=task.checkpoint_dir, global_step=task.store, variables=variables)
        made = await train(task.task_id, chief, hooks, part, options)
        return made, task.store.latest.step, await ah.Session(graph, variables=variables).run("accuracy", held_out)
    # Waits until the chief has its model; the worker's own variables begin with the mean, if there is one already.
    made = await train(task.task_id, ah.WorkerSessionCreator(graph, global_step=task.store), hooks, part, options)
    return made, task.store.latest.step, 0.0


async def all_are_here(task: Task) -> None:
    """The chief begins when all processes are up: else the order in which they start would be that of their imports."""
    async with ah.open_step_store(run=f"{task.store.run} arrivals", on_lost="keep") as arrivals:
        if task.is_chief:
            await arrivals.wait_for(task.num_workers)
        else:
            await arrivals.advance()


async def train_in_processes(options: argparse.Namespace) -> tuple[int, int, float]:
    """Starts them; returns how many steps they made, the last step, and the accuracy of the chief's model."""
    with tempfile.TemporaryDirectory() as directory:  # on several machines: one that all of them see
        # One that dies is started again, and goes on; its sessions end well when they are asked to.
        if options.engine == "ray":
            from aiohooks.distributed import ray

            results = await ray.run(
                work, num_workers=options.workers - 1, args=(directory, options), checkpoint_dir=options.checkpoint_dir
            )
        else:
            from aiohooks.distributed import local

            results = await local.run_processes(
                work,
                num_workers=options.workers - 1,
                args=(directory, options),
                store=options.store,
                checkpoint_dir=options.checkpoint_dir,
            )
    return sum(made for made, _, _ in results), max(step for _, step, _ in results), results[0][2]
