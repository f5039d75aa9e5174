"""Health and progress of a session in a web service."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from aiohooks import (
    AsyncMonitoredSession,
    HistoryHook,
    HookTimingHook,
    MemoryStepStore,
    SessionRunContext,
    SessionRunHook,
    TimelineHook,
    configure,
)
from aiohooks.adapters.asgi import SessionService
from aiohooks.errors import InvalidArgumentError
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, ask
from tests.support.services import FeedQueue, SlowToOpen, make_service, running_service, step
from tests.support.waiting import ticks, until_true


async def test_health_and_readiness() -> None:
    """From the start to a clean end `health` is 200; `ready` is 200 only while steps can be made."""
    feeds, seen, hook = FeedQueue(), list[tuple[str, int | None, int | None]](), SlowToOpen()
    service = make_service(feeds, [hook])

    async def probe() -> None:
        health, ready = await ask(service, "/health"), await ask(service, "/ready")
        assert health.json["state"] == ready.json["state"]
        seen.append((health.json["state"], health.status, ready.status))

    await probe()
    async with service.lifespan():
        await ticks(20)
        await probe()
        hook.released.set()
        feeds.put(1.0)
        assert (await ask(service, "/steps/1")).status == 200
        await probe()
        assert (await ask(service, "/health")).json["step"] == 1
        feeds.end()
        await ticks(60)
        await probe()
    assert seen == [("starting", 200, 503), ("starting", 200, 503), ("running", 200, 200), ("finished", 200, 503)]


async def test_health_names_the_current_wait() -> None:
    """`health` names what the session waits for, without the source line."""
    other = MemoryStepStore(run="other")

    class Follower(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            await other.wait_for(7)

    feeds = FeedQueue()
    async with running_service(feeds, [Follower()]) as service:
        feeds.put(1.0)
        await ticks(20)
        doing = (await ask(service, "/health")).json["doing"]
        assert len(doing) == 1
        assert "Follower.before_run" in doing[0]
        assert "step 7" in doing[0]
        assert ".py" not in doing[0]
        await other.advance(7)


async def test_a_crash_turns_health_red_and_the_server_continues(caplog: pytest.LogCaptureFixture) -> None:
    """When the loop fails, `health` is 503 with the reason, waits end, and requests are answered as before."""
    feeds = FeedQueue()
    async with running_service(feeds) as service:
        feeds.put(1.0)
        waiting = Exchange(service, "/steps/5")
        await ticks(20)
        feeds.fail(OSError("the disk of postgres://user:hunter2@db/x is full"))
        await waiting.task
        health = await ask(service, "/health")
        assert health.status == 503
        assert (await ask(service, "/ready")).status == 503
        expected = "OSError: the disk of postgres://***@db/x is full"
        assert (health.json["state"], health.json["failure"]) == ("failed", expected)
        assert waiting.reply.status == 503
        assert waiting.reply.json["error"] == "failed"
        assert waiting.reply.json["message"] == f"the session failed: {expected}"
        assert (await ask(service, "/steps/1")).status == 200, "a step that was reached stays reached"
        assert (await ask(service, "/steps/2")).status == 503
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (logged.name, logged.getMessage()) == ("aiohooks.adapters", "session trainer failed; the server continues without it")


@pytest.mark.parametrize("phase", ["begin", "after_create_session", "end", "close"])
async def test_a_hook_that_fails_turns_health_red(phase: str, caplog: pytest.LogCaptureFixture) -> None:
    """A failure while the session opens or closes is reported like one in between."""

    async def fails(*_: object) -> None:
        raise ValueError(f"no {phase}")

    hook = type("Failing", (SessionRunHook,), {phase: fails})()
    feeds = FeedQueue()
    service = make_service(feeds, [hook])
    async with service.lifespan():
        feeds.end()
        await ticks(60)
        health = await ask(service, "/health")
        assert health.status == 503
        assert health.json["failure"] == f"ValueError: no {phase}"
        reply = await ask(service, "/steps/1")
        assert (reply.status, reply.json["error"]) == (503, "failed")
    assert f"no {phase}" in caplog.text


async def test_a_service_whose_lifespan_never_ran() -> None:
    """A request does not wait for a session that was never started."""
    service = make_service(FeedQueue())
    reply = await ask(service, "/steps/1")
    assert (reply.status, reply.json["error"]) == (503, "not_started")
    assert (await ask(service, "/ready")).status == 503


async def test_a_session_that_is_entered_elsewhere() -> None:
    """Without `run` the service shows a session that is entered elsewhere, and has no lifespan."""
    session = AsyncMonitoredSession(step)
    service = SessionService(session)
    with pytest.raises(InvalidArgumentError, match="no loop to run"):
        await service.lifespan().__aenter__()
    assert (await ask(service, "/steps/1")).json["error"] == "not_started"
    async with session:
        waiting = Exchange(service, "/steps/1")
        await ticks(20)
        await session.run("loss", {"value": 1.0})
        await waiting.task
        assert waiting.reply.status == 200
        assert (await ask(service, "/health")).json["state"] == "running"
        waiting = Exchange(service, "/steps/9")
        await ticks(20)
    await waiting.task
    assert waiting.reply.status == 410
    assert (await ask(service, "/health")).json["state"] == "finished"


async def test_progress_has_values_times_and_waiters() -> None:
    """`GET progress` has the values, the hooks' times and the store; infinity and NaN are null."""
    history, timing = HistoryHook({"loss": "loss"}), HookTimingHook()
    feeds = FeedQueue()
    with ManualClock() as clock:
        async with running_service(feeds, timing.watch([history]), history=history, timing=timing, title="digits") as service:
            assert (await ask(service, "/progress")).json["steps_per_sec"] is None
            feeds.put(0.5, math.nan, math.inf, 0.25)
            await ask(service, "/steps/4")
            clock.advance(2.0)
            report = (await ask(service, "/progress")).json
            assert report["values"] == {"loss": {"steps": [1, 2, 3, 4], "values": [0.5, None, None, 0.25]}}
            assert (report["title"], report["step"], report["runs"], report["steps_per_sec"]) == ("digits", 4, 4, 2.0)
            assert ("HistoryHook", "after_run", 4) in [(one["hook"], one["phase"], one["calls"]) for one in report["hooks"]]
            assert report["store"]["publishers"] == ["trainer"]
            assert report["loop"]["mean_lag_secs"] == 0


