"""Trials of the fault programs: processes that use step stores on request, while servers, connections and processes fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from tests.conformance.report import installed_loops
from tests.support.source import ROOT

LIMIT_SECS = 30.0
"""A reply that takes longer counts as stuck."""

_START_SECS = 120.0  # on a busy machine, where many start together

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
        await reply_to(one.order("ready"), "start of a process", _START_SECS)
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


async def reply_to(answer: asyncio.Future[dict[str, Any]], what: str, secs: float = LIMIT_SECS) -> dict[str, Any]:
    """Return the reply, or raise `StuckError`."""
    done, _ = await asyncio.wait([answer], timeout=secs)
    if not done:
        raise StuckError(f"{what}: no answer within {secs:g} s")
    return answer.result()


def find_miscount(workers: Sequence[WorkerProcess], step: int) -> str:
    """Return what is wrong if the step is not all that was acknowledged, plus at most what killed processes had begun."""
    begun, acked = sum(one.begun for one in workers), sum(one.acked for one in workers)
    return "" if acked <= step <= begun else f"step {step}, acknowledged {acked}, begun {begun}"


# --- trials


class TrialSetup(Protocol):
    """The processes and servers that trials use."""

    late_secs: float
    """How long after the fault the last wait of the trial ended."""
    bound_secs: float
    """The bound of `late_secs`."""

    async def end(self) -> str:
        """Finish a trial; return what is wrong with the count, or what is left in the engine."""
        ...

    async def abandon(self) -> None:
        """Clean up after a failed trial."""
        ...


S = TypeVar("S", bound=TrialSetup)


async def run_trials(
    setup: S, count: int, faults: Sequence[tuple[str, Callable[[S], Awaitable[str]]]]
) -> tuple[Counter[str], list[str]]:
    """Run `count` trials, fault after fault; return how often each outcome occurred, and the problems."""
    verdicts: Counter[str] = Counter()
    problems: list[str] = []
    for number, (name, trial) in zip(range(count), itertools.cycle(faults), strict=False):
        began = time.monotonic()
        try:
            status = await trial(setup)
            wrong = await setup.end()
            if not wrong and setup.late_secs > setup.bound_secs:
                wrong = f"resumed after {setup.late_secs:.1f} s, more than {setup.bound_secs:g} s"
            if wrong:
                problems.append(f"trial {number}, {name}: {wrong}")
                status = "wrong"
        except AssertionError as error:
            problems.append(f"trial {number}, {name}: {error}")
            status = "stuck" if isinstance(error, StuckError) else "wrong"
            await setup.abandon()
        verdicts[f"{name}: {status}"] += 1
        print(f"{number:4} {name:38} {status:12} {setup.late_secs:6.2f} of {time.monotonic() - began:6.2f} s", flush=True)
    return verdicts, problems


def report(verdicts: Counter[str], problems: Sequence[str]) -> int:
    """Print the outcomes; return the exit code."""
    for name, times in sorted(verdicts.items()):
        print(f"{times:5} {name}")
    stuck = sum(times for name, times in verdicts.items() if name.endswith(": stuck"))
    print(f"{verdicts.total()} faults, {stuck} stuck (limit {LIMIT_SECS:g} s), {len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems else 0
