"""What the Ray store does when its actor or its processes are killed or stopped, counted.

    python -m tests.programmes.faults_ray --count 36

In each trial three processes wait and advance on a run of its own, with one fault in the middle. Then it is looked whether

- all waits of the others end: at their step ("resumed"), or with the error that is to be expected ("typed error");
- the step is what was acknowledged, and at most what was begun besides: nothing twice, nothing lost;
- nobody waits in the actor any more.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.programmes._ray_crew import Crew
from tests.ray_cluster import keeper_of, ray_cluster

STUCK_SECS = 60.0
LEASE_SECS = 2.0
OPTIONS = {"heartbeat": 2.0, "lease_secs": LEASE_SECS, "join_grace_secs": 0.0}


@dataclass
class Stage:
    """The processes, which stay for all trials; a killed one is replaced."""

    address: str
    order: random.Random
    crew: list[Crew] = field(default_factory=list)
    secs: list[float] = field(default_factory=list)
    """From a fault to the end of what it has to do with."""

    async def ready(self) -> None:
        """Three processes."""
        while len(self.crew) < 3:
            self.crew.append(await Crew.start(self.address))

    async def kill(self, victim: Crew) -> None:
        """Kills a process."""
        self.crew.remove(victim)
        await victim.end(kill=True)

    async def some_time(self) -> None:
        """Until the fault: from nothing to what some steps take."""
        await _after(self.order.random() ** 2 * 0.3)


async def _after(secs: float) -> None:
    """When a fault comes, or the heartbeat of somebody who is dead: there is no event for it."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(secs, over.set_result, None)
    await over


async def _signal_keeper(run: str, number: signal.Signals) -> int:
    keeper = await asyncio.to_thread(keeper_of, run, "faults")
    pid: int = (await keeper.statistics.remote())["pid"]
    os.kill(pid, number)
    return pid


async def killed_actor(stage: Stage, run: str) -> str:
    """The step actor is killed while all advance and wait: nobody loses a step or a wake-up."""
    return await _all_count(stage, run, lambda: _signal_keeper(run, signal.SIGKILL))


async def killed_actor_twice(stage: Stage, run: str) -> str:
    """It is killed again as soon as it is back."""

    async def fault() -> None:
        await _signal_keeper(run, signal.SIGKILL)
        while True:
            try:
                await _signal_keeper(run, signal.SIGKILL)
            except Exception:
                await _after(0.05)
            else:
                return

    return await _all_count(stage, run, fault)


async def stopped_actor(stage: Stage, run: str) -> str:
    """It is stopped for longer than all leases, and continued: nobody is taken for dead."""

    async def fault() -> None:
        pid = await _signal_keeper(run, signal.SIGSTOP)
        await _after(1.5 * LEASE_SECS)
        os.kill(pid, signal.SIGCONT)

    return await _all_count(stage, run, fault)


async def _all_count(stage: Stage, run: str, fault: Callable[[], Awaitable[Any]]) -> str:
    times = 60
    for one in stage.crew:
        await one.do("publish", run=run, name=str(one.pid))
    target = len(stage.crew) * times
    waits = [one.order("wait many", run=run, step=target, times=50) for one in stage.crew]
    advances = [one.order("advance", run=run, times=times) for one in stage.crew]
    await stage.some_time()
    began = time.monotonic()
    await fault()
    for answer in await asyncio.gather(*advances, *waits):
        assert "result" in answer, answer
    stage.secs.append(time.monotonic() - began)
    for one in stage.crew:
        assert await one.do("value", run=run) == target
    return "resumed"


async def killed_waiter(stage: Stage, run: str) -> str:
    """A process that waits is killed: the others go on, and it does not wait in the actor for ever."""
    victim, other, third = stage.crew
    victim.order("wait", run=run, step=1_000)
    wait = other.order("wait", run=run, step=20)
    advance = third.order("advance", run=run, times=20)
    await stage.some_time()
    began = time.monotonic()
    await stage.kill(victim)
    for answer in await asyncio.gather(wait, advance):
        assert "result" in answer, answer
    stage.secs.append(time.monotonic() - began)
    assert await other.do("value", run=run) == 20
    return "resumed"


