"""SIGTERM to processes that train with steps that only compute, and how soon they stop.

Each process makes steps that never wait, in one of these ways: a step function, a graph, a hook that computes, runs inside
`run_step_fn`, and `examples/service.py`, whose page is requested meanwhile. It gets SIGTERM in the middle of a step.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import aiohooks as ah
from tests.support import processes
from tests.support.waiting import HANG_SECS

KINDS = ("step function", "graph", "hook", "run_step_fn", "service")
STEPS_BEFORE = 20
STEP_SECS = 0.005
REQUESTS = 5


@dataclass(frozen=True, slots=True)
class Stop:
    """How one process stopped.

    Attributes:
        secs: from the end of the step that the signal fell into to the end of the loop of steps.
        steps_after: the steps that were begun after the signal.
        reason: the stop reason of the session.
        exit_code: that of the process.
        replies: the requests that were answered before the signal.
    """

    secs: float
    steps_after: int
    reason: str | None
    exit_code: int
    replies: int = 0


# -- the processes that get the signal


class Computing:
    """Computes for a while without a wait, and notes when."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.ended: float | None = None
        """When the loop of steps ended."""

    def __call__(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < STEP_SECS:
            pass
        self.times.append((began, time.monotonic()))
        if len(self.times) == STEPS_BEFORE:
            print("training", flush=True)


class ComputingHook(ah.SessionRunHook):
    """Computes after each run."""

    def __init__(self, compute: Computing) -> None:
        self._compute = compute

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        self._compute()


def run_child(kind: str) -> None:
    """Train until the signal, and print the times."""
    compute = Computing()
    reason = serve(compute) if kind == "service" else train(kind, compute)
    print(json.dumps({"steps": compute.times, "ended": compute.ended, "reason": reason}), flush=True)


def train(kind: str, compute: Computing) -> str | None:
    """Train without anything beside it."""
    hooks: list[ah.SessionRunHook] = []
    source: Any
    if kind == "graph":
        source = ah.Graph()
        source.variable("total", 0)

        @source.train_op(adds_to="total")  # type: ignore[untyped-decorator, unused-ignore]
        def loss() -> int:
            compute()
            return 1
    else:

        async def step() -> dict[str, int]:
            if kind != "hook":
                compute()
            return {"loss": 1}

        source = step
        if kind == "hook":
            hooks.append(ComputingHook(compute))

    async def steps_in_a_step_fn(context: ah.session.StepContext) -> None:
        while True:
            await context.run_with_hooks("loss")

    async def main() -> str | None:
        async with ah.AsyncMonitoredSession(source, hooks, handle_signals=True) as session:
            try:
                if kind == "run_step_fn":
                    await session.run_step_fn(steps_in_a_step_fn)
                async for _ in session.steps("loss"):
                    pass
            finally:
                compute.ended = time.monotonic()
        return session.stop_reason

    return ah.run(main)


def serve(compute: Computing) -> str | None:
    """Run the example of a service, with enough rows to train on."""
    from examples import service as example

    class Service(example.Service):
        async def train(self, session: ah.AsyncMonitoredSession) -> None:
            await super().train(session)
            compute.ended = time.monotonic()

    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as listener:
        service = Service(directory, hooks=[ComputingHook(compute)])

        async def main() -> None:
            chance = random.Random(0)
            await service.rows.add((x, x * x) for x in (chance.uniform(-1, 1) for _ in range(example.MAX_ROWS)))
            print(listener.getsockname()[1], flush=True)
            await example.serve(service, listener)

        ah.run(main)
    return service.training.health().stop_reason


# -- sending the signal


def stop_process(kind: str, seed: int = 0) -> Stop:
    """Start a process, send it SIGTERM in the middle of a step, and return how it stopped."""
    command = [sys.executable, "-m", "tests.fuzz.signals.computing", kind]
    with processes.start(command) as process:
        timer = threading.Timer(HANG_SECS, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            replies = _request_page(int(next(lines))) if kind == "service" else 0
            while next(lines, "training\n") != "training\n":
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random.Random(seed).uniform(0, 10 * STEP_SECS))  # up to a random moment of a step
            process.send_signal(signal.SIGTERM)
            sent = time.monotonic()  # not before: this process may be held up between the two
            output, errors = process.communicate()
        finally:
            timer.cancel()
    found = [line for line in output.splitlines() if line.startswith("{")]
    if not found:
        raise RuntimeError(f"{kind}: exit code {process.returncode}, {output[-500:]} {errors[-500:]}")
    end = json.loads(found[0])
    ends = [ended for began, ended in end["steps"] if began <= sent]
    return Stop(
        secs=end["ended"] - max(sent, *ends),
        steps_after=len(end["steps"]) - len(ends),
        reason=end["reason"],
        exit_code=process.returncode,
        replies=replies,
    )


def _request_page(port: int) -> int:
    """Request the progress of a service until it has answered some times while it trains; return how often that was."""
    replies = 0
    while replies < REQUESTS:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECS)
        connection.request("GET", "/training/progress")
        progress = json.loads(connection.getresponse().read())
        replies += progress["state"] == "running"
        connection.close()
    return replies


if __name__ == "__main__":
    run_child(sys.argv[1])
