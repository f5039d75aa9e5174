"""The conformance suite of step stores, for authors of an engine.

Each check uses two stores of one run, as two processes would.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohooks._core.scope import begin_run
from aiohooks.errors import (
    InvalidArgumentError,
    PublisherFailedError,
    PublisherFinishedError,
    SessionNotReadyError,
    StaleTermError,
    StepResetError,
    StoreClosedError,
    StoreResetError,
)
from aiohooks.stores import Position, Publisher, SharedStepStore, StepStore
from aiohooks.testing._checks import by_name, run_checks

E = TypeVar("E", bound=BaseException)
MakeStore = Callable[[str], StepStore]
"""Return a store of the named run, as another process would open it; for a store of one process,
the same one again.
"""
Wait = asyncio.Task[int]
LoseData = Callable[[], Awaitable[None]]
"""Let the engine lose all that it keeps. It works again afterwards."""


class Run:
    """The stores of one run."""

    pair: tuple[StepStore, StepStore]
    """The stores of the two processes that are imitated."""

    def __init__(self, make: MakeStore, lose_data: LoseData | None = None) -> None:
        self.make_store: MakeStore = make
        self.stores: list[StepStore] = []
        self._lose_data = lose_data
        self._name = f"check-{secrets.token_hex(4)}"

    def make(self) -> StepStore:
        """Return another store, which is not open yet."""
        store = self.make_store(self._name)
        if store not in self.stores:
            self.stores.append(store)
        return store

    async def open(self) -> StepStore:
        """Open another store."""
        return await self.make().__aenter__()

    async def lose_data(self) -> None:
        """Let the engine lose its data."""
        assert self._lose_data is not None
        await self._lose_data()

    async def aclose(self) -> None:
        """Delete the run, and close its stores."""
        # Any store deletes the run for all. The check may have closed this one.
        last = self.stores[-1]
        if isinstance(last, SharedStepStore):
            with contextlib.suppress(StoreClosedError):
                await last.forget()
        for store in self.stores:
            await store.aclose()


async def parked(store: StepStore, wait: Coroutine[Any, Any, int]) -> Wait:
    """Return a task that waits in the store."""
    before = store.statistics().waiting
    task = asyncio.ensure_future(wait)
    while store.statistics().waiting == before and not task.done():  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    return task


async def sees(store: StepStore, position: Position) -> None:
    """Wait until the store has received a position."""
    async for seen in store.changes():
        if seen >= position:
            return


async def raises(kind: type[E], awaitable: Awaitable[Any]) -> E:
    """Return the error of this kind that the call must raise."""
    try:
        result = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, and the call returned {result!r}")


@contextlib.asynccontextmanager
async def publisher(store: StepStore, name: str) -> AsyncGenerator[Publisher]:
    """Register a publisher, also with the engine. It leaves with the block."""
    with store.publisher(name) as registered:
        await store.flush()
        yield registered


async def is_at(step: int, *stores: StepStore) -> None:
    """Check the step of these stores."""
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


async def rejects_invalid_arguments(run: Run) -> None:
    """Invalid arguments raise an error, and change nothing."""
    a = run.pair[0]
    invalid: list[Any] = [-1, 1.5, "1", None, 2**53]
    for value in invalid:
        for call in (a.advance, a.raise_to, a.reset):
            await raises(InvalidArgumentError, call(value))
    await raises(InvalidArgumentError, a.advance(0))
    await a.raise_to(2**53 - 1)
    await raises(InvalidArgumentError, a.advance())
    await is_at(2**53 - 1, a)


async def wakes(run: Run) -> None:
    """A waiter is woken at its step or later, never before, wherever the step was advanced."""
    a, b = run.pair
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
                assert await wait >= step
            else:
                assert not wait.done()
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
    # A cancel may come before the request is sent, while it is under way, or after its answer.
    for ticks in range(12):
        advances = [asyncio.ensure_future(a.advance()) for _ in range(3)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        advances[1].cancel()
        await asyncio.wait(advances)
        assert advances[0].result() < advances[2].result()
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
    assert (await anext(changes)).step == 10 > first.step
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
        await anext(changes)
        await a.advance(3)
    finished = await raises(PublisherFinishedError, wait)
    assert "the chief finished at step 3" in str(finished)
    async for _ in changes:
        pass  # this loop ends
    async with publisher(a, "trainer") as trainer:
        await b.value()
        wait = await parked(b, b.wait_for(100))
        trainer.close(ZeroDivisionError("a bad batch"))
    failed = await raises(PublisherFailedError, wait)
    assert "trainer failed at step 3" in str(failed)
    assert "a bad batch" in str(failed.__cause__)


async def announces_before_it_is_used(run: Run) -> None:
    """The first publisher of a store opens it: other processes learn of the publisher, and how it
    leaves, without another call.
    """
    a = run.pair[0]
    store = run.make()
    async with publisher(store, "trainer"):
        await a.value()
        assert a.statistics().publishers == ("trainer",)
        wait = await parked(a, a.wait_for(5))
    assert "trainer finished" in str(await raises(PublisherFinishedError, wait))
    # A store of one process has no other.
    if store is not a:
        store = run.make()
        store.publisher("second")
        await store.aclose()
        error = await raises(PublisherFinishedError, a.wait_for(5))
        assert "second finished" in str(error)


async def waits_while_one_can_advance(run: Run) -> None:
    """Waits continue while a publisher could still advance. When all that remain wait themselves,
    all waits end.
    """
    a, b = run.pair
    first = a.publisher("first")
    second = b.publisher("second")
    third = a.publisher("third")
    await a.flush()
    await b.flush()
    waits = [
        await parked(b, _wait_as(second, b, 10)),
        await parked(a, _wait_as(first, a, 12)),
    ]
    third.close()
    await a.flush()
    errors = [str(await raises(PublisherFinishedError, wait)) for wait in waits]
    assert any("third finished" in error for error in errors), errors


async def _wait_as(publisher: Publisher, store: StepStore, step: int) -> int:
    """Wait on behalf of a publisher, as inside a session's run. The session ends with the wait."""
    run = begin_run(None, publisher)
    try:
        return await store.wait_for(step)
    finally:
        run.active = False
        # The other publisher may not know yet that this one waited, and would wait for it.
        publisher.close()


