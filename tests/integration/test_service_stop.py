"""SIGTERM to a service while clients wait: three phases of its session's life on each server.

All phases, with many clients, are in the command: `python -m tests.fuzz.service_stop --clients
2000`.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz import service_stop
from tests.fuzz._stopped_service import EARLIER, FAILED, SERVERS, SIGTERM
from tests.support.waiting import HANG_SECS

REPLY = b'HTTP/1.1 %d ?\r\nserver: one\r\n\r\n{"error":"stopped","message":"%s"}'


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("phase", ["waiting for the chief", "restoring", "saving"])
def test_all_clients_get_the_reason(server: str, phase: str) -> None:
    """Clients that wait for a step get the reason, and the server waits for no limit."""
    stop = asyncio.run(service_stop.stop_service(server, phase, 50, HANG_SECS))
    assert stop.violations == []


@pytest.mark.slow
@pytest.mark.parametrize("server", SERVERS)
def test_what_a_client_costs(server: str) -> None:
    """A client that waits costs less than 200 KiB of memory."""
    stop = asyncio.run(service_stop.stop_service(server, "saving", 50, HANG_SECS, memory=True))
    assert stop.violations == []
    assert 1 < stop.client_bytes / 1024 < 200


@pytest.mark.parametrize(
    ("answer", "reason", "right"),
    [
        (REPLY % (410, SIGTERM.encode()), SIGTERM, True),
        (REPLY % (410, SIGTERM.encode()), EARLIER, False),
        (REPLY % (503, FAILED.encode()), FAILED, True),
        (ConnectionResetError(), SIGTERM, False),
    ],
)
def test_an_answer_without_the_reason_is_found(
    answer: bytes | Exception, reason: str, right: bool
) -> None:
    """Another status, another reason, and a connection without an answer are violations."""
    assert service_stop.has_reason(answer, reason) is right
