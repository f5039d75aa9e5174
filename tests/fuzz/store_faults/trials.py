"""The trials: what three processes do on a run while it fails, and the laws that hold for them.

In those of `lead` there are a chief that advances, a standby that waits for the lead, and a waiter.
Afterwards the waiter's steps must be reached by the chief, or by the standby in its place.

In those of `call` all three make calls at random. When the engine loses its data, writes end with
`StoreResetError`, and the chief leads no more; afterwards each write counts once again. (The local
store has no such runs: without its directory a run is over.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.fuzz.store_faults.engines import EngineSetup
from tests.fuzz.store_faults.plans import Plan, strike
from tests.support.step_laws import (
    Operation,
    find_second_leader,
    find_violation,
)
from tests.support.store_processes import (
    TICK_SECS,
    Mix,
    SlownessWatch,
    WorkerProcess,
    reply_to,
)
from tests.support.waiting import HANG_SECS, elapse

FAR = 10_000_000
"""A step that is reached only by an advance of its own."""
CALLS = 400
"""The calls of a trial."""
_NO_PUBLISHER = ("PublisherFailedError", "PublisherFinishedError")
_RUN_GONE = ("StoreUnavailableError", "StoreDamagedError")


def count_advances(history: Iterable[Operation]) -> tuple[int, int]:
    """Return how much was acknowledged of what the calls were to add, and all of that."""
    advances = [one for one in history if one.kind == "advance"]
    return sum(one.amount for one in advances if one.is_known), sum(one.amount for one in advances)


class Trial:
    """One trial: its processes, and what is known of them."""

    def __init__(
        self, setup: EngineSetup, plan: Plan, watch: SlownessWatch, chance: random.Random
    ) -> None:
        self.setup = setup
        self.plan = plan
        self.watch = watch
        self.chance = chance
        self.workers: Sequence[WorkerProcess] = ()
        self.late_secs = 0.0
        self.excused = False
        """Whether the chief was taken for dead because the machine is too slow for the lease."""

    async def run(self) -> str:
        """Run the trial in the processes of the setup; return how it ended."""
        raise NotImplementedError

    @property
    def history(self) -> list[Operation]:
        """The calls of all processes."""
        return [one for worker in self.workers for one in worker.history]

    def check_history(self, *, data_lost: bool) -> None:
        """Check that one process leads at a time, and, unless data was lost, that all calls are
        linearizable.
        """
        if found := find_second_leader(self.history):
            raise AssertionError(found)
        if not data_lost and (found := find_violation(self.history)):
            raise AssertionError(found)


class LeadTrial(Trial):
    """A chief, a standby and a waiter; see the module."""

    async def run(self) -> str:
        self.chief, self.standby, self.waiter = self.workers = self.setup.workers
        self.began = time.monotonic()
        self.trainer_left = False
        """Whether a living chief has lost the lead, and its trainer has left."""
        await self.chief.do("watch_silence")
        first_term = await self.chief.do("lead")
        await self.chief.do("publish", name="trainer")
        self.lead = self.standby.order("lead")
        # A process that knows of no chief may take the lead of an engine that has lost its data.
        await self.standby.do("standing_by")
        waits = {step: self.waiter.order("wait", step=step) for step in (3, FAR)}
        await self.waiter.do("parked")
        await self.chief.do("move", callers=2, pause_secs=0.01)
        await strike(self.setup, self.plan, self.workers)
        over = time.monotonic()
        if self.plan.group == "data lost" and not self.setup.keeps_run:
            return await self._check_run_gone(waits)
        leader = await self._lead_on()
        ended = "resumed"
        if self.waiter.alive and (leader is not None or self.plan.on_lost == "raise"):
            for step, wait in waits.items():
                if leader is not None or step == FAR:
                    ended = await self._check_wait(wait, step)
        self.late_secs = time.monotonic() - over
        await self._check_count()
        if leader is self.chief:
            if self.lead.done() and self.standby.alive and not await self._is_suspect():
                raise AssertionError(
                    f"the standby leads beside a living chief: {self.lead.result()}"
                )
            await self.chief.do("step_down")
            if (
                self.standby.alive
                and (led := await reply_to(self.lead, "lead after the chief")).get("result", 0)
                <= first_term
            ):
                raise AssertionError(f"the standby got {led} after the term {first_term}")
        return ended

    async def _is_suspect(self) -> bool:
        """Return whether the chief may have been taken for dead: it did not run, or not reach the
        engine, for a while.
        """
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

    async def _lead_on(self) -> WorkerProcess | None:
        """Let the process that leads after the faults advance far, and check that it may; return
        it.
        """
        chief = self.chief
        if chief.alive:
            reply = await reply_to(chief.order("rest"), "the writes of the chief")
            if reply.get("error") in (None, "StoreResetError"):
                reply = await self._advance_far(chief)
            if "error" not in reply:
                return chief
            if reply["error"] != "StaleTermError" or not await self._is_suspect():
                raise AssertionError(f"the living chief got {reply}")
            await chief.do("leave", name="trainer")
            self.trainer_left = True
            await chief.do("step_down")
        if not self.standby.alive:
            return None
        led = await reply_to(self.lead, "lead of the standby")
        if "error" in led:
            raise AssertionError(f"the standby got {led}")
        if not chief.alive:
            await self._wait_found_dead()
        reply = await self._advance_far(self.standby)
        if "error" in reply:
            raise AssertionError(f"the leading standby got {reply}")
        return self.standby

    async def _advance_far(self, leader: WorkerProcess) -> dict[str, Any]:
        """Let the leading process advance; the first write of a process may report a loss."""
        reply = await reply_to(leader.order("advance", by=FAR), "a write of the leader")
        if reply.get("error") == "StoreResetError":
            reply = await reply_to(leader.order("advance", by=FAR), "the next write")
        return reply

    async def _wait_found_dead(self) -> None:
        until = time.monotonic() + HANG_SECS
        while "trainer" in await self.standby.do("known_publishers"):
            if time.monotonic() > until:
                raise AssertionError("the dead trainer is still known as a publisher")
            await elapse(TICK_SECS)

    async def _check_wait(self, wait: asyncio.Future[dict[str, Any]], step: int) -> str:
        reply = await reply_to(wait, f"wait for step {step}")
        if "result" in reply:
            if reply["result"] < step:
                raise AssertionError(f"woken at {reply['result']}, before step {step}")
            return "resumed"
        if self.trainer_left and reply["error"] == "PublisherFinishedError":
            return "typed error"  # no publisher was left
        if (
            not await self._is_suspect()
            or self.plan.on_lost == "keep"
            or reply["error"] != "PublisherFailedError"
        ):
            raise AssertionError(f"the wait for step {step} got {reply}")
        return "typed error"

    async def _check_run_gone(self, waits: Mapping[int, asyncio.Future[dict[str, Any]]]) -> str:
        """The engine cannot continue the run: every call and wait ends with an error that says
        so.
        """
        orders = [*waits.values(), self.waiter.order("wait", step=FAR)] if self.waiter.alive else []
        if self.standby.alive:
            orders.append(self.standby.order("advance"))
            orders.append(self.lead)
        if self.chief.alive:
            await reply_to(self.chief.order("rest"), "the writes of the chief")
            orders.append(self.chief.order("advance"))
        expected = (*_RUN_GONE, *(_NO_PUBLISHER if self.plan.client_fault == "killed" else ()))
        may_succeed = [waits[3]]
        if not self.chief.alive:
            may_succeed.append(self.lead)  # which it may have got before the run was gone
        for order in orders:
            reply = await reply_to(order, "a call after the run is gone")
            if "result" in reply and any(order is early for early in may_succeed):
                continue
            if reply.get("error") not in expected:
                raise AssertionError(f"{reply} of a run that is gone")
        return "typed error"

    async def _check_count(self) -> None:
        living = [one for one in self.workers if one.alive]
        steps = {await one.do("value") for one in living}
        if len(steps) > 1:
            raise AssertionError(f"the processes read different steps: {steps}")
        (step,) = steps
        data_lost = self.plan.group == "data lost"
        acked, begun = count_advances(self.history)
        if data_lost:
            acked = 0
        if not acked <= step <= begun:
            raise AssertionError(f"step {step}, acknowledged {acked}, begun {begun}")
        self.check_history(data_lost=data_lost)


class CallTrial(Trial):
    """Calls at random; see the module."""

    async def run(self) -> str:
        plan, data_lost = self.plan, self.plan.group == "data lost"
        if plan.client_fault == "killed" and plan.role == "chief":
            plan = dataclasses.replace(
                plan, role="waiter"
            )  # the first process lives: it makes the last read
        self.workers = self.setup.workers
        mix: Mix = self.chance.choice(("raises", "resets"))
        mixes: list[Mix] = ["advances"] * 3 if data_lost else [mix, mix, mix]
        orders = [
            one.order(
                "call_at_random",
                count=CALLS,
                seed=self.chance.random().hex(),
                mix=mix,
                steady=one is self.workers[0],
            )
            for one, mix in zip(self.workers, mixes, strict=True)
        ]
        await strike(self.setup, plan, self.workers)
        for one, order in zip(self.workers, orders, strict=True):
            if one.alive and "error" in (reply := await reply_to(order, "calls at random")):
                raise AssertionError(str(reply))
        await self.workers[0].do("value")
        if data_lost:
            await self._check_counts_on()
        self.check_history(data_lost=data_lost)
        return "resumed"

    async def _check_counts_on(self) -> None:
        """The run continues at a step that was reached, and from there each write counts once."""
        living = [worker for worker in self.workers if worker.alive]
        for worker in living:  # its first write since the loss may be refused
            await reply_to(worker.order("advance"), "the first write after a loss")
        first: int = await living[0].do("value")
        await asyncio.gather(*(worker.do("advance", times=5) for worker in living))
        last: int = await living[0].do("value")
        _, begun = count_advances(self.history)
        if last != first + 5 * len(living) or last > begun:
            raise AssertionError(f"from {first} to {last}, {begun} were begun")
