"""Train a small network of PyTorch on images of digits, with all that a training loop wants (see
--help).

Batches are drawn in a thread while the step computes in another. Every --every steps the network is
evaluated beside the training, and with --checkpoint-dir a checkpoint is written beside it. Training
stops when --patience evaluations in a row were no better, and ends with the best weights. A run
that was killed and started again ends with exactly the weights of one that was
not: the checkpoint has the network, its optimizer and scheduler, the place in the data, the best
weights so far and the state of all random generators.

Usage: pip install '.[examples,torch]', then python examples/train_torch.py
"""

import argparse
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import aiohooks as ah

WANTED_ACCURACY = 0.95  # of a whole training; one that was cut short may have less
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Batch = tuple[Tensor, Tensor]


class Training:
    """The network, and all that changes it."""

    def __init__(self, steps: int) -> None:
        self.model = new_network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on one batch. Called in a thread, so the event loop stays free."""
        images, labels = batch
        with torch.autocast(
            DEVICE.type, dtype=torch.bfloat16
        ):  # has the range of float32, so no loss needs a scale
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return {"loss": loss.item(), "rate": float(self.scheduler.get_last_lr()[0])}

    def weights(self) -> dict[str, Tensor]:
        """Return a copy, which later steps do not change."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def new_network() -> nn.Module:
    """Return the network, not yet trained."""
    layers = (
        nn.Linear(64, 128),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(128, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )
    return nn.Sequential(*layers).to(DEVICE)


class Batches:
    """Shuffled batches, one epoch after the other. Its state is where the next batch begins."""

    def __init__(self, images: Tensor, labels: Tensor, size: int, seed: int) -> None:
        self.images, self.labels, self.size, self.seed = images, labels, size, seed
        self.load_state_dict({"epoch": 0, "place": 0})

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.place + self.size > len(self.order):
            self.load_state_dict({"epoch": self.epoch + 1, "place": 0})
        chosen = self.order[self.place : self.place + self.size]
        self.place += self.size
        return self.images[chosen].to(DEVICE), self.labels[chosen].to(DEVICE)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        generator = torch.Generator().manual_seed(
            self.seed * 1_000_003 + self.epoch
        )  # of its own: it draws beside the steps
        self.order = torch.randperm(len(self.labels), generator=generator)


class Examination:
    """Measures weights on the images that are held out, with a network of its own."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.network = new_network().eval()
        self.images, self.labels = images.to(DEVICE), labels.to(DEVICE)

    def evaluate(self, evaluation: ah.hooks.Evaluation) -> dict[str, Any]:
        """Return the accuracy of the weights that were current when the evaluation was due. Called
        in a thread.
        """
        self.network.load_state_dict(evaluation.snapshot)
        with torch.inference_mode():
            found = self.network(self.images).argmax(dim=1)
        return {
            "accuracy": (found == self.labels).double().mean().item(),
            "weights": evaluation.snapshot,
        }


def load_images(seed: int) -> tuple[Batch, Batch]:
    """Return the images to train on, and a quarter that is held out from training."""
    from sklearn.datasets import (
        load_digits,
    )  # imported here, because it takes a second and --help does not need it
    from sklearn.model_selection import train_test_split

    pixels, digits = load_digits(return_X_y=True)
    split = train_test_split(
        pixels / 16, digits, test_size=0.25, stratify=digits, random_state=seed
    )
    images, held_out = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    labels, answers = (torch.tensor(part, dtype=torch.long) for part in split[2:])
    return (images, labels), (held_out, answers)


async def main(options: argparse.Namespace) -> int | None:
    """Train, and return the exit code, or None after a signal, when `aiohooks.run` sets it."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(options.seed)
    torch.set_num_threads(1)  # this network is too small for more
    images, held_out = load_images(options.seed)
    training, examination = Training(options.steps), Examination(*held_out)
    batches = Batches(*images, size=64, seed=options.seed)

    # Evaluations and checkpoints at the same steps: one that is not finished at a kill is repeated
    # with the same weights.
    every = ah.Every(steps=options.every)
    stopping = ah.hooks.EarlyStoppingHook(
        "accuracy",
        mode="max",
        patience=options.patience,
        every=None,
        restore_best={"model": training.model},
    )

    def report(step: int, result: dict[str, Any]) -> None:
        if stopping.reason is None:  # how many steps follow until the stop depends on the machine
            stopping.report(step, result, {"model": result["weights"]})

    evaluator = ah.hooks.EvaluatorHook(
        ah.in_thread(examination.evaluate),
        every=every,
        mode="background",
        snapshot=training.weights,
        on_result=report,
        max_results=1,
        at_end=False,
    )
    hooks: list[ah.SessionRunHook] = [
        ah.StopAtStepHook(last_step=options.steps),
        ah.NanHook("loss"),
        ah.LoggingHook({"loss": "loss"}, every=every),
        evaluator,
        stopping,
    ]
    if options.records is not None:
        hooks.append(ah.hooks.JSONLinesHook(options.records, ["loss", "rate"]))
    if options.checkpoint_dir is not None:
        hooks.append(ah.CheckpointSaverHook(every=every))
    tracked: dict[str, ah.checkpoint.Stateful] = {
        "model": training.model,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "data": batches,
        "random": ah.checkpoint.RandomState(),  # dropout draws from the generator of torch
    }
    creator = ah.ChiefSessionCreator(
        ah.in_thread(training.step),
        scaffold=ah.Scaffold(tracked=tracked),
        checkpoint_dir=options.checkpoint_dir,
    )
    async with ah.AsyncMonitoredSession(creator, hooks, handle_signals=True) as session:
        if first := session.global_step.latest.step:
            print(
                f"continuing from step {first}, the newest checkpoint in {options.checkpoint_dir}",
                flush=True,
            )
        async for _ in session.steps("loss", feeds=batches, prefetch=2, thread=True):
            pass

    print(f"{session.stop_reason}, after {batches.epoch} epochs")
    if session.stop_signal is not None:
        return None
    accuracy = stopping.best or 0.0
    print(
        f"accuracy on {len(held_out[1])} held-out images: {accuracy:.3f}, with the weights of step"
        f" {stopping.best_step}"
    )
    if accuracy < WANTED_ACCURACY and options.steps >= 1000:
        print(f"the accuracy is below {WANTED_ACCURACY}: something is wrong", file=sys.stderr)
        return 1
    return 0


def parse_options() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description="Train a network of PyTorch on images of digits.")
    parser.add_argument("--steps", type=int, default=2_000, help="the last global step (2000)")
    parser.add_argument(
        "--every",
        type=int,
        default=100,
        metavar="STEPS",
        help="steps between two evaluations and checkpoints (100)",
    )
    parser.add_argument(
        "--patience",
        type=int,
        default=8,
        help="stop after so many evaluations without a better one (8)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights, the split and the batches (0)"
    )
    parser.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="save checkpoints there, and continue from the newest (none)",
    )
    parser.add_argument(
        "--records", metavar="FILE", help="write the loss of each step as JSON lines (no file)"
    )
    options = parser.parse_args()
    for name in ("steps", "every", "patience"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: give a number of 1 or more")
    return options


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        status: int | None = ah.run(main, parse_options())
    except (
        ah.errors.CheckpointError
    ) as error:  # the directory is in use or damaged, or the disk is full: the message says it
        print(error, file=sys.stderr)
        status = 1
    sys.exit(status)
