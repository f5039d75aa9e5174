"""Which requests are served, by host, origin, method, token and connection; and what text may be
shown.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import string
from typing import Any

import pytest
from starlette.testclient import TestClient

from aiohooks import AsyncMonitoredSession
from aiohooks.adapters.asgi import SessionService
from aiohooks.adapters.asgi._access import safe_error, safe_text
from aiohooks.testing import ManualClock
from tests.support.asgi import Reply, ask
from tests.support.services import FeedQueue, make_service, step

# Whether each is accepted: addresses, localhost and configured names are.
HOSTS = {
    "127.0.0.1:8000": True,
    "localhost": True,
    "LOCALHOST:8000": True,
    "[::1]:8000": True,
    "10.1.2.3": True,
    "train.example.com:8443": True,
    "evil.example.com": False,
    "train.example.com.evil.com": False,
    "localhost.evil.com": False,
    "localhost@evil.com": False,
    "2130706433": False,
    "": False,
}
ORIGINS = {
    None: True,
    "SELF": True,
    "null": False,
    "http://evil.com": False,
    "https://SELFHOST": False,
    "http://localhost:1": False,
}
SITES = {None: True, "same-origin": True, "none": True, "same-site": False, "cross-site": False}
METHODS = {
    "GET": True,
    "HEAD": True,
    "POST": False,
    "PUT": False,
    "DELETE": False,
    "OPTIONS": False,
    "PATCH": False,
}


def service_of(*, name: str | None = None, **options: Any) -> SessionService:
    session = AsyncMonitoredSession(step, name=name)
    return SessionService(session, allowed_hosts=["Train.Example.com"], **options)


def is_protected(reply: Reply) -> bool:
    """Return whether a reply has the security headers, and none that opens it to other pages."""
    return (
        reply.headers["x-content-type-options"] == "nosniff"
        and reply.headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self';"
        )
        and "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        and reply.headers["cache-control"] == "no-store"
        and not any(
            name.startswith("access-control") or name in ("location", "set-cookie")
            for name in reply.headers
        )
    )


async def test_every_combination_of_host_origin_site_and_method() -> None:
    """Of 2,520 requests those are served whose every part is right; the others get nothing of the
    session.
    """
    service = service_of(name="canary")
    count = answered = 0
    for (host, good_host), (origin, good_origin), (site, good_site), (
        method,
        good_method,
    ) in itertools.product(HOSTS.items(), ORIGINS.items(), SITES.items(), METHODS.items()):
        headers = {"host": host}
        if origin is not None:
            headers["origin"] = origin.replace("SELFHOST", host).replace(
                "SELF", f"http://{host.lower()}"
            )
        if site is not None:
            headers["sec-fetch-site"] = site
        reply = await ask(service, "/progress", method=method, headers=headers)
        good = good_host and good_origin and good_site
        assert reply.status == (405 if not good_method else 200 if good else 403), (
            host,
            origin,
            site,
            method,
        )
        assert (b"canary" in reply.body) == (good and good_method)
        assert is_protected(reply)
        count += 1
        answered += reply.status == 200
    assert (count, answered) == (2520, 6 * 2 * 3 * 2)


async def test_http_1_0_needs_no_host() -> None:
    """A probe of HTTP/1.0 without a Host is answered; with one, or from a page, it is judged like
    any other.
    """
    service = service_of()
    for name, value in (
        (b"user-agent", b"probe"),
        (b"host", b"evil.com"),
        (b"sec-fetch-site", b"cross-site"),
    ):
        reply = await ask(service, "/progress", headers=[(name, value)], http_version="1.0")
        assert reply.status == (200 if name == b"user-agent" else 403)
        assert (
            await ask(service, "/progress", headers=[(name, value)], http_version="1.1")
        ).status == 403
    for origin in (b"http://localhost", b"http://", b""):
        assert (
            await ask(service, "/progress", headers=[(b"origin", origin)], http_version="1.0")
        ).status == 403


LOCAL = [
    ("127.0.0.1", 80),
    ("127.8.8.8", 80),
    ("::1", 80),
    ("::ffff:127.0.0.1", 80),
    ("localhost", 80),
    ("/run/x.sock", None),
]
REMOTE = [
    ("10.0.0.5", 80),
    ("0.0.0.0", 80),
    ("2001:db8::1", 80),
    ("::ffff:10.0.0.5", 80),
    ("testserver", 80),
]


@pytest.mark.parametrize("server", LOCAL)
async def test_its_own_machine_is_served(server: Any) -> None:
    """Connections to a loopback address or a unix socket are served."""
    assert (await ask(service_of(), "/progress", server=server)).status == 200


@pytest.mark.parametrize("server", REMOTE)
async def test_other_machines_get_the_bare_state(server: Any) -> None:
    """Remote clients get no more, unless the operator allows it; a refusal does not wait for the
    step.
    """
    plain, allowed = service_of(), service_of(allow_remote=True)
    for path in ("/progress", "/steps/9", "/", "/page.js"):
        reply = await ask(plain, path, server=server)
        assert (reply.status, reply.json["error"]) == (403, "not_local")
    health = await ask(plain, "/health", server=server)
    assert (health.status, health.json) == (200, {"state": "starting"})
    assert (await ask(plain, "/ready", server=server)).status == 503
    assert (await ask(allowed, "/progress", server=server)).status == 200


FORWARDED: list[tuple[dict[str, str], Any, str]] = [
    ({"X-Forwarded-For": "203.0.113.9"}, LOCAL[0], "x-forwarded-for"),
    ({"x-forwarded-host": "example.com"}, LOCAL[0], "x-forwarded-host"),
    ({"forwarded": "for=203.0.113.9"}, LOCAL[0], "forwarded"),
    ({"x-real-ip": "203.0.113.9"}, LOCAL[0], "x-real-ip"),
    ({"via": "1.1 nginx"}, ("/run/x.sock", None), "via"),
    ({"cf-connecting-ip": "203.0.113.9"}, LOCAL[0], "cf-connecting-ip"),
    ({"x-forwarded-for": "testclient", "host": "localhost"}, ("testserver", 80), "x-forwarded-for"),
    ({}, LOCAL[0], "the client's address is 203.0.113.9"),
    ({}, REMOTE[0], "the server's address is 10.0.0.5"),
]


@pytest.mark.parametrize(("headers", "server", "says"), FORWARDED)
async def test_a_client_behind_a_proxy_is_not_local(
    headers: dict[str, str], server: Any, says: str
) -> None:
    """A request that was forwarded, also by a proxy on this machine, is a remote one: the refusal
    says by what it is known.
    """
    client = ("127.0.0.1" if headers else "203.0.113.9", 50_000)
    async with AsyncMonitoredSession(step) as session:
        service = SessionService(session, controls=True)
        allowed = SessionService(session, controls=True, allow_remote=True)
        for path, method in (
            ("/progress", "GET"),
            ("/steps/0", "GET"),
            ("/", "GET"),
            ("/drain", "POST"),
        ):
            refused = await ask(
                service, path, method=method, headers=headers, server=server, client=client
            )
            assert (refused.status, refused.json["error"]) == (403, "not_local")
            assert says in refused.json["message"].lower()
        health = await ask(service, "/health", headers=headers, server=server, client=client)
        assert (health.status, health.json) == (200, {"state": "running"})
        drained = await ask(
            allowed, "/drain", method="POST", headers=headers, server=server, client=client
        )
        assert drained.json["state"] == "draining"


@pytest.mark.parametrize(
    "base_url", ["http://testserver", "http://localhost", "http://127.0.0.1:8000"]
)
def test_the_test_client_of_starlette_is_served(base_url: str) -> None:
    """Its host and its client are no addresses, and are those of this machine; a name that others
    claim is not.
    """
    with TestClient(make_service(FeedQueue(), controls=True), base_url=base_url) as client:
        for path in ("health", "progress", "steps/0", ""):
            assert client.get(f"/{path}").status_code == 200
        assert client.post("/drain").json()["state"] == "draining"
        assert client.get("/progress", headers={"x-forwarded-for": "10.0.0.5"}).status_code == 403


async def test_websockets_are_closed() -> None:
    """A websocket is closed before it is accepted."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await service_of()({"type": "websocket", "path": "/steps/9", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_the_page_has_nothing_of_the_session_in_it() -> None:
    """Page, style and script are the same for every session, and refer to no other server."""
    service = service_of(name="<script>alert(1)</script>")
    page, style, script = [await ask(service, path) for path in ("/", "/page.css", "/page.js")]
    kinds = [reply.headers["content-type"] for reply in (page, style, script)]
    assert kinds == [f"text/{kind}; charset=utf-8" for kind in ("html", "css", "javascript")]
    assert b"alert" not in page.body
    assert b"style=" not in page.body
    assert page.body.count(b"<script") == 1
    for reply in (page, style):
        assert b"//" not in reply.body
    assert b"http" not in script.body
    assert b"innerHTML" not in script.body


