"""Plans of random faults: one of the engine, and perhaps one of a process at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.fuzz.store_faults.engines import EngineSetup, Group
from tests.support.store_processes import WorkerProcess
from tests.support.store_proxy import Proxy
from tests.support.waiting import elapse

Role = Literal["chief", "standby", "waiter"]
ROLES: tuple[Role, ...] = ("chief", "standby", "waiter")
CLIENT_FAULTS = ("none", "killed", "stopped")
"""Of a process."""
LINK_FAULTS: Mapping[str, Callable[[Proxy, float], None]] = {
    "link cut": lambda link, secs: link.cut(),
    "link a black hole": lambda link, secs: link.black_hole(),
    "answer lost": lambda link, secs: link.drop_answer(),
    "cut in mid-message": lambda link, secs: link.cut_in_message(1 + int(100 * secs) % 60),
}
"""Of its connection to a server."""


@dataclass(frozen=True)
class Plan:
    """The faults of one trial."""

    group: Group
    engine_fault: str
    engine_secs: float
    role: Role
    client_fault: str
    client_at: float
    """When it begins, in seconds after the engine's."""
    client_secs: float
    on_lost: Literal["raise", "keep"]
    moment: float
    """When the engine fails, in seconds after the processes have begun to work."""

    @classmethod
    def draw(cls, setup: EngineSetup, group: Group, rnd: random.Random) -> Plan:
        lease = setup.lease_secs
        client = [*CLIENT_FAULTS, "none", "stopped"]
        fault = rnd.choice(list(setup.strikes[group]))
        if (
            setup.links() and "links" not in fault
        ):  # otherwise healing the one link would heal part of the engine's fault
            client += LINK_FAULTS
        engine_secs = (
            rnd.uniform(1.5, 3.5) * lease
            if group == "outage longer than a lease"
            else rnd.random() ** 2 * 0.6 * lease
        )
        return cls(
            group,
            fault,
            engine_secs,
            rnd.choice(ROLES),
            rnd.choice(client),
            rnd.uniform(-0.5 * lease, engine_secs),
            rnd.choice([rnd.uniform(0.05, 0.3), rnd.uniform(1.2, 3.0)]) * lease,
            rnd.choice(["raise", "keep"]),
            0.05 + rnd.random() ** 2 * 0.2,
        )

    @property
    def may_lose_chief(self) -> bool:
        """Whether the chief may count as dead after these faults."""
        # Each process notices by itself that its connection is dead, and that takes longer than the
        # leases of the trials.
        return (
            self.role == "chief" and self.client_fault != "none"
        ) or "black hole" in self.engine_fault

    def __str__(self) -> str:
        client = (
            ""
            if self.client_fault == "none"
            else f"; {self.role} {self.client_fault} for {self.client_secs:.2f} s"
        )
        return (
            f"{self.group}: {self.engine_fault} for {self.engine_secs:.2f} s{client} at"
            f" {self.client_at:+.2f} s, {self.on_lost}"
        )


async def strike(setup: EngineSetup, plan: Plan, workers: Sequence[WorkerProcess]) -> None:
    """Let the engine and the process fail, and wait until both faults are over."""
    await elapse(plan.moment)
    before = max(0.0, -plan.client_at)

    async def engine() -> None:
        await elapse(before)
        await setup.strikes[plan.group][plan.engine_fault](setup, plan.engine_secs)

    async def client() -> None:
        await elapse(before + plan.client_at)
        number = ROLES.index(plan.role)
        if plan.client_fault == "killed":
            await workers[number].kill()
        elif plan.client_fault == "stopped":
            workers[number].stop()
            await elapse(plan.client_secs)
            workers[number].resume()
        elif plan.client_fault != "none":
            link = setup.links()[number]
            LINK_FAULTS[plan.client_fault](link, plan.client_secs)
            await elapse(plan.client_secs)
            link.heal()

    await asyncio.gather(engine(), client())
