"""Faults of the engines with a server: three processes, a proxy before each, and one fault per trial.

In each trial three processes wait and advance on a run of their own, each behind a proxy, and one thing fails at a random
time. Then it is checked that

- all waits of living processes end in time: at their step ("resumed"), or with the expected error ("typed error");
- the step is all that was acknowledged, plus at most what a killed process had begun: nothing twice, nothing lost;
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
from tests.support.store_trials import LIMIT_SECS, WorkerProcess, find_miscount, numbers, reply_to

HEARTBEAT_SECS, LEASE_SECS, LONGEST_PAUSE_SECS = 0.5, 1.5, 5.0
_BOUND_SECS = HEARTBEAT_SECS + 1.0 + LONGEST_PAUSE_SECS + 2.0
"""Within this time after the fault waits continue: a heartbeat and its grace, a pause between two attempts, a lease."""


class ProxiedWorker(WorkerProcess):
    """A process behind a proxy of its own."""

    proxy: Proxy

    @classmethod
    async def behind(cls, proxy: Proxy) -> ProxiedWorker:
        """Start a process that uses the proxy."""
        one = await cls.start()
        one.proxy = proxy
        return one


class TrialSetup:
    """A server and three processes; each trial has a run of its own."""

    def __init__(self, server: Server, seed: int, request: bytes, left: Callable[[], Awaitable[str]]) -> None:
        """`request` is in every request of the store that is answered; `left` returns what is left in the server."""
        self.server = server
        self.chance = random.Random(seed)
        self.request = request
        self.workers: list[ProxiedWorker] = []
        self.run = ""
        self.late_secs = 0.0
        self.bound_secs = _BOUND_SECS
        self._left = left
        self._proxies: list[Proxy] = []

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[TrialSetup]:
        """Run the processes and proxies during the block; the server runs already."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._proxies = [await stack.enter_async_context(Proxy.to(self.server.port)) for _ in range(3)]
                self.workers = list(await asyncio.gather(*map(ProxiedWorker.behind, self._proxies)))
                try:
                    yield self
                finally:
                    await asyncio.gather(*(one.kill() for one in self.workers))
        finally:
            await asyncio.to_thread(self.server.kill)

    async def begin(self, **options: Any) -> list[ProxiedWorker]:
        """Begin a trial: a new run, opened by all processes."""
        self.run = f"trial-{next(numbers)}"
        self.late_secs = 0.0
        for number, one in enumerate(self.workers):
            if not one.alive:
                self.workers[number] = await ProxiedWorker.behind(one.proxy)
        scheme = self.server.url.partition(":")[0]
        options = {"heartbeat": HEARTBEAT_SECS, "lease_secs": LEASE_SECS, "connect_timeout": LIMIT_SECS, **options}
        for one in self.workers:
            one.reset_counts()
            one.proxy.heal()
        opening = (one.do("open", url=f"{scheme}://127.0.0.1:{one.proxy.port}", run=self.run, **options) for one in self.workers)
        await asyncio.gather(*opening)
        return self.workers

    async def moment(self) -> None:
        """Wait for a short random time."""
        await asyncio.sleep(self.chance.random() ** 2 * 0.05)

    async def last(self, secs: float) -> None:
        """Let a fault last a random time, `secs` at most. The duration is part of the fault: there is no event to wait for."""
        await asyncio.sleep(secs * self.chance.random())

    async def end(self) -> str:
        """Close all stores; return what is wrong with the count, or what is left in the server."""
        living = [one for one in self.workers if one.alive]
        wrong = find_miscount(self.workers, (await living[0].do("value"))[1])
        await asyncio.gather(*(one.do("close") for one in living))
        return wrong or await self.wait_nothing_left()

    async def wait_nothing_left(self) -> str:
        """Return what is left in the server after all stores were closed."""
        for proxy in self._proxies:
            proxy.end_all()  # also the server's ends of connections in a black hole
        left = ""
        for _ in range(200):  # the server needs a moment to notice the end
            if not (left := await self._left()):
                break
        return left

    async def abandon(self) -> None:
        """See `store_trials.TrialSetup`."""
        for one in self.workers:
            one.proxy.heal()
            await one.kill()


Fault = Callable[[], Awaitable[None]]
Trial = Callable[[TrialSetup], Awaitable[str]]


async def resumes(setup: TrialSetup, waiter: WorkerProcess, advancer: WorkerProcess, fault: Fault) -> str:
    """One process advances, one waits for a step near the fault and for one beyond it; both continue afterwards."""
    near, far = waiter.order("wait", step=50), waiter.order("wait", step=10_000_000)
    await waiter.do("parked", count=1)
    await advancer.do("move")
    await setup.moment()
    await fault()
    over = time.monotonic()
    assert (await reply_to(near, "wait"))["result"] >= 50
    if advancer.alive:
        await advancer.do("rest")
    other = next(one for one in setup.workers if one.alive and one is not waiter)
    await other.do("advance", by=10_000_000)
    assert (await reply_to(far, "wait beyond the fault"))["result"] >= 10_000_000
    setup.late_secs = time.monotonic() - over
    return "resumed"


