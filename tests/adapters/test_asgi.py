"""A session in a web service: its health and its progress."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from aiohooks import AsyncMonitoredSession, HistoryHook, HookTimingHook, MemoryStepStore, SessionRunHook
from aiohooks.adapters.asgi import SessionService
from aiohooks.errors import InvalidArgumentError
from aiohooks.testing import ManualClock
from tests.support.asgi import Exchange, ask, turns
from tests.support.extras import hide
from tests.support.services import Work, make, served, step


async def test_health_says_what_goes_on() -> None:
    """From the start to a clean end `health` is 200; `ready` is 200 only while steps can be made."""
    work, seen, gate = Work(), list[tuple[str, int | None, int | None]](), asyncio.Event()

    class Slow(SessionRunHook):
        async def begin(self) -> None:
            await gate.wait()

    service = make(work, [Slow()])

    async def look() -> None:
        health, ready = await ask(service, "/health"), await ask(service, "/ready")
        assert health.json["state"] == ready.json["state"]
        seen.append((health.json["state"], health.status, ready.status))

    await look()
    async with service.lifespan():
        await turns()
        await look()
        gate.set()
        work.give(1.0)
        assert (await ask(service, "/steps/1")).status == 200
        await look()
        assert (await ask(service, "/health")).json["step"] == 1
        work.end()
        await turns(60)
        await look()
    assert seen == [("starting", 200, 503), ("starting", 200, 503), ("running", 200, 200), ("finished", 200, 503)]


async def test_health_says_what_is_waited_for() -> None:
    """Whatever the session waits for is told by name, without the place in the code."""
    other = MemoryStepStore(run="other")

    class Follower(SessionRunHook):
        async def before_run(self, run_context: Any) -> None:
            await other.wait_for(7)

    work = Work()
    async with served(work, [Follower()]) as service:
        work.give(1.0)
        await turns()
        doing = (await ask(service, "/health")).json["doing"]
        assert len(doing) == 1
        assert "Follower.before_run" in doing[0]
        assert "step 7" in doing[0]
        assert ".py" not in doing[0]
        await other.advance(7)


async def test_a_crash_turns_health_red_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """When the loop fails, `health` is 503 and says why, waits are told, and requests are answered as before."""
    work = Work()
    async with served(work) as service:
        work.give(1.0)
        waiting = Exchange(service, "/steps/5")
        await turns()
        work.fail(OSError("the disk of postgres://user:hunter2@db/x is full"))
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
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (told.name, told.getMessage()) == (
        "aiohooks.adapters",
        "session trainer of a service failed; the server continues without it",
    )


@pytest.mark.parametrize("phase", ["begin", "after_create_session", "end", "close"])
async def test_a_hook_that_fails_turns_health_red(phase: str, caplog: pytest.LogCaptureFixture) -> None:
    """A failure while the session opens or closes is as visible as one in between."""

    async def fails(*_: object) -> None:
        raise ValueError(f"no {phase}")

    hook = type("Failing", (SessionRunHook,), {phase: fails})()
    work = Work()
    service = make(work, [hook])
    async with service.lifespan():
        work.end()
        await turns(60)
        health = await ask(service, "/health")
        assert health.status == 503
        assert health.json["failure"] == f"ValueError: no {phase}"
        reply = await ask(service, "/steps/1")
        assert (reply.status, reply.json["error"]) == (503, "failed")
    assert f"no {phase}" in caplog.text


async def test_a_service_whose_lifespan_never_ran_says_so() -> None:
    """Nobody waits for a session that is not going to open."""
    service = make(Work())
    reply = await ask(service, "/steps/1")
    assert (reply.status, reply.json["error"]) == (503, "not_started")
    assert (await ask(service, "/ready")).status == 503


async def test_a_session_of_somebody_else_is_shown_as_well() -> None:
    """Without `run` the service shows a session that is entered elsewhere; there is no lifespan to have then."""
    session = AsyncMonitoredSession(step)
    service = SessionService(session)
    with pytest.raises(InvalidArgumentError, match="no loop to run"):
        service.lifespan()
    assert (await ask(service, "/steps/1")).json["error"] == "not_started"
    async with session:
        waiting = Exchange(service, "/steps/1")
        await turns()
        await session.run("loss", {"value": 1.0})
        await waiting.task
        assert waiting.reply.status == 200
        assert (await ask(service, "/health")).json["state"] == "running"
        waiting = Exchange(service, "/steps/9")
        await turns()
    await waiting.task
    assert waiting.reply.status == 410
    assert (await ask(service, "/health")).json["state"] == "finished"


async def test_progress_has_values_times_and_waiters() -> None:
    """`GET progress` tells of the values, the hooks' times and the store; what is no number comes as null."""
    history, timing = HistoryHook({"loss": "loss"}), HookTimingHook()
    work = Work()
    with ManualClock() as clock:
        async with served(work, timing.watch([history]), history=history, timing=timing, title="digits") as service:
            assert (await ask(service, "/progress")).json["steps_per_sec"] is None
            work.give(0.5, math.nan, math.inf, 0.25)
            await ask(service, "/steps/4")
            clock.advance(2.0)
            told = (await ask(service, "/progress")).json
            assert told["values"] == {"loss": {"steps": [1, 2, 3, 4], "values": [0.5, None, None, 0.25]}}
            assert (told["title"], told["step"], told["runs"], told["steps_per_sec"]) == ("digits", 4, 4, 2.0)
            assert ("HistoryHook", "after_run", 4) in [(one["hook"], one["phase"], one["calls"]) for one in told["hooks"]]
            assert told["store"]["publishers"] == ["trainer"]
            assert told["loop"]["mean_lag_secs"] == 0


