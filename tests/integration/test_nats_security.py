"""Security of the NATS store: TLS with real certificates, users, tokens, keys, rights; refusals have a type."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aiohooks.errors import InvalidArgumentError, StoreRefusedError, StoreUnavailableError
from aiohooks.stores.nats import NatsStepStore
from tests.support.store_servers import Server, running
from tests.support.waiting import HANG_SECS, until_true

pytestmark = pytest.mark.usefixtures("streams")


def tls_options(folder: Path, name: str = "numeric") -> list[str]:
    return ["--tls", "--tlscert", str(folder / f"{name}.crt"), "--tlskey", str(folder / f"{name}.key")]


def store_of(server: Server, scheme: str = "nats", user: str = "", **options: Any) -> NatsStepStore:
    return NatsStepStore(f"{scheme}://{user}127.0.0.1:{server.port}", **{"connect_timeout": HANG_SECS, **options})


async def works(store: NatsStepStore) -> None:
    async with store:
        assert await store.advance() >= 1


async def refused(store: NatsStepStore, why: str) -> StoreUnavailableError:
    """Return the refusal, which comes long before the time for connecting is up."""
    store._connect_timeout = 3600.0
    with pytest.raises(StoreUnavailableError, match=why) as caught:
        await store.__aenter__()
    await store.aclose()
    return caught.value


@contextmanager
def configured(directory: Path, text: str) -> Iterator[Server]:
    """Run a server with a configuration file."""
    file = directory / "nats.conf"
    file.write_text(text, encoding="utf-8")
    with running("nats", directory, ["-c", str(file)]) as server:
        yield server


async def test_tls_with_a_private_authority(tmp_path: Path, certificates: Path) -> None:
    """TLS works with the given authority; without it, by another name, and when it has expired, the server is not trusted."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    with running("nats", tmp_path, [*tls_options(certificates), "--user", "us", "--pass", "a@b"]) as server:
        await works(store_of(server, "tls", tls=context, user="us:a%40b@"))
        await works(NatsStepStore(f"nats://localhost:{server.port}", tls=context, user="us", password="a@b"))
        for scheme in ("tls", "nats"):
            await refused(store_of(server, scheme, user="us:a%40b@"), "certificate .* is not trusted")
        elsewhere = store_of(server, "tls", tls=context, tls_hostname="elsewhere", user="us:a%40b@")
        await refused(elsewhere, "give a name that is in it")
        await refused(store_of(server, "tls", tls=context, user="us:wrong@"), "refuses the user")
    with running("nats", tmp_path, tls_options(certificates, "expired")) as server:
        await refused(store_of(server, "tls", tls=context), "it has expired; renew it on the server")