async def server_killed(setup: TrialSetup, *, data_lost: bool) -> str:
    """The server is killed and restarted, with its data or without."""
    waiter, advancer, _ = await setup.begin()

    async def fault() -> None:
        await asyncio.to_thread(setup.server.kill)
        if data_lost:
            setup.server.lose_data()
        await setup.moment()
        await asyncio.to_thread(setup.server.start)

    return await resumes(setup, waiter, advancer, fault)


async def server_stopped(setup: TrialSetup) -> str:
    """The server is suspended by a signal, perhaps for longer than a heartbeat, and continues."""
    waiter, advancer, _ = await setup.begin()

    async def fault() -> None:
        setup.server.pause()
        await setup.last(4 * HEARTBEAT_SECS)
        setup.server.resume()

    return await resumes(setup, waiter, advancer, fault)


async def link_fails(
    setup: TrialSetup, fail: Callable[[ProxiedWorker], object], *, advancers: bool, gone_secs: float = 0.3
) -> str:
    """The connection of the waiter, or of the advancer, fails."""
    waiter, advancer, _ = await setup.begin()
    victim = advancer if advancers else waiter

    async def fault() -> None:
        fail(victim)
        await setup.last(gone_secs)
        victim.proxy.heal()

    return await resumes(setup, waiter, advancer, fault)


async def cut_in_message(setup: TrialSetup, *, advancers: bool) -> str:
    """An answer ends after its first bytes, and so does the connection."""
    most = setup.chance.randint(1, 60)
    return await link_fails(setup, lambda one: one.proxy.cut_in_message(most), advancers=advancers)


async def answers_lost(setup: TrialSetup) -> str:
    """The server carries out a request, and the answer is lost with the connection: five times in a row."""
    waiter, advancer, _ = await setup.begin()
    wait = waiter.order("wait", step=5)
    for _ in range(5):
        advancer.proxy.drop_answer(setup.request)
        await advancer.do("advance")
    advancer.proxy.heal()
    assert advancer.proxy.lost_answers, "no answer was lost"
    assert (await reply_to(wait, "wait"))["result"] == 5
    assert (await waiter.do("value"))[1] == 5
    return "resumed"


async def waiter_killed(setup: TrialSetup) -> str:
    """A waiter is killed, the others are woken."""
    waiter, advancer, victim = await setup.begin()
    victim.order("wait", step=10)
    return await resumes(setup, waiter, advancer, victim.kill)


async def advancer_killed(setup: TrialSetup) -> str:
    """A process is killed while it advances; another one continues."""
    waiter, advancer, victim = await setup.begin()
    await victim.do("move")
    return await resumes(setup, waiter, advancer, victim.kill)


async def process_stopped(setup: TrialSetup, *, advancers: bool) -> str:
    """A process is suspended by a signal for a while."""
    waiter, advancer, _ = await setup.begin()
    victim = advancer if advancers else waiter

    async def fault() -> None:
        victim.stop()
        await setup.last(1.0)
        victim.resume()

    return await resumes(setup, waiter, advancer, fault)


async def chief_killed(setup: TrialSetup) -> str:
    """The chief is killed, and no other publisher could reach the step: waits end with the error; a new chief can lead."""
    waiter, other, chief = await setup.begin()
    first = await chief.do("lead")
    wait = waiter.order("wait", step=1_000_000)
    await waiter.do("parked")
    await chief.do("move")
    await setup.moment()
    await chief.kill()
    over = time.monotonic()
    reply = await reply_to(wait, "wait for a dead chief")
    setup.late_secs = time.monotonic() - over
    assert reply.get("error") == "PublisherFailedError", reply
    assert (await reply_to(other.order("lead"), "lead after a dead chief"))["result"] > first
    return "typed error"


async def chief_killed_with_successor(setup: TrialSetup) -> str:
    """The chief is killed while another one waits for the lead: that one takes over, and waits continue."""
    waiter, other, chief = await setup.begin(on_lost="keep")
    first = await chief.do("lead")
    wait = waiter.order("wait", step=1_000_000)
    await waiter.do("parked")
    lead = other.order("lead")
    await chief.do("move")
    await setup.moment()
    await chief.kill()
    over = time.monotonic()
    led = await reply_to(lead, "lead after a dead chief")
    assert led["result"] > first, led
    await other.do("advance", by=1_000_000)
    assert "result" in await reply_to(wait, "wait for the next chief")
    setup.late_secs = time.monotonic() - over
    return "resumed"


async def chief_stopped(setup: TrialSetup) -> str:
    """The chief is suspended until another one has taken over: when it continues, its writes are refused."""
    _, other, chief = await setup.begin()
    await chief.do("lead")
    await chief.do("advance", times=2)
    chief.stop()
    over = time.monotonic()
    try:
        led = await reply_to(other.order("lead"), "lead after a stopped chief")
        assert led["result"] == 2, led
        await other.do("advance", times=3)
    finally:
        chief.resume()
    reply = await reply_to(chief.order("advance"), "advance of a deposed chief")
    setup.late_secs = time.monotonic() - over
    assert reply.get("error") == "StaleTermError", reply
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
"""The faults of every engine with a server."""
