"""Helpers of the tests of the version gate."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohooks.version_gate import Ticket, VersionGate


async def settle() -> None:
    """Lets everything run that can run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def ticket(gate: VersionGate, **options: Any) -> Ticket:
    """Lets one in, whose ticket stays open."""
    async with gate.admit(**options) as one:
        return one.hand_on()


async def let_in(gate: VersionGate, count: int) -> list[Ticket]:
    return [await ticket(gate, timeout=0) for _ in range(count)]


def waiting(gate: VersionGate, count: int = 1, **options: Any) -> list[asyncio.Task[Ticket]]:
    return [asyncio.create_task(ticket(gate, **options)) for _ in range(count)]


async def give_up(tasks: list[asyncio.Task[Ticket]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