async def leads(run: Run) -> None:
    """There is one chief at a time, each in a newer term. The next one waits until the lead is
    free.
    """
    a, b = run.pair
    order: list[str] = []

    async def second() -> int:
        async with b.lead() as term:
            order.append("second")
            return term.number

    async with a.lead() as first:
        task = asyncio.ensure_future(second())
        await a.advance(3)
        await b.wait_for(3)
        order.append("first")
    assert await task > first.number
    assert order == ["first", "second"]
    await is_at(3, a)


async def reports_the_exit_of_a_chief_once(run: Run) -> None:
    """A chief whose publisher has left is no exit of its own, also if another publisher has left
    since.
    """
    a, b = run.pair
    async with publisher(b, "other") as other, a.lead():
        trainer = a.publisher("trainer")
        await a.flush()
        wait = await parked(b, b.wait_for(5))
        trainer.close(ZeroDivisionError("a bad batch"))
        await a.flush()
        other.close()
        await b.flush()
        await a.value()
    assert "other finished" in str(await raises(PublisherFinishedError, wait))


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
    # A forgotten run has no other store: it would write to files that are gone.
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


async def begins_a_later_epoch_without_its_data(run: Run) -> None:
    """An engine has lost its data: the writes of each process fail until it acknowledges the loss.
    Waits continue, unless a reset ends them.
    """
    a, b = run.pair
    await a.advance(5)
    await sees(b, Position(1, 5))
    waits = [await parked(store, store.wait_for(6)) for store in (a, b)]
    raising = await parked(b, b.wait_for(6, on_reset="raise"))
    await run.lose_data()
    for store in (a, b):
        await raises(StoreResetError, store.advance())
        await raises(StoreResetError, store.raise_to(9))
        error = await raises(StoreResetError, store.reset(9))
        assert store.acknowledge_loss() is not None
        assert store.acknowledge_loss() is None
        assert error.old == Position(1, 5), error
        assert error.new > error.old, error
    await raises(StepResetError, raising)
    assert not any(wait.done() for wait in waits)
    assert await b.advance() == 6
    assert [await wait for wait in waits] == [6, 6]
    assert (await a.value()).epoch > 1
    assert await a.reset(2) > error.new


