"""The parent's side of processes that use step stores on request, while servers, connections and processes fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from typing import Any, NamedTuple, Self

from tests.conformance.report import installed_loops
from tests.support.source import ROOT
from tests.support.waiting import HANG_SECS

numbers = itertools.count(1)
"""Unique numbers."""


class StuckError(AssertionError):
    """A reply has not come in time."""


class AckedWrite(NamedTuple):
    """An advance that was acknowledged."""

    term: int
    """The term of the process, 0 if it is not the chief."""
    began: float
    """By the clock that all processes of the machine share."""
    ended: float
    step: int
    """The step that it led to."""


class WorkerProcess:
    """The parent's side of a worker process, see `store_worker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.begun = self.acked = 0
        self.writes: list[AckedWrite] = []
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, module: str = "tests.support.store_worker", *arguments: str) -> Self:
        """Start a process; they alternate between the installed event loops."""
        loops = installed_loops()
        command = [sys.executable, "-m", module, loops[next(numbers) % len(loops)], *arguments]
        pipe = asyncio.subprocess.PIPE
        one = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=2**20))
        await reply_to(one.order("ready"), "start of a process")
        return one

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if not line.endswith(b"\n"):
                break  # killed in the middle of it
            if not line.startswith(b"{"):
                continue  # printed by an engine
            reply = json.loads(line)
            self.begun = reply.get("begun", self.begun)
            self.acked = reply.get("acked", self.acked)
            if "wrote" in reply:
                self.writes.append(AckedWrite(*reply["wrote"]))
            if "id" in reply and not (answer := self._answers.pop(reply["id"])).done():
                answer.set_result(reply)

    def reset_counts(self) -> None:
        """Forget what it has written, before it opens another run."""
        self.begun = self.acked = 0
        self.writes = []

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
        await self._ended()

    async def end(self) -> None:
        """Let it end normally."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self._ended()

    async def _ended(self) -> None:
        await self.process.wait()
        await self._reader

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None


async def reply_to(answer: asyncio.Future[dict[str, Any]], what: str, secs: float = HANG_SECS) -> dict[str, Any]:
    """Return the reply, or raise `StuckError`."""
    done, _ = await asyncio.wait([answer], timeout=secs)
    if not done:
        raise StuckError(f"{what}: no answer within {secs:g} s")
    return answer.result()
