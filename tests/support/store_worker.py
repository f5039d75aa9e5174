"""A process of the fault programs: opens step stores and carries out the orders on its standard input, line by line.

    python -m tests.support.store_worker asyncio|uvloop

Each line is an order, `{"id": 3, "do": "wait", ...}`; each reply has its id, and `result` or `error`. Orders are carried
out concurrently. Before each advance `{"begun": n}` is printed, after it `{"acked": n}` and the write itself: its parent needs
both if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohooks as ah
from aiohooks.errors import StaleTermError
from aiohooks.stores import Position, Publisher, open_step_store
from aiohooks.version_gate import VersionGate
from tests.conformance.report import loop_factory
from tests.support.history_load import Load
from tests.support.waiting import elapse

_TICK_SECS = 0.02


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Worker:
    """The orders, a method each."""

    def __init__(self) -> None:
        self.store: Any = None
        self.gate: Any = None
        self.session: Any = None
        self.stack = contextlib.AsyncExitStack()
        self.moving: asyncio.Task[Any] | None = None
        self.begun = self.acked = 0
        self.term = 0
        self.leading = contextlib.AsyncExitStack()
        self.publishers: dict[str, Publisher] = {}
        self.longest_silence = 0.0

    async def ready(self) -> None:
        """Do nothing: the answer says that the process has started."""

    async def open(self, url: str, run: str, **options: Any) -> None:
        self.begun = self.acked = self.term = 0
        self.longest_silence = 0.0
        self.publishers.clear()
        self.store = await self.stack.enter_async_context(open_step_store(url, run=run, **options))

    async def close(self) -> None:
        with contextlib.suppress(StaleTermError):
            await self.rest()
        await self.stack.aclose()

    async def wait(self, step: int) -> int:
        return int(await self.store.wait_for(step))

    async def parked(self) -> int:
        while not self.store.statistics().waiting:  # noqa: ASYNC110 - a store has no event for this
            await asyncio.sleep(0)
        return int(self.store.statistics().waiting)

    async def advance(self, times: int = 1, by: int = 1) -> int:
        for _ in range(times):
            await self._advance(by)
        return int(self.store.latest.step)

    async def _advance(self, by: int) -> None:
        self.begun += by
        say(begun=self.begun)
        term, began = self.term, time.monotonic()
        try:
            step = await self.store.advance(by)
        except StaleTermError:  # it was refused
            self.begun -= by
            say(begun=self.begun)
            raise
        self.acked += by
        say(acked=self.acked, wrote=[term, began, time.monotonic(), step])

    async def move(self, callers: int = 3, pause_secs: float = 0.0) -> None:
        """Advance until `rest`, with several concurrent callers that pause up to so long after each step."""
        self.moving = asyncio.gather(*(self._move(pause_secs) for _ in range(callers)))  # type: ignore[assignment]

    async def _move(self, pause_secs: float) -> None:
        await asyncio.sleep(0)
        while self.moving is not None:
            await self._advance(1)
            if pause_secs:
                await elapse(pause_secs * random.random())

    async def rest(self) -> None:
        moving, self.moving = self.moving, None
        if moving is not None:
            await moving

    async def publish(self, name: str) -> None:
        self.publishers[name] = self.stack.enter_context(self.store.publisher(name))
        await self.store.flush()

    async def leave(self, name: str, error: str = "") -> None:
        """Let a publisher leave; with a text it has failed."""
        self.publishers.pop(name).close(RuntimeError(error) if error else None)
        await self.store.flush()

    async def lead(self) -> int:
        self.leading = await self.stack.enter_async_context(contextlib.AsyncExitStack())
        self.term = int((await self.leading.enter_async_context(self.store.lead())).number)
        return self.term

    async def open_session(self, chief: bool) -> int:
        """Open a session on the store, and close it again; a worker waits for its chief, a chief for the lead."""
        creator = (ah.ChiefSessionCreator if chief else ah.WorkerSessionCreator)(ah.Graph(), global_step=self.store)
        self.session = ah.AsyncSingularMonitoredSession(creator)
        async with self.session:
            return int(self.store.latest.step)

    async def stop_session(self) -> None:
        self.session.request_stop("it takes too long")

    async def mark_initialised(self) -> None:
        await self.store.mark_initialised()

    async def standing_by(self) -> None:
        while not self.store._vacancies:  # noqa: ASYNC110 - a store has no event for this
            await asyncio.sleep(0)

    async def step_down(self) -> None:
        self.term = 0
        await self.leading.aclose()

    async def watch_silence(self) -> None:
        """Measure from now on for how long this process does not run."""
        self.longest_silence = 0.0
        tick = asyncio.ensure_future(self._tick())
        self.stack.callback(tick.cancel)

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await elapse(_TICK_SECS)
            self.longest_silence = max(self.longest_silence, time.monotonic() - before)

    async def silence(self) -> float:
        """Return the longest time that this process has not run."""
        return self.longest_silence

    async def open_gate(self, max_lag: int, per_version: int) -> None:
        self.gate = VersionGate(self.store, max_lag=max_lag, per_version=per_version)

    async def ship(self, times: int = 1) -> list[tuple[int, int]]:
        """Admit items, one after the other; return the step and the version of each."""
        shipped: list[tuple[int, int]] = []
        for _ in range(times):
            async with self.gate.admit() as ticket:
                shipped.append((ticket.step, ticket.version))
        return shipped

    async def until_gate_waits(self) -> None:
        while not self.gate.statistics().waiting:  # noqa: ASYNC110 - a gate has no event for this
            await asyncio.sleep(0)

    async def lag_of(self, epoch: int, step: int) -> int:
        await self.store.value()
        return int(self.gate.lag_of(Position(epoch, step)))

    async def reset(self, step: int) -> int:
        return int((await self.store.reset(step)).epoch)

    async def record(self, path: str, operations: int, **options: Any) -> None:
        """Make calls at random, and record them in a file; none: only a read."""
        load = Load(self.store, Path(path), **options)
        try:
            await (load.run(operations) if operations else load.call("read", 0))
        finally:
            load.close()

    async def known_publishers(self) -> list[str]:
        await self.store.value()
        return list(self.store.statistics().publishers)

    async def value(self) -> list[int]:
        return list(await self.store.value())

    async def serve(self) -> None:
        """Carry out orders until the input ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
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


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory(sys.argv[1])) as runner:
        runner.run(Worker().serve())
