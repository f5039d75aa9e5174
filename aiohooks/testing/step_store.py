"""The conformance suite of step stores, for authors of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
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
    StepTimeoutError,
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
LoseData = Callable[[], Awaitable[None]]
"""Let the engine lose all that it keeps; it works again afterwards."""


class Run:
    """The stores of one run."""

    def __init__(self, make: MakeStore, name: str, lose_data: LoseData | None = None) -> None:
        self._make = make
        self.name = name
        self._lose_data = lose_data
        self.stores: list[StepStore] = []

    def make(self) -> StepStore:
        """Return one more store, which is not open yet."""
        store = self._make(self.name)
        if not any(store is other for other in self.stores):
            self.stores.append(store)
        return store

    async def open(self) -> StepStore:
        """Open one more store."""
        return await self.make().__aenter__()

    async def lose_data(self) -> None:
        """Let the engine lose its data."""
        assert self._lose_data is not None
        await self._lose_data()


@contextlib.asynccontextmanager
async def opened(make: MakeStore, lose_data: LoseData | None = None) -> AsyncGenerator[Run]:
    """Return a new run; its stores are closed and the run deleted afterwards."""
    run = Run(make, f"check-{secrets.token_hex(4)}", lose_data)
    try:
        yield run
    finally:
        for store in run.stores:
            if isinstance(store, SharedStepStore) and store is run.stores[-1]:
                with contextlib.suppress(StoreClosedError):
                    await store.forget()
            await store.aclose()


async def parked(store: StepStore, wait: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task that is parked in the store; a store that waits for something else first would
    block this indefinitely.
    """
    before = store.statistics()
    task = asyncio.ensure_future(wait)
    await until(lambda: store.statistics().waiting > before.waiting or task.done())
    return task


async def until(true: Callable[[], bool]) -> None:
    """Let other tasks run until `true` returns a true value."""
    while not true():  # noqa: ASYNC110 - a store has no event for this
        await asyncio.sleep(0)


async def sees(store: StepStore, position: Position) -> None:
    """Wait until the store knows a position."""
    async for seen in store.changes():
        if seen >= position:
            return


async def raises(kind: type[E], awaitable: Awaitable[Any]) -> E:
    """Return the error of this kind that the call raises; it must raise one."""
    try:
        result = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, and the call returned {result!r}")


async def counts(a: StepStore, b: StepStore, run: Run) -> None:
    """A run begins at step 0; each advance adds once and returns the step that it led to."""
    assert (await a.value()).step == 0
    assert await a.advance() == 1
    assert await b.advance(4) == 5
    assert (await a.value()).step == (await b.value()).step == 5
    assert a.latest.step == b.latest.step == 5
    await asyncio.gather(*(store.advance() for store in (a, b) for _ in range(100)))
    assert (await a.value()).step == 205


async def refuses(a: StepStore, b: StepStore, run: Run) -> None:
    """Invalid arguments are refused, and change nothing."""
    for bad in (0, -1, 1.5, "1", None, True, 2**53):
        await raises(InvalidArgumentError, a.advance(bad))  # type: ignore[arg-type]
    for bad in (-1, 0.5, "x", None, 2**53):
        await raises(InvalidArgumentError, a.raise_to(bad))  # type: ignore[arg-type]
        await raises(InvalidArgumentError, a.reset(bad))  # type: ignore[arg-type]
    await a.raise_to(2**53 - 1)
    await raises(InvalidArgumentError, a.advance())
    assert (await a.value()).step == 2**53 - 1


async def wakes(a: StepStore, b: StepStore, run: Run) -> None:
    """A waiter is woken at its step or later, never before, wherever the step was advanced."""
    waits = {step: await parked(b, b.wait_for(step)) for step in (3, 10, 10, 7)}
    assert await b.wait_for(0) == 0
    await a.advance(6)
    assert await waits[3] >= 3
    await sees(b, Position(a.latest.epoch, 6))
    assert not waits[7].done()
    assert not waits[10].done()
    await a.advance()
    assert await waits[7] >= 7
    await a.advance(20)
    assert await waits[10] == 27
    assert await b.wait_for(27) == await b.wait_for(5) == 27


