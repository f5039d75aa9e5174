"""The stream of server-sent events of a session."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest

from aiohooks import AsyncMonitoredSession
from aiohooks.adapters.asgi import SessionService
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, ask
from tests.support.services import FeedQueue, SlowToOpen, make_service, running_service, step
from tests.support.waiting import ticks, until_true


async def test_events_come_with_the_steps() -> None:
    """The first event is sent immediately, others with the next step but not before the pause is over; none is queued."""
    feeds = FeedQueue()
    with ManualClock() as clock:
        async with running_service(feeds, refresh_secs=0.5) as service:
            stream = Exchange(service, "/events")
            await ticks(20)
            assert stream.reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert [(kind, report["step"]) for kind, report in stream.reply.events] == [("progress", 0)]
            for steps in ([0], [0, 6], [0, 6, 12]):
                for _ in range(3):
                    feeds.put(1.0, 1.0)
                    await ticks(60)
                    assert [report["step"] for _, report in stream.reply.events] == steps, "the pause is not over"
                clock.advance(0.5)
                await ticks(20)
            clock.advance(0.5)
            await ticks(20)
            assert [report["step"] for _, report in stream.reply.events] == [0, 6, 12, 18]
            feeds.put(1.0)
            await ticks(20)
            assert [report["step"] for _, report in stream.reply.events] == [0, 6, 12, 18, 19], "the pause was over already"
            stream.disconnect()
            await stream.task


async def test_a_keepalive_of_a_session_without_steps() -> None:
    """While no step is made an event is sent every 15 seconds, so that proxies keep the connection."""
    with ManualClock() as clock:
        async with running_service(FeedQueue(), refresh_secs=0.5) as service:
            stream = Exchange(service, "/events")
            for count in range(1, 4):
                await ticks(20)
                assert len(stream.reply.events) == count
                clock.advance(0.5)
                await ticks(20)
                clock.advance(15)
            stream.disconnect()
            await stream.task


@pytest.mark.parametrize("how", ["returns", "stops", "fails"])
async def test_the_last_event_has_the_end(how: str) -> None:
    """However the session ends, the stream ends with one `end` event with the state and the reason."""
    feeds = FeedQueue()
    with ManualClock() as clock:
        async with running_service(feeds, refresh_secs=0.5) as service:
            stream = Exchange(service, "/events")
            await ticks(20)
            clock.advance(0.5)
            await ticks(20)
            if how == "returns":
                feeds.end()
            elif how == "fails":
                feeds.fail(OSError("out of paper"))
            else:
                service._session.request_stop("enough")
            while not stream.task.done():
                await ticks(20)
                clock.advance(0.5)
            assert stream.reply.complete
            kind, report = stream.reply.events[-1]
            assert [kind for kind, _ in stream.reply.events].count("end") == 1
            expected = {
                "returns": ("finished", None, None),
                "stops": ("finished", None, "enough"),
                "fails": ("failed", "OSError: out of paper", "the session failed: OSError('out of paper')"),
            }
            found = (report["state"], report["failure"], report["stop_reason"])
            assert (kind, found) == ("end", expected[how])


async def test_events_of_a_session_that_opens_late() -> None:
    """A stream that starts before the session is open has an event when it is."""
    hook = SlowToOpen()
    service = make_service(FeedQueue(), [hook])
    with ManualClock() as clock:
        async with service.lifespan():
            stream = Exchange(service, "/events")
            await ticks(20)
            clock.advance(0.5)
            await ticks(20)
            hook.released.set()
            await ticks(20)
            assert [report["state"] for _, report in stream.reply.events] == ["starting", "running"]
            stream.disconnect()
            await stream.task


async def test_events_of_a_session_that_is_entered_elsewhere() -> None:
    """A session that the service does not run is followed from before it is entered until it is closed."""
    session = AsyncMonitoredSession(step)
    service = SessionService(session)
    with ManualClock() as clock:
        stream = Exchange(service, "/events")

        async def pass_time() -> None:
            for _ in range(4):
                await ticks(20)
                clock.advance(0.5)

        await pass_time()
        async with session:
            await pass_time()
            await session.run("loss", {"value": 1.0})
            await pass_time()
        while not stream.task.done():
            await pass_time()
        states = [report["state"] for _, report in stream.reply.events]
        assert (states[0], states[-1]) == ("starting", "finished")
        assert "running" in states
        assert stream.reply.events[-1][1]["step"] == 1


async def test_a_client_that_disconnects_ends_its_stream() -> None:
    """A stream ends with its client, in a pause as in a wait, and leaves nothing behind."""
    with ManualClock() as clock:
        async with running_service(FeedQueue()) as service:
            pausing, listening = Exchange(service, "/events"), Exchange(service, "/events")
            await ticks(20)
            pausing.disconnect()
            await pausing.task
            clock.advance(0.5)
            await ticks(20)
            assert (await ask(service, "/progress")).json["store"]["watching"] == 1
            listening.disconnect()
            await listening.task
            assert (await ask(service, "/progress")).json["store"]["watching"] == 0
            assert service._streams == 0
        assert clock.pending == 0


@pytest.mark.parametrize("reads", [True, False])
async def test_middleware_may_leave_the_count_of_cancels_too_high(reads: bool) -> None:
    """Whatever middleware does to `cancelling()` while it sends, a disconnect or the time limit ends the stream, as otherwise."""

    async def send_after_a_caught_cancel(app: Any, scope: Any, receive: Any, send: Any) -> None:
        async def counting(message: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            await send(message)

        await app(scope, receive, counting)

    with ManualClock() as clock:
        async with running_service(FeedQueue()) as service:
            stream = Exchange(partial(send_after_a_caught_cancel, service), "/events", reads=reads)
            if reads:
                await until_true(lambda: stream.reply.events)
                stream.disconnect()
            else:
                await ticks(20)
                clock.advance(30)
            await stream.task
            assert not stream.reply.complete or reads
            assert service._streams == 0


async def test_a_client_that_does_not_read_is_dropped() -> None:
    """A stream whose client takes longer than 30 seconds to read an event ends, and another may start."""
    with ManualClock() as clock:
        async with running_service(FeedQueue(), max_streams=1) as service:
            stalled = Exchange(service, "/events", reads=False)
            await ticks(20)
            reply = await ask(service, "/events")
            assert (reply.status, reply.json["error"]) == (503, "too_many")
            clock.advance(30)
            await stalled.task
            assert not stalled.reply.complete
            reading = Exchange(service, "/events")
            await ticks(20)
            assert len(reading.reply.events) == 1
            reading.disconnect()
            await reading.task


async def test_head_of_events_has_no_body() -> None:
    """`HEAD events` has the headers of the stream and no body."""
    async with running_service(FeedQueue()) as service:
        reply = await ask(service, "/events", method="HEAD")
        assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"", "text/event-stream; charset=utf-8")
