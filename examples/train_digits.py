"""Train on images of digits: a chief and its workers in one event loop, with one model and one
global step (see --help).

The model is a softmax regression on scikit-learn's 1,797 digits. Each worker has its own session
and its own part of the images; all share one `Variables` (the model) and one `MemoryStepStore` (the
global step). Worker i starts at step int(K * log(i + 1)). On a terminal one line shows the
progress; elsewhere (a pipe, a file) hooks write log lines. Ctrl-C stops every worker after its
current step; the accuracy is printed and the exit code is 130. A second Ctrl-C cancels the step,
and a third one ends the process immediately.

With --processes each worker is a process with a copy of the model (see train_digits_processes.py).
--store is the URL of their step store, and --engine ray starts them on a Ray cluster.

With --checkpoint-dir the chief saves the model, and a new run continues from the newest checkpoint,
however the last one ended: with one worker, a run that was killed and restarted ends with exactly
the weights of one that was not.
"""

import argparse
import asyncio
import itertools
import logging
import math
import sys
import time

import numpy as np
import numpy.typing as npt

import aiohooks as ah

LEARNING_RATE = 0.5
BATCH_SIZE = 64
ALL_STEPS = 2_000
WANTED_ACCURACY = 0.93  # after ALL_STEPS; fewer steps may give less
INTERRUPTED = 130  # the exit code of a shell for a program that Ctrl-C ended
TERMINAL = sys.stdout.isatty()

Array = npt.NDArray[np.float64]
Feeds = dict[str, Array]  # "images" and "labels"


def build_graph() -> ah.Graph:
    """Build the model. An operation gets its inputs by parameter name, and runs only if a fetch
    needs it.
    """
    graph = ah.Graph()
    graph.placeholder("images")
    graph.placeholder("labels")
    graph.variable("weights", np.zeros((65, 10)))

    @graph.operation
    def probabilities(images: Array, weights: Array) -> Array:
        scores = images @ weights
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares: Array = powers / powers.sum(axis=1, keepdims=True)
        return shares

    @graph.operation
    def loss(probabilities: Array, labels: Array) -> float:
        return float(-np.log((probabilities * labels).sum(axis=1)).mean())

    @graph.operation
    def accuracy(probabilities: Array, labels: Array) -> float:
        return float((probabilities.argmax(axis=1) == labels.argmax(axis=1)).mean())

    # `adds_to` and not `updates`: when two workers run at the same time, both gradients are added.
    @graph.train_op(adds_to="weights")
    def train(images: Array, labels: Array, probabilities: Array) -> Array:
        gradient: Array = images.T @ (probabilities - labels) / len(images)
        return -LEARNING_RATE * gradient

    return graph


async def work(
    number: int,
    graph: ah.Graph,
    steps: ah.StepStore,
    variables: ah.Variables,
    data: Feeds,
    options: argparse.Namespace,
) -> int:
    """Run one worker, or the chief (number 0), on the shared objects; return the number of its
    steps.
    """
    if number:
        worker = ah.WorkerSessionCreator(
            graph, global_step=steps, variables=variables
        )  # waits for the chief to make the model
        return await train(number, worker, [], data, options)
    # Restores the model of the newest checkpoint; without one it starts with the zeros of the
    # graph.
    chief = ah.ChiefSessionCreator(
        graph, checkpoint_dir=options.checkpoint_dir, global_step=steps, variables=variables
    )
    return await train(number, chief, hooks_of_the_chief(options), data, options)