async def wakes_many(a: StepStore, b: StepStore, run: Run) -> None:
    """A thousand waiters at many steps are each woken at their step, and none is left over."""
    waits = [
        (step, asyncio.ensure_future(store.wait_for(step)))
        for store in (a, b)
        for step in range(1, 51)
        for _ in range(10)
    ]
    await until(lambda: sum(store.statistics().waiting for store in {a, b}) == len(waits))
    for reached in (1, 20, 49, 50):
        await a.raise_to(reached)
        for step, wait in waits:
            if step <= reached:
                assert await wait >= step
        assert not any(wait.done() for step, wait in waits if step > reached)
    assert a.statistics().waiting == b.statistics().waiting == 0


async def loses_no_race(a: StepStore, b: StepStore, run: Run) -> None:
    """A wait that begins while its step is being reached ends."""
    for step in range(1, 101):
        wait, raised = (
            asyncio.ensure_future(b.wait_for(step)),
            asyncio.ensure_future(a.raise_to(step)),
        )
        if step % 3 == 0:
            await asyncio.sleep(0)
        assert await wait >= step
        await raised
        await a.wait_for(step)


async def survives_cancels(a: StepStore, b: StepStore, run: Run) -> None:
    """Cancelled waits leave nothing behind, and do not disturb the others."""
    kept = await parked(b, b.wait_for(50))
    for round_ in range(5):
        waits = [asyncio.ensure_future(b.wait_for(60 + step)) for step in range(40)]
        for _ in range(round_):
            await asyncio.sleep(0)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    assert b.statistics().waiting == 1
    await a.advance(50)
    assert await kept == 50


