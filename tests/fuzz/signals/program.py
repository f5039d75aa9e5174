"""A training program that gets signals: `python -m tests.fuzz.signals.program DIR --at PHASE`,
started by `processes`.

It prints a line at each phase, and at its end one line of JSON with what it knows about it. In the
phase of `--at` it waits for a stop; in those of `--stay` it waits indefinitely, until a signal ends
the wait. It ends by itself only with `--at end` and `--at close`, to get to these phases.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import aiohooks as ah
from aiohooks.session import run as run_module
from tests.support.hooks import EveryPhaseHook

LAST_STEP = 6


def say(line: str) -> None:
    """Print one line, without buffering."""
    print(line, flush=True)


class WaitingHook(EveryPhaseHook):
    """Prints each phase, and waits in the chosen ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.calls: Counter[str] = Counter()
        self.session: ah.AsyncMonitoredSession | None = None
        self._options = options

    async def in_phase(self, phase: str, *args: Any) -> None:
        self.calls[phase] += 1
        say(f"at {phase}")
        if phase == self._options.at and self.session is not None:
            await self.session.coord.wait_for_stop()
            # By `close` the coordinator has stopped without one.
            while self.session.stop_reason is None:  # noqa: ASYNC110
                await asyncio.sleep(0)
        if phase in self._options.stay:
            await asyncio.Event().wait()


class WaitingListener(ah.hooks.CheckpointSaverListener):
    """Prints each save, and waits in it."""

    def __init__(self, hook: WaitingHook) -> None:
        self._hook = hook

    async def before_save(self, *_: object) -> None:
        await self._hook.in_phase("save")


def make_session(options: argparse.Namespace, hook: WaitingHook) -> ah.AsyncMonitoredSession:
    """Make a session that gets to each phase at least once."""
    graph = ah.Graph()
    graph.variable("total", 0)
    failures = [ah.AbortedError("gone")] if options.at == "recovery" else []

    @graph.train_op(adds_to="total")
    async def train() -> int:
        await hook.in_phase("step")
        if failures:
            say("at recovery")
            raise failures.pop()
        if options.at == "blocking":
            say("at blocking")
            # blocks the loop; a third signal ends the process all the same
            threading.Event().wait()
        return 1

    async def initialise(session: ah.Session) -> None:
        await hook.in_phase("create_session")

    hooks: list[ah.SessionRunHook] = [
        ah.CheckpointSaverHook(every=ah.Every(steps=2), listeners=[WaitingListener(hook)]),
        hook,
    ]
    if options.at == "wait":
        hooks.append(ah.hooks.GlobalStepWaiterHook(wait_until_step=10**9))
    return ah.AsyncMonitoredSession(
        ah.ChiefSessionCreator(
            graph, checkpoint_dir=options.directory, scaffold=ah.Scaffold(init_fn=initialise)
        ),
        hooks,
        recovery=ah.RecoveryPolicy(
            backoff=ah.Backoff(initial_secs=600, max_secs=600, jitter=False)
        ),
        handle_signals=True,
    )


async def main(options: argparse.Namespace) -> int | None:
    """Train, print how it ended, and return the exit code, if the program chooses it."""
    hook = WaitingHook(options)
    session = hook.session = make_session(options, hook)

    async def print_stop() -> None:
        await session.coord.wait_for_stop()
        say("stopping")

    printing = asyncio.create_task(print_stop())
    try:
        async with session:
            if options.at == "wait":
                say("at wait")
            async for step in session.steps("global_step"):
                if step == LAST_STEP and options.at in ("end", "close"):
                    break
                await session.run("train")
    finally:
        printing.cancel()
        step = session.global_step.latest.step if hook.calls["after_create_session"] else 0
        say(json.dumps({"calls": hook.calls, "reason": session.stop_reason, "step": step}))
    return int(options.result) if options.result else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--at", default="")
    parser.add_argument("--stay", nargs="*", default=[])
    parser.add_argument("--run", choices=("aiohooks", "asyncio"), default="aiohooks")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--result", default="")
    given = parser.parse_args()
    logging.disable()
    if given.loop == "asyncio":
        run_module._new_event_loop = asyncio.new_event_loop
    if given.run == "aiohooks":
        ah.run(main, given)
    else:
        with asyncio.Runner(
            loop_factory=run_module._new_event_loop
        ) as loop_runner:  # as asyncio.run does
            loop_runner.run(main(given))
