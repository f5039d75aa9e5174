"""What the fault programmes of the engines with a server have in common: processes, a proxy before each, and what fails.

In each trial three processes wait and advance on a run of their own, each behind a proxy, and one thing fails at a random
moment. Then it is looked whether

- all waits of those who live end in time: at their step ("resumed"), or with the error that is to be expected ("typed error");
- the step is exactly what was acknowledged, and besides at most what a killed process had begun: nothing twice, nothing lost;
- nothing is left in the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tests.conformance.report import installed_loops
from tests.source import ROOT
from tests.store_proxy import Proxy
from tests.store_servers import Server

LIMIT_SECS = 30.0
"""What has not happened by then never will."""
HEARTBEAT_SECS, LEASE_SECS, LONGEST_PAUSE_SECS = 0.5, 1.5, 5.0
BOUND_SECS = HEARTBEAT_SECS + 1.0 + LONGEST_PAUSE_SECS + 2.0
"""After what failed is there again, waits go on within this: a heartbeat and its grace, a pause between two tries, a lease."""

_numbers = itertools.count(1)


class StuckError(AssertionError):
    """Somebody waits for ever."""


class Crew:
    """One process, behind a proxy of its own."""

    def __init__(self, process: asyncio.subprocess.Process, proxy: Proxy) -> None:
        self.process = process
        self.proxy = proxy
        self.begun = self.acked = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, proxy: Proxy) -> Crew:
        """A new one; they take turns on the event loops that there are."""
        loops = installed_loops()
        command = [sys.executable, "-m", "tests.store_worker", loops[next(_numbers) % len(loops)]]
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
    """A server and three processes; each trial has a run of its own."""

    def __init__(self, server: Server, seed: int, request: bytes, left: Callable[[], Awaitable[str]]) -> None:
        """`request` is in every request of the store's that is answered; `left` says what is left in the server, if anything."""
        self.server = server
        self.chance = random.Random(seed)
        self.request = request
        self.crew: list[Crew] = []
        self.run = ""
        self.late_secs = 0.0
        """How long after the fault the last wait of the trial went on."""
        self._left = left
        self._proxies: list[Proxy] = []

    @contextlib.asynccontextmanager
    async def set(self) -> AsyncIterator[Stage]:
        """The processes and proxies for the time of the block; the server runs already."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._proxies = [await stack.enter_async_context(Proxy.to(self.server.port)) for _ in range(3)]
                self.crew = list(await asyncio.gather(*map(Crew.start, self._proxies)))
                try:
                    yield self
                finally:
                    await asyncio.gather(*(one.kill() for one in self.crew))
        finally:
            await asyncio.to_thread(self.server.kill)

    async def begin(self, **options: Any) -> list[Crew]:
        """A new run, opened by all processes."""
        self.run = f"trial-{next(_numbers)}"
        self.late_secs = 0.0
        for number, one in enumerate(self.crew):
            if not one.alive:
                self.crew[number] = await Crew.start(one.proxy)
        scheme = self.server.url.partition(":")[0]
        options = {"heartbeat": HEARTBEAT_SECS, "lease_secs": LEASE_SECS, "connect_timeout": LIMIT_SECS, **options}
        for one in self.crew:
            one.begun = one.acked = 0
            one.proxy.heal()
        opening = (one.do("open", url=f"{scheme}://127.0.0.1:{one.proxy.port}", run=self.run, **options) for one in self.crew)
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
            proxy.end_all()  # the server's ends of what a black hole has swallowed
        wrong = "" if acked <= step <= begun else f"step {step}, acknowledged {acked}, begun {begun}"
        left = ""
        for _ in range(200):  # a server that was told of an end takes a moment
            if not (left := await self._left()):
                break
        return wrong or left


Fault = Callable[[], Awaitable[None]]
Trial = Callable[[Stage], Awaitable[str]]


async def resumes(stage: Stage, waiter: Crew, advancer: Crew, fault: Fault) -> str:
    """One advances without a pause, one waits for a step near the fault and for one beyond it; both go on afterwards."""
    near, far = waiter.order("wait", step=50), waiter.order("wait", step=10_000_000)
    await waiter.do("parked", count=1)
    await advancer.do("move")
    await stage.moment()
    await fault()
    over = time.monotonic()
    assert (await answered(near, "wait"))["result"] >= 50
    if advancer.alive:
        await advancer.do("rest")
    other = next(one for one in stage.crew if one.alive and one is not waiter)
    await other.do("advance", by=10_000_000)
    assert (await answered(far, "wait beyond the fault"))["result"] >= 10_000_000
    stage.late_secs = time.monotonic() - over
    return "resumed"


async def server_killed(stage: Stage, *, data_lost: bool) -> str:
    """The server is killed and comes back, with its data or without."""
    waiter, advancer, _ = await stage.begin()

    async def fault() -> None:
        await asyncio.to_thread(stage.server.kill)
        if data_lost:
            stage.server.lose_data()
        await stage.moment()
        await asyncio.to_thread(stage.server.start)

    return await resumes(stage, waiter, advancer, fault)


async def server_stopped(stage: Stage) -> str:
    """The server is stopped by a signal, perhaps for longer than a heartbeat, and goes on."""
    waiter, advancer, _ = await stage.begin()

    async def fault() -> None:
        stage.server.pause()
        await asyncio.sleep(4 * HEARTBEAT_SECS * stage.chance.random())
        stage.server.resume()

    return await resumes(stage, waiter, advancer, fault)


async def link_fails(stage: Stage, fail: Callable[[Crew], object], *, advancers: bool, gone_secs: float = 0.3) -> str:
    """The link of the one that waits, or of the one that advances, fails."""
    waiter, advancer, _ = await stage.begin()
    victim = advancer if advancers else waiter

    async def fault() -> None:
        fail(victim)
        await asyncio.sleep(gone_secs * stage.chance.random())
        victim.proxy.heal()

    return await resumes(stage, waiter, advancer, fault)


async def answers_lost(stage: Stage) -> str:
    """The server does what it is asked, and the answer is lost with the connection: five times in a row."""
    waiter, advancer, _ = await stage.begin()
    wait = waiter.order("wait", step=5)
    for _ in range(5):
        advancer.proxy.drop_answer(stage.request)
        await advancer.do("advance")
    advancer.proxy.heal()
    assert advancer.proxy.lost_answers, "no answer was lost"
    assert (await answered(wait, "wait"))["result"] == 5
    assert (await waiter.do("value"))[1] == 5
    return "resumed"


async def waiter_killed(stage: Stage) -> str:
    """One that waits is killed, the others are woken."""
    waiter, advancer, victim = await stage.begin()
    victim.order("wait", step=10)
    return await resumes(stage, waiter, advancer, victim.kill)


async def advancer_killed(stage: Stage) -> str:
    """One that advances is killed in the middle; another one goes on."""
    waiter, advancer, victim = await stage.begin()
    await victim.do("move")
    return await resumes(stage, waiter, advancer, victim.kill)


async def process_stopped(stage: Stage, *, advancers: bool) -> str:
    """A process is stopped by a signal for a while, and continued."""
    waiter, advancer, _ = await stage.begin()
    victim = advancer if advancers else waiter

    async def fault() -> None:
        victim.stop()
        await asyncio.sleep(stage.chance.random())
        victim.resume()

    return await resumes(stage, waiter, advancer, fault)


async def chief_killed(stage: Stage) -> str:
    """The chief is killed, and nobody is left who could reach the step: waits end with the typed error; a new chief may come."""
    waiter, other, chief = await stage.begin()
    first = await chief.do("lead")
    wait = waiter.order("wait", step=1_000_000)
    await waiter.do("parked")
    await chief.do("move")
    await stage.moment()
    await chief.kill()
    over = time.monotonic()
    told = await answered(wait, "wait for a dead chief")
    stage.late_secs = time.monotonic() - over
    assert told.get("error") == "PublisherFailedError", told
    assert (await answered(other.order("lead"), "lead after a dead chief"))["result"] > first
    return "typed error"


async def chief_killed_with_successor(stage: Stage) -> str:
    """The chief is killed while another one waits for the lead: it takes over, and waiters go on."""
    waiter, other, chief = await stage.begin(on_lost="keep")
    first = await chief.do("lead")
    wait = waiter.order("wait", step=1_000_000)
    await waiter.do("parked")
    lead = other.order("lead")
    await chief.do("move")
    await stage.moment()
    await chief.kill()
    over = time.monotonic()
    led = await answered(lead, "lead after a dead chief")
    assert led["result"] > first, led
    await other.do("advance", by=1_000_000)
    assert "result" in await answered(wait, "wait for the next chief")
    stage.late_secs = time.monotonic() - over
    return "resumed"


async def chief_stopped(stage: Stage) -> str:
    """The chief is stopped until another one has taken over: when it goes on, its writes are refused."""
    _, other, chief = await stage.begin()
    await chief.do("lead")
    await chief.do("advance", times=2)
    chief.stop()
    over = time.monotonic()
    try:
        led = await answered(other.order("lead"), "lead after a stopped chief")
        assert led["result"] == 2, led
        await other.do("advance", times=3)
    finally:
        chief.resume()
    told = await answered(chief.order("advance"), "advance of a deposed chief")
    stage.late_secs = time.monotonic() - over
    assert told.get("error") == "StaleReignError", told
    assert (await other.do("value"))[1] == 5
    chief.begun = chief.acked  # it was refused
    return "typed error"


FAULTS: Mapping[str, Trial] = {
    "server killed, data kept": partial(server_killed, data_lost=False),
    "server killed, data lost": partial(server_killed, data_lost=True),
    "server stopped and continued": server_stopped,
    "link of the waiter cut": partial(link_fails, fail=lambda one: one.proxy.cut(), advancers=False),
    "link of the advancer cut": partial(link_fails, fail=lambda one: one.proxy.cut(), advancers=True),
    "black hole before the waiter": partial(link_fails, fail=lambda one: one.proxy.black_hole(), advancers=False, gone_secs=2.0),
    "black hole before the advancer": partial(link_fails, fail=lambda one: one.proxy.black_hole(), advancers=True, gone_secs=2.0),
    "cut in mid-message, waiter": partial(link_fails, fail=lambda one: one.proxy.cut_in_message(7), advancers=False),
    "cut in mid-message, advancer": partial(link_fails, fail=lambda one: one.proxy.cut_in_message(3), advancers=True),
    "answer lost": answers_lost,
    "waiter killed": waiter_killed,
    "advancer killed": advancer_killed,
    "waiter stopped and continued": partial(process_stopped, advancers=False),
    "advancer stopped and continued": partial(process_stopped, advancers=True),
    "chief killed": chief_killed,
    "chief killed, another one waiting": chief_killed_with_successor,
    "chief stopped, another one took over": chief_stopped,
}
"""What can fail on every engine with a server."""


async def play(stage: Stage, count: int, faults: Sequence[tuple[str, Trial]]) -> tuple[Counter[str], list[str]]:
    """Plays so many trials, fault after fault; the verdicts, and what went wrong."""
    verdicts: Counter[str] = Counter()
    problems: list[str] = []
    for number, (name, trial) in zip(range(count), itertools.cycle(faults), strict=False):
        began = time.monotonic()
        try:
            verdict = await trial(stage)
            wrong = await stage.end()
            if not wrong and stage.late_secs > BOUND_SECS:
                wrong = f"went on after {stage.late_secs:.1f} s, more than {BOUND_SECS:g} s"
            if wrong:
                problems.append(f"trial {number}, {name}: {wrong}")
                verdict = "wrong"
        except AssertionError as error:
            problems.append(f"trial {number}, {name}: {error}")
            verdict = "stuck" if isinstance(error, StuckError) else "wrong"
            for one in stage.crew:
                one.proxy.heal()
                await one.kill()
        verdicts[f"{name}: {verdict}"] += 1
        print(f"{number:4} {name:38} {verdict:12} {stage.late_secs:6.2f} of {time.monotonic() - began:6.2f} s", flush=True)
    return verdicts, problems


def report(verdicts: Counter[str], problems: Sequence[str]) -> int:
    """Prints it; the exit code."""
    for name, times in sorted(verdicts.items()):
        print(f"{times:5} {name}")
    stuck = sum(times for name, times in verdicts.items() if name.endswith(": stuck"))
    print(f"{verdicts.total()} faults, {stuck} stuck (limit {LIMIT_SECS:g} s), {len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems else 0
