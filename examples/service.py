"""A web service that learns while it serves.

    POST /rows        [[x, y], ...]: data to learn from
    GET  /predict?x=  what has been learned so far
    GET  /training/   the session as it goes on: a page, and health, ready, progress, events and steps/N below it

The model is a polynomial that is fitted to rows as they come in; a step is made for each batch of them. With --simulate rows
come by themselves. On SIGTERM or SIGINT the session stops wherever it waits, a last checkpoint is written, and the process
ends with status 0; with 1 if the session had failed.

Usage: python examples/service.py [--port 8000] [--checkpoint-dir DIR] [--simulate ROWS_PER_SEC]
"""

import argparse
import asyncio
import contextlib
import json
import math
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import aiohooks as ah
from aiohooks.adapters.asgi import SessionService

Array = npt.NDArray[np.float64]
BATCH = 16
DEGREE = 5
MOST_ROWS = 100_000


def powers(x: Array) -> Array:
    """The inputs of the model: x to the power of 0, 1, 2, ..."""
    return np.stack([x**power for power in range(DEGREE + 1)], axis=1)


def build() -> ah.Graph:
    """The model: weights, and an operation that moves them down the gradient of a batch."""
    graph = ah.Graph()
    graph.placeholder("rows")
    graph.variable("weights", np.zeros(DEGREE + 1))

    @graph.operation
    async def error(rows: Array, weights: Array) -> Array:
        return powers(rows[:, 0]) @ weights - rows[:, 1]

    @graph.operation
    async def loss(error: Array) -> float:
        return float(np.mean(error**2))

    @graph.train_op(adds_to="weights")
    async def train(rows: Array, error: Array) -> Array:
        return -0.2 * powers(rows[:, 0]).T @ error / len(rows)

    return graph


class Rows:
    """Rows that nobody has learned from yet. How many have come is a step, so that it can be waited for."""

    def __init__(self) -> None:
        """None has come."""
        self.come = ah.MemoryStepStore(run="rows that have come")
        self._kept: deque[tuple[float, float]] = deque(maxlen=MOST_ROWS)

    async def add(self, rows: Iterable[tuple[float, float]]) -> None:
        """Takes rows in."""
        before = len(self._kept)
        self._kept.extend(rows)
        if len(self._kept) > before:
            await self.come.advance(len(self._kept) - before)

    async def batches(self) -> AsyncIterator[dict[str, Array]]:
        """A feed for each full batch. A stop of the session ends the wait for the next one."""
        taken = 0
        while True:
            taken += BATCH
            await self.come.wait_for(taken)
            yield {"rows": np.array([self._kept.popleft() for _ in range(BATCH)])}

    async def simulate(self, rows_per_sec: float, session: ah.AsyncMonitoredSession) -> None:
        """Rows as they might come in: a wave, and noise; until the session stops."""
        chance = np.random.default_rng(0)
        while True:
            await session.until(asyncio.sleep(BATCH / rows_per_sec))
            x = chance.uniform(-1, 1, BATCH)
            y = np.sin(3 * x) + chance.normal(0, 0.1, BATCH)
            await self.add(zip(x.tolist(), y.tolist(), strict=True))


class Service:
    """The application and what it is made of."""

    def __init__(
        self,
        checkpoint_dir: str,
        *,
        checkpoint_every: int = 200,
        rows_per_sec: float = 0,
        hooks: Sequence[ah.SessionRunHook] = (),
        title: str = "a service that learns",
        grace_secs: float = 10.0,
    ) -> None:
        """Builds it; the session is entered when the server starts."""
        self.grace_secs = grace_secs
        self.rows = Rows()
        self.variables = ah.Variables()
        self._rows_per_sec = rows_per_sec
        graph = build()
        history = ah.HistoryHook({"loss": "loss"}, max_length=2_000)
        timing = ah.HookTimingHook()
        saver = ah.CheckpointSaverHook(every=ah.Every(steps=checkpoint_every, secs=30))
        session = ah.AsyncMonitoredSession(
            ah.ChiefSessionCreator(graph, checkpoint_dir=checkpoint_dir, variables=self.variables),
            timing.watch([history, saver, ah.NanHook("loss"), *hooks]),
            stop_grace_period_secs=grace_secs / 2,  # signals are the server's: handle_signals stays off
            name="trainer",
        )
        self.training = SessionService(session, self.train, history=history, timing=timing, title=title, grace_secs=grace_secs)
        routes = [
            Route("/rows", self.add_rows, methods=["POST"]),
            Route("/predict", self.predict),
            Mount("/training", self.training),
        ]
        self.app = Starlette(routes=routes, lifespan=self.training.lifespan)

    async def train(self, session: ah.AsyncMonitoredSession) -> None:
        """The loop of steps; it runs beside the requests."""
        if self._rows_per_sec:
            session.start_soon(self.rows.simulate, self._rows_per_sec, session)
        async for _ in session.steps(["train", "loss"], feeds=self.rows.batches()):
            pass

    async def add_rows(self, request: Request) -> JSONResponse:
        """Takes rows to learn from."""
        try:
            rows = [(float(x), float(y)) for x, y in json.loads(await request.body())]
        except (TypeError, ValueError):
            return JSONResponse({"error": "give [[x, y], ...]"}, 400)
        await self.rows.add(rows)
        return JSONResponse({"rows": self.rows.come.latest.step}, 202)

    async def predict(self, request: Request) -> JSONResponse:
        """What the model makes of x now."""
        try:
            x = float(request.query_params["x"])
        except (KeyError, ValueError):
            x = math.nan
        if not -1 <= x <= 1:
            return JSONResponse({"error": "give ?x= from -1 to 1"}, 400)
        values = self.variables.snapshot()
        weights: Any = values.get("weights")
        if weights is None:
            return JSONResponse({"error": "the model is not there yet"}, 503)
        return JSONResponse({"y": float(powers(np.array([x]))[0] @ weights)})


async def serve(service: Service, listener: socket.socket) -> int:
    """Serves until a signal comes; returns the status for the process to end with."""
    config = uvicorn.Config(service.app, log_level="warning", timeout_graceful_shutdown=math.ceil(service.grace_secs))
    # When uvicorn has ended it repeats the signal for whoever had it before: here that only means to go on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    with contextlib.suppress(SystemExit):
        await uvicorn.Server(config).serve([listener])
    found = service.training.health()
    print(f"{found.state} at step {found.step}: {found.failure or found.stop_reason}")
    return 0 if found.ok else 1


def main() -> int:
    """Reads the command line and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--checkpoint-dir", help="where training goes on from; left out, it begins anew")
    parser.add_argument("--simulate", type=float, default=0, metavar="ROWS_PER_SEC", help="let rows come by themselves")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = options.checkpoint_dir or stack.enter_context(tempfile.TemporaryDirectory())
        # It listens on this machine alone. What connects from here on waits until the server is there.
        listener = stack.enter_context(socket.create_server(("127.0.0.1", options.port)))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/training/", flush=True)
        return ah.run(serve, Service(directory, rows_per_sec=options.simulate), listener)


if __name__ == "__main__":
    sys.exit(main())
