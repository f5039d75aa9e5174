"""Faults of the Ray store's actor and of its processes, each counted; see `tests.support.store_faults`.

    python -m tests.fuzz.faults_ray --count 36

The processes have no proxies: lost connections are handled by Ray itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from tests.support.ray_cluster import actor_of, ray_cluster
from tests.support.store_trials import LIMIT_SECS, WorkerProcess, find_miscount, numbers, reply_to, report, run_trials

LEASE_SECS = 2.0
HEARTBEAT_SECS = 2.0
_BOUND_SECS = 60.0
"""Starting the actor again takes some seconds, twice if it is killed twice."""


class TrialSetup:
    """The processes, which are kept for all trials; a killed one is replaced. Each trial has its own run."""

    def __init__(self, address: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.workers: list[WorkerProcess] = []
        self.run = ""
        self.late_secs = 0.0
        self.bound_secs = _BOUND_SECS
        self._address = address

    async def begin(self, **options: Any) -> list[WorkerProcess]:
        """Start a trial: open a new run in three processes."""
        self.run = f"trial-{os.getpid()}-{next(numbers)}"
        self.late_secs = 0.0
        self.workers = [one for one in self.workers if one.alive]
        while len(self.workers) < 3:
            self.workers.append(await WorkerProcess.start("tests.fuzz._ray_worker", self._address))
        options = {"heartbeat": HEARTBEAT_SECS, "lease_secs": LEASE_SECS, "join_grace_secs": 0.0, **options}
        options["address"] = self._address
        opening = [one.order("open", url="ray://faults", run=self.run, **options) for one in self.workers]
        for one, opened in zip(self.workers, opening, strict=True):
            one.reset_counts()
            # A new process joins the cluster first.
            answer = await reply_to(opened, "open", 2 * LIMIT_SECS)
            assert "result" in answer, answer
        return self.workers

    async def wait_until_fault(self) -> None:
        """Wait a random time before the fault, up to the duration of some steps."""
        await _after(self.chance.random() ** 2 * 0.3)

    async def end(self) -> str:
        """See `store_trials.TrialSetup`."""
        living = [one for one in self.workers if one.alive]
        wrong = find_miscount(self.workers, (await living[0].do("value"))[1])
        await asyncio.gather(*(one.do("close") for one in living))
        return wrong or await self.end_actor()

    async def end_actor(self) -> str:
        """End the actor of the run, when all stores are closed; return what is left in it."""
        actor = await self.actor()
        # The poll of a killed process ends after its heartbeat.
        for _ in range(2 * int(HEARTBEAT_SECS) + 2):
            if not (left := (await actor.statistics.remote())["waiting"]):
                break
            await _after(0.5)
        from aiohooks.stores.ray import _cluster

        await asyncio.to_thread(_cluster.kill_actor, actor)
        return f"{left} polls are left in the actor" if left else ""

    async def abandon(self) -> None:
        """See `store_trials.TrialSetup`."""
        for one in self.workers:
            await one.kill()

    async def actor(self) -> Any:
        """Return the actor of the run."""
        return await asyncio.to_thread(actor_of, self.run, "faults")

    async def signal_actor(self, number: signal.Signals) -> int:
        """Send a signal to the actor's process, and return its id."""
        pid: int = (await (await self.actor()).statistics.remote())["pid"]
        os.kill(pid, number)
        return pid


