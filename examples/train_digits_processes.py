"""The processes of train_digits.py: chief and workers, each with a copy of the model, with one
global step.

Each process trains its own copy on its own part of the images and does not wait for the others.
Every few steps a worker writes its weights into a shared directory and takes the mean that it finds
there. The chief computes that mean, of its own weights and those of all workers, and continues with
it. So there is one model: the chief's is saved, evaluated and restored. A worker that dies leaves
its last weights, and one that is restarted begins with the mean. If every worker averaged for
itself, there would be as many models as workers.
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

EXCHANGE_EVERY = 25  # steps of this process


class Averaging(ah.SessionRunHook):
    """Writes the weights of this process and reads the mean of all, which the chief computes."""

    def __init__(self, directory: Path, task: Task) -> None:
        self.task = task
        self.own = directory / f"weights-{task.task_id}.npy"
        self.mean = directory / "mean.npy"
        self.runs = 0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        await self.take_mean(session)

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        self.runs += 1
        if self.runs % EXCHANGE_EVERY == 0:
            await self.exchange(run_context.session)

    async def end(self, session: ah.Session) -> None:
        await self.exchange(session)

    async def exchange(self, session: ah.Session) -> None:
        weights = session.variables.snapshot()["weights"]
        await asyncio.to_thread(write_weights, self.own, weights)
        if self.task.is_chief:
            all_weights = await asyncio.to_thread(
                lambda: [np.load(file) for file in self.own.parent.glob("weights-*.npy")]
            )
            await asyncio.to_thread(write_weights, self.mean, np.mean(all_weights, axis=0))
        await self.take_mean(session)

    async def take_mean(self, session: ah.Session) -> None:
        if self.mean.exists():
            # This runs between two steps, so no step sees half of the new weights.
            session.variables.assign({"weights": await asyncio.to_thread(np.load, self.mean)})


def write_weights(file: Path, weights: Array) -> None:
    """Replace the file, so that readers see either the old weights or the new ones."""
    temporary = file.with_suffix(f".{os.getpid()}")
    with temporary.open("wb") as opened:
        np.save(opened, weights)
    temporary.replace(file)


async def work(task: Task, directory: str, options: argparse.Namespace) -> tuple[int, int, float]:
    """Run one process; return the number of its steps, the last global step and, for the chief, the
    accuracy.
    """
    show_log()
    images, held_out = load_images(options.seed)
    part = {name: array[task.task_id :: options.workers] for name, array in images.items()}
    await wait_for_all(task)
    graph, variables = build_graph(), ah.Variables()
    hooks: list[ah.SessionRunHook] = [Averaging(Path(directory), task)]
    if task.is_chief:
        hooks += hooks_of_the_chief(options)
        # Becomes the leader of the store, and restores the newest checkpoint.
        chief = ah.ChiefSessionCreator(
            graph, checkpoint_dir=task.checkpoint_dir, global_step=task.store, variables=variables
        )
        steps = await train(task.task_id, chief, hooks, part, options)
        return (
            steps,
            task.store.latest.step,
            await ah.Session(graph, variables=variables).run("accuracy", held_out),
        )
    # Waits until the chief has its model; the worker's own variables start with the mean, if there
    # is one.
    steps = await train(
        task.task_id, ah.WorkerSessionCreator(graph, global_step=task.store), hooks, part, options
    )
    return steps, task.store.latest.step, 0.0


async def wait_for_all(task: Task) -> None:
    """Let the chief wait until all processes run, or the time of their imports would decide when
    they start.
    """
    async with ah.open_step_store(run=f"{task.store.run} arrivals", on_lost="keep") as arrivals:
        if task.is_chief:
            await arrivals.wait_for(task.num_workers)
        else:
            await arrivals.advance()


async def train_in_processes(options: argparse.Namespace) -> tuple[int, int, float]:
    """Run all processes; return the number of steps, the last step and the accuracy of the chief's
    model.
    """
    with tempfile.TemporaryDirectory() as directory:  # on several machines: a shared one
        # The launcher restarts a process that dies; when it ends one, the sessions stop cleanly.
        if options.engine == "ray":
            import ray

            from aiohooks.distributed.ray import run

            # With room for all tasks. For an existing cluster, give its address.
            ray.init(address="local", num_cpus=options.workers, include_dashboard=False)
            results = await run(
                work,
                num_workers=options.workers - 1,
                args=(directory, options),
                checkpoint_dir=options.checkpoint_dir,
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
    return sum(steps for steps, _, _ in results), max(step for _, step, _ in results), results[0][2]
