"""The address of a NATS store, and what it refuses before it connects."""

from __future__ import annotations

from typing import Any

import pytest

from aiohooks.errors import StoreRefusedError
from aiohooks.stores.nats import _connection
from aiohooks.stores.nats._connection import parse_address
from aiohooks.stores.nats.store import NatsStepStore, RunSubjects


def test_subjects_and_addresses() -> None:
    """Runs have different subjects; the URL has servers and the user, and its text has no secret."""
    assert RunSubjects("S", "a.b").state == "S.run.a%2Eb"
    assert RunSubjects("S", "a b").republished == "S.news.a%20b"
    address = parse_address("nats://us:p%40ss@h1,h2:5,[::1]:6")
    assert address.servers == ("h1:4222", "h2:5", "[::1]:6")
    assert (address.user, address.password, address.token) == ("us", "p@ss", None)
    assert parse_address("tls://tok@h").token == "tok"
    assert "p@ss" not in f"{address} {address!r}"


async def test_a_client_that_does_not_take_the_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of nats-py that would connect by its own transport, and send a password without TLS, is not used at all."""

    class NewerClient:
        connect: Any = None

    monkeypatch.setattr(_connection, "Client", NewerClient)
    store = NatsStepStore("tls://us:secret@127.0.0.1:1")
    with pytest.raises(StoreRefusedError, match="this version of nats-py cannot be used"):
        await store.__aenter__()
    await store.aclose()
