"""A training program that gets real signals: `python -m tests.fuzz._signalled DIR --at PHASE`, started by P14.

It prints a line when it is at a phase, and what it knows about its own end as one line of JSON. Only if it is to be in `end`
or in `close` it goes there of itself. In the phase it was told it stays until a stop is asked for; in `end` and in `close` for
ever, if it was told so, until a signal ends that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import threading
from collections import Counter
from pathlib import Path

import aiohooks as ah
from aiohooks.session import runner

LAST_STEP = 6


def say(line: str) -> None:
    """One line, at once."""
    print(line, flush=True)


class Slow(ah.SessionRunHook):
    """Tells of each phase, and stays in it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.calls: Counter[str] = Counter()
        self.session: ah.AsyncMonitoredSession | None = None
        self._options = options

    async def _at(self, phase: str) -> None:
        self.calls[phase] += 1
        say(f"at {phase}")
        if phase == self._options.at and self.session is not None:
            await self.session.coord.wait_for_stop()
            while self.session.stop_reason is None:  # noqa: ASYNC110 - by `close` the coordinator has stopped without one
                await asyncio.sleep(0)
        if phase in self._options.stay:
            await asyncio.Event().wait()

    async def begin(self) -> None:
        await self._at("begin")

    async def after_create_session(self, session: ah.Session, coord: ah.Coordinator) -> None:
        await self._at("after_create_session")

    async def before_run(self, run_context: ah.SessionRunContext) -> None:
        await self._at("before_run")

    async def after_run(self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues) -> None:
        await self._at("after_run")

    async def end(self, session: ah.Session) -> None:
        await self._at("end")

    async def close(self, exc: BaseException | None) -> None:
        await self._at("close")


class Telling(ah.CheckpointSaverListener):
    """Tells of each save, and makes it last."""

    def __init__(self, hook: Slow) -> None:
        self._hook = hook

    async def before_save(self, session: ah.Session, global_step: int) -> None:
        await self._hook._at("save")


def program(options: argparse.Namespace, hook: Slow) -> ah.AsyncMonitoredSession:
    """The session, which is at each phase once at least."""
    graph = ah.Graph()
    graph.variable("total", 0)
    failures = [ah.AbortedError("gone")] if options.at == "recovery" else []

    @graph.train_op(adds_to="total")
    async def train() -> int:
        await hook._at("step")
        if failures:
            say("at recovery")
            raise failures.pop()
        if options.at == "blocking":
            say("at blocking")
            threading.Event().wait()  # the loop cannot do anything now, and a third signal ends it all the same
        return 1

    async def initialise(session: ah.Session) -> None:
        await hook._at("create_session")

    hooks: list[ah.SessionRunHook] = [
        ah.CheckpointSaverHook(every=ah.Every(steps=2), listeners=[Telling(hook)]),
        hook,
    ]
    if options.at == "wait":
        hooks.append(ah.GlobalStepWaiterHook(wait_until_step=10**9))
    return ah.AsyncMonitoredSession(
        ah.ChiefSessionCreator(graph, checkpoint_dir=options.directory, scaffold=ah.Scaffold(init_fn=initialise)),
        hooks,
        recovery=ah.RecoveryPolicy(backoff=ah.Backoff(initial_secs=600, max_secs=600, jitter=False)),
        handle_signals=True,
    )


async def main(options: argparse.Namespace) -> None:
    """Trains, and tells how it ended."""
    hook = Slow(options)
    session = hook.session = program(options, hook)

    async def tell() -> None:
        await session.coord.wait_for_stop()
        say("stopping")

    telling = asyncio.create_task(tell())
    try:
        async with session:
            if options.at == "wait":
                say("at wait")
            async for step in session.steps("global_step"):
                if step == LAST_STEP and options.at in ("end", "close"):
                    break
                await session.run("train")
    finally:
        telling.cancel()
        step = session.global_step.latest.step if hook.calls["after_create_session"] else 0
        say(json.dumps({"calls": hook.calls, "reason": session.stop_reason, "step": step}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--at", default="")
    parser.add_argument("--stay", nargs="*", default=[])
    parser.add_argument("--run", choices=("aiohooks", "asyncio"), default="aiohooks")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    given = parser.parse_args()
    logging.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has made it ignored
    if given.loop == "asyncio":
        runner._new_event_loop = asyncio.new_event_loop
    if given.run == "aiohooks":
        ah.run(main, given)
    else:
        with asyncio.Runner(loop_factory=runner._new_event_loop) as loop_runner:  # what asyncio.run does
            loop_runner.run(main(given))