async def test_progress_is_of_limited_size() -> None:
    """A long history is thinned out to what a picture can show; the last point is always there."""
    history = HistoryHook({"loss": "loss"})
    async with served(Work(), [history], history=history) as service:
        for length in (1, 239, 240, 241, 1000, 9999):
            history.steps = list(range(1, length + 1))
            history.values = {"loss": [float(one) for one in history.steps]}
            told = (await ask(service, "/progress")).json["values"]["loss"]
            assert told["steps"][-1] == length
            assert told["values"] == told["steps"]
            assert min(length, 121) <= len(told["steps"]) <= 240


async def test_names_are_made_safe() -> None:
    """Names of tags and reasons of stops are escaped in every answer: one line of ASCII without markup."""
    name = "<img src=x onerror=alert(1)>\u202e\x1b[31m\n&amp;"
    history = HistoryHook({name: "loss"})
    work = Work()
    async with served(work, [history], history=history, title=name) as service:
        work.give(1.0)
        await ask(service, "/steps/1")
        service._session.request_stop(name)
        for path in ("/progress", "/health", "/steps/9"):
            body = (await ask(service, path)).body
            assert not set(body) & set(b"<>&\n\x1b")
            assert body.isascii()
        told = (await ask(service, "/progress")).json
        assert list(told["values"]) == [told["title"]] == ["<img src=x onerror=alert(1)>\\u202e\\x1b[31m\\x0a&amp;"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": object()},
        {"run": 5},
        {"history": 5},
        {"timing": 5},
        {"title": 5},
        {"allowed_hosts": ["*.example.com"]},
        {"allowed_hosts": ["example.com:80"]},
        {"token": "short"},
        {"token": "with spaces " * 5},
        {"grace_secs": -1},
        {"refresh_secs": 0},
        {"max_waiters": -1},
        {"max_streams": True},
    ],
    ids=lambda wrong: "-".join(f"{name}={value}"[:30] for name, value in wrong.items()),
)
def test_arguments_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    """Whoever gives a wrong argument is told at once which one, and what to give; a token is not repeated."""
    arguments: dict[str, Any] = {"session": AsyncMonitoredSession(step), **wrong}
    with pytest.raises(InvalidArgumentError, match="give") as raised:
        SessionService(**arguments)
    assert "token" not in wrong or wrong["token"] not in str(raised.value)


def test_without_starlette_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that needs Starlette names the extra."""
    hide(monkeypatch, "starlette", "aiohooks.adapters.asgi.app", "aiohooks.adapters.asgi")
    with pytest.raises(ImportError, match=r"pip install 'aiohooks\[asgi\]'"):
        __import__("aiohooks.adapters.asgi")
