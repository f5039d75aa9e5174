"""Publishers: what may advance a store, and how waits end when no publisher is left that could."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from aiohooks._core.activity import begin_run
from aiohooks.errors import (
    PublisherFailedError,
    PublisherFinishedError,
    StopRequestedError,
    WrongLoopError,
)
from aiohooks.stores import MemoryStepStore, Publisher, current_publisher
from tests.support.waiting import cancel_and_wait, parked, result_without_suspending, ticks

pytestmark = pytest.mark.every_python

T = TypeVar("T")


async def run_as(publisher: Publisher, call: Callable[[], Awaitable[T]]) -> T:
    """Call it in a run of its own that may advance the store as `publisher`, as a session does."""
    before = current_publisher()
    run = begin_run(None, publisher)
    try:
        assert current_publisher() is publisher
        return await call()
    finally:
        run.active = False
        assert current_publisher() is before


async def wait_as(publisher: Publisher, store: MemoryStepStore, step: int) -> asyncio.Task[int]:
    """Park a publisher's own wait."""
    return await parked(run_as(publisher, lambda: store.wait_for(step)))


# --- registration


async def test_registered_until_closed() -> None:
    """A publisher counts from its registration to its closing, and closing twice is harmless."""
    store = MemoryStepStore()
    chief, worker = store.publisher("chief"), store.publisher("worker")
    twin = store.publisher("chief")
    assert store.statistics().publishers == ("chief", "worker", "chief")
    chief.close()
    chief.close(ValueError("too late"))
    assert store.statistics().publishers == ("worker", "chief")
    assert (chief.closed, worker.closed, twin.closed) == (True, False, False)
    worker.close()
    twin.close()
    with pytest.raises(PublisherFinishedError, match="chief finished at step 0, wanted 5"):
        await store.wait_for(5)
    assert repr(twin) == "<Publisher 'chief', left>"
    assert repr(store.publisher("new")) == "<Publisher 'new', at work>"


# --- no publisher is left


@pytest.mark.parametrize(
    ("cause", "kind", "how"),
    [
        (None, PublisherFinishedError, "finished"),
        (ValueError("broken"), PublisherFailedError, "failed"),
        (asyncio.CancelledError(), PublisherFailedError, "failed"),
    ],
    ids=["finished", "failed", "cancelled"],
)
async def test_the_last_publisher_ends_all_waits(
    cause: BaseException | None, kind: type[Exception], how: str
) -> None:
    """When no publisher is left, waits end, each with an error of its own that names the last one,
    and later ones immediately.
    """
    store = MemoryStepStore(1000)
    chief = store.publisher("chief")
    changes = store.changes()
    await anext(changes)
    tasks = [await parked(store.wait_for(step)) for step in (1386, 2000)]
    watching = await parked(anext(changes, None))
    chief.close(cause)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(end) for end in ends] == [
        f"chief {how} at step 1000, wanted {step}" for step in (1386, 2000)
    ]
    assert all(type(end) is kind and end.__cause__ is cause for end in ends)
    assert all(isinstance(end, StopRequestedError) == (cause is None) for end in ends)
    if cause is None:
        assert await watching is None
        assert [position.step async for position in store.changes()] == [1000]
    else:
        with pytest.raises(kind, match=r"chief failed at step 1000$"):
            await watching
    with pytest.raises(kind, match=f"chief {how} at step 1000, wanted 1001"):
        result_without_suspending(store.wait_for(1001))
    assert result_without_suspending(store.wait_for(1000)) == 1000


# --- all remaining publishers wait


async def test_the_last_publisher_to_wait_gets_the_error_immediately() -> None:
    """When the others have left or wait, a publisher's own wait ends without suspending, and ends
    theirs.
    """
    store = MemoryStepStore(100)
    chief, one, two = (store.publisher(name) for name in ("chief", "one", "two"))
    first = await wait_as(one, store, 500)
    assert repr(one) == "<Publisher 'one', 1 waiting>"
    chief.close(cause := ValueError("broken"))
    await ticks(3)
    assert not first.done()
    with pytest.raises(PublisherFailedError, match="chief failed at step 100, wanted 600") as error:
        result_without_suspending(run_as(two, lambda: store.wait_for(600)))
    assert error.value.__cause__ is cause
    with pytest.raises(PublisherFailedError, match="wanted 500"):
        await first


async def test_a_wait_that_outlives_its_run_does_not_hold_up_its_publisher() -> None:
    """A wait in a task that a run has started counts for the publisher as long as that run is
    active.
    """
    store = MemoryStepStore()
    chief, worker = store.publisher("chief"), store.publisher("worker")
    task = await run_as(worker, lambda: parked(store.wait_for(1)))
    assert worker.waiting == 0
    chief.close()
    await ticks(3)
    assert not task.done()
    await store.advance()
    assert await task == 1


async def test_a_wait_holds_up_all_runs_that_it_is_in() -> None:
    """A session that is used inside another one's run, on the same store or on one of its own,
    holds up that run as well.
    """
    store, own = MemoryStepStore(), MemoryStepStore()
    chief, outer, inner = (
        store.publisher("chief"),
        store.publisher("outer"),
        store.publisher("inner"),
    )

    async def wait_nested(nested: Publisher) -> int:
        return await run_as(outer, lambda: run_as(nested, lambda: store.wait_for(1)))

    for nested in (inner, own.publisher("inner")):
        waiting = await parked(wait_nested(nested))
        assert (outer.waiting, outer.waits_for, nested.waiting) == (1, 1, nested is inner)
        await cancel_and_wait(waiting)
        assert (outer.waiting, outer.waits_for, nested.waiting) == (0, 0, 0)
    waiting = await parked(wait_nested(inner))
    chief.close()
    with pytest.raises(PublisherFinishedError, match="chief finished at step 0, wanted 1"):
        await waiting


async def test_a_publisher_may_leave_a_closed_store() -> None:
    """A publisher may leave a store that was closed before, from any loop or thread."""
    store = MemoryStepStore()
    publisher = store.publisher("chief")
    await store.aclose()
    publisher.close(ValueError("broken"))
    assert store.statistics().publishers == ()


def test_leaving_in_another_loop_is_refused() -> None:
    """A publisher can leave in the store's own loop only; from another one the call changes
    nothing.
    """
    store = MemoryStepStore()

    async def register() -> Publisher:
        return store.publisher("chief")

    async def leave() -> None:
        publisher.close()

    publisher = asyncio.run(register())
    with pytest.raises(WrongLoopError):
        asyncio.run(leave())
    with pytest.raises(WrongLoopError):
        publisher.close()
    assert not publisher.closed
    assert store.statistics().publishers == ("chief",)


async def test_a_publisher_that_follows_the_changes_waits_too() -> None:
    """When it is the only one left, no change can come: they end, and it does not wait for
    itself.
    """
    store = MemoryStepStore()
    chief, worker = store.publisher("chief"), store.publisher("worker")
    chief.close()

    async def follow() -> None:
        async for _ in store.changes():
            pass

    await run_as(worker, follow)
