"""Rows about checkpoints: what a save costs the training that continues meanwhile, and its
memory.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import aiohooks as ah
from aiohooks.checkpoint import Saver
from aiohooks.testing import ManualClock
from tests.benchmarks.measure import (
    Counts,
    Figure,
    Lane,
    Setup,
    blocking_writes,
    imported,
    repeated,
)

Array = npt.NDArray[np.float64]
BATCH = 4096
FEATURES = 64
LAYER = 500
PERIOD_SECS = 60.0
"""By a clock that the row moves: a save is due when it wants one."""
FEW = 20
"""Steps before a save that are looked at, and after it, at least; fewer where there are fewer
rounds.
"""


class Training:
    """A session that trains step by step, with a `CheckpointSaverHook` that saves on request."""

    def __init__(
        self,
        graph: ah.Graph,
        few: int,
        clock: ManualClock,
        saver: Saver,
        **tracked: ah.checkpoint.Stateful,
    ) -> None:
        """Takes a graph whose train operations are run in turn, and what they change besides its
        variables.
        """
        self.variables = ah.Variables()
        creator = ah.ChiefSessionCreator(
            graph, variables=self.variables, scaffold=ah.Scaffold(tracked=tracked)
        )
        self.hook = ah.CheckpointSaverHook(
            saver, every=ah.Every(secs=PERIOD_SECS), save_on_begin=False, save_on_end=False
        )
        self.session = ah.AsyncMonitoredSession(creator, [self.hook])
        self._operations = [name for name in graph.nodes if name.startswith("train")]
        self._feeds = {name: value for name, value in _feeds().items() if name in graph.nodes}
        self._clock = clock
        self._few = few
        self._numbers = count()

    async def steps(self, number: int) -> float:
        """Run so many steps; return the seconds they took."""
        began = time.perf_counter()
        for _ in range(number):
            await self.session.run(
                self._operations[next(self._numbers) % len(self._operations)], self._feeds
            )
            await asyncio.sleep(0)  # a training loop that waits for its data lets others in, too
        return time.perf_counter() - began

    async def steps_until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """Run steps until something is done; return their number and seconds."""
        made, secs = 0, 0.0
        while not done():
            secs += await self.steps(1)
            made += 1
        return made, secs

    async def saved(self) -> tuple[int, float]:
        """Run steps, the first of which is saved, until the checkpoint is durable."""
        before = self.hook.saved
        self._clock.advance(PERIOD_SECS)
        return await self.steps_until(lambda: self.hook.saved > before)

    def lost_to(self, saved: Callable[[], Awaitable[tuple[int, float]]]) -> Lane:
        """Return a lane: how much longer the steps during saves took than as many before and after
        would have taken.
        """

        async def lane(times: int) -> float:
            lost, few = 0.0, self._few
            for _ in range(times):
                before = await self.steps(few)
                made, secs = await saved()
                after = await self.steps(max(made, few))
                lost += secs - made * (before + after) / (few + max(made, few))
            return lost

        return lane


def lookups(size: int) -> ah.Graph:
    """Train a small head on top of a large table that stays: one core is busy."""
    graph = ah.Graph()
    graph.placeholder("rows")
    graph.placeholder("labels")
    graph.variable(
        "table",
        np.random.default_rng(0).standard_normal((max(1, size // (8 * FEATURES)), FEATURES)),
    )
    graph.variable("head", np.zeros(FEATURES))

    @graph.train_op(adds_to="head")
    def train(rows: npt.NDArray[np.int64], labels: Array, table: Array, head: Array) -> Array:
        features = np.tanh(table[rows % len(table)])
        gradient: Array = ((features @ head - labels)[:, None] * features).mean(axis=0)
        return -0.1 * gradient

    return graph


def layers(size: int) -> ah.Graph:
    """Train one layer a step, in turn, so that a save soon holds the old values of all; matrix
    products use every core.
    """
    graph = ah.Graph()
    graph.placeholder("inputs")
    for number in range(max(1, size // (8 * LAYER * LAYER))):
        _add_layer(graph, f"layer{number}", f"train{number}")
    return graph


def _add_layer(graph: ah.Graph, name: str, train: str) -> None:
    graph.variable(name, np.random.default_rng(0).standard_normal((LAYER, LAYER)))

    def descend(inputs: Array, layer: Array) -> Array:
        gradient: Array = inputs.T @ np.tanh(inputs @ layer)
        return -0.001 * gradient

    _takes(descend, "inputs", name)
    graph.train_op(name=train, adds_to=name)(descend)


def _takes(fn: Any, *names: str) -> None:
    """Rename the parameters: the graph feeds them by name."""
    fn.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )


def _feeds() -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        "rows": random.integers(0, 2**40, BATCH),
        "labels": random.standard_normal(BATCH),
        "inputs": 0.1 * random.standard_normal((64, LAYER)),
    }


@asynccontextmanager
async def opened_training(
    graph: ah.Graph, counts: Counts, **tracked: ah.checkpoint.Stateful
) -> AsyncIterator[Training]:
    """Open the session of a training, and make a few steps."""
    few = min(FEW, counts.rounds)
    with (
        tempfile.TemporaryDirectory(prefix="aiohooks-benchmark-") as directory,
        ManualClock() as clock,
    ):
        async with Saver(directory, keep=ah.checkpoint.KeepNewest(1)) as saver:
            training = Training(graph, few, clock, saver, **tracked)
            async with training.session:
                await training.steps(few)
                yield training


def saved_by_numpy(training: Training, directory: Path) -> Lane:
    """Return a lane that saves the variables of a training while nothing else runs."""

    def write(file: IO[bytes]) -> None:
        np.savez(file, **dict[str, Any](training.variables.snapshot()))

    return blocking_writes(directory, write)


@asynccontextmanager
async def background_checkpoint(counts: Counts) -> AsyncIterator[Setup]:
    """Training time lost to a save in the background, against a blocking one of the same
    variables.
    """
    async with AsyncExitStack() as stack:
        one_core = await stack.enter_async_context(
            opened_training(lookups(counts.checkpoint_bytes), counts)
        )
        all_cores = await stack.enter_async_context(
            opened_training(layers(counts.checkpoint_bytes), counts)
        )
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="aiohooks-benchmark-"))
        )
        work = f"training time lost to a checkpoint of {counts.checkpoint_bytes / 1e6:,.3g} MB"
        yield Setup(
            {
                "one core": one_core.lost_to(one_core.saved),
                "savez": saved_by_numpy(one_core, directory),
                "all cores": all_cores.lost_to(all_cores.saved),
                "savez of layers": saved_by_numpy(all_cores, directory),
            },
            [
                Figure(f"{work} / a blocking np.savez and fsync", 0.15, "one core", "savez"),
                Figure(
                    "the same, where training uses every core and replaces every variable"
                    " meanwhile",
                    None,
                    "all cores",
                    "savez of layers",
                ),
            ],
            most_times=1,
            most_rounds=15,
        )


@asynccontextmanager
async def checkpoint_restore(counts: Counts) -> AsyncIterator[Setup]:
    """Reading a checkpoint, which is verified, against safetensors, which is not: large arrays, and
    small ones.
    """
    load_file = imported("safetensors", "safetensors.numpy").load_file
    random = np.random.default_rng(0)
    many = counts.checkpoint_bytes // 2000
    states: dict[str, dict[str, Any]] = {
        "large": {
            f"layer{number}": random.standard_normal(counts.checkpoint_bytes // 80)
            for number in range(10)
        },
        "small": {f"layer{number}": np.ones(4, np.float32) for number in range(many)},
    }
    async with AsyncExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for name, state in states.items():
            directory = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="aiohooks-benchmark-")
            )
            saver = await stack.enter_async_context(Saver(directory))
            path = (await saver.save(state, 1)).path / "arrays.safetensors"
            lanes[name] = repeated(saver.restore)
            lanes[f"{name} by safetensors"] = repeated(partial(asyncio.to_thread, load_file, path))
        size = f"{counts.checkpoint_bytes / 1e6:,.3g} MB"
        yield Setup(
            lanes,
            [
                Figure(
                    f"restore of {size}, verified / safetensors' load_file",
                    1.3,
                    "large",
                    "large by safetensors",
                ),
                Figure(f"the same of {many:,} small arrays", 1.5, "small", "small by safetensors"),
            ],
            most_times=1,
            most_rounds=9,
        )


@asynccontextmanager
async def checkpoint_memory(counts: Counts) -> AsyncIterator[Setup]:
    """Memory that a write takes itself, and that a save in flight holds when every variable is
    replaced meanwhile.
    """
    async with opened_training(layers(counts.checkpoint_bytes), counts) as training:
        variables = training.variables.snapshot()
        size = float(sum(value.nbytes for value in variables.values()))

        async def write(times: int) -> float:
            with tempfile.TemporaryDirectory(prefix="aiohooks-benchmark-") as directory:
                async with Saver(directory) as saver:
                    return (
                        await _most_memory(lambda: saver.save({"variables": variables}, 1)) * times
                    )

        async def in_flight(times: int) -> float:
            return await _most_memory(training.saved) * times

        async def all_of_it(times: int) -> float:
            return size * times

        name = f"a checkpoint of {counts.checkpoint_bytes / 1e6:,.3g} MB"
        yield Setup(
            {"write": write, "in flight": in_flight, "variables": all_of_it},
            [
                Figure(
                    f"memory that the write of {name} takes / its size",
                    0.05,
                    "write",
                    "variables",
                    "MB",
                ),
                Figure(
                    "the same, and the old values of all variables, replaced meanwhile",
                    1.1,
                    "in flight",
                    "variables",
                    "MB",
                ),
            ],
            most_times=1,
            most_rounds=3,
        )


async def _most_memory(work: Callable[[], Awaitable[object]]) -> float:
    """Return how many bytes more are in use during some work, at most."""
    tracemalloc.start()
    try:
        await work()
        return float(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