async def cancelled_advance(a: StepStore, b: StepStore, run: Run) -> None:
    """A cancelled advance counts once or not at all; those beside it count."""
    done = 0
    for ticks in range(12):
        advances = [asyncio.ensure_future(a.advance()) for _ in range(3)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        advances[1].cancel()
        results = await asyncio.gather(*advances, return_exceptions=True)
        assert all(isinstance(result, int) for result in (results[0], results[2]))
        done += 2
    step = (await b.value()).step
    assert done <= step <= done + 12, (done, step)


async def raises_to(a: StepStore, b: StepStore, run: Run) -> None:
    """`raise_to` never lowers the step, and has no further effect when repeated."""
    assert await a.raise_to(10) == 10
    assert await b.raise_to(4) == 10
    assert await b.raise_to(10) == 10
    assert (await a.value()) == (await b.value())


async def resets(a: StepStore, b: StepStore, run: Run) -> None:
    """A reset begins an epoch: waiters keep waiting for their step in it, or get an error;
    positions never go back.
    """
    await a.advance(20)
    kept = await parked(b, b.wait_for(30))
    raising = await parked(b, b.wait_for(30, on_reset="raise"))
    old = await a.value()
    new = await a.reset(5)
    assert new > old
    assert new.step == 5
    error = await raises(StepResetError, raising)
    assert error.new == new
    assert await b.value() == new
    assert not kept.done()
    await b.advance(25)
    assert await kept == 30
    above = await parked(b, b.wait_for(100))
    await a.reset(100)
    assert await above == 100


async def reports_changes(a: StepStore, b: StepStore, run: Run) -> None:
    """`changes` yields the newest position, without a backlog."""
    changes = b.changes()
    first = await anext(changes)
    for _ in range(10):
        await a.advance()
    await b.wait_for(10)
    assert (await anext(changes)).step == 10 > first.step
    coming = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    await a.advance()
    assert (await coming).step == 11


async def times_out(a: StepStore, b: StepStore, run: Run) -> None:
    """The error of a wait with a timeout has the step wanted and the step seen."""
    await a.advance(2)
    error = await raises(StepTimeoutError, a.wait_for(9, timeout=0.01))
    assert (error.wanted, error.seen) == (9, 2)
    await raises(StepTimeoutError, a.wait_for(9, timeout=0))
    assert a.statistics().waiting == 0


async def reports_the_last_finished(a: StepStore, b: StepStore, run: Run) -> None:
    """When the last publisher has finished, waiters in all processes learn its name and its
    step.
    """
    chief = a.publisher("the chief")
    await a.flush()
    wait = await parked(b, b.wait_for(100))
    changes = b.changes()
    await anext(changes)
    await a.advance(3)
    chief.close()
    error = await raises(PublisherFinishedError, wait)
    assert "the chief finished at step 3" in str(error), error
    async for _ in changes:  # ends
        pass


async def reports_the_last_failed(a: StepStore, b: StepStore, run: Run) -> None:
    """When the last publisher has failed, waiters in all processes get its error."""
    trainer = a.publisher("trainer")
    await a.flush()
    wait = await parked(b, b.wait_for(5))
    trainer.close(ZeroDivisionError("a bad batch"))
    error = await raises(PublisherFailedError, wait)
    assert "trainer failed at step 0" in str(error), error
    assert "a bad batch" in str(error.__cause__), error.__cause__


async def announces_before_it_is_used(a: StepStore, b: StepStore, run: Run) -> None:
    """A store is opened by its first publisher: the others learn of it, and how it leaves, also if
    nothing else is called.
    """
    b = run.make()
    trainer = b.publisher("trainer")
    await b.flush()
    await a.value()
    assert a.statistics().publishers == ("trainer",)
    wait = await parked(a, a.wait_for(5))
    trainer.close(ZeroDivisionError("a bad batch"))
    assert "a bad batch" in str((await raises(PublisherFailedError, wait)).__cause__)
    c = run.make()
    second = c.publisher("second")
    await c.flush()
    await a.value()
    wait = await parked(a, a.wait_for(5))
    second.close()
    assert "second finished" in str(await raises(PublisherFinishedError, wait))
    if c is not a:
        d = run.make()
        d.publisher("third")
        await d.aclose()
        assert "third finished" in str(await raises(PublisherFinishedError, a.wait_for(5)))


async def bounds_texts(a: StepStore, b: StepStore, run: Run) -> None:
    """A failure with a long text is reported like any other, without the middle of the text; the
    process continues to advance.
    """
    trainer = a.publisher("trainer")
    await a.flush()
    wait = await parked(b, b.wait_for(100))
    trainer.close(ValueError("bad data " + 3_000_000 * "x"))
    assert await a.advance() == 1
    error = await raises(PublisherFailedError, wait)
    cause = str(error.__cause__)
    assert "bad data" in cause
    if isinstance(b, SharedStepStore):
        assert cause.startswith("ValueError: bad data xxx")
        assert len(cause) < 5_000
        assert " characters) ... " in cause
    await raises(InvalidArgumentError, _publish(a, 1_001 * "x"))
    assert await b.advance() == 2


async def _publish(store: StepStore, name: str) -> None:
    store.publisher(name)


async def waits_while_one_can_advance(a: StepStore, b: StepStore, run: Run) -> None:
    """While one publisher could still advance, waits continue; when all that remain are waiting
    themselves, all waits end.
    """
    first, second, third = a.publisher("first"), b.publisher("second"), b.publisher("third")
    await a.flush()
    await b.flush()
    wait = await parked(b, _wait_as(second, b, 10))
    other = await parked(a, _wait_as(first, a, 12))
    third.close()
    await b.flush()
    errors = [str(await raises(PublisherFinishedError, each)) for each in (wait, other)]
    assert any("third finished" in one for one in errors), errors


async def _wait_as(publisher: Publisher, store: StepStore, step: int) -> int:
    """Wait on behalf of a publisher, as inside a session's run; the session ends with the wait."""
    run = begin_run(None, publisher)
    try:
        return await store.wait_for(step)
    finally:
        run.active = False
        # otherwise the others, not notified yet that it waited, would wait for it
        publisher.close()


async def leads(a: StepStore, b: StepStore, run: Run) -> None:
    """There is one chief at a time, each in a newer term; the next one waits until the lead is
    free.
    """
    order: list[str] = []

    async def second() -> int:
        async with b.lead() as term:
            order.append("second")
            return term.number

    async with a.lead() as first:
        task = asyncio.ensure_future(second())
        await a.advance(3)
        await b.wait_for(3)
        assert not task.done()
        order.append("first")
    assert await task > first.number
    assert order == ["first", "second"]
    assert (await a.value()).step == 3


async def reports_the_exit_of_a_chief_once(a: StepStore, b: StepStore, run: Run) -> None:
    """A chief whose publisher has left is no exit of its own, also if another publisher has left
    since.
    """
    other = b.publisher("other")
    await b.flush()
    async with a.lead():
        trainer = a.publisher("trainer")
        await a.flush()
        wait = await parked(b, b.wait_for(5))
        trainer.close(ZeroDivisionError("a bad batch"))
        await a.flush()
        other.close()
        await b.flush()
        await a.value()
    assert "other finished" in str(await raises(PublisherFinishedError, wait))


async def initialises(a: StepStore, b: StepStore, run: Run) -> None:
    """Workers wait until the chief has initialised; a new term is not initialised."""
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


async def closes(a: StepStore, b: StepStore, run: Run) -> None:
    """Closing ends the waits of this store, not those of others; later calls raise, and closing
    again is harmless.
    """
    wait = await parked(b, b.wait_for(5))
    await b.aclose()
    await b.aclose()
    await raises(StoreClosedError, wait)
    for call in (
        b.advance(),
        b.value(),
        b.wait_for(1),
        b.raise_to(1),
        b.reset(0),
        b.wait_initialised(),
        b.mark_initialised(),
    ):
        await raises(StoreClosedError, call)
    if a is not b:
        await a.advance(5)
        assert (await a.value()).step == 5


async def keeps_runs_apart(a: StepStore, b: StepStore, run: Run) -> None:
    """Stores of different runs never meet."""
    async with opened(run._make) as other_run:  # pyright: ignore[reportPrivateUsage]
        other = await other_run.open()
        await other.advance(7)
        await a.advance()
        assert ((await a.value()).step, (await other.value()).step) == (1, 7)


async def advances_for_threads(a: StepStore, b: StepStore, run: Run) -> None:
    """An advance that a thread gives to the loop counts once."""
    loop = asyncio.get_running_loop()

    def advance() -> int:
        return asyncio.run_coroutine_threadsafe(a.advance(), loop).result(30)

    steps = await asyncio.gather(*(asyncio.to_thread(advance) for _ in range(20)))
    assert sorted(steps) == list(range(1, 21))
    assert (await b.value()).step == 20


async def stays_in_its_process(a: StepStore, b: StepStore, run: Run) -> None:
    """A shared store can be neither copied nor pickled: the error says what to do instead."""
    if isinstance(a, SharedStepStore):
        error = await raises(TypeError, asyncio.to_thread(copy.deepcopy, a))
        assert "open_step_store" in str(error)


async def forgets(a: StepStore, b: StepStore, run: Run) -> None:
    """A forgotten run begins again at its first position, also if its chief forgets it; the store
    is closed then.
    """
    if not isinstance(a, SharedStepStore):
        return
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


async def begins_a_later_epoch_without_its_data(a: StepStore, b: StepStore, run: Run) -> None:
    """An engine that has lost its data: the writes of each process fail until it acknowledges the
    loss. Waits continue, except for those that a reset ends.
    """
    await a.advance(5)
    await sees(b, Position(1, 5))
    waits = [await parked(store, store.wait_for(6)) for store in (a, b)]
    ended = await parked(b, b.wait_for(6, on_reset="raise"))
    await run.lose_data()
    for store in (a, b):
        for call in (store.advance(), store.raise_to(9), store.reset(9)):
            error = await raises(StoreResetError, call)
        assert store.acknowledge_loss() is not None
        assert store.acknowledge_loss() is None
        assert error.old == Position(1, 5), error
        assert error.new > error.old, error
    await raises(StepResetError, ended)
    assert not any(wait.done() for wait in waits)
    assert await b.advance() == 6
    assert [await wait for wait in waits] == [6, 6]
    assert (await a.value()).epoch > 1
    assert await a.reset(2) > error.new


async def keeps_the_lead_without_its_data(a: StepStore, b: StepStore, run: Run) -> None:
    """An engine that has lost its data: the chief leads on and initialises the run again, a standby
    waits on, and its term is a newer one.
    """
    async with a.lead() as first:
        await a.mark_initialised()
        await a.advance(3)
        await b.wait_initialised()
        standby = b.lead()
        leads = asyncio.ensure_future(standby.__aenter__())
        await b.wait_for(3)
        chief_waits = await parked(a, a.wait_for(9))
        await run.lose_data()
        await raises(StoreResetError, chief_waits)
        await raises(StoreResetError, a.wait_for(9))
        await raises(StoreResetError, a.mark_initialised())
        a.acknowledge_loss()
        await sees(b, await a.reset(1))
        await b.value()
        await raises(SessionNotReadyError, b.wait_initialised(0))
        await a.mark_initialised()
        await b.wait_initialised()
        assert await a.advance() == 2
        assert not leads.done()
    second = await leads
    assert second.number > first.number
    b.acknowledge_loss()
    assert await b.advance() == 3
    await standby.__aexit__(None, None, None)


async def has_one_chief_without_its_data(a: StepStore, b: StepStore, run: Run) -> None:
    """A process that knows of no chief may take the lead of an engine that has lost its data: of
    the two, one is refused.
    """
    for _ in range(2):  # so that its next term is not the first one
        async with a.lead():
            await a.advance(3)
    async with a.lead():
        await a.advance(3)
        await b.aclose()
        await run.lose_data()
        c = await run.open()
        lead = c.lead()
        leads = asyncio.ensure_future(lead.__aenter__())
        await raises(StoreResetError, a.advance())
        a.acknowledge_loss()
        try:
            step = await a.advance()
        except StaleTermError:  # the other one was granted the lead before this one was back
            await leads
            await c.advance()
        else:
            assert step > 9
            if leads.done():  # it was there first
                await raises(StaleTermError, c.advance())
        if leads.done():
            await lead.__aexit__(None, None, None)
        leads.cancel()
        await asyncio.gather(leads, return_exceptions=True)


async def tells_each_exit_once_without_its_data(a: StepStore, b: StepStore, run: Run) -> None:
    """An engine that has lost its data: an exit from before ends no wait while a publisher lives,
    and the next one ends it.
    """
    for number in range(2):
        with a.publisher(f"warm-up {number}"):
            await a.flush()
            await b.value()
            early = await parked(b, b.wait_for(100))
        await raises(PublisherFinishedError, early)
    trainer = a.publisher("trainer")
    await a.flush()
    await b.value()
    wait = await parked(b, b.wait_for(100))
    await run.lose_data()
    await raises(StoreResetError, a.advance())
    a.acknowledge_loss()
    await a.advance()
    await b.wait_for(1)
    assert not wait.done()
    trainer.close(ZeroDivisionError("a bad batch"))
    error = await raises(PublisherFailedError, wait)
    assert "trainer failed at step 1" in str(error), error


_Check = Callable[[StepStore, StepStore, Run], Coroutine[Any, Any, None]]
_CHECKS: dict[str, _Check] = by_name(
    *(
        counts,
        refuses,
        wakes,
        wakes_many,
        loses_no_race,
        survives_cancels,
        cancelled_advance,
        raises_to,
        resets,
    ),
    *(reports_changes, times_out, reports_the_last_finished, reports_the_last_failed, bounds_texts),
    *(announces_before_it_is_used, waits_while_one_can_advance),
    *(
        leads,
        reports_the_exit_of_a_chief_once,
        initialises,
        closes,
        keeps_runs_apart,
        advances_for_threads,
    ),
    *(stays_in_its_process, forgets),
)
_LOSSES: dict[str, _Check] = by_name(
    *(
        begins_a_later_epoch_without_its_data,
        keeps_the_lead_without_its_data,
        has_one_chief_without_its_data,
    ),
    tells_each_exit_once_without_its_data,
)


async def check_step_store(
    make: MakeStore,
    check: str | None = None,
    *,
    lose_data: LoseData | None = None,
    limit_secs: float = 60.0,
) -> None:
    """Run the conformance suite on a step store, or one of its checks.

    Args:
        make: returns a store of the named run, called once for each process that is imitated; a new
            name must begin at step 0. For a store of one process it returns the same one for the
            same name.
        check: a name from `step_store_checks`; if left out, all are run.
        lose_data: lets the engine lose all that it keeps, for the checks that need it; without it
            they are left out.
        limit_secs: how long one check may take.

    Raises:
        AssertionError: a check failed; the message or a note names it.
    """

    async def run_check(check: _Check) -> None:
        async with opened(make, lose_data) as run:
            await check(
                await run.open(), await run.open(), run
            )  # a store of one process is the same one

    await run_checks(
        _CHECKS if lose_data is None else _CHECKS | _LOSSES, check, run_check, limit_secs
    )


def step_store_checks(*, lose_data: bool = False) -> list[str]:
    """Return the names of the checks, for a parametrised test; or of those that need
    `lose_data`.
    """
    return list(_LOSSES if lose_data else _CHECKS)