@asynccontextmanager
async def answering(info: str) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a server that says this of itself, and answers pings; yield its port, and what it is sent."""
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f'INFO {{"server_id":"x","headers":true,"max_payload":1048576,{info}}}\r\n'.encode())
        while line := await reader.readline():
            got.append(line)
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield listener.sockets[0].getsockname()[1], got
    listener.close()
    await listener.wait_closed()


async def test_no_password_goes_to_a_server_without_tls() -> None:
    """With TLS required, a server that offers none is sent nothing: an attacker may have removed the offer."""
    async with answering('"version":"2.15.1","auth_required":true') as (port, got):
        for scheme, tls in (("tls", None), ("nats", ssl.create_default_context())):
            await refused(NatsStepStore(f"{scheme}://us:secret@127.0.0.1:{port}", tls=tls), "does not offer TLS")
    assert got == []


async def test_a_server_that_is_too_old() -> None:
    """The version is checked before anything else."""
    async with answering('"version":"2.8.4","jetstream":true') as (port, _):
        await refused(NatsStepStore(f"nats://127.0.0.1:{port}"), r"v2.8.4>; NatsStepStore needs 2.9")


async def test_a_user_a_token_and_a_key(tmp_path: Path) -> None:
    """Credentials in the URL and in options work; wrong ones are refused immediately, without a secret in the message."""
    with running("nats", tmp_path, ["--user", "us", "--pass", "secret"]) as server:
        await works(store_of(server, user="us:secret@"))
        await works(store_of(server, user="us:old@", password="secret"))
        for store in (store_of(server), store_of(server, user="us:guessed@"), store_of(server, user="guessed@")):
            error = await refused(store, "refuses the user .*Authorization Violation.*user= and password=")
            assert "guessed" not in str(error)
    with running("nats", tmp_path, ["--auth", "the-token"]) as server:
        await works(store_of(server, user="the-token@"))
        await works(store_of(server, token="the-token"))
        await refused(store_of(server, token="guessed"), "refuses the user")


async def test_nkeys(tmp_path: Path) -> None:
    """A user with a key, whose seed is read from a file."""
    import nkeys

    seed = nkeys.encode_seed(b"0123456789abcdef0123456789abcdef", nkeys.PREFIX_BYTE_USER)
    (tmp_path / "seed").write_bytes(seed)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    with configured(tmp_path, f'authorization: {{ users: [ {{ nkey: "{public}" }} ] }}') as server:
        await works(store_of(server, nkeys_seed=tmp_path / "seed"))
        await refused(store_of(server), "refuses the user")


NEWS, INBOX, ELECTIONS = "AIOHOOKS.news.mine", "_INBOX.>", "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.AIOHOOKS"


def rights(user: str, *subscribe: str) -> str:
    """Return a user with the right to publish of the page, and these subscriptions."""
    publish = '"AIOHOOKS.run.mine", "$JS.API.STREAM.INFO.AIOHOOKS", "$JS.API.STREAM.MSG.GET.AIOHOOKS"'
    allowed = ", ".join(f'"{one}"' for one in subscribe)
    return f"{{ user: {user}, password: w, permissions: {{ publish: [ {publish} ], subscribe: [ {allowed} ] }} }}"


async def test_the_rights_of_the_page(tmp_path: Path) -> None:
    """A worker needs the rights of the page and no more: not those to create the stream, or for other runs."""
    users = [
        "{ user: admin, password: a }",
        rights("worker", NEWS, INBOX, ELECTIONS),
        rights("no_subscription", INBOX),
        rights("no_elections", NEWS, INBOX),
    ]
    with configured(tmp_path, f"authorization: {{ users: [ {', '.join(users)} ] }}") as server:
        await refused(store_of(server, user="worker:w@", run="mine"), "does not allow it")  # there is no stream yet
        await works(store_of(server, user="admin:a@", run="mine"))
        async with store_of(server, user="worker:w@", run="mine") as a, store_of(server, user="admin:a@", run="mine") as b:
            wait = asyncio.ensure_future(a.wait_for(5))
            with b.publisher("trainer"):
                await b.raise_to(5)
                assert await wait == 5
            assert await a.advance() == 6
        await works(store_of(server, user="no_elections:w@", run="mine"))
        await refused(store_of(server, user="no_subscription:w@", run="mine"), "does not allow it .*violation for subscription")
        await refused(store_of(server, user="worker:w@", run="another"), "does not allow it")


async def test_a_server_without_jetstream(tmp_path: Path) -> None:
    """JetStream that is not enabled, for the server or the account, is refused immediately."""
    server = Server("nats", tmp_path)
    server._command = [server._command[0], "-a", "127.0.0.1", "-p", str(server.port)]
    server.start()
    try:
        await refused(store_of(server), "no JetStream; start it with `nats-server -js")
    finally:
        server.kill()
    accounts = "accounts: { A: { users: [ {user: a, password: a} ] }, SYS: {} }\nsystem_account: SYS"
    with configured(tmp_path, accounts) as server:
        await refused(store_of(server, user="a:a@"), "JetStream")


@pytest.mark.parametrize(
    ("user", "denied", "opens"),
    [
        ("no_jetstream", 'publish: { deny: ["$JS.>"] }', False),
        ("no_reading", 'publish: { deny: ["$JS.API.STREAM.MSG.GET.>"] }', False),
        ("no_writing", 'publish: { deny: ["AIOHOOKS.run.>"] }', True),
        ("no_replies", 'subscribe: { deny: ["_INBOX.>"] }', False),
    ],
)
async def test_a_missing_right(tmp_path: Path, user: str, denied: str, opens: bool) -> None:
    """It ends the opening, or the first write, with the subject and what to do."""
    users = f"{{ user: admin, password: a }}, {{ user: {user}, password: w, permissions: {{ {denied} }} }}"
    with configured(tmp_path, f"authorization: {{ users: [ {users} ] }}") as server:
        await works(store_of(server, user="admin:a@"))
        store = store_of(server, user=f"{user}:w@")
        if opens:
            async with store:
                with pytest.raises(StoreRefusedError, match=r"aiohooks\.run\..*rights in docs/guides/engine-nats.md"):
                    await store.advance()
        else:
            await refused(store, "permissions violation .* give the user the rights in docs/guides/engine-nats.md")


@asynccontextmanager
async def nearly_full(folder: Path) -> AsyncIterator[tuple[Server, Callable[[], Awaitable[None]], Callable[[], Awaitable[Any]]]]:
    """Start a server; yield it, a function that fills its storage, and one that empties it again."""
    from nats.aio.client import Client

    with configured(folder, "jetstream { max_file_store: 4096 }") as server:
        client = Client()
        await client.connect(server.url)
        await client.jetstream().add_stream(name="FILL", subjects=["fill"])

        async def fill() -> None:
            while b"error" not in (await client.request("fill", b"x" * 400)).data:
                pass

        yield server, fill, partial(client.jetstream().delete_stream, "FILL")
        await client.close()


async def test_a_full_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as away, which the log says once: writes wait until there is room, each counts once, and no lease ends."""
    async with (
        nearly_full(tmp_path) as (server, fill, empty),
        store_of(server, lease_secs=0.4) as trainer,
        store_of(server, lease_secs=0.4) as waiter,
    ):
        with trainer.publisher("trainer"):
            assert await trainer.advance() == 1
            wait = asyncio.ensure_future(waiter.wait_for(2))
            await fill()
            advance = asyncio.ensure_future(trainer.advance())
            await until_true(lambda: (waiter.outage_secs or 0.0) > 1.2 and (trainer.outage_secs or 0.0) > 1.2)
            assert "its storage is full; give it more (max_file_store)" in caplog.text
            await empty()
            assert await advance == await wait == 2
    assert caplog.text.count("the connection is lost") == 2, "one line of each"


