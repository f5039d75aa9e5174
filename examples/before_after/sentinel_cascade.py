"""A pipeline of loader, workers and trainer that ends by sentinels; a worker that dies does not
pass one on.
"""

from __future__ import annotations

import asyncio

import aiohooks as ah

from .shape import Fault, Shape

WORKERS, ITEMS = 2, 8


async def old(fault: Fault) -> None:
    """The trainer counts one sentinel of each worker, and waits for the missing one."""
    work: asyncio.Queue[int | None] = asyncio.Queue()
    results: asyncio.Queue[int | None] = asyncio.Queue()

    async def load() -> None:
        for item in range(ITEMS):
            await work.put(item)
        for _ in range(WORKERS):
            await work.put(None)

    async def roll_out(number: int) -> None:
        while (item := await work.get()) is not None:
            await asyncio.sleep(0.01)
            if item == 5:
                raise fault.failure()
            await results.put(item)
        await results.put(None)

    tasks = [
        asyncio.create_task(load()),
        *(asyncio.create_task(roll_out(number)) for number in range(WORKERS)),
    ]
    ended = 0
    while ended < WORKERS:
        if await results.get() is None:
            ended += 1
    await asyncio.gather(*tasks)


async def ours(fault: Fault) -> None:
    """The stages are tasks of the session: the last step is a stop, and the failure of a task ends
    the session.
    """

    async def train(item: int) -> dict[str, int]:
        return {"loss": item}

    work: asyncio.Queue[int] = asyncio.Queue()
    results: asyncio.Queue[int] = asyncio.Queue()
    async with ah.AsyncMonitoredSession(train, [ah.StopAtStepHook(last_step=ITEMS)]) as session:

        async def load() -> None:
            for item in range(ITEMS):
                await work.put(item)

        async def roll_out() -> None:
            while True:
                item = await session.until(work.get())
                await asyncio.sleep(0.01)
                if item == 5:
                    raise fault.failure()
                await results.put(item)

        session.start_soon(load)
        for number in range(WORKERS):
            session.start_soon(roll_out, name=f"worker {number}")
        while not session.should_stop():
            item = await session.until(results.get())
            await session.run("loss", feed_dict={"item": item})


SHAPE = Shape(
    name="sentinel cascade",
    fault="one of two workers raises",
    old_code="if await results.get() is None: ended += 1",
    our_code="session.start_soon(worker); await session.until(results.get())",
    names="worker",
    old=old,
    ours=ours,
)
