"""Asynchronous reinforcement learning on real images of digits: rollouts overlap training, no item older than a bound.

A contextual bandit on scikit-learn's 1,797 digits: the policy sees an image, names a digit, and is told only whether that was
right. Rollout coroutines act with the newest weights; a trainer learns from what they did and publishes a version a step.
While rollouts are under way the weights move on: how many versions at most is the lag bound. The latency of a rollout is
SIMULATED, a sleep in place of a slow model: 4 ms, but one in ten takes 32. So the speeds below are those of the sleeps;
what is real is the data, the learning, and that no item is ever used beyond the bound.

In each run one worker crashes half-way: the session goes back to its newest checkpoint, all workers begin anew, and what was
made before is refused. The learning rate and the clip were chosen by the validation images, with seeds 0 to 2;
the test images are looked at once, after each run.

Usage: python examples/async_rl_digits.py [--plot docs/async-rl-digits.png]   (see --help)
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


def shares(images: Array, weights: Array) -> Array:
    """The policy: for each image how likely it names each of the ten digits."""
    scores = images @ weights
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely: Array = powers / powers.sum(axis=1, keepdims=True)
    return likely


def build_graph() -> ah.Graph:
    """The trainer's model: a step of policy gradient, from what was done by weights that may be some versions old."""
    graph = ah.Graph()
    for name in ("images", "digits", "actions", "rewards", "chances"):
        graph.placeholder(name)
    graph.variable("weights", np.zeros((65, 10)))

    @graph.operation
    def probabilities(images: Array, weights: Array) -> Array:
        return shares(images, weights)

    @graph.operation
    def accuracy(probabilities: Array, digits: Array) -> float:
        return float((probabilities.argmax(axis=1) == digits).mean())

    @graph.train_op(adds_to="weights")
    def train(images: Array, actions: Array, rewards: Array, chances: Array, probabilities: Array) -> Array:
        taken = np.eye(10)[actions]
        # What these weights would do more often than those that acted counts for more, up to a limit.
        ratio = np.minimum((probabilities * taken).sum(axis=1) / chances, CLIP)
        surprise = rewards - chances  # the reward against how sure the policy was: the right digit, doubted, teaches most
        gradient: Array = images.T @ ((ratio * surprise)[:, None] * (taken - probabilities)) / len(images)
        return LEARNING_RATE * gradient

    return graph


class Rollouts(ah.SessionRunHook):
    """Makes experience in background tasks of the session, and feeds each training step with it."""

    def __init__(self, data: Feeds, bound: int, seed: int, options: argparse.Namespace) -> None:
        """Takes the images to act on."""
        self.data, self.bound, self.seed, self.options = data, bound, seed, options
        self.crash_at = options.steps * ITEMS_PER_VERSION * 7 // 12
        self.crashed_at = self.went_on_from = 0
        self.done: asyncio.Queue[tuple[ah.version_gate.Ticket, Feeds]] = asyncio.Queue()  # the gate keeps it short
        self.lags: list[int] = []
        self.waited_secs = 0.0

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        """Starts the workers; once more after a recovery, which has ended the old ones."""
        versions = session.global_step  # a step of the trainer publishes a version
        if not self.crashed_at:
            self.gate = ah.VersionGate(versions, max_lag=self.bound, per_version=ITEMS_PER_VERSION)
        self.went_on_from = versions.latest.step
        self.coord = coord
        for number in range(self.options.workers):
            coord.start_soon(self.roll_out, session.variables, coord, [self.seed, self.went_on_from, number])

    async def roll_out(self, variables: ah.Variables, coord: ah.Coordinator, seed: list[int]) -> None:
        """One worker: acts, waits for the reward, and hands both over, until the stop."""
        rng = np.random.default_rng(seed)
        while True:
            # Waits here while it would be too far ahead. A crash, or a cancellation, gives the place to another worker.
            async with self.gate.admit(until=coord.until) as ticket:
                weights = variables.snapshot()["weights"]  # of ticket.version: nothing was awaited since
                chosen = rng.integers(0, len(self.data["images"]), IMAGES_PER_ITEM)
                images, digits = self.data["images"][chosen], self.data["digits"][chosen]
                likely = shares(images, weights)
                actions = (likely.cumsum(axis=1) > rng.random((IMAGES_PER_ITEM, 1))).argmax(axis=1)
                await asyncio.sleep(LATENCY_SECS * (TAIL_FACTOR if rng.random() < TAIL_SHARE else 1))
                if ticket.number == self.crash_at:
                    self.crashed_at = self.gate.versions.latest.step
                    raise ah.AbortedError("injected: the worker crashed")  # a kind of error that sessions recover from
                rewards = (actions == digits).astype(float)
                chances = likely[np.arange(IMAGES_PER_ITEM), actions]
                item = {"images": images, "actions": actions, "rewards": rewards, "chances": chances}
                self.done.put_nowait((ticket.hand_on(), item))

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        """Takes what comes, in whatever order, until it is enough for a step."""
        began = time.perf_counter()
        items: list[Feeds] = []
        while len(items) < ITEMS_PER_VERSION or (self.options.wait and self.gate.due):
            ticket, item = await self.coord.until(self.done.get())
            if ticket.use():  # no: it took so long that it is too old, or it is of the generation before the crash
                items.append(item)
                self.lags.append(run_context.global_step - 1 - ticket.version)  # counted here, not by the gate
        self.waited_secs += time.perf_counter() - began
        return ah.SessionRunArgs(None, {name: np.concatenate([item[name] for item in items]) for name in items[0]})