async def keeps_the_lead_without_its_data(run: Run) -> None:
    """An engine has lost its data: the chief continues to lead and initialises the run again. A
    standby keeps waiting, and its term is a newer one.
    """
    a, b = run.pair
    async with a.lead() as first:
        await a.mark_initialised()
        await a.advance(3)
        await b.wait_initialised()
        standby = b.lead()
        entering = asyncio.ensure_future(standby.__aenter__())
        await b.wait_for(3)
        wait = await parked(a, a.wait_for(9))
        await run.lose_data()
        await raises(StoreResetError, wait)
        await raises(StoreResetError, a.wait_for(9))
        await raises(StoreResetError, a.mark_initialised())
        a.acknowledge_loss()
        await sees(b, await a.reset(1))
        await b.value()
        await raises(SessionNotReadyError, b.wait_initialised(0))
        await a.mark_initialised()
        await b.wait_initialised()
        assert await a.advance() == 2
        assert not entering.done()
    second = await entering
    assert second.number > first.number
    b.acknowledge_loss()
    assert await b.advance() == 3
    await standby.__aexit__(None, None, None)


async def has_one_chief_without_its_data(run: Run) -> None:
    """An engine has lost its data, and a process without knowledge of a chief may take the lead:
    one of the two chiefs gets an error.
    """
    a, b = run.pair
    # An engine without data grants the first term, so let the chief have a later one.
    for _ in range(2):
        async with a.lead():
            await a.advance(3)
    async with a.lead():
        await a.advance(3)
        await b.aclose()
        await run.lose_data()
        c = await run.open()
        lead = c.lead()
        entering = asyncio.ensure_future(lead.__aenter__())
        await raises(StoreResetError, a.advance())
        a.acknowledge_loss()
        try:
            step = await a.advance()
        except StaleTermError:
            # The new process was granted the lead before this one was back.
            await entering
            await c.advance()
        else:
            assert step > 9
            if entering.done():
                await raises(StaleTermError, c.advance())
        if entering.done():
            await lead.__aexit__(None, None, None)
        entering.cancel()
        await asyncio.wait([entering])


_Check = Callable[[Run], Coroutine[Any, Any, None]]
_CHECKS: dict[str, _Check] = by_name(
    counts,
    rejects_invalid_arguments,
    wakes,
    loses_no_race,
    cancelled_advance,
    raises_to,
    resets,
    reports_changes,
    ends_with_the_last_publisher,
    announces_before_it_is_used,
    waits_while_one_can_advance,
    leads,
    reports_the_exit_of_a_chief_once,
    initialises,
    closes,
    keeps_runs_apart,
    forgets,
)
_LOSSES: dict[str, _Check] = by_name(
    begins_a_later_epoch_without_its_data,
    keeps_the_lead_without_its_data,
    has_one_chief_without_its_data,
)


async def check_step_store(
    make: MakeStore,
    check: str | None = None,
    *,
    lose_data: LoseData | None = None,
) -> None:
    """Run the conformance suite on a step store, or one of its checks.

    Args:
        make: returns a store of the named run, called once for each process that is imitated. A new
            name must begin at step 0. For a store of one process it returns the same one for the
            same name.
        check: a name from `step_store_checks`. If left out, all are run.
        lose_data: lets the engine lose all that it keeps, for the checks that need it. Without it
            they are left out.

    Raises:
        AssertionError: a check failed. The message or a note names it.
    """

    async def run_check(check: _Check) -> None:
        run = Run(make, lose_data)
        try:
            run.pair = (await run.open(), await run.open())
            await check(run)
        finally:
            await run.aclose()

    checks = _CHECKS if lose_data is None else _CHECKS | _LOSSES
    await run_checks(checks, check, run_check)


def step_store_checks(*, lose_data: bool = False) -> list[str]:
    """Return the names of the checks, for a parametrized test, or of the checks that need
    `lose_data`.
    """
    return list(_LOSSES if lose_data else _CHECKS)