async def train(
    number: int,
    source: ah.session.SessionCreator,
    more_hooks: list[ah.SessionRunHook],
    data: Feeds,
    options: argparse.Namespace,
) -> int:
    """Train until the last step, or Ctrl-C, or until the first step is out of reach; return the
    number of steps.
    """
    name = f"worker {number}" if number else "chief"
    start_at = int(options.k * math.log(number + 1))
    hooks: list[ah.SessionRunHook] = [
        ah.hooks.GlobalStepWaiterHook(start_at),
        ah.StopAtStepHook(last_step=options.steps),
        ah.NanHook("loss"),
        *more_hooks,
    ]
    runs = 0
    # The loop waits for its feeds, so it needs no turns by the clock: the seed alone decides how
    # the workers take turns.
    async with ah.AsyncMonitoredSession(
        source, hooks, handle_signals=True, name=name, yield_secs=None
    ) as session:
        first = session.global_step.latest.step
        if first and not number:
            say(f"continuing from step {first}, the newest checkpoint in {options.checkpoint_dir}")
        batches: asyncio.Queue[Feeds] = asyncio.Queue(maxsize=2)
        # The session owns this task: if it fails, the loop below raises its error instead of
        # waiting indefinitely.
        producer = session.start_soon(
            put_batches, session, batches, data, [options.seed, number], first
        )
        async for step, _ in session.steps(
            ("global_step", "train"), feeds=batches, producer=producer
        ):
            runs += 1
            if runs == 1:
                say(f"{name}: asked to start at step {start_at}, started at step {step}")
    if not runs:
        say(f"{name}: asked to start at step {start_at}, never started")
    say(f"{name}: {runs} steps, stopped because: {session.stop_reason}")
    return runs


