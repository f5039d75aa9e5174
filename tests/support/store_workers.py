"""Processes that use step stores as they are told, for the programmes in which servers, links and processes fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any, Self

from tests.conformance.report import installed_loops
from tests.support.source import ROOT

LIMIT_SECS = 30.0
"""What has not happened by then never will."""

numbers = itertools.count(1)
"""For whatever needs one that nothing else has."""


class StuckError(AssertionError):
    """Somebody waits for ever."""


class Crew:
    """One process, seen from the one that started it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """See `start`."""
        self.process = process
        self.begun = self.acked = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, module: str = "tests.support.store_worker", *arguments: str) -> Self:
        """A new one; they take turns on the event loops that there are."""
        loops = installed_loops()
        command = [sys.executable, "-m", module, loops[next(numbers) % len(loops)], *arguments]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT, limit=2**20))

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if not line.endswith(b"\n"):
                break  # killed in the middle of it
            if not line.startswith(b"{"):
                continue  # an engine's own
            told = json.loads(line)
            self.begun = told.get("begun", self.begun)
            self.acked = told.get("acked", self.acked)
            if "id" in told and not (answer := self._answers.pop(told["id"])).done():
                answer.set_result(told)

    def order(self, do: str, **what: Any) -> asyncio.Future[dict[str, Any]]:
        """Sends an order; the result is the answer to come."""
        assert self.process.stdin is not None
        number = next(numbers)
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
        await self._ended()

    async def end(self) -> None:
        """Lets it end in good order."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self._ended()

    async def _ended(self) -> None:
        await self.process.wait()
        await self._reader

    @property
    def alive(self) -> bool:
        """Whether nobody has killed it."""
        return self.process.returncode is None


async def answered(answer: asyncio.Future[dict[str, Any]], what: str, secs: float = LIMIT_SECS) -> dict[str, Any]:
    """The answer, if it ever comes."""
    done, _ = await asyncio.wait([answer], timeout=secs)
    if not done:
        raise StuckError(f"{what}: no answer within {secs:g} s")
    return answer.result()


def miscounted(crew: Sequence[Crew], step: int) -> str:
    """Says so if the step is not what was acknowledged, and besides at most what was begun by who was killed."""
    begun, acked = sum(one.begun for one in crew), sum(one.acked for one in crew)
    return "" if acked <= step <= begun else f"step {step}, acknowledged {acked}, begun {begun}"
