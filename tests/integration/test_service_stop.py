"""SIGTERM to a service while clients wait: two phases of its session's life on each server.

All phases, with many clients, are in the command: `python -m tests.fuzz.service_stop --clients 2000`.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz import service_stop
from tests.fuzz._stopped_service import EARLIER, FAILED, PHASES, SERVERS, SIGTERM

REPLY = b'HTTP/1.1 %d ?\r\nserver: one\r\n\r\n{"error":"stopped","message":"%s"}'
STREAM = b'...event: end\ndata: {"stop_reason":"the server received SIGTERM","failure":null}\n\n\r\n0\r\n\r\n'


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("phase", ["waiting for the chief", "saving"])
def test_all_clients_get_the_reason(server: str, phase: str) -> None:
    """Clients that wait for a step and those that follow the events get the reason, and the server ends in time."""
    stop = asyncio.run(service_stop.stop_service(server, phase, 50, memory=phase == "saving"))
    assert stop.violations == []
    assert (1 < stop.client_bytes / 1024 < 200) is (phase == "saving")


@pytest.mark.parametrize(
    ("answer", "reason", "right"),
    [
        (REPLY % (410, SIGTERM.encode()), SIGTERM, True),
        (REPLY % (410, SIGTERM.encode()), EARLIER, False),
        (REPLY % (503, SIGTERM.encode()), SIGTERM, False),
        (REPLY % (503, FAILED.encode()), FAILED, True),
        (b"", SIGTERM, False),
        (ConnectionResetError(), SIGTERM, False),
        (STREAM, SIGTERM, True),
        (STREAM, EARLIER, False),
        (STREAM, FAILED, False),
        (STREAM.removesuffix(b"0\r\n\r\n"), SIGTERM, False),
        (STREAM.replace(b"event: end", b"event: progress"), SIGTERM, False),
    ],
)
def test_an_answer_without_the_reason_is_found(answer: bytes | Exception, reason: str, right: bool) -> None:
    """Another status, another reason, a stream that breaks off, and a connection without an answer are violations."""
    is_stream = isinstance(answer, bytes) and answer.startswith(b"...")
    assert (service_stop.ends_with_reason if is_stream else service_stop.has_reason)(answer, reason) is right
    assert is_stream or service_stop.ends_with_reason(answer, reason) is False


def test_command_fails_on_a_violation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints a line for each phase, and fails if a client got no reason."""

    async def stop(server: str, phase: str, clients: int, *, memory: bool) -> service_stop.Stop:
        return service_stop.Stop(0.1, 0.2, 0.0, [] if phase == "saving" else ["a wait for a step: b''"])

    monkeypatch.setattr(service_stop, "stop_service", stop)
    assert service_stop.main(["--phases", "saving"]) == 0
    assert service_stop.main([]) == 1
    assert capsys.readouterr().out.count("a wait for a step: b''") == len(PHASES) - 1