async def test_a_server_that_remains_full(tmp_path: Path) -> None:
    """A write fails after `max_outage_secs`, although the server can be read all the time."""
    async with nearly_full(tmp_path) as (server, fill, _), store_of(server, max_outage_secs=0.3) as store:
        assert await store.advance() == 1
        await fill()
        with pytest.raises(StoreUnavailableError, match=r"no connection for 0.3 s"):
            await store.advance()


async def test_a_foreign_stream(tmp_path: Path) -> None:
    """A stream of that name with another purpose is refused, and not changed."""
    from nats.aio.client import Client

    with running("nats", tmp_path) as server:
        client = Client()
        await client.connect(server.url)
        await client.jetstream().add_stream(name="AIOHOOKS", subjects=["orders.*"])
        await client.close()
        await refused(store_of(server), r"not one for step stores: its subjects is \['orders")
        await refused(store_of(server, stream="STEPS", replicas=3), "replicas")
        await works(store_of(server, stream="STEPS"))


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("redis://x", {}, "begins with nats:// or tls://"),
        ("nats://", {}, "begins with nats://"),
        ("nats://host:port", {}, "port that is no number"),
        ("nats://u:secret@:4222", {}, "user:password@host:port"),
        ("nats://host/path", {}, "user:password@host:port"),
        ("nats://host", {"stream": "a.b"}, "letters, digits"),
        ("nats://host", {"replicas": 2}, "give 1, 3 or 5"),
        ("nats://host", {"tls": True}, "SSLContext"),
        ("nats://host", {"forget_after_secs": 0}, "above 0"),
        ("nats://host", {"forget_after_secs": 1e-3}, "forget_after_secs is 0.001; give no less than lease_secs, which is 10 s"),
        ("nats://host", {"heartbeat": -1}, "above 0"),
        ("nats://host", {"run": "x" * 600}, "too long"),
    ],
)
def test_invalid_arguments(url: str, options: dict[str, Any], why: str) -> None:
    """They are refused when the store is created, without the secrets in them."""
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        NatsStepStore(url, **options)
    assert "secret" not in str(caught.value)