async def _after(secs: float) -> None:
    """Wait for the moment of a fault, or for the heartbeat of a dead process: there is no event for either."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(secs, over.set_result, None)
    await over


async def killed_actor(setup: TrialSetup) -> str:
    """The step actor is killed while all processes advance and wait: no step and no wake-up is lost."""
    return await _all_count(setup, lambda: setup.signal_actor(signal.SIGKILL))


async def killed_actor_twice(setup: TrialSetup) -> str:
    """The actor is killed again as soon as it is back."""

    async def fault() -> None:
        await setup.signal_actor(signal.SIGKILL)
        while True:
            try:
                await setup.signal_actor(signal.SIGKILL)
            except Exception:
                await _after(0.05)
            else:
                return

    return await _all_count(setup, fault)


async def stopped_actor(setup: TrialSetup) -> str:
    """The actor is stopped for longer than all leases, and continued: no member counts as dead."""

    async def fault() -> None:
        pid = await setup.signal_actor(signal.SIGSTOP)
        await _after(1.5 * LEASE_SECS)
        os.kill(pid, signal.SIGCONT)

    return await _all_count(setup, fault)


async def _all_count(setup: TrialSetup, fault: Callable[[], Awaitable[Any]]) -> str:
    times = 60
    workers = await setup.begin()
    for one in workers:
        await one.do("publish", name=str(one.process.pid))
    target = len(workers) * times
    asked = [one.order("wait", step=target, times=50) for one in workers]
    asked += [one.order("advance", times=times) for one in workers]
    await setup.wait_until_fault()
    await fault()
    await _all_answered(setup, *asked)
    for one in workers:
        assert (await one.do("value"))[1] == target
    return "resumed"


async def _all_answered(setup: TrialSetup, *asked: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
    """Wait until every order is answered after the fault; return the last answer."""
    over = time.monotonic()
    for one in asked:
        answer = await reply_to(one, "after the fault", _BOUND_SECS)
        assert "result" in answer, answer
    setup.late_secs = time.monotonic() - over
    return answer


async def killed_waiter(setup: TrialSetup) -> str:
    """A waiting process is killed: the others continue, and its poll does not stay in the actor indefinitely."""
    victim, other, third = await setup.begin()
    victim.order("wait", step=1_000)
    wait, advance = other.order("wait", step=20), third.order("advance", times=20)
    await setup.wait_until_fault()
    await victim.kill()
    await _all_answered(setup, wait, advance)
    assert (await other.do("value"))[1] == 20
    return "resumed"


async def killed_advancer(setup: TrialSetup) -> str:
    """An advancing process is killed: the waiters for a step that only it could reach are notified."""
    victim, other, third = await setup.begin()
    await victim.do("publish", name="victim")
    wait = other.order("wait", step=1_000_000)
    victim.order("advance", times=1_000_000)
    await third.do("wait", step=3)
    await setup.wait_until_fault()
    await victim.kill()
    over = time.monotonic()
    answer = await reply_to(wait, "wait for a dead advancer", _BOUND_SECS)
    setup.late_secs = time.monotonic() - over
    assert answer.get("error") == "PublisherFailedError", answer
    return "typed error"


async def killed_chief(setup: TrialSetup) -> str:
    """The chief is killed: the next one, which waits for the lead, gets it in a new term."""
    victim, successor, _ = await setup.begin()
    first = await victim.do("lead")
    lead = successor.order("lead")
    await setup.wait_until_fault()
    await victim.kill()
    assert (await _all_answered(setup, lead))["result"] > first
    return "resumed"


FAULTS = (killed_actor, stopped_actor, killed_waiter, killed_actor_twice, killed_advancer, killed_chief)


@contextlib.asynccontextmanager
async def trials_on(address: str, seed: int) -> AsyncGenerator[TrialSetup]:
    """Run the processes on a cluster during the block."""
    from aiohooks.stores.ray import _cluster

    await asyncio.to_thread(_cluster.join, address, timeout=30, log_to_driver=False)
    setup = TrialSetup(address, seed)
    try:
        yield setup
    finally:
        for one in setup.workers:
            await one.end()
        await asyncio.to_thread(_cluster.leave)


async def played(address: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Run `count` trials; return the verdicts and the problems."""
    async with trials_on(address, seed) as setup:
        return await run_trials(setup, count, [(fault.__name__.replace("_", " "), fault) for fault in FAULTS])


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit code is 0 if there was no problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=36, help="how many faults (36)")
    parser.add_argument("--seed", type=int, default=0, help="for the moments of the faults (0)")
    parser.add_argument("--address", default=os.environ.get("AIOHOOKS_TEST_RAY"), help="a cluster that runs already")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    if options.address:
        return report(*asyncio.run(played(options.address, options.count, options.seed)))
    with ray_cluster() as address:
        return report(*asyncio.run(played(address, options.count, options.seed)))


if __name__ == "__main__":
    sys.exit(main())
