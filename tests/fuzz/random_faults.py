"""Faults of engines, links and processes at random moments, of any kind of them together, each counted.

    python -m tests.fuzz.random_faults --engine redis --count 1000 --seed 1

In each trial there are a chief that advances, a standby that waits for the lead, and a waiter that has noticed how an earlier
publisher left. A session is being opened in the waiter's process: it waits for its chief, or for the lead, and may be asked to
stop. The engine fails at a random moment: in a third of the trials it loses its data, in a third it is away for longer than a
lease. Meanwhile one of the processes may be killed or stopped, or lose its connection, for shorter or longer than a lease. Then
the waiter's steps must be reached by the chief, or by the standby in its place; at last all leave. No trial has

- a call or wait that is stuck, or an opening that a stop does not end while the engine is away;
- a step that counts twice, or is lost though a living process had seen it;
- two leaders that both write: a write accepted after one of a newer term was, or a term of two processes;
- a wrong end: a wait that ends while its trainer lives, or with another publisher's end; a living chief that is refused;
- anything that is left in the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.engine_faults import ENGINES, GROUPS, EngineSetup, Group, cluster_of, engine_setup, last
from tests.support.fault_plans import ROLES, Plan, strike
from tests.support.store_trials import StuckError, WorkerProcess, reply_to
from tests.support.waiting import HANG_SECS

FAR = 10_000_000
"""A step that is reached only by an advance of its own."""
_NO_PUBLISHER = ("PublisherFailedError", "PublisherFinishedError")
_TICK_SECS = 0.02
_RUN_GONE = ("StoreUnavailableError", "StoreDamagedError")

Problem = Literal["stuck", "double count", "two leaders", "wrong end", "left over"]
PROBLEMS: tuple[Problem, ...] = ("stuck", "double count", "two leaders", "wrong end", "left over")


class ViolationError(AssertionError):
    """The engine has broken one of the laws."""

    def __init__(self, kind: Problem, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind: Problem = kind


class SlownessWatch:
    """Measures for how long this process, which has the proxies of all trials, does not run."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []

    async def watch(self) -> None:
        while True:
            before = time.monotonic()
            await last(_TICK_SECS)
            self._gaps.append((before, time.monotonic() - before))

    def longest_since(self, began: float) -> float:
        """Return the longest time in seconds since `began`."""
        self._gaps = self._gaps[-int(HANG_SECS * 10 / _TICK_SECS) :]
        return max((gap for before, gap in self._gaps if before >= began), default=0.0)


