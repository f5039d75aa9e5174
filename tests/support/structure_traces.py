"""How far one unit of work goes through the library: the Python calls of a run, of an error, of a
save and of a wake-up.

Counted are, by `sys.setprofile`, the calls of functions that are in files below the `aiohooks`
package, in all threads. A coroutine or generator that resumes after a suspension is a call again,
and so is a comprehension on Python 3.11, not on 3.12 and later: compare figures of one Python.
Functions are told apart by file and qualified name. All is warm: the same has been done twice
before (a save: once).

Everything is measured with a step function that fetches one value, except the save, which is of a
graph with one variable. "Hooks" are two that override both phases and fetch a value; the one that
waits suspends once, in `after_run`. Where errors overlap, one hook has suspended once and is done,
and then another that has suspended twice raises.

A checkpoint is saved inside the step (`background=False`). A listing is a call of `os.listdir` or
`os.scandir` on the checkpoint directory itself.

A wake-up is between two processes: one is traced from the call of `advance` until that returns, and
the other from when its loop wakes until `wait_for` returns.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import aiohooks as ah
from aiohooks.stores.local import LocalStepStore
from tests.support.source import ROOT

LIBRARY = Path(ah.__file__).resolve().parent
ROUNDS = 3
"""The last one is measured."""

NO_TURNS: dict[str, Any] = (
    {"yield_secs": None}
    if "yield_secs" in inspect.signature(ah.AsyncMonitoredSession).parameters
    else {}
)
"""A session that is traced is slow, and would let the loop have turns; an older library has no such
argument.
"""


class Trace:
    """Notes the calls inside the library while it is entered: `with trace: ...`, or from `start` to
    `stop`.
    """

    def __init__(self) -> None:
        """Notes nothing yet; watches this thread, and those that are started from now on, as long
        as the process lives.
        """
        self.calls: list[tuple[str, str]] = []
        """File and function of each call."""
        self.listed = 0
        """How often `directory` was listed."""
        self.directory: str | None = None
        self._on = False
        self._below = f"{LIBRARY}{os.sep}"
        gc.disable()  # it would call finalizers at any moment
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        sys.addaudithook(self._audited)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._on and event == "call" and code.co_filename.startswith(self._below):
            self.calls.append((code.co_filename, code.co_qualname))

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._on and self.directory is not None and event in ("os.listdir", "os.scandir"):
            self.listed += os.path.samefile(arguments[0] or ".", self.directory)

    def start(self) -> None:
        """Forgets what was, and notes what comes."""
        self.calls, self.listed, self._on = [], 0, True

    def stop(self) -> None:
        """Notes nothing more; harmless twice."""
        self._on = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def summary(calls: Iterable[tuple[str, str]]) -> str:
    """How many calls, functions and files these are."""
    calls = list(calls)
    return f"{len(calls)} / {len(set(calls))} / {len({file for file, _ in calls})}"


class Hook(ah.SessionRunHook):
    """Fetches a value; suspends so many times in its phases."""

    def __init__(self, *, before: int = 0, after: int = 0) -> None:
        self._before, self._after = before, after

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        await ticks(self._before)
        return ah.SessionRunArgs("loss")

    async def after_run(
        self, run_context: ah.SessionRunContext, run_values: ah.SessionRunValues
    ) -> None:
        await ticks(self._after)


class FailingHook(Hook):
    """Calls `about_to_fail` and raises, once that is set."""

    about_to_fail: Callable[[], None] | None = None

    async def before_run(self, run_context: ah.SessionRunContext) -> ah.SessionRunArgs:
        args = await super().before_run(run_context)
        if self.about_to_fail is not None:
            self.about_to_fail()
            raise ArithmeticError
        return args


async def ticks(count: int) -> None:
    """Suspends so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def step() -> dict[str, int]:
    """The step."""
    return {"loss": 1}


async def run(trace: Trace, *hooks: Hook) -> str:
    """A run."""
    async with ah.AsyncMonitoredSession(step, hooks, **NO_TURNS) as session:
        for _ in range(ROUNDS):
            with trace:
                await session.run("loss")
    return summary(trace.calls)


