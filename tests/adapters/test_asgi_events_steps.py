"""Waiting for a step over HTTP: every wait ends, with a reply that says why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiohooks import AsyncMonitoredSession, MemoryStepStore
from aiohooks.adapters.asgi import SessionService
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, ask
from tests.support.services import FeedQueue, SlowToOpen, make_service, running_service
from tests.support.waiting import ticks


async def test_a_reached_step_is_answered_immediately() -> None:
    """`GET steps/n` of the current step or an earlier one returns the current step."""
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        feeds.put(1.0, 2.0, 3.0)
        assert (await ask(service, "/steps/3")).json == {"step": 3, "wanted": 3, "epoch": 1}
        assert (await ask(service, "/steps/0")).json == {"step": 3, "wanted": 0, "epoch": 1}
        assert (await ask(service, "/steps/0000000000000003")).status == 200


async def test_a_wait_for_a_later_step() -> None:
    """`GET steps/n` waits, also for a session that is still opening, and is answered when the step is committed."""
    feeds, hook = FeedQueue(), SlowToOpen()
    service = make_service(feeds, [hook])
    async with service.lifespan():
        early = Exchange(service, "/steps/2", query="timeout=60")
        await ticks(20)
        assert not early.task.done()
        hook.released.set()
        feeds.put(1.0)
        await ticks(20)
        assert not early.task.done()
        feeds.put(1.0)
        await early.task
        assert early.reply.json["step"] == 2


async def test_500_waiters_are_answered_by_one_advance() -> None:
    """The commit that reaches a step answers all of its waiters."""
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        waiting = [Exchange(service, f"/steps/{1 + number % 2}") for number in range(500)]
        await ticks(20)
        assert (await ask(service, "/progress")).json["store"]["waiting"] == 500
        feeds.put(1.0, 1.0)
        await asyncio.gather(*(one.task for one in waiting))
        assert {one.reply.status for one in waiting} == {200}
        assert (await ask(service, "/progress")).json["store"]["waiting"] == 0


async def test_a_timeout() -> None:
    """After `?timeout=` the reply is 504, with the wanted and the current step."""
    feeds = FeedQueue()
    with ManualClock() as clock:
        async with running_service(feeds) as service:
            waiting = Exchange(service, "/steps/9", query="timeout=2.5")
            await ticks(20)
            clock.advance(2.4)
            await ticks(20)
            assert not waiting.task.done()
            clock.advance(0.1)
            await waiting.task
            assert waiting.reply.status == 504
            assert waiting.reply.json == {
                "error": "timeout",
                "message": "step 9 was not reached in time",
                "waited_secs": 2.5,
                "wanted": 9,
                "step": 0,
            }
            assert (await ask(service, "/steps/9", query="timeout=0")).status == 504


async def test_the_timeout_counts_while_the_session_opens() -> None:
    """The timeout also covers the time until the session is open."""
    hook = SlowToOpen()
    with ManualClock() as clock:
        service = make_service(FeedQueue(), [hook])
        async with service.lifespan():
            waiting = Exchange(service, "/steps/1", query="timeout=3")
            await ticks(20)
            clock.advance(3)
            await waiting.task
            assert (waiting.reply.status, waiting.reply.json["step"]) == (504, None)
            hook.released.set()


STEPS = ["x", "-1", "1.0", "+1", "1e3", "0x1", " 1", "١", "²", "99999999999999999", "9007199254740992", "9" * 5000, "1%00"]  # noqa: RUF001
SECS = ["x", "-1", "nan", "inf", "", "1e9", "86401", "9" * 5000, "1&timeout=2", "٣"]


@pytest.mark.parametrize(("path", "query"), [*((step, "") for step in STEPS), *(("5", f"timeout={secs}") for secs in SECS)])
async def test_an_invalid_number_is_refused(path: str, query: str) -> None:
    """An invalid step or timeout is refused with 400, in a short reply."""
    async with running_service(FeedQueue()) as service:
        reply = await ask(service, f"/steps/{path}", query=query)
        assert reply.status == 400
        assert reply.json["error"] == ("bad_timeout" if query else "bad_step")
        assert len(reply.body) < 300


async def test_a_stop_ends_waits_with_its_reason() -> None:
    """A stop answers waiting and later requests with 410 and its reason."""
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
        service._session.request_stop("enough <of> this")
        await waiting.task
        for reply in (waiting.reply, await ask(service, "/steps/9")):
            assert reply.status == 410
            assert reply.json["error"] == "stopped"
            assert reply.json["message"] == "the session makes no more steps: enough <of> this"
        await ticks(20)
        assert (await ask(service, "/health")).json["stop_reason"] == "enough <of> this"


async def test_a_loop_that_returns_ends_waits() -> None:
    """When the loop returns, no step can be reached any more, and waits end with 410."""
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
        feeds.end()
        await waiting.task
        assert waiting.reply.status == 410


async def test_errors_of_the_store() -> None:
    """Clients get the errors of the store: its publishers have finished or failed, or it was closed."""

    async def answered(end: Any) -> tuple[int | None, Any]:
        store = MemoryStepStore()
        session = AsyncMonitoredSession(store_user, global_step=store)

        async def idle(session: AsyncMonitoredSession) -> None:
            await session.until(asyncio.Event().wait())

        service = SessionService(session, idle)
        async with service.lifespan():
            await ticks(20)
            other = store.publisher("trainer")
            for publisher in list(store._waits.publishers._registered):
                if publisher is not other:
                    publisher.close()
            waiting = Exchange(service, "/steps/9")
            await ticks(20)
            await end(store, other)
            await waiting.task
        return waiting.reply.status, waiting.reply.json

    async def store_user() -> None:
        pass

    async def finish(store: MemoryStepStore, other: Any) -> None:
        other.close()

    async def fail(store: MemoryStepStore, other: Any) -> None:
        other.close(OSError("out of paper"))

    async def close(store: MemoryStepStore, other: Any) -> None:
        await store.aclose()

    status, body = await answered(finish)
    assert (status, body["error"], body["message"]) == (410, "publisher_finished", "trainer finished at step 0, wanted 9")
    status, body = await answered(fail)
    assert (status, body["error"]) == (503, "publisher_failed")
    assert body["message"] == "trainer failed at step 0, wanted 9: OSError: out of paper"
    status, body = await answered(close)
    assert (status, body["error"]) == (503, "store_closed")


async def test_a_client_that_disconnects_ends_its_wait() -> None:
    """A wait ends with its client, in the store too."""
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        waiting = [Exchange(service, "/steps/9") for _ in range(20)]
        await ticks(20)
        for one in waiting:
            one.disconnect()
        await asyncio.gather(*(one.task for one in waiting))
        assert (await ask(service, "/progress")).json["store"]["waiting"] == 0
        assert service._waiters == 0


async def test_a_cancelled_request_is_cancelled() -> None:
    """When the server cancels a request, the cancellation is raised and the wait ends."""
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
        waiting.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting.task
        assert (await ask(service, "/progress")).json["store"]["waiting"] == 0


async def test_the_limit_of_waiters() -> None:
    """More clients than `max_waiters` are refused, until one of them has gone."""
    feeds = FeedQueue()
    async with running_service(feeds, max_waiters=1) as service:
        first = Exchange(service, "/steps/9")
        await ticks(20)
        reply = await ask(service, "/steps/9")
        assert (reply.status, reply.json["error"], reply.headers["retry-after"]) == (503, "too_many", "1")
        first.disconnect()
        await first.task
        second = Exchange(service, "/steps/1")
        await ticks(20)
        feeds.put(1.0)
        await second.task
        assert second.reply.status == 200