class Trial:
    """One trial: its processes, and what is known of them."""

    def __init__(self, setup: EngineSetup, plan: Plan, workers: Sequence[WorkerProcess], watch: SlownessWatch) -> None:
        self.setup = setup
        self.plan = plan
        self.chief, self.standby, self.waiter = self.workers = workers
        self.victim = dict(zip(ROLES, workers, strict=True))[plan.role]
        self.first_term = 0
        self.lead: asyncio.Future[dict[str, Any]]
        self.opening: asyncio.Future[dict[str, Any]]
        self.late_secs = 0.0
        self.watch = watch
        self.began = time.monotonic()
        self.lead_kept = False
        self.excused = False
        """Whether the chief was taken for dead because the machine is too slow for the lease."""

    async def prepare(self) -> None:
        """Let a publisher leave, then the chief lead, and the standby wait for the lead."""
        await self.chief.do("watch_silence")
        await self.chief.do("publish", name="warm-up")
        early = self.waiter.order("wait", step=FAR)
        await self.waiter.do("parked")
        await self.chief.do("leave", name="warm-up")
        self._expect_end(await reply_to(early, "the first end"), "warm-up")
        self.first_term = await self.chief.do("lead")
        await self.chief.do("publish", name="trainer")
        self.lead = self.standby.order("lead")
        # A process that knows of no chief may take the lead of an engine that has lost its data.
        await self.standby.do("standing_by")

    async def _is_suspect(self) -> bool:
        """Return whether the chief may have been taken for dead: it did not run, or not reach the engine, for a while."""
        if not self.chief.alive:
            return True
        if not self.setup.leased:
            return False
        if self.plan.may_lose_chief:
            return True
        slow = await self._is_slow()
        self.excused = self.excused or slow
        return slow

    async def _is_slow(self) -> bool:
        """Return whether the machine is too slow for the times of this trial."""
        silence: float = await self.chief.do("silence")
        before = time.monotonic()
        await self.chief.do("value")
        # To connect again takes a process some ten requests.
        return (
            max(silence, self.watch.longest_since(self.began)) > self.setup.lease_secs / 4
            or time.monotonic() - before > self.setup.lease_secs / 20
        )

    async def run(self) -> str:
        """Run the trial; return how it ended."""
        await self.prepare()
        near, far = self.waiter.order("wait", step=3), self.waiter.order("wait", step=FAR)
        await self.waiter.do("parked")
        self.opening = self.waiter.order("open_session", chief=self.plan.opening == "standby")
        await self.chief.do("move", callers=2, pause_secs=0.01)
        await strike(self.setup, self.plan, self.workers)
        over = time.monotonic()
        if self.plan.group == "data lost" and not self.setup.keeps_run:
            return await self._check_run_gone([near, far])
        if self.plan.stop_at is not None and self.waiter.alive and not await self._stop_ends_opening():
            return "machine too slow"
        leader, step = await self._lead_on()
        ended = "resumed"
        if leader is not None:
            await leader.do("mark_initialised")
            if self.waiter.alive:
                ended = await self._check_wait(near, 3)
                ended = await self._check_wait(far, FAR)
                if self.plan.stop_at is None:
                    await self._check_wait(self.opening, 0)
            self.late_secs = time.monotonic() - over
            await self._leave(leader, step)
        elif self.waiter.alive and self.plan.on_lost == "raise":
            ended = await self._check_wait(far, FAR)
            if self.plan.stop_at is None:
                await self._check_wait(self.opening, 0)
            self.late_secs = time.monotonic() - over
        self._check_terms()
        await self._check_count()
        return ended

    async def _stop_ends_opening(self) -> bool:
        """Check that the stop has ended the opening; return False if it got the lead because the machine is too slow."""
        outage = self.plan.group == "outage longer than a lease"
        if (
            outage
            and self.victim is not self.waiter
            and not self.opening.done()
            and not (self.chief.alive and await self._is_slow())
        ):
            raise ViolationError("stuck", "a session that was asked to stop while it opens waited for the engine")
        reply = await reply_to(self.opening, "a session that is asked to stop while it opens")
        if reply.get("error") == "StopRequestedError":
            return True
        if self.plan.opening == "worker":
            await self._check_wait(self.opening, 0)
        elif "error" in reply or not await self._is_suspect():
            raise ViolationError("wrong end", f"the standby that opened beside a living chief got {reply}")
        return self.plan.opening == "worker"

    async def _lead_on(self) -> tuple[WorkerProcess | None, int]:
        """Let the process that leads after the faults advance far, and check that it may; return it, and the step."""
        chief = self.chief
        refused = ""
        if chief.alive:
            reply = await reply_to(chief.order("rest"), "the writes of the chief")
            if "error" not in reply:
                reply = await reply_to(chief.order("advance", by=FAR), "a write of the chief")
            refused = reply.get("error", "")
            if not refused:
                self.lead_kept = True
                return chief, reply["result"]
            if refused != "StaleTermError" or not await self._is_suspect():
                raise ViolationError("wrong end", f"the living chief got {reply}")
            await chief.do("leave", name="trainer")
            await chief.do("step_down")
        if not self.standby.alive:
            return None, 0
        led = await reply_to(self.lead, "lead of the standby")
        if "error" in led:
            raise ViolationError("wrong end", f"the standby got {led}")
        if not chief.alive:
            await self._wait_found_dead()
        await self.standby.do("publish", name="second")
        return self.standby, await self.standby.do("advance", by=FAR)

    async def _wait_found_dead(self) -> None:
        until = time.monotonic() + HANG_SECS
        while "trainer" in await self.standby.do("known_publishers"):
            if time.monotonic() > until:
                raise StuckError("the dead trainer is still known as a publisher")
            await last(_TICK_SECS)

    async def _check_wait(self, wait: asyncio.Future[dict[str, Any]], step: int) -> str:
        reply = await reply_to(wait, f"wait for step {step}")
        if "result" in reply:
            if reply["result"] < step:
                raise ViolationError("wrong end", f"woken at {reply['result']}, before step {step}")
            return "resumed"
        died = not self.chief.alive or await self._is_suspect()
        if not died or self.plan.on_lost == "keep" or reply["error"] != "PublisherFailedError" or "warm-up" in reply["text"]:
            raise ViolationError("wrong end", f"the wait for step {step} got {reply}")
        return "typed error"

    async def _leave(self, leader: WorkerProcess, step: int) -> None:
        """Let all publishers leave, one after the other: the waiter gets the end of the last one."""
        error = "a bad batch" if self.plan.fails else ""
        wait = self.waiter.order("wait", step=100 * FAR) if self.waiter.alive else None
        if leader is self.chief:
            if self.lead.done() and self.standby.alive and not await self._is_suspect():
                raise ViolationError("two leaders", f"the standby leads beside a living chief: {self.lead.result()}")
            last_one = not self.standby.alive
            await self.chief.do("leave", name="trainer", error=error if last_one else "")
            await self.chief.do("step_down")
            if last_one:
                await self._check_end(wait, "trainer")
                return
            led = await reply_to(self.lead, "lead after the chief")
            if led.get("result", 0) <= self.first_term:
                raise ViolationError("two leaders", f"the standby got {led} after the term {self.first_term}")
            await self.standby.do("publish", name="second")
            await self.standby.do("advance")
        await self.standby.do("leave", name="second", error=error)
        await self.standby.do("step_down")
        await self._check_end(wait, "second")

    async def _check_end(self, wait: asyncio.Future[dict[str, Any]] | None, name: str) -> None:
        if wait is not None:
            reply = await reply_to(wait, "the last end")
            if name == "second" and reply.get("text", "").startswith("trainer finished"):
                return  # the waiter has noticed that the chief had left before it noticed the second one
            if self._is_end_of_chief(reply) and await self._is_suspect():
                return
            self._expect_end(reply, name)

    def _is_end_of_chief(self, reply: dict[str, Any]) -> bool:
        """Return whether the chief was taken for dead while it left, when there was no other publisher yet."""
        failed = reply.get("error") == "PublisherFailedError" and reply["text"].startswith("chief ")
        return failed and self.lead_kept and self.plan.on_lost == "raise"

    def _expect_end(self, reply: dict[str, Any], name: str) -> None:
        failed = self.plan.fails and name != "warm-up"
        kind, verb = ("PublisherFailedError", "failed") if failed else ("PublisherFinishedError", "finished")
        if reply.get("error") != kind or f"{name} {verb}" not in reply["text"]:
            raise ViolationError("wrong end", f"{reply}, expected that {name} {verb}")

    async def _check_run_gone(self, waits: Sequence[asyncio.Future[dict[str, Any]]]) -> str:
        """The engine cannot continue the run: every call and wait ends with an error that says so."""
        orders = [*waits, self.opening, self.waiter.order("wait", step=FAR)] if self.waiter.alive else []
        if self.standby.alive:
            orders.append(self.standby.order("advance"))
            if self.chief.alive or not self.lead.done():  # otherwise it may have succeeded the chief before
                orders.append(self.lead)
        if self.chief.alive:
            await reply_to(self.chief.order("rest"), "the writes of the chief")
            orders.append(self.chief.order("advance"))
        for order in orders:
            reply = await reply_to(order, "a call after the run is gone")
            killed = self.plan.client_fault == "killed"
            reached = order is waits[0] and "result" in reply
            reached |= order is self.opening and reply.get("error") == "StopRequestedError"
            if not reached and reply.get("error") not in (*_RUN_GONE, *(_NO_PUBLISHER if killed else ())):
                raise ViolationError("wrong end", f"{reply} of a run that is gone")
        return "typed error"

    def _check_terms(self) -> None:
        """Check that no write was accepted after one of a newer term, and that each term is one process's."""
        writes = sorted((write, number) for number, one in enumerate(self.workers) for write in one.writes if write.term)
        for term, same in itertools.groupby(writes, lambda each: each[0].term):
            if len({number for _, number in same}) > 1:
                raise ViolationError("two leaders", f"two processes have written in the term {term}")
        accepted: dict[int, float] = {}
        for write, _ in writes:
            accepted[write.term] = min(write.ended, accepted.get(write.term, write.ended))
        for write, _ in writes:
            newer = [ended for term, ended in accepted.items() if term > write.term]
            if newer and min(newer) < write.began:
                raise ViolationError("two leaders", f"{write} was accepted after a write of a newer term")

    async def _check_count(self) -> None:
        living = [one for one in self.workers if one.alive]
        steps = {(await one.do("value"))[1] for one in living}
        if len(steps) > 1:
            raise ViolationError("double count", f"the processes read different steps: {steps}")
        (step,) = steps
        begun, acked = sum(one.begun for one in self.workers), sum(one.acked for one in self.workers)
        if self.plan.group == "data lost" and not (self.chief.alive and self.lead_kept):
            # The standby may have written without the chief's last steps, or these died with it: those of the living count.
            acked = max((write.step for one in living for write in one.writes), default=0)
        if not acked <= step <= begun:
            raise ViolationError("double count", f"step {step}, acknowledged {acked}, begun {begun}")


