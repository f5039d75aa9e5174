"""What the NATS store does when servers, links and processes fail, counted.

    python -m tests.programmes.faults_nats --count 120

In each trial three processes wait and advance on a run of their own, each behind a proxy, and one thing fails at a random
moment. Then it is looked whether

- all waits of those who live end: at their step ("resumed"), or with the error that is to be expected ("typed error");
- the step is what was acknowledged, and at most what was begun besides: nothing twice, nothing lost;
- no connection and no consumer is left in the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from tests.programmes._nats_stage import LIMIT_SECS, OPTIONS, Crew, Stage, StuckError, answered


async def _resumes(waiter: Crew, advancer: Crew, fault: Callable[[], Awaitable[None]], stage: Stage) -> str:
    """Somebody advances without a pause, a waiter waits for a step beyond the fault; who advances goes on, too."""
    near, far = waiter.order("wait", step=50), waiter.order("wait", step=10_000_000)
    await waiter.do("parked")
    await advancer.do("move")
    await stage.moment()
    await fault()
    assert (await answered(near, "wait"))["result"] >= 50
    if advancer.alive:
        await advancer.do("rest")
    other = next(one for one in stage.crew if one.alive and one is not waiter)
    await other.do("advance", times=1, by=10_000_000)
    assert (await answered(far, "wait beyond the fault"))["result"] >= 10_000_000
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

    return await _resumes(waiter, advancer, fault, stage)


async def server_stopped(stage: Stage) -> str:
    """The server is stopped by a signal for longer than a heartbeat, and goes on."""
    waiter, advancer, _ = await stage.begin()

    async def fault() -> None:
        stage.server.pause()
        await asyncio.sleep(OPTIONS["heartbeat"] * 4 * stage.chance.random())
        stage.server.resume()

    return await _resumes(waiter, advancer, fault, stage)


async def link(stage: Stage, fail: Callable[[Crew], object], *, advancers: bool, gone_secs: float = 0.3) -> str:
    """The link of the one that waits, or of the one that advances, fails."""
    waiter, advancer, _ = await stage.begin()
    victim = advancer if advancers else waiter

    async def fault() -> None:
        fail(victim)
        await asyncio.sleep(gone_secs * stage.chance.random())
        victim.proxy.heal()

    return await _resumes(waiter, advancer, fault, stage)


async def answer_lost(stage: Stage) -> str:
    """The server does what it is asked, and the answer is lost with the connection: five times in a row."""
    waiter, advancer, _ = await stage.begin()
    far = waiter.order("wait", step=5)
    for _ in range(5):
        advancer.proxy.drop_answer(b"AIOHOOKS.run")
        await advancer.do("advance", times=1)
    advancer.proxy.heal()
    assert (await answered(far, "wait"))["result"] == 5
    assert (await waiter.do("value"))[1] == 5
    return "resumed"


async def waiter_killed(stage: Stage) -> str:
    """One that waits is killed, the others are woken."""
    waiter, advancer, victim = await stage.begin()
    victim.order("wait", step=10)
    return await _resumes(waiter, advancer, victim.kill, stage)


async def advancer_killed(stage: Stage) -> str:
    """One that advances is killed in the middle; another one goes on."""
    waiter, advancer, victim = await stage.begin()
    await victim.do("move")
    return await _resumes(waiter, advancer, victim.kill, stage)


async def stopped(stage: Stage, *, advancers: bool) -> str:
    """A process is stopped by a signal for a while, and continued."""
    waiter, advancer, _ = await stage.begin()
    victim = advancer if advancers else waiter

    async def fault() -> None:
        victim.stop()
        await asyncio.sleep(stage.chance.random())
        victim.resume()

    return await _resumes(waiter, advancer, fault, stage)


async def chief_killed(stage: Stage) -> str:
    """The chief is killed, and nobody is left who could reach the step: waits end with the typed error; a new chief may come."""
    waiter, other, chief = await stage.begin()
    first = await chief.do("lead")
    wait = waiter.order("wait", step=1_000_000)
    await waiter.do("parked")
    await chief.do("move")
    await stage.moment()
    await chief.kill()
    told = await answered(wait, "wait for a dead chief")
    assert told["error"] == "PublisherFailedError", told
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
    led = await answered(lead, "lead after a dead chief")
    assert led["result"] > first, led
    await other.do("advance", times=1, by=1_000_000)
    assert "result" in await answered(wait, "wait for the next chief")
    return "resumed"


async def chief_stopped(stage: Stage) -> str:
    """The chief is stopped until another one has taken over: when it goes on, its writes are refused."""
    _, other, chief = await stage.begin()
    await chief.do("lead")
    await chief.do("advance", times=2)
    chief.stop()
    try:
        led = await answered(other.order("lead"), "lead after a stopped chief")
        assert led["result"] == 2, led
        await other.do("advance", times=3)
    finally:
        chief.resume()
    told = await answered(chief.order("advance", times=1), "advance of a deposed chief")
    assert told["error"] == "StaleReignError", told
    assert (await other.do("value"))[1] == 5
    return "typed error"


FAULTS: dict[str, Callable[[Stage], Awaitable[str]]] = {
    "server killed, data kept": partial(server_killed, data_lost=False),
    "server killed, data lost": partial(server_killed, data_lost=True),
    "server stopped and continued": server_stopped,
    "link of the waiter cut": partial(link, fail=lambda one: one.proxy.cut(), advancers=False),
    "link of the advancer cut": partial(link, fail=lambda one: one.proxy.cut(), advancers=True),
    "black hole before the waiter": partial(link, fail=lambda one: one.proxy.black_hole(), advancers=False, gone_secs=2.0),
    "black hole before the advancer": partial(link, fail=lambda one: one.proxy.black_hole(), advancers=True, gone_secs=2.0),
    "cut in mid-message, waiter": partial(link, fail=lambda one: one.proxy.cut_in_message(40), advancers=False),
    "cut in mid-message, advancer": partial(link, fail=lambda one: one.proxy.cut_in_message(7), advancers=True),
    "answer lost": answer_lost,
    "waiter killed": waiter_killed,
    "advancer killed": advancer_killed,
    "waiter stopped and continued": partial(stopped, advancers=False),
    "advancer stopped and continued": partial(stopped, advancers=True),
    "chief killed": chief_killed,
    "chief killed, another one waiting": chief_killed_with_successor,
    "chief stopped, another one took over": chief_stopped,
}


async def play(count: int, seed: int, directory: Path, faults: Sequence[str] = tuple(FAULTS)) -> tuple[Counter[str], list[str]]:
    """Plays so many trials, fault after fault; the verdicts, and what went wrong."""
    verdicts: Counter[str] = Counter()
    problems: list[str] = []
    async with Stage.set_up(directory, seed) as stage:
        for number, name in zip(range(count), itertools.cycle(faults), strict=False):
            began = time.monotonic()
            try:
                verdict = await FAULTS[name](stage)
                if wrong := await stage.end():
                    problems.append(f"trial {number}, {name}: {wrong}")
                    verdict = "wrong"
            except StuckError as error:
                problems.append(f"trial {number}, {name}: {error}")
                verdict = "stuck"
            except AssertionError as error:
                problems.append(f"trial {number}, {name}: {error}")
                verdict = "wrong"
            if verdict in ("stuck", "wrong"):
                for one in stage.crew:
                    one.proxy.heal()
                    await one.kill()
            verdicts[f"{name}: {verdict}"] += 1
            print(f"{number:4} {name:38} {verdict:12} {time.monotonic() - began:6.2f} s", flush=True)
    return verdicts, problems


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", action="append", choices=tuple(FAULTS), help="only this one; may be repeated")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        verdicts, problems = asyncio.run(play(given.count, given.seed, Path(directory), given.fault or tuple(FAULTS)))
    for name, times in sorted(verdicts.items()):
        print(f"{times:5} {name}")
    stuck = sum(times for name, times in verdicts.items() if name.endswith(": stuck"))
    print(f"{verdicts.total()} faults, {stuck} stuck (limit {LIMIT_SECS:g} s), {len(problems)} problems")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
