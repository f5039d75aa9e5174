"""Processes that use stores on a Ray cluster as they are told: one JSON object a line in, one a line out.

python -m tests.programmes._ray_crew ADDRESS
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from typing import Any

from aiohooks import StepStore, open_step_store
from tests.ray_cluster import environment
from tests.source import ROOT


class Crew:
    """One such process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, address: str) -> Crew:
        """Starts one; it has joined the cluster when it answers."""
        command = [sys.executable, "-m", "tests.programmes._ray_crew", address]
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(*command, cwd=ROOT, env={**os.environ, **environment()}, stdin=pipe, stdout=pipe)
        )

    def order(self, what: str, **options: Any) -> asyncio.Future[dict[str, Any]]:
        """Tells it what to do; the answer has `result`, or `error` and `text`."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"number": number, "what": what, **options}).encode() + b"\n")
        return answer

    async def do(self, what: str, **options: Any) -> Any:
        """Tells it what to do and waits for the result."""
        answer = await self.order(what, **options)
        if "error" in answer:
            raise AssertionError(f"{what}: {answer}")
        return answer["result"]

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    async def end(self, *, kill: bool = False) -> None:
        """Ends it, well or by force."""
        if kill:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        elif self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
        await self._reading
        for answer in self._answers.values():
            answer.cancel()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b"{"):
                answer = json.loads(line)
                waiting = self._answers.pop(answer["number"])
                if not waiting.done():
                    waiting.set_result(answer)


class Member:
    """The side of the process: its stores by run."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stores: dict[str, StepStore] = {}
        self._leads: dict[str, contextlib.AsyncExitStack] = {}

    async def obey(self, order: dict[str, Any]) -> Any:
        what, run = order["what"], order.get("run", "")
        if what == "open":
            opened = open_step_store("ray://faults", run=run, address=self._address, **order["options"])
            self._stores[run] = await opened.__aenter__()
            return os.getpid()
        if what == "close":
            if run in self._leads:
                await self._leads.pop(run).aclose()
            return await self._stores.pop(run).aclose()
        store = self._stores[run]
        if what == "advance":
            for _ in range(order["times"]):
                await store.advance()
            return order["times"]
        if what == "wait":
            return await store.wait_for(order["step"])
        if what == "wait many":
            return max(await asyncio.gather(*(store.wait_for(order["step"]) for _ in range(order["times"]))))
        if what == "publish":
            store.publisher(order["name"])
            return await store.flush()
        if what == "lead":
            self._leads[run] = contextlib.AsyncExitStack()
            return (await self._leads[run].enter_async_context(store.lead())).number
        if what == "value":
            return (await store.value()).step
        raise ValueError(what)


async def main(address: str) -> None:
    """Obeys until the input ends."""
    member = Member(address)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(order: dict[str, Any]) -> None:
        try:
            said: dict[str, Any] = {"result": await member.obey(order)}
        except Exception as error:
            said = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps({"number": order["number"], **said}), flush=True)

    from aiohooks.stores import _ray_cluster

    await asyncio.to_thread(_ray_cluster.join, address, timeout=30, log_to_driver=False)
    async for line in reader:
        task = asyncio.ensure_future(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    await asyncio.to_thread(_ray_cluster.leave)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