async def killed_advancer(stage: Stage, run: str) -> str:
    """A process that advances is killed: those who wait for a step that it alone could reach are told."""
    victim, other, third = stage.crew
    await victim.do("publish", run=run, name="victim")
    wait = other.order("wait", run=run, step=1_000_000)
    victim.order("advance", run=run, times=1_000_000)
    await third.do("wait", run=run, step=3)
    await stage.some_time()
    seen = await third.do("value", run=run)
    began = time.monotonic()
    await stage.kill(victim)
    told = await wait
    stage.secs.append(time.monotonic() - began)
    assert told.get("error") == "PublisherFailedError", told
    assert await third.do("value", run=run) >= seen
    return "typed error"


async def killed_chief(stage: Stage, run: str) -> str:
    """The chief is killed: the next one, who waits for the lead, gets it in a new reign."""
    victim, successor, _ = stage.crew
    first = await victim.do("lead", run=run)
    lead = successor.order("lead", run=run)
    await stage.some_time()
    began = time.monotonic()
    await stage.kill(victim)
    led = await lead
    stage.secs.append(time.monotonic() - began)
    assert led.get("result", 0) > first, led
    return "resumed"


FAULTS = (killed_actor, stopped_actor, killed_waiter, killed_actor_twice, killed_advancer, killed_chief)


async def trial(stage: Stage, number: int) -> str:
    """One fault, and what came of it."""
    await stage.ready()
    run = f"trial-{os.getpid()}-{number}"
    await asyncio.gather(*(one.do("open", run=run, options=OPTIONS) for one in stage.crew))
    verdict = await FAULTS[number % len(FAULTS)](stage, run)
    await asyncio.gather(*(one.do("close", run=run) for one in stage.crew))
    keeper = await asyncio.to_thread(keeper_of, run, "faults")
    # What a killed process waited for in the actor ends with its heartbeat.
    for _ in range(2 * int(OPTIONS["heartbeat"]) + 2):
        left = (await keeper.statistics.remote())["waiting"]
        if not left:
            break
        await _after(0.5)
    assert not left, f"{left} wait in the actor"
    from aiohooks.stores import _ray_cluster

    await asyncio.to_thread(_ray_cluster.kill_actor, keeper)
    return verdict


async def trials(address: str, count: int, seed: int) -> Counter[tuple[str, str]]:
    """All of them; one that takes too long is "stuck"."""
    from aiohooks.stores import _ray_cluster

    await asyncio.to_thread(_ray_cluster.join, address, timeout=30, log_to_driver=False)
    stage = Stage(address, random.Random(seed))
    found: Counter[tuple[str, str]] = Counter()
    try:
        for number in range(count):
            name = FAULTS[number % len(FAULTS)].__name__
            stage.secs.clear()
            try:
                async with asyncio.timeout(STUCK_SECS):
                    verdict = await trial(stage, number)
            except TimeoutError:
                verdict = "stuck"
            except AssertionError as error:
                verdict = f"wrong: {error}"
            found[name, verdict] += 1
            print(f"{number}: {name}: {verdict} after {max(stage.secs, default=0.0):.2f} s", flush=True)
            if verdict not in ("resumed", "typed error"):
                for one in stage.crew:
                    await one.end(kill=True)
                stage.crew.clear()
    finally:
        for one in stage.crew:
            await one.end()
        await asyncio.to_thread(_ray_cluster.leave)
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code says whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=36, help="how many faults (36)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--address", default=os.environ.get("AIOHOOKS_TEST_RAY"), help="a cluster that runs already")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    if options.address:
        found = asyncio.run(trials(options.address, options.count, options.seed))
    else:
        with ray_cluster() as address:
            found = asyncio.run(trials(address, options.count, options.seed))
    for (name, verdict), times in sorted(found.items()):
        print(f"{name:20} {verdict:12} {times}")
    good = sum(times for (_, verdict), times in found.items() if verdict in ("resumed", "typed error"))
    print(f"{good} of {found.total()} as it should be")
    return good != found.total()


if __name__ == "__main__":
    sys.exit(main())
