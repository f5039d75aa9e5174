"""The script of the Redis store against `RunState`: both get the same requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiohooks.stores._protocol import Answer, Join, Lead, Leave, Member, Position, Request, Snapshot, Write
from aiohooks.stores._run_state import RunState
from aiohooks.stores.redis._script import SCRIPT, Keys, parse_answer, parse_snapshot, script_arguments
from tests.support.redis_servers import KINDS, server_of
from tests.support.run_requests import REQUESTS


class Scripted:
    """A run in a server, with requests sent as the store sends them."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys = Keys("a {strange} name%")
        client.flushall()

    def _call(self, *arguments: str | int, keep_ms: str = "") -> object:
        keys = self.keys.all
        # As the store encodes them: text that is not UTF-8 reaches the server as well.
        rest = [str(one).encode(errors="backslashreplace") for one in (arguments[0], keep_ms, *arguments[1:])]
        return self.client.eval(SCRIPT, len(keys), *keys, *rest)

    def apply(self, request: Request, keep_ms: str = "") -> Answer:
        """Return the answer to a request."""
        return parse_answer(self._call(*script_arguments(request), keep_ms=keep_ms))

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the run."""
        return parse_snapshot(self._call("read"), "another process")[0]


@pytest.fixture(scope="module", params=KINDS or ["valkey"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    for server in server_of(request.param, tmp_path_factory.mktemp("script")):
        with redis.Redis(port=server.port) as client:
            yield client


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(REQUESTS, max_size=25))
def test_the_script_does_what_the_state_does(client: redis.Redis, requests: list[Request]) -> None:
    """Each answer is the same, and so is the snapshot after it."""
    state, scripted = RunState(), Scripted(client)
    for request in requests:
        assert scripted.apply(request) == state.apply(request), request
        assert scripted.snapshot()._replace(expires_secs=None) == state.snapshot(), request


def test_reading_removes_expired_members(client: redis.Redis) -> None:
    """A member that is not renewed leaves as lost, at the step of the run; others stay."""
    scripted = Scripted(client)
    scripted.apply(Write("advance", 7, Position(1, 0), 0, "w", 1))
    scripted.apply(Join(Member("p/1", "short", 0.001)))
    scripted.apply(Join(Member("q/1", "long", 60.0)))
    while len((snapshot := scripted.snapshot()).members) == 2:
        pass
    assert [member.name for member in snapshot.members] == ["long"]
    assert snapshot.last_exit is not None
    assert (snapshot.last_exit.name, snapshot.last_exit.step, snapshot.last_exit.lost) == ("short", 7, True)
    assert snapshot.expires_secs == pytest.approx(60.0, abs=30.0)


def test_an_expired_chief_does_not_keep_the_lead(client: redis.Redis) -> None:
    """A request for the lead after the chief's lease has expired is granted, without a read before it."""
    scripted = Scripted(client)
    assert scripted.apply(Lead(Member("p/1", "first", 0.001))).term == 1
    while (answer := scripted.apply(Lead(Member("q/1", "second", 60.0)))).status == "busy":
        pass
    assert (answer.status, answer.term) == ("ok", 2)


def test_own_leases_do_not_expire(client: redis.Redis) -> None:
    """A process renews its own leases, and need not read the run when they end."""
    scripted = Scripted(client)
    scripted.apply(Join(Member("p/1", "mine", 60.0)))
    reply = scripted._call("read")
    assert parse_snapshot(reply, "p")[0].expires_secs is None
    assert parse_snapshot(reply, "q")[0].expires_secs is not None


def test_the_longest_silent_writers_are_forgotten_first(client: redis.Redis) -> None:
    """At least 1,024 writers are remembered: a repeated write of one of them is not applied again."""
    scripted = Scripted(client)
    for number in range(1, 1_400):
        scripted.apply(Write("advance", 1, Position(1, 0), 0, f"w{number}", 1))
    remembered = client.hlen(scripted.keys.all[-1])
    assert 1_024 <= remembered <= 1_280
    assert scripted.apply(Write("advance", 1, Position(1, 0), 0, "w1399", 1)).position == Position(1, 1_399)
    assert scripted.apply(Write("advance", 1, Position(1, 0), 0, "w500", 1)).position == Position(1, 500)
    assert scripted.snapshot().position == Position(1, 1_399)


def test_all_keys_of_a_run_are_on_one_node() -> None:
    """The part in braces is the same in all keys, also where the name of the run has braces."""
    for run in ("default", "a}b", "{", "}{x}", "100%"):
        keys = Keys(run)
        tags = {key[key.index("{") + 1 : key.index("}")] for key in (*keys.all, keys.wake("host:1:ab"))}
        assert len(tags) == 1
        assert all(tags)
    assert Keys("a}").positions != Keys("a%7D").positions


def test_expiry_of_the_keys(client: redis.Redis) -> None:
    """With a time to keep the run, each request gives every key a time to live."""
    scripted = Scripted(client)
    for request in (Join(Member("p/1", "one", 60.0)), Write("advance", 1, Position(1, 0), 0, "w", 1), Leave("p/1", "one", 1)):
        scripted.apply(request, keep_ms="60000")
    for key in scripted.keys.all:
        assert not client.exists(key) or 0 < client.pttl(key) <= 60_000
