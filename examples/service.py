"""A web service that trains a model while it serves requests.

    POST /rows        [[x, y], ...]: data to train on
    GET  /predict?x=  a prediction of the current model
    GET  /training/   the state of the training: a page, and health, ready, progress
                      and steps/N below it

The model is a polynomial that is fitted to the rows; each batch of rows makes a step. With
--simulate the service makes rows itself. On SIGTERM or SIGINT the session stops, also while it
waits for rows, a last checkpoint is written, and the process ends with status 0, or with 1 if the
session had failed.

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
MAX_ROWS = 100_000


def powers(x: Array) -> Array:
    """Return the inputs of the model: x to the power of 0, 1, 2, ..."""
    return np.stack([x**power for power in range(DEGREE + 1)], axis=1)


def build_graph() -> ah.Graph:
    """Build the model: weights, and an operation that moves them down the gradient of a batch."""
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


class RowQueue:
    """Rows to train on. Their count is a step store, so that a batch can be waited for."""

    def __init__(self) -> None:
        self.received = ah.MemoryStepStore(run="rows received")
        self._rows: deque[tuple[float, float]] = deque(maxlen=MAX_ROWS)

    async def add(self, rows: Iterable[tuple[float, float]]) -> None:
        """Add rows at the end of the queue."""
        before = len(self._rows)
        self._rows.extend(rows)
        if len(self._rows) > before:
            await self.received.advance(len(self._rows) - before)

    async def batches(self) -> AsyncIterator[dict[str, Array]]:
        """Yield a feed for each full batch. A stop of the session ends the wait for the next
        one.
        """
        taken = 0
        while True:
            taken += BATCH
            await self.received.wait_for(taken)
            yield {"rows": np.array([self._rows.popleft() for _ in range(BATCH)])}

    async def simulate(self, rows_per_sec: float, session: ah.AsyncMonitoredSession) -> None:
        """Add rows of a noisy wave until the session stops."""
        chance = np.random.default_rng(0)
        while True:
            await session.until(asyncio.sleep(BATCH / rows_per_sec))
            x = chance.uniform(-1, 1, BATCH)
            y = np.sin(3 * x) + chance.normal(0, 0.1, BATCH)
            await self.add(zip(x.tolist(), y.tolist(), strict=True))


class Service:
    """The web application, its model and its session."""

    def __init__(
        self,
        checkpoint_dir: str,
        *,
        checkpoint_every: int = 200,
        rows_per_sec: float = 0,
        hooks: Sequence[ah.SessionRunHook] = (),
        grace_secs: float = 10.0,
        controls: bool = False,
    ) -> None:
        """Build the application; the session is entered when the server starts."""
        self.grace_secs = grace_secs
        self.rows = RowQueue()
        self.variables = ah.Variables()
        self._rows_per_sec = rows_per_sec
        graph = build_graph()
        saver = ah.CheckpointSaverHook(every=ah.Every(steps=checkpoint_every, secs=30))
        session = ah.AsyncMonitoredSession(
            ah.ChiefSessionCreator(graph, checkpoint_dir=checkpoint_dir, variables=self.variables),
            [saver, ah.NanHook("loss"), *hooks],
            stop_grace_period_secs=grace_secs
            / 2,  # without handle_signals: the server handles signals
            name="online training",
        )
        self.training = SessionService(
            session,
            self.train,
            grace_secs=grace_secs,
            controls=controls,
        )
        routes = [
            Route("/rows", self.add_rows, methods=["POST"]),
            Route("/predict", self.predict),
            Mount("/training", self.training),
        ]
        self.app = Starlette(routes=routes, lifespan=self.training.lifespan)

    async def train(self, session: ah.AsyncMonitoredSession) -> None:
        """Run the loop of steps, beside the requests."""
        if self._rows_per_sec:
            session.start_soon(self.rows.simulate, self._rows_per_sec, session)
        async for _ in session.steps(["train", "loss"], feeds=self.rows.batches()):
            pass

    async def add_rows(self, request: Request) -> JSONResponse:
        """Serve POST /rows."""
        try:
            rows = [(float(x), float(y)) for x, y in json.loads(await request.body())]
        except (TypeError, ValueError):
            return JSONResponse({"error": "give [[x, y], ...]"}, 400)
        await self.rows.add(rows)
        return JSONResponse({"rows": self.rows.received.latest.step}, 202)

    async def predict(self, request: Request) -> JSONResponse:
        """Serve GET /predict."""
        try:
            x = float(request.query_params["x"])
        except (KeyError, ValueError):
            x = math.nan
        if not -1 <= x <= 1:
            return JSONResponse({"error": "give ?x= from -1 to 1"}, 400)
        values = self.variables.snapshot()
        weights: Any = values.get("weights")
        if weights is None:
            return JSONResponse({"error": "the model is not initialised yet"}, 503)
        return JSONResponse({"y": float(powers(np.array([x]))[0] @ weights)})


async def serve(service: Service, listener: socket.socket) -> int:
    """Serve until a signal, and return the exit status."""
    config = uvicorn.Config(
        service.app, log_level="warning", timeout_graceful_shutdown=math.ceil(service.grace_secs)
    )
    # After its shutdown uvicorn raises the signal again for the previous handler: here that only
    # ends `serve`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    with contextlib.suppress(SystemExit):
        await uvicorn.Server(config).serve([listener])
    health = service.training.health()
    print(f"{health.state} at step {health.step}: {health.failure or health.stop_reason}")
    return 0 if health.ok else 1


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for any free port")
    parser.add_argument(
        "--checkpoint-dir", help="continue training from its newest checkpoint (start new)"
    )
    parser.add_argument(
        "--controls",
        action="store_true",
        help="let clients stop and drain the session, also on the page",
    )
    parser.add_argument(
        "--simulate", type=float, default=0, metavar="ROWS_PER_SEC", help="make rows at this rate"
    )
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = options.checkpoint_dir or stack.enter_context(tempfile.TemporaryDirectory())
        # Listens on this machine only. From here on a client can connect, and waits until the
        # server is started.
        listener = stack.enter_context(socket.create_server(("127.0.0.1", options.port)))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/training/", flush=True)
        return ah.run(
            serve,
            Service(directory, rows_per_sec=options.simulate, controls=options.controls),
            listener,
        )


if __name__ == "__main__":
    sys.exit(main())
