"""Processes that use step stores on request, while servers, connections and they themselves fail.

    one = await WorkerProcess.start()
    await one.do("open", url="local:///tmp/steps", run="r")
    wait = one.order("wait", step=5)
    one.stop(); one.resume(); await one.kill()

    python -m tests.support.store_processes asyncio|uvloop [ADDRESS]     the process itself; a
                                                                         member of the Ray cluster
                                                                         there

Each line of its input is an order, `{"id": 3, "do": "wait", ...}`; each reply has its id, and
`result` or `error`. Orders are carried out concurrently. Before each call of the store its begin is
printed, and afterwards its end: they outlive the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import random
import select
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from aiohooks.errors import (
    AiohooksError,
    StaleTermError,
    StepTimeoutError,
    StoreResetError,
    WrongLoopError,
)
from aiohooks.stores import Position, Publisher, open_step_store
from tests.conformance.report import installed_loops, loop_factory
from tests.support.source import ROOT
from tests.support.step_laws import Kind, Operation
from tests.support.stores import directory_of
from tests.support.waiting import HANG_SECS, elapse

numbers = itertools.count(1)
"""Unique numbers."""
TICK_SECS = 0.02


# The parent's side.


class SlownessWatch:
    """Measures for how long the process that it is in does not run."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []

    async def watch(self) -> None:
        while True:
            before = time.monotonic()
            await elapse(TICK_SECS)
            self._gaps.append((before, time.monotonic() - before))

    def longest_since(self, began: float) -> float:
        """Return the longest time in seconds since `began`."""
        self._gaps = self._gaps[-int(HANG_SECS * 10 / TICK_SECS) :]
        return max((gap for before, gap in self._gaps if before >= began), default=0.0)


