"""Rows about PyTorch: a training loop with everything against a bare one, and what a save costs the
training.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohooks as ah
from tests.benchmarks.measure import Counts, Setup, blocking_writes, compared, imported
from tests.benchmarks.rows_checkpoint import opened_training

STEPS = 500
"""Steps from one checkpoint of the loop to the next."""
STEP_SECS = 0.001
"""What a step of the loop takes at least."""
BATCH = 64


@contextlib.contextmanager
def _one_thread(torch: Any) -> Iterator[None]:
    """Compute with one thread, which leaves a core for the write; more make steps of a millisecond
    slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Network:
    """A network and its optimizer."""

    def __init__(self, torch: Any, frozen_bytes: int = 0, batch: int = BATCH) -> None:
        """`frozen_bytes` is the size of a table in it that is not trained, and saved with the
        rest.
        """
        nn, functional = torch.nn, torch.nn.functional
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6
        )  # what has converged has denormal numbers, and is slower
        images, labels = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
        for number in range(frozen_bytes // 2_000_000):
            self.model.register_buffer(f"table{number}", torch.randn(500, 1000))

        def step() -> float:
            loss = functional.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            found: float = loss.item()
            return found

        self.step: Callable[[], float] = step


def batch_of(torch: Any, secs: float) -> int:
    """Return how many examples a step has that takes so long on this machine."""
    batch = BATCH
    while True:
        network, tried = Network(torch, batch=batch), list[float]()
        for _ in range(20):
            began = time.perf_counter()
            network.step()
            tried.append(time.perf_counter() - began)
        if min(tried) >= secs:
            return batch
        batch += BATCH // 2


@asynccontextmanager
async def torch_loop(counts: Counts) -> AsyncIterator[Setup]:
    """A loop with checkpoints, a log and records against one that only trains."""
    torch = imported("torch", "torch")
    with _one_thread(torch):
        batch = batch_of(torch, STEP_SECS)
    bare, trained = Network(torch, batch=batch), Network(torch, batch=batch)
    steps = min(STEPS, 20 * counts.rounds)

    async def train_step() -> dict[str, float]:
        return {"loss": trained.step()}

    async def by_hand(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times * steps):
            bare.step()
        return time.perf_counter() - began

    with _one_thread(torch), tempfile.TemporaryDirectory(prefix="aiohooks-benchmark-") as directory:
        tracked: dict[str, Any] = {
            "model": trained.model,
            "optimizer": trained.optimizer,
            "random": ah.checkpoint.RandomState(),
        }
        creator = ah.ChiefSessionCreator(
            train_step, scaffold=ah.Scaffold(tracked=tracked), checkpoint_dir=f"{directory}/run"
        )
        hooks = [
            ah.CheckpointSaverHook(every=ah.Every(steps=STEPS)),
            ah.LoggingHook({"loss": "loss"}, every=ah.Every(steps=100)),
            ah.hooks.JSONLinesHook(f"{directory}/loss.jsonl", ["loss"], every=ah.Every(steps=10)),
            ah.NanHook("loss"),
        ]
        async with ah.AsyncMonitoredSession(creator, hooks) as session:

            async def in_session(times: int) -> float:
                began = time.perf_counter()
                for _ in range(times * steps):
                    await session.run("loss")
                return time.perf_counter() - began

            yield compared(
                "500 steps of 1 ms in torch, with a checkpoint, log and records / the bare loop",
                1.1,
                in_session,
                by_hand,
                most_times=1,
                most_rounds=15,
            )


@asynccontextmanager
async def torch_checkpoint(counts: Counts) -> AsyncIterator[Setup]:
    """Training time lost to a save of a module and its optimizer, against a blocking `torch.save`
    of them.
    """
    torch = imported("torch", "torch")
    network = Network(torch, counts.checkpoint_bytes)
    graph = ah.Graph()

    @graph.train_op
    def train() -> float:
        return network.step()

    def state() -> dict[str, Any]:
        return {"model": network.model.state_dict(), "optimizer": network.optimizer.state_dict()}

    async with AsyncExitStack() as stack:
        stack.enter_context(_one_thread(torch))
        training = await stack.enter_async_context(
            opened_training(graph, counts, model=network.model, optimizer=network.optimizer)
        )
        await training.saved()  # the first copy needs new memory; the others use it again
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="aiohooks-benchmark-"))
        )
        work = (
            f"training time lost to a checkpoint of {counts.checkpoint_bytes / 1e6:,.3g} MB of"
            " torch state"
        )
        yield compared(
            f"{work} / a blocking torch.save and fsync",
            0.15,
            training.lost_to(training.saved),
            blocking_writes(directory, lambda file: torch.save(state(), file)),
            most_times=1,
            most_rounds=15,
        )
