"""Following a session: server-sent events."""

from __future__ import annotations

import asyncio

import pytest

from aiohooks import AsyncMonitoredSession, SessionRunHook
from aiohooks.adapters.asgi import SessionService
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, ask, turns
from tests.support.services import Work, served, step


async def test_events_come_with_the_steps() -> None:
    """The first event comes at once, the next with the next step, but never sooner than the pause allows; none is queued."""
    work = Work()
    with ManualClock() as clock:
        async with served(work, refresh_secs=0.5) as service:
            stream = Exchange(service, "/events")
            await turns()
            assert stream.reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert [(kind, told["step"]) for kind, told in stream.reply.events] == [("progress", 0)]
            for steps in ([0], [0, 6], [0, 6, 12]):
                for _ in range(3):
                    work.give(1.0, 1.0)
                    await turns(60)
                    assert [told["step"] for _, told in stream.reply.events] == steps, "the pause is not over"
                clock.advance(0.5)
                await turns()
            clock.advance(0.5)
            await turns()
            assert [told["step"] for _, told in stream.reply.events] == [0, 6, 12, 18]
            work.give(1.0)
            await turns()
            assert [told["step"] for _, told in stream.reply.events] == [0, 6, 12, 18, 19], "without a pause: that was over"
            stream.leave()
            await stream.task


async def test_a_silent_session_is_heard_of_now_and_then() -> None:
    """While no step is made an event comes every 15 seconds, so that nobody takes the connection for dead."""
    with ManualClock() as clock:
        async with served(Work(), refresh_secs=0.5) as service:
            stream = Exchange(service, "/events")
            for count in range(1, 4):
                await turns()
                assert len(stream.reply.events) == count
                clock.advance(0.5)
                await turns()
                clock.advance(15)
            stream.leave()
            await stream.task


@pytest.mark.parametrize("how", ["returns", "stops", "fails"])
async def test_the_last_event_tells_the_end(how: str) -> None:
    """However the session ends the stream has one `end` event with the state and the reason, and is complete."""
    work = Work()
    with ManualClock() as clock:
        async with served(work, refresh_secs=0.5) as service:
            stream = Exchange(service, "/events")
            await turns()
            clock.advance(0.5)
            await turns()
            if how == "returns":
                work.end()
            elif how == "fails":
                work.fail(OSError("out of paper"))
            else:
                service._session.request_stop("enough")
            while not stream.task.done():
                await turns()
                clock.advance(0.5)
            assert stream.reply.complete
            kind, told = stream.reply.events[-1]
            assert [kind for kind, _ in stream.reply.events].count("end") == 1
            expected = {"returns": ("finished", None, None), "stops": ("finished", None, "enough")}
            found = (told["state"], told["failure"], told["stop_reason"])
            assert (kind, found) == ("end", expected.get(how, ("failed", "OSError: out of paper", None)))


async def test_events_of_a_session_that_opens_late() -> None:
    """Whoever follows before the session is open is told when it is."""
    gate = asyncio.Event()

    class Slow(SessionRunHook):
        async def begin(self) -> None:
            await gate.wait()

    work = Work()
    session = AsyncMonitoredSession(step, [Slow()])
    service = SessionService(session, work.loop)
    with ManualClock() as clock:
        async with service.lifespan():
            stream = Exchange(service, "/events")
            await turns()
            clock.advance(0.5)
            await turns()
            gate.set()
            await turns()
            assert [told["state"] for _, told in stream.reply.events] == ["starting", "running"]
            stream.leave()
            await stream.task


async def test_events_of_a_session_of_somebody_else() -> None:
    """A session that the service does not own is followed from before it is entered until it is closed."""
    session = AsyncMonitoredSession(step)
    service = SessionService(session)
    with ManualClock() as clock:
        stream = Exchange(service, "/events")

        async def pass_time() -> None:
            for _ in range(4):
                await turns()
                clock.advance(0.5)

        await pass_time()
        async with session:
            await pass_time()
            await session.run("loss", {"value": 1.0})
            await pass_time()
        while not stream.task.done():
            await pass_time()
        states = [told["state"] for _, told in stream.reply.events]
        assert (states[0], states[-1]) == ("starting", "finished")
        assert "running" in states
        assert stream.reply.events[-1][1]["step"] == 1


async def test_a_follower_that_leaves_leaves_nothing_behind() -> None:
    """A stream ends with its client, wherever it is."""
    with ManualClock() as clock:
        async with served(Work()) as service:
            pausing, listening = Exchange(service, "/events"), Exchange(service, "/events")
            await turns()
            pausing.leave()
            await pausing.task
            clock.advance(0.5)
            await turns()
            assert (await ask(service, "/progress")).json["store"]["watching"] == 1
            listening.leave()
            await listening.task
            assert (await ask(service, "/progress")).json["store"]["watching"] == 0
            assert service._streams == 0
        assert clock.pending == 0


async def test_a_follower_that_does_not_read_is_given_up() -> None:
    """A client that takes longer than 30 seconds to read an event loses its place."""
    with ManualClock() as clock:
        async with served(Work(), max_streams=1) as service:
            deaf = Exchange(service, "/events", reads=False)
            await turns()
            reply = await ask(service, "/events")
            assert (reply.status, reply.json["error"]) == (503, "too_many")
            clock.advance(30)
            await deaf.task
            assert not deaf.reply.complete
            hearing = Exchange(service, "/events")
            await turns()
            assert len(hearing.reply.events) == 1
            hearing.leave()
            await hearing.task


async def test_head_of_events_has_no_body() -> None:
    """`HEAD events` tells what there is, and is over."""
    async with served(Work()) as service:
        reply = await ask(service, "/events", method="HEAD")
        assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"", "text/event-stream; charset=utf-8")
