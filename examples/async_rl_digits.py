"""Asynchronous reinforcement learning on images of digits: rollouts overlap training, and no item
is older than a bound.

The task is a contextual bandit on scikit-learn's 1,797 digits: the policy sees an image, names a
digit, and learns only whether that was right. Rollout coroutines act with the newest weights; a
trainer learns from their results, and each of its steps publishes a version of the weights. While a
rollout runs, more versions are published; the lag bound is how many at most. The latency of a
rollout is SIMULATED, by a sleep in place of a slow model: 4 ms, but 32 ms for one in ten. So the
speeds in the table are those of the sleeps; the data, the training and the bound on the lag are
real.

In each run one worker crashes half-way: the session recovers from its newest checkpoint, all
workers start again, and items made before the crash are refused. The learning rate and the clip
were chosen with the validation images and seeds 0 to 2; the test images are used once, after each
run.

Usage: python examples/async_rl_digits.py   (see --help)
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import statistics
import sys
import tempfile
import time

import numpy as np
import numpy.typing as npt

import aiohooks as ah

LEARNING_RATE = 2.0
CLIP = 2.0
IMAGES_PER_ITEM = 16
ITEMS_PER_VERSION = 8
LATENCY_SECS, TAIL_SHARE, TAIL_FACTOR = 0.004, 0.1, 8  # simulated

Array = npt.NDArray[np.float64]
Feeds = dict[str, Array]


def policy(images: Array, weights: Array) -> Array:
    """Return, for each image, the probability of each of the ten digits."""
    scores = images @ weights
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities: Array = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def build_graph() -> ah.Graph:
    """Build the trainer's model: a policy gradient step on items made with weights that may be some
    versions old.
    """
    graph = ah.Graph()
    for name in ("images", "digits", "actions", "rewards", "chances"):
        graph.placeholder(name)
    graph.variable("weights", np.zeros((65, 10)))

    @graph.operation
    def probabilities(images: Array, weights: Array) -> Array:
        return policy(images, weights)

    @graph.operation
    def accuracy(probabilities: Array, digits: Array) -> float:
        return float((probabilities.argmax(axis=1) == digits).mean())

    @graph.train_op(adds_to="weights")
    def train(
        images: Array, actions: Array, rewards: Array, chances: Array, probabilities: Array
    ) -> Array:
        taken = np.eye(10)[actions]
        # Actions that are more likely now than when they were taken count for more, up to a limit.
        ratio = np.minimum((probabilities * taken).sum(axis=1) / chances, CLIP)
        advantage = (
            rewards - chances
        )  # the reward minus its probability: most is learned from a right but unlikely digit
        gradient: Array = (
            images.T @ ((ratio * advantage)[:, None] * (taken - probabilities)) / len(images)
        )
        return LEARNING_RATE * gradient

    return graph


class Rollouts(ah.SessionRunHook):
    """Makes items in background tasks of the session, and feeds each training step with them."""

    def __init__(self, data: Feeds, bound: int, seed: int, options: argparse.Namespace) -> None:
        self.data, self.bound, self.seed, self.options = data, bound, seed, options
        self.crash_at = options.steps * ITEMS_PER_VERSION * 7 // 12
        self.crashed_at = self.continued_from = 0
        self.done: asyncio.Queue[tuple[ah.version_gate.Ticket, Feeds]] = (
            asyncio.Queue()
        )  # the gate bounds its length
        self.lags: list[int] = []
        self.waited_secs = 0.0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        """Start the workers, and start them again after a recovery, which has ended them."""
        versions = session.global_step  # each step of the trainer publishes a version
        if not self.crashed_at:
            self.gate = ah.version_gate.VersionGate(
                versions, max_lag=self.bound, per_version=ITEMS_PER_VERSION
            )
        self.continued_from = versions.latest.step
        self.coord = coord
        for number in range(self.options.workers):
            coord.start_soon(
                self.roll_out, session.variables, coord, [self.seed, self.continued_from, number]
            )

    async def roll_out(
        self, variables: ah.Variables, coord: ah.Coordinator, seed: list[int]
    ) -> None:
        """Run one worker until the stop: act, wait for the reward, and hand the item over."""
        rng = np.random.default_rng(seed)
        while True:
            # Waits while it would be too far ahead. After a crash, or a cancellation, another
            # worker gets the place.
            async with self.gate.admit(until=coord.until) as ticket:
                weights = variables.snapshot()[
                    "weights"
                ]  # of ticket.version, since nothing was awaited in between
                chosen = rng.integers(0, len(self.data["images"]), IMAGES_PER_ITEM)
                images, digits = self.data["images"][chosen], self.data["digits"][chosen]
                likely = policy(images, weights)
                actions = (likely.cumsum(axis=1) > rng.random((IMAGES_PER_ITEM, 1))).argmax(axis=1)
                await asyncio.sleep(
                    LATENCY_SECS * (TAIL_FACTOR if rng.random() < TAIL_SHARE else 1)
                )
                if ticket.number == self.crash_at:
                    self.crashed_at = self.gate.versions.latest.step
                    raise ah.AbortedError(
                        "injected: the worker crashed"
                    )  # sessions recover from this error
                rewards = (actions == digits).astype(float)
                chances = likely[np.arange(IMAGES_PER_ITEM), actions]
                item = {
                    "images": images,
                    "actions": actions,
                    "rewards": rewards,
                    "chances": chances,
                }
                self.done.put_nowait((ticket.hand_off(), item))

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        """Take items, in the order in which they are done, until there are enough for a step."""
        began = time.perf_counter()
        items: list[Feeds] = []
        while len(items) < ITEMS_PER_VERSION or (self.options.wait and self.gate.due):
            ticket, item = await self.coord.until(self.done.get())
            if ticket.use():  # false if the item is too old, or was made before the crash
                items.append(item)
                self.lags.append(
                    run_context.global_step - 1 - ticket.version
                )  # counted here, to check the gate
        self.waited_secs += time.perf_counter() - began
        return ah.SessionRunArgs(
            None, {name: np.concatenate([item[name] for item in items]) for name in items[0]}
        )


@dataclasses.dataclass
class Result:
    """The results of one run."""

    bound: int
    seed: int
    accuracy: float
    steps_per_sec: float
    waiting: float
    lags: list[int]
    refused: int
    crash: tuple[int, int]  # the step of the crash, and the one from which the run continued


async def train(bound: int, seed: int, options: argparse.Namespace) -> Result | None:
    """Run one training, with evaluations and a crash, and test it; return None if Ctrl-C ended
    it.
    """
    training, validation, test = load_images(seed)
    graph, variables, versions = build_graph(), ah.Variables(), ah.MemoryStepStore(run="policy")
    rollouts = Rollouts(training, bound, seed, options)
    runs = 0

    async def evaluate(evaluation: ah.hooks.Evaluation) -> dict[str, float]:
        return {"accuracy": await evaluation.run("accuracy", validation)}

    with tempfile.TemporaryDirectory() as directory:
        hooks: list[ah.SessionRunHook] = [
            rollouts,
            ah.StopAtStepHook(last_step=options.steps),
            ah.hooks.EvaluatorHook(evaluate, every=ah.Every(steps=20)),
            ah.CheckpointSaverHook(every=ah.Every(steps=20)),  # the chief restores from these
        ]
        chief = ah.ChiefSessionCreator(
            graph, checkpoint_dir=directory, global_step=versions, variables=variables
        )
        recovery = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0.01))
        began = time.perf_counter()
        async with ah.AsyncMonitoredSession(
            chief, hooks, recovery=recovery, handle_signals=True
        ) as session:
            async for _ in session.steps("train"):
                runs += 1
            secs = time.perf_counter() - began
    if versions.latest.step < options.steps:
        return None

    accuracy = await ah.Session(graph, global_step=versions, variables=variables).run(
        "accuracy", test
    )
    gate = rollouts.gate.statistics()
    assert gate.lag_max == max(rollouts.lags) <= bound  # the promise of the gate
    refused, crash = gate.stale + gate.invalidated, (rollouts.crashed_at, rollouts.continued_from)
    return Result(
        bound,
        seed,
        accuracy,
        runs / secs,
        rollouts.waited_secs / secs,
        rollouts.lags,
        refused,
        crash,
    )


def load_images(seed: int) -> tuple[Feeds, Feeds, Feeds]:
    """Return the images to train on (60 %), for validation and for the test (20 % each)."""
    from sklearn.datasets import (
        load_digits,
    )  # imported here, because it takes a second and --help does not need it
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    images = np.hstack(
        [pixels / 16, np.ones((len(pixels), 1))]
    )  # the column of ones makes the last row of weights the bias
    images, test_images, digits, test_digits = train_test_split(
        images, digits, test_size=0.2, stratify=digits, random_state=seed
    )
    split = train_test_split(images, digits, test_size=0.25, stratify=digits, random_state=seed)
    parts = (split[0], split[2]), (split[1], split[3]), (test_images, test_digits)
    training, validation, test = ({"images": images, "digits": digits} for images, digits in parts)
    return training, validation, test


HEADER = (
    "lag bound   seed   accuracy   steps/s   trainer waiting   mean lag   max lag   refused   crash"
    " at, continued from"
)


def row(bound: int, seed: object, results: list[Result]) -> str:
    """Return a row of the table: one run, or the mean of several (for the maximum lag, the
    maximum).
    """
    lags = [lag for one in results for lag in one.lags]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in results)

    crash = "" if len(results) > 1 else f"{results[0].crash[0]:8}, {results[0].crash[1]}"
    return (
        f"{bound:9}   {seed!s:>4}   {mean('accuracy'):8.3f}   {mean('steps_per_sec'):7.0f}  "
        f" {mean('waiting'):15.0%}   {statistics.fmean(lags):8.2f}   {max(lags):7}  "
        f" {mean('refused'):7.0f}   {crash}"
    )


async def main(options: argparse.Namespace) -> int | None:
    """Run all bounds with all seeds; return the exit code, or None after a signal, when
    `aiohooks.run` sets it.
    """
    results: list[Result] = []
    print(HEADER)
    for bound in options.bounds:
        for seed in range(options.seeds):
            result = await train(bound, seed, options)
            if result is None:
                return None
            results.append(result)
            print(row(bound, seed, results[-1:]), flush=True)
    if options.seeds > 1:
        print("\nmeans over the seeds\n" + HEADER)
        for bound in options.bounds:
            print(row(bound, "all", [one for one in results if one.bound == bound]))
    return 0


def parse_options() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description="Asynchronous reinforcement learning with bounds on the lag."
    )
    parser.add_argument(
        "--bounds",
        type=int,
        nargs="+",
        default=[0, 1, 4],
        help="the lag bounds to run with (0 1 4)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs for each bound (3)")
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run (200)")
    parser.add_argument("--workers", type=int, default=32, help="rollout coroutines (32)")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for items that are due, so that none is refused for its age",
    )
    options = parser.parse_args()
    if min(options.bounds) < 0:
        parser.error(f"--bounds has {min(options.bounds)}: give whole numbers, 0 or more")
    for name, least in {"seeds": 1, "steps": 50, "workers": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}: give {least} or more")
    return options


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, stream=sys.stdout, format="%(message)s")
    status: int | None = 130  # the exit code of a shell for a program that Ctrl-C ended
    with contextlib.suppress(KeyboardInterrupt):  # while no session was open
        status = ah.run(main, parse_options())
    sys.exit(status)
