"""Security of the Redis store: TLS with real certificates, and the rights that its page lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiohooks.errors import StoreRefusedError, StoreUnavailableError
from aiohooks.stores.redis import RedisStepStore
from aiohooks.testing.step_store import check_step_store, step_store_checks
from tests.support.redis_servers import KINDS
from tests.support.source import ROOT
from tests.support.store_servers import Server, first_stream, running

PAGE = (ROOT / "docs" / "guides" / "engine-redis.md").read_text(encoding="utf-8")
USERS = re.search(r"^user default off\nuser aiohooks .*\n", PAGE, flags=re.MULTILINE)


@pytest.fixture(autouse=True)
async def _stream() -> None:
    await first_stream()


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server with the users of the page."""
    assert USERS is not None, "the page has no users"
    (tmp_path / "users.acl").write_text(USERS[0], encoding="utf-8")
    with running(request.param, tmp_path, ["--aclfile", str(tmp_path / "users.acl")], keeps=False) as one:
        yield one


async def refused(store: RedisStepStore) -> str:
    """Return the message of the refusal, which comes long before the time for connecting is up."""
    with pytest.raises(StoreRefusedError) as raised:
        await store.__aenter__()
    await store.aclose()
    return str(raised.value)


def store_of(server: Server, user: str, run: str = "digits", **options: Any) -> RedisStepStore:
    return RedisStepStore(f"redis://{user}@127.0.0.1:{server.port}", run=run, connect_timeout=3600.0, **options)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_the_rights_of_the_page_are_enough(server: Server) -> None:
    """Every check of a step store passes, and a run can expire."""
    for check in step_store_checks():
        await check_step_store(lambda run: store_of(server, "aiohooks:secret", run), check)
    async with store_of(server, "aiohooks:secret", expire_secs=60) as store:
        with store.publisher("trainer"):
            assert await store.advance() == 1


async def test_other_users_are_refused(server: Server) -> None:
    """A wrong password, none, and an unknown user are refused immediately, with what to do."""
    for user in ("aiohooks:wrong", ":", "unknown:secret"):
        assert "put them in the URL" in await refused(store_of(server, user))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_user_with_the_right_to_one_run(kind: str, tmp_path: Path) -> None:
    """Another run's keys are refused."""
    assert USERS is not None
    (tmp_path / "users.acl").write_text(USERS[0].replace("~aiohooks:*", "~aiohooks:{digits}*"), encoding="utf-8")
    with running(kind, tmp_path, ["--aclfile", str(tmp_path / "users.acl")], keeps=False) as server:
        async with store_of(server, "aiohooks:secret", "digits") as store:
            assert await store.advance() == 1
        assert "ACL SETUSER" in await refused(store_of(server, "aiohooks:secret", "letters"))


@pytest.mark.parametrize("missing", ["evalsha", "eval", "xread", "xadd", "hmget", "hset"])
async def test_each_right_is_needed(tmp_path: Path, missing: str) -> None:
    """Without it the store is refused: while connecting, or at the first request that needs the right."""
    assert USERS is not None
    (tmp_path / "users.acl").write_text(re.sub(rf"\+{missing}\b ?", "", USERS[0]), encoding="utf-8")
    with running("valkey", tmp_path, ["--aclfile", str(tmp_path / "users.acl")], keeps=False) as server:
        store = store_of(server, "aiohooks:secret")
        with pytest.raises(StoreRefusedError, match="ACL SETUSER"):
            await store.advance()
        await store.aclose()


async def test_tls(tmp_path: Path, certificates: Path) -> None:
    """TLS works with the given authority; without it, by another name, or with another authority, the server is refused."""
    files = [f"--tls-{what}-file={certificates / name}" for what, name in (("cert", "server.crt"), ("key", "server.key"))]
    options = ["--port", "0", "--tls-port", "{port}", "--requirepass", "p@ss", "--tls-auth-clients", "no"]
    options += [part for one in files for part in one.split("=")] + ["--tls-ca-cert-file", str(certificates / "ca.crt")]
    with running("redis", tmp_path, options, keeps=False) as server:
        url = f"rediss://:p%40ss@localhost:{server.port}"
        trusted, other = str(certificates / "ca.crt"), str(certificates / "other.crt")
        await check_step_store(lambda run: RedisStepStore(url, run=run, ssl_ca_certs=trusted), "wakes")
        async with RedisStepStore(f"{url}?protocol=3", ssl_ca_certs=trusted) as store:
            assert await store.advance() == 1
        assert "ssl_ca_certs=" in await refused(RedisStepStore(url))
        assert "ssl_ca_certs=" in await refused(RedisStepStore(url, ssl_ca_certs=other))
        assert "give a name that is in it" in await refused(
            RedisStepStore(url.replace("localhost", "127.0.0.1"), ssl_ca_certs=trusted)
        )
        assert "password" in await refused(RedisStepStore(url.replace("p%40ss", "x"), ssl_ca_certs=trusted))
        plain = RedisStepStore(url.replace("rediss", "redis"), connect_timeout=0.1)
        with pytest.raises(StoreUnavailableError, match="rediss://"):
            await plain.__aenter__()
        await plain.aclose()


async def test_an_expired_certificate(tmp_path: Path, certificates: Path) -> None:
    """It is refused immediately; what to do is on the server's side."""
    files = ["--tls-cert-file", str(certificates / "expired.crt"), "--tls-key-file", str(certificates / "expired.key")]
    options = ["--port", "0", "--tls-port", "{port}", *files, "--tls-ca-cert-file", str(certificates / "ca.crt")]
    with running("redis", tmp_path, [*options, "--tls-auth-clients", "no"], keeps=False) as server:
        store = RedisStepStore(f"rediss://localhost:{server.port}", ssl_ca_certs=str(certificates / "ca.crt"))
        assert "it has expired; renew it on the server" in await refused(store)


async def test_tls_with_a_client_certificate(tmp_path: Path, certificates: Path) -> None:
    """A server that requires one gets it; without one it refuses the connection immediately, and the error says what to give."""
    where = {
        what: str(certificates / name) for what, name in (("cert", "server.crt"), ("key", "server.key"), ("ca-cert", "ca.crt"))
    }
    files = [part for what, name in where.items() for part in (f"--tls-{what}-file", name)]
    with running("redis", tmp_path, ["--port", "0", "--tls-port", "{port}", *files], keeps=False) as server:
        url, trusted = f"rediss://localhost:{server.port}", str(certificates / "ca.crt")
        mine: dict[str, Any] = {"ssl_certfile": str(certificates / "client.crt"), "ssl_keyfile": str(certificates / "client.key")}
        async with RedisStepStore(url, ssl_ca_certs=trusted, **mine) as store:
            assert await store.advance() == 1
        assert "ssl_certfile=" in await refused(RedisStepStore(url, ssl_ca_certs=trusted))