SPECIAL = [*"\n\r\x00\u202e\u2028\x85\ud800\U000e0001<>&'\"\\é漢", "\x1b[31m"]


def test_safe_text_is_one_printable_line() -> None:
    """Any text becomes one printable line of limited length; only its beginning is searched."""
    for seed in range(500):
        order = random.Random(seed)
        text = "".join(
            order.choice([*SPECIAL, *string.ascii_letters]) for _ in range(order.randint(0, 1000))
        )
        shown = safe_text(text, 200)
        assert shown.isprintable()
        assert len(shown) <= 200
        assert len(shown.splitlines()) <= 1
    assert safe_text("://" + "a" * 10_000_000, 50) == "://" + "a" * 44 + "..."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, é and 漢", "plain text, é and 漢"),
        ("at Hang.run (/srv/a b/train.py:7), in wait (C:\\lib\\x.py:213)", "at Hang.run, in wait"),
        ("no answer (10.0.0.1:6379)", "no answer (10.0.0.1:6379)"),
        ("redis://user:hunter2@db:6379/0 is away", "redis://***@db:6379/0 is away"),
        ("postgresql+asyncpg://u:p%40ss@h/d", "postgresql+asyncpg://***@h/d"),
        ("connect(password='hunter2', user='me')", "connect(password=***, user='me')"),
        ("{'api_key': 'hunter2'}", "{'api_key': ***}"),
        ("AWS_SECRET_ACCESS_KEY=hunter2 is wrong", "AWS_SECRET_ACCESS_KEY=*** is wrong"),
        ("Authorization: Bearer hunter2", "Authorization: ***"),
        ("https://h/p?access_token=hunter2&x=1", "https://h/p?access_token=***&x=1"),
        ("https://example.com/a@b is fine", "https://example.com/a@b is fine"),
        ("a\nb\x1b\u202e\ud800", "a\\nb\\x1b\\u202e\\ud800"),
    ],
)
def test_passwords_are_left_out(text: str, shown: str) -> None:
    """User info of URLs, and values of names such as `password`, are replaced; the rest stays
    readable.
    """
    assert safe_text(text) == shown


