"""Waits for a step over HTTP: each ends, with a reply that has the reason, and leaves nothing."""

from __future__ import annotations

import asyncio

import pytest

from aiohooks import AsyncMonitoredSession, MemoryStepStore
from aiohooks.adapters.asgi import SessionService, app
from tests.support.services import SlowToOpen, serving, step
from tests.support.waiting import fail, forever, ticks


async def test_a_wait_for_a_step() -> None:
    """A step that is reached is answered immediately; a later one when it is committed, also if the
    session opens meanwhile.
    """
    hook = SlowToOpen()
    async with serving([hook], opened=False) as served:
        early = await served.begin("/steps/2", query="timeout=60")
        hook.released.set()
        served.feeds.put(1.0)
        await ticks(20)
        assert not early.task.done()
        served.feeds.put(1.0)
        await early.task
        assert (
            early.reply.json
            == (await served.ask("/steps/2")).json
            == {"step": 2, "wanted": 2, "epoch": 1}
        )
        assert (await served.ask("/steps/0")).json == {"step": 2, "wanted": 0, "epoch": 1}
        assert (await served.ask("/steps/0000000000000002")).status == 200


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_timeout(is_open: bool) -> None:
    """After `?timeout=` the reply is 504, with the wanted and the current step; the time of the
    opening counts, too.
    """
    hook = SlowToOpen()
    async with serving([] if is_open else [hook], opened=is_open) as served:
        waiting = await served.begin("/steps/9", query="timeout=2.5")
        await served.pass_time(2.4)
        assert not waiting.task.done()
        served.clock.advance(0.1)
        await waiting.task
        assert waiting.reply.status == 504
        message = "step 9 was not reached in time"
        assert waiting.reply.json == {
            **{"error": "timeout", "message": message},
            **{"wanted": 9, "step": 0 if is_open else None},
        }
        if is_open:
            waiting = await served.begin("/steps/9", query="timeout=0")
            await served.pass_time(0)
            assert waiting.reply.status == 504
        hook.released.set()


STEPS = [
    "x",
    "-1",
    "1.0",
    "+1",
    "1e3",
    "0x1",
    " 1",
    "١",  # noqa: RUF001
    "²",
    "99999999999999999",
    "9007199254740992",
    "9" * 5000,
    "1%00",
]
SECS = ["x", "-1", "nan", "inf", "", "1e9", "100000", "9" * 5000, "1&timeout=2", "٣"]


async def test_an_invalid_number_is_refused() -> None:
    """An invalid step or timeout is refused with 400, in a short reply."""
    async with serving() as served:
        for path, query in [
            *((text, "") for text in STEPS),
            *(("5", f"timeout={secs}") for secs in SECS),
        ]:
            reply = await served.ask(f"/steps/{path}", query=query)
            assert (reply.status, reply.json["error"]) == (
                400,
                "bad_timeout" if query else "bad_step",
            ), (path, query)
            assert len(reply.body) < 300


async def test_the_end_of_a_session_ends_waits_with_its_reason() -> None:
    """A stop answers waiting and later requests with 410 and its reason; so does a loop that
    returns.
    """
    for reason in ("enough <of> this", None):
        async with serving() as served:
            waiting = await served.begin("/steps/9")
            served.feeds.end() if reason is None else served.service._session.request_stop(reason)
            await waiting.task
            for reply in (waiting.reply, await served.ask("/steps/9")):
                assert (reply.status, reply.json["error"]) == (410, "stopped")
                assert (
                    reason is None
                    or reply.json["message"] == f"the session makes no more steps: {reason}"
                )
            await ticks(20)
            assert (await served.ask("/health")).json["stop_reason"] == reason


@pytest.mark.parametrize(
    ("end", "status", "code", "message"),
    [
        ("finish", 410, "publisher_finished", "trainer finished at step 0, wanted 9"),
        (
            "fail",
            503,
            "store_failed",
            "trainer failed at step 0, wanted 9: OSError: out of paper",
        ),
        ("close", 503, "store_failed", None),
    ],
)
async def test_errors_of_the_store(end: str, status: int, code: str, message: str | None) -> None:
    """Clients get the errors of the store: its publishers have finished or failed, or it was
    closed.
    """
    store = MemoryStepStore()

    async def idle(session: AsyncMonitoredSession) -> None:
        await session.until(forever())

    service = SessionService(AsyncMonitoredSession(step, global_step=store), idle)
    async with serving(service=service) as served:
        other = store.publisher("trainer")
        for publisher in list(store._waits.registered):
            if publisher is not other:
                publisher.close()
        waiting = await served.begin("/steps/9")
        await store.aclose() if end == "close" else other.close(
            OSError("out of paper") if end == "fail" else None
        )
        await waiting.task
    assert (waiting.reply.status, waiting.reply.json["error"]) == (status, code)
    assert message is None or waiting.reply.json["message"] == message


@pytest.mark.parametrize("error", [OSError("a peer"), TimeoutError("a peer")])
async def test_a_failed_background_task_ends_a_wait(error: Exception) -> None:
    """A client gets the error of a background task, also one that says by its type that the task
    has waited for too long.
    """
    async with serving() as served:
        waiting = await served.begin("/steps/9", query="timeout=60")
        served.service._session.start_soon(fail, error)
        await waiting.task
        message = f"a background task of the session failed: {type(error).__name__}: a peer"
        assert waiting.reply.json == {"error": "failed", "message": message, "wanted": 9, "step": 0}
        assert waiting.reply.status == 503


async def test_a_client_that_goes_ends_its_wait() -> None:
    """When clients disconnect, or the server cancels a request, the wait ends in the store too; a
    cancellation is raised.
    """
    async with serving() as served:
        waiting = [await served.begin("/steps/9") for _ in range(20)]
        for exchange in waiting[1:]:
            exchange.disconnect()
        await asyncio.gather(*(exchange.task for exchange in waiting[1:]))
        assert await served.waiting() == served.service._waiters == 1
        waiting[0].task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0].task
        assert await served.waiting() == served.service._waiters == 0


async def test_the_limit_of_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    """More clients than that are refused, until one of them has gone."""
    monkeypatch.setattr(app, "_MAX_WAITERS", 1)
    async with serving() as served:
        first = await served.begin("/steps/9")
        reply = await served.ask("/steps/9")
        assert (reply.status, reply.json["error"], reply.headers["retry-after"]) == (
            503,
            "too_many",
            "1",
        )
        first.disconnect()
        await first.task
        second = await served.begin("/steps/1")
        served.feeds.put(1.0)
        await second.task
        assert second.reply.status == 200
