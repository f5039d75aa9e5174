"""A check of step stores, for people who write one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from aiohooks._aio.run_scope import begin_run
from aiohooks.errors import (
    InvalidArgumentError,
    PublisherFailedError,
    PublisherFinishedError,
    SessionNotReadyError,
    StepResetError,
    StepTimeoutError,
    StoreClosedError,
)
from aiohooks.stores import Position, Publisher, SharedStepStore, StepStore

MakeStore = Callable[[str], StepStore]
"""Makes a store of the run that it is given the name of, as another process would; in one process, the same again."""


class Run:
    """The stores of one run."""

    def __init__(self, make: MakeStore, name: str) -> None:
        """Opens none yet."""
        self._make = make
        self.name = name
        self.stores: list[StepStore] = []

    async def open(self) -> StepStore:
        """One more store, opened."""
        store = self._make(self.name)
        if not any(store is other for other in self.stores):
            self.stores.append(store)
        return await store.__aenter__()

    async def pair(self) -> tuple[StepStore, StepStore]:
        """Two of them; in one process these are one."""
        return await self.open(), await self.open()


@contextlib.asynccontextmanager
async def opened(make: MakeStore) -> AsyncGenerator[Run]:
    """A run that nobody has used before, closed and forgotten afterwards."""
    run = Run(make, f"law-{secrets.token_hex(4)}")
    try:
        yield run
    finally:
        for store in run.stores:
            if isinstance(store, SharedStepStore) and store is run.stores[-1]:
                with contextlib.suppress(StoreClosedError):
                    await store.forget()
            await store.aclose()


async def parked(store: StepStore, wait: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that waits in the store's room; a store that waits for something else first would make this wait for ever."""
    before = store.statistics()
    task = asyncio.ensure_future(wait)
    await until(lambda: store.statistics().waits > before.waits or task.done())
    return task


async def until(true: Callable[[], bool]) -> None:
    """Lets others run until it is true."""
    while not true():  # noqa: ASYNC110 - a store has no event for what is asked here
        await asyncio.sleep(0)


async def sees(store: StepStore, position: Position) -> None:
    """Waits until news of a position has arrived."""
    async for seen in store.changes():
        if seen >= position:
            return


async def raises(kind: type[BaseException], awaitable: Awaitable[Any]) -> BaseException:
    """The error of this kind that comes out; nothing else may."""
    try:
        result = await awaitable
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was to be raised, and {result!r} came")


async def counts(run: Run) -> None:
    """A run begins at step 0; each advance adds, once, and says where it led."""
    a, b = await run.pair()
    assert (await a.value()).step == 0
    assert await a.advance() == 1
    assert await b.advance(4) == 5
    assert (await a.value()).step == (await b.value()).step == 5
    assert a.latest.step == b.latest.step == 5
    await asyncio.gather(*(store.advance() for store in (a, b) for _ in range(100)))
    assert (await a.value()).step == 205


async def refuses(run: Run) -> None:
    """What cannot be meant is refused, and nothing is changed by it."""
    a, _ = await run.pair()
    for bad in (0, -1, 1.5, "1", None, True, 2**53):
        await raises(InvalidArgumentError, a.advance(bad))  # type: ignore[arg-type]
    for bad in (-1, 0.5, "x", None, 2**53):
        await raises(InvalidArgumentError, a.raise_to(bad))  # type: ignore[arg-type]
        await raises(InvalidArgumentError, a.reset(bad))  # type: ignore[arg-type]
    await a.raise_to(2**53 - 1)
    await raises(InvalidArgumentError, a.advance())
    assert (await a.value()).step == 2**53 - 1


async def wakes(run: Run) -> None:
    """A waiter is woken at its step or later, never before, wherever the step was advanced."""
    a, b = await run.pair()
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


async def wakes_many(run: Run) -> None:
    """A thousand waiters at many steps are each woken when it is their turn, and none is left over."""
    a, b = await run.pair()
    waits = [(step, asyncio.ensure_future(store.wait_for(step))) for store in (a, b) for step in range(1, 51) for _ in range(10)]
    await until(lambda: sum(store.statistics().waiting for store in {a, b}) == len(waits))
    for reached in (1, 20, 49, 50):
        await a.raise_to(reached)
        for step, wait in waits:
            if step <= reached:
                assert await wait >= step
        assert not any(wait.done() for step, wait in waits if step > reached)
    assert a.statistics().waiting == b.statistics().waiting == 0


