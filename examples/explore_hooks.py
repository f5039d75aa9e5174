"""Two hooks of an agent share a budget, and lose an update where their calls overlap in one order:
exploration finds it.

Usage: python examples/explore_hooks.py
"""

import asyncio
import contextlib

import aiohooks as ah
from aiohooks.testing import ExplorationError, explore, unreliable


class AgentHooks:
    """What hooks of an agent can implement."""

    async def on_tool_end(self, tool: str, cost: int) -> None: ...


class Account:
    """What an agent has spent, in a store that is read and written over the network."""

    def __init__(self) -> None:
        self.spent = 0
        self.lock = asyncio.Lock()

    async def read(self) -> int:
        await asyncio.sleep(0)
        return self.spent

    async def write(self, spent: int) -> None:
        await asyncio.sleep(0)
        self.spent = spent


class Charge:
    """Adds the cost of a tool: reads, adds and writes, while others may do the same."""

    def __init__(self, account: Account) -> None:
        self.account = account

    async def on_tool_end(self, tool: str, cost: int) -> None:
        await self.account.write(await self.account.read() + cost)


class LockedCharge(Charge):
    """The same, one at a time."""

    async def on_tool_end(self, tool: str, cost: int) -> None:
        async with self.account.lock:
            await super().on_tool_end(tool, cost)


class Surcharge(LockedCharge):
    """Adds a fee after the answer of a server, which may be slow, or fail."""

    async def on_tool_end(self, tool: str, cost: int) -> None:
        with contextlib.suppress(ConnectionError):  # it counts all the same
            await unreliable(self.ask, ConnectionError)()
        await super().on_tool_end("fee", 1)

    async def ask(self) -> None:
        await asyncio.sleep(0.01)


async def charge_twice(charge: type[Charge]) -> None:
    """Call both hooks, and check what was spent."""
    account = Account()
    hooks = ah.compose(AgentHooks, [charge(account), Surcharge(account)])
    await hooks.on_tool_end("search", 5)
    assert account.spent == 6, (
        f"5 and a fee of 1 were spent, and {account.spent} is what the account says"
    )


async def without_a_lock() -> None:
    """Lose an update in some orders."""
    await charge_twice(Charge)


async def with_a_lock() -> None:
    """Lose none."""
    await charge_twice(LockedCharge)


async def main() -> None:
    """Explore both."""
    try:
        await explore(without_a_lock)
    except ExplorationError as error:
        print(error)
    explored = await explore(with_a_lock)
    print(f"\nwith a lock: nothing found in {explored.schedules:,} schedules")


if __name__ == "__main__":
    asyncio.run(main())