@dataclasses.dataclass
class Result:
    """What came out of one run."""

    bound: int
    seed: int
    accuracy: float
    steps_per_sec: float
    waiting: float
    lags: list[int]
    refused: int
    crash: tuple[int, int]  # the step at which it was, and the one from which it went on
    curve: list[tuple[float, float]]  # seconds, accuracy on the validation images


async def train(bound: int, seed: int, options: argparse.Namespace) -> Result | None:
    """One run: trains, evaluates on the way, goes on after the crash, looks at the test images; None if Ctrl-C ended it."""
    training, validation, test = load_images(seed)
    graph, variables, versions = build_graph(), ah.Variables(), ah.MemoryStepStore(run="policy")
    rollouts = Rollouts(training, bound, seed, options)
    curve: list[tuple[float, float]] = []
    runs = 0

    async def evaluate(evaluation: ah.hooks.Evaluation) -> dict[str, float]:
        return {"accuracy": await evaluation.run("accuracy", validation)}

    def note(step: int, result: dict[str, float]) -> None:
        curve.append((time.perf_counter() - began, result["accuracy"]))

    with tempfile.TemporaryDirectory() as directory:
        hooks: list[ah.SessionRunHook] = [
            rollouts,
            ah.StopAtStepHook(last_step=options.steps),
            ah.EvaluatorHook(evaluate, every=ah.Every(steps=20), on_result=note),
            ah.CheckpointSaverHook(every=ah.Every(steps=20)),  # where the chief restores from
        ]
        chief = ah.ChiefSessionCreator(graph, checkpoint_dir=directory, global_step=versions, variables=variables)
        recovery = ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=0.01))
        began = time.perf_counter()
        async with ah.AsyncMonitoredSession(chief, hooks, recovery=recovery, handle_signals=True) as session:
            async for _ in session.steps("train"):
                runs += 1
            secs = time.perf_counter() - began
    if versions.latest.step < options.steps:
        return None

    accuracy = await ah.Session(graph, global_step=versions, variables=variables).run("accuracy", test)
    gate = rollouts.gate.statistics()
    assert gate.lag_max == max(rollouts.lags) <= bound  # what the gate promises
    refused, crash = gate.too_old + gate.outdated, (rollouts.crashed_at, rollouts.went_on_from)
    return Result(bound, seed, accuracy, runs / secs, rollouts.waited_secs / secs, rollouts.lags, refused, crash, curve)


def load_images(seed: int) -> tuple[Feeds, Feeds, Feeds]:
    """Images to train on (60 %), for the validation and for the test (20 % each); no image is in two of them."""
    from sklearn.datasets import load_digits  # takes a second to import, which --help need not wait for
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    images = np.hstack([pixels / 16, np.ones((len(pixels), 1))])  # the ones make the last row of weights the bias
    images, test_images, digits, test_digits = train_test_split(images, digits, test_size=0.2, stratify=digits, random_state=seed)
    split = train_test_split(images, digits, test_size=0.25, stratify=digits, random_state=seed)
    parts = (split[0], split[2]), (split[1], split[3]), (test_images, test_digits)
    training, validation, test = ({"images": images, "digits": digits} for images, digits in parts)
    return training, validation, test


