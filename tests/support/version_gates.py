"""Helpers for tests of the version gate."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohooks.version_gate import Ticket, VersionGate


async def admit_one(gate: VersionGate, **options: Any) -> Ticket:
    """Admit an item, whose ticket stays open."""
    async with gate.admit(**options) as ticket:
        return ticket.hand_off()


async def admit_items(gate: VersionGate, count: int) -> list[Ticket]:
    """Admit items without waiting."""
    return [await admit_one(gate, timeout=0) for _ in range(count)]


def start_waiting(gate: VersionGate, count: int = 1, **options: Any) -> list[asyncio.Task[Ticket]]:
    """Start tasks that admit an item each."""
    return [asyncio.create_task(admit_one(gate, **options)) for _ in range(count)]
