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
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from tests.support.store_proxy import Proxy
from tests.support.store_servers import Server
from tests.support.store_workers import LIMIT_SECS, Crew, answered, miscounted, numbers

HEARTBEAT_SECS, LEASE_SECS, LONGEST_PAUSE_SECS = 0.5, 1.5, 5.0
_BOUND_SECS = HEARTBEAT_SECS + 1.0 + LONGEST_PAUSE_SECS + 2.0
"""After what failed is there again, waits go on within this: a heartbeat and its grace, a pause between two tries, a lease."""


class Linked(Crew):
    """One process, behind a proxy of its own."""

    proxy: Proxy

    @classmethod
    async def behind(cls, proxy: Proxy) -> Linked:
        """A new one."""
        one = await cls.start()
        one.proxy = proxy
        return one


class Stage:
    """A server and three processes; each trial has a run of its own."""

    def __init__(self, server: Server, seed: int, request: bytes, left: Callable[[], Awaitable[str]]) -> None:
        """`request` is in every request of the store's that is answered; `left` says what is left in the server, if anything."""
        self.server = server
        self.chance = random.Random(seed)
        self.request = request
        self.crew: list[Linked] = []
        self.run = ""
        self.late_secs = 0.0
        self.bound_secs = _BOUND_SECS
        self._left = left
        self._proxies: list[Proxy] = []

    @contextlib.asynccontextmanager
    async def set(self) -> AsyncIterator[Stage]:
        """The processes and proxies for the time of the block; the server runs already."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._proxies = [await stack.enter_async_context(Proxy.to(self.server.port)) for _ in range(3)]
                self.crew = list(await asyncio.gather(*map(Linked.behind, self._proxies)))
                try:
                    yield self
                finally:
                    await asyncio.gather(*(one.kill() for one in self.crew))
        finally:
            await asyncio.to_thread(self.server.kill)

    async def begin(self, **options: Any) -> list[Linked]:
        """A new run, opened by all processes."""
        self.run = f"trial-{next(numbers)}"
        self.late_secs = 0.0
        for number, one in enumerate(self.crew):
            if not one.alive:
                self.crew[number] = await Linked.behind(one.proxy)
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

    async def last(self, secs: float) -> None:
        """Lets a fault last, up to so long. How long it lasts is what is tried: there is nothing to wait for."""
        await asyncio.sleep(secs * self.chance.random())

    async def end(self) -> str:
        """Closes all stores; says what is wrong with the count, or what is left in the server."""
        living = [one for one in self.crew if one.alive]
        wrong = miscounted(self.crew, (await living[0].do("value"))[1])
        await asyncio.gather(*(one.do("close") for one in living))
        for proxy in self._proxies:
            proxy.end_all()  # the server's ends of what a black hole has swallowed
        left = ""
        for _ in range(200):  # a server that was told of an end takes a moment
            if not (left := await self._left()):
                break
        return wrong or left

    async def abandon(self) -> None:
        """See `store_trials.Stage`."""
        for one in self.crew:
            one.proxy.heal()
            await one.kill()


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
        await stage.last(4 * HEARTBEAT_SECS)
        stage.server.resume()

    return await resumes(stage, waiter, advancer, fault)


async def link_fails(stage: Stage, fail: Callable[[Linked], object], *, advancers: bool, gone_secs: float = 0.3) -> str:
    """The link of the one that waits, or of the one that advances, fails."""
    waiter, advancer, _ = await stage.begin()
    victim = advancer if advancers else waiter

    async def fault() -> None:
        fail(victim)
        await stage.last(gone_secs)
        victim.proxy.heal()

    return await resumes(stage, waiter, advancer, fault)


async def cut_in_message(stage: Stage, *, advancers: bool) -> str:
    """An answer ends after its first bytes, and so does the connection."""
    most = stage.chance.randint(1, 60)
    return await link_fails(stage, lambda one: one.proxy.cut_in_message(most), advancers=advancers)


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
        await stage.last(1.0)
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
    assert told.get("error") == "StaleTermError", told
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
    "cut in mid-message, waiter": partial(cut_in_message, advancers=False),
    "cut in mid-message, advancer": partial(cut_in_message, advancers=True),
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