async def failed_run(trace: Trace, *hooks: Hook, failing: FailingHook, whole: bool = False) -> str:
    """An error of a hook until `run` has raised it, from the raise or from the call of `run`."""
    async with ah.AsyncMonitoredSession(step, [*hooks, failing], **NO_TURNS) as session:
        for _ in range(ROUNDS - 1):
            await session.run("loss")
        failing.about_to_fail = (lambda: None) if whole else trace.start
        if whole:
            trace.start()
        try:
            await session.run("loss")
        except ArithmeticError:
            trace.stop()
    return summary(trace.calls)


async def failed_block(trace: Trace) -> str:
    """An error in the block of a session with one hook, until the block is left."""
    try:
        async with ah.AsyncMonitoredSession(step, [Hook()], **NO_TURNS) as session:
            for _ in range(ROUNDS):
                await session.run("loss")
            trace.start()
            raise ArithmeticError
    except ArithmeticError:
        trace.stop()
    return summary(trace.calls)


async def save(trace: Trace, directory: str) -> str:
    """A run in which a checkpoint is saved, the second one of its directory."""
    graph = ah.Graph()
    graph.variable("total", 0)

    @graph.train_op(adds_to="total")
    def train() -> int:
        return 1

    trace.directory = directory
    saver = ah.CheckpointSaverHook(
        directory, every=ah.Every(steps=1), background=False, save_on_begin=False
    )
    async with ah.AsyncMonitoredSession(graph, [saver], **NO_TURNS) as session:
        for _ in range(2):
            with trace:
                await session.run("train")
    return summary(trace.calls)


async def wake_up(trace: Trace, directory: str) -> dict[str, str]:
    """An `advance` in another process, and the `wait_for` that it ends here."""
    command = [sys.executable, "-c", ADVANCES, str(LIBRARY.parent), directory]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=2**20
    )
    assert child.stdin is not None
    assert child.stdout is not None
    there: list[tuple[str, str]] = []
    async with LocalStepStore(directory) as store:

        async def waiting(step: int) -> None:
            await store.wait_for(step)
            trace.stop()

        for number in range(1, ROUNDS + 1):
            task = asyncio.create_task(waiting(number))
            while not store.statistics().waiting:  # noqa: ASYNC110 - a store has no event for this
                await asyncio.sleep(0)
            trace.start()
            child.stdin.write(b"advance\n")
            line = await child.stdout.readline()
            assert line, "the other process has ended"
            await task
            there = [(file, function) for file, function in json.loads(line)]
    child.stdin.close()
    await child.wait()
    return {
        "local `advance` in another process": summary(there),
        "the waiter that it wakes": summary(trace.calls),
        "both processes": summary([*there, *trace.calls]),
    }


ADVANCES = """
import sys
import tests  # of this checkout, also if the library is that of another
sys.path.insert(0, sys.argv[1])
from tests.support.structure_traces import advances
advances(sys.argv[2])
"""


def advances(directory: str) -> None:
    """What the other process does: advances once for each line of its input, and prints the calls
    that this took.
    """
    trace = Trace()

    async def serve() -> None:
        async with LocalStepStore(directory) as store:
            for _ in sys.stdin:
                with trace:
                    await store.advance()
                print(json.dumps(trace.calls), flush=True)

    asyncio.run(serve())


def front_door() -> int:
    """How many names `aiohooks` itself has."""
    return len(ah.__all__)


def figures() -> dict[str, str]:
    """All that is measured at run time, by what is done."""
    return asyncio.run(_figures(Trace()))


async def _figures(trace: Trace) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory:
        return {
            "run, no hooks": await run(trace),
            "run, 2 hooks, none waits": await run(trace, Hook(), Hook()),
            "run, 2 hooks, one waits": await run(trace, Hook(), Hook(after=1)),
            "error of a hook, from the raise": await failed_run(trace, failing=FailingHook()),
            "... where hooks overlap": await failed_run(
                trace, Hook(before=1), failing=FailingHook(before=2)
            ),
            "error of a hook, from the call of `run`": await failed_run(
                trace, failing=FailingHook(), whole=True
            ),
            "... of overlapping hooks": await failed_run(
                trace, Hook(before=1), failing=FailingHook(before=2), whole=True
            ),
            "error out of the block (`__aexit__`)": await failed_block(trace),
            "run with a checkpoint save": await save(trace, os.path.join(directory, "checkpoints")),
            "... listings of its directory": f"{trace.listed}",
            **await wake_up(trace, os.path.join(directory, "steps")),
        }
