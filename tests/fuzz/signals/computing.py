"""SIGTERM to processes that train with steps that only compute, and how soon they stop.

    python -m tests.fuzz.signals.computing --processes 3 --step-ms 5

Each process makes steps that never wait, in one of these ways: a step function, a graph, a hook that computes, runs inside
`run_step_fn`, and `examples/service.py`, whose page is requested meanwhile. It gets SIGTERM in the middle of a step. Printed are
the time from the end of that step to the end of the loop of steps, the number of steps that were begun after the signal, and for
the service the replies to requests of its page before the signal, with the longest wait for one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohooks as ah
from tests.support import processes
from tests.support.waiting import HANG_SECS

KINDS = ("step function", "graph", "hook", "run_step_fn", "service")
STEPS_BEFORE = 20
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
        longest_reply_secs: the longest wait for such an answer.
    """

    secs: float
    steps_after: int
    reason: str | None
    exit_code: int
    replies: int = 0
    longest_reply_secs: float = 0.0


# -- the processes that get the signal


class Computing:
    """Computes for a while without a wait, and notes when."""

    def __init__(self, secs: float) -> None:
        self.secs = secs
        self.times: list[tuple[float, float]] = []
        self.ended: float | None = None
        """When the loop of steps ended."""

    def __call__(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < self.secs:
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


def run_child(kind: str, secs: float) -> None:
    """Train until the signal, and print the times."""
    compute = Computing(secs)
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


def stop_process(kind: str, step_secs: float = 0.005, seed: int = 0) -> Stop:
    """Start a process, send it SIGTERM in the middle of a step, and return how it stopped."""
    command = [sys.executable, "-m", "tests.fuzz.signals.computing", "--child", kind, "--step-ms", str(1000 * step_secs)]
    with processes.start(command) as process:
        timer = threading.Timer(HANG_SECS, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            waits = _request_page(int(next(lines))) if kind == "service" else []
            while next(lines, "training\n") != "training\n":
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(random.Random(seed).uniform(0, 10 * step_secs))  # up to a random moment of a step
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
        replies=len(waits),
        longest_reply_secs=max(waits, default=0.0),
    )


def _request_page(port: int) -> list[float]:
    """Request the page and the progress of a service while it trains; return how long each reply took."""
    waits: list[float] = []
    while len(waits) < REQUESTS:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_SECS)
        began = time.monotonic()
        connection.request("GET", "/training/progress")
        progress = json.loads(connection.getresponse().read())
        if progress["state"] == "running":
            waits.append(time.monotonic() - began)
        connection.close()
    return waits


def stops(count: int, step_secs: float) -> Iterator[tuple[str, list[Stop]]]:
    """Stop `count` processes of each kind."""
    for kind in KINDS:
        yield kind, [stop_process(kind, step_secs, seed) for seed in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.signals.computing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=3, help="of each kind (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=5.0, help="how long a step computes (default %(default)s)")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        run_child(options.child, options.step_ms / 1000)
        return 0
    print(f"Python {platform.python_version()}, steps of {options.step_ms} ms; SIGTERM in the middle of one")
    print(f"{'':14} {'processes':>9} {'longest time to the end':>24} {'steps after it':>15}")
    failed = False
    for kind, found in stops(options.processes, options.step_ms / 1000):
        page = f"; {sum(one.replies for one in found)} replies before it, in {max(one.longest_reply_secs for one in found):.3f} s"
        print(
            f"{kind:14} {len(found):9} {1000 * max(one.secs for one in found):21.1f} ms "
            f"{max(one.steps_after for one in found):15}{page if found[0].replies else ''}",
            flush=True,
        )
        failed = failed or any(one.steps_after > 1 for one in found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