@dataclass
class Outcome:
    """The results of all trials."""

    plans: list[Plan] = field(default_factory=list[Plan])
    statuses: Counter[tuple[Group, str]] = field(default_factory=Counter[tuple[Group, str]])
    problems: Counter[Problem] = field(default_factory=Counter[Problem])
    texts: list[str] = field(default_factory=list)
    late_secs: float = 0.0
    excused: int = 0
    """How many trials lost their chief because the machine was too slow."""
    watch: SlownessWatch = field(default_factory=SlownessWatch)

    def report(self) -> int:
        """Print the results; return the exit code."""
        for group in GROUPS:
            found = ", ".join(f"{times} {status}" for (each, status), times in sorted(self.statuses.items()) if each == group)
            print(f"{group:28}{found}")
        print(*self.texts, sep="\n", end="\n" if self.texts else "")
        counts = ", ".join(f"{self.problems[kind]} {kind}" for kind in PROBLEMS)
        print(
            f"{self.statuses.total()} faults: {counts}; the latest continued after {self.late_secs:.1f} s (limit {HANG_SECS:g})"
        )
        if self.excused:
            print(f"in {self.excused} of them the machine was too slow for the lease, and the chief was replaced")
        return 1 if self.texts else 0


async def run_trial(setup: EngineSetup, number: int, seed: int, outcome: Outcome) -> None:
    """Run a trial of this number, and add its result."""
    group = GROUPS[number % len(GROUPS)]
    plan = Plan.draw(setup, group, random.Random(f"{seed} {number}"))
    began = time.monotonic()
    trial: Trial | None = None
    try:
        trial = Trial(setup, plan, await setup.begin(on_lost=plan.on_lost), outcome.watch)
        status = await trial.run()
        outcome.excused += trial.excused
        if left := await setup.end():
            raise ViolationError("left over", left)
    except AssertionError as error:
        status = error.kind if isinstance(error, ViolationError) else "stuck" if isinstance(error, StuckError) else "wrong end"
        outcome.problems[status] += 1
        outcome.texts.append(f"trial {number} of seed {seed}, {plan}: {error}")
        print(outcome.texts[-1], flush=True)
        await setup.abandon()
    outcome.plans.append(plan)
    outcome.statuses[group, status] += 1
    late = 0.0 if trial is None else trial.late_secs
    outcome.late_secs = max(outcome.late_secs, late)
    print(f"{number:5} {status:12} {late:5.2f} of {time.monotonic() - began:5.2f} s  {plan}", flush=True)


async def run_trials(
    engine: str, count: int, seed: int, directory: Path, *, parallel: int = 4, only: Sequence[int] = ()
) -> Outcome:
    """Run trials of an engine, some at the same time, as they mostly wait; `only` names the numbers of those to run."""
    outcome = Outcome()
    numbers: Iterator[int] = iter(only or range(count))

    async def run_some(address: str) -> None:
        async with engine_setup(engine, directory, address) as setup:
            for number in numbers:
                await run_trial(setup, number, seed, outcome)

    async with cluster_of(engine) as address:
        tasks = [asyncio.ensure_future(run_some(address)) for _ in range(min(parallel, count))]
        watching = asyncio.ensure_future(outcome.watch.watch())
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in (*tasks, watching):
                task.cancel()
            await asyncio.gather(*tasks, watching, return_exceptions=True)
    return outcome


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--count", type=int, default=90)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=4, help="how many trials at the same time")
    parser.add_argument("--trial", type=int, action="append", default=[], help="only the trial of this number; may be repeated")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(
            run_trials(given.engine, given.count, given.seed, Path(directory), parallel=given.parallel, only=given.trial)
        )
    return outcome.report()


if __name__ == "__main__":
    sys.exit(main())