async def test_progress_has_what_has_become_of_hooks() -> None:
    """`GET progress` has each hook's calls, failures and drops, and its last error as one safe line."""

    class Down(SessionRunHook):
        async def after_run(self, run_context: SessionRunContext, run_values: object) -> None:
            raise ConnectionError("<b>\npassword=secret")

    feeds = FeedQueue()
    async with running_service(feeds, [configure(Down(), on_error="log", disable_after=1)]) as service:
        feeds.put(1, 2, 3)
        await ask(service, "/steps/3")
        (report,) = (one for one in (await ask(service, "/progress")).json["hook_calls"] if one["name"] == "Down")
        assert report.pop("disabled_since") > 0
        error = report.pop("last_error")
        assert report == {"name": "Down", "calls": 3, "failures": 1, "dropped": 2, "pending": 0}
        assert error.startswith(r"ConnectionError('<b>\npassword=***")
        assert "secret" not in error


async def test_progress_has_the_last_steps(clock: ManualClock) -> None:
    """`GET progress` has the lanes of the last eight steps, without the waits of clients, also when the session has ended."""
    timeline, feeds = TimelineHook(), FeedQueue()

    class Failing(SessionRunHook):
        async def before_run(self, run_context: SessionRunContext) -> None:
            clock.advance(0.5)
            if run_context.global_step == 10:
                raise ValueError("enough")

    async with running_service(feeds, [timeline, configure(Failing(), on_error="log")], timeline=timeline) as service:
        assert (await ask(service, "/progress")).json["timeline"]["secs"] == 0
        client = asyncio.create_task(ask(service, "/steps/500"))
        feeds.put(*range(9))
        await ask(service, "/steps/9")
        report = (await ask(service, "/progress")).json["timeline"]
        assert report["secs"] == pytest.approx(4.0)
        assert [(lane["name"], lane["kind"]) for lane in report["lanes"]] == [("steps", "step"), ("Failing", "hook")]
        assert report["lanes"][0]["bars"][0] == [0.0, 0.5, "step 2", False]
        assert [bar[2] for bar in report["lanes"][0]["bars"]] == [f"step {step}" for step in range(2, 10)]
        feeds.put(1)
        feeds.end()
        assert (await client).status == 410
        await until_true(lambda: service.health().state == "finished")
        last = (await ask(service, "/progress")).json["timeline"]
        assert [lane["bars"][-1][2:] for lane in last["lanes"]] == [["step 10", False], ["before_run", True]]


async def test_the_first_report_has_a_rate_and_a_title() -> None:
    """The first report has the steps per second since the session was opened; the title is the session's name."""
    feeds = FeedQueue()
    with ManualClock() as clock:
        async with running_service(feeds) as service:
            feeds.put(1, 2, 3, 4, 5, 6)
            await ask(service, "/steps/6")
            clock.advance(3.0)
            report = (await ask(service, "/progress")).json
            assert (report["title"], report["steps_per_sec"]) == ("trainer", 2.0)


async def test_progress_is_of_limited_size() -> None:
    """A long history is thinned to a limited number of points; the last point is always included."""
    history = HistoryHook({"loss": "loss"})
    async with running_service(FeedQueue(), [history], history=history) as service:
        for length in (1, 239, 240, 241, 1000, 9999):
            history.steps = list(range(1, length + 1))
            history.values = {"loss": [float(one) for one in history.steps]}
            report = (await ask(service, "/progress")).json["values"]["loss"]
            assert report["steps"][-1] == length
            assert report["values"] == report["steps"]
            assert min(length, 121) <= len(report["steps"]) <= 240


async def test_names_are_escaped() -> None:
    """Names of tags and reasons of stops are escaped in every reply: one line of ASCII without markup."""
    name = "<img src=x onerror=alert(1)>\u202e\x1b[31m\n&amp;"
    history = HistoryHook({name: "loss"})
    feeds = FeedQueue()
    async with running_service(feeds, [history], history=history, title=name) as service:
        feeds.put(1.0)
        await ask(service, "/steps/1")
        service._session.request_stop(name)
        for path in ("/progress", "/health", "/steps/9"):
            body = (await ask(service, path)).body
            assert not set(body) & set(b"<>&\n\x1b")
            assert body.isascii()
        report = (await ask(service, "/progress")).json
        assert list(report["values"]) == [report["title"]] == ["<img src=x onerror=alert(1)>\\u202e\\x1b[31m\\n&amp;"]
