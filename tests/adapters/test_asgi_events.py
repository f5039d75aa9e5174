"""Waits for a step and streams of events over HTTP: every one ends, with a reply that says why, and
leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest

from aiohooks import AsyncMonitoredSession, MemoryStepStore
from aiohooks.adapters.asgi import SessionService
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange
from tests.support.services import SlowToOpen, serving, step
from tests.support.waiting import fail, forever, ticks, until_true


def steps_of(stream: Exchange) -> list[int]:
    """Return the steps of the events so far."""
    return [report["step"] for _, report in stream.reply.events]


# -- waits for a step


async def test_a_wait_for_a_step() -> None:
    """A step that is reached is answered immediately; a later one when it is committed, also if the
    session opens meanwhile.
    """
    hook = SlowToOpen()
    async with serving([hook], opened=False) as one:
        early = await one.begin("/steps/2", query="timeout=60")
        hook.released.set()
        one.feeds.put(1.0)
        await ticks(20)
        assert not early.task.done()
        one.feeds.put(1.0)
        await early.task
        assert (
            early.reply.json
            == (await one.ask("/steps/2")).json
            == {"step": 2, "wanted": 2, "epoch": 1}
        )
        assert (await one.ask("/steps/0")).json == {"step": 2, "wanted": 0, "epoch": 1}
        assert (await one.ask("/steps/0000000000000002")).status == 200


async def test_500_waiters_are_answered_by_one_advance() -> None:
    """The commit that reaches a step answers all of its waiters."""
    async with serving() as one:
        waiting = [Exchange(one.service, f"/steps/{1 + number % 2}") for number in range(500)]
        await ticks(20)
        assert await one.waiting() == 500
        one.feeds.put(1.0, 1.0)
        await asyncio.gather(*(each.task for each in waiting))
        assert {each.reply.status for each in waiting} == {200}
        assert await one.waiting() == 0


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_timeout(is_open: bool) -> None:
    """After `?timeout=` the reply is 504, with the wanted and the current step; the time of the
    opening counts, too.
    """
    hook = SlowToOpen()
    async with serving([] if is_open else [hook], opened=is_open) as one:
        waiting = await one.begin("/steps/9", query="timeout=2.5")
        await one.pass_time(2.4)
        assert not waiting.task.done()
        one.clock.advance(0.1)
        await waiting.task
        assert waiting.reply.status == 504
        message = "step 9 was not reached in time"
        assert waiting.reply.json == {
            **{"error": "timeout", "message": message, "waited_secs": 2.5},
            **{"wanted": 9, "step": 0 if is_open else None},
        }
        if is_open:
            assert (await one.ask("/steps/9", query="timeout=0")).status == 504
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
SECS = ["x", "-1", "nan", "inf", "", "1e9", "86401", "9" * 5000, "1&timeout=2", "٣"]


async def test_an_invalid_number_is_refused() -> None:
    """An invalid step or timeout is refused with 400, in a short reply."""
    async with serving() as one:
        for path, query in [
            *((text, "") for text in STEPS),
            *(("5", f"timeout={secs}") for secs in SECS),
        ]:
            reply = await one.ask(f"/steps/{path}", query=query)
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
        async with serving() as one:
            waiting = await one.begin("/steps/9")
            one.feeds.end() if reason is None else one.service._session.request_stop(reason)
            await waiting.task
            for reply in (waiting.reply, await one.ask("/steps/9")):
                assert (reply.status, reply.json["error"]) == (410, "stopped")
                assert (
                    reason is None
                    or reply.json["message"] == f"the session makes no more steps: {reason}"
                )
            await ticks(20)
            assert (await one.ask("/health")).json["stop_reason"] == reason


@pytest.mark.parametrize(
    ("end", "status", "code", "message"),
    [
        ("finish", 410, "publisher_finished", "trainer finished at step 0, wanted 9"),
        (
            "fail",
            503,
            "publisher_failed",
            "trainer failed at step 0, wanted 9: OSError: out of paper",
        ),
        ("close", 503, "store_closed", None),
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
    async with serving(service=service) as one:
        other = store.publisher("trainer")
        for publisher in list(store._waits.registered):
            if publisher is not other:
                publisher.close()
        waiting = await one.begin("/steps/9")
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
    async with serving() as one:
        waiting = await one.begin("/steps/9", query="timeout=60")
        one.service._session.start_soon(fail, error)
        await waiting.task
        message = f"a background task of the session failed: {type(error).__name__}: a peer"
        assert waiting.reply.json == {"error": "failed", "message": message, "wanted": 9, "step": 0}
        assert waiting.reply.status == 503


async def test_a_client_that_goes_ends_its_wait() -> None:
    """When clients disconnect, or the server cancels a request, the wait ends in the store too; a
    cancellation is raised.
    """
    async with serving() as one:
        waiting = [await one.begin("/steps/9") for _ in range(20)]
        for each in waiting[1:]:
            each.disconnect()
        await asyncio.gather(*(each.task for each in waiting[1:]))
        assert await one.waiting() == one.service._waiters == 1
        waiting[0].task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0].task
        assert await one.waiting() == one.service._waiters == 0


async def test_the_limit_of_waiters() -> None:
    """More clients than `max_waiters` are refused, until one of them has gone."""
    async with serving(max_waiters=1) as one:
        first = await one.begin("/steps/9")
        reply = await one.ask("/steps/9")
        assert (reply.status, reply.json["error"], reply.headers["retry-after"]) == (
            503,
            "too_many",
            "1",
        )
        first.disconnect()
        await first.task
        second = await one.begin("/steps/1")
        one.feeds.put(1.0)
        await second.task
        assert second.reply.status == 200


# -- streams of events


async def test_events_come_with_the_steps() -> None:
    """The first event is sent immediately, others with the next step but not before the pause is
    over; none is queued.
    """
    async with serving(refresh_secs=0.5) as one:
        stream = await one.begin("/events")
        assert stream.reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert [(kind, report["step"]) for kind, report in stream.reply.events] == [("progress", 0)]
        for steps in ([0], [0, 6], [0, 6, 12]):
            for _ in range(3):
                one.feeds.put(1.0, 1.0)
                await ticks(60)
                assert steps_of(stream) == steps, "the pause is not over"
            await one.pass_time(0.5)
        await one.pass_time(0.5)
        assert steps_of(stream) == [0, 6, 12, 18]
        one.feeds.put(1.0)
        await ticks(20)
        assert steps_of(stream) == [0, 6, 12, 18, 19], "the pause was over already"
        for count in range(6, 8):  # while no step is made, so that proxies keep the connection
            await one.pass_time(0.5)
            await one.pass_time(15)
            assert len(steps_of(stream)) == count
        stream.disconnect()
        await stream.task
        head = await one.ask("/events", method="HEAD")
        assert (head.status, head.body, head.headers["content-type"]) == (
            200,
            b"",
            "text/event-stream; charset=utf-8",
        )


@pytest.mark.parametrize(
    ("how", "state", "failure", "stop_reason"),
    [
        ("returns", "finished", None, None),
        ("stops", "finished", None, "enough"),
        ("fails", "failed", "OSError: out of paper", "the session failed: OSError('out of paper')"),
    ],
)
async def test_the_last_event_has_the_end(
    how: str, state: str, failure: str | None, stop_reason: str | None
) -> None:
    """However the session ends, the stream ends with one `end` event with the state and the
    reason.
    """
    async with serving(refresh_secs=0.5) as one:
        stream = await one.begin("/events")
        await one.pass_time(0.5)
        match how:
            case "returns":
                one.feeds.end()
            case "fails":
                one.feeds.fail(OSError("out of paper"))
            case _:
                one.service._session.request_stop("enough")
        while not stream.task.done():
            await one.pass_time(0.5)
        assert stream.reply.complete
        kinds = [kind for kind, _ in stream.reply.events]
        assert (kinds.count("end"), kinds[-1]) == (1, "end")
        report = stream.reply.events[-1][1]
        assert (report["state"], report["failure"], report["stop_reason"]) == (
            state,
            failure,
            stop_reason,
        )


async def test_events_of_a_session_that_opens_late() -> None:
    """A stream that starts before the session is open has an event when it is."""
    hook = SlowToOpen()
    async with serving([hook], opened=False) as one:
        stream = await one.begin("/events")
        await one.pass_time(0.5)
        hook.released.set()
        await ticks(20)
        assert [report["state"] for _, report in stream.reply.events] == ["starting", "running"]
        stream.disconnect()
        await stream.task


@pytest.mark.parametrize("error", [None, LookupError("elsewhere")])
async def test_events_of_a_session_that_is_entered_elsewhere(
    error: Exception | None, clock: ManualClock
) -> None:
    """A session that the service does not run is followed from before it is entered until it is
    closed, or has failed.
    """
    session = AsyncMonitoredSession(step)
    stream = Exchange(SessionService(session), "/events")

    async def pass_time() -> None:
        for _ in range(4):
            await ticks(20)
            clock.advance(0.5)

    await pass_time()
    with pytest.raises(LookupError) if error else contextlib.nullcontext():
        async with session:
            await pass_time()
            await session.run("loss", {"value": 1.0})
            if error is not None:
                session.start_soon(fail, error)
            await pass_time()
    while not stream.task.done():
        await pass_time()
    states = [report["state"] for _, report in stream.reply.events]
    assert (states[0], states[-1], "running" in states) == (
        "starting",
        "failed" if error else "finished",
        True,
    )
    assert steps_of(stream)[-1] == 1


async def test_a_client_that_disconnects_ends_its_stream() -> None:
    """A stream ends with its client, in a pause as in a wait, and leaves nothing behind."""
    async with serving() as one:
        pausing, listening = await one.begin("/events"), await one.begin("/events")
        pausing.disconnect()
        await pausing.task
        await one.pass_time(0.5)
        assert await one.waiting() == 1
        listening.disconnect()
        await listening.task
        assert await one.waiting() == one.service._streams == 0
    assert one.clock.pending == 0


@pytest.mark.parametrize("reads", [True, False])
async def test_middleware_may_leave_the_count_of_cancels_too_high(reads: bool) -> None:
    """Whatever middleware does to `cancelling()` while it sends, a disconnect or the time limit
    ends the stream, as otherwise.
    """

    async def send_after_a_caught_cancel(app: Any, scope: Any, receive: Any, send: Any) -> None:
        async def counting(message: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            await send(message)

        await app(scope, receive, counting)

    async with serving() as one:
        stream = Exchange(partial(send_after_a_caught_cancel, one.service), "/events", reads=reads)
        if reads:
            await until_true(lambda: stream.reply.events)
            stream.disconnect()
        else:
            await one.pass_time(30)
        await stream.task
        assert not stream.reply.complete or reads
        assert one.service._streams == 0


async def test_a_client_that_does_not_read_is_dropped() -> None:
    """A stream whose client takes longer than 30 seconds to read an event ends, and another may
    start.
    """
    async with serving(max_streams=1) as one:
        stalled = await one.begin("/events", reads=False)
        reply = await one.ask("/events")
        assert (reply.status, reply.json["error"], reply.headers["retry-after"]) == (
            503,
            "too_many",
            "1",
        )
        one.clock.advance(30)
        await stalled.task
        assert not stalled.reply.complete
        reading = await one.begin("/events")
        assert len(reading.reply.events) == 1
        reading.disconnect()
        await reading.task