def hooks_of_the_chief(options: argparse.Namespace) -> list[ah.SessionRunHook]:
    """Return the hooks that only the chief needs: one task reports, and one saves."""
    hooks: list[ah.SessionRunHook] = []
    if TERMINAL:
        hooks.append(ProgressLine())
    else:
        every = ah.Every(steps=max(1, min(options.steps // 10, 1_000)))
        hooks += [
            ah.LoggingHook({"loss": "loss"}, every=every),
            ah.hooks.StepCounterHook(every=every),
        ]
    if options.checkpoint_dir is not None:
        # This model is small, so the chief waits for the write: a kill loses only the steps after
        # it. For a large model leave `background` out: training continues during the write, and a
        # kill loses the steps since then as well.
        hooks.append(
            ah.CheckpointSaverHook(every=ah.Every(steps=options.checkpoint_every), background=False)
        )
    return hooks


class ProgressLine(ah.SessionRunHook):
    """Writes step, loss and speed over one line of a terminal. If it fails, training continues."""

    on_error = "log"

    def __init__(self) -> None:
        self.timer = ah.Every(secs=0.1).timer()

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        self.timer.start(session.global_step.latest.step)

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        return ah.SessionRunArgs("loss")  # computed in the same run, from the same batch

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        step = run_context.global_step
        if self.timer.due(step):
            secs, steps = self.timer.mark(step)
            speed = f"{steps / secs:,.0f} steps per second"
            print(
                f"\r\x1b[Kstep {step}: loss {run_values.results:.3f}, {speed}", end="", flush=True
            )


async def put_batches(
    session: ah.AsyncMonitoredSession,
    batches: asyncio.Queue[Feeds],
    data: Feeds,
    seed: list[int],
    first: int,
) -> None:
    """Draw batches, two ahead, until the stop. A full queue suspends this task, an empty one the
    worker.

    A batch depends only on its number. With one worker that is the step, so a run that continues
    from a checkpoint gets the same batches as one that was not interrupted.
    """
    for number in itertools.count(first):
        chosen = np.random.default_rng([*seed, number]).integers(0, len(data["images"]), BATCH_SIZE)
        await session.until(batches.put({name: array[chosen] for name, array in data.items()}))


def load_images(seed: int) -> tuple[Feeds, Feeds]:
    """Return the images to train on, and a quarter that is held out from training."""
    from sklearn.datasets import (
        load_digits,
    )  # imported here, because it takes a second and --help does not need it
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    images = np.hstack(
        [pixels / 16, np.ones((len(pixels), 1))]
    )  # the column of ones makes the last row of weights the bias
    split = train_test_split(
        images, np.eye(10)[digits], test_size=0.25, stratify=digits, random_state=seed
    )
    return {"images": split[0], "labels": split[2]}, {"images": split[1], "labels": split[3]}


def say(line: str) -> None:
    """Print a line; on a terminal, over the progress line."""
    print(f"\r\x1b[K{line}" if TERMINAL else line, flush=True)


async def main(options: argparse.Namespace) -> int | None:
    """Train, then evaluate; return the exit code, or None after a signal, when `aiohooks.run` sets
    it.
    """
    data, held_out = load_images(options.seed)
    say(
        f"{len(data['images'])} images to train on, {len(held_out['images'])} held out,"
        f" {options.workers} worker(s)"
    )

    began = time.perf_counter()
    if options.processes:
        from train_digits_processes import train_in_processes

        made, last_step, accuracy = await train_in_processes(options)
    else:
        made, last_step, accuracy = await train_in_one_loop(data, held_out, options)
    secs = time.perf_counter() - began

    say(f"{made} steps in {secs:.2f} s: {made / secs:,.0f} steps per second")
    if last_step > options.steps:
        more = last_step - options.steps
        say(
            f"{more} of them had begun in other workers when step {options.steps} was reached: no"
            " run is cut off"
        )
    say(f"accuracy on {len(held_out['images'])} held-out images: {accuracy:.3f}")
    if last_step < options.steps:
        say(f"interrupted before step {options.steps}")
        return None
    if accuracy < WANTED_ACCURACY and options.steps >= ALL_STEPS:
        print(f"the accuracy is below {WANTED_ACCURACY}: something is wrong", file=sys.stderr)
        return 1
    return 0


async def train_in_one_loop(
    data: Feeds, held_out: Feeds, options: argparse.Namespace
) -> tuple[int, int, float]:
    """Run all workers as tasks of this loop; return the number of steps, the last step and the
    accuracy.
    """
    graph, steps, variables = build_graph(), ah.MemoryStepStore(), ah.Variables()
    async with asyncio.TaskGroup() as group:
        workers: list[asyncio.Task[int]] = []
        for number in range(options.workers):
            part = {name: array[number :: options.workers] for name, array in data.items()}
            workers.append(group.create_task(work(number, graph, steps, variables, part, options)))
    made, last_step = sum(worker.result() for worker in workers), steps.latest.step

    # A raw session has no hooks, and a run without a train operation makes no step.
    accuracy: float = await ah.Session(graph, global_step=steps, variables=variables).run(
        "accuracy", held_out
    )
    return made, last_step, accuracy


def parse_options() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description="Train on images of digits with several workers, in one event loop or not."
    )
    parser.add_argument(
        "--workers", type=int, default=4, help="number of workers, including the chief (4)"
    )
    parser.add_argument(
        "--steps", type=int, default=ALL_STEPS, help=f"the last global step ({ALL_STEPS})"
    )
    parser.add_argument(
        "--k", type=int, default=200, help="worker i starts at step int(K * log(i + 1)) (200)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the split and of the batches (0)"
    )
    parser.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="save checkpoints there, and continue from the newest (none)",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=500,
        metavar="STEPS",
        help="steps between two checkpoints (500)",
    )
    parser.add_argument(
        "--processes",
        action="store_true",
        help="run each worker in a process, with its own copy of the model",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="step store of the processes: redis://host:6379, ... (local files)",
    )
    parser.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="where to start the processes (local)",
    )
    options = parser.parse_args()
    if options.engine == "ray" and options.store is not None:
        parser.error("--engine ray keeps the global step in the cluster: leave out --store")
    options.processes = options.processes or options.engine == "ray" or options.store is not None
    limits = {
        "workers": (1, 100),
        "steps": (1, 10**9),
        "k": (0, 10**9),
        "seed": (0, 2**32 - 1),
        "checkpoint_every": (1, 10**9),
    }
    for name, (least, most) in limits.items():
        if not least <= getattr(options, name) <= most:
            parser.error(
                f"--{name.replace('_', '-')} is {getattr(options, name)}: give a number from"
                f" {least} to {most}"
            )
    return options


def show_log() -> None:
    """Show log lines; on a terminal, which has the progress line, only warnings."""
    level = logging.WARNING if TERMINAL else logging.INFO
    logging.basicConfig(level=level, stream=sys.stdout, format="%(message)s")


if __name__ == "__main__":
    show_log()
    status: int | None = 1
    try:
        status = ah.run(main, parse_options())
    except* KeyboardInterrupt:  # before a session was open
        status = INTERRUPTED
    except* (
        ah.errors.CheckpointError,
        ah.errors.PublisherFailedError,
        ah.errors.StoreUnavailableError,
        ah.errors.TaskDiedError,
    ) as group:
        # The directory is in use or damaged, or the disk is full: the message says it. Workers
        # raise the failure of the chief.
        print(*{str(error) for error in group.exceptions}, sep="\n", file=sys.stderr)
    sys.exit(status)