class WorkerProcess:
    """The parent's side of a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._calls: dict[int, Operation] = {}
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, address: str = "") -> Self:
        """Start a process, which joins the Ray cluster at the address; they alternate between the
        installed event loops.
        """
        loops = installed_loops()
        command = [
            sys.executable,
            "-m",
            "tests.support.store_processes",
            loops[next(numbers) % len(loops)],
            address,
        ]
        pipe = asyncio.subprocess.PIPE
        one = cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=2**20
            )
        )
        await reply_to(one.order("ready"), "start of a process")
        return one

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if not line.endswith(b"\n"):
                break  # killed in the middle of it
            if not line.startswith(b"{"):
                continue  # printed by an engine
            # An engine that prints at the same time appends to the line.
            reply, _ = json.JSONDecoder().raw_decode(line.decode())
            if "call" in reply:
                self._note(reply.pop("call"), **reply)
            elif not (answer := self._answers.pop(reply["id"])).done():
                answer.set_result(reply)

    def _note(self, number: int, **what: Any) -> None:
        """Note the begin or the end of a call of the store, or that it has had no effect."""
        if "kind" in what:
            self._calls[number] = Operation(self.process.pid, **what)
        elif what:
            self._calls[number] = dataclasses.replace(
                self._calls[number], ended=what["ended"], position=Position(*what["at"])
            )
        else:
            del self._calls[number]

    @property
    def history(self) -> list[Operation]:
        """Its calls of the store since `forget`."""
        return list(self._calls.values())

    def forget(self) -> None:
        """Forget its calls, before it opens another run."""
        self._calls.clear()

    def order(self, do: str, **what: Any) -> asyncio.Future[dict[str, Any]]:
        """Send an order, and return the future of its reply."""
        assert self.process.stdin is not None
        number = next(numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({"id": number, "do": do, **what}).encode() + b"\n")
        return answer

    async def do(self, do: str, **what: Any) -> Any:
        """Send an order, and return its result."""
        reply = await reply_to(self.order(do, **what), do)
        if "error" in reply:
            raise AssertionError(f"{do}: {reply}")
        return reply["result"]

    def stop(self) -> None:
        """Suspend it by a signal, until `resume` or `kill`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Kill it, and read all that it has printed."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.ended()

    async def end(self) -> None:
        """Let it end normally."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.ended()

    async def ended(self) -> None:
        """Wait for its end, and read all that it has printed."""
        await self.process.wait()
        await self._reader

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None


async def reply_to(answer: asyncio.Future[dict[str, Any]], what: str) -> dict[str, Any]:
    """Return the reply, or raise an `AssertionError`."""
    done, _ = await asyncio.wait([answer], timeout=HANG_SECS)
    if not done:
        raise AssertionError(f"{what}: no answer within {HANG_SECS} s")
    return answer.result()


# The process.

Mix = Literal["raises", "resets", "advances"]
"""Which writes there are beside reads and waits: advances, with those of the name."""
EPOCH_STEPS = 10**9
"""The steps of each epoch of the mix "resets": an advance returns only a step, and that then says
its epoch.
"""
_CALLERS = 4
_MOST_WAIT_SECS = 0.2


def first_step(epoch: int) -> int:
    """Return the step that the reset to an epoch sets, lower or higher than the one before;
    different for each epoch.
    """
    return 0 if epoch == 1 else (epoch * 7919 % 1009 + 1) * EPOCH_STEPS


def epoch_of(step: int) -> int:
    """Return the epoch of a step."""
    if step < EPOCH_STEPS:
        return 1
    return next(epoch for epoch in range(2, 1009) if first_step(epoch) == step - step % EPOCH_STEPS)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Worker:
    """The orders, a method each."""

    def __init__(self) -> None:
        self.store: Any = None
        self.stack = contextlib.AsyncExitStack()
        self.moving: asyncio.Future[Any] | None = None
        self.term = 0
        self.leading = contextlib.AsyncExitStack()
        self.publishers: dict[str, Publisher] = {}
        self.slowness = SlownessWatch()

    async def ready(self) -> None:
        """Do nothing: the answer says that the process has started."""

    async def open(self, url: str, run: str, **options: Any) -> None:
        self.term = 0
        self.publishers.clear()
        self.store = await self.stack.enter_async_context(open_step_store(url, run=run, **options))

    async def close(self) -> None:
        with contextlib.suppress(StaleTermError):
            await self.rest()
        await self.stack.aclose()

    # Calls of the store that are noted.

    async def call(self, kind: Kind, amount: int = 0, timeout: float | None = None) -> Position:
        number = next(numbers)
        say(call=number, kind=kind, amount=amount, began=time.monotonic(), term=self.term)
        try:
            if kind == "read":
                position = await self.store.value()
            elif kind == "reset":
                position = await self.store.reset(amount)
            else:
                if kind == "wait":
                    step = await self.store.wait_for(amount, timeout=timeout)
                else:
                    step = await (self.store.advance if kind == "advance" else self.store.raise_to)(
                        amount
                    )
                position = Position(epoch_of(step), step)
        except StoreResetError:
            self.store.acknowledge_loss()
            raise
        except (StepTimeoutError, StaleTermError):
            say(call=number)  # it has had no effect
            raise
        say(call=number, ended=time.monotonic(), at=list(position))
        return Position(*position)

    async def wait(self, step: int) -> int:
        return (await self.call("wait", step)).step

    async def value(self) -> int:
        return (await self.call("read")).step

    async def advance(self, times: int = 1, by: int = 1) -> int:
        for _ in range(times):
            await self.call("advance", by)
        return int(self.store.latest.step)

    async def move(self, callers: int, pause_secs: float) -> None:
        """Advance until `rest`, with several concurrent callers that pause up to so long after each
        step.
        """
        moves = [self._move(pause_secs) for _ in range(callers)]
        self.moving = asyncio.gather(*moves)

    async def _move(self, pause_secs: float) -> None:
        await asyncio.sleep(0)
        while self.moving is not None:
            await self.call("advance", 1)
            await elapse(pause_secs * random.random())

    async def rest(self) -> None:
        moving, self.moving = self.moving, None
        if moving is not None:
            await moving

    async def call_at_random(self, count: int, seed: str, mix: Mix, *, steady: bool) -> None:
        """Make so many calls, by several tasks; one of the processes, which is never killed, is
        `steady`.
        """
        chance, left = random.Random(seed), iter(range(count))
        resetting = False  # a reset says by its step which epoch it begins: there is one at a time

        def draw() -> tuple[Kind, int]:
            latest, kind = self.store.latest, chance.random()
            if kind < 0.25:
                return "read", 0
            if kind < 0.5:
                return "wait", latest.step + chance.randint(0, 3)
            if kind < 0.55 and mix == "raises":
                return "raise", latest.step + chance.randint(0, 4)
            if kind < 0.51 and mix == "resets" and steady and not resetting:
                return "reset", first_step(latest.epoch + 1)
            # Only the process that is never killed adds more: what unanswered advances have added
            # is then known by their number.
            return "advance", chance.randint(1, 5) if steady and mix != "resets" else 1

        async def call_some() -> None:
            nonlocal resetting
            for _ in left:
                kind, amount = draw()
                resetting = resetting or kind == "reset"
                with contextlib.suppress(AiohooksError):
                    await self.call(kind, amount, _MOST_WAIT_SECS)
                    resetting = resetting and kind != "reset"

        await asyncio.gather(*(call_some() for _ in range(_CALLERS)))

    # Publishers and terms.

    async def parked(self) -> int:
        while not self.store.statistics().waiting:  # noqa: ASYNC110 - a store has no event for this
            await asyncio.sleep(0)
        return int(self.store.statistics().waiting)

    async def publish(self, name: str) -> None:
        self.publishers[name] = self.stack.enter_context(self.store.publisher(name))
        await self.store.flush()

    async def leave(self, name: str, error: str = "") -> None:
        """Let a publisher leave; with a text it has failed."""
        self.publishers.pop(name).close(RuntimeError(error) if error else None)
        await self.store.flush()

    async def known_publishers(self) -> list[str]:
        await self.store.value()
        return list(self.store.statistics().publishers)

    async def lead(self) -> int:
        self.leading = await self.stack.enter_async_context(contextlib.AsyncExitStack())
        self.term = int((await self.leading.enter_async_context(self.store.lead())).number)
        return self.term

    async def standing_by(self) -> None:
        while not self.store._waits.vacancies:  # noqa: ASYNC110 - a store has no event for this
            await asyncio.sleep(0)

    async def step_down(self) -> None:
        self.term = 0
        await self.leading.aclose()

    # The process itself.

    async def watch_silence(self) -> None:
        """Measure from now on for how long this process does not run."""
        self.slowness = SlownessWatch()
        watching = asyncio.ensure_future(self.slowness.watch())
        self.stack.callback(watching.cancel)

    async def silence(self) -> float:
        """Return the longest time that this process has not run."""
        return self.slowness.longest_since(0.0)

    # Of the local store.

    async def hold_lock(self) -> None:
        """Take the lock of the run for good."""
        await self.store.value()
        self.held = sqlite3.connect(directory_of(self.store) / "run.db", isolation_level=None)
        self.held.execute("BEGIN IMMEDIATE")

    async def fork(self) -> list[Any]:
        """Return the id of a forked process, which lives until it is killed, and the error that it
        got from the store.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                self.store.latest  # noqa: B018 - may be read anywhere
                self.store.publisher("child")
            except WrongLoopError as error:
                os.write(writer, str(error).encode())
            select.select([], [], [])
        return [child, os.read(reader, 1000).decode()]

    async def forbid_inotify(self) -> None:
        """Be a user who has no inotify left."""
        new_user_namespace = 0x10000000
        assert ctypes.CDLL(None).unshare(new_user_namespace) == 0, (
            "unshare"
        )  # os.unshare came with Python 3.12
        # A setting of the kernel, and no file of a disk.
        Path("/proc/sys/user/max_inotify_instances").write_text("0")  # noqa: ASYNC240

    # Orders.

    async def serve(self) -> None:
        """Carry out orders until the input ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.ensure_future(self._obey(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        pipe.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _obey(self, order: dict[str, Any]) -> None:
        number, what = order.pop("id"), order.pop("do")
        try:
            result = await getattr(self, what)(**order)
        except Exception as error:
            say(id=number, error=type(error).__name__, text=str(error))
        else:
            say(id=number, result=result)


async def main(address: str) -> None:
    """Execute orders until the input ends, as a member of a Ray cluster if there is an address."""
    if not address:
        return await Worker().serve()
    from tests.support.ray_cluster import membership

    with membership(address):
        await Worker().serve()


def run(arguments: Sequence[str]) -> None:
    """Run the process."""
    with asyncio.Runner(loop_factory=loop_factory(arguments[0])) as runner:
        runner.run(main(arguments[1]))


if __name__ == "__main__":
    run(sys.argv[1:])
