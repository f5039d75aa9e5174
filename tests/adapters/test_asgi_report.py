"""Health and progress of a session in a web service."""

from __future__ import annotations

import pytest

from aiohooks import AsyncMonitoredSession, SessionRunHook, configure
from aiohooks.adapters.asgi import SessionService
from aiohooks.errors import InvalidArgumentError
from tests.support.asgi import Exchange, ask
from tests.support.hooks import PhaseHook
from tests.support.services import FeedQueue, SlowToOpen, make_service, serving, step
from tests.support.waiting import raises_after, ticks


async def probed(service: SessionService) -> tuple[str, int | None, int | None]:
    """Return the state, and the status of both probes."""
    health, ready = await ask(service, "/health"), await ask(service, "/ready")
    assert health.json == ready.json
    return health.json["state"], health.status, ready.status


async def test_health_and_readiness() -> None:
    """`health` is 200 up to a clean end; `ready` is 200 only while steps can be made. Before its
    lifespan nothing waits.
    """
    hook = SlowToOpen()
    service = make_service(FeedQueue(), [hook])
    assert await probed(service) == ("starting", 200, 503)
    assert (await ask(service, "/steps/1")).json["error"] == "not_started"
    async with serving([hook], opened=False) as served:
        assert await probed(served.service) == ("starting", 200, 503)
        hook.released.set()
        served.feeds.put(1.0)
        assert (await served.ask("/steps/1")).status == 200
        assert await probed(served.service) == ("running", 200, 200)
        assert (await served.ask("/health")).json["step"] == 1
        served.feeds.end()
        await ticks(60)
        assert await probed(served.service) == ("finished", 200, 503)


async def test_a_crash_turns_health_red_and_the_server_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When the loop fails, `health` is 503 with the reason, waits end, and requests are answered as
    before.
    """
    async with serving() as served:
        served.feeds.put(1.0)
        waiting = await served.begin("/steps/5")
        served.feeds.fail(OSError("the disk of postgres://user:hunter2@db/x is full"))
        await waiting.task
        expected = "OSError: the disk of postgres://***@db/x is full"
        assert await probed(served.service) == ("failed", 503, 503)
        assert (await served.ask("/health")).json["failure"] == expected
        assert (waiting.reply.status, waiting.reply.json["error"]) == (503, "failed")
        assert waiting.reply.json["message"] == f"the session failed: {expected}"
        assert (await served.ask("/steps/1")).status == 200, "a step that was reached stays reached"
        assert (await served.ask("/steps/2")).status == 503
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (logged.name, logged.getMessage()) == (
        "aiohooks.adapters",
        "session trainer failed; the server continues without it",
    )


async def test_a_failure_of_a_session_that_is_entered_elsewhere_stays() -> None:
    """Its step or its creation fails: `health` is 503 with the reason from then on."""

    async def failing(value: float) -> float:
        raise ValueError(value)

    session = AsyncMonitoredSession(failing)
    service = SessionService(session)
    with pytest.raises(ValueError, match="1"):
        async with session:
            await session.run("loss", {"value": 1.0})
    assert await probed(service) == ("failed", 503, 503)
    assert (await ask(service, "/health")).json["failure"] == "ValueError(1.0)"
    assert (await ask(service, "/steps/9")).json["error"] == "failed"
    session = AsyncMonitoredSession(step, [PhaseHook("begin", raises_after(0, OSError("no disk")))])
    service = SessionService(session)
    with pytest.raises(OSError, match="no disk"):
        await session.__aenter__()
    assert await probed(service) == ("failed", 503, 503)


async def test_a_session_that_is_entered_elsewhere() -> None:
    """Without `run` the service shows a session that is entered elsewhere, and has no lifespan."""
    session = AsyncMonitoredSession(step)
    service = SessionService(session)
    with pytest.raises(InvalidArgumentError, match="no loop to run"):
        await service.lifespan().__aenter__()
    assert (await ask(service, "/steps/1")).json["error"] == "not_started"
    async with session:
        waiting = [Exchange(service, f"/steps/{number}") for number in (1, 9)]
        await ticks(20)
        await session.run("loss", {"value": 1.0})
        await waiting[0].task
        assert (await ask(service, "/health")).json["state"] == "running"
    await waiting[1].task
    assert [exchange.reply.status for exchange in waiting] == [200, 410]
    assert (await ask(service, "/health")).json["state"] == "finished"


async def test_progress_has_the_store_and_what_has_become_of_hooks() -> None:
    """`GET progress` has the name, step and store of the session, and each hook's failures and
    drops, and its last error as one safe line.
    """

    class Down(SessionRunHook):
        async def after_run(self, *_: object) -> None:
            raise ConnectionError("<b>\npassword=secret")

    async with serving([configure(Down(), on_error="log", disable_after=1)]) as served:
        served.feeds.put(1, 2, 3)
        await served.ask("/steps/3")
        progress = (await served.ask("/progress")).json
    assert (progress["name"], progress["step"], progress["runs"]) == ("trainer", 3, 3)
    assert progress["store"]["publishers"] == ["trainer"]
    (report,) = (hook for hook in progress["hooks"] if hook["name"] == "Down")
    assert report.pop("disabled_since") > 0
    error = report.pop("last_error")
    assert report == {"name": "Down", "failures": 1, "dropped": 2, "pending": 0}
    assert error.startswith(r"ConnectionError('<b>\npassword=***")
    assert "secret" not in error
