"""What the trials of the NATS fault programme are played on: a server, processes, and a proxy before each of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.source import ROOT
from tests.store_proxy import Proxy
from tests.store_servers import Server, free_port

LIMIT_SECS = 30.0
"""What has not happened by then never will."""
OPTIONS = {"heartbeat": 0.5, "lease_secs": 1.5, "connect_timeout": LIMIT_SECS}

_numbers = itertools.count(1)


class StuckError(AssertionError):
    """Somebody waits for ever."""


class Crew:
    """One process, behind a proxy of its own."""

    def __init__(self, process: asyncio.subprocess.Process, proxy: Proxy) -> None:
        self.process = process
        self.proxy = proxy
        self.begun = self.acked = 0
        self.stopped = False
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, proxy: Proxy) -> Crew:
        """A new one."""
        command = [sys.executable, "-m", "tests.programmes._nats_worker", str(next(_numbers))]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=2**20), proxy)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if not line.endswith(b"\n"):
                break  # killed in the middle of it
            told = json.loads(line)
            self.begun = told.get("begun", self.begun)
            self.acked = told.get("acked", self.acked)
            if "id" in told and not (answer := self._answers.pop(told["id"])).done():
                answer.set_result(told)

    def order(self, do: str, **what: Any) -> asyncio.Future[dict[str, Any]]:
        """Sends an order; the result is the answer to come."""
        assert self.process.stdin is not None
        number = next(_numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({"id": number, "do": do, **what}).encode() + b"\n")
        return answer

    async def do(self, do: str, **what: Any) -> Any:
        """Gives an order and returns its result."""
        told = await answered(self.order(do, **what), do)
        if "error" in told:
            raise AssertionError(f"{do}: {told}")
        return told["result"]

    def stop(self) -> None:
        """Stops it by a signal, until `resume` or `kill`."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """Kills it, and reads all that it has said."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._reader

    @property
    def alive(self) -> bool:
        """Whether nobody has killed it."""
        return self.process.returncode is None


async def answered(answer: asyncio.Future[dict[str, Any]], what: str) -> dict[str, Any]:
    """The answer, if it ever comes."""
    done, _ = await asyncio.wait([answer], timeout=LIMIT_SECS)
    if not done:
        raise StuckError(f"{what}: no answer within {LIMIT_SECS:g} s")
    return answer.result()


class Stage:
    """The server and three processes; each trial has a run of its own."""

    def __init__(self, server: Server, monitor: int, chance: random.Random) -> None:
        self.server = server
        self.chance = chance
        self.crew: list[Crew] = []
        self.run = ""
        self._monitor = monitor
        self._proxies: list[Proxy] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def set_up(cls, directory: Path, seed: int) -> AsyncIterator[Stage]:
        """All of it, for the time of the block."""
        monitor = free_port()
        server = Server("nats", directory, ["-m", str(monitor)])
        await asyncio.to_thread(server.start)
        stage = cls(server, monitor, random.Random(seed))
        try:
            async with contextlib.AsyncExitStack() as stack:
                stage._proxies = [await stack.enter_async_context(Proxy.to(server.port)) for _ in range(3)]
                stage.crew = list(await asyncio.gather(*map(Crew.start, stage._proxies)))
                try:
                    yield stage
                finally:
                    await asyncio.gather(*(one.kill() for one in stage.crew))
        finally:
            await asyncio.to_thread(server.kill)

    async def begin(self, **options: Any) -> list[Crew]:
        """A new run, opened by all processes."""
        self.run = f"trial-{next(_numbers)}"
        for number, one in enumerate(self.crew):
            if not one.alive:
                self.crew[number] = await Crew.start(one.proxy)
        for one in self.crew:
            one.begun = one.acked = 0
        opening = (
            one.do("open", url=f"nats://127.0.0.1:{one.proxy.port}", run=self.run, **OPTIONS, **options) for one in self.crew
        )
        await asyncio.gather(*opening)
        return self.crew

    async def moment(self) -> None:
        """A little time, never the same."""
        await asyncio.sleep(self.chance.random() ** 2 * 0.05)

    async def end(self) -> str:
        """Closes all stores; says what is wrong with the count, or what is left in the server."""
        living = [one for one in self.crew if one.alive]
        step = (await living[0].do("value"))[1]
        begun, acked = sum(one.begun for one in self.crew), sum(one.acked for one in self.crew)
        await asyncio.gather(*(one.do("close") for one in living))
        for proxy in self._proxies:
            proxy.end_all()  # the server's ends of what a black hole has swallowed, which it would ping for minutes
        wrong = "" if acked <= step <= begun else f"step {step}, acknowledged {acked}, begun {begun}"
        for _ in range(100):  # a server that was told of an end takes a moment
            clients, consumers = await asyncio.to_thread(self._left)
            if not clients:
                break
        return wrong or (f"{clients} connections and {consumers} consumers are left" if clients or consumers else "")

    def _left(self) -> tuple[int, int]:
        def asked(what: str) -> Any:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._monitor}/{what}", timeout=10) as reply:
                return json.load(reply)

        return asked("connz")["num_connections"], asked("jsz")["consumers"]
