"""A service among hostile clients, over real sockets: the programme, with a small count, and with what it must find."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aiohooks.adapters import asgi
from aiohooks.adapters.asgi._access import Guard
from aiohooks.adapters.asgi._events import WhileConnected
from tests.fuzz import hostile_http, service_memory
from tests.fuzz._hostile_requests import MAKERS, requests

pytestmark = pytest.mark.slow


def test_no_hostile_request_does_harm(capsys: pytest.CaptureFixture[str]) -> None:
    """No answer is a server error or tells a secret, nothing is left of a client, and the session is not disturbed."""
    assert hostile_http.main(["--requests", "390", "--seed", "7"]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert out.startswith("390 hostile requests (30 broken, 30 follower, ")
    assert "; 0 violations; " in out


def test_a_seed_decides_what_is_sent() -> None:
    """The same seed gives the same requests, of every kind as many."""
    made = requests(len(MAKERS) * 3, 5, ("/",))
    assert made == requests(len(MAKERS) * 3, 5, ("/",))
    assert made != requests(len(MAKERS) * 3, 6, ("/",))
    assert len({one.kind for one in made}) == len(MAKERS)


async def _deaf(self: WhileConnected) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "name", "weaker", "found"),
    [
        (WhileConnected, "_listen", _deaf, "tasks, waiters"),
        (asgi, "_STEP", re.compile(".*", re.DOTALL), "a bad status"),
        (Guard, "refusal", lambda self, scope: None, "it was served"),
        (asgi, "safe_text", lambda text, longest: f"{text} in asgi.py", ".py is in an answer"),
    ],
    ids=["does not hear of leaving", "takes any step", "serves any host", "tells of its code"],
)
def test_the_programme_finds_what_is_weak(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, weaker: Any, found: str
) -> None:
    """A service that lacks a protection is found out."""
    monkeypatch.setattr(owner, name, weaker)
    monkeypatch.setattr(hostile_http, "PATIENCE_SECS", 2)
    report = hostile_http.besiege(195, 7)
    assert any(found in one for one in report.violations), report


def test_what_a_waiter_costs_is_measured() -> None:
    """All waiters of a real server are answered by one advance; each costs some memory, and less than a lot."""
    _, traced_bytes = service_memory.run(50, f"/training/steps/{service_memory.STEP}", traced=True)
    assert 1 < traced_bytes / 1024 < 200
