"""The hostile client program with a small count, over real sockets, and the weaknesses that it must
find.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from aiohooks.adapters.asgi import _report, app
from aiohooks.adapters.asgi._access import AccessPolicy
from tests.fuzz import hostile_http

pytestmark = pytest.mark.slow


@pytest.mark.sample
def test_hostile_requests_do_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    """No reply is a server error or contains a secret, no client leaves anything behind, and the
    session is not disturbed.
    """
    assert hostile_http.main(["--requests", "390", "--seed", "7"]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert out.startswith("390 hostile requests (32 broken, ")
    assert "; 0 violations; " in out


async def _ignore_disconnect(receive: _report.Receive) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("owner", "name", "weaker", "found"),
    [
        (_report, "_wait_disconnected", _ignore_disconnect, "tasks, waits"),
        (app, "_STEP", re.compile(".*", re.DOTALL), "a bad status"),
        (AccessPolicy, "check_request", lambda self, scope, *, controls: None, "it was served"),
        (app, "safe_text", lambda text, max_length: f"{text} in app.py", ".py is in a reply"),
    ],
    ids=["ignores disconnects", "accepts any step", "serves any host", "shows its source files"],
)
def test_a_weakness_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, weaker: Any, found: str
) -> None:
    """A service without one of its protections is reported."""
    monkeypatch.setattr(owner, name, weaker)
    monkeypatch.setattr(hostile_http, "HANG_SECS", 2)
    report = hostile_http.attack(195, 7)
    assert any(found in one for one in report.violations), report