def test_an_error_is_shown_as_class_and_message() -> None:
    """Neither traceback nor cause is shown; an error whose `__str__` fails is shown too."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert safe_error(OSError("no\npaper")) == "OSError: no\\npaper"
    assert safe_error(OSError()) == "OSError"
    assert safe_error(MuteError()) == "MuteError: <MuteError, whose str raises RuntimeError>"


async def test_a_control_stops_the_session() -> None:
    """Only where it is allowed, by POST, from the same origin."""
    async with AsyncMonitoredSession(step) as session:
        service = SessionService(session, controls=True)
        mine = {"host": "localhost"}
        foreign = {**mine, "origin": "http://evil.com"}
        for path in ("/stop", "/drain"):
            assert (await ask(service, path, method="POST", headers=foreign)).status == 403
            get = await ask(service, path, headers=mine)
            assert (get.status, get.headers["allow"]) == (405, "POST")
            assert (await ask(SessionService(session), path, method="POST")).status == 405
        assert (session.stop_reason, session.drain_reason) == (None, None)
        stopped = await ask(service, "/stop", method="POST", headers=mine)
        assert (stopped.status, stopped.json["state"]) == (200, "stopping")
        assert session.stop_reason == "a client asked for a stop"
        assert is_protected(stopped)


async def test_a_paused_session_is_healthy_and_not_ready() -> None:
    """A pause, which the program makes, is in the reports with its reason."""
    async with AsyncMonitoredSession(step) as session:
        service = SessionService(session)
        session.pause("maintenance")
        assert (await ask(service, "/health")).status == 200
        ready = await ask(service, "/ready")
        assert (ready.status, ready.json["state"]) == (503, "paused")
        assert ready.json["pause_reason"] == "maintenance"
        session.resume()
        assert (await ask(service, "/ready")).status == 200


@pytest.mark.parametrize("drain_secs", [None, 30.0])
async def test_a_control_drains_the_session(drain_secs: float | None, clock: ManualClock) -> None:
    """It is healthy and not ready, finishes what it has, and has ended then; its time is that of
    the service.
    """
    queue = asyncio.Queue[float]()
    async with AsyncMonitoredSession(step) as session:
        service = SessionService(session, controls=True, drain_secs=drain_secs)
        drained = await ask(service, "/drain", method="POST")
        assert (drained.status, drained.json["state"]) == (200, "draining")
        assert (await ask(service, "/drain", method="POST")).status == 200
        assert clock.pending == (drain_secs is not None)
        assert session.drain_reason == "a client asked for a drain"
        ready = await ask(service, "/ready")
        assert ((await ask(service, "/health")).status, ready.status) == (200, 503)
        assert ready.json["drain_reason"] == "a client asked for a drain"
        assert (await ask(service, "/progress")).json["state"] == "draining"
        queue.put_nowait(1.0)
        assert [value async for value in session.steps("loss", feeds=queue)] == [1.0]
        assert service.health().state == "stopping"
    assert clock.pending == 0
    health = service.health()
    assert (health.state, health.stop_reason) == ("finished", "a client asked for a drain")