async def loses_no_race(run: Run) -> None:
    """A wait that begins in the moment in which its step is reached ends."""
    a, b = await run.pair()
    for step in range(1, 101):
        wait, raised = asyncio.ensure_future(b.wait_for(step)), asyncio.ensure_future(a.raise_to(step))
        if step % 3 == 0:
            await asyncio.sleep(0)
        assert await wait >= step
        await raised
        await a.wait_for(step)


async def survives_cancels(run: Run) -> None:
    """Waits that are cancelled leave nothing behind, and do not disturb the others."""
    a, b = await run.pair()
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


async def cancelled_advance(run: Run) -> None:
    """An advance that is cancelled was done once or not at all; those beside it are done."""
    a, b = await run.pair()
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


async def raises_to(run: Run) -> None:
    """`raise_to` never lowers the step, and twice is the same as once."""
    a, b = await run.pair()
    assert await a.raise_to(10) == 10
    assert await b.raise_to(4) == 10
    assert await b.raise_to(10) == 10
    assert (await a.value()) == (await b.value())


async def resets(run: Run) -> None:
    """A reset begins an epoch: who waits goes on waiting for its step there, or is told; positions never go back."""
    a, b = await run.pair()
    await a.advance(20)
    kept = await parked(b, b.wait_for(30))
    strict = await parked(b, b.wait_for(30, on_reset="raise"))
    old = await a.value()
    new = await a.reset(5)
    assert new > old
    assert new.step == 5
    error = await raises(StepResetError, strict)
    assert isinstance(error, StepResetError)
    assert error.new == new
    assert await b.value() == new
    assert not kept.done()
    await b.advance(25)
    assert await kept == 30
    above = await parked(b, b.wait_for(100))
    await a.reset(100)
    assert await above == 100


async def tells_changes(run: Run) -> None:
    """`changes` gives the newest position, without a backlog."""
    a, b = await run.pair()
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


async def times_out(run: Run) -> None:
    """A wait with a timeout ends with what it wanted and what it had seen."""
    a, _ = await run.pair()
    await a.advance(2)
    error = await raises(StepTimeoutError, a.wait_for(9, timeout=0.01))
    assert isinstance(error, StepTimeoutError)
    assert (error.wanted, error.seen) == (9, 2)
    await raises(StepTimeoutError, a.wait_for(9, timeout=0))
    assert a.statistics().waiting == 0


async def tells_who_finished(run: Run) -> None:
    """When the last publisher has finished, waiters everywhere are told who, and where."""
    a, b = await run.pair()
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


async def tells_what_failed(run: Run) -> None:
    """When the last publisher has failed, waiters everywhere are told with what."""
    a, b = await run.pair()
    trainer = a.publisher("trainer")
    await a.flush()
    wait = await parked(b, b.wait_for(5))
    trainer.close(ZeroDivisionError("a bad batch"))
    error = await raises(PublisherFailedError, wait)
    assert "trainer failed at step 0" in str(error), error
    assert "a bad batch" in str(error.__cause__), error.__cause__


async def waits_for_those_at_work(run: Run) -> None:
    """As long as one publisher could still advance, nobody is told; when all who are left wait themselves, all are."""
    a, b = await run.pair()
    first, second, third = a.publisher("first"), b.publisher("second"), b.publisher("third")
    await a.flush()
    await b.flush()
    wait = await parked(b, _acting(second, b, 10))
    other = await parked(a, _acting(first, a, 12))
    third.close()
    await b.flush()
    told = [str(await raises(PublisherFinishedError, each)) for each in (wait, other)]
    assert any("third finished" in one for one in told), told


async def _acting(publisher: Publisher, store: StepStore, step: int) -> int:
    """A wait on behalf of a publisher, as one inside a session's run is; the session ends with it."""
    run = begin_run(None, publisher)
    try:
        return await store.wait_for(step)
    finally:
        run.active = False
        publisher.close()  # before the others have heard that it waited, they would wait for it


