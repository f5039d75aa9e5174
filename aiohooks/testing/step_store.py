"""The conformance suite of step stores, for authors of an engine.

Each check uses two stores of one run, as two processes would.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohooks._core.validate import check_callable, check_instance
from aiohooks._core.waits import retrieve_exception
from aiohooks.errors import (
    InvalidArgumentError,
    PublisherFailedError,
    PublisherFinishedError,
    SessionNotReadyError,
    StepResetError,
    StoreClosedError,
)
from aiohooks.stores import Position, Publisher, SharedStepStore, StepStore
from aiohooks.testing._checks import by_name, run_checks

E = TypeVar("E", bound=BaseException)
MakeStore = Callable[[str], StepStore]
"""Returns a store of the named run, as another process would open it. For a store that works in one
process only, it returns the same store again.
"""
Wait = asyncio.Task[int]


class Run:
    """A run with a name of its own, and the stores that a check has opened for it."""

    pair: tuple[StepStore, StepStore]
    """Two open stores, as two processes would have them."""

    def __init__(self, make: MakeStore) -> None:
        self.make_store: MakeStore = make
        self.stores: list[StepStore] = []
        self._name = f"check-{secrets.token_hex(4)}"

    async def open(self) -> StepStore:
        """Open another store and return it. `aclose` closes it."""
        store = self.make_store(self._name)
        check_instance(store, StepStore, "what make returns")
        if store not in self.stores:
            self.stores.append(store)
        return await store.__aenter__()

    async def aclose(self) -> None:
        """Delete the run, and close its stores."""
        # One store deletes the run for all stores. The check may have closed this store already.
        last = self.stores[-1] if self.stores else None
        if isinstance(last, SharedStepStore):
            with contextlib.suppress(StoreClosedError):
                await last.forget()
        for store in self.stores:
            await store.aclose()


async def parked(store: StepStore, wait: Coroutine[Any, Any, int]) -> Wait:
    """Start a task that awaits `wait`. Return it when it waits in the store, or has ended."""
    before = store.statistics().waiting
    task = asyncio.ensure_future(wait)
    # If the check fails, nothing awaits the task.
    task.add_done_callback(retrieve_exception)
    while store.statistics().waiting == before and not task.done():  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    return task


async def raises(kind: type[E], awaitable: Awaitable[Any]) -> E:
    """Check that a call raises an error of this kind, and return the error."""
    try:
        result = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, and the call returned {result!r}")


@contextlib.asynccontextmanager
async def publisher(store: StepStore, name: str) -> AsyncGenerator[Publisher]:
    """Register a publisher for the block, and wait until the engine has registered it, too."""
    with store.publisher(name) as registered:
        await store.flush()
        yield registered


async def is_at(step: int, *stores: StepStore) -> None:
    """Check that these stores read and have seen this step."""
    for store in stores:
        position = await store.value()
        assert position.step == step
        assert store.latest.step == step


async def counts(run: Run) -> None:
    """A run begins at step 0. Each advance adds once and returns the step that it led to."""
    a, b = run.pair
    await is_at(0, a)
    assert await a.advance() == 1
    assert await b.advance(4) == 5
    await is_at(5, a, b)
    advances = [store.advance() for store in [a, b] * 100]
    await asyncio.gather(*advances)
    await is_at(205, a, b)


async def wakes(run: Run) -> None:
    """A waiter is woken at its step or later, never before, wherever the step was advanced."""
    a, b = run.pair  # two stores of the same run
    assert await b.wait_for(0) == 0
    waits: list[tuple[int, Wait]] = []
    for step in range(1, 51):
        for store in (a, b):
            wait = await parked(store, store.wait_for(step))
            waits.append((step, wait))
    for reached in (1, 20, 49, 50):
        await a.raise_to(reached)
        for step, wait in waits:
            if step <= reached:
                woken_at = await wait
                assert woken_at >= step, f"a wait for step {step} has ended at step {woken_at}"
            else:
                assert not wait.done(), f"a wait for step {step} has ended at step {reached}"
    # A wait for an earlier step returns the current step immediately.
    assert await b.wait_for(5) == 50


async def loses_no_race(run: Run) -> None:
    """A wait that begins while its step is being reached ends."""
    a, b = run.pair
    for step in range(1, 101):
        wait = asyncio.ensure_future(b.wait_for(step))
        raised = asyncio.ensure_future(a.raise_to(step))
        # Sometimes the wait has begun when the step is raised, sometimes both begin together.
        if step % 3 == 0:
            await asyncio.sleep(0)
        assert await wait >= step
        await raised
        await a.wait_for(step)


async def cancelled_advance(run: Run) -> None:
    """A cancelled advance counts once or not at all. Concurrent ones count."""
    a, b = run.pair
    # A cancel may come before the request is sent, before its answer, or after its answer. With
    # more ticks it comes later.
    for ticks in range(12):
        advances = [asyncio.ensure_future(a.advance()) for _ in range(3)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        advances[1].cancel()
        await asyncio.wait(advances)
        assert advances[0].result() < advances[2].result()
    # Of the 36 advances, 24 were not cancelled.
    step = (await b.value()).step
    assert 24 <= step <= 36, step


async def raises_to(run: Run) -> None:
    """`raise_to` never lowers the step, and has no further effect when repeated."""
    a, b = run.pair
    assert await a.raise_to(10) == 10
    assert await b.raise_to(4) == 10
    assert await b.raise_to(10) == 10
    await is_at(10, a, b)


async def resets(run: Run) -> None:
    """A reset begins an epoch: waiters keep waiting for their step in it, or get an error.
    Positions never go back.
    """
    a, b = run.pair
    await a.advance(20)
    wait = await parked(b, b.wait_for(30))
    raising = await parked(b, b.wait_for(30, on_reset="raise"))
    old = await a.value()
    new = await a.reset(5)
    assert new > old
    assert new.step == 5
    error = await raises(StepResetError, raising)
    assert error.new == new
    assert await b.value() == new
    assert not wait.done()
    await b.advance(25)
    assert await wait == 30
    wait = await parked(b, b.wait_for(100))
    await a.reset(100)
    assert await wait == 100


async def reports_changes(run: Run) -> None:
    """`changes` yields the newest position, without a backlog."""
    a, b = run.pair
    changes = b.changes()
    first = await anext(changes)
    for _ in range(10):
        await a.advance()
    await b.wait_for(10)
    # There were ten changes since the first position, and only the last one is yielded.
    newest = await anext(changes)
    assert newest.step == 10
    assert newest.step > first.step
    # A change is also yielded if the iterator already waits for it.
    change = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    await a.advance()
    assert (await change).step == 11


async def ends_with_the_last_publisher(run: Run) -> None:
    """When the last publisher finishes or fails, waits in all processes end with its name, step and
    error.
    """
    a, b = run.pair
    async with publisher(a, "the chief"):
        wait = await parked(b, b.wait_for(100))
        changes = b.changes()
        await anext(changes)  # the current position, so that the iterator waits for the next one
        await a.advance(3)
    finished = await raises(PublisherFinishedError, wait)
    assert "the chief finished at step 3" in str(finished)
    # The iterator ends, too. Otherwise the check would time out here.
    async for _ in changes:
        pass
    # The waits of a new publisher end with its error.
    async with publisher(a, "trainer") as trainer:
        await b.value()  # `b` learns of the new publisher
        wait = await parked(b, b.wait_for(100))
        trainer.close(ZeroDivisionError("a bad batch"))
    failed = await raises(PublisherFailedError, wait)
    assert "trainer failed at step 3" in str(failed)
    assert "a bad batch" in str(failed.__cause__)


async def leads(run: Run) -> None:
    """There is one chief at a time, each in a newer term. The next one waits until the lead is
    free.
    """
    a, b = run.pair
    order: list[str] = []

    async def lead_second() -> int:
        async with b.lead() as term:
            order.append("second begins")
            return term.number

    async with a.lead() as first_term:
        second = asyncio.ensure_future(lead_second())
        # These steps give the second chief the time to lead, if it did not have to wait.
        await a.advance(3)
        await b.wait_for(3)
        order.append("first ends")
    second_number = await second
    assert order == ["first ends", "second begins"]
    assert second_number > first_term.number
    # A change of the chief does not change the step.
    await is_at(3, a)


async def initialises(run: Run) -> None:
    """Workers wait until the chief has initialised. A new term is not initialised."""
    a, b = run.pair
    await raises(InvalidArgumentError, a.mark_initialised())
    await raises(SessionNotReadyError, b.wait_initialised(0.01))
    wait = asyncio.ensure_future(b.wait_initialised())
    async with a.lead():
        await asyncio.sleep(0)
        assert not wait.done()
        await a.mark_initialised()
        await wait
        await b.wait_initialised(0)
    async with a.lead():
        await b.value()
        await raises(SessionNotReadyError, b.wait_initialised(0.01))


async def closes(run: Run) -> None:
    """Closing ends the waits of this store, and no others. Later calls raise, and closing again is
    harmless.
    """
    a, b = run.pair
    wait = await parked(b, b.wait_for(5))
    await b.aclose()
    await b.aclose()
    await raises(StoreClosedError, wait)
    calls = [
        b.advance(),
        b.value(),
        b.wait_for(1),
        b.raise_to(1),
        b.reset(0),
        b.wait_initialised(),
        b.mark_initialised(),
    ]
    for call in calls:
        await raises(StoreClosedError, call)
    if a is not b:
        await a.advance(5)
        await is_at(5, a)


async def keeps_runs_apart(run: Run) -> None:
    """Stores of different runs never meet."""
    a = run.pair[0]
    other_run = Run(run.make_store)
    try:
        other = await other_run.open()
        await other.advance(7)
        await a.advance()
        await is_at(1, a)
        await is_at(7, other)
    finally:
        await other_run.aclose()


async def forgets(run: Run) -> None:
    """A forgotten run begins again at its first position, also if its chief forgets it. The store
    is closed then.
    """
    a, b = run.pair
    if not isinstance(a, SharedStepStore):
        return
    # The other store is closed first: in a forgotten run, it would write to files that are gone.
    await b.aclose()
    async with a.lead():
        a.publisher("chief")
        await a.advance(5)
        await a.forget()
    await raises(StoreClosedError, a.advance())
    again = await run.open()
    assert await again.value() == Position(1, 0)
    async with again.lead() as term:
        assert term.number == 1


_Check = Callable[[Run], Coroutine[Any, Any, None]]
_CHECKS: dict[str, _Check] = by_name(
    counts,
    wakes,
    loses_no_race,
    cancelled_advance,
    raises_to,
    resets,
    reports_changes,
    ends_with_the_last_publisher,
    leads,
    initialises,
    closes,
    keeps_runs_apart,
    forgets,
)


async def check_step_store(
    make: MakeStore,
    check: str | None = None,
) -> None:
    """Run the conformance suite on a step store, or one of its checks.

    Args:
        make: returns a store of the named run. It is called once for each imitated process. A run
            of a new name must begin at step 0. If your store is for one process only, return the
            same store for the same name.
        check: a name from `step_store_checks`, by default all.

    Raises:
        AssertionError: a check failed. The message or a note names it.
    """
    check_callable(make, "make")

    async def run_check(check: _Check) -> None:
        run = Run(make)
        try:
            run.pair = (await run.open(), await run.open())
            await check(run)
        finally:
            await run.aclose()

    await run_checks(_CHECKS, check, run_check)


def step_store_checks() -> list[str]:
    """Return the names of the checks, for a parametrized test."""
    return list(_CHECKS)