HEADER = "lag bound   seed   accuracy   steps/s   trainer waiting   mean lag   max lag   refused   crash at, went on from"


def row(bound: int, seed: object, results: list[Result]) -> str:
    """One line of the table: a run, or the mean of several (of the maximum lag, the maximum)."""
    lags = [lag for one in results for lag in one.lags]

    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in results)

    crash = "" if len(results) > 1 else f"{results[0].crash[0]:8}, {results[0].crash[1]}"
    return (
        f"{bound:9}   {seed!s:>4}   {mean('accuracy'):8.3f}   {mean('steps_per_sec'):7.0f}   {mean('waiting'):15.0%}   "
        f"{statistics.fmean(lags):8.2f}   {max(lags):7}   {mean('refused'):7.0f}   {crash}"
    )


def plot(results: list[Result], path: str) -> None:
    """Draws the picture of the docs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    bounds = sorted({one.bound for one in results})
    colours = dict(zip(bounds, plt.colormaps["viridis"](np.linspace(0.1, 0.75, len(bounds))), strict=True))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.3), width_ratios=[1.4, 1, 1.3], layout="constrained")
    for place, bound in enumerate(bounds):
        runs, colour = [one for one in results if one.bound == bound], colours[bound]
        for one in runs:
            left.plot(*zip(*one.curve, strict=True), color=colour, label=f"at most {bound}" if one is runs[0] else None)
        millis = statistics.fmean(1_000 / one.steps_per_sec for one in runs)
        waiting = statistics.fmean(1_000 / one.steps_per_sec * one.waiting for one in runs)
        middle.bar(place, waiting, 0.6, color=colour, alpha=0.35)
        middle.bar(place, millis - waiting, 0.6, bottom=waiting, color=colour)
        middle.text(place, millis, f"{waiting / millis:.0%}", ha="center", va="bottom", fontsize=9)
        lags = [lag for one in runs for lag in one.lags]
        parts = [lags.count(lag) / len(lags) for lag in range(max(bounds) + 1)]
        width = 0.8 / len(bounds)
        right.bar(np.arange(len(parts)) + (place - (len(bounds) - 1) / 2) * width, parts, width, color=colour)
    left.set(title="Accuracy on validation images", xlabel="seconds", ylim=(0.4, 1))
    left.legend(loc="lower right", frameon=False, title="lag bound")
    middle.set(title="Milliseconds a step (pale: waiting)", xlabel="lag bound")
    middle.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
    middle.margins(x=0.12, y=0.12)
    right.set(title="Lag of the items that were used", xlabel="versions published since the rollout began", ylabel="share")
    right.set_xticks(range(max(bounds) + 1))
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(path, dpi=110)


async def main(options: argparse.Namespace) -> int | None:
    """All bounds with all seeds, one after the other; the exit code is `aiohooks.run`'s to know after a signal."""
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
        print("\nover the seeds\n" + HEADER)
        for bound in options.bounds:
            print(row(bound, "all", [one for one in results if one.bound == bound]))
    if options.plot:
        plot(results, options.plot)
    return 0


def parse_options() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Asynchronous reinforcement learning with bounds on the lag.")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4], help="how many versions old an item may be (0 1 4)")
    parser.add_argument("--seeds", type=int, default=3, help="how many runs for each bound (3)")
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run (200)")
    parser.add_argument("--workers", type=int, default=32, help="rollout coroutines (32)")
    parser.add_argument("--wait", action="store_true", help="wait for items that are due, so that none is refused for its age")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture of it, with matplotlib")
    options = parser.parse_args()
    if min(options.bounds) < 0:
        parser.error(f"--bounds has {min(options.bounds)}: give whole numbers, 0 or more")
    for name, least in {"seeds": 1, "steps": 50, "workers": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}: give {least} or more")
    return options


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, stream=sys.stdout, format="%(message)s")
    status: int | None = 130  # what a shell says of a program that Ctrl-C ended
    with contextlib.suppress(KeyboardInterrupt):  # while no session was open
        status = ah.run(main, parse_options())
    sys.exit(status)