async def fails(run: Run) -> None:
    """`fail` ends the waits of all processes."""
    a, b = await run.pair()
    wait = await parked(b, b.wait_for(5))
    a.fail(ValueError("no more data"))
    error = await raises(PublisherFailedError, wait)
    assert "no more data" in str(error.__cause__)
    await a.advance()
    await b.wait_for(1)


async def leads(run: Run) -> None:
    """There is one chief at a time, each in a younger term; the next one waits until the lead is free."""
    a, b = await run.pair()
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


async def initialises(run: Run) -> None:
    """Workers wait until the chief has initialised; a new term is not initialised."""
    a, b = await run.pair()
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
    """Closing ends the waits of this store, not those of others; afterwards nothing works, and closing again is harmless."""
    a, b = await run.pair()
    wait = await parked(b, b.wait_for(5))
    await b.aclose()
    await b.aclose()
    await raises(StoreClosedError, wait)
    for call in (b.advance(), b.value(), b.wait_for(1), b.raise_to(1), b.reset(0)):
        await raises(StoreClosedError, call)
    if a is not b:
        await a.advance(5)
        assert (await a.value()).step == 5


async def keeps_runs_apart(run: Run) -> None:
    """Stores of different runs never meet."""
    a, _ = await run.pair()
    async with opened(run._make) as other_run:  # pyright: ignore[reportPrivateUsage]
        other = await other_run.open()
        await other.advance(7)
        await a.advance()
        assert ((await a.value()).step, (await other.value()).step) == (1, 7)


async def advances_for_threads(run: Run) -> None:
    """`advance_threadsafe` works from threads, as often as it is called."""
    a, b = await run.pair()
    await a.value()
    steps = await asyncio.gather(*(asyncio.to_thread(lambda: a.advance_threadsafe().result(30)) for _ in range(20)))
    assert sorted(steps) == list(range(1, 21))
    assert (await b.value()).step == 20


async def stays_in_its_process(run: Run) -> None:
    """A store over processes is neither copied nor pickled: the error says what to do instead."""
    a, _ = await run.pair()
    if isinstance(a, SharedStepStore):
        error = await raises(TypeError, asyncio.to_thread(copy.deepcopy, a))
        assert "open_step_store" in str(error)


async def forgets(run: Run) -> None:
    """A run that was forgotten begins anew, also where its chief forgets it; the store is closed then."""
    a, b = await run.pair()
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


_Law = Callable[[Run], Coroutine[Any, Any, None]]
LAWS: dict[str, _Law] = {
    law.__name__: law
    for law in (
        *(counts, refuses, wakes, wakes_many, loses_no_race, survives_cancels, cancelled_advance, raises_to, resets),
        *(tells_changes, times_out, tells_who_finished, tells_what_failed, waits_for_those_at_work, fails, leads),
        *(initialises, closes, keeps_runs_apart, advances_for_threads, stays_in_its_process, forgets),
    )
}


async def check_step_store(make: MakeStore, law: str | None = None, *, limit_secs: float = 60.0) -> None:
    """Checks that a store keeps the laws, or one of `step_store_checks`.

    Args:
        make: makes a store of the run that it is given the name of, once for each process that is imitated; it must start
            with nothing. For a store of one process it returns the same one for the same name.
        law: the name of one law; left out, all of them.
        limit_secs: how long one law may take.

    Raises:
        AssertionError: a law is broken; the message names it.
    """
    if law is not None and law not in LAWS:
        raise InvalidArgumentError(f"law={law!r}: there are {', '.join(LAWS)}")
    for name in LAWS if law is None else [law]:
        try:
            async with asyncio.timeout(limit_secs), opened(make) as run:
                await LAWS[name](run)
        except TimeoutError as error:
            raise AssertionError(f"{name}: stuck for {limit_secs:g} s. {LAWS[name].__doc__}") from error
        except Exception as error:
            error.add_note(f"this breaks the law {name}: {LAWS[name].__doc__}")
            raise


def step_store_checks() -> list[str]:
    """The names of the laws, for a parametrised test."""
    return list(LAWS)
