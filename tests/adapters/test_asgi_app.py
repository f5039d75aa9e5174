"""The service as an ASGI application: its arguments, and its place in other applications."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from aiohooks import AsyncMonitoredSession
from aiohooks.adapters.asgi import SessionService
from aiohooks.errors import InvalidArgumentError, SessionClosedError
from tests.support.pages import python_blocks
from tests.support.services import step
from tests.support.source import ROOT


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 5} for name in ("session", "run")),
        *({"allowed_hosts": [host]} for host in ("*.example.com", "example.com:80")),
        {"grace_secs": -1},
        {"drain_secs": -1},
    ],
    ids=lambda wrong: "-".join(f"{name}={value}"[:30] for name, value in wrong.items()),
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """The error names the argument and what to give."""
    arguments: dict[str, Any] = {"session": AsyncMonitoredSession(step), **wrong}
    with pytest.raises(InvalidArgumentError, match="give"):
        SessionService(**arguments)


@pytest.mark.parametrize("page", ["fastapi", "services"])
def test_the_application_of_a_guide_is_made_for_each_server(page: str) -> None:
    """Its function makes as many as are needed; one that is entered again says so."""
    make_app = program_of(page)["make_app"]
    for _ in range(2):
        with TestClient(make_app()) as client:
            assert client.get("/training/steps/0").status_code == 200
    again = pytest.raises(SessionClosedError, match=r"was started before.* in a function")
    with again, client:
        pass


def test_the_application_of_the_guide_takes_nothing_after_a_failure() -> None:
    """A value for a session that has failed is refused with 503, as no step would use it."""
    with TestClient(program_of("fastapi")["make_app"]()) as client:
        assert client.post("/values", params={"value": "nan"}).status_code == 202
        assert client.get("/training/steps/9").json()["error"] == "failed"
        refused = client.post("/values", params={"value": 1})
        assert (refused.status_code, client.get("/training/health").status_code) == (503, 503)
        assert refused.json() == {"detail": "the training has ended; /training/health says why"}


def program_of(page: str) -> dict[str, Any]:
    """Run the first block of a guide and return its names."""
    names: dict[str, Any] = {}
    exec(python_blocks(ROOT / f"docs/guides/{page}.md")[0].text, names)
    return names
